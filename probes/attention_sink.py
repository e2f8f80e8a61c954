"""attention-sink: how much attention rests on a segment's first token, by head, layer and visit."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor
from torch.nn.functional import one_hot, pad

from smeltscope.activations import Attention, Variable
from smeltscope.errors import SmeltscopeError
from smeltscope.model import Execution
from smeltscope.probes.probe import Batch, ModelShape
from smeltscope.probes.statistics import DRAWS, Documents, Estimate, bootstrap_weights, ratio

NEARBY_KEYS = 4  # keys 1 to 4: where a sink may have moved
SINK_RATE_TOKENS = 64  # Gu et al.'s T
SINK_RATE_THRESHOLD = 0.3  # Gu et al.'s epsilon
SAMPLED_QUERIES = 16  # of a segment, to find its heaviest key


@dataclass(frozen=True, kw_only=True)
class AttentionSink:
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

    Averages weight every query alike: sums over segments, divided by counts. Units:
    probability. Sources: arXiv 2609.01343 (sink by visit); Gu et al., arXiv 2410.10781
    (sink rate).
    """

    include_first: bool = False

    name = "attention-sink"
    sites = ("attention",)

    def options(self) -> dict[str, Any]:
        return asdict(self)

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
        }

    def observe(
        self,
        arrays: Mapping[str, np.ndarray],
        batch: Batch,
        execution: Execution,
        site: str,
        value: Attention,
    ) -> None:
        measured_by_name = measure_sink(value, batch.lengths, self.include_first)
        if not measured_by_name["sink_mass_sum"].isfinite().all():
            raise SmeltscopeError(
                f"Attention of layer {execution.layer} at visit {execution.visit} is not a number: the model's "
                "scores overflow; check its weights, or run it with --dtype float32."
            )
        for name, measured in measured_by_name.items():
            rows = arrays[name][:, execution.index]
            if "by_position" in name:  # no query stands in the bins beyond this batch
                measured = pad(measured, (0, rows.shape[-1] - measured.shape[-1]))
            rows[(slice(None), *map(slice, measured.shape[1:]))] = measured.cpu().numpy()


def position_edges(max_length: int) -> np.ndarray:
    """Edges of the bins of query position: 0, 1, 2, 4, 8, ... up to the length; bin i is [edge i, edge i + 1)."""
    return np.concatenate([[0], 2 ** np.arange(int(np.ceil(np.log2(max(max_length, 2)))) + 1)])


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
    mass = attention.mass_on(keys)  # (B, H, Q, 6): keys 0 to 4, and the heaviest
    alpha = _sink_alpha(mass[..., 0], lengths)
    mass = mass.masked_fill_(~counted[:, None, :, None], 0.0)
    sink = mass[..., 0]  # (B, H, Q)
    uniform = counted / attention.keys_seen()  # (B, Q)

    edges = torch.as_tensor(position_edges(queries), device=lengths.device)
    bins = torch.bucketize(positions, edges, right=True) - 1
    in_bin = one_hot(bins, len(edges) - 1).float()  # (Q, bin)

    sink_sum, heaviest_sum = sink.sum(2), mass[..., -1].sum(2)
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
        "nearby_mass_sum": pad(mass[..., 1:-1].sum(2), (0, NEARBY_KEYS + 1 - len(near))),
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
    return attention.rows(sampled).sum(2).argmax(-1)


def _sink_alpha(sink: Tensor, lengths: Tensor) -> Tensor:
    """Mean mass on the first token, `sink` (B, H, Q), over queries 0..63; NaN for rows with fewer tokens: (B, H)."""
    if sink.shape[2] < SINK_RATE_TOKENS:
        return sink.new_full(sink.shape[:2], torch.nan)
    alpha = sink[:, :, :SINK_RATE_TOKENS].mean(2)
    return alpha.masked_fill(lengths[:, None] < SINK_RATE_TOKENS, torch.nan)


