"""attended-tokens: whether the visits of a layer attend to the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from smeltscope.activations import Variable
from smeltscope.probes.labels import executions_of_pairs, over_documents
from smeltscope.probes.probe import Batch, ModelShape, Probe
from smeltscope.probes.rows import Rows, check_rows
from smeltscope.probes.statistics import (
    Estimate,
    Quantities,
    Quantity,
    Resampling,
    exact,
    quantities,
)
from smeltscope.probes.visit_pairs import averages, each_of, first_of

if TYPE_CHECKING:
    from smeltscope.model import Execution

TOP = 8  # most attended keys
LEAST_KEYS = (2, 64)  # that a query has to see: to have a choice; for 8 keys to be a choice
FIRST_KEY = ("with", "without")
NEAR_TIE = 1e-5  # scores closer than this change places with rounding

_BY_PAIR = ("segment", "looped_layer", "visit_pair")
_BY_EXECUTION = ("segment", "execution")
# How a quantity is called by which queries count and whether the first key does: (least_keys, first_key).
_CUTS = {
    "": (1, 0),
    "_without_first": (1, 1),
    "_any": (0, 0),
    "_any_without_first": (0, 1),
}


@dataclass(frozen=True, kw_only=True)
class AttendedTokens(Probe):
    """Whether two visits of a layer attend to the same keys, head by head.

    Queries q are sampled: up to `sampled_queries` of each segment, evenly over the logarithm of their position, never
    the first token. With s_v[q, j] the score of visible key j before the softmax at visit v and p_v[q, j] its attention mass,
    for each segment, looped layer, pair of visits a < b and head, summed over counted queries:

    - `top1_sum`: 1 where argmax_j s_a = argmax_j s_b, else 0.
    - `top8_sum`: |T_a and T_b| / 8, T_v the 8 keys with the highest s_v. Scores are ranked, since masses that underflow
      tie.
    - `overlap_sum`: sum_j min(p_a, p_b), from 0 (disjoint) to 1 (alike); with learned sinks, whose mass is on no key, alike rows
      reach only their sum.
    - `queries` counts queries, `chance_sum` sums 1 / n over them, n the number of keys that q sees: the chance that two random
      keys agree. Two random sets of 8 share 8 / n of their keys.

    Along `least_keys`, which queries count: those that see at least 2 keys, or 64 (`top8_sum`: 64 only, since with 8 keys or
    fewer all agree). Along `first_key`: with every key, or without the segment's first, the masses of the rest
    scaled to sum to 1 (at least 2 keys are then to remain, and n is their number).

    Control, for each segment, execution and head h: the same numbers, `control_...`, between h and head
    (h + floor(H / 2)) mod H at this one execution; of H heads none meets itself, for even H they pair up, and H = 1
    has no control. `shared_keys` is 1 where all heads read one K/V head, which makes other heads more alike. `near_ties` counts
    queries with 64 keys or more whose 8th and 9th scores are within 1e-5: there the 8 are not well defined.

    Every sampled query weighs alike: sums over segments, divided by counts. Units: shares. Source: arXiv 2609.01343
    (top 8 and top 1 against the head H/2 further on; its formula for the overlap is not given, ours is above).
    """

    name = "attended-tokens"
    sites = ("attention", "rows")

    def dimensions(self, shape: ModelShape) -> Mapping[str, np.ndarray]:
        return {"least_keys": np.array(LEAST_KEYS), "first_key": np.array(FIRST_KEY)}

    def variables(self, shape: ModelShape) -> Mapping[str, Variable]:
        cuts = ("least_keys", "first_key")
        measured = {
            "queries": (cuts, "counted queries"),
            "chance_sum": (cuts, "1 / visible keys, summed over queries"),
            "top1_sum": (("head", *cuts), "queries whose most attended key is the same"),
            "top8_sum": (
                ("head", "first_key"),
                "share of the 8 most attended keys that are the same, summed over queries",
            ),
            "overlap_sum": (
                ("head", *cuts),
                "overlap of the attention distributions, summed over queries",
            ),
        }
        by_pair = {
            name: Variable(dims=(*_BY_PAIR, *dims), description=f"two visits: {meaning}")
            for name, (dims, meaning) in measured.items()
        }
        by_execution = {
            f"control_{name}": Variable(
                dims=(*_BY_EXECUTION, *dims), description=f"two heads of one visit: {meaning}"
            )
            for name, (dims, meaning) in measured.items()
        }
        return (by_pair if shape.visit_pairs else {}) | {
            **by_execution,
            "near_ties": Variable(
                dims=(*_BY_EXECUTION, "head"),
                description="queries that see 64 keys whose 8th and 9th scores lie within 1e-5",
            ),
            "shared_keys": Variable(
                dims=_BY_EXECUTION, description="1 where all heads read one K/V head"
            ),
        }

    def observe(
        self,
        arrays: Mapping[str, np.ndarray],
        batch: Batch,
        execution: Execution,
        sites: Mapping[str, Any],
        earlier: Mapping[int, Any],
    ) -> Any:
        rows: Sequence[Rows] = sites["rows"]
        check_rows(rows, execution)
        now = Ranked.of(rows)

        def write(place: tuple[int, ...], measured: Mapping[str, Tensor]) -> None:
            for name, values in measured.items():
                # A layer may have fewer heads than others.
                index: Any = (slice(None), *place, *map(slice, values.shape[1:]))
                arrays[name][index] = values.cpu().numpy()

        control = {f"control_{n}": x for n, x in (now.counts | measure_control(now)).items()}
        write((execution.index,), control | {"near_ties": now.near_ties})
        arrays["shared_keys"][:, execution.index] = sites["attention"].key.shape[1] == 1
        for pair in batch.shape.pairs_of(execution):
            write((pair.layer, pair.pair), now.counts | measure(earlier[pair.earlier], now))
        return None if batch.shape.is_last_visit(execution) else now

    def progress(
        self, arrays: Mapping[str, np.ndarray], shape: ModelShape
    ) -> Mapping[str, tuple[float, float]]:
        if not shape.visit_pairs:
            return {}
        shared = arrays["top8_sum"][..., 0]  # (segment, looped_layer, visit_pair, head)
        queries = np.where(np.isfinite(shared), arrays["queries"][..., None, 1, 0], 0)
        return {"same top 8": (float(np.nansum(shared)), float(queries.sum()))}

    def estimates(self, run: xr.DataTree, resampling: Resampling) -> Quantities:
        """Means over queries of what the class's text names, those that see 64 keys or more.

        Over (looped_layer, visit_pair, head): `top8`, `top1`, `overlap` and beside each its control, `top8_control`, ...,
        the mean of both visits' controls; `top8_excess` = top8 - top8_control. Over (looped_layer, visit_pair):
        `top8_chance`, `top1_chance`; `queries`, how many were counted. With the ending `_without_first`, the same
        without the first key; with `_any` and `_any_without_first`, over all queries that see 2 keys or more (top 8 has
        none). Over (visit_pair): `top8_by_pair` and so on, the mean over layers and heads; `top8_overall`: over pairs too.

        Over (execution, head), the control by itself: `other_head_top8`, `other_head_top1`, `other_head_overlap`;
        `near_ties`, the share of queries that have one. Over (execution): `other_head_chance`, that of top 8;
        `shared_keys`.
        """
        data = run["attended_tokens"].dataset

        def mean(name: str, cut: tuple[int, int], prefix: str = "") -> Estimate:
            sums, queries = (data[f"{prefix}{part}"].values for part in (f"{name}_sum", "queries"))
            sums = sums[..., cut[1]] if name == "top8" else sums[..., *cut]
            return resampling.ratio(sums, queries[..., *cut])

        wide = data["control_queries"].values[..., *_CUTS[""]]
        by_head = {
            f"other_head_{name}": mean(name, _CUTS[""], "control_")
            for name in ("top8", "top1", "overlap")
        }
        by_head["near_ties"] = resampling.ratio(data["near_ties"].values, wide)
        chance = data["control_chance_sum"].values[..., *_CUTS[""]]
        by_execution = {
            "other_head_chance": exact(resampling.ratio(TOP * chance, wide).value),
            "shared_keys": exact(data["shared_keys"].values.max(0)),
        }
        return {
            **(_by_pair(data, mean, resampling) if "top8_sum" in data else {}),
            **quantities(("execution", "head"), by_head),
            **quantities(("execution",), by_execution),
        }

    def sentence(self, summary: xr.Dataset) -> str:
        return sentence(summary)


def _by_pair(
    data: xr.Dataset, mean: Callable[..., Estimate], resampling: Resampling
) -> dict[str, Quantity]:
    """The quantities of `AttendedTokens` that compare visits."""
    visits = executions_of_pairs(data)  # (looped_layer, visit_pair, 2)
    exists = np.all(visits >= 0, axis=-1)[..., None]
    by_pair = ("looped_layer", "visit_pair")
    by_head = (*by_pair, "head")
    found: dict[str, Quantity] = {}
    for ending, cut in _CUTS.items():
        queries, chance = (data[name].values[..., *cut] for name in ("queries", "chance_sum"))
        for name, keys in (("top8", TOP), ("top1", 1), ("overlap", None)):
            if name == "top8" and LEAST_KEYS[cut[0]] < TOP:
                continue
            value = mean(name, cut)
            control = mean(name, cut, "control_")[visits].mean(axis=2).where(exists)
            found |= quantities(by_head, {name + ending: value, f"{name}_control{ending}": control})
            if keys is not None:
                level = exact(resampling.ratio(keys * chance, queries).value)
                found |= quantities(by_pair, {f"{name}_chance{ending}": level})
            if name == "top8":
                excess = {f"top8_excess{ending}": value - control}
                found |= quantities(by_head, excess, family=excess)
    found |= averages({name: q.estimate for name, q in found.items()})
    counts = data["queries"].values
    queries_by_cut = {
        f"queries{ending}": exact(np.nansum(counts[..., *cut], axis=0))
        for ending, cut in _CUTS.items()
    }
    return {**found, **quantities(by_pair, queries_by_cut)}


def sentence(summary: xr.Dataset) -> str:
    """The result in a few sentences, with numbers, chance level, control and interval."""
    documents = over_documents(summary)
    shared = (
        " All heads of a layer read one K/V head here, which makes other heads more alike."
        if (summary["shared_keys"] == 1).any()
        else ""
    )

    def percent(name: str) -> str:
        return f"{100 * float(summary[name].mean()):.1f}"

    if "top8" not in summary:
        return (
            "No layer is visited twice, so there is no second visit to compare. Two heads of a layer, H/2 apart, share "
            f"{percent('other_head_top8')} % of the {TOP} keys they attend to most (chance: "
            f"{percent('other_head_chance')}), {documents}, queries that see {LEAST_KEYS[1]} keys or more.{shared}"
        )
    # Segments may be too short for a query to see 64 keys.
    ending, least, names = (
        ("", LEAST_KEYS[1], ("top8", "top1", "overlap"))
        if np.isfinite(summary["top8_overall"])
        else ("_any", LEAST_KEYS[0], ("top1", "overlap"))
    )
    if not np.isfinite(summary[f"top1{ending}_overall"]):
        return f"No query was counted {documents}: in segments of two tokens or fewer none has a choice of keys."
    text = {
        "top8": f"share {{}} of the {TOP} keys that a head attends to most",
        "top1": "have the same most attended key in {} of queries",
        "overlap": "overlap in their whole distributions by {}",
    }
    by_pair = each_of(100 * summary[f"{names[0]}{ending}_by_pair"], ".1f")
    summary, visits = first_of(summary)
    parts = []
    for name in names:
        value = f"{percent(f'{name}{ending}_by_pair')} %"
        if np.isfinite(summary[f"{name}{ending}_by_pair_low"]):
            low, high = (percent(f"{name}{ending}_by_pair_{end}") for end in ("low", "high"))
            value += f" [{low}, {high}]"
        beside = f"the head H/2 further on: {percent(f'{name}_control{ending}_by_pair')}"
        if f"{name}_chance{ending}_by_pair" in summary:
            beside += f"; chance: {percent(f'{name}_chance{ending}_by_pair')}"
        parts.append(f"{text[name].format(value)} ({beside})")
    without = ", ".join(percent(f"{name}{ending}_without_first_by_pair") for name in names)
    return (
        f"Mean over looped layers and heads, {documents}, queries that see {least} keys or more: {visits} "
        f"{', '.join(parts)}. Without the first key: {without}."
        f"{by_pair and f' The first of these by pair, {by_pair}.'}{shared}"
    )


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """Attention rows of S sampled queries and what they attend to most; the last W of them may see 64 keys."""

    mass: Sequence[Tensor]  # of each block (B, H, N, K)
    rest: Sequence[Tensor]  # of each block (B, H, N, K - 1), all keys but the first, to sum 1
    top1: Tensor  # (B, H, S, first_key), position of the most attended key
    top8: Tensor  # (B, H, W, first_key, 8), positions of the most attended keys
    counted: Tensor  # (B, S, least_keys, first_key), bool
    counts: dict[str, Tensor]  # `queries` and `chance_sum`: (B, least_keys, first_key)
    near_ties: Tensor  # (B, H)

    @classmethod
    def of(cls, rows: Sequence[Rows]) -> Ranked:
        def join(values: Sequence[Tensor]) -> Tensor:
            return torch.cat([*values], dim=1)

        few, many = LEAST_KEYS
        keys = join([block.keys_seen for block in rows])  # (B, S)
        seen = torch.stack([keys, keys - join([block.sees_first for block in rows]).long()], dim=-1)
        enough = torch.stack([seen >= few, (keys >= many)[..., None].expand_as(seen)], dim=2)
        counted = enough & join([block.queries.valid for block in rows])[..., None, None]

        short = [block.scores for block in rows if block.scores.shape[3] < many]
        wide = [_top8(block.scores) for block in rows[len(short) :]]
        size = len(keys), rows[0].scores.shape[1], 0
        top8 = torch.cat([keys.new_empty(*size, 2, TOP), *(keys for keys, _ in wide)], dim=2)
        near_tie = torch.cat([counted.new_empty(size), *(near for _, near in wide)], dim=2)
        return cls(
            mass=[block.mass for block in rows],
            # Not from the mass: beside a strong sink that of the rest underflows.
            rest=[block.scores[..., 1:].softmax(-1) for block in rows],
            top1=torch.cat([*map(_top1, short), top8[..., 0]], dim=2),
            top8=top8,
            counted=counted,
            counts={
                "queries": counted.sum(1),
                "chance_sum": (counted / seen.clamp(min=1)[:, :, None]).sum(1),
            },
            near_ties=(near_tie & _last(counted, near_tie.shape[2])[:, None, :, 1, 0]).sum(2),
        )

    def heads(self, choose: Callable[[Tensor], Tensor]) -> Ranked:
        """The same of other heads."""
        return replace(
            self,
            mass=[choose(mass) for mass in self.mass],
            rest=[choose(rest) for rest in self.rest],
            top1=choose(self.top1),
            top8=choose(self.top8),
        )


def _last(values: Tensor, number: int) -> Tensor:
    """The last `number` entries along the second axis."""
    return values[:, values.shape[1] - number :]


def _top1(scores: Tensor) -> Tensor:
    """The most attended key, and that without the first one: (B, H, N, K) -> (B, H, N, first_key)."""
    if scores.shape[3] == 1:  # nothing but the first key
        return scores.new_zeros(*scores.shape[:3], 2, dtype=torch.long)
    best, key = scores[..., 1:].max(-1)
    key = key + 1
    return torch.stack([key.masked_fill(scores[..., 0] >= best, 0), key], dim=-1)


def _top8(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The 8 most attended keys, and those without the first one; whether the 8th of all is nearly tied.

    (B, H, N, K) -> (B, H, N, first_key, 8) and (B, H, N).
    """
    best, keys = scores.topk(TOP + 1)
    # Where the first key is among them, those behind it move up.
    passed = (keys == 0).cumsum(-1)[..., :TOP] > 0
    without = torch.where(passed, keys[..., 1:], keys[..., :TOP])
    near_tie = best[..., TOP - 1] - best[..., TOP] <= NEAR_TIE
    return torch.stack([keys[..., :TOP], without], dim=3), near_tie


