"""residual-updates: how much each execution writes into the residual stream, and in which direction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from smeltscope.activations import Variable
from smeltscope.errors import SmeltscopeError
from smeltscope.probes.cosines import Vectors, blocks, sums
from smeltscope.probes.labels import executions_of_pairs, over_documents
from smeltscope.probes.probe import Batch, ModelShape, Probe
from smeltscope.probes.sampling import Sample
from smeltscope.probes.statistics import (
    Estimate,
    Quantities,
    Quantity,
    Resampling,
    exact,
    quantities,
)

if TYPE_CHECKING:
    from smeltscope.model import Execution

WRITES = ("update", "attn_out", "mlp_out")  # the whole update, and its two parts
VECTORS = (*WRITES, "attn_in", "mlp_in")


@dataclass(frozen=True, kw_only=True)
class ResidualUpdates(Probe):
    """Size and direction of what each execution adds to the residual stream.

    With x = resid_pre and dx = resid_post - resid_pre of an execution, both (width), for
    each segment and execution over its tokens without the first (`include_first` counts it
    everywhere below):

    - `residual_rms_sum`, `update_rms_sum`: sums of norm(x) / sqrt(width) and
      norm(dx) / sqrt(width), over `tokens` tokens.
    - `relative_sum`, `relative_log_sum`: sums of norm(dx) / norm(x) and of its natural
      logarithm over the `relative_count` tokens where neither norm is 0.
    - `first_residual_rms`, `first_update_rms`: the same of the first token, which is
      special in many models.

    For each later visit b of a layer with each earlier visit a, over all tokens but the
    first where neither norm is 0 (`norm_count`), by `vector`: the update dx, the writes
    attn_out and mlp_out, and what attention and MLP read, attn_in and mlp_in:

    - `norm_ratio_sum`, `norm_log_ratio_sum`: sums of norm(b) / norm(a) of the same token
      and of its logarithm; `norm_later_sum`, `norm_earlier_sum`: of norm(b) and norm(a).
      The ratio shown is the geometric mean exp(sum of logs / count). 1 says no change;
      with RMSNorms of unit gain attn_in and mlp_in have ratio 1 whatever the model does.

    For each two executions i and j, by `write` (update, attn_out, mlp_out), over the
    sampled tokens of the segment (`include_first` adds the first to each sample):

    - `cosine_sum`, `cosine_count`: cos(dx_i, dx_j) of the same token; `centred_cosine_sum`
      and `centred_cosine_count` with each execution's mean over the segment's sampled tokens
      taken away first. A vector of length 0 has no cosine. Where attn_out and mlp_out are
      known dx is their sum here, which differs by rounding.

    Of two visits a < b, the layers that have both form a block of pairs (i at visit a, j at
    visit b): m matched ones (same layer) and m (m - 1) nonmatching ones. Updates of nearby
    executions are alike in any model, so that a matched pair, d executions apart, is held
    against `nearby`: the mean of the levels of the block's nonmatching pairs at distances
    d - 1, d and d + 1, where there are any. In a span of m layers that runs as a block d is
    m, no nonmatching pair is exactly m apart, and `nearby` is the mean of the levels at
    m - 1 and m + 1, pairs of neighbouring layers.

    Layers whose writes are not known apart have NaN for them. Units: of the residual stream
    for RMS, else 1. Every token counts alike. Source: arXiv 2609.01343 (norms, ratios and
    cosines); geometric mean, centring and `nearby` are ours.
    """

    include_first: bool = False

    name = "residual-updates"
    sites = ("resid_pre", "attn_in", "attn_out", "mlp_in", "mlp_out", "resid_post")

    def dimensions(self, shape: ModelShape) -> Mapping[str, np.ndarray]:
        return {
            "vector": np.array(VECTORS),
            "write": np.array(WRITES),
            "other_execution": np.arange(len(shape.executions)),
        }

    def variables(self, shape: ModelShape) -> Mapping[str, Variable]:
        by_execution = {
            "tokens": "counted tokens",
            "residual_rms_sum": "norm(x) / sqrt(width), summed over tokens",
            "update_rms_sum": "norm(dx) / sqrt(width), summed over tokens",
            "relative_sum": "norm(dx) / norm(x), summed over tokens",
            "relative_log_sum": "log(norm(dx) / norm(x)), summed over tokens",
            "relative_count": "tokens where neither norm is 0",
            "first_residual_rms": "norm(x) / sqrt(width) of the first token",
            "first_update_rms": "norm(dx) / sqrt(width) of the first token",
        }
        by_cell = {
            "cosine_sum": "cosine of two executions' writes, summed over sampled tokens",
            "cosine_count": "sampled tokens where both have a direction",
            "centred_cosine_sum": "the same, minus each execution's mean over the segment",
            "centred_cosine_count": "sampled tokens where both still have a direction",
        }
        by_pair = {
            "norm_ratio_sum": "norm at the later visit / norm at the earlier one, summed over tokens",
            "norm_log_ratio_sum": "logarithm of that ratio, summed over tokens",
            "norm_later_sum": "norm at the later visit, summed over the same tokens",
            "norm_earlier_sum": "norm at the earlier visit, summed over the same tokens",
            "norm_count": "tokens where neither norm is 0",
        }
        described = {
            ("segment", "execution"): by_execution,
            ("segment", "execution", "other_execution", "write"): by_cell,
            ("segment", "looped_layer", "visit_pair", "vector"): by_pair
            if shape.visit_pairs
            else {},
        }
        return {
            name: Variable(dims=dims, description=text)
            for dims, descriptions in described.items()
            for name, text in descriptions.items()
        }

    def observe(
        self,
        arrays: Mapping[str, np.ndarray],
        batch: Batch,
        execution: Execution,
        sites: Mapping[str, Any],
        earlier: Mapping[int, _Kept],
    ) -> _Kept | None:
        residual, after = sites["resid_pre"], sites["resid_post"]
        counted = batch.real if self.include_first else batch.counted
        tokens = batch.tokens.with_first if self.include_first else batch.tokens
        norms = {name: _norm(sites[name]) for name in VECTORS if name in sites}
        norms["update"] = torch.cat(
            [
                _norm(after[rows].float() - residual[rows].float())
                for rows in blocks(*residual.flatten(1).shape)
            ]
        )
        measured = measure_sizes(_norm(residual), norms["update"], counted, residual.shape[-1])
        if not measured["update_rms_sum"].isfinite().all():
            raise SmeltscopeError(
                f"The update of layer {execution.layer} at visit {execution.visit} is not a number: the residual "
                "stream overflows; check the model's weights, or run it with --dtype float32."
            )
        for name, values in measured.items():
            arrays[name][:, execution.index] = values.cpu().numpy()
        for pair in batch.shape.pairs_of(execution):
            before = earlier[pair.earlier].norms
            both = [name for name in VECTORS if name in norms and name in before]
            places = [VECTORS.index(name) for name in both]
            now, then = (torch.stack([n[name] for name in both], 1) for n in (norms, before))
            for statistic, values in ratio_sums(now, then, counted[:, None]).items():
                arrays[f"norm_{statistic}"][:, pair.layer, pair.pair, places] = values.cpu().numpy()
        writes = {w: tokens.take(sites[w]) for w in WRITES[1:] if w in sites}
        if len(writes) < 2:
            given, got = (tokens.take(stream).float() for stream in (after, residual))
            writes["update"] = given - got
        kept = _Kept(norms={} if batch.shape.is_last_visit(execution) else norms, writes=writes)
        if execution != batch.shape.executions[-1]:
            return kept
        all_writes = {i: other.writes for i, other in earlier.items()} | {execution.index: writes}
        for number, write in enumerate(WRITES):
            those = [i for i, parts in all_writes.items() if write == "update" or write in parts]
            index = np.array(those)
            found = cosine_sums(write, [all_writes[i] for i in those], tokens)
            for name, values in found.items():
                arrays[name][:, index[:, None], index, number] = values.cpu().numpy()
        return None

    def progress(
        self, arrays: Mapping[str, np.ndarray], shape: ModelShape
    ) -> Mapping[str, tuple[float, float]]:
        sums, counts = (np.nansum(arrays[f"relative_{name}"]) for name in ("sum", "count"))
        return {"relative update": (float(sums), float(counts))}

    def estimates(self, run: xr.DataTree, resampling: Resampling) -> Quantities:
        """Over (vector, looped_layer, visit_pair): `norm_ratio`, later visit over earlier one, geometric mean over tokens;
        `norm_ratio_mean` the arithmetic one, `norm_ratio_of_sums`. Over (vector, visit_pair): `norm_ratio_overall`,
        geometric mean over layers. Over (execution): `relative_update`, geometric mean (`relative_update_mean`,
        `relative_update_of_sums`), `residual_rms`, `update_rms`, `first_residual_rms`, `first_update_rms`,
        `tokens`. Over (looped_layer, visit_pair): `relative_update_ratio`; over (visit_pair): `relative_update_ratio_overall`,
        geometric mean over layers.

        Each as it is and as `..._centred`: over (write, looped_layer, visit_pair) `matched_cosine`, `nearby_cosine` and
        `matched_minus_nearby`; over (write, visit_pair) their means over layers `matched_overall`, `nearby_overall` and
        `matched_minus_nearby_overall`, and `nonmatching_overall`; over (write, visit_pair, distance) `nonmatching_by_distance`; over (write,
        execution, other_execution) `cosine`. Over (visit_pair): `matched_pairs`, `nonmatching_pairs`.
        """
        data = run["residual_updates"].dataset

        def average(up: str, down: str) -> Estimate:
            return resampling.ratio(data[up].values, data[down].values)

        relative_log = average("relative_log_sum", "relative_count")
        by_execution = {
            "relative_update": _exp(relative_log),
            "residual_rms": average("residual_rms_sum", "tokens"),
            "update_rms": average("update_rms_sum", "tokens"),
            "first_residual_rms": _mean_of(resampling, data["first_residual_rms"].values),
            "first_update_rms": _mean_of(resampling, data["first_update_rms"].values),
            "relative_update_mean": average("relative_sum", "relative_count"),
            "relative_update_of_sums": average("update_rms_sum", "residual_rms_sum"),
            "tokens": exact(np.nansum(data["tokens"].values, axis=0)),
        }
        matrices = {
            end: resampling.ratio(
                *(np.moveaxis(data[f"{name}_{part}"].values, 3, 1) for part in ("sum", "count"))
            )
            for end, name in (("", "cosine"), ("_centred", "centred_cosine"))
        }  # (write, execution, other_execution)
        cells = quantities(
            ("write", "execution", "other_execution"),
            {f"cosine{end}": matrix for end, matrix in matrices.items()},
        )
        if "norm_count" not in data:
            return {**quantities(("execution",), by_execution), **cells}

        ratios = {
            name: average(f"norm_{up}_sum", f"norm_{down}")
            for name, up, down in (
                ("norm_log", "log_ratio", "count"),
                ("norm_ratio_mean", "ratio", "count"),
                ("norm_ratio_of_sums", "later", "earlier_sum"),
            )
        }  # (looped_layer, visit_pair, vector)
        ratios = {name: _vector_first(ratio) for name, ratio in ratios.items()}
        log_ratio = ratios.pop("norm_log")
        pairs = Pairs.of(data)
        relative_ratio = relative_log[pairs.second] - relative_log[pairs.first]
        relative_ratio = relative_ratio.where(pairs.exists)
        by_pair = ("write", "visit_pair")
        cosines: dict[str, Quantity] = {}
        for end, matrix in matrices.items():
            matched = matrix[:, pairs.first, pairs.second].where(pairs.exists)
            levels = mean_over(matrix, pairs.nonmatching_at_distance)
            nearby = levels[:, pairs.number[..., None], pairs.nearby_distances].mean()
            nearby = nearby.where(pairs.exists)
            by_layer = {
                f"matched_cosine{end}": matched,
                f"nearby_cosine{end}": nearby,
                f"matched_minus_nearby{end}": matched - nearby,
            }
            overall = {
                f"matched_overall{end}": matched.mean(-2),
                f"nearby_overall{end}": nearby.mean(-2),
                f"matched_minus_nearby_overall{end}": (matched - nearby).mean(-2),
                f"nonmatching_overall{end}": mean_over(matrix, pairs.nonmatching),
            }
            cosines |= {
                **quantities(by_pair, overall),
                **quantities(
                    ("write", "looped_layer", "visit_pair"),
                    by_layer,
                    family=(f"matched_minus_nearby{end}",),
                ),
                **quantities((*by_pair, "distance"), {f"nonmatching_by_distance{end}": levels}),
            }
        return {
            **quantities(
                ("vector", "looped_layer", "visit_pair"),
                {"norm_ratio": _exp(log_ratio)},
                family=("norm_ratio",),
            ),
            **quantities(
                ("vector", "visit_pair"), {"norm_ratio_overall": _exp(log_ratio.mean(-2))}
            ),
            **quantities(("execution",), by_execution),
            **quantities(
                ("looped_layer", "visit_pair"),
                {"relative_update_ratio": _exp(relative_ratio)},
                family=("relative_update_ratio",),
            ),
            **quantities(
                ("visit_pair",), {"relative_update_ratio_overall": _exp(relative_ratio.mean(-2))}
            ),
            **cosines,
            **cells,
            **quantities(
                ("visit_pair",),
                {
                    "matched_pairs": exact(pairs.exists.sum(0)),
                    "nonmatching_pairs": exact(pairs.nonmatching.sum((1, 2))),
                },
            ),
            **quantities(("vector", "looped_layer", "visit_pair"), ratios),
        }

    def sentence(self, summary: xr.Dataset) -> str:
        return sentence(summary)


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """What later executions need of an earlier one."""

    norms: Mapping[str, Tensor]  # (B, T) of each vector, where the layer is visited again
    writes: Mapping[str, Tensor]  # (B, S, width) of both parts of the update, or of the whole


def measure_sizes(
    residual: Tensor, update: Tensor, counted: Tensor, width: int
) -> dict[str, Tensor]:
    """The sizes of `ResidualUpdates` from norms (B, T): each (B,)."""
    relative = ratio_sums(update, residual, counted)
    root = width**0.5
    return {
        "tokens": counted.sum(1).float(),
        "residual_rms_sum": residual.where(counted, 0.0).sum(1) / root,
        "update_rms_sum": update.where(counted, 0.0).sum(1) / root,
        "relative_sum": relative["ratio_sum"],
        "relative_log_sum": relative["log_ratio_sum"],
        "relative_count": relative["count"],
        "first_residual_rms": residual[:, 0] / root,
        "first_update_rms": update[:, 0] / root,
    }


def ratio_sums(later: Tensor, earlier: Tensor, counted: Tensor) -> dict[str, Tensor]:
    """Sums over counted tokens (..., T) where neither is 0 of later / earlier, of its log, and of both: each (...)."""
    both = counted & (later > 0) & (earlier > 0)
    ratio = (later / earlier).where(both, 1.0)
    return {
        "ratio_sum": ratio.where(both, 0.0).sum(-1),
        "log_ratio_sum": ratio.log().sum(-1),
        "later_sum": later.where(both, 0.0).sum(-1),
        "earlier_sum": earlier.where(both, 0.0).sum(-1),
        "count": both.sum(-1).float(),
    }


def cosine_sums(
    write: str, writes: Sequence[Mapping[str, Tensor]], tokens: Sample
) -> dict[str, Tensor]:
    """Cosines of a write of each two of E executions, summed over valid tokens, with counts; raw and centred: each (B, E, E)."""
    if not writes:
        return {}
    rows, *size = next(iter(writes[0].values())).shape
    parts = []
    for part in blocks(rows, len(writes) * math.prod(size)):
        valid = tokens.valid[part]
        some = [_write(found, write, part) for found in writes]
        vectors = Vectors.of(torch.stack(some, 2))  # (b, S, E, width)
        matrices = vectors.matrix(), vectors.centred(valid).matrix()  # (b, S, E, E)
        parts.append(torch.stack([x for matrix in matrices for x in sums(matrix, valid)]))
    names = ("cosine_sum", "cosine_count", "centred_cosine_sum", "centred_cosine_count")
    return dict(zip(names, torch.cat(parts, 1), strict=True))


def _write(found: Mapping[str, Tensor], name: str, rows: slice) -> Tensor:
    """Some rows of a write. The update is not kept beside its two parts, whose sum it is."""
    if name in found:
        return found[name][rows].float()
    return found["attn_out"][rows].float() + found["mlp_out"][rows].float()


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Where the pairs of visits stand among the executions. L looped layers, P pairs of visits, E executions."""

    first: np.ndarray  # (L, P), the execution at the earlier visit
    second: np.ndarray  # (L, P), the one at the later visit
    exists: np.ndarray  # (L, P), bool: a layer may have fewer visits than another
    nonmatching: np.ndarray  # (P, E, E), bool: different layers, one at either visit

    @classmethod
    def of(cls, data: xr.Dataset) -> Pairs:
        """From a run's labels."""
        layer = data["layer"].values
        places = executions_of_pairs(data)  # (L, P, 2)
        exists = np.all(places >= 0, axis=-1)
        nonmatching = []
        for pair in range(places.shape[1]):
            block = np.zeros((len(layer), len(layer)), dtype=bool)
            first, second = places[exists[:, pair], pair].T
            block[np.ix_(first, second)] = layer[first][:, None] != layer[second]
            nonmatching.append(block)
        first, second = np.moveaxis(np.where(exists[..., None], places, 0), -1, 0)
        return cls(first=first, second=second, exists=exists, nonmatching=np.array(nonmatching))

    @property
    def number(self) -> np.ndarray:
        """(L, P): which pair of visits."""
        return np.broadcast_to(np.arange(self.first.shape[1]), self.first.shape)

    @property
    def nearby_distances(self) -> np.ndarray:
        """(L, P, 3): the distance of each matched pair, with its neighbours."""
        near = np.abs(self.second - self.first)[..., None] + np.array([-1, 0, 1])
        return near.clip(0, self.nonmatching.shape[1] - 1)

    @property
    def nonmatching_at_distance(self) -> np.ndarray:
        """(P, distance, E, E), bool: nonmatching pairs that lie so many executions apart."""
        index = np.arange(self.nonmatching.shape[1])
        distance = np.abs(index[:, None] - index)
        return self.nonmatching[:, None] & (distance == index[:, None, None])


