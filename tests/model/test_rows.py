"""Rows: segments cut, laid side by side, ordered, kept; a packed segment is computed as if alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smeltscope.errors import SmeltscopeError
from smeltscope.model import tiny
from smeltscope.model.rows import (
    ARRAYS,
    Rows,
    Segment,
    cut_document,
    join_rows,
    lay_rows,
    load_rows,
    pack,
    save_rows,
    turns_of_rows,
)

START, END, PAD = 0, 1, 2


def rows_of(documents: list[tuple[str, list[int]]], context: int = 5, packed: bool = False) -> Rows:
    segments: dict[str, list[Segment]] = {name: [] for name, _ in documents}
    for name, ids in documents:
        segments[name] += cut_document(ids, context=context, start=START, end=END)
    return lay_rows(segments, context=context, pad=PAD, packed=packed)


def segment(*tokens: int) -> Segment:
    return Segment(tokens=np.array(tokens, dtype=np.int32), predicted=np.arange(len(tokens)) > 0)


def found(rows: Rows) -> list[tuple[str, list[int], list[int]]]:
    """(category, tokens, predicted tokens) of every segment, read off the arrays one token at a time."""
    segments: list[tuple[str, list[int], list[int]]] = []
    for i, length in enumerate(rows.lengths):
        for t in range(length):
            if rows.positions[i, t] == 0:
                segments.append((rows.categories[rows.category[i]], [], []))
            assert rows.positions[i, t] == len(segments[-1][1])
            segments[-1][1].append(int(rows.tokens[i, t]))
            if rows.predicted[i, t]:
                segments[-1][2].append(int(rows.tokens[i, t]))
        padding = range(length, rows.tokens.shape[1])
        assert [int(p) for p in rows.positions[i, length:]] == list(range(len(padding)))
        assert not rows.predicted[i, length:].any()
    return segments


# ---------------------------------------------------------------- cutting and laying


def test_rows_hold_every_token_of_a_document_behind_start_tokens() -> None:
    rows = rows_of([("x", list(range(10, 19))), ("y", [20]), ("x", [30, 31, 32])])
    assert rows.tokens.tolist() == [
        [0, 10, 11, 12, 13],
        [0, 14, 15, 16, 17],
        [0, 18, 1, 2, 2],
        [0, 30, 31, 32, 1],
        [0, 20, 1, 2, 2],
    ]
    assert rows.lengths.tolist() == [5, 5, 3, 5, 3]
    assert [rows.categories[c] for c in rows.category] == ["x", "x", "x", "x", "y"]
    assert rows.positions[2].tolist() == [0, 1, 2, 0, 1]
    assert rows.predicted[2].tolist() == [False, True, True, False, False]


@given(lengths=st.lists(st.integers(0, 20), min_size=1, max_size=12), context=st.integers(2, 9))
@settings(max_examples=60, deadline=None)
def test_cut_against_a_plain_reading(lengths: list[int], context: int) -> None:
    documents = [[100 * i + t for t in range(length)] for i, length in enumerate(lengths, 1)]
    expected: list[list[int]] = []
    for ids in documents:
        row: list[int] = []
        for token in [*ids, END]:
            row.append(token)
            if len(row) == context - 1 or token == END:
                expected.append([START, *row])
                row = []
    rows = rows_of([("x", ids) for ids in documents], context)
    assert [s[1] for s in found(rows)] == expected and len(rows) == len(expected)
    packed = rows_of([("x", ids) for ids in documents], context, packed=True)
    assert sorted(s[1] for s in found(packed)) == sorted(expected)


def test_packed_rows_mix_no_categories() -> None:
    rows = rows_of(
        [("x", [10]), ("y", [20, 21]), ("x", [30]), ("y", []), ("x", [])], context=8, packed=True
    )
    assert rows.tokens.tolist() == [
        [0, 10, 1, 0, 30, 1, 0, 1],
        [0, 20, 21, 1, 0, 1, 2, 2],
    ]
    assert rows.positions.tolist() == [[0, 1, 2, 0, 1, 2, 0, 1], [0, 1, 2, 3, 0, 1, 0, 1]]
    assert rows.lengths.tolist() == [8, 6]


@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_packing_is_near_the_fewest_rows(sizes: list[int]) -> None:
    context = 12

    def fewest(left: tuple[int, ...], rooms: tuple[int, ...]) -> int:
        """Every segment into every row that takes it."""
        if not left:
            return len(rooms)
        tried = [fewest(left[1:], (*rooms, context - left[0]))]
        for i, room in enumerate(rooms):
            if room >= left[0] and room not in rooms[:i]:
                after = (*rooms[:i], room - left[0], *rooms[i + 1 :])
                tried.append(fewest(left[1:], after))
        return min(tried)

    row, column = pack(np.array(sizes), context)
    taken = np.zeros((row.max() + 1, context), dtype=int)
    for size, i, begin in zip(sizes, row, column, strict=True):
        assert begin + size <= context
        taken[i, begin : begin + size] += 1
    assert taken.max() == 1 and (np.diff(taken, axis=1) <= 0).all()  # no overlap, no hole
    # Best fit decreasing needs at most 11/9 of the fewest rows and 2/3 (Dosa 2007).
    assert len(taken) <= 11 / 9 * fewest(tuple(sizes), ()) + 2 / 3


def test_no_documents_is_an_error() -> None:
    for nothing in ({}, {"x": []}):
        with pytest.raises(SmeltscopeError, match="holds no documents"):
            lay_rows(nothing, context=5, pad=PAD)


# ---------------------------------------------------------------- order and storage


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    count=st.integers(1, 40),
    more=st.integers(0, 20),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_categories_take_turns_and_a_longer_run_begins_with_the_shorter(
    sizes: list[int], count: int, more: int, seed: int
) -> None:
    rows = rows_of([(str(c), [9, 9]) for c, size in enumerate(sizes) for _ in range(size)])
    category = rows.category
    order = turns_of_rows(rows, count=count, seed=seed)
    assert (category[order] == np.arange(count) % len(sizes)).all()
    for c, size in enumerate(sizes):  # first as they are; nothing comes again before all was seen
        first = np.flatnonzero(category == c)
        assert (order[c :: len(sizes)][:size] == first[: len(order[c :: len(sizes)])]).all()
        mine = order[c :: len(sizes)]
        for begin in range(0, len(mine), size):
            assert len(set(mine[begin : begin + size])) == len(mine[begin : begin + size])
    assert (turns_of_rows(rows, count=count + more, seed=seed)[:count] == order).all()


def test_joined_rows_share_categories_of_one_name() -> None:
    first, second = rows_of([("x", [5]), ("y", [6])]), rows_of([("z", [7]), ("x", [8])])
    rows = join_rows([first, second])
    assert rows.categories == ("x", "y", "z")
    assert found(rows) == found(first) + found(second)
    assert rows.category.dtype == np.int32


def test_rows_survive_the_file(tmp_path: Path) -> None:
    rows = rows_of([("x", [5, 6, 7])], context=3)
    save_rows(tmp_path / "rows.npz", train=rows)
    back = load_rows(tmp_path / "rows.npz", "train")
    for name in ARRAYS:
        before, after = getattr(rows, name), getattr(back, name)
        assert (before == after).all() and before.dtype == after.dtype
    assert back.categories == ("x",)
    assert [p.name for p in tmp_path.iterdir()] == ["rows.npz"]


def test_rows_of_an_older_version_are_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "rows.npz", train_tokens=np.zeros((1, 3)), train_lengths=np.ones(1))
    with pytest.raises(SmeltscopeError, match="remove it and run the command again"):
        load_rows(tmp_path / "rows.npz", "train")


# ---------------------------------------------------------------- what a model makes of packed rows


def seen(model: Any, rows: Rows) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits (row, position, vocabulary) and those of each execution's router."""
    with torch.no_grad():
        out = model(
            torch.from_numpy(rows.tokens.astype(np.int64)),
            position_ids=torch.from_numpy(rows.positions.astype(np.int64)),
            use_cache=False,
            output_router_logits=True,
        )
    shape = (*rows.tokens.shape, -1)
    return out.logits, [logits.view(shape) for logits in out.router_logits]