def measure(a: Ranked, b: Ranked) -> dict[str, Tensor]:
    """Two visits, or other heads of one, of the same queries: sums of `AttendedTokens`, (B, H, ...)."""
    top1 = (a.top1 == b.top1)[:, :, :, None] & b.counted[:, None]  # (B, H, S, least, first)
    same = (a.top8[..., :, None] == b.top8[..., None, :]).flatten(-2)  # (B, H, W, first, 64)
    wide = _last(b.counted, same.shape[2])[:, None, :, 1]  # (B, 1, W, first)
    blocks = zip(a.mass, a.rest, b.mass, b.rest, strict=True)
    overlap = torch.cat([_overlap(*block) for block in blocks], dim=2)[:, :, :, None]
    return {
        "top1_sum": top1.sum(2),
        "top8_sum": (same & wide[..., None]).sum((2, 4)) / TOP,
        # Of queries that see nothing but the first key the rest is 0 / 0; they are not counted.
        "overlap_sum": torch.where(b.counted[:, None], overlap, 0.0).sum(2),
    }


def _overlap(p: Tensor, p_rest: Tensor, q: Tensor, q_rest: Tensor) -> Tensor:
    """sum_j min(p_j, q_j) over all keys, and over all but the first: (B, H, N, first_key)."""
    whole, rest = torch.minimum(p, q).sum(-1), torch.minimum(p_rest, q_rest).sum(-1)
    return torch.stack([whole, rest], dim=-1)


def measure_control(rows: Ranked) -> dict[str, Tensor]:
    """Each head h against head (h + H // 2) mod H of the same visit; nothing where there is but one."""
    heads = rows.top1.shape[1]
    half = heads // 2
    if heads == 1:
        return {}
    if heads % 2 == 1:
        return measure(rows, rows.heads(lambda values: values.roll(-half, 1)))
    # Every pair is met once and stands for both of its heads.
    pairs = measure(
        rows.heads(lambda values: values[:, :half]), rows.heads(lambda values: values[:, half:])
    )
    return {name: torch.cat([values, values], dim=1) for name, values in pairs.items()}
