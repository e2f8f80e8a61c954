"""Cosines between the vectors of sampled tokens, in float32: as they are, and with their segment's mean taken away.

Letters in shapes: B segments, S sampled tokens, H heads (or whatever else a token has several vectors of), D size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smeltscope.probes.sampling import Sample

SHORTEST = 1e-15  # the squares of shorter vectors underflow: they have no direction
_ROUNDING = 16 * torch.finfo(torch.float32).eps
_AT_ONCE = 2**22  # numbers


@dataclass(frozen=True, kw_only=True)
class Vectors:
    """Vectors and their norms, so that each norm is taken once."""

    values: Tensor  # (B, S, H, D), float32
    norms: Tensor  # (B, S, H), 0 where there is no direction

    @classmethod
    def of(cls, values: Tensor) -> "Vectors":
        """From vectors of any precision."""
        values = values.float()
        return cls(values=values, norms=_norm(values))

    def centred(self, valid: Tensor) -> "Vectors":
        """Minus the mean over the segment's valid (B, S) tokens.

        A token that is all there is has no direction then. Nor have tokens that are all alike, of which rounding
        would leave one.
        """
        share = valid / valid.sum(1, keepdim=True).clamp(min=1)  # (B, S)
        mean = (share[:, None] @ self.values.flatten(2)).unflatten(2, self.values.shape[2:])
        values = self.values - mean  # (B, S, H, D) - (B, 1, H, D)
        norms = _norm(values)
        return Vectors(values=values, norms=norms.where(norms > _ROUNDING * _norm(mean), 0.0))

    def at(self, others: Sample) -> "Vectors":
        """For each token the vectors of another: `others` are places (B, S) among the sampled ones."""
        return Vectors(values=others.take(self.values), norms=others.take(self.norms))

    def matrix(self) -> Tensor:
        """Cosines of each two vectors of a token: (B, S, H, H); NaN where one has no direction."""
        dot = self.values @ self.values.mT
        return _over(dot, self.norms[..., None], self.norms[..., None, :])


def cosines(
    pairs: Sequence[tuple[Vectors, Vectors]], parts: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines of each two by head (pair * B, S, H), and of several heads' vectors as one (pair * B, S, part).

    `parts` are the numbers of heads that follow one another in each part; without it all heads are one. NaN where one has no
    direction. The second is no mean of the first: heads weigh in it by the product of their norms.
    """
    dot = torch.cat([(a.values * b.values).sum(-1) for a, b in pairs])
    norms = [torch.cat([vectors.norms for vectors in side]) for side in zip(*pairs, strict=True)]
    parts = [dot.shape[2]] if parts is None else list(parts)
    whole = torch.stack([part.sum(-1) for part in dot.split(parts, 2)], 2)
    whole_norms = [torch.stack([_norm(part) for part in n.split(parts, 2)], 2) for n in norms]
    return _over(dot, *norms), _over(whole, *whole_norms)


def sums(values: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Sums (B, ...) of `values` (B, S, ...) over the counted (B, S) tokens that have one, and how many those are."""
    has = ~values.isnan() & counted.reshape(*counted.shape, *(1,) * (values.ndim - 2))
    return values.where(has, 0.0).sum(1), has.sum(1).float()


def blocks(rows: int, size: int) -> list[slice]:
    """Stretches of `rows` rows of `size` numbers: so many at a time that copies of them stay small."""
    step = max(1, _AT_ONCE // size)
    return [slice(start, start + step) for start in range(0, rows, step)]


def _norm(vectors: Tensor) -> Tensor:
    return torch.linalg.vector_norm(vectors, dim=-1)


def _over(dot: Tensor, a: Tensor, b: Tensor) -> Tensor:
    a, b = (norms.where(norms > SHORTEST, torch.nan) for norms in (a, b))
    return dot / (a * b)