@pytest.mark.parametrize("visits", [1, 2, 3])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_segments_are_computed_as_if_alone(visits: int, attention: str) -> None:
    model = tiny("smelt", num_visits=visits)
    model.set_attn_implementation(attention)
    rng = np.random.default_rng(0)
    vocabulary = model.config.vocab_size
    sizes = [7, 1, 1, 12, 2, 24, 5, 9]
    segments = [segment(START, *rng.integers(3, vocabulary, size - 1)) for size in sizes]
    packed = lay_rows({"x": segments}, context=24, pad=PAD, packed=True)
    assert len(packed) == 3 and (packed.lengths < 24).any()
    logits, routers = seen(model, packed)
    alone = {}
    for one in segments:
        of_one, routers_of_one = seen(
            model, lay_rows({"x": [one]}, context=len(one.tokens), pad=PAD)
        )
        alone[tuple(one.tokens)] = [of_one[0], *(r[0] for r in routers_of_one)]
    checked = 0
    for i in range(len(packed)):
        starts = np.flatnonzero(packed.positions[i, : packed.lengths[i]] == 0)
        for begin, end in zip(starts, [*starts[1:], packed.lengths[i]], strict=True):
            expected = alone[tuple(packed.tokens[i, begin:end])]
            for ours, theirs in zip([logits, *routers], expected, strict=True):
                torch.testing.assert_close(ours[i, begin:end], theirs, atol=1e-5, rtol=0)
            checked += 1
    assert checked == len(sizes)


def test_an_attention_mask_would_join_the_segments() -> None:
    """Why Rows says: no mask. Here the second segment sees the first."""
    model = tiny("smelt")
    rows = lay_rows(
        {"x": [segment(0, 5, 6, 7), segment(0, 8, 9, 5)]}, context=8, pad=PAD, packed=True
    )
    ids = torch.from_numpy(rows.tokens.astype(np.int64))
    positions = torch.from_numpy(rows.positions.astype(np.int64))
    with torch.no_grad():
        masked = model(ids, attention_mask=torch.ones_like(ids), position_ids=positions).logits
    apart, _ = seen(model, rows)
    assert (masked - apart)[0, :4].abs().max() < 1e-5 < (masked - apart)[0, 4:].abs().max()