def mean_over(matrix: Estimate, cells: np.ndarray) -> Estimate:
    """The mean of a matrix (..., E, E) over each set of cells (set..., E, E), those without a value left out: (..., set...)."""
    size = cells.shape[-1] ** 2
    chosen = cells.reshape(-1, size).T.astype(np.float64)

    def mean(values: np.ndarray) -> np.ndarray:
        flat = values.reshape(*values.shape[:-2], size)
        has = np.isfinite(flat)
        with np.errstate(divide="ignore", invalid="ignore"):
            means = (np.where(has, flat, 0.0) @ chosen) / (has @ chosen)
        return means.reshape(*values.shape[:-2], *cells.shape[:-2])

    return Estimate(value=mean(matrix.value), draws=mean(matrix.draws))


def _norm(vectors: Tensor) -> Tensor:
    return torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float32)


def _mean_of(resampling: Resampling, values: np.ndarray) -> Estimate:
    return resampling.ratio(values, np.isfinite(values))


def _exp(estimate: Estimate) -> Estimate:
    return Estimate(value=np.exp(estimate.value), draws=np.exp(estimate.draws))


def _vector_first(estimate: Estimate) -> Estimate:
    """(looped_layer, visit_pair, vector) -> (vector, looped_layer, visit_pair)."""
    return Estimate(
        value=np.moveaxis(estimate.value, -1, 0), draws=np.moveaxis(estimate.draws, -1, 1)
    )


