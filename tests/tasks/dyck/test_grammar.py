"""Counting and drawing against all words listed one by one, the stack against rewriting of text."""

import math
import re
from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from smeltscope.errors import SmeltscopeError
from smeltscope.tasks.dyck import (
    branching_word,
    completion,
    count_prefixes,
    count_words,
    depths,
    matches,
    sample_prefix,
    sample_word,
    stack_tops,
    top_positions,
)
from smeltscope.tasks.dyck.grammar import paint

OPEN, CLOSE = "([{<", ")]}>"
CATALAN = [1, 1, 2, 5, 14, 42, 132, 429, 1430]


def text(word):
    return "".join(OPEN[s] if s >= 0 else CLOSE[~s] for s in word)


def rest(word):
    """What is left of a word when pairs that touch are struck out until there is none."""
    left, before = text(word), None
    while left != before:
        left, before = re.sub(r"\(\)|\[\]|\{\}|<>", "", left), left
    return left


def listed(symbols, depth, types, max_depth=None):
    """All words, the slow way: every string, of which the good ones are kept."""
    alphabet = [*range(types), *(~t for t in range(types))]
    for word in product(alphabet, repeat=symbols):
        left = [rest(word[:n]) for n in range(1, symbols + 1)]
        if any(set(part) & set(CLOSE) for part in left):
            continue
        deepest = max(map(len, left), default=0)
        if len(rest(word)) == depth and (max_depth is None or deepest <= max_depth):
            yield word


@pytest.mark.parametrize("types", [1, 2, 4])
def test_counts_are_catalan_numbers(types):
    for pairs, catalan in enumerate(CATALAN):
        assert count_words(pairs, types) == catalan * types**pairs
        assert count_words(pairs, types, max_depth=max(pairs, 1)) == catalan * types**pairs
    assert count_words(2, 4) == 32
    assert count_words(400, 3) == math.comb(800, 400) // 401 * 3**400  # exact, far over 2**64


def test_bounded_counts():
    for pairs in range(1, 12):
        assert count_words(pairs, 2, max_depth=1) == 2**pairs
        assert count_words(pairs, 1, max_depth=2) == 2 ** (pairs - 1)
    fibonacci = [1, 2, 5, 13, 34, 89, 233]  # every other one: words within depth 3
    assert [count_words(n, 1, max_depth=3) for n in range(1, 8)] == fibonacci


@pytest.mark.parametrize(
    ("symbols", "depth", "types", "max_depth"),
    [(0, 0, 1, None), (6, 0, 2, None), (6, 0, 2, 2), (5, 1, 2, None), (7, 3, 1, 3), (4, 4, 3, 3)],
)
def test_counts_against_the_list(symbols, depth, types, max_depth):
    words = list(listed(symbols, depth, types, max_depth))
    assert count_prefixes(symbols, depth, types, max_depth) == len(words)


@pytest.mark.parametrize(
    ("symbols", "depth", "types", "max_depth"),
    [(6, 0, 2, None), (6, 0, 2, 2), (5, 1, 2, None), (6, 2, 1, 3), (3, 3, 3, None)],
)
def test_drawn_words_are_uniform(symbols, depth, types, max_depth):
    words = list(listed(symbols, depth, types, max_depth))
    rng = np.random.default_rng(7)
    drawn = Counter(
        sample_prefix(rng, symbols, depth, types, max_depth) for _ in range(40 * len(words))
    )
    assert set(drawn) == set(words)
    assert chisquare([drawn[word] for word in words]).pvalue > 0.01


def test_a_long_word():
    word = sample_word(np.random.default_rng(0), 500, 4)
    assert len(word) == 1000
    assert rest(word) == ""
    assert max(depths(sample_word(np.random.default_rng(0), 500, 4, max_depth=3))) == 3
    assert sample_word(np.random.default_rng(0), 0, 4) == ()


def test_draws_depend_on_the_seed_alone():
    one, two, other = (sample_word(np.random.default_rng(s), 20, 4) for s in (1, 1, 2))
    assert one == two != other


