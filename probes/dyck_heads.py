"""dyck-heads: which head of the looped layers carries the answers of nested Dyck prompts, and at which visit."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args
from weakref import WeakKeyDictionary

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from smeltscope import activations
from smeltscope.activations import Variable
from smeltscope.errors import SmeltscopeError
from smeltscope.probes.dyck_scores import GUESSES
from smeltscope.probes.loss import measure_loss
from smeltscope.probes.probe import Batch, ModelShape, Output, Probe
from smeltscope.probes.prompts import by_item
from smeltscope.probes.statistics import (
    Estimate,
    Quantities,
    Resampling,
    exact,
    quantities,
)
from smeltscope.tasks import HeldOut, pad_batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from smeltscope.model import Execution

Ablation = Literal["resample", "mean", "zero"]

AT_ONCE = 16  # prompts of which a mean is taken
# What heads read on average, by model, likeness of the prompts, and execution.
_Means = WeakKeyDictionary[Any, dict[tuple[Any, ...], dict[int, Tensor]]]

_HALF = np.arange(2)  # heads are chosen on the first and judged on the second
_SEARCHED = {
    "head": "head",
    "group": "kv_head",
}  # what is ablated: the dimension along which it lies

# What is ablated together: the executions and the heads. And where the result belongs: (array, its index).
_Places = Mapping[tuple[tuple[int, ...], range], Sequence[tuple[str, tuple[int, ...]]]]


@dataclass(frozen=True, kw_only=True)
class DyckHeads(Probe):
    """How much worse the targets of nested Dyck prompts are predicted without one head of a looped layer.

    A target is a token of a prompt's gold answer that bears a bracket. With p_q the model's distribution over the next token
    after tokens 0..q (softmax of its logits in float32), the loss of a target at position t is - ln p_(t-1)(token t), in nats.
    For each nested prompt:

    - `targets`: their number, in the place of the prompt's number of shots and half; 0 in other places.
    - `loss_sum`: their loss, summed.
    - `head_loss_sum`: the same with one query head ablated, by looped layer and head, at `all` visits of the layer or at one
      alone (`ablated_visits`).
    - `group_loss_sum`: the same with all query heads ablated that read one key/value head.

    A head is ablated by changing what it read, P V (its slice of the output projection's input), at every position but the
    first, which holds the same token in every prompt. Executions that are not named compute as always, from what the changed ones wrote. `ablation`:

    - `resample`: what the head read in another prompt, the donor, when that ran alone, at the same distance
      from the prompt's end; where the donor is shorter, at its position 1. The donor is the next prompt of the run
      with the same shots, seed and half, after the last one the first.
    - `mean`: the mean of what the head read over all prompts of the run with the same shots, seed and half, itself
      among them, and their positions, the first left out; they ran alone.
    - `zero`: nothing.

    Perplexity is exp(mean loss of the targets), each target weighing alike; the rise is the perplexity with the ablation minus that
    without. The interaction is the rise at all visits minus the sum of the rises at each visit alone. The head with the
    largest rise at all visits is chosen on one half of the prompts (`half` 0) and judged on the other. What to hold it against: the
    mean rise over all heads, its rank on the other half, and the rank correlation of heads between the halves.

    Source: arXiv 2609.01343 ablates each head of the looped layers and takes the one whose removal raises Dyck perplexity most;
    how and at which visits it does not say.
    """

    ablation: Ablation = "resample"
    donors: HeldOut | None = field(default=None, repr=False, compare=False)  # the run's prompts
    _means: _Means = field(
        default_factory=WeakKeyDictionary, init=False, repr=False, compare=False
    )  # of each model

    name = "dyck-heads"
    names = ("dyck_head_layer", "dyck_head", "dyck_group_layer", "dyck_group")
    resampled = "items"
    sites = ()
    reads_output = True

    def __post_init__(self) -> None:
        if self.ablation not in get_args(Ablation):
            raise SmeltscopeError(
                f"No ablation is called {self.ablation!r}; there are {', '.join(get_args(Ablation))}."
            )

    def options(self) -> dict[str, Any]:
        return {"ablation": self.ablation}  # the donors are the run's data

    def check(self, model: PreTrainedModel) -> None:
        looped = _looped(model)
        if looped and not looped & set(activations.sites_of(model)["pv"]):
            raise SmeltscopeError(
                f"{self.name} cannot be measured: the looped layers of {type(model).__name__} make no causal attention "
                "through transformers' attention interface."
            )
        if looped and self.ablation != "zero":
            _ = self._donors  # says what is wrong with them

    def dimensions(self, shape: ModelShape) -> Mapping[str, np.ndarray]:
        visits = range(1, max(e.visit for e in shape.executions) + 1)
        return {"half": _HALF, "ablated_visits": np.array(["all", *map(str, visits)])}

    def variables(self, shape: ModelShape) -> Mapping[str, Variable]:
        if not shape.looped_layers or not shape.shots:
            return {}
        return {
            "targets": Variable(
                dims=("segment", "shots", "half"), description="targets, in the prompt's own place"
            ),
            "loss_sum": Variable(
                dims=("segment",), description="loss of the targets, summed", units="nats"
            ),
            **{
                f"{what}_loss_sum": Variable(
                    dims=("segment", "ablated_visits", "looped_layer", dim),
                    description=f"loss_sum with this {dim} ablated",
                    units="nats",
                )
                for what, dim in _SEARCHED.items()
            },
        }

    def observe_output(
        self, arrays: Mapping[str, np.ndarray], batch: Batch, output: Output
    ) -> None:
        if batch.prompts is None or not arrays:
            return
        nested = np.flatnonzero(batch.prompts.labels["kind"] == "nested")
        if not len(nested):
            return
        labels = {name: values[nested] for name, values in batch.prompts.labels.items()}
        rows = torch.from_numpy(nested).to(batch.input_ids.device)
        lengths = batch.lengths[rows]
        ids = batch.input_ids[rows, : int(lengths.max())]  # (P, T)
        queries = batch.queries
        predicts = torch.zeros_like(ids).scatter_add_(
            1, queries.positions[rows], queries.valid[rows].long()
        )
        predicts = predicts > 0
        hidden = output.hidden[rows, : ids.shape[1]]
        loss, _, _ = measure_loss([(hidden, output.logits)], ids, predicts)
        arrays["loss_sum"][nested] = loss[0].sum(1).cpu()
        shots = np.searchsorted(np.array(batch.shape.shots), labels["shots"])
        arrays["targets"][nested] = 0
        arrays["targets"][nested, shots, labels["half"]] = predicts.sum(1).cpu()

        places = _places(batch.shape, _heads_of(output.model, ids))
        ablated = _ablated_losses(
            output.model,
            ids,
            predicts,
            places,
            self._given(output.model, ids, lengths, labels),
            rows_at_once=max(batch.input_ids.numel() // ids.shape[1], 1),
        )
        for losses, found in zip(ablated.cpu(), places.values(), strict=True):
            for name, index in found:
                place: Any = (nested, *index)
                arrays[name][place] = losses

    def progress(
        self, arrays: Mapping[str, np.ndarray], shape: ModelShape
    ) -> Mapping[str, tuple[float, float]]:
        if not arrays:
            return {}
        return {
            "loss of targets": (
                float(np.nansum(arrays["loss_sum"])),
                float(np.nansum(arrays["targets"])),
            )
        }

    @cached_property
    def _alike(self) -> dict[tuple[Any, ...], list[int]]:
        """The nested segments of `donors` with the same shots, seed and half."""
        assert self.donors is not None and self.donors.prompts is not None
        labels = self.donors.prompts.labels
        alike = defaultdict(list)
        for segment in np.flatnonzero(labels["kind"] == "nested").tolist():
            alike[_likeness(labels, segment)].append(segment)
        return dict(alike)

    @cached_property
    def _donors(self) -> dict[tuple[Any, ...], int]:
        """The segment of `donors` that stands in for each prompt, by the prompt's labels."""
        if self.donors is None or self.donors.prompts is None:
            raise SmeltscopeError(
                f"The ablation {self.ablation!r} takes what heads read in other prompts: give {self.name} the prompts of "
                "the run as donors, or choose the ablation 'zero'."
            )
        labels = self.donors.prompts.labels
        donors: dict[tuple[Any, ...], int] = {}
        for (shots, _, half), segments in self._alike.items():
            if len(segments) < 2:
                raise SmeltscopeError(
                    f"There is one nested prompt alone with {shots} shot{'' if shots == 1 else 's'} in half {half}, and none to resample from: "
                    "use four nested prompts or more (--nested 4), or the ablation 'zero'."
                )
            following = zip(segments, segments[1:] + segments[:1], strict=True)
            donors |= {_key(labels, segment): donor for segment, donor in following}
        return donors

    def _given(
        self, model: PreTrainedModel, ids: Tensor, lengths: Tensor, labels: Mapping[str, np.ndarray]
    ) -> dict[int, Tensor]:
        """What ablated heads are given in the place of what they read, by execution: (P, T - 1, head, size), from position 1 on."""
        if self.ablation == "zero":
            return {}
        assert self.donors is not None  # `check` has seen to it
        if self.ablation == "mean":
            means = [self._mean_of(model, _likeness(labels, row)) for row in range(len(ids))]
            return {
                index: torch.stack([mean[index] for mean in means])[:, None].expand(
                    -1, ids.shape[1] - 1, -1, -1
                )
                for index in means[0]
            }
        donors = [self._donors[_key(labels, row)] for row in range(len(ids))]
        padded, sizes = (
            torch.from_numpy(array).to(ids.device) for array in pad_batch(self.donors, donors, 0)
        )
        own = torch.arange(1, ids.shape[1], device=ids.device)
        index = own - lengths[:, None] + sizes[:, None]  # (P, T - 1)
        index = index.clamp(1, padded.shape[1] - 1)[..., None, None]
        looped = _looped(model)
        given = {}

        def on_site(execution: Execution, _: str, pv: Tensor) -> None:
            if execution.index in looped:
                shape = (-1, ids.shape[1] - 1, *pv.shape[2:])
                given[execution.index] = pv.gather(1, index.to(pv.device).expand(shape))

        with activations.capture(model, ("pv",), on_site):
            activations.decode(model, padded)
        return given

    def _mean_of(self, model: PreTrainedModel, likeness: tuple[Any, ...]) -> dict[int, Tensor]:
        """The mean of what heads read in the prompts of this likeness, by execution: (head, size)."""
        means = self._means.setdefault(model, {})
        if likeness in means:
            return means[likeness]
        assert self.donors is not None
        looped, segments = _looped(model), self._alike[likeness]
        sums: dict[int, Tensor] = {}
        total = 0
        for first in range(0, len(segments), AT_ONCE):
            some = segments[first : first + AT_ONCE]
            padded, sizes = (
                torch.from_numpy(array).to(model.device)
                for array in pad_batch(self.donors, some, 0)
            )
            positions = torch.arange(padded.shape[1], device=model.device)
            counted = ((positions > 0) & (positions < sizes[:, None]))[..., None, None]
            total += int(counted.sum())

            def on_site(
                execution: Execution, _: str, pv: Tensor, counted: Tensor = counted
            ) -> None:
                if execution.index in looped:
                    read = (pv.float() * counted.to(pv.device)).sum((0, 1))  # (head, size)
                    sums[execution.index] = sums.get(execution.index, 0) + read

            with activations.capture(model, ("pv",), on_site):
                activations.decode(model, padded)
        means[likeness] = {index: (of / total).to(model.dtype) for index, of in sums.items()}
        return means[likeness]

    def estimates(self, run: xr.DataTree, resampling: Resampling) -> Quantities:
        """Perplexities of the targets, and their rises under ablation. `X` stands for `head` and `group`.

        Over (half): `perplexity`, `targets`, and what answers by Bayes and guesses would have, as in dyck-scores:
        `perplexity_bayes_nothing`, ..., `perplexity_guess`; over (shots, half): `perplexity_by_shots`. Over (half, ablated_visits, looped_layer,
        head or kv_head): `X_rise`; over (shots, half, ...): `X_rise_by_shots`; over (half, looped_layer, head or kv_head): `X_interaction`.

        What was chosen on half 0, on half 1: `dyck_X_layer` and `dyck_X`, which it is; over (ablated_visits) `dyck_X_rise`,
        beside `mean_X_rise` of all; over (shots, ablated_visits) `dyck_X_rise_by_shots`; `dyck_X_interaction`; `dyck_X_rank`
        by the rise at all visits (1: the largest) among `X_number`. Missing where no ablation raises the perplexity. Over (ablated_visits): `X_rank_stability`, Spearman's correlation of the rises
        between the halves. Intervals draw items again, within each half; the choice stays as it was made.
        """
        data = run["dyck_heads"].dataset
        if "targets" not in data or not np.nansum(data["targets"]):
            return {}
        run = run.isel(segment=np.flatnonzero(data["loss_sum"].notnull()))
        data = run["dyck_heads"].dataset
        by_shots = data["targets"].values  # (segment, shots, half)
        by_half = by_shots.sum(1)
        resampling = by_item(run, resampling)
        chances = {name: run["segments"].dataset[f"label_{name}"].values for name in GUESSES}
        found = {
            **quantities(
                ("half",),
                {
                    "perplexity": _perplexity(resampling, data["loss_sum"].values, by_half),
                    "targets": exact(by_half.sum(0)),
                    **{
                        f"perplexity_{name}": _perplexity(resampling, -np.log(chance), by_half)
                        for name, chance in chances.items()
                    },
                },
            ),
            **quantities(
                ("shots", "half"),
                {"perplexity_by_shots": _perplexity(resampling, data["loss_sum"].values, by_shots)},
            ),
        }
        for what, dim in _SEARCHED.items():
            dims = ("ablated_visits", "looped_layer", dim)
            losses = data[f"{what}_loss_sum"].values
            rise, rise_by_shots = (
                _perplexity(resampling, losses, targets)
                - _perplexity(resampling, data["loss_sum"].values, targets)[..., None, None, None]
                for targets in (by_half, by_shots)
            )
            interaction = rise[:, 0] - rise[:, 1:].sum(1)
            found |= quantities(("half", *dims), {f"{what}_rise": rise}, family=(f"{what}_rise",))
            found |= quantities(("shots", "half", *dims), {f"{what}_rise_by_shots": rise_by_shots})
            found |= quantities(("half", *dims[1:]), {f"{what}_interaction": interaction})
            layers = data["looped_layer"].values
            found |= _chosen(what, layers, rise, rise_by_shots, interaction)
        return found

    def sentence(self, summary: xr.Dataset) -> str:
        return sentence(summary)


def sentence(summary: xr.Dataset) -> str:
    """The result in a few sentences, with numbers and intervals."""
    if "perplexity" not in summary:
        return "No layer is visited twice, or no prompt is nested: there is no head to search for."
    if "dyck_head" not in summary:
        if (summary["targets"] > 0).all():
            return (
                "No head matters: on the half of the prompts that chooses, no ablation raises the perplexity of the targets "
                f"({float(summary['perplexity'][0]):.3g})."
            )
        return "Both halves need prompts with targets: one to choose a head, one to judge it."

    def shown(name: str, form: str, **place: Any) -> str:
        value, low, high = (
            format(float(summary[f"{name}{end}"].isel(place)), form)
            for end in ("", "_low", "_high")
        )
        low_known = np.isfinite(float(summary[f"{name}_low"].isel(place)))
        return f"{value} [{low}, {high}]" if low_known else value

    visits = range(1, summary.sizes["ablated_visits"])
    alone = ", ".join(
        f"{shown('dyck_head_rise', '+.3g', ablated_visits=v)} at visit {v} alone" for v in visits
    )
    guessed = {name: float(summary[f"perplexity_{name}"][1]) for name in GUESSES}
    low, high = (float(summary[f"dyck_head_rise_{end}"][0]) for end in ("low", "high"))
    doubt = ""
    if low <= 0:  # NaN, where there is none, is not
        why = (
            "ablating the head lowers the perplexity there" if high < 0 else "the interval holds 0"
        )
        doubt = f" The other half does not confirm the choice: {why}."
    groups = ""
    # else they are the heads
    if "dyck_group" in summary and summary["group_number"] < summary["head_number"]:
        groups = (
            f" Of {int(summary['group_number'])} K/V groups, group {int(summary['dyck_group'])} of layer "
            f"{int(summary['dyck_group_layer'])} matters most: {shown('dyck_group_rise', '+.3g', ablated_visits=0)} at all "
            f"visits, rank {shown('dyck_group_rank', '.0f')}."
        )
    return (
        f"Head {int(summary['dyck_head'])} of layer {int(summary['dyck_head_layer'])} matters most on one half of the nested "
        f"prompts. On the other, ablating it changes the perplexity of the targets from "
        f"{shown('perplexity', '.3g', half=1)} (types guessed {guessed['guess']:.3g}, all pairs of the prompt known "
        f"{guessed['bayes_answers']:.3g}) by {shown('dyck_head_rise', '+.3g', ablated_visits=0)} at all visits, {alone} "
        f"(interaction {shown('dyck_head_interaction', '+.3g')}); the mean head by "
        f"{shown('mean_head_rise', '+.3g', ablated_visits=0)}. It ranks {shown('dyck_head_rank', '.0f')} of "
        f"{int(summary['head_number'])} there; rank correlation of heads between the halves: "
        f"{shown('head_rank_stability', '.2f', ablated_visits=0)}.{doubt}{groups}"
    )


def dyck_head(run: xr.DataTree) -> tuple[int, int] | None:
    """(layer, head) that the search of a run chose; None where there was none, or half of its prompts is missing."""
    if "dyck_heads" not in run.children:
        return None
    found = DyckHeads().estimates(run, Resampling.of_run(run, draws=0, seed=0))
    if "dyck_head" not in found:
        return None
    layer, head = (int(found[name].estimate.value) for name in ("dyck_head_layer", "dyck_head"))
    return layer, head


def dyck_head_of(summary: xr.Dataset) -> tuple[int, int] | None:
    """(layer, head) that a summary names as the Dyck head; None where it names none."""
    if "dyck_head" not in summary or not np.isfinite(summary["dyck_head"]):
        return None
    return int(summary["dyck_head_layer"]), int(summary["dyck_head"])


def _looped(model: PreTrainedModel) -> set[int]:
    """The executions of layers that run more than once."""
    from smeltscope.model import executions_of

    executions = executions_of(model.config)
    layers = {e.layer for e in executions if e.visit > 1}
    return {e.index for e in executions if e.layer in layers}


def _likeness(labels: Mapping[str, np.ndarray], row: int) -> tuple[Any, ...]:
    """What prompts have in common of which one stands in for another."""
    return tuple(labels[name][row] for name in ("shots", "prompt_seed", "half"))


def _key(labels: Mapping[str, np.ndarray], row: int) -> tuple[Any, ...]:
    """What tells a nested prompt from all others."""
    return tuple(labels[name][row] for name in ("item", "shots", "prompt_seed"))


def _heads_of(model: PreTrainedModel, ids: Tensor) -> dict[int, tuple[int, int]]:
    """The query heads and the key/value heads of each execution that has attention."""
    found = {}

    def on_site(execution: Execution, _: str, attention: Any) -> None:
        found[execution.index] = attention.query.shape[1], attention.key.shape[1]

    with activations.capture(model, ("attention",), on_site):
        activations.decode(model, ids[:1, :2])
    return found


def _places(shape: ModelShape, heads_of: Mapping[int, tuple[int, int]]) -> _Places:
    """Every ablation, once: where each key/value head has one query head, its group is that head."""
    places: dict[tuple[tuple[int, ...], range], list[tuple[str, tuple[int, ...]]]]
    places = defaultdict(list)
    for i, layer in enumerate(shape.looped_layers):
        visits = [e.index for e in shape.executions if e.layer == layer and e.index in heads_of]
        for v, executions in enumerate([tuple(visits), *((index,) for index in visits)]):
            if not executions:
                continue
            heads, groups = heads_of[executions[0]]
            size = heads // groups
            for head in range(heads):
                places[executions, range(head, head + 1)].append(("head_loss_sum", (v, i, head)))
            for group in range(groups):
                together = range(group * size, (group + 1) * size)
                places[executions, together].append(("group_loss_sum", (v, i, group)))
    return places


def _ablated_losses(
    model: PreTrainedModel,
    ids: Tensor,
    predicts: Tensor,
    ablations: _Places,
    given: Mapping[int, Tensor],
    rows_at_once: int,
) -> Tensor:
    """The loss of each prompt, summed over targets, under each ablation: (ablation, P).

    A forward runs many prompts, each under an ablation of its own.
    """
    prompts = len(ids)
    most = max(heads.stop for _, heads in ablations)
    ablated: dict[
        int, Tensor
    ] = {}  # by execution, which heads each ablation takes: (ablation, head)
    for number, (executions, heads) in enumerate(ablations):
        for index in executions:
            table = ablated.setdefault(index, torch.zeros(len(ablations), most, dtype=torch.bool))
            table[number, list(heads)] = True
    losses = []
    for row in torch.arange(len(ablations) * prompts).split(rows_at_once):
        ablation, prompt = row // prompts, row % prompts
        where = {index: table[ablation].nonzero().T for index, table in ablated.items()}

        def edit(
            execution: Execution,
            pv: Tensor,
            where: Mapping[int, Tensor] = where,
            prompt: Tensor = prompt,
        ) -> Tensor:
            if execution.index in where:
                rows, heads = where[execution.index]
                if given:
                    pv[rows, 1:, heads] = given[execution.index][prompt[rows], :, heads]
                else:
                    pv[rows, 1:, heads] = 0
            return pv

        chosen = prompt.to(ids.device)
        with activations.editing(model, edit):
            decoded = activations.decode(model, ids[chosen])
        run = decoded.last_hidden_state, activations.head_of(model, decoded)
        loss, _, _ = measure_loss([run], ids[chosen], predicts[chosen])
        losses.append(loss[0].sum(1))
    return torch.cat(losses).reshape(len(ablations), prompts)


def _perplexity(resampling: Resampling, losses: np.ndarray, targets: np.ndarray) -> Estimate:
    """exp of the mean loss of targets: (segment, ...) and (segment, group ...) -> (group ..., ...)."""
    groups, rest = targets.ndim - 1, losses.ndim - 1
    losses = losses.reshape(len(losses), *(1,) * groups, *losses.shape[1:])
    mine = targets.reshape(*targets.shape, *(1,) * rest) > 0
    return resampling.ratio(np.where(mine, losses, np.nan), targets).exp()


def _chosen(
    what: str,
    layers: np.ndarray,
    rise: Estimate,
    rise_by_shots: Estimate,
    interaction: Estimate,
) -> Quantities:
    """What half 0 chooses by the rise at all visits, and what half 1 says of it; nothing where no ablation makes it rise."""
    choosing = rise.value[0, 0]  # (looped_layer, head)
    if not np.nanmax(choosing, initial=0.0) > 0 or not np.isfinite(rise.value[1, 0]).any():
        return {}
    layer, head = np.unravel_index(np.nanargmax(choosing), choosing.shape)
    visits = range(rise.value.shape[1])
    judged = rise[1]  # (ablated_visits, looped_layer, head)
    return {
        **quantities(
            (),
            {
                f"dyck_{what}_layer": exact(layers[layer]),
                f"dyck_{what}": exact(np.asarray(head)),
                f"dyck_{what}_interaction": interaction[1, layer, head],
                f"dyck_{what}_rank": Estimate(
                    value=_rank(judged.value[0], (layer, head)),
                    draws=_rank(judged.draws[:, 0], (layer, head)),
                ),
                f"{what}_number": exact(np.isfinite(judged.value[0]).sum()),
            },
        ),
        **quantities(
            ("ablated_visits",),
            {
                f"dyck_{what}_rise": judged[:, layer, head],
                f"mean_{what}_rise": judged.mean().mean(),
                f"{what}_rank_stability": Estimate(
                    value=np.array([_rank_correlation(*rise.value[:, v])[0] for v in visits]),
                    draws=np.stack(
                        [_rank_correlation(*rise.draws[:, :, v].swapaxes(0, 1)) for v in visits], 1
                    ),
                ),
            },
        ),
        **quantities(
            ("shots", "ablated_visits"),
            {f"dyck_{what}_rise_by_shots": rise_by_shots[:, 1, :, layer, head]},
        ),
    }


def _rank(rises: np.ndarray, place: tuple[Any, Any]) -> np.ndarray:
    """How many are larger, and one: (..., looped_layer, head) -> (...)."""
    larger = rises > rises[..., place[0], place[1], None, None]
    return np.asarray(1.0 + larger.sum((-1, -2)))


def _rank_correlation(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Spearman's correlation over heads: two (..., looped_layer, head) -> (n,). NaN where nothing varies."""
    from scipy.stats import ConstantInputWarning, pearsonr, rankdata

    a, b = (x.reshape(-1, x.shape[-2] * x.shape[-1]) for x in (a, b))
    have = np.isfinite(a).all(0) & np.isfinite(b).all(0)  # a layer may have fewer heads or visits
    if have.sum() < 2 or not len(a):
        return np.full(len(a), np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConstantInputWarning)
        ranks = (rankdata(x[:, have], axis=1) for x in (a, b))
        return np.asarray(pearsonr(*ranks, axis=1).statistic)
