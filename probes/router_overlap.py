"""router-overlap: how many of a token's experts stay the same from one visit of a layer to the next, and which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from smeltscope.activations import Variable, attributes_of
from smeltscope.errors import SmeltscopeError
from smeltscope.probes.labels import executions_of_pairs, over_documents
from smeltscope.probes.probe import Batch, ModelShape, Probe
from smeltscope.probes.statistics import (
    Documents,
    Estimate,
    Quantities,
    Quantity,
    Resampling,
    bootstrap_weights,
    exact,
    quantities,
)
from smeltscope.probes.visit_pairs import averages, each_of, first_of

if TYPE_CHECKING:
    from smeltscope.activations import Routing
    from smeltscope.model import Execution

# Logits closer than this, or than this many steps of their number type, change places with the shape of the batch.
NEAR_TIE, NEAR_TIE_STEPS = 1e-5, 2

_OF_EXECUTIONS = {
    "tokens": "counted tokens",
    "entropy_sum": "entropy of the router's softmax in nats, summed over tokens",
    "lexical_sum": "experts shared with the token's last occurrence at the same visit, summed over "
    "repeated tokens",
    "near_ties": "tokens whose k-th and next logits lie within 1e-5, or two steps of their number type",
    "not_top_logits": "tokens whose experts are not those of the top k logits",
}
_OF_PAIRS = {
    "other_token_sum": "experts shared with the earlier visit of another token, summed over tokens",
    "previous_sum": "experts shared with the earlier visit of the token's last occurrence, summed "
    "over repeated tokens",
    "repeated_overlap_sum": "experts that the visits share, summed over repeated tokens",
    "shared_weight_earlier_sum": "earlier visit's weight on shared experts, summed over tokens",
    "shared_weight_later_sum": "later visit's weight on shared experts, summed over tokens",
}
_TABLES_OF_PAIRS = {
    "core": "tokens that chose the expert at both visits",
    "swapped_in": "tokens that chose the expert at the later visit only",
    "swapped_out": "tokens that chose the expert at the earlier visit only",
}


@dataclass(frozen=True, kw_only=True)
class RouterOverlap(Probe):
    """How many of a token's k experts, of E, two visits of a layer share.

    With S_v(t) the experts that the router's own indices give token t at visit v, over the counted tokens (all but
    the segment's first; with `include_first` that too), for each segment, looped layer and pair of visits a < b:

    - `overlap_count`: tokens by o(t) = |S_a(t) and S_b(t)|, 0..k. The mean overlap is sum of o / tokens, Jaccard the
      mean over tokens of o / (2k - o).
    - `shared_weight_earlier_sum`, `shared_weight_later_sum`: sum over t of the weight that visit a (b) gives the shared
      experts, weights renormalised to sum 1 over S_a(t) (S_b(t)).
    - `other_token_sum`: sum over t of |S_a(t) and S_b(u)|, u the token half the counted tokens further on, round the
      end; NaN where there is no other token.
    - `previous_sum`: sum over tokens that have one of |S_a(u) and S_b(t)|, u the previous counted token of the segment with
      the same id. `repeated_tokens` counts tokens that have one; `repeated_overlap_sum`, their own overlap o(t).

    For each segment and execution:

    - `tokens`: counted tokens.
    - `entropy_sum`: sum over t of -sum_e p log p, p the softmax of the router's logits; nats.
    - `lexical_sum`: sum over tokens that have a previous one, u, of |S_v(u) and S_v(t)|, at the same visit.
    - `near_ties`: tokens whose weakest chosen logit is within 1e-5, or two steps of the logits' number type, of the strongest other one.
    - `not_top_logits`: tokens whose set is not the top k of the logits by more than that (selection biases, groups); where
      there are any, near ties of the true selection are not known.

    Tables, tokens by category, fold and expert: `load` (chose it at this execution), `core` (chose it at both visits of
    the pair), `swapped_in` (at b, not at a), `swapped_out` (at a, not at b).

    Chance levels: two independent uniform sets share k^2 / E (hypergeometric); sets drawn independently by each expert's
    use, sum_e p_a(e) p_b(e), p_v(e) the share of tokens that choose e at visit v, sum_e p_v(e) = k. Every token weighs
    alike. Source: arXiv 2609.01343 (overlap over tokens, k^2 / E); nulls and weights are ours.
    """

    include_first: bool = False

    name = "router-overlap"
    sites = ("router",)

    def dimensions(self, shape: ModelShape) -> Mapping[str, np.ndarray]:
        return {"shared_experts": np.arange(shape.experts_per_token + 1)}

    def variables(self, shape: ModelShape) -> Mapping[str, Variable]:
        if not shape.sites["router"]:
            return {}
        variables = {
            "repeated_tokens": Variable(
                dims=("segment",), description="counted tokens whose id occurred before"
            )
        }
        for name, text in _OF_EXECUTIONS.items():
            variables[name] = Variable(dims=("segment", "execution"), description=text)
        if _has_pairs(shape):
            pair = ("segment", "looped_layer", "visit_pair")
            variables["overlap_count"] = Variable(
                dims=(*pair, "shared_experts"),
                description="tokens by the number of experts that the visits share",
            )
            for name, text in _OF_PAIRS.items():
                variables[name] = Variable(dims=pair, description=text)
        return variables

    def tables(self, shape: ModelShape) -> Mapping[str, Variable]:
        if not shape.sites["router"]:
            return {}

        def table(dims: tuple[str, ...], text: str) -> Variable:
            dims = ("table_category", "fold", *dims, "expert")
            return Variable(dims=dims, description=text, dtype="int64")

        tables = {"load": table(("execution",), "tokens that chose the expert")}
        if _has_pairs(shape):
            for name, text in _TABLES_OF_PAIRS.items():
                tables[name] = table(("looped_layer", "visit_pair"), text)
        return tables

    def observe(
        self,
        arrays: Mapping[str, np.ndarray],
        batch: Batch,
        execution: Execution,
        sites: Mapping[str, Any],
        earlier: Mapping[int, Any],
    ) -> Any:
        routing: Routing = sites["router"]
        _check_sizes(routing, execution, batch.shape)
        counted = batch.real if self.include_first else batch.counted
        previous = batch.once(_previous_of_all if self.include_first else _previous)
        measured = measure_routing(routing, counted, previous)
        if not measured["entropy_sum"].isfinite().all():
            raise SmeltscopeError(
                f"Router logits of layer {execution.layer} at visit {execution.visit} are not finite: the "
                "model overflows; check its weights, or run it with --dtype float32."
            )
        arrays["repeated_tokens"][:] = (previous >= 0).sum(1).cpu().numpy()
        for name, values in measured.items():
            arrays[name][:, execution.index] = values.cpu().numpy()

        folds = arrays["load"].shape[1]
        cell = torch.from_numpy(batch.category * folds + batch.fold).to(counted.device)

        def count(experts: Tensor, which: Tensor) -> np.ndarray:
            return count_values(cell, experts, which, arrays["load"][:, :, 0].shape).cpu().numpy()

        load = count(routing.experts, counted)
        arrays["load"][:, :, execution.index] += load
        now = Choice.of(routing, load)
        for pair in batch.shape.pairs_of(execution):
            then: Choice = earlier[pair.earlier]
            stays, stayed = shared_experts(then.experts, now.experts)
            shared = measure_pair(then, now, stays, stayed, counted, previous)
            for name, values in shared.items():
                arrays[name][:, pair.layer, pair.pair] = values.cpu().numpy()
            core = count(now.experts, counted[..., None] & stayed)
            tables = (core, now.load - core, then.load - core)
            for name, table in zip(_TABLES_OF_PAIRS, tables, strict=True):
                arrays[name][:, :, pair.layer, pair.pair] += table
        return None if batch.shape.is_last_visit(execution) else now

    def progress(
        self, arrays: Mapping[str, np.ndarray], shape: ModelShape
    ) -> Mapping[str, tuple[float, float]]:
        if "overlap_count" not in arrays:
            return {}
        tokens = np.nansum(arrays["overlap_count"], axis=(0, 1, 2))  # (shared_experts,)
        return {"shared experts": (float(tokens @ np.arange(len(tokens))), float(tokens.sum()))}

    def estimates(self, run: xr.DataTree, resampling: Resampling) -> Quantities:
        """Means over tokens of what the class's text names.

        Over (looped_layer, visit_pair): `overlap`; its nulls `marginal_overlap`, `other_token_overlap`,
        `previous_overlap` (to be held against `repeated_overlap`, the overlap of the same tokens); `jaccard`,
        `shared_weight_earlier`, `shared_weight_later`, `no_overlap`, `two_or_more`. Each also over (visit_pair) as
        `X_by_pair`, the mean over layers, and without dimensions as `X_overall`, that over layers and pairs. `chance` and `chance_...`: independent uniform sets.
        `overlap_share` over (..., shared_experts); `overlap_by_category` and `marginal_overlap_by_category` over
        (table_category, ...); `core`, `swapped_in`, `swapped_out` over (..., expert), shares of tokens.

        Over (execution): `entropy`, `lexical_overlap` and its null `lexical_marginal`, `near_ties`, `not_top_logits`;
        over (execution, expert): `load`, which sums to k.

        What comes from tables (`marginal...`, `lexical_marginal`, `load`, `core`, `swapped...`) has intervals from
        resampling the folds of the documents within each category, all else from resampling documents.
        """
        data = run["router_overlap"].dataset
        if "tokens" not in data:
            return {}
        sizes = attributes_of(run)["experts"]
        folds = Folds.of(
            data["load"].values,
            sizes["per_token"],
            draws=len(resampling.weights),
            seed=resampling.seed,
        )
        by_execution = _by_execution(data, resampling, folds)
        if "overlap_count" not in data:
            return by_execution
        return {
            **_by_pair(data, resampling, folds),
            **_by_category(data, run["segments"].dataset["category"].values, resampling, folds),
            **_chance(sizes["all"], sizes["per_token"]),
            **by_execution,
        }

    def sentence(self, summary: xr.Dataset) -> str:
        documents = over_documents(summary)
        if "entropy" not in summary:
            return "No layer of this model has a router of experts, so there is no expert set to compare."
        experts = summary.sizes["expert"]
        if "overlap" not in summary:
            return (
                f"No layer with a router is visited twice, so there are no visits to compare. Entropy of the router, "
                f"mean over layers: {float(summary['entropy'].mean()):.2f} nats; uniform over {experts} experts: "
                f"{np.log(experts):.2f}; {documents}."
            )
        if not np.isfinite(summary["overlap_overall"]):
            return (
                f"No token was counted {documents}: segments of one token have none but the first."
            )
        k = summary.sizes["shared_experts"] - 1
        layers = int(summary["overlap"].notnull().any("visit_pair").sum())

        first, visits = first_of(summary)

        def shown(name: str) -> str:
            value, low, high = (
                float(first[f"{name}_by_pair{end}"]) for end in ("", "_low", "_high")
            )
            return f"{value:.2f} [{low:.2f}, {high:.2f}]" if np.isfinite(low) else f"{value:.2f}"

        pairs = each_of(summary["overlap_by_pair"], ".2f")
        text = (
            f"Mean over {layers} looped layer{'s' * (layers != 1)}, {documents}: {visits} share {shown('overlap')} of a "
            f"token's {k} experts{pairs and f' ({pairs})'}. Uniform sets of {k} among {experts} would share "
            f"{float(summary['chance']):.2f}, sets drawn by each expert's use {shown('marginal_overlap')}; two tokens of a "
            f"segment share {shown('other_token_overlap')}, a token and its last occurrence {shown('previous_overlap')} "
            f"(such tokens themselves: {shown('repeated_overlap')}). Shared experts carry {shown('shared_weight_earlier')} of "
            f"the earlier visit's weight and {shown('shared_weight_later')} of the later visit's."
        )
        if (summary["not_top_logits"] > 0).any():
            share = float(summary["not_top_logits"].mean())
            text += (
                f" In {share:.1%} of tokens the experts are not the top {k} logits: the router selects by something "
                "else as well, so near ties are not known."
            )
        return text


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What is kept of a visit: each token's experts, and their weights scaled to sum 1."""

    experts: Tensor  # (B, T, k), int32
    weights: Tensor  # (B, T, k), float32
    load: np.ndarray  # (category, fold, expert), the batch's tokens that chose it

    @classmethod
    def of(cls, routing: Routing, load: np.ndarray) -> Choice:
        weights = routing.weights / routing.weights.sum(-1, keepdim=True)
        return cls(experts=routing.experts.int(), weights=weights, load=load)


