"""Streams: sources take turns by weight; stretches stand before their copies."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smeltscope.errors import SmeltscopeError
from smeltscope.model.rows import Segment, cut_document, lay_rows
from smeltscope.model.streams import (
    backcopy,
    interleave,
    random_tokens,
    seed_of,
    stretches_of,
    take_turns,
)


@given(weights=st.lists(st.floats(0.01, 10), min_size=1, max_size=5), count=st.integers(0, 200))
@settings(max_examples=50, deadline=None)
def test_turns_keep_to_the_shares(weights: list[float], count: int) -> None:
    turns = take_turns(weights, count)
    given_out = np.cumsum(turns[:, None] == np.arange(len(weights)), axis=0)  # (row, source)
    due = np.arange(1, count + 1)[:, None] * np.array(weights) / sum(weights)
    assert (given_out - due < 1).all() and (due - given_out < 2).all()
    assert (take_turns(weights, count // 2) == turns[: count // 2]).all()


def test_turns_of_a_third_a_quarter_and_the_rest() -> None:
    assert take_turns([1, 1, 2], 8).tolist() == [2, 0, 1, 2, 2, 0, 1, 2]
    assert np.bincount(take_turns([0.4, 0.35, 0.25], 1000)).tolist() == [400, 350, 250]


def test_interleaved_rows_come_in_the_order_of_their_part() -> None:
    def part(name: str, *words: int) -> dict[str, list[Segment]]:
        return {name: [s for w in words for s in cut_document([w], context=4, start=0, end=1)]}

    parts = [lay_rows(p, context=4, pad=2) for p in (part("x", 10, 11, 12), part("y", 20, 21))]
    rows = interleave(parts, np.array([1, 0, 0, 1]))
    assert rows.tokens[:, 1].tolist() == [20, 10, 11, 21]
    assert [rows.categories[c] for c in rows.category] == ["y", "x", "x", "y"]


# ---------------------------------------------------------------- copies


@given(
    context=st.integers(6, 60),
    shortest=st.integers(2, 4),
    more=st.integers(0, 5),
    copies_only=st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_every_stretch_is_followed_by_its_copy(
    context: int, shortest: int, more: int, copies_only: bool
) -> None:
    asked: list[list[int]] = []

    def draw(rng: np.random.Generator, length: int) -> np.ndarray:
        asked.append([100 * len(asked) + t for t in range(length)])
        return np.array(asked[-1])

    segments = list(
        backcopy(
            draw,
            count=3,
            context=context,
            start=0,
            lengths=(shortest, shortest + more),
            copies_only=copies_only,
            seed=5,
        )
    )
    left = iter(asked)
    for segment in segments:
        expected, counted = [0], [False]
        while len(expected) < context:
            stretch = next(left)
            assert shortest <= len(stretch) <= shortest + more
            for copy in (False, True):
                for place, token in enumerate(stretch):
                    expected.append(token)
                    counted.append((copy and place > 0) or not copies_only)
        assert segment.tokens.tolist() == expected[:context]
        assert segment.predicted.tolist() == counted[:context]
    assert next(left, None) is None


def test_copies_depend_on_seed_and_place_alone() -> None:
    def made(count: int, seed: int) -> list[list[int]]:
        draw = random_tokens(np.array([5, 7, 9]))
        options = {"context": 30, "start": 0, "lengths": (2, 6), "copies_only": False}
        return [s.tokens.tolist() for s in backcopy(draw, count=count, seed=seed, **options)]

    assert made(4, 1) == made(6, 1)[:4] != made(4, 2)
    assert len({tuple(row) for row in made(6, 1)}) == 6
    assert {token for row in made(6, 1) for token in row[1:]} == {5, 7, 9}
    assert len({seed_of(1, name, split) for name in "ab" for split in ("train", "heldout")}) == 4


def test_stretches_are_of_the_text_and_of_all_categories_alike() -> None:
    documents = {"x": [list(range(10, 23)), [30]], "y": [[40, 41, 42]] * 9, "short": [[7], []]}
    segments: dict[str, list[Segment]] = {name: [] for name in documents}
    for name, members in documents.items():
        for ids in members:
            segments[name] += cut_document(ids, context=6, start=0, end=1)
    draw = stretches_of(segments, end=1, shortest=2)
    rng = np.random.default_rng(0)
    drawn = [draw(rng, 4).tolist() for _ in range(400)]
    for stretch in drawn:  # of one segment: 10 to 14, 15 to 19, 20 to 22, or the whole of y's
        assert stretch == list(range(stretch[0], stretch[0] + len(stretch)))
        assert len({token // 5 for token in stretch}) == 1 and len(stretch) in (3, 4)
    assert {stretch[0] for stretch in drawn} == {10, 11, 15, 16, 20, 40}
    assert sum(stretch[0] == 40 for stretch in drawn) == pytest.approx(200, abs=40)  # 4 deviations


def test_text_without_a_stretch_is_an_error() -> None:
    segments = {"x": list(cut_document([5, 6], context=9, start=0, end=1))}
    with pytest.raises(SmeltscopeError, match="No document has 3 tokens to copy"):
        stretches_of(segments, end=1, shortest=3)
