"""Which tokens of a segment are looked at where looking at all of them would cost too much."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Positions in the rows of a batch, ascending; short rows have fewer valid ones and repeat their last."""

    positions: Tensor  # (B, S), int64
    valid: Tensor  # (B, S), bool
    # What is made of it once for a batch, whose executions have the same samples.
    _flat: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)
    _parts: dict[tuple[int, int], "Sample"] = field(default_factory=dict, init=False, repr=False)

    def equals(self, other: "Sample") -> bool:
        """Whether these are the same positions, of which the same are valid."""
        return self is other or (
            torch.equal(self.positions, other.positions) and torch.equal(self.valid, other.valid)
        )

    def take(self, values: Tensor) -> Tensor:
        """`values` (B, T, ...) at the positions: (B, S, ...)."""
        length = values.shape[1]
        if length not in self._flat:
            rows = torch.arange(len(values), device=values.device)[:, None]
            self._flat[length] = (rows * length + self.positions).flatten()
        flat = self._flat[length]
        if not values.is_contiguous():
            return values[flat // length, flat % length].unflatten(0, self.positions.shape)
        # Several times faster on the CPU: whole tokens are copied, not number by number.
        return values.flatten(0, 1).index_select(0, flat).unflatten(0, self.positions.shape)

    @cached_property
    def partners(self) -> "Sample":
        """For each sample another one of its row, half the sample further on: its place among them; itself where it is
        alone, which is not valid."""
        number = self.valid.sum(1, keepdim=True).clamp(min=1)  # (B, 1)
        index = torch.arange(self.positions.shape[1], device=self.positions.device)
        partners = (index + number // 2) % number
        return Sample(positions=partners, valid=self.valid & (partners != index))

    @cached_property
    def with_first(self) -> "Sample":
        """The first token of every row in front of its samples, which begin behind it: (B, 1 + S)."""
        return Sample(
            positions=pad(self.positions, (1, 0), value=0),
            valid=pad(self.valid, (1, 0), value=True),
        )

    def slice(self, start: int, stop: int) -> "Sample":
        """The samples `start:stop` of every row."""
        if (start, stop) not in self._parts:
            positions = self.positions[:, start:stop].contiguous()
            self._parts[start, stop] = Sample(positions=positions, valid=self.valid[:, start:stop])
        return self._parts[start, stop]

    def rows(self, start: int, stop: int) -> "Sample":
        """The samples of the rows `start:stop`; itself where those are all."""
        if start == 0 and stop >= len(self.positions):
            return self
        return Sample(positions=self.positions[start:stop], valid=self.valid[start:stop])


def segment_seed(document_id: str, tokens: np.ndarray, seed: int) -> list[int]:
    """A seed that depends on the segment's document, its tokens and `seed` alone: not on the batch it runs in."""
    return [seed, zlib.crc32(document_id.encode()), zlib.crc32(tokens.tobytes())]


def sample_queries(
    lengths: np.ndarray, seeds: Sequence[Sequence[int]], size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Up to `size` different positions of each segment, spread evenly over the logarithm of the position.

    Positions run from 1 (the first token has no choice of keys) to length - 1. The range of log position is cut
    into `size` strips, one position is drawn in each, and those that coincide move to the next free ones.
    Segments with `size` such positions or fewer give all of them. Returns positions (B, size) and valid (B, size).
    """

    def draw(rng: np.random.Generator, last: int) -> np.ndarray:
        strips = (np.arange(size) + rng.random(size)) / size
        drawn = np.floor(np.exp(strips * np.log(last + 1))).astype(np.int64).clip(1, last)
        # Ascending and different: push up from the left, then down from the right.
        rank = np.arange(size)
        drawn = np.maximum.accumulate(drawn - rank) + rank
        room = last - (size - 1 - rank)
        return np.minimum(drawn, room)

    return _draw_rows(lengths, seeds, size, draw)


def sample_tokens(
    lengths: np.ndarray, seeds: Sequence[Sequence[int]], size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Up to `size` different positions of each segment, each position from 1 to length - 1 as likely as another.

    Returns positions (B, size), ascending, and valid (B, size).
    """

    def draw(rng: np.random.Generator, last: int) -> np.ndarray:
        return np.sort(rng.choice(last, size=size, replace=False)) + 1

    return _draw_rows(lengths, seeds, size, draw)


def _draw_rows(
    lengths: np.ndarray,
    seeds: Sequence[Sequence[int]],
    size: int,
    draw: Callable[[np.random.Generator, int], np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    size = min(size, max(int(lengths.max()) - 1, 1))
    positions = np.zeros((len(lengths), size), dtype=np.int64)
    valid = np.zeros((len(lengths), size), dtype=bool)
    for row, length in enumerate(lengths):
        last = int(length) - 1
        number = min(size, last)
        if last > size:
            positions[row] = draw(np.random.default_rng(seeds[row]), last)
        elif last > 0:
            positions[row] = np.minimum(np.arange(1, size + 1), last)
        valid[row, :number] = True
    return positions, valid
