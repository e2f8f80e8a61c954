"""Cosines between the vectors of sampled tokens, in float32: as they are, and with their segment's mean taken away.

Letters in shapes: B segments, S sampled tokens, H heads (or whatever else a token has several vectors of), D size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from smeltscope.probes.sampling import take

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

    def at(self, index: Tensor) -> "Vectors":
        """For each token the vectors of another: `index` (B, S) among the sampled ones."""
        return Vectors(values=take(self.values, index), norms=take(self.norms, index))

    def cosines(self, other: "Vectors") -> tuple[Tensor, Tensor]:
        """Cosines with the vectors of `other` by head (B, S, H), and of all heads' vectors as one (B, S).

        NaN where one has no direction. The second is no mean of the first: heads weigh in it by the product of
        their norms.
        """
        dot = (self.values * other.values).sum(-1)
        together = _over(dot.sum(-1), _norm(self.norms), _norm(other.norms))
        return _over(dot, self.norms, other.norms), together

    def matrix(self) -> Tensor:
        """Cosines of each two vectors of a token: (B, S, H, H); NaN where one has no direction."""
        dot = self.values @ self.values.mT
        return _over(dot, self.norms[..., None], self.norms[..., None, :])


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
