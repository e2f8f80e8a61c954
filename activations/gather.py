"""Heads that tensor parallelism keeps in several processes, put together again."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smeltscope.activations.attention import Attention

HEADS_SPLIT = (
    "q",
    "k",
    "v",
    "q_norm",
    "k_norm",
)  # sites (B, T, head, size) that a process holds a part of


def head_group(attention: nn.Module) -> dist.ProcessGroup | None:
    """The processes that share the heads of an attention module; None where this one holds them all."""
    weight: Any = getattr(getattr(attention, "q_proj", None), "weight", None)
    placements = getattr(weight, "placements", ())  # of a DTensor
    return weight.device_mesh.get_group() if any(p.is_shard(0) for p in placements) else None


def gather(part: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tensor:
    """All heads, along `dim`, from those that each process of `group` holds."""
    if group is None:
        return part
    parts = [torch.empty_like(part.contiguous()) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim)


def share(whole: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tensor:
    """This process's part of what `gather` put together."""
    if group is None:
        return whole
    return whole.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]


def gather_attention(part: Attention, group: dist.ProcessGroup | None) -> Attention:
    """The attention of all heads."""
    if group is None:
        return part
    return replace(
        part,
        query=gather(part.query, 1, group),
        key=gather(part.key, 1, group),
        value=gather(part.value, 1, group),
        lse=gather(part.lse, 1, group),
        bias=gather(part.bias, 1, group)
        if part.bias is not None and part.bias.shape[1] > 1
        else part.bias,
        learned_sink=None if part.learned_sink is None else gather(part.learned_sink, 1, group),
    )
