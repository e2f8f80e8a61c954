"""Drawn sets: what reveals the pairs, how long they are, what depends on the seed."""

from collections import Counter

import numpy as np
import pytest
from scipy.stats import chisquare

from smeltscope.errors import SmeltscopeError
from smeltscope.tasks.dyck import USUAL, bayes, depths, generate_sets, nested_sets
from smeltscope.tasks.dyck.generate import PAIRINGS, REVEALS
from smeltscope.tasks.dyck.pairing import CLOSERS, is_heldout


def symbols_of(items, part):
    return {symbol for item in items for symbol in getattr(item, f"{part}_symbols")}


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("shots", [0, 1, 2, 5])
def test_answers_reveal(pairing, shots):
    for s in generate_sets(40, shots, 0, pairing=pairing, reveal="answers"):
        needed = set(s.query.answer_symbols)
        assert not needed & symbols_of([s.query, *s.demonstrations], "input")
        if shots:
            assert needed <= symbols_of(s.demonstrations[:2], "answer")
            assert bayes(s, 2)["answers"] == 1


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("shots", [0, 1, 2, 5])
def test_inputs_reveal(pairing, shots):
    for s in generate_sets(40, shots, 0, pairing=pairing, reveal="inputs"):
        needed = set(s.query.answer_symbols)
        assert not needed & set(s.query.input_symbols)
        assert not needed & symbols_of(s.demonstrations, "answer")
        if shots:
            assert needed <= symbols_of(s.demonstrations[:2], "input")
            assert bayes(s, 2)["inputs"] == 1


def test_a_memorised_grammar_fails():
    sets = generate_sets(200, 2, 1, pairing="in-context", reveal="answers")
    usual = [USUAL.write(s.query.answer) == s.query.answer_symbols for s in sets]
    assert np.mean(usual) < 0.1
    chances = [bayes(s, 2) for s in sets]
    assert np.mean([c["inputs"] for c in chances]) < 0.06
    assert np.mean([c["answers"] for c in chances]) == 1


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("reveal", REVEALS)
def test_shapes(pairing, reveal):
    sets = generate_sets(600, 0, 2, pairing=pairing, reveal=reveal)
    answers = Counter(len(s.query.answer) for s in sets)
    expected = np.array([359, 348, 293]) * 0.6
    assert chisquare([answers[n] for n in (1, 2, 3)], expected).pvalue > 0.01
    for answer, lengths in {1: range(5, 16, 2), 2: range(4, 17, 2), 3: range(5, 16, 2)}.items():
        seen = Counter(len(s.query.prefix) for s in sets if len(s.query.answer) == answer)
        assert set(seen) == set(lengths)
        assert chisquare([seen[length] for length in lengths]).pvalue > 0.001
    closers = {s.query.pairing.closers for s in sets}
    assert closers == {USUAL.closers} if pairing == "usual" else len(closers) > 500


def test_queries_are_uniform():
    drawn = Counter(
        s.query.prefix for s in generate_sets(1200, 0, 3, types=2, lengths=(4, 4), max_depth=3)
    )
    # depth 2 after 4 symbols: 3 paths (none above 3), 3 openers of 2 types
    assert len(drawn) == 3 * 2**3
    assert chisquare(list(drawn.values())).pvalue > 0.01


@pytest.mark.parametrize("heldout", [True, False])
def test_maps_of_evaluation_and_of_training(heldout):
    sets = generate_sets(50, 2, 4, pairing="in-context", heldout_maps=heldout)
    assert {is_heldout(s.query.pairing.closers) for s in sets} == {heldout}
    assert {s.query.pairing.choices for s in sets} == {CLOSERS}


@pytest.mark.parametrize("reveal", REVEALS)
def test_sets_depend_on_the_seed_alone(reveal):
    options = {"pairing": "in-context", "reveal": reveal}
    sets = generate_sets(12, 6, 5, **options)
    assert sets == generate_sets(12, 6, 5, **options)
    assert sets != generate_sets(12, 6, 6, **options)
    assert sets[:4] == generate_sets(4, 6, 5, **options)
    fewer = generate_sets(12, 3, 5, **options)
    assert [s.demonstrations[:3] for s in sets] == [s.demonstrations for s in fewer]
    names = [item.name for s in sets for item in (s.query, *s.demonstrations)]
    assert len(set(names)) == len(names)


