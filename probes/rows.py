"""Whole attention rows of the sampled queries, in blocks: what needs more of attention than the mass on chosen keys.

Sampled queries stand at ascending positions, and most of them near the start. A block holds neighbours that need about
as many keys: up to 64, up to 128, up to 256, ... That is not much more than the rows themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from einops import rearrange
from torch import Tensor

from smeltscope.errors import SmeltscopeError
from smeltscope.probes.sampling import Sample

if TYPE_CHECKING:
    from smeltscope.activations import Attention
    from smeltscope.model import Execution

FEWEST_KEYS = 64  # that a block is made for


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of one block: N queries of each segment on the first K keys, which hold all that they see."""

    queries: Sample  # (B, N)
    query: Tensor  # (B, H, N, D), float32, times the scale of scores
    scores: Tensor  # (B, H, N, K), float32, before the softmax, -inf where hidden
    sink_logit: Tensor | None  # (B, H, N), float32, of models with learned sinks
    mass: Tensor  # (B, H, N, K), float32; sums to 1 less the mass of learned sinks
    keys_seen: Tensor  # (B, N), int64
    sees_first: Tensor  # (B, N), bool: windows hide the first key from late queries


def rows_of(attention: Attention, queries: Sample) -> list[Rows]:
    """The attention rows of sampled queries, block by block."""
    # Copied once here, not by the product of each block.
    attention = replace(attention, key=attention.key.float().contiguous())
    return [
        block_of(attention, queries.slice(start, stop), keys)
        for start, stop, keys in _blocks(_keys_needed(attention, queries))
    ]


def block_of(attention: Attention, queries: Sample, keys: int) -> Rows:
    """The attention rows of queries as one block: on the first `keys` keys, which have to hold all that they see."""
    query = _take(attention.query, queries).float() * attention.scale  # (B, H, N, D)
    sink_logit = None
    if attention.learned_sink is not None:
        learned, lse = _take(attention.learned_sink, queries), _take(attention.lse, queries)
        sink_logit = learned.log() + lse  # (B, H, N)
    seen = _seen(attention, queries, keys)
    scores = products(query, attention.key.float(), keys).add_(_bias(attention, queries, seen))
    return Rows(
        queries=queries,
        query=query,
        scores=scores,
        sink_logit=sink_logit,
        mass=softmax_with_sink(scores, sink_logit),
        keys_seen=seen.sum(-1),
        sees_first=seen[..., 0],
    )


def products(query: Tensor, key: Tensor, keys: int) -> Tensor:
    """Query vectors times the first `keys` keys, key heads shared: (B, H, N, D), (B, G, K, D) -> (B, H, N, keys)."""
    grouped = rearrange(query, "b (g r) n d -> b g (r n) d", g=key.shape[1])
    scores = grouped @ key[:, :, :keys].transpose(2, 3)
    return rearrange(scores, "b g (r n) k -> b (g r) n k", n=query.shape[2])


def softmax_with_sink(scores: Tensor, sink_logit: Tensor | None) -> Tensor:
    """Scores (B, H, N, K) -> attention mass; a learned sink's logit (B, H, N) takes its share, which is left out."""
    if sink_logit is None:
        return scores.softmax(-1)
    return torch.cat([scores, sink_logit[..., None]], dim=-1).softmax(-1)[..., :-1].contiguous()


def check_rows(rows: Sequence[Rows], execution: Execution) -> None:
    """Raises `SmeltscopeError` where scores overflowed: every number of such a row is NaN."""
    for block in rows:
        check_mass(block.mass[..., 0], execution)


def check_mass(mass: Tensor, execution: Execution) -> None:
    """Raises `SmeltscopeError` where attention mass is not a number."""
    if not mass.isfinite().all():
        raise SmeltscopeError(
            f"Attention of layer {execution.layer} at visit {execution.visit} is not a number: the model's "
            "scores overflow; check its weights, or run it with --dtype float32."
        )


def _take(values: Tensor, queries: Sample) -> Tensor:
    """(B, H, T, ...) at sampled queries: (B, H, S, ...)."""
    return queries.take(values.transpose(1, 2)).transpose(1, 2)


def _blocks(needed: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Neighbouring samples that need about as many keys: (start, stop, keys)."""

    def doublings(sample: int) -> int:
        return (max(needed[sample], FEWEST_KEYS) - 1).bit_length()

    for _, group in groupby(range(len(needed)), doublings):
        samples = list(group)
        yield samples[0], samples[-1] + 1, max(needed[i] for i in samples)


def _keys_needed(attention: Attention, queries: Sample) -> Sequence[int]:
    """How many keys, from the first on, each sample needs in whichever row it needs most."""
    if attention.bias is None and attention.causal:
        return (queries.positions.amax(0) + 1).tolist()
    seen = _seen(attention, queries, attention.key.shape[2]).any(0)  # (S, K)
    number = torch.arange(1, seen.shape[1] + 1, device=seen.device)
    return (seen * number).amax(1).clamp(min=1).tolist()


def _seen(attention: Attention, queries: Sample, keys: int) -> Tensor:
    """Which of the first `keys` keys each query sees, alike for all heads: (B, N, keys), bool."""
    key = torch.arange(keys, device=queries.positions.device)
    before = key <= queries.positions[..., None]
    if attention.bias is None:
        return before if attention.causal else torch.ones_like(before)
    bias = queries.take(attention.bias[:, 0, :, :keys].expand(len(before), -1, -1))
    # A float bias hides with -inf or with the lowest number of its type.
    seen = bias if bias.dtype == torch.bool else bias > torch.finfo(bias.dtype).min / 2
    return seen & before if attention.causal else seen


def _bias(attention: Attention, queries: Sample, seen: Tensor) -> Tensor:
    """What is added to the scores of queries, -inf where hidden: (B, H or 1, N, K)."""
    # Adding it to all heads is faster than masking in each.
    hidden = torch.where(seen, 0.0, -torch.inf)[:, None]
    if attention.bias is None or attention.bias.dtype == torch.bool:
        return hidden
    bias = attention.bias[..., : seen.shape[2]].expand(len(seen), -1, -1, -1)
    return hidden + _take(bias, queries)
