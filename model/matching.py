"""Matching: looped configurations that cost what a Baseline costs in parameters, FLOPs and KV cache at once.

The free choices are the width, the number and width of the experts, the head size and the GQA ratio (query heads for
each K/V head), on grids of multiples of 8. For every width, head size and ratio the three budgets say what the other
sizes ought to be: the cache the number of K/V heads, the FLOPs the width of the experts, the parameters their
number. The neighbours of these on the grids are counted exactly.
Source: arXiv 2609.01343, which narrows the width, adds experts, and takes smaller heads or a higher GQA ratio.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smeltscope.errors import SmeltscopeError
from smeltscope.model.budgets import Budget, Number, Sizes, budget_of, sizes_of
from smeltscope.model.config_files import model_table
from smeltscope.model.configuration import SmeltConfig

STEP = 8  # 16 bytes of bfloat16: what matrix multiplications and flash attention ask for
HEAD_SIZES = np.array([*range(16, 129, STEP), 160, 192, 256])
GQA_RATIOS = np.arange(1, 17)
TOLERANCES = {"training_flops": 0.04, "parameters": 0.01, "cache_bytes": 0.04}  # the paper's

_LOOP = ("loop_start", "loop_stop", "num_visits", "residual_scale")
_FREE = {  # the sizes that are chosen, and the fields of SmeltConfig that hold them
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "experts": "num_experts",
    "expert_width": "moe_intermediate_size",
}


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What is not left to the search."""

    width: int | None = None
    experts: int | None = None
    expert_width: int | None = None
    head_size: int | None = None
    gqa_ratio: int | None = None


@dataclass(frozen=True, kw_only=True)
class Match:
    """A looped configuration, and by how much its budgets are above the Baseline's."""

    config: SmeltConfig
    excess: dict[str, float]  # by budget, as a share of the Baseline's

    @property
    def mismatch(self) -> float:
        """The largest of the three differences, each as a share of what is tolerated: 1 or less is a match."""
        return float(_mismatch(self.excess))


def find_matches(
    baseline: SmeltConfig,
    *,
    visits: int = 2,
    span: tuple[int, int] | None = None,
    document_length: float,
    fixed: Choices | None = None,
    most: int = 10,
) -> list[Match]:
    """Looped configurations on the budgets of `baseline`, the best first, at most `most`.

    They have the Baseline's number of layers, of which `span` (half-open, by default the middle half) runs `visits`
    times. The order is that of the mismatch, in steps of a tenth; among equals, those come first whose head size, GQA
    ratio and proportions are nearest to the Baseline's.

    Raises SmeltscopeError for a Baseline that is looped, and for choices that make no model.
    """
    if baseline.num_visits != 1:
        raise SmeltscopeError(
            f"The Baseline of a match runs every layer once, and this one loops {len(baseline.span)} of them; "
            "give the model without the loop."
        )
    loop = {"num_visits": visits}
    if span is not None:
        loop |= {"loop_start": span[0], "loop_stop": span[1]}
    table = {k: v for k, v in model_table(baseline).items() if k not in _LOOP} | loop
    start = sizes_of(baseline)
    target = budget_of(start, document_length=document_length)
    looped = dataclasses.replace(start, executions=len(SmeltConfig(**table).executions))
    grid = _candidates(looped, target, fixed or Choices(), document_length)
    mismatch = _mismatch(_excess(grid, target, document_length))  # by candidate
    order = np.lexsort((_distance(grid, start), np.round(mismatch, 1)))[: 16 * most]
    rows = np.stack([getattr(grid, name)[order] for name in _FREE], axis=1)
    matches = []
    for row in list(dict.fromkeys(map(tuple, rows.tolist())))[:most]:
        chosen: dict[str, Any] = dict(zip(_FREE, row, strict=True))
        sizes = dataclasses.replace(looped, **chosen)
        config = SmeltConfig(**table | dict(zip(_FREE.values(), row, strict=True)))
        matches.append(Match(config=config, excess=_excess(sizes, target, document_length)))
    return matches


def _excess(sizes: Sizes, target: Budget, document_length: float) -> dict[str, Number]:
    """By how much each budget is above the target, as a share of it."""
    budget = budget_of(sizes, document_length=document_length)
    return {name: getattr(budget, name) / getattr(target, name) - 1 for name in TOLERANCES}


def _mismatch(excess: dict[str, Number]) -> Number:
    return np.max([np.abs(excess[name]) / most for name, most in TOLERANCES.items()], axis=0)


def _distance(grid: Sizes, start: Sizes) -> Number:
    """How far the proportions that make a model what it is are from the Baseline's: logarithms, summed."""
    return sum(np.abs(np.log(_proportions(grid)[i] / p)) for i, p in enumerate(_proportions(start)))


def _proportions(sizes: Sizes) -> tuple[Number, ...]:
    return (
        sizes.head_size,
        sizes.heads / sizes.kv_heads,
        sizes.heads * sizes.head_size / sizes.width,
        sizes.expert_width / sizes.width,
    )


def _candidates(looped: Sizes, target: Budget, fixed: Choices, document_length: float) -> Sizes:
    """Configurations near the three budgets: arrays of one length."""
    # As wide as the Baseline, or narrower in the proportion in which there are more executions.
    narrowest = looped.width * looped.layers // looped.executions // STEP * STEP
    axes = np.meshgrid(
        _grid(fixed.width, np.arange(max(narrowest, STEP), looped.width + 1, STEP)),
        _grid(fixed.head_size, HEAD_SIZES),
        _grid(fixed.gqa_ratio, GQA_RATIOS),
    )
    width, head_size, ratio = (axis.ravel() for axis in axes)
    found = dataclasses.replace(looped, width=width, head_size=head_size, heads=ratio, kv_heads=1)

    def neighbours(name: str, budget: str, step: int = STEP, least: int = STEP) -> NDArray[Any]:
        """The values of a size on its grid on either side of the one that meets a budget."""

        def cost(value: int) -> Number:
            size: dict[str, Any] = {name: value}
            sizes = dataclasses.replace(found, **size)
            return getattr(budget_of(sizes, document_length=document_length), budget)

        # every budget is linear in every size
        below = (getattr(target, budget) - cost(0)) // (cost(1) - cost(0)) // step * step
        return np.maximum(np.stack([below, below + step]), least).astype(np.int64)

    kv_heads = neighbours("kv_heads", "cache_bytes", step=1, least=1)
    found = dataclasses.replace(found, kv_heads=kv_heads, heads=ratio * kv_heads)
    # The number of experts, which FLOPs feel in the router only, follows last: here as many more as executions.
    experts = fixed.experts or looped.experts * looped.executions // looped.layers
    found = dataclasses.replace(found, experts=experts)
    meets = "training_flops" if fixed.experts is None else "parameters"
    expert_width = fixed.expert_width or neighbours("expert_width", meets)
    found = dataclasses.replace(found, expert_width=expert_width)
    if fixed.experts is None:
        found = dataclasses.replace(
            found, experts=neighbours("experts", "parameters", least=looped.active_experts)
        )
    arrays = np.broadcast_arrays(*(getattr(found, name) for name in _FREE))
    chosen: dict[str, Any] = {n: a.ravel() for n, a in zip(_FREE, arrays, strict=True)}
    return dataclasses.replace(found, **chosen)


def _grid(fixed: int | None, free: NDArray[np.int64]) -> NDArray[np.int64]:
    return free if fixed is None else np.array([fixed])
