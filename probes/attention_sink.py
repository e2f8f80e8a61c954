"""attention-sink: how much attention rests on a segment's first token, by head, layer and visit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor
from torch.linalg import vecdot, vector_norm
from torch.nn.functional import pad

from smeltscope.activations import Variable
from smeltscope.probes.labels import executions_of_pairs, looped_by_visit, over_documents
from smeltscope.probes.positions import position_bins, position_edges
from smeltscope.probes.probe import Batch, ModelShape, Probe
from smeltscope.probes.regions import Regions
from smeltscope.probes.rows import Rows, block_of, check_mass
from smeltscope.probes.sampling import Sample
from smeltscope.probes.statistics import (
    Estimate,
    Quantities,
    Quantity,
    Resampling,
    exact,
    quantities,
)
from smeltscope.probes.visit_pairs import each_of, mean_of

if TYPE_CHECKING:
    from smeltscope.activations import Attention
    from smeltscope.model import Execution

NEARBY_KEYS = 4  # keys 1 to 4: where a sink may have moved
SINK_RATE_TOKENS = 64  # Gu et al.'s T
SINK_RATE_THRESHOLD = 0.3  # Gu et al.'s epsilon
SAMPLED_QUERIES = 16  # of a segment, to find its heaviest key


@dataclass(frozen=True, kw_only=True)
class AttentionSink(Probe):
    """Attention mass on the first token of the segment.

    With A[q, k] the attention of query q on key k (softmax over keys; mass of learned
    sinks stays apart), both counted from 0, for each segment, execution and head over the
    counted queries C:

    - `sink_mass_sum` = sum over q in C of A[q, 0]. C holds the segment's queries that can
      see key 0, without query 0 itself, whose mass is 1 by construction (`include_first`
      counts it). Divided by `queries` = |C| it is the sink mass.
    - `sink_mass_by_position_sum`, `queries_by_position`: the same for queries in [1, 2),
      [2, 4), [4, 8), ...
    - `uniform_sum` = sum over q in C of 1 / (number of keys that q can see): the mass under
      uniform attention.
    - `nearby_mass_sum`: sum of A[q, k] for k = 1..4. A lower sink may have moved there.
    - `heaviest_key` = argmax over k of the mean of A[q, k] over 16 queries spread evenly
      over C, or key 0 if that has more over all of C; `heaviest_mass_sum` = sum over q in C
      of A[q, heaviest_key]. Equal to the sink where the first token is the heaviest key;
      above it where a sink has moved.
    - `blind_queries`: queries that cannot see key 0 (sliding windows); in no average.
    - `sink_alpha` = mean over q = 0..63 of A[q, 0], in the segment's first 64 tokens; NaN
      for shorter segments. `sink_rate` is the share of (segment, head) with
      sink_alpha > .3.
    - `learned_sink_mass_sum`: mass that goes to no token; NaN where the model has no
      learned sinks.

    Over S, the sampled queries in C (spread evenly over log position, never query 0):

    - `region_mass_sum`: sum over q in S of A[q, k] over the keys k of each region, the
      first that applies: first (key 0), self (k = q), previous (k = q - 1), local (2 to 7
      before), delimiter (punctuation and line breaks alone), rest. Divided by
      `sampled_queries` = |S|, all regions and learned sinks sum to 1.
      `region_uniform_sum`: the same under uniform attention. A region that no key of the
      run falls into (delimiters without a tokenizer) has no mass: NaN.
    - `entropy_sum` = sum over q in S of H(q) = - sum over k of p ln p, in nats, with
      p = A[q, k] / sum over k of A[q, k] (learned sinks put aside);
      `relative_entropy_sum`: of H(q) / ln(number of keys that q can see), 1 under uniform
      attention.
    - `first_share_sum` = sum over q in S of |A[q, 0] v_0| / |sum over k of A[q, k] v_k|,
      the size of what the first token adds to a head's output beside the whole output
      (above 1 where the other tokens cancel it), over `first_share_queries`: zero outputs
      have no share.

    What the first token is like, beside the segment's other tokens: `first_residual_norm`
    and `residual_norm_sum` of the layer's input; by key/value head `first_key_norm`,
    `key_norm_sum`, `first_value_norm`, `value_norm_sum`, as attention uses them (keys after
    QK-norm). Euclidean norms; the ratio is the first token's over the mean of all others.

    Averages weight every query alike: sums over segments, divided by counts. Units:
    probability, but where others are given. Sources: arXiv 2609.01343 (sink by visit);
    Gu et al., arXiv 2410.10781 (sink rate); regions, entropy and the first token's
    share: ours.
    """

    include_first: bool = False

    name = "attention-sink"
    sites = ("attention", "rows", "pv", "resid_pre")

    def dimensions(self, shape: ModelShape) -> Mapping[str, np.ndarray]:
        return {
            "position": position_edges(shape.max_length)[:-1],
            "nearby_key": np.arange(1, NEARBY_KEYS + 1),
        }

    def variables(self, shape: ModelShape) -> Mapping[str, Variable]:
        by_execution = ("segment", "execution")
        by_head = (*by_execution, "head")
        return {
            "queries": Variable(dims=by_execution, description="counted queries"),
            "blind_queries": Variable(
                dims=by_execution, description="queries that cannot see the first token"
            ),
            "uniform_sum": Variable(
                dims=by_execution, description="mass under uniform attention, summed over queries"
            ),
            "sink_mass_sum": Variable(
                dims=by_head, description="mass on the first token, summed over queries"
            ),
            "queries_by_position": Variable(
                dims=(*by_execution, "position"),
                description="counted queries from this position on",
            ),
            "uniform_by_position_sum": Variable(
                dims=(*by_execution, "position"), description="uniform_sum by query position"
            ),
            "sink_mass_by_position_sum": Variable(
                dims=(*by_head, "position"), description="sink_mass_sum by query position"
            ),
            "nearby_mass_sum": Variable(
                dims=(*by_head, "nearby_key"),
                description="mass on keys 1 to 4, summed over queries",
            ),
            "heaviest_mass_sum": Variable(
                dims=by_head, description="mass on the heaviest key, summed over queries"
            ),
            "heaviest_key": Variable(
                dims=by_head, description="position of the heaviest key", units="tokens"
            ),
            "sink_alpha": Variable(
                dims=by_head, description="mean mass on the first token in the first 64 tokens"
            ),
            "learned_sink_mass_sum": Variable(
                dims=by_head, description="mass on learned sinks, summed over queries"
            ),
            "sampled_queries": Variable(
                dims=by_execution, description="sampled queries among those that are counted"
            ),
            "region_mass_sum": Variable(
                dims=(*by_head, "region"),
                description="mass on the keys of each region, summed over sampled queries",
            ),
            "region_uniform_sum": Variable(
                dims=(*by_execution, "region"),
                description="region_mass_sum under uniform attention",
            ),
            "entropy_sum": Variable(
                dims=by_head,
                description="entropy of attention over tokens, summed over sampled queries",
                units="nats",
            ),
            "relative_entropy_sum": Variable(
                dims=by_head, description="entropy / ln(keys seen), summed over sampled queries"
            ),
            "first_share_sum": Variable(
                dims=by_head,
                description="norm of what the first token adds / norm of the head's output, summed",
            ),
            "first_share_queries": Variable(
                dims=by_head, description="sampled queries whose head output is not zero"
            ),
            "first_residual_norm": Variable(
                dims=by_execution, description="norm of the layer's input at the first token"
            ),
            "residual_norm_sum": Variable(
                dims=by_execution,
                description="norm of the layer's input, summed over all other tokens",
            ),
            **{
                name: Variable(dims=(*by_execution, "kv_head"), description=description)
                for which in ("key", "value")
                for name, description in (
                    (f"first_{which}_norm", f"norm of the first token's {which}"),
                    (f"{which}_norm_sum", f"norms of all other tokens' {which}s, summed"),
                )
            },
        }

    def observe(
        self,
        arrays: Mapping[str, np.ndarray],
        batch: Batch,
        execution: Execution,
        sites: Mapping[str, Any],
        earlier: Mapping[int, Any],
    ) -> None:
        if "attention" not in sites:  # a layer of another kind, in a model that mixes them
            return
        attention = sites["attention"]
        measured_by_name = measure_sink(attention, batch.lengths, self.include_first)
        check_mass(measured_by_name["sink_mass_sum"], execution)
        measured_by_name |= measure_rows(sites["rows"], attention, sites["pv"], batch.regions)
        vectors = {"key": attention.key, "value": attention.value}  # (B, G, T, D)
        vectors |= {"residual": sites["resid_pre"]} if "resid_pre" in sites else {}
        measured_by_name |= measure_first_token(vectors, batch.counted)
        for name, measured in measured_by_name.items():
            rows = arrays[name][:, execution.index]
            if "by_position" in name:  # no query stands in the bins beyond this batch
                measured = pad(measured, (0, rows.shape[-1] - measured.shape[-1]))
            rows[(slice(None), *map(slice, measured.shape[1:]))] = measured.cpu().numpy()

    def progress(
        self, arrays: Mapping[str, np.ndarray], shape: ModelShape
    ) -> Mapping[str, tuple[float, float]]:
        def mean_over(executions: Sequence[Execution]) -> tuple[float, float]:
            index = [e.index for e in executions]
            mass = arrays["sink_mass_sum"][:, index]
            queries = np.where(np.isfinite(mass), arrays["queries"][:, index, None], 0)
            return float(np.nansum(mass)), float(queries.sum())

        looped = [e for e in shape.executions if e.layer in shape.looped_layers]
        if not looped:
            return {"sink": mean_over(shape.executions)}
        return {
            "sink at visit 1": mean_over([e for e in looped if e.visit == 1]),
            "at later visits": mean_over([e for e in looped if e.visit > 1]),
        }

    def estimates(self, run: xr.DataTree, resampling: Resampling) -> Quantities:
        """Changes are from the same layer's first visit, NaN for first visits.

        Without dimensions: `change_overall`, the mean of `change` over all heads of later visits; `sink_mass_overall` and
        `uniform_overall`, means of `sink_mass_mean` and `uniform` over all executions; by region `region_change_overall`. The same between each two visits: over (looped_layer, visit_pair, head) `pair_change` and
        (with region) `pair_region_change`, over (visit_pair) and (visit_pair, region) their means over heads and layers,
        `change_by_pair` and `region_change_by_pair`. Over (execution), means over heads: `sink_mass_mean`, `change_mean`, `entropy_mean`,
        `relative_entropy_mean`, `first_share_mean`; with (execution, region) `region_mass_mean`,
        `region_change_mean`, and what they would be under uniform attention, `uniform` and `region_uniform`. Over
        (execution): `first_residual_norm`, `blind_share`, and `queries`, how many were counted. Over (execution, head):
        `sink_mass`; `change`; `region_mass` and `region_change` (with region); `entropy`, `relative_entropy`;
        `first_share`; `nearby_mass` (keys 1 to 4 together), `heaviest_mass`, `heaviest_is_first` (share of segments),
        `sink_rate`, `learned_sink_mass`. Over (execution, kv_head): `first_key_norm`, `first_value_norm`. Over
        (execution, position): `sink_mass_by_position` (mean over heads) and `uniform_by_position`; over (position), the mean
        of the first over looped layers at a visit (over all layers where none is looped): `sink_mass_by_position_visit_1`, ...
        """
        data = run["attention_sink"].dataset
        queries, sampled = data["queries"].values, data["sampled_queries"].values
        layers, visits = data["layer"].values, data["visit"].values
        first = {layer: e for e, layer in enumerate(layers) if visits[e] == 1}

        def average(name: str, counts: np.ndarray = queries) -> Estimate:
            return resampling.ratio(data[name].values, counts)

        def change_of(estimate: Estimate) -> Estimate:
            change = estimate - estimate[[first[layer] for layer in layers]]
            return change.where((visits > 1).reshape(-1, *[1] * (change.value.ndim - 1)))

        others = run["segments"].dataset["tokens"].values - 1  # tokens of a segment but the first

        def first_over_others(which: str) -> Estimate:
            norm, norm_sum = data[f"first_{which}_norm"].values, data[f"{which}_norm_sum"].values
            return resampling.ratio(norm * others.reshape(-1, *[1] * (norm.ndim - 1)), norm_sum)

        sink = average("sink_mass_sum")
        change = change_of(sink)
        by_position = resampling.ratio(
            data["sink_mass_by_position_sum"].values.swapaxes(2, 3),
            data["queries_by_position"].values,
        ).mean()
        region_uniform = average("region_uniform_sum", sampled)
        holds_keys = region_uniform.value > 0  # (execution, region)
        region_mass = average("region_mass_sum", sampled).where(holds_keys[:, None])
        region_change = change_of(region_mass)
        entropy, relative = (average(f"{n}entropy_sum", sampled) for n in ("", "relative_"))
        share = average("first_share_sum", data["first_share_queries"].values)
        heaviest_key = data["heaviest_key"].values
        has_key = np.isfinite(heaviest_key)
        alpha = data["sink_alpha"].values
        has_alpha = np.isfinite(alpha)
        blind = data["blind_queries"].values
        by_execution = {
            "sink_mass_mean": sink.mean(),
            "change_mean": change.mean(),
            "uniform": average("uniform_sum"),
            "entropy_mean": entropy.mean(),
            "relative_entropy_mean": relative.mean(),
            "first_share_mean": share.mean(),
            "first_residual_norm": first_over_others("residual"),
            "blind_share": resampling.ratio(blind, blind + queries),
            "queries": exact(np.nansum(queries, axis=0)),
        }
        by_region = {
            "region_mass_mean": region_mass.mean(1),
            "region_change_mean": region_change.mean(1),
            "region_uniform": region_uniform.where(holds_keys),
        }
        by_head = {
            "sink_mass": sink,
            "change": change,
            "entropy": entropy,
            "relative_entropy": relative,
            "first_share": share,
            "nearby_mass": resampling.ratio(data["nearby_mass_sum"].values.sum(-1), queries),
            "heaviest_mass": average("heaviest_mass_sum"),
            "heaviest_is_first": resampling.ratio(has_key & (heaviest_key == 0), has_key),
            "sink_rate": resampling.ratio(has_alpha & (alpha > SINK_RATE_THRESHOLD), has_alpha),
            "learned_sink_mass": average("learned_sink_mass_sum"),
        }
        by_head_and_region = {"region_mass": region_mass, "region_change": region_change}
        by_kv_head = {f"first_{which}_norm": first_over_others(which) for which in ("key", "value")}
        by_bin = {
            "sink_mass_by_position": by_position,
            "uniform_by_position": average(
                "uniform_by_position_sum", data["queries_by_position"].values
            ),
        }
        return {
            **_by_pair(run, sink, region_mass),
            "change_overall": Quantity(dims=(), estimate=change.flatten().mean()),
            "sink_mass_overall": Quantity(dims=(), estimate=by_execution["sink_mass_mean"].mean()),
            "uniform_overall": Quantity(dims=(), estimate=by_execution["uniform"].mean()),
            "region_change_overall": Quantity(
                dims=("region",), estimate=region_change.mean(1).mean(0)
            ),
            **quantities(("execution",), by_execution),
            **quantities(("execution", "region"), by_region),
            **quantities(("execution", "head"), by_head, family=("change",)),
            **quantities(("execution", "head", "region"), by_head_and_region),
            **quantities(("execution", "kv_head"), by_kv_head),
            **quantities(("execution", "position"), by_bin),
            **quantities(
                ("position",),
                {
                    f"sink_mass_by_position_visit_{visit}": by_position[rows].mean(0)
                    for visit, rows in looped_by_visit(data).items()
                },
            ),
        }

    def sentence(self, summary: xr.Dataset) -> str:
        visits, layers = summary["visit"].values, summary["layer"].values
        documents = over_documents(summary)
        later = visits > 1
        looped = np.isin(layers, layers[later]) if later.any() else visits > 0

        def by_visit(values: xr.DataArray) -> str:
            return ", ".join(
                f"{float(values[looped & (visits == v)].mean()):.4f} at visit {v}"
                for v in np.unique(visits[looped])
            )

        uniform = float(summary["uniform"][looped].mean())
        share = (
            " Norm of what the first token adds to a head's output, beside the whole output: "
            f"{by_visit(summary['first_share'])}; its mass over the same queries: "
            f"{by_visit(summary['region_mass'].sel(region='first'))}."
        )
        if not later.any():
            return (
                f"Mean over layers and heads: {float(summary['sink_mass'].mean()):.4f}; uniform attention: "
                f"{uniform:.4f}; {documents}. No layer is visited twice, so there is no second visit to "
                f"compare.{share}"
            )
        by_pair = each_of(summary["change_by_pair"], "+.2g") if "change_by_pair" in summary else ""
        change = summary["change"].values[later]
        heads = int(np.isfinite(change).sum())
        text = (
            f"Mean over looped layers and heads: {by_visit(summary['sink_mass'])}; uniform attention: {uniform:.4f}. Later "
            f"visits minus visit 1: {_with_interval(summary, 'change_overall')}{by_pair and f' ({by_pair})'}, lower in "
            f"{int((change < 0).sum())} of {heads} heads, {documents}"
        )
        if not np.isfinite(float(summary["change_overall_low"])):
            return f"{text}: too few for an interval.{share}"
        low, high = (summary[f"change_{end}_all"].values[later] for end in ("low", "high"))
        decided = (high < 0) | (low > 0)
        regions = ", ".join(
            f"{region} {_with_interval(summary.sel(region=region), 'region_change_overall')}"
            for region in summary["region"].values
            if summary["region_change_overall"].sel(region=region).notnull()
        )
        return (
            f"{text} (in {int(decided.sum())} heads the interval excludes 0, all judged together). By region, over "
            f"sampled queries: {regions}.{share}"
        )


def _by_pair(run: xr.DataTree, sink: Estimate, region_mass: Estimate) -> Quantities:
    """Changes between each two visits of a layer; none of one visit, nor in files of this probe alone that do not name the pairs."""
    if "visit_pair" not in run.dataset.coords:
        return {}
    places = executions_of_pairs(run.to_dataset())  # (looped_layer, visit_pair, 2)
    exists = np.all(places >= 0, axis=-1)[..., None]
    earlier, later = np.moveaxis(places, -1, 0)
    change = (sink[later] - sink[earlier]).where(exists)
    by_region = (region_mass[later] - region_mass[earlier]).where(exists[..., None])
    dims = ("looped_layer", "visit_pair", "head")
    return {
        **quantities(("visit_pair",), {"change_by_pair": mean_of(change)}),
        "region_change_by_pair": Quantity(
            dims=("visit_pair", "region"), estimate=by_region.mean(-2).mean(0)
        ),
        **quantities(dims, {"pair_change": change}, family=("pair_change",)),
        **quantities((*dims, "region"), {"pair_region_change": by_region}),
    }


def _with_interval(summary: xr.Dataset, name: str) -> str:
    value, low, high = (float(summary[f"{name}{end}"]) for end in ("", "_low", "_high"))
    return f"{value:+.2g} [{low:+.2g}, {high:+.2g}]" if np.isfinite(low) else f"{value:+.2g}"


def measure_sink(
    attention: Attention, lengths: Tensor, include_first: bool = False
) -> dict[str, Tensor]:
    """The numbers of `AttentionSink` for one execution: each (B,), (B, H), (B, bin), (B, H, bin) or (B, H, key)."""
    rows, _, queries, _ = attention.query.shape
    positions = torch.arange(queries, device=lengths.device)
    first = torch.zeros(rows, 1, dtype=torch.long, device=lengths.device)
    sees_first = attention.sees(first)[..., 0]  # (B, Q)
    real = positions < lengths[:, None]
    if not include_first:
        real = real & (positions > 0)
    counted = real & sees_first

    near = torch.arange(min(NEARBY_KEYS + 1, queries), device=lengths.device)
    heaviest_key = _heaviest_key(attention, counted)  # (B, H)
    keys = torch.cat([near.expand(*heaviest_key.shape, -1), heaviest_key[..., None]], dim=2)
    mass = attention.mass_on(keys).mT  # (B, H, 6, Q): keys 0 to 4, and the heaviest
    alpha = _sink_alpha(mass[:, :, 0], lengths)
    mass.masked_fill_(~counted[:, None, None], 0.0)
    sink = mass[:, :, 0]  # (B, H, Q)
    uniform = counted / attention.keys_seen()  # (B, Q)

    in_bin = position_bins(queries, lengths.device)  # (Q, bin)

    sums = mass.sum(3)  # (B, H, 6)
    sink_sum, heaviest_sum = sums[..., 0], sums[..., -1]
    # A sample of queries may miss it, but the first token is never passed over for a lighter key.
    heaviest_key = heaviest_key.masked_fill(sink_sum >= heaviest_sum, 0)
    none_counted = ~counted.any(1)
    measured = {
        "queries": counted.sum(1).float(),
        "blind_queries": (real & ~sees_first).sum(1).float(),
        "uniform_sum": uniform.sum(1),
        "sink_mass_sum": sink_sum,
        "queries_by_position": counted.float() @ in_bin,
        "uniform_by_position_sum": uniform @ in_bin,
        "sink_mass_by_position_sum": sink @ in_bin,
        # A key that a short batch does not have got no mass.
        "nearby_mass_sum": pad(sums[..., 1:-1], (0, NEARBY_KEYS + 1 - len(near))),
        "heaviest_mass_sum": torch.maximum(heaviest_sum, sink_sum),
        "heaviest_key": heaviest_key.float().masked_fill_(none_counted[:, None], torch.nan),
        "sink_alpha": alpha,
    }
    if attention.learned_sink is not None:
        learned = attention.learned_sink.masked_fill(~counted[:, None], 0.0)
        measured["learned_sink_mass_sum"] = learned.sum(2)
    return measured


def _heaviest_key(attention: Attention, counted: Tensor) -> Tensor:
    """The key with most mass over evenly sampled counted queries of each row: (B, H), int64."""
    # The n-th counted query of a row, for n spread evenly over their number; rows with few repeat some.
    number = counted.sum(1, keepdim=True)  # (B, 1)
    spread = torch.linspace(0, 1, SAMPLED_QUERIES, device=counted.device)
    wanted = (spread * (number - 1).clamp(min=0)).round().long() + 1  # (B, S), from 1
    sampled = torch.searchsorted(counted.cumsum(1), wanted).clamp_(max=counted.shape[1] - 1)
    queries = Sample(positions=sampled, valid=counted.gather(1, sampled))
    block = block_of(attention, queries, keys=attention.key.shape[2])
    return block.mass.sum(2).argmax(-1)


def _sink_alpha(sink: Tensor, lengths: Tensor) -> Tensor:
    """Mean mass on the first token, `sink` (B, H, Q), over queries 0..63; NaN for rows with fewer tokens: (B, H)."""
    if sink.shape[2] < SINK_RATE_TOKENS:
        return sink.new_full(sink.shape[:2], torch.nan)
    alpha = sink[:, :, :SINK_RATE_TOKENS].mean(2)
    return alpha.masked_fill(lengths[:, None] < SINK_RATE_TOKENS, torch.nan)


def measure_rows(
    rows: Sequence[Rows], attention: Attention, pv: Tensor, regions: Regions
) -> dict[str, Tensor]:
    """The numbers of `AttentionSink` over sampled queries; `pv` (B, T, head, size) is what the heads read."""
    blocks = [_reduce_block(block, regions) for block in rows]
    first_mass, entropy = (
        torch.cat([block[n] for block in blocks], dim=2) for n in ("first", "entropy")
    )
    region_sum = torch.stack([block["region_sum"] for block in blocks]).sum(0)
    valid, sees_first, keys_seen, positions = (
        torch.cat(parts, dim=1)
        for parts in zip(
            *((r.queries.valid, r.sees_first, r.keys_seen, r.queries.positions) for r in rows),
            strict=True,
        )
    )  # (B, S)
    counted = (valid & sees_first)[:, None]  # (B, 1, S)

    value_norm = vector_norm(attention.value[:, :, 0], dim=2, dtype=torch.float32)  # (B, G)
    heads_per_value = pv.shape[2] // value_norm.shape[1]
    value_norm = value_norm.repeat_interleave(heads_per_value, dim=1)  # (B, H)
    read = Sample(positions=positions, valid=valid).take(pv)  # (B, S, H, size)
    read_norm = vector_norm(read, dim=3, dtype=torch.float32).transpose(1, 2)  # (B, H, S)
    share = first_mass * value_norm[..., None] / read_norm

    def total(values: Tensor, where: Tensor = counted) -> Tensor:
        return torch.where(where, values, 0.0).sum(2)

    return {
        "sampled_queries": counted.sum(2)[:, 0].float(),
        "region_mass_sum": region_sum[:, :-1],
        "region_uniform_sum": region_sum[:, -1],
        "entropy_sum": total(entropy),
        "relative_entropy_sum": total(entropy / keys_seen.log()[:, None]),
        "first_share_sum": total(share, counted & (read_norm > 0)),
        "first_share_queries": (counted & (read_norm > 0)).sum(2).float(),
    }


def _reduce_block(block: Rows, regions: Regions) -> dict[str, Tensor]:
    """By query the mass on the `first` key and the `entropy`, (B, H, N); `region_sum`, the mass on each region summed over
    counted queries, of all heads and under uniform attention, (B, H + 1, region)."""
    seen = block.scores[:, :1] > -torch.inf
    mass = torch.cat([block.mass, seen / block.keys_seen[:, None, :, None]], dim=1)
    if not block.sees_first.all():
        mass.masked_fill_(~block.sees_first[:, None, :, None], 0.0)
    # ln A = ln(the largest A) + score - (the largest score), without a logarithm for each key.
    below = block.scores - block.scores.amax(3, keepdim=True)
    below = below.clamp_(min=torch.finfo(below.dtype).min)  # hidden keys: -inf times a mass of 0
    total = block.mass.sum(3)  # (B, H, N): 1 minus learned sinks
    entropy = (total / block.mass.amax(3)).log() - vecdot(block.mass, below) / total
    return {
        "first": block.mass[..., 0],
        "entropy": entropy,
        "region_sum": regions.sums(mass, block.queries),
    }


def measure_first_token(vectors: Mapping[str, Tensor], counted: Tensor) -> dict[str, Tensor]:
    """Norms of the first token's vectors, and of all others that are `counted` (B, T), summed.

    `vectors` are (B, T, width) or (B, G, T, size); the results, by name, (B,) or (B, G).
    """
    measured = {}
    for name, vector in vectors.items():
        norm = vector_norm(vector, dim=-1, dtype=torch.float32)  # (B, T) or (B, G, T)
        others = counted if norm.ndim == 2 else counted[:, None]
        measured[f"first_{name}_norm"] = norm[..., 0]
        measured[f"{name}_norm_sum"] = torch.where(others, norm, 0.0).sum(-1)
    return measured


def depth_profile(summary: xr.Dataset, baseline_summary: xr.Dataset) -> xr.Dataset:
    """Sink mass over depth of a looped model and of a Baseline, from their summaries: one row for each execution.

    Over (row): `sink_mass_mean` and `uniform`, with the intervals of their own runs. Labels of a row: `run` ("model",
    "baseline"), the physical `layer`, the `visit`, the `execution`, and `depth` = execution / (executions - 1), from 0 to 1.
    """
    ends = ("", "_low", "_high")
    names = [f"{name}{end}" for name in ("sink_mass_mean", "uniform") for end in ends]
    parts = []
    for run, one in (("model", summary), ("baseline", baseline_summary)):
        executions = one["execution"].values
        labels = {"run": [run] * len(executions), "depth": executions / max(len(executions) - 1, 1)}
        part = one[names].rename_dims(execution="row")
        parts.append(part.assign_coords({n: ("row", v) for n, v in labels.items()}))
    return xr.concat(parts, dim="row", combine_attrs="drop")