def test_no_query_among_its_shots():
    for s in generate_sets(60, 8, 6, types=2, lengths=(1, 3)):
        assert s.query.prefix not in {item.prefix for item in s.demonstrations}


def test_depth_is_bounded():
    sets = generate_sets(60, 2, 7, lengths=(30, 40), max_depth=4)
    deepest = [max(depths(i.prefix)) for s in sets for i in (s.query, *s.demonstrations)]
    assert max(deepest) == 4


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"pairing": "incontext"}, "A pairing is usual or in-context, not 'incontext'"),
        ({"reveal": "input"}, "revealed by answers, inputs, both, not by 'input'"),
        ({"types": 5}, "There are 1 to 4 bracket types, not 5"),
        ({"types": 0}, "There are 1 to 4 bracket types, not 0"),
        ({"types": 1, "reveal": "answers"}, "Found no prompts of 2 shots, 1 bracket types"),
        ({"lengths": (1, 1), "types": 1}, "inputs of 1 to 1 symbols where both reveal"),
        ({"lengths": (2, 2), "reveal": "inputs"}, "inputs of 2 to 2 symbols where inputs reveal"),
        ({"lengths": (9, 5)}, "No input of 9 to 5 symbols leaves"),
        ({"lengths": (-3, 0)}, "No input of -3 to 0 symbols leaves"),
        ({"max_depth": 0}, "No input of 4 to 16 symbols and depth 0 leaves"),
    ],
)
def test_what_cannot_be(options, fault):
    with pytest.raises(SmeltscopeError, match=fault):
        generate_sets(3, 2, 0, **options)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("reveal", REVEALS)
def test_nested_sets(pairing, reveal):
    options = {"pairing": pairing, "reveal": reveal}
    sets = nested_sets(30, 8, 0, **options)
    for s in sets:
        items = [s.query, *s.demonstrations]
        assert {len(item.prefix) for item in items} == {7}
        assert {len(item.answer) for item in items} == {3}
        assert s.query.prefix not in {item.prefix for item in s.demonstrations}
        assert bayes(s, 1)["answers"] == 1
        assert is_heldout(s.query.pairing.closers) == (pairing == "in-context")
        if reveal != "inputs":
            assert sorted(s.demonstrations[0].answer_symbols) == sorted(s.query.answer_symbols)
    if reveal != "inputs":
        same_order = np.mean([s.demonstrations[0].answer == s.query.answer for s in sets])
        assert 0 < same_order < 0.7
    assert sets[:5] == nested_sets(5, 8, 0, **options)
    assert [s.demonstrations[:2] for s in sets] == [
        s.demonstrations for s in nested_sets(30, 2, 0, **options)
    ]


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("shots", [1, 2, 8])
def test_answers_reveal_in_nested_sets(pairing, shots):
    for s in nested_sets(40, shots, 0, pairing=pairing, reveal="answers"):
        needed = set(s.query.answer_symbols)
        assert not needed & symbols_of([s.query, *s.demonstrations], "input")
        assert needed <= symbols_of(s.demonstrations[:1], "answer")


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("shots", [1, 2, 8])
def test_inputs_reveal_in_nested_sets(pairing, shots):
    for s in nested_sets(40, shots, 0, pairing=pairing, reveal="inputs"):
        needed = set(s.query.answer_symbols)
        assert not needed & set(s.query.input_symbols)
        assert not needed & symbols_of(s.demonstrations, "answer")
        assert needed <= symbols_of(s.demonstrations[:1], "input")
        assert bayes(s, 1)["inputs"] == 1
    with pytest.raises(SmeltscopeError, match="revealed by answers, inputs, both, not by 'input'"):
        nested_sets(3, shots, 0, pairing=pairing, reveal="input")
