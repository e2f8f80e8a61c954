"""Maps of brackets: which are for evaluation, how evenly they are drawn, what they refuse."""

import string
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from scipy.stats import chisquare

from smeltscope.errors import SmeltscopeError
from smeltscope.tasks.dyck import CLOSERS, USUAL, Pairing, draw_pairing, sample_prefix
from smeltscope.tasks.dyck.pairing import is_heldout, usual_pairing


def test_closers():
    assert len(CLOSERS) == len(set(CLOSERS)) == 16
    assert CLOSERS.startswith(USUAL.closers)
    forbidden = string.ascii_letters + string.digits + string.whitespace + "'\"`:" + USUAL.openers
    assert not set(CLOSERS) & set(forbidden)
    assert CLOSERS.isascii() and CLOSERS.isprintable()


def test_usual():
    pairs = ["()", "[]", "{}", "<>"]
    assert [o + c for o, c in zip(USUAL.openers, USUAL.closers, strict=True)] == pairs
    assert USUAL.choices == USUAL.closers
    assert usual_pairing(2) == Pairing(openers="([", closers=")]", choices=")]")


def test_read_and_write():
    assert USUAL.read("([]{<>") == (0, 1, ~1, 2, 3, ~3)
    pairing = Pairing(openers="([", closers="?*")
    assert pairing.read(["(", "[", "*"]) == (0, 1, ~1)
    assert pairing.write((0, 1, ~1, ~0)) == ("(", "[", "*", "?")
    word = sample_prefix(np.random.default_rng(0), 41, 3, 4)
    for some in (USUAL, draw_pairing(np.random.default_rng(1), heldout=True)):
        assert some.read(some.write(word)) == word
    with pytest.raises(SmeltscopeError, match=r"Symbol 2 is '\)', no bracket of \(\[ \?\*"):
        pairing.read("()")


def test_maps_are_split_for_good():
    maps = ["".join(p) for p in permutations(CLOSERS, 4)]
    heldout = [is_heldout(closers) for closers in maps]
    assert sum(heldout) == 5429  # of 43,680: one in 8.05
    # Written down: a change would let training see evaluation maps.
    assert [m for m, h in zip(maps, heldout, strict=True) if h][:3] == [")]}+", ")]}@", ")]>!"]
    assert not is_heldout(USUAL.closers)
    for symbol in CLOSERS:  # no symbol gives the split away
        for place in range(4):
            share = np.mean([h for m, h in zip(maps, heldout, strict=True) if m[place] == symbol])
            assert 0.1 < share < 0.15


@pytest.mark.parametrize("heldout", [True, False])
def test_drawn_maps(heldout):
    rng = np.random.default_rng(2)
    drawn = [draw_pairing(rng, heldout=heldout) for _ in range(500)]
    assert {is_heldout(pairing.closers) for pairing in drawn} == {heldout}
    assert {(pairing.openers, pairing.choices) for pairing in drawn} == {(USUAL.openers, CLOSERS)}
    assert len({pairing.closers for pairing in drawn}) > 450


def test_drawn_maps_are_uniform():
    rng = np.random.default_rng(4)
    maps = ["".join(p) for p in permutations(CLOSERS, 2) if is_heldout("".join(p))]
    drawn = Counter(draw_pairing(rng, heldout=True, types=2).closers for _ in range(40 * len(maps)))
    assert set(drawn) == set(maps)
    assert chisquare([drawn[closers] for closers in maps]).pvalue > 0.01


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"openers": "([", "closers": ")"}, "as many closers as openers"),
        ({"openers": "([", "closers": "))"}, "all symbols different"),
        ({"openers": "([", "closers": "(]"}, "all symbols different"),
        ({"openers": "([", "closers": ")x"}, "not all among"),
    ],
)
def test_maps_that_are_none(fields, fault):
    with pytest.raises(SmeltscopeError, match=fault):
        Pairing(**fields)
