"""Matching: looped configurations that cost what a Baseline costs in parameters, FLOPs and KV cache at once.

The free choices are the width, the number and width of the experts, the head size and the GQA ratio (query heads for
each K/V head), on grids of multiples of 8. All that lie within the tolerances are found: for every width, head size
and expert width the cache bounds the number of K/V heads; FLOPs and parameters, two linear equations in the GQA
ratio and the number of experts, bound these.
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
FARTHEST = 10  # times the tolerances: what is farther off is no match in any sense

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
    times. The order is that of the mismatch, in steps of a tenth; in a step, those come first whose head size, GQA
    ratio and proportions are nearest to the Baseline's. A mismatch above `FARTHEST` is not listed.

    Raises SmeltscopeError for a Baseline that is looped, for choices that make no model, and where nothing is near.
    """
    if baseline.num_visits != 1:
        raise SmeltscopeError(
            f"The Baseline of a match runs every layer once, and this one loops {len(baseline.span)} of them; "
            "give the model without the loop."
        )
    fixed = fixed or Choices()
    loop = {"num_visits": visits}
    if span is not None:
        loop |= {"loop_start": span[0], "loop_stop": span[1]}
    table = {k: v for k, v in model_table(baseline).items() if k not in _LOOP} | loop
    given = {f: getattr(fixed, n) for n, f in _FREE.items() if getattr(fixed, n, None) is not None}
    start = sizes_of(baseline)
    target = budget_of(start, document_length=document_length)
    # choices that make no model fail here
    executions = len(SmeltConfig(**table | given).executions)
    looped = dataclasses.replace(start, executions=executions)
    for within in (1, FARTHEST):  # most often enough of them match, and need no wider search
        grid = _candidates(looped, target, fixed, document_length, within)
        mismatch = _mismatch(_excess(grid, target, document_length))  # by candidate
        if mismatch.size >= most:
            break
    if mismatch.size == 0:
        raise SmeltscopeError(
            f"No configuration comes within {FARTHEST} times what is tolerated of the Baseline's budgets: free a "
            "choice, or begin with a Baseline whose sizes are well above the steps of 8."
        )
    order = np.lexsort((_distance(grid, start), np.ceil(10 * mismatch)))[:most]
    rows = np.stack([getattr(grid, name)[order] for name in _FREE], axis=1)
    matches = []
    for row in rows.tolist():
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


def _candidates(
    looped: Sizes, target: Budget, fixed: Choices, document_length: float, within: float
) -> Sizes:
    """All configurations that are off by at most `within` times what is tolerated: arrays of one length."""

    def cost(**sizes: Any) -> NDArray[np.float64]:
        """Budgets in the order of `TOLERANCES`, by candidate."""
        budget = budget_of(dataclasses.replace(looped, **sizes), document_length=document_length)
        return np.array([getattr(budget, name) for name in TOLERANCES])

    def between(bare: Number, per_one: Number) -> tuple[Number, Number]:
        """How many of a size there are at least and at most, by FLOPs and parameters."""
        low, high = ((bound - bare)[:2] / per_one[:2] for bound in (least, most))
        return np.max(low, axis=0), np.min(high, axis=0)

    goal = np.array([[getattr(target, name)] for name in TOLERANCES])
    slack = within * goal * np.array([[share] for share in TOLERANCES.values()])
    least, most = goal - slack, goal + slack
    # As wide as the Baseline, or narrower in the proportion in which there are more executions.
    narrowest = max(looped.width * looped.layers // looped.executions // STEP * STEP, STEP)
    widths = _grid(fixed.width, np.arange(narrowest, looped.width + 1, STEP))
    # No expert is wider than when the active ones take all FLOPs.
    narrow = cost(width=widths[0], heads=0, kv_heads=0, experts=0, expert_width=1)[0]
    expert_widths = np.arange(STEP, int(most[0, 0] / narrow) + 1, STEP)
    axes = np.meshgrid(
        widths, _grid(fixed.head_size, HEAD_SIZES), _grid(fixed.expert_width, expert_widths)
    )
    names = ("width", "head_size", "expert_width")
    found: dict[str, Any] = {name: axis.ravel() for name, axis in zip(names, axes, strict=True)}

    per_kv_head = cost(**found, heads=0, kv_heads=1)[2]
    low, high = least[2] / per_kv_head, most[2] / per_kv_head
    found = _spread(found, "kv_heads", np.maximum(low, 1), high)

    # FLOPs and parameters are linear in the GQA ratio and the number of experts.
    ratios = _grid(fixed.gqa_ratio, GQA_RATIOS)
    bare = cost(**found, heads=0, experts=fixed.experts or 0)
    per_ratio = cost(**found, heads=found["kv_heads"], experts=fixed.experts or 0) - bare
    if fixed.experts is not None:
        low, high = between(bare, per_ratio)
    else:
        # FLOPs less as many times the parameters as makes the experts cancel out: what remains bounds the ratio.
        per_expert = cost(**found, heads=0, experts=1) - bare
        times = per_expert[0] / per_expert[1]
        slope = per_ratio[0] - times * per_ratio[1]
        low = (least[0] - bare[0] - times * (most[1] - bare[1])) / slope
        high = (most[0] - bare[0] - times * (least[1] - bare[1])) / slope
    found = _spread(found, "heads", np.maximum(low, ratios[0]), np.minimum(high, ratios[-1]))
    found["heads"] *= found["kv_heads"]
    if fixed.experts is not None:
        found["experts"] = np.full_like(found["heads"], fixed.experts)
    else:
        bare = cost(**found, experts=0)
        low, high = between(bare, cost(**found, experts=1) - bare)
        found = _spread(found, "experts", np.maximum(low, looped.active_experts), high, step=STEP)
    return dataclasses.replace(looped, **found)


def _spread(
    found: dict[str, Any], name: str, low: Number, high: Number, *, step: int = 1
) -> dict[str, Any]:
    """Every candidate with each multiple of `step` from `low` to `high` for one size more."""
    first = np.ceil(low / step).astype(np.int64)
    count = np.maximum(np.floor(high / step).astype(np.int64) - first + 1, 0)
    at = np.repeat(np.arange(count.size), count)
    nth = np.arange(at.size) - np.repeat(np.cumsum(count) - count, count)
    return {key: sizes[at] for key, sizes in found.items()} | {name: (first[at] + nth) * step}


def _grid(fixed: int | None, free: NDArray[np.int64]) -> NDArray[np.int64]:
    return free if fixed is None else np.array([fixed])