_SPOKEN = {
    "update": "update",
    "attn_out": "attention's write",
    "mlp_out": "MLP's write",
    "attn_in": "attention's input",
    "mlp_in": "MLP's input",
}


def sentence(summary: xr.Dataset) -> str:
    """The result in a few sentences, with numbers, intervals and what to hold them against."""
    documents = over_documents(summary)
    relative = summary["relative_update"]
    if "norm_ratio" not in summary:
        return (
            f"An execution's update has {float(relative.min()):.3g} to {float(relative.max()):.3g} times the norm of "
            f"what it gets (geometric means over tokens); {documents}. No layer is visited twice, so "
            "there is no second visit to compare."
        )
    pair = summary.isel(visit_pair=0)
    earlier, later = int(pair["visit_a"]), int(pair["visit_b"])
    known = [v for v in VECTORS if np.isfinite(pair["norm_ratio_overall"].sel(vector=v))]
    ratios = [f"{_SPOKEN[v]} {_number(pair.sel(vector=v), 'norm_ratio_overall')}" for v in known]
    growth = pair["relative_update_ratio"].values
    text = (
        f"Norms at visit {later} over visit {earlier}, geometric means over tokens and looped layers: "
        f"{', '.join(ratios) or 'none'} (1: no change); the update relative to what the layer gets "
        f"{_number(pair, 'relative_update_ratio_overall')}, above 1 in "
        f"{int((growth > 1).sum())} of {int(np.isfinite(growth).sum())} layers. "
    )
    update = pair.sel(write="update")
    text += (
        f"Cosine of a layer's updates at the two visits: {_number(update, 'matched_overall')}; of different layers' as far "
        f"apart: {_number(update, 'nearby_overall')}, at any distance: {_number(update, 'nonmatching_overall')} "
        f"({int(pair['matched_pairs'])} and {int(pair['nonmatching_pairs'])} pairs); {documents}."
    )
    if "attn_out" not in known:
        text += " What attention and MLP write is not known apart in these layers."
    return text


def _number(values: xr.Dataset, name: str) -> str:
    """`name` with its interval, where it has one."""
    value, low, high = (float(values[f"{name}{end}"]) for end in ("", "_low", "_high"))
    if not np.isfinite(value):
        return "none"
    return f"{value:.3g}" + (f" [{low:.3g}, {high:.3g}]" if np.isfinite(low) else "")