def summarize(run: xr.DataTree, *, draws: int = DRAWS, seed: int = 0) -> xr.Dataset:
    """The sink of a run, with 95 % intervals from resampling its documents within each category.

    Each `X` comes with `X_low` and `X_high`. Over (execution, head): `sink_mass`; `change`, the sink mass minus
    that of the same layer's first visit (NaN for first visits); `nearby_mass` (keys 1 to 4 together),
    `heaviest_mass`, `heaviest_is_first` (share of segments), `sink_rate`, `learned_sink_mass`.
    Over (execution): `queries`, how many were counted; `sink_mass_mean` and `change_mean`, their means over heads, `uniform`, `blind_share`. Over
    (execution, position): `sink_mass_by_position` (mean over heads) and `uniform_by_position`. Without
    dimensions: `change_overall`, the mean of `change` over all heads of later visits.
    """
    data, segments = run["attention_sink"].dataset, run["segments"].dataset
    documents = Documents.from_labels(segments["document"].values, segments["category"].values)
    weights = bootstrap_weights(documents, draws=draws, seed=seed)
    queries = data["queries"].values

    def average(name: str, counts: np.ndarray = queries) -> Estimate:
        return ratio(data[name].values, counts, documents, weights)

    sink = average("sink_mass_sum")
    layers, visits = data["layer"].values, data["visit"].values
    first = {layer: e for e, layer in enumerate(layers) if visits[e] == 1}
    change = sink - sink[[first[layer] for layer in layers]]
    change = change.where((visits > 1)[:, None])
    by_position = ratio(
        data["sink_mass_by_position_sum"].values.swapaxes(2, 3),
        data["queries_by_position"].values,
        documents,
        weights,
    ).mean()
    heaviest_key = data["heaviest_key"].values
    has_key = np.isfinite(heaviest_key)
    alpha = data["sink_alpha"].values
    has_alpha = np.isfinite(alpha)
    blind = data["blind_queries"].values
    estimates = {
        "sink_mass": (("execution", "head"), sink),
        "change": (("execution", "head"), change),
        "nearby_mass": (
            ("execution", "head"),
            ratio(data["nearby_mass_sum"].values.sum(-1), queries, documents, weights),
        ),
        "heaviest_mass": (("execution", "head"), average("heaviest_mass_sum")),
        "heaviest_is_first": (
            ("execution", "head"),
            ratio(has_key & (heaviest_key == 0), has_key, documents, weights),
        ),
        "sink_rate": (
            ("execution", "head"),
            ratio(has_alpha & (alpha > SINK_RATE_THRESHOLD), has_alpha, documents, weights),
        ),
        "learned_sink_mass": (
            ("execution", "head"),
            average("learned_sink_mass_sum"),
        ),
        "sink_mass_mean": (("execution",), sink.mean()),
        "change_mean": (("execution",), change.mean()),
        "change_overall": ((), change.flatten().mean()),
        "uniform": (("execution",), average("uniform_sum")),
        "blind_share": (("execution",), ratio(blind, blind + queries, documents, weights)),
        "sink_mass_by_position": (("execution", "position"), by_position),
        "uniform_by_position": (
            ("execution", "position"),
            average("uniform_by_position_sum", data["queries_by_position"].values),
        ),
    }
    arrays: dict[str, Any] = {}
    for name, (dims, estimate) in estimates.items():
        low, high = estimate.interval()
        arrays |= {name: (dims, estimate.value), f"{name}_low": (dims, low)}
        arrays[f"{name}_high"] = (dims, high)
    arrays["queries"] = (("execution",), np.nansum(queries, axis=0))
    labels = {name: data.coords[name] for name in ("layer", "visit", "module", "position")}
    return xr.Dataset(
        arrays,
        coords=labels,
        attrs={
            "segments": len(segments["document"]),
            "documents": len(documents),
            "tokens": int(segments["tokens"].sum()),
            "bootstrap_draws": draws,
            "bootstrap_seed": seed,
        },
    )


def sentence(summary: xr.Dataset) -> str:
    """The result in a few sentences, with numbers, chance level and interval."""
    visits, layers = summary["visit"].values, summary["layer"].values
    documents = (
        f"over {summary.attrs['documents']} document{'s' * (summary.attrs['documents'] != 1)}"
    )
    later = visits > 1
    if not later.any():
        mean, uniform = (float(summary[name].mean()) for name in ("sink_mass", "uniform"))
        return (
            f"Mean over layers and heads: {mean:.4f}; uniform attention: {uniform:.4f}; {documents}. No layer is "
            "visited twice, so there is no second visit to compare."
        )
    looped = np.isin(layers, layers[later])
    by_visit = [
        f"{float(summary['sink_mass'][looped & (visits == v)].mean()):.4f} at visit {v}"
        for v in np.unique(visits)
    ]
    uniform = float(summary["uniform"][looped].mean())
    change = summary["change"].values[later]
    heads = int(np.isfinite(change).sum())
    value, low, high = (float(summary[f"change_overall{end}"]) for end in ("", "_low", "_high"))
    text = (
        f"Mean over looped layers and heads: {', '.join(by_visit)}; uniform attention: {uniform:.4f}. Later visits "
        f"minus visit 1: {value:+.2g}"
    )
    if not np.isfinite(low):
        return f"{text}, lower in {int((change < 0).sum())} of {heads} heads, {documents}: too few for an interval."
    decided = (summary["change_high"].values[later] < 0) | (summary["change_low"].values[later] > 0)
    return (
        f"{text} [{low:+.2g}, {high:+.2g}], lower in {int((change < 0).sum())} of {heads} heads, {documents} "
        f"(in {int(decided.sum())} heads the interval excludes 0, each judged alone)."
    )
