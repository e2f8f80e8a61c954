"""Regions: parts that the keys of a query fall into, each key into one."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from smeltscope.probes.sampling import Sample

LOCAL_KEYS = 8  # the query itself and the seven before it are "local"

TEXT_REGIONS = ("first", "self", "previous", "local", "delimiter", "rest")


@dataclass(frozen=True, kw_only=True)
class Regions(ABC):
    """The regions of a batch."""

    names: Sequence[str]
    _inside: dict[int, tuple[Sample, Tensor]] = field(default_factory=dict, init=False, repr=False)

    @abstractmethod
    def of(self, queries: Tensor, keys: int) -> Tensor:
        """The region of each of the first `keys` keys as queries (B, N) see them: index into `names`, (B, N, keys)."""

    def sums(self, mass: Tensor, queries: Sample) -> Tensor:
        """Attention mass summed over the keys of each region and valid queries: (B, H, N, K) -> (B, H, region)."""
        return (self.inside(queries, mass.shape[3]) @ mass.flatten(2).mT).mT

    def inside(self, queries: Sample, keys: int) -> Tensor:
        """1 where a valid query has one of the first `keys` keys in a region: (B, region, N * keys), float32.

        Made once for a batch, whose executions have the same sampled queries.
        """
        known = self._inside.get(keys)
        if known is None or not known[0].equals(queries):
            region = self.of(queries.positions, keys).masked_fill(~queries.valid[..., None], -1)
            number = torch.arange(len(self.names), device=region.device)
            inside = (region.flatten(1)[:, None] == number[:, None]).float()
            known = self._inside[keys] = queries, inside
        return known[1]


@dataclass(frozen=True, kw_only=True)
class TextRegions(Regions):
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
class PromptRegions(Regions):
    """Regions of prompts: a key's region is the same for every query."""

    region: Tensor  # (B, T), int64, index into names

    def of(self, queries: Tensor, keys: int) -> Tensor:
        return self.region[:, None, :keys].expand(-1, queries.shape[1], -1)
