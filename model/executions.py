"""Executions: which layer runs at which visit, in the order of one forward."""

from collections import Counter
from collections.abc import Iterable
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


def label(layers: Iterable[int]) -> list[Execution]:
    """Executions from the layers in the order in which they run: a layer's n-th run is its visit n."""
    visits: Counter[int] = Counter()
    executions = []
    for index, layer in enumerate(layers):
        visits[layer] += 1
        executions.append(Execution(index=index, layer=layer, visit=visits[layer]))
    return executions


def unroll(num_layers: int, loop_start: int, loop_stop: int, num_visits: int) -> list[Execution]:
    """Executions of a stack whose layers `loop_start:loop_stop` run `num_visits` times as a block.

    With 0 visits the span is left out; the layers behind it keep their numbers.
    """
    span = range(loop_start, loop_stop)
    return label([*range(loop_start), *[*span] * num_visits, *range(loop_stop, num_layers)])


def executions_of(config: Any) -> list[Execution]:
    """The executions that a configuration implies, for any causal language model of transformers.

    Known loops: SMELT, `inkling2_loop` and `dory` run a span of their stack several times; `hrm_text`
    has two stacks, of which the low one runs `L_cycles` times and then the high one once, `H_cycles`
    times over. Layers of `hrm_text` are numbered low stack first, so that they have different numbers
    of visits. A configuration without a loop runs every layer once. A configuration that loops in a
    way not known here is refused with `SmeltscopeError`: labels that are guessed would be wrong in
    silence.
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
    if config.model_type == "dory":
        start, stop = config.n_input_layers, config.n_input_layers + config.n_recurrent_layers
        return unroll(config.num_hidden_layers, start, stop, config.n_recurrent_loops)
    if config.model_type == "hrm_text":
        size = config.num_layers_per_stack
        low, high = range(size), range(size, 2 * size)
        return label([*[*low] * config.L_cycles, *high] * config.H_cycles)
    if config.model_type in _LOOPED_OTHERWISE:
        raise SmeltscopeError(
            f"{config.model_type} runs its layers more than once in an order that smeltscope does "
            "not know yet; known looped models: smelt, inkling2_loop, dory, hrm_text."
        )
    return unroll(config.num_hidden_layers, 0, 0, 1)


# Looped models whose schedule is not written down above; transformers 5.24 has none, they come with their own code.
_LOOPED_OTHERWISE = {"ouro"}
