"""A model spread over processes for training (FSDP2): tied visits share their pieces."""

from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_shard

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
