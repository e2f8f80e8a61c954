"""Executions: which layer runs at which visit, in the order of one forward."""

from dataclasses import dataclass
from typing import Any

from smeltscope.errors import SmeltscopeError


@dataclass(frozen=True, kw_only=True)
class Execution:
    """One run of one layer in a forward.

    `index` counts executions in order from 0; `layer` is the physical layer, from 0, whose weights
    are stored once; `visit` says the how-manieth time the layer runs in this forward, from 1.
    """

    index: int
    layer: int
    visit: int


def unroll(num_layers: int, loop_start: int, loop_stop: int, num_visits: int) -> list[Execution]:
    """Executions of a stack whose layers `loop_start:loop_stop` run `num_visits` times as a block."""
    span = range(loop_start, loop_stop)
    order = [(layer, 1) for layer in range(loop_start)]
    order += [(layer, visit) for visit in range(1, num_visits + 1) for layer in span]
    order += [(layer, 1) for layer in range(loop_stop, num_layers)]
    return [Execution(index=i, layer=layer, visit=v) for i, (layer, v) in enumerate(order)]


def executions_of(config: Any) -> list[Execution]:
    """The executions that a configuration implies, for any causal language model of transformers.

    SMELT and `inkling2_loop` say what they loop; a configuration without a loop runs every layer
    once. A configuration that loops in a way not known here is refused with `SmeltscopeError`:
    labels that are guessed would be wrong in silence.
    """
    config = config.get_text_config(decoder=True)
    if hasattr(config, "num_visits"):
        return unroll(
            config.num_physical_layers, config.loop_start, config.loop_stop, config.num_visits
        )
    if hasattr(config, "loop_num_passes"):
        return unroll(
            config.num_hidden_layers,
            config.loop_layer_index_start,
            config.loop_layer_index_end,
            config.loop_num_passes,
        )
    if config.model_type in _LOOPED_OTHERWISE:
        raise SmeltscopeError(
            f"{config.model_type} runs its layers more than once in an order that smeltscope does "
            "not know yet; known looped models: smelt, inkling2_loop."
        )
    return unroll(config.num_hidden_layers, 0, 0, 1)


# Looped models of transformers whose schedule is not written down above.
_LOOPED_OTHERWISE = {"dory", "dory_text", "hrm_text", "ouro"}
