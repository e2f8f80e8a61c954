"""dyck-map: where the heads look when a Dyck prompt is answered, at each visit, and what moved between visits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor
from torch.nn.functional import pad

from smeltscope.activations import Variable
from smeltscope.probes.dyck_heads import dyck_head, dyck_head_of
from smeltscope.probes.labels import executions_of_pairs, looped_by_visit
from smeltscope.probes.probe import Batch, ModelShape, Probe
from smeltscope.probes.prompts import by_item
from smeltscope.probes.rows import Rows, check_rows
from smeltscope.probes.statistics import Estimate, Quantities, Resampling, exact, quantities
from smeltscope.tasks.dyck.segments import MARKS

if TYPE_CHECKING:
    from smeltscope.activations import Attention
    from smeltscope.model import Execution

LEARNED_SINK = "learned_sink"  # the last region: mass that a model gives to no token
DEMO_ANSWER = "demo_answer"
ROUNDING = 1e-6  # mass off BOS below which there is nothing that a float32 could tell apart


@dataclass(frozen=True, kw_only=True)
class DyckMap(Probe):
    """Attention mass by region of the prompt, from the rows that predict the answer's symbols.

    With A[q, k] the attention of row q on token k, for each segment, execution and head, over its `targets`, the answer's
    tokens that bear a symbol (kept at the prompt's number of shots); a target's row q is the position before it:

    - `region_mass_sum` = sum over targets of the sum of A[q, k] over the tokens k of a region. Regions part the tokens:
      bos, instruction, demo_input, demo_answer (the closing symbols of demonstration answers alone), separator (white space
      and markers), query_input, query_answer; `learned_sink` is mass that goes to no token, NaN where the model has none.
      They add up to the number of targets.
    - `mark_mass_sum`: the same for marked tokens, which overlap regions and each other: stack_top_opener (the opener that
      the target closes), right_demo_answer (symbols of demonstration answers that are the target's), local.
    - `uniform_sum`, `mark_uniform_sum`: the same under uniform attention over the keys that row q sees.

    Targets weigh alike in means. The change of a region's mass from visit 1 to visit 2, a2 - a1, is split by what BOS did,
    whose mass went from b1 to b2: `release` = a1 [(1 - b2) / (1 - b1) - 1], its part of what BOS gave up had that been
    handed out in proportion, and `retarget` = a2 - a1 (1 - b2) / (1 - b1), the rest: moved between the other regions. Over all
    regions but BOS, release adds up to b1 - b2 and retarget to 0. BOS itself is not split; where b1 = 1 nothing is. All of mean
    masses. Source: arXiv 2609.01343 shows one head on one prompt (its split: .35 and .26); the split is ours.
    """

    name = "dyck-map"
    names = ("dyck_head_layer", "dyck_head")
    resampled = "items"
    sites = ("attention", "rows")

    def dimensions(self, shape: ModelShape) -> Mapping[str, np.ndarray]:
        if not shape.shots:
            return {}
        regions = np.array([*shape.regions, LEARNED_SINK])
        return {"map_region": regions, "mark": np.array(MARKS)}

    def variables(self, shape: ModelShape) -> Mapping[str, Variable]:
        if not shape.shots:
            return {}
        by_execution = ("segment", "execution")
        by_head = (*by_execution, "head")
        by_pair = {}
        if shape.visit_pairs:
            by_pair["pair_targets"] = Variable(
                dims=("segment", "looped_layer", "visit_pair"),
                description="targets whose attention both visits have",
            )
        return {
            "targets": Variable(
                dims=("segment", "shots"),
                description="answer tokens that bear a symbol, at the prompt's number of shots",
            ),
            "unseen": Variable(
                dims=("segment",),
                description="1 for nested prompts of half 1, which no head is chosen on",
            ),
            **by_pair,
            "region_mass_sum": Variable(
                dims=(*by_head, "map_region"),
                description="attention mass on the region, summed over targets",
            ),
            "uniform_sum": Variable(
                dims=(*by_execution, "map_region"),
                description="region_mass_sum under uniform attention",
            ),
            "mark_mass_sum": Variable(
                dims=(*by_head, "mark"),
                description="attention mass on marked tokens, summed over targets",
            ),
            "mark_uniform_sum": Variable(
                dims=(*by_execution, "mark"), description="mark_mass_sum under uniform attention"
            ),
        }

    def observe(
        self,
        arrays: Mapping[str, np.ndarray],
        batch: Batch,
        execution: Execution,
        sites: Mapping[str, Any],
        earlier: Mapping[int, Any],
    ) -> None:
        if batch.prompts is None:
            return
        check_rows(sites["rows"], execution)
        labels = batch.prompts.labels
        targets = batch.prompts.targets.valid.sum(1, keepdim=True).cpu().numpy()  # (B, 1)
        arrays["targets"][:] = targets * (labels["shots"][:, None] == batch.shape.shots)
        arrays["unseen"][:] = (labels["kind"] == "nested") & (labels["half"] == 1)
        for pair in batch.shape.pairs_of(execution):
            arrays["pair_targets"][:, pair.layer, pair.pair] = targets[:, 0]
        for name, values in measure_map(sites["rows"], sites["attention"], batch).items():
            # A layer may have fewer heads than others, and no learned sink.
            place: Any = (slice(None), execution.index, *map(slice, values.shape[1:]))
            arrays[name][place] = values.cpu().numpy()

    def estimates(self, run: xr.DataTree, resampling: Resampling) -> Quantities:
        """Over nested prompts of half 1, as the Dyck head is chosen on half 0; over all prompts where none is nested.
        Intervals from drawing items again, each with all its shots and seeds.

        Over (execution, head, map_region) `mass`, over (execution, map_region) `uniform` and `mass_mean`, the mean over
        heads; over (execution, head, mark) `mark_mass`, over (execution, mark) `mark_uniform`. NaN for a region or mark
        that no prompt has. Over (looped_layer, visit_pair, head, map_region): `change` (later minus earlier visit) and its
        parts `release` and `retarget`; `..._overall` over (map_region), their means over layers, pairs and heads.
        `mass_visit_1_overall`, `mass_visit_2_overall`, ... over (map_region): mass at that visit, mean over looped layers (without
        a loop over all) and heads.

        `..._by_shots`: the same with (shots) in front. How many `prompts`, `targets` and `items` there are; `nested`, 1 where
        the prompts are nested ones. `dyck_head_layer`, `dyck_head`: the Dyck head, where `run` holds the search for it, and
        over (visit_pair, map_region) what `change`, `release` and `retarget` are of it: `dyck_head_change`, ...
        """
        if "region_mass_sum" not in run["dyck_map"].dataset:
            return {}
        known = dyck_head(run)
        nested = bool((run["segments"].dataset["label_kind"] == "nested").any())
        if nested:
            run = run.isel(segment=np.flatnonzero(run["dyck_map"].dataset["unseen"] == 1))
        data, items = run["dyck_map"].dataset, by_item(run, resampling)
        targets = data["targets"].values  # (segment, shots)
        looped = "pair_targets" in data
        pairs = executions_of_pairs(data) if looped else np.zeros((0, 0, 2), dtype=int)

        def measured(targets: np.ndarray) -> dict[str, Estimate]:
            """Everything over the segments that have `targets` (segment,)."""

            def average(name: str) -> Estimate:
                sums = data[name].values
                inside = (targets > 0).reshape(-1, *[1] * (sums.ndim - 1))
                return items.ratio(sums * inside, targets)

            mass, uniform = average("region_mass_sum"), average("uniform_sum")
            marked, mark_uniform = average("mark_mass_sum"), average("mark_uniform_sum")
            holds = uniform.value > 0  # (execution, map_region)
            holds[:, -1] = True  # no token is a learned sink
            found = {
                "mass": mass.where(holds[:, None]),
                "uniform": uniform.where(holds),
                "mark_mass": marked.where((mark_uniform.value > 0)[:, None]),
                "mark_uniform": mark_uniform.where(mark_uniform.value > 0),
            }
            found["mass_mean"] = found["mass"].mean(1)
            if looped:
                held = (holds[pairs] & (pairs >= 0)[..., None]).all(2)  # (layer, pair, map_region)
                found |= {
                    name: part.where(held[:, :, None])
                    for name, part in split_estimates(
                        mass[pairs[..., 0]], mass[pairs[..., 1]]
                    ).items()
                }
            return found

        pooled = measured(targets.sum(1))
        levels = [measured(of_shots) for of_shots in targets.T]
        by_shots = {name: stacked([level[name] for level in levels]) for name in pooled}
        dims = {
            "mass": ("execution", "head", "map_region"),
            "uniform": ("execution", "map_region"),
            "mass_mean": ("execution", "map_region"),
            "mark_mass": ("execution", "head", "mark"),
            "mark_uniform": ("execution", "mark"),
        }
        dims |= dict.fromkeys(PARTS, ("looped_layer", "visit_pair", "head", "map_region"))
        found: dict[str, Any] = {}
        for name, estimate in pooled.items():
            found |= quantities(dims[name], {name: estimate}, family=("change", "retarget"))
            found |= quantities(("shots", *dims[name]), {f"{name}_by_shots": by_shots[name]})
        overall = {
            f"mass_visit_{visit}_overall": pooled["mass_mean"][rows].mean(0)
            for visit, rows in looped_by_visit(data).items()
        }
        if looped:
            overall |= {f"{n}_overall": pooled[n].mean(0).mean(0).mean(0) for n in PARTS}
        found |= quantities(("map_region",), overall)
        counts = {
            "prompts": len(targets),
            "targets": targets.sum(),
            "items": len(items.documents),
            "nested": nested,
        }
        if known is not None and looped:
            layer = data["looped_layer"].values.tolist().index(known[0])
            of_head = {f"dyck_head_{name}": pooled[name][layer, :, known[1]] for name in PARTS}
            found |= quantities(("visit_pair", "map_region"), of_head)
        if known is not None:
            counts |= {"dyck_head_layer": known[0], "dyck_head": known[1]}
        exactly = {name: exact(np.array(number)) for name, number in counts.items()}
        return {**found, **quantities((), exactly)}

    def sentence(self, summary: xr.Dataset) -> str:
        if "mass" not in summary:
            return "The run is over text: there is no prompt to map."
        which = "nested prompts of half 1" if summary["nested"] else "prompts"
        targets, prompts, items = (int(summary[name]) for name in ("targets", "prompts", "items"))
        if not targets:
            return f"No target stands in {which}."
        looped = looped_by_visit(summary)
        all_looped = np.concatenate(list(looped.values()))
        bos = str(summary["map_region"].values[0])

        def by_visit(region: str) -> str:
            of_region = summary.sel(map_region=region)
            uniform = float(of_region["uniform"][all_looped].mean())
            parts = ", ".join(
                f"{float(of_region[f'mass_visit_{v}_overall']):.3f} at visit {v}" for v in looped
            )
            return f"{parts} (uniform {uniform:.3f})"

        text = (
            f"Over {targets} targets in {prompts} {which} ({items} items), mean over "
            f"{'looped ' * (len(looped) > 1)}layers and heads: mass on {bos} {by_visit(bos)}"
        )
        if not summary["uniform"].sel(map_region=DEMO_ANSWER).notnull().any():
            return f"{text}; no demonstration is answered in them."
        text = f"{text}; on {DEMO_ANSWER} {by_visit(DEMO_ANSWER)}."
        if "change" not in summary:
            return f"{text} No layer is visited twice, so nothing moves between visits."
        answers = summary.sel(map_region=DEMO_ANSWER)
        text = (
            f"{text} Later minus earlier visits, on {DEMO_ANSWER}: {_parts(answers, '_overall')}."
        )
        if not answers["retarget"].notnull().any():
            return text
        most = answers.isel(answers["retarget"].fillna(-np.inf).argmax(...))
        known = dyck_head_of(summary)
        if known is not None:
            layer, head = known
            chosen = answers.sel(looped_layer=layer, head=head).isel(visit_pair=0)
            text = f"{text} The Dyck head, chosen on other prompts: {_told(chosen)}."
        return (
            f"{text} The head that most turned there: {_told(most)}; picked here, where it looks larger than on "
            "other prompts."
        )


PARTS = ("change", "release", "retarget")


def _told(head: xr.Dataset) -> str:
    """Which head it is, and its numbers."""
    return (
        f"head {int(head['head'])} of layer {int(head['looped_layer'])}, visits {head['visit_pair'].item()}, "
        f"{_parts(head, '')}"
    )


def _parts(values: xr.Dataset, end: str) -> str:
    """`+.61 [+.58, +.64], of it +.35 release and +.26 retarget`."""
    shown = []
    for name in PARTS:
        value, low, high = (float(values[f"{name}{end}{side}"]) for side in ("", "_low", "_high"))
        interval = f" [{low:+.3f}, {high:+.3f}]" if np.isfinite(low) else ""
        shown.append(f"{value:+.3f}{interval}")
    return f"{shown[0]}, of it {shown[1]} release and {shown[2]} retarget"


def measure_map(rows: Sequence[Rows], attention: Attention, batch: Batch) -> dict[str, Tensor]:
    """The numbers of `DyckMap` for one execution: each (B, ...)."""
    assert batch.prompts is not None
    marks = torch.stack([batch.prompts.marks[name] for name in MARKS], dim=2)  # (B, N, mark, T)
    by_region, by_mark, first = [], [], 0
    for block in rows:
        number, keys = block.mass.shape[2:]
        seen = block.scores[:, :1] > -torch.inf  # (B, 1, n, K)
        # Uniform attention goes along as one more head.
        mass = torch.cat([block.mass, seen / block.keys_seen[:, None, :, None]], dim=1)
        mass = mass.masked_fill(~block.queries.valid[:, None, :, None], 0.0)
        by_region.append(batch.regions.sums(mass, block.queries))
        marked = marks[:, first : first + number, :, :keys].float()
        by_mark.append(torch.einsum("bhnk,bnmk->bhm", mass, marked))
        first += number
    on_regions, on_marks = torch.stack(by_region).sum(0), torch.stack(by_mark).sum(0)
    if attention.learned_sink is not None:
        queries = batch.queries
        learned = queries.take(attention.learned_sink.transpose(1, 2))  # (B, N, H)
        learned = learned.masked_fill(~queries.valid[..., None], 0.0).sum(1)
        learned = pad(learned, (0, 1))  # uniform attention has no learned sink
        on_regions = torch.cat([on_regions, learned[..., None]], dim=2)
    return {
        "region_mass_sum": on_regions[:, :-1],
        "uniform_sum": on_regions[:, -1],
        "mark_mass_sum": on_marks[:, :-1],
        "mark_uniform_sum": on_marks[:, -1],
    }


def split_change(earlier: np.ndarray, later: np.ndarray) -> dict[str, np.ndarray]:
    """Masses (..., region) at two visits, BOS first -> their `change`, and its parts `release` and `retarget`."""
    change = later - earlier
    off_bos, off_bos_later = 1 - earlier[..., :1], 1 - later[..., :1]
    with np.errstate(divide="ignore", invalid="ignore"):
        growth = np.where(off_bos > ROUNDING, off_bos_later / off_bos, np.nan)
    release = earlier * (growth - 1)
    release[..., 0] = np.nan
    return {"change": change, "release": release, "retarget": change - release}


def split_estimates(earlier: Estimate, later: Estimate) -> dict[str, Estimate]:
    """`split_change` of mean masses, and of every draw of them."""
    values = split_change(earlier.value, later.value)
    draws = split_change(earlier.draws, later.draws)
    return {name: Estimate(value=values[name], draws=draws[name]) for name in values}


def stacked(estimates: Sequence[Estimate]) -> Estimate:
    """Estimates of one shape along a new first axis."""
    return Estimate(
        value=np.stack([estimate.value for estimate in estimates]),
        draws=np.stack([estimate.draws for estimate in estimates], axis=1),
    )
