"""Rows: documents cut into segments of one length, and the order in which training sees them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from smeltscope.errors import SmeltscopeError


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Segments as rows, padded on the right; each begins with the start token."""

    tokens: np.ndarray  # (rows, context) int32
    lengths: np.ndarray  # (rows,) int32, tokens before the padding, start token included
    category: np.ndarray  # (rows,) int32, index into categories
    categories: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, rows: np.ndarray) -> "Rows":
        """The rows with these indices, in their order."""
        return Rows(
            tokens=self.tokens[rows],
            lengths=self.lengths[rows],
            category=self.category[rows],
            categories=self.categories,
        )


def cut_rows(
    documents: Iterable[tuple[str, Sequence[int]]], *, context: int, start: int, end: int, pad: int
) -> Rows:
    """Cut documents, (category, token ids without special tokens), into rows of `context` tokens.

    The end token `end` follows the last token of a document. Every segment begins with `start`;
    none spans two documents. Raises SmeltscopeError when no row comes out.
    """
    room = context - 1
    tokens: list[np.ndarray] = []
    lengths: list[np.ndarray] = []
    category: list[np.ndarray] = []
    categories: dict[str, int] = {}
    for name, ids in documents:
        index = categories.setdefault(name, len(categories))
        body = np.append(np.asarray(ids, dtype=np.int32), np.int32(end))
        count = -(-len(body) // room)
        block = np.full((count, context), pad, dtype=np.int32)
        block[:, 0] = start
        padded = np.full(count * room, pad, dtype=np.int32)
        padded[: len(body)] = body
        block[:, 1:] = padded.reshape(count, room)
        tokens.append(block)
        filled = np.full(count, context, dtype=np.int32)
        filled[-1] = len(body) - (count - 1) * room + 1
        lengths.append(filled)
        category.append(np.full(count, index, dtype=np.int32))
    if not tokens:
        raise SmeltscopeError("The training text holds no documents: check [data] in the recipe.")
    return Rows(
        tokens=np.concatenate(tokens),
        lengths=np.concatenate(lengths),
        category=np.concatenate(category),
        categories=tuple(categories),
    )


def training_order(rows: Rows, *, count: int, seed: int) -> np.ndarray:
    """Indices (count,) of the rows that training sees, one after another.

    The categories take turns, so each gives the same number of rows; each is gone through in an
    order drawn from `seed`, and again in a new order when it is used up. A longer training begins
    with the rows of a shorter one.
    """
    turns = len(rows.categories)
    order = np.empty(count, dtype=np.int64)
    for category in range(turns):
        members = np.flatnonzero(rows.category == category)
        wanted = len(range(category, count, turns))
        epochs = -(-wanted // len(members))
        drawn = [
            np.random.default_rng([seed, category, epoch]).permutation(members)
            for epoch in range(epochs)
        ]
        order[category::turns] = np.concatenate([*drawn, members[:0]])[:wanted]
    return order


def save_rows(path: Path, **sets: Rows) -> None:
    """Write named sets of rows into one .npz file, whole or not at all."""
    arrays: dict[str, np.ndarray] = {}
    for name, rows in sets.items():
        arrays[f"{name}_tokens"] = rows.tokens
        arrays[f"{name}_lengths"] = rows.lengths
        arrays[f"{name}_category"] = rows.category
        arrays[f"{name}_categories"] = np.array(rows.categories)
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    partial.rename(path)


def load_rows(path: Path, name: str) -> Rows:
    """A set of rows that `save_rows` wrote."""
    with np.load(path) as arrays:
        return Rows(
            tokens=arrays[f"{name}_tokens"],
            lengths=arrays[f"{name}_lengths"],
            category=arrays[f"{name}_category"],
            categories=tuple(str(c) for c in arrays[f"{name}_categories"]),
        )
