"""A model spread over processes for training (FSDP2): tied visits share their pieces."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from smeltscope.model.smelt import SmeltForCausalLM


def shard(model: SmeltForCausalLM, **options: Any) -> SmeltForCausalLM:
    """Spread the parameters over the processes, in place; `options` are those of torch's `fully_shard`.

    The visits of a layer hold the same parameters, and FSDP2 wants each parameter in one group: they are gathered before
    the layer's first visit, given back after its last one, and their gradients are reduced once.
    """
    visits: dict[int, list[nn.Module]] = {}
    for execution, module in zip(model.config.executions, model.model.layers, strict=True):
        visits.setdefault(execution.layer, []).append(module)
    for modules in visits.values():
        fully_shard(modules, **options)
    fully_shard(model, **options)
    return model


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor; all of one that is not spread."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_weights(model: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """{name: weight} in main memory, tied ones once; every process takes part, those that `keep` nothing get {}."""
    weights = {}
    for name, parameter in model.named_parameters():
        weight = parameter.detach().full_tensor()  # type: ignore[attr-defined]
        if keep:
            weights[name] = weight.cpu()
    return weights


def whole_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimiser's state by names of parameters, in the main memory of the first process; {} in the others."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_optimizer_state_dict(model, optimizer, options=options)


def spread_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """Give every process its part of what `whole_optimizer_state` gave; read in the first process alone."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(model, optimizer, state, options=options)