@pytest.mark.parametrize("children", [0.5, 1.0])
def test_branching_process(children):
    q, types, number = children / (1 + children), 2, 6_000
    rng = np.random.default_rng(3)
    drawn = Counter(
        branching_word(rng, types, max_pairs=60, children=children) for _ in range(number)
    )
    small = [word for pairs in (1, 2) for word in listed(2 * pairs, 0, types)]
    expected = [
        number * q ** (n - 1) * (1 - q) ** (n + 1) / types**n
        for n in (len(word) // 2 for word in small)
    ]
    seen = [drawn[word] for word in small]
    larger = number - sum(seen), number - sum(expected)
    assert chisquare([*seen, larger[0]], [*expected, larger[1]]).pvalue > 0.01


def test_branching_keeps_its_bounds():
    rng = np.random.default_rng(5)
    words = [branching_word(rng, 4, max_pairs=9, max_depth=3, children=9) for _ in range(300)]
    assert {rest(word) for word in words} == {""}
    assert max(map(len, words)) == 18
    assert max(max(depths(word)) for word in words) == 3
    assert branching_word(rng, 1, max_pairs=1) == (0, ~0)
    with pytest.raises(SmeltscopeError, match="1 or more"):
        branching_word(rng, 1, max_pairs=3, max_depth=0)


def test_the_shortest_completion_is_the_only_one():
    for symbols, depth in [(2, 2), (3, 1), (4, 2), (3, 3)]:
        for prefix in listed(symbols, depth, 2):
            ends = [
                end
                for length in range(depth + 1)
                for end in product([0, 1, ~0, ~1], repeat=length)
                if rest(prefix + end) == ""
            ]
            assert ends == [completion(prefix)]


def test_by_hand():
    word = (0, 1, ~1, 2, 2, ~2)  # ( [ ] { { }
    assert depths(word) == [1, 2, 1, 2, 3, 2]
    assert top_positions(word) == [0, 1, 0, 3, 4, 3]
    assert stack_tops(word) == [0, 1, 0, 2, 2, 2]
    assert matches(word) == [-1, -1, 1, -1, -1, 4]
    assert completion(word) == (~2, ~0)
    assert stack_tops((3, ~3)) == [3, -1]
    assert depths(()) == top_positions(()) == matches(()) == []
    assert completion(()) == ()


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(0, 6))
def test_the_stack_against_rewriting(seed, symbols, depth):
    depth = min(depth + (symbols + depth) % 2, symbols)
    word = sample_prefix(np.random.default_rng(seed), symbols, depth, 4)
    left = [rest(word[: n + 1]) for n in range(symbols)]
    assert depths(word) == [len(part) for part in left]
    assert stack_tops(word) == [OPEN.index(part[-1]) if part else -1 for part in left]
    assert text(completion(word)) == rest(word)[::-1].translate(str.maketrans(OPEN, CLOSE))
    for i, opener in enumerate(matches(word)):
        if word[i] < 0:
            assert word[opener] == ~word[i]
            assert rest(word[opener : i + 1]) == ""
        else:
            assert opener == -1


def test_paint_takes_types_from_where_it_is_told():
    shape = (0, 0, ~0, 0, 0, ~0, 0)
    rng = np.random.default_rng(0)
    words = {paint(rng, shape, [2, 3], [1, 0, 1]) for _ in range(200)}
    assert {(word[0], word[3], word[6]) for word in words} == {(1, 0, 1)}
    assert {(word[1], word[4]) for word in words} == {(2, 2), (2, 3), (3, 2), (3, 3)}
    with pytest.raises(ValueError, match="zip"):
        paint(rng, shape, [2], [1, 0])


@pytest.mark.parametrize(
    ("word", "fault"),
    [
        ((~0,), "Symbol 1 closes a bracket but none is open"),
        ((0, ~0, ~1), "Symbol 3 closes a bracket but none is open"),
        ((0, 1, ~0), "Symbol 3 closes another type of bracket than symbol 2 opened"),
    ],
)
@pytest.mark.parametrize("function", [completion, depths, top_positions, stack_tops, matches])
def test_no_prefix_of_a_word(word, fault, function):
    with pytest.raises(SmeltscopeError, match=fault):
        function(word)


def test_words_that_cannot_be():
    rng = np.random.default_rng(0)
    with pytest.raises(SmeltscopeError, match="No word of 4 symbols leaves 1 brackets open:"):
        sample_prefix(rng, 4, 1, 2)
    with pytest.raises(SmeltscopeError, match="leaves 3 brackets open and never more than 2"):
        sample_prefix(rng, 5, 3, 2, max_depth=2)
    assert count_prefixes(5, 3, 2, max_depth=2) == 0
