"""Rows: what training reads, segments side by side in rows of one length, and their order."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from smeltscope.errors import SmeltscopeError


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """A stretch of one document as a model sees it: alone, behind a start token."""

    tokens: np.ndarray  # (length,) int32, the start token first
    predicted: np.ndarray  # (length,) bool: the loss counts how this token is predicted


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Segments in rows of one length; those of a row are of one category.

    A row holds one segment, or (packed) as many as fit, one after another, and padding at its end
    only. Positions begin at 0 with each segment, and with the padding. They alone say which tokens
    may see one another: transformers keeps segments apart by them, but only where it is given no
    attention mask.
    """

    tokens: np.ndarray  # (rows, context) int32
    positions: np.ndarray  # (rows, context) int32, of the token in its segment
    predicted: np.ndarray  # (rows, context) bool; never a start token, never padding
    lengths: np.ndarray  # (rows,) int32, tokens before the padding, start tokens included
    category: np.ndarray  # (rows,) int32, index into categories
    categories: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, rows: np.ndarray) -> "Rows":
        """The rows with these indices, in their order."""
        return replace(self, **{name: getattr(self, name)[rows] for name in ARRAYS})


ARRAYS = tuple(field.name for field in fields(Rows) if field.type is np.ndarray)


def cut_document(ids: Sequence[int], *, context: int, start: int, end: int) -> Iterator[Segment]:
    """Cut a document, token ids without special tokens, into segments of `context` tokens and a rest.

    The end token `end` follows the document's last token; every segment begins with `start`.
    """
    room = context - 1
    count = len(ids) // room + 1
    block = np.full((count, context), start, dtype=np.int32)
    body = np.resize(np.append(np.asarray(ids, dtype=np.int32), np.int32(end)), count * room)
    block[:, 1:] = body.reshape(count, room)
    predicted = np.arange(context) > 0
    for i, tokens in enumerate(block):
        stop = min(context, len(ids) + 2 - i * room)
        yield Segment(tokens=tokens[:stop], predicted=predicted[:stop])


def lay_rows(
    segments: dict[str, list[Segment]], *, context: int, pad: int, packed: bool = False
) -> Rows:
    """Rows of `context` tokens from {category: its segments}, one segment in each or packed.

    Raises SmeltscopeError when there is no segment.
    """
    if not any(segments.values()):
        raise SmeltscopeError("The training text holds no documents: check [data] in the recipe.")
    row, column, count = [], [], [0]  # of each segment; rows up to the end of each category
    for members in segments.values():
        sizes = np.array([len(segment.tokens) for segment in members], dtype=np.int64)
        if packed:
            rows, columns = pack(sizes, context)
        else:
            rows, columns = np.arange(len(sizes)), np.zeros_like(sizes)
        row.append(count[-1] + rows)
        column.append(columns)
        count.append(count[-1] + int(rows.max(initial=-1)) + 1)
    shape = (count[-1], context)
    tokens = np.full(shape, pad, dtype=np.int32)
    predicted = np.zeros(shape, dtype=bool)
    positions = np.zeros(shape, dtype=np.int32)
    lengths = np.zeros(len(tokens), dtype=np.int32)
    steps = np.arange(context, dtype=np.int32)
    laid = (segment for members in segments.values() for segment in members)
    for segment, i, begin in zip(laid, np.concatenate(row), np.concatenate(column), strict=True):
        length = len(segment.tokens)
        tokens[i, begin : begin + length] = segment.tokens
        predicted[i, begin : begin + length] = segment.predicted
        positions[i, begin : begin + length] = steps[:length]
        lengths[i] += length
    padding = steps >= lengths[:, None]
    positions[padding] = (steps - lengths[:, None])[padding]
    return Rows(
        tokens=tokens,
        positions=positions,
        predicted=predicted,
        lengths=lengths,
        category=np.repeat(np.arange(len(segments), dtype=np.int32), np.diff(count)),
        categories=tuple(segments),
    )


def pack(sizes: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    """The row and the first column, (segments,) each, of segments that share rows of `context` tokens.

    Best fit, the longest first: a segment goes where it leaves the least room. None is cut for it
    (Ding et al., arXiv 2404.10830).
    """
    row, column = np.zeros_like(sizes), np.zeros_like(sizes)
    rooms: list[tuple[int, int]] = []  # (room, row), ascending, of rows that may take another
    smallest = sizes.min(initial=context)
    rows = 0
    for i in np.argsort(-sizes, kind="stable"):
        fitting = bisect_left(rooms, (int(sizes[i]), 0))
        if fitting < len(rooms):
            room, chosen = rooms.pop(fitting)
        else:
            room, chosen, rows = context, rows, rows + 1
        row[i], column[i] = chosen, context - room
        left = room - int(sizes[i])
        if left >= smallest:
            insort(rooms, (left, chosen))
    return row, column


def turns_of_rows(rows: Rows, *, count: int, seed: int) -> np.ndarray:
    """Indices (count,) of the rows that training sees, one after another.

    The categories take turns, so each gives the same number of rows; each is gone through as it is, and again
    in an order drawn from `seed` whenever it is used up. A longer training begins with the rows of a shorter one.
    """
    turns = len(rows.categories)
    order = np.empty(count, dtype=np.int64)
    for category in range(turns):
        members = np.flatnonzero(rows.category == category)
        wanted = len(range(category, count, turns))
        again = [
            np.random.default_rng([seed, category, epoch]).permutation(members)
            for epoch in range(1, -(-wanted // len(members)))
        ]
        order[category::turns] = np.concatenate([members, *again])[:wanted]
    return order


def join_rows(parts: Sequence[Rows]) -> Rows:
    """The rows of all parts, one part after another; categories of one name are one."""
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ARRAYS}
    categories = list(dict.fromkeys(c for part in parts for c in part.categories))
    arrays["category"] = np.concatenate(
        [np.array([categories.index(c) for c in p.categories])[p.category] for p in parts]
    ).astype(np.int32)
    return Rows(categories=tuple(categories), **arrays)


def save_rows(path: Path, **sets: Rows) -> None:
    """Write named sets of rows into one .npz file, whole or not at all."""
    arrays: dict[str, np.ndarray] = {}
    for name, rows in sets.items():
        arrays |= {f"{name}_{array}": getattr(rows, array) for array in ARRAYS}
        arrays[f"{name}_categories"] = np.array(rows.categories)
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    partial.rename(path)


def load_rows(path: Path, name: str) -> Rows:
    """A set of rows that `save_rows` wrote."""
    with np.load(path) as arrays:
        lacking = {f"{name}_{array}" for array in ARRAYS} - set(arrays)
        if lacking:
            raise SmeltscopeError(
                f"{path} was written by another version of smeltscope: remove it and run the command "
                "again, the same rows are made anew."
            )
        found = {array: arrays[f"{name}_{array}"] for array in ARRAYS}
        return Rows(categories=tuple(map(str, arrays[f"{name}_categories"])), **found)
