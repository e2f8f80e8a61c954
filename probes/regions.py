"""Regions: parts that the keys of a query fall into, each key into one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

LOCAL_KEYS = 8  # the query itself and the seven before it are "local"

TEXT_REGIONS = ("first", "self", "previous", "local", "delimiter", "rest")


class Regions(Protocol):
    """The regions of a batch."""

    @property
    def names(self) -> Sequence[str]: ...

    def of(self, queries: Tensor, keys: int) -> Tensor:
        """The region of each of the first `keys` keys as queries (B, N) see them: index into `names`, (B, N, keys)."""
        ...


@dataclass(frozen=True, kw_only=True)
class TextRegions:
    """Regions of plain text, the first that applies to a key: `first` (the segment's first token), `self` (the query's own
    place), `previous` (one before), `local` (two to seven before), `delimiter` (a token of punctuation or line breaks
    alone), `rest`."""

    delimiter: Tensor  # (B, T), bool: which tokens are delimiters
    names: Sequence[str] = TEXT_REGIONS

    def of(self, queries: Tensor, keys: int) -> Tensor:
        key = torch.arange(keys, device=queries.device)
        back = queries[..., None] - key  # (B, N, keys)
        # In place: torch.where of integers is slow.
        region = torch.where(self.delimiter[:, None, :keys], 4, 5).expand(back.shape).clone()
        region.masked_fill_((back >= 0) & (back < LOCAL_KEYS), 3)
        region.masked_fill_(back == 1, 2).masked_fill_(back == 0, 1)
        return region.masked_fill_(key == 0, 0)


@dataclass(frozen=True, kw_only=True)
class PromptRegions:
    """Regions of prompts: a key's region is the same for every query."""

    region: Tensor  # (B, T), int64, index into names
    names: Sequence[str]

    def of(self, queries: Tensor, keys: int) -> Tensor:
        return self.region[:, None, :keys].expand(-1, queries.shape[1], -1)


def masses_by_region(mass: Tensor, region: Tensor, regions: int) -> Tensor:
    """Attention mass summed over the keys of each region: (B, H, N, K) and (B, N, K) -> (B, H, N, region)."""
    sums = mass.new_zeros(*mass.shape[:3], regions)
    return sums.scatter_add_(3, region[:, None].expand(mass.shape), mass)