def measure_routing(routing: Routing, counted: Tensor, previous: Tensor) -> dict[str, Tensor]:
    """The numbers of one execution, each (B,): see `RouterOverlap`. `previous` is that of `previous_of_same_id`."""
    logits, experts = routing.logits, routing.experts
    # -log p(e) = (top - logit(e)) - log p(top): one exponential for each logit, and no logarithm.
    p, top = logits.softmax(-1), logits.amax(-1, keepdim=True)
    entropy = torch.linalg.vecdot(p, top - logits) - p.amax(-1).log()  # (B, T)
    # 0 or more where the set is the top k of the logits; infinite where every expert is chosen.
    weakest = logits.gather(-1, experts).amin(-1)  # (B, T)
    gap = weakest - logits.scatter(-1, experts, -torch.inf).amax(-1)
    near = (NEAR_TIE_STEPS * routing.rounding * weakest.abs()).clamp(min=NEAR_TIE)
    return {
        "tokens": counted.sum(1).float(),
        "entropy_sum": _sum(entropy, counted),
        "lexical_sum": _sum(overlap(_at(experts, previous), experts), previous >= 0),
        "near_ties": (counted & (gap.abs() <= near)).sum(1).float(),
        "not_top_logits": (counted & (gap < -near)).sum(1).float(),
    }


