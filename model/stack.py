"""Where a model keeps the layers that its executions run."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from smeltscope.errors import SmeltscopeError
from smeltscope.model.executions import executions_of


def decoder_stack(model: PreTrainedModel) -> tuple[nn.Module, list[nn.Module]]:
    """The module whose forward is one pass through the decoder, and the layer that each execution runs.

    A looped model lists one module for each execution (SMELT) or one for each layer, which then
    stands here once for each of its visits.

    Raises `SmeltscopeError` when the model has no list of transformers' layers, several, or one that
    is not what its configuration implies.
    """
    stacks = [
        (parent, list(child))
        for parent in model.modules()
        for child in parent.children()
        if isinstance(child, nn.ModuleList)
        and len(child) > 0
        and all(isinstance(layer, GradientCheckpointingLayer) for layer in child)
    ]
    if not stacks:
        raise SmeltscopeError(
            f"{type(model).__name__} has no list of decoder layers that smeltscope knows how to watch."
        )
    executions = executions_of(model.config)
    if model.config.model_type == "hrm_text":
        # The low and the high stack, in the order in which they first run, inside one decoder.
        decoder: Any = next(m for m in model.modules() if hasattr(m, "L_module"))
        layers = [*decoder.L_module.layers, *decoder.H_module.layers]
    elif len(stacks) == 1:
        decoder, layers = stacks[0]
    else:
        raise SmeltscopeError(
            f"{type(model).__name__} has {len(stacks)} stacks of layers; smeltscope watches decoder-only "
            "language models, which have one. A multimodal model holds its language model inside."
        )
    one_each = len(layers) == len(executions)
    indices = [e.index if one_each else e.layer for e in executions]
    if set(indices) != set(range(len(layers))):
        raise SmeltscopeError(
            f"{type(model).__name__} has {len(layers)} layers, but its configuration implies that "
            f"{len(set(indices))} run; it cannot be labelled rightly."
        )
    return decoder, [layers[i] for i in indices]