def measure_pair(
    then: Choice, now: Choice, stays: Tensor, stayed: Tensor, counted: Tensor, previous: Tensor
) -> dict[str, Tensor]:
    """The numbers of a pair of visits, (B,) or (B, shared_experts): see `RouterOverlap`.

    `stays` and `stayed` are those of `shared_experts(then.experts, now.experts)`.
    """
    rows, _, k = now.experts.shape
    own = stays.sum(-1)  # (B, T)
    row = torch.arange(rows, device=own.device)
    other = overlap(then.experts, _at(now.experts, half_further_on(counted)))
    return {
        "overlap_count": count_values(row, own[..., None], counted, (rows, k + 1)).float(),
        "other_token_sum": _sum(other, counted).masked_fill(counted.sum(1) < 2, torch.nan),
        "previous_sum": _sum(overlap(_at(then.experts, previous), now.experts), previous >= 0),
        "repeated_overlap_sum": _sum(own, previous >= 0),
        "shared_weight_earlier_sum": _sum((then.weights * stays).sum(-1), counted),
        "shared_weight_later_sum": _sum((now.weights * stayed).sum(-1), counted),
    }


def shared_experts(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Which experts of sets `a` (B, T, k) are in sets `b`, and which of `b` in `a`: (B, T, k) each, bool."""
    same = _same(a, b)
    return same.any(1).movedim(0, -1), same.any(0).movedim(0, -1)


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """How many experts two sets (B, T, k) share: (B, T), int64."""
    return _same(a, b).sum((0, 1))


def _same(a: Tensor, b: Tensor) -> Tensor:
    """Which experts of sets `a` (B, T, k) are which of sets `b`: (k, k, B, T), bool."""
    # Tokens come last in memory: a few experts at a time would be compared four times as slowly.
    a, b = (experts.movedim(-1, 0).contiguous() for experts in (a, b))
    return a[:, None] == b


def _previous(batch: Batch) -> Tensor:
    return previous_of_same_id(batch.input_ids, batch.counted)


def _previous_of_all(batch: Batch) -> Tensor:
    return previous_of_same_id(batch.input_ids, batch.real)


def previous_of_same_id(input_ids: Tensor, counted: Tensor) -> Tensor:
    """Where each counted token's id stood last among the counted tokens of its row, -1 if nowhere: (B, T), int64."""
    alone = -1 - torch.arange(input_ids.shape[1], device=input_ids.device)
    ids, order = torch.where(counted, input_ids, alone).sort(dim=1, stable=True)
    before = torch.where(ids[:, 1:] == ids[:, :-1], order[:, :-1], -1)
    return torch.full_like(order, -1).scatter(1, order[:, 1:], before)


def half_further_on(counted: Tensor) -> Tensor:
    """The counted token half of a row's counted tokens further on, round the end: (B, T), int64.

    Counted tokens stand at 1, 2, ..., n, or from 0; a row's only one is its own partner. Meaningless for other tokens.
    """
    number = counted.sum(1, keepdim=True)  # (B, 1)
    first = 1 - counted[:, :1].long()
    position = torch.arange(counted.shape[1], device=counted.device)
    partner = (position - first + number // 2) % number.clamp(min=1) + first
    return partner.clamp(max=counted.shape[1] - 1)


def count_values(group: Tensor, values: Tensor, which: Tensor, shape: Sequence[int]) -> Tensor:
    """How often each value occurs in each group of rows: `shape` is that of the groups, and the number of values.

    `group` (B,) numbers a row's group; `values` (B, T, n) count where `which`, (B, T) or (B, T, n), holds.
    """
    index = group[:, None, None] * shape[-1] + values
    return torch.bincount(index[which].flatten(), minlength=int(np.prod(shape))).view(*shape)


def _at(values: Tensor, positions: Tensor) -> Tensor:
    """`values` (B, T, k) at positions (B, T) of the same row; at -1 anything."""
    return values.take_along_dim(positions.clamp(min=0)[..., None], dim=1)


def _sum(values: Tensor, which: Tensor) -> Tensor:
    """The sum of values (B, T) where `which` holds: (B,), float32."""
    return values.masked_fill(~which, 0).sum(1).float()


def _has_pairs(shape: ModelShape) -> bool:
    return any(shape.pairs_of(shape.executions[i]) for i in shape.sites["router"])


def _check_sizes(routing: Routing, execution: Execution, shape: ModelShape) -> None:
    k, experts = routing.experts.shape[-1], routing.logits.shape[-1]
    if (k, experts) != (shape.experts_per_token, shape.experts):
        raise SmeltscopeError(
            f"Layer {execution.layer} chooses {k} of {experts} experts, another layer {shape.experts_per_token} "
            f"of {shape.experts}: their overlaps have no chance level in common; leave router-overlap out."
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Folds:
    """The (category, fold) cells of a run's tables that hold tokens, drawn again within each category."""

    category: np.ndarray  # (cell,), index along `table_category`
    fold: np.ndarray  # (cell,)
    load: np.ndarray  # (category, fold, execution, expert)
    tokens: np.ndarray  # (category, fold, execution), 0 where there is no router
    resampling: Resampling

    @classmethod
    def of(cls, load: np.ndarray, k: int, *, draws: int, seed: int) -> Folds:
        """From the table `load`, (category, fold, execution, expert)."""
        tokens = load.sum(-1) // k
        filled = tokens.any(-1)
        category, fold = np.nonzero(filled if filled.any() else ~filled)  # none: all means are 0/0
        units = Documents(of_segment=np.arange(len(category)), category=category)
        weights = bootstrap_weights(units, draws=draws, seed=seed)
        resampling = Resampling(documents=units, weights=weights, seed=seed)
        return cls(category=category, fold=fold, load=load, tokens=tokens, resampling=resampling)

    def mean(self, table: np.ndarray, tokens: np.ndarray, only: int | None = None) -> Estimate:
        """Sum of a table (category, fold, ...) / sum of its tokens; `only`: of one category."""
        rows = table[self.category, self.fold].astype(np.float64)
        if only is not None:
            rows[self.category != only] = np.nan
        return self.resampling.ratio(rows, tokens[self.category, self.fold])

    def use(self, only: int | None = None) -> Estimate:
        """How many times a token chooses each expert, (execution, expert): p(e), which sums to k."""
        return self.mean(self.load, self.tokens, only)


def matched_overlap(a: Estimate, b: Estimate) -> Estimate:
    """Experts shared by sets drawn independently by use: sum over e of p_a(e) p_b(e).

    A product of two uses of the same documents lies too high, its draws as much above it again: they are
    reflected (the basic bootstrap), which puts them where the true value is.
    """
    value = np.einsum("...e,...e", a.value, b.value)
    draws = np.einsum("...e,...e", a.draws, b.draws)
    return Estimate(value=value, draws=2 * value - draws)


def _by_execution(data: xr.Dataset, resampling: Resampling, folds: Folds) -> Quantities:
    tokens, use = data["tokens"].values, folds.use()
    not_top = data["not_top_logits"].values
    means = {
        "entropy": resampling.ratio(data["entropy_sum"].values, tokens),
        "lexical_overlap": resampling.ratio(
            data["lexical_sum"].values, data["repeated_tokens"].values
        ),
        "lexical_marginal": matched_overlap(use, use),
        "near_ties": resampling.ratio(data["near_ties"].values, tokens).where(
            np.nansum(not_top, axis=0) == 0
        ),
        "not_top_logits": resampling.ratio(not_top, tokens),
    }
    return {
        **quantities(("execution",), means),
        "load": Quantity(dims=("execution", "expert"), estimate=use),
    }


def _by_pair(data: xr.Dataset, resampling: Resampling, folds: Folds) -> Quantities:
    dims = ("looped_layer", "visit_pair")
    count = data["overlap_count"].values.astype(np.float64)
    tokens, repeated = count.sum(-1), data["repeated_tokens"].values
    shared = np.arange(count.shape[-1])
    k = shared[-1]
    pairs = executions_of_pairs(data)
    earlier, later, exists = pairs[..., 0], pairs[..., 1], pairs[..., 1] >= 0
    use = folds.use()

    def mean(name: str, counts: np.ndarray = tokens) -> Estimate:
        return resampling.ratio(data[name].values, counts)

    means = {
        "overlap": resampling.ratio(count @ shared, tokens),
        "marginal_overlap": matched_overlap(use[earlier], use[later]).where(exists),
        "other_token_overlap": mean("other_token_sum"),
        "previous_overlap": mean("previous_sum", repeated),
        "repeated_overlap": mean("repeated_overlap_sum", repeated),
        "jaccard": resampling.ratio(count @ (shared / (2 * k - shared)), tokens),
        "shared_weight_earlier": mean("shared_weight_earlier_sum"),
        "shared_weight_later": mean("shared_weight_later_sum"),
        "no_overlap": resampling.ratio(count[..., 0], tokens),
        "two_or_more": resampling.ratio(count[..., 2:].sum(-1), tokens),
    }
    counted = folds.tokens[:, :, earlier]  # (category, fold, looped_layer, visit_pair)
    by_expert = {
        name: folds.mean(data[name].values, counted).where(exists[..., None])
        for name in _TABLES_OF_PAIRS
    }
    return {
        **averages(means),
        **quantities(dims, means, family=("overlap",)),
        "overlap_share": Quantity(
            dims=(*dims, "shared_experts"), estimate=resampling.ratio(count, tokens)
        ),
        **quantities((*dims, "expert"), by_expert),
    }


def _by_category(
    data: xr.Dataset, category: np.ndarray, resampling: Resampling, folds: Folds
) -> Quantities:
    """`overlap` and `marginal_overlap` of each category; `category` is that of each segment."""
    count = data["overlap_count"].values.astype(np.float64)
    pairs = executions_of_pairs(data)
    earlier, later, exists = pairs[..., 0], pairs[..., 1], pairs[..., 1] >= 0
    tokens, shared = count.sum(-1), count @ np.arange(count.shape[-1])
    own, matched = [], []
    for index, name in enumerate(data["table_category"].values):
        mine = category == name
        documents = len(np.unique(resampling.documents.of_segment[mine]))
        mean = resampling.ratio(np.where(mine[:, None, None], shared, np.nan), tokens)
        own.append(_drawn_from(documents, mean))
        use = folds.use(index)
        null = matched_overlap(use[earlier], use[later]).where(exists)
        matched.append(_drawn_from((folds.category == index).sum(), null))
    return quantities(
        ("table_category", "looped_layer", "visit_pair"),
        {
            f"{name}_by_category": Estimate(
                value=np.stack([e.value for e in estimates]),
                draws=np.stack([e.draws for e in estimates], axis=1),
            )
            for name, estimates in (("overlap", own), ("marginal_overlap", matched))
        },
    )


def _drawn_from(units: int, estimate: Estimate) -> Estimate:
    """The estimate, without an interval where there was a single unit: drawn again, it is always itself."""
    if units > 1:
        return estimate
    return Estimate(value=estimate.value, draws=np.full_like(estimate.draws, np.nan))


def _chance(experts: int, k: int) -> Quantities:
    """Two independent uniform sets of k among `experts`."""
    from scipy.stats import hypergeom

    shared = np.arange(k + 1)
    share = hypergeom(experts, k, k).pmf(shared)
    mean = k**2 / experts
    values = {
        "chance": mean,
        "chance_sd": np.sqrt(share @ (shared - mean) ** 2),
        "chance_no_overlap": share[0],
        "chance_two_or_more": share[2:].sum(),
        "chance_jaccard": share @ (shared / (2 * k - shared)),
        "chance_weight": k / experts,
    }
    return {
        **quantities((), {name: exact(value) for name, value in values.items()}),
        "chance_share": Quantity(dims=("shared_experts",), estimate=exact(share)),
    }
