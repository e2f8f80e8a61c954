"""qkv-similarity: at which stage of attention the visits of a layer part ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from smeltscope.activations import Variable
from smeltscope.probes.cosines import Vectors, blocks, cosines, sums
from smeltscope.probes.labels import over_documents
from smeltscope.probes.probe import Batch, ModelShape, Probe
from smeltscope.probes.sampling import Sample
from smeltscope.probes.statistics import (
    Estimate,
    Quantities,
    Quantity,
    Resampling,
    quantities,
)

if TYPE_CHECKING:
    from smeltscope.model import Execution

RANDOM = "V random"
SITE_OF_STAGE = {
    "X": "attn_in",
    "Q": "q",
    "K": "k",
    "Q normed": "q_norm",
    "K normed": "k_norm",
    "V": "v",
    RANDOM: "v",
    "PV": "pv",
    "O": "attn_out",
}
QUERY_STAGES = ("Q", "Q normed", "PV")  # one vector for each query head
KEY_STAGES = ("K", "K normed", "V")  # one for each key/value head
COMPARED = ("same token", "same token, centred", "other token", "other token, centred")
_NAMES = ("cosine", "cosine_centred", "floor", "floor_centred")  # of COMPARED, in a summary
RANDOM_DRAWS = 4  # of random values, averaged
_ARRAYS = (  # prefix, dimensions of stages and heads, what their cosine is of
    ("", "stage", (), "the vectors of all heads as one"),
    ("query_head_", "query_stage", ("head",), "each query head"),
    ("key_head_", "key_stage", ("kv_head",), "each key/value head"),
)


@dataclass(frozen=True, kw_only=True)
class QkvSimilarity(Probe):
    """Cosine between two visits of a layer, stage by stage of its attention.

    Stages: X what attention reads after the norm (width); Q = X W_Q, K = X W_K, V = X W_V
    (with bias where there is one, before rotary embedding, which would not change a cosine
    at one position); Q and K normed, after QK-norm; PV what each head reads, before the output
    projection; O what attention writes (width). For each two visits a < b of a layer and
    the sampled tokens t of a segment, never the first (`include_first` adds it to each
    sample), `compared`:

    - same token: cos(a_t, b_t). 1 says that both visits point the same way.
    - other token: cos(a_t, b_u) with u another sampled token of the segment. The floor: how
      alike vectors of this stage are whatever the token.
    - both centred: with each visit's mean over the segment's sampled tokens taken away first.

    `cosine_sum` and `cosine_count` by `stage`: sums over tokens, with the vectors of all heads
    as one. `query_head_cosine_sum`, `key_head_cosine_sum` and their counts: one head each, by
    `query_stage` and `key_stage`. Their mean over heads is another number: in the vectors as
    one, heads weigh by their norms.

    Stage V random is the null for "V parts more than X": V's projection replaced by a random
    one of equal spectrum, X R diag(s) U^T, where s are the singular values of W_V and R and U
    have Haar-random orthonormal columns (U is left out: it changes no cosine); mean over 4
    draws of R, seeded by the layer's number. V far below it lies in W_V's directions, not in
    its spectrum. W_V's bias, if any, is left out.

    A vector of length 0 has no cosine; a token alone in its segment has neither floor nor
    centred cosine. Every sampled token counts alike. Units: 1. Source: arXiv 2609.01343
    (stages); floors, centring and the random projection are ours.
    """

    include_first: bool = False

    name = "qkv-similarity"
    sites = ("attn_in", "q", "k", "v", "q_norm", "k_norm", "pv", "attn_out")

    def dimensions(self, shape: ModelShape) -> Mapping[str, np.ndarray]:
        return {
            "stage": np.array(_present(SITE_OF_STAGE, shape)),
            "query_stage": np.array(_present(QUERY_STAGES, shape)),
            "key_stage": np.array(_present(KEY_STAGES, shape)),
            "compared": np.array(COMPARED),
        }

    def variables(self, shape: ModelShape) -> Mapping[str, Variable]:
        if not shape.visit_pairs:
            return {}
        stages = self.dimensions(shape)
        return {
            f"{prefix}cosine_{statistic}": Variable(
                dims=("segment", "looped_layer", "visit_pair", stage, "compared", *heads),
                description=f"{text}: {of_what}",
            )
            for prefix, stage, heads, of_what in _ARRAYS
            if len(stages[stage])
            for statistic, text in (
                ("sum", "cosine between visits, summed over sampled tokens"),
                ("count", "sampled tokens that have a cosine between visits"),
            )
        }

    def observe(
        self,
        arrays: Mapping[str, np.ndarray],
        batch: Batch,
        execution: Execution,
        sites: Mapping[str, Tensor],
        earlier: Mapping[int, Mapping[str, Tensor]],
    ) -> Mapping[str, Tensor] | None:
        shape = batch.shape
        if execution.layer not in shape.looped_layers:
            return None
        tokens = batch.tokens.with_first if self.include_first else batch.tokens
        sampled = {site: tokens.take(values) for site, values in sites.items()}
        dimensions = {name: values.tolist() for name, values in self.dimensions(shape).items()}
        for pair in shape.pairs_of(execution):
            layer = shape.layers[execution.index]
            before = stages_of(earlier[pair.earlier], layer, execution.layer)
            now = stages_of(sampled, layer, execution.layer)
            for stage, measured in measure_stages(before, now, tokens).items():
                for prefix, dimension, heads, _ in _ARRAYS:
                    if stage not in dimensions[dimension]:
                        continue
                    index = dimensions[dimension].index(stage)
                    for name in ("cosine_sum", "cosine_count"):
                        values = measured[f"head_{name}" if heads or stage == RANDOM else name]
                        if stage == RANDOM:  # its heads are draws
                            values = values.mean(2)
                        rows = arrays[f"{prefix}{name}"][:, pair.layer, pair.pair, index]
                        rows[(slice(None), *map(slice, values.shape[1:]))] = values.cpu().numpy()
        return None if shape.is_last_visit(execution) else sampled

    def progress(
        self, arrays: Mapping[str, np.ndarray], shape: ModelShape
    ) -> Mapping[str, tuple[float, float]]:
        if "cosine_sum" not in arrays:
            return {}
        stages = self.dimensions(shape)["stage"].tolist()
        up, down = (
            np.nansum(arrays[f"cosine_{name}"][..., 0], axis=(0, 1, 2)) for name in ("sum", "count")
        )
        shown = [i for i, stage in enumerate(stages) if stage in ("X", "V", "O")]
        return {f"cosine of {stages[i]}": (float(up[i]), float(down[i])) for i in shown}

    def estimates(self, run: xr.DataTree, resampling: Resampling) -> Quantities:
        """Over (stage, visit_pair): `cosine_overall`, mean over layers, `floor_overall`, `cosine_centred_overall`,
        `floor_centred_overall`. Over (visit_pair): `v_minus_random_overall`, `v_minus_random_centred_overall`. Over (stage,
        looped_layer, visit_pair): `cosine`, `floor`, `cosine_centred`, `floor_centred`; over (looped_layer,
        visit_pair): `v_minus_random`, `v_minus_random_centred`. The same four by head: `query_head_...` over (query_stage,
        looped_layer, visit_pair, head), `key_head_...` over (key_stage, looped_layer, visit_pair, kv_head).
        """
        data = run["qkv_similarity"].dataset
        if "cosine_sum" not in data:
            return {}

        pairs = ("looped_layer", "visit_pair")
        found: dict[str, Estimate] = {}
        by_pair: dict[str, Quantity] = {}
        for prefix, stage, heads, _ in _ARRAYS:
            if f"{prefix}cosine_sum" not in data:
                continue
            up, down = (  # (compared, stage, looped_layer, visit_pair, ...)
                np.moveaxis(data[f"{prefix}cosine_{name}"].values, (4, 3), (0, 2))
                for name in ("sum", "count")
            )
            averages = {
                f"{prefix}{n}": resampling.ratio(up[i], down[i]) for i, n in enumerate(_NAMES)
            }
            by_pair |= quantities((stage, *pairs, *heads), averages)
            found |= averages
        stages = data["stage"].values.tolist()
        differences = {}
        if RANDOM in stages:
            v, null = stages.index("V"), stages.index(RANDOM)
            for end in ("", "_centred"):
                cosine = found[f"cosine{end}"]
                differences[f"v_minus_random{end}"] = cosine[v] - cosine[null]
        return {
            **quantities(
                ("stage", "visit_pair"),
                {f"{name}_overall": found[name].mean(-2) for name in _NAMES},
            ),
            **quantities(
                ("visit_pair",), {f"{n}_overall": d.mean(-2) for n, d in differences.items()}
            ),
            **quantities(pairs, differences, family=differences),
            **by_pair,
        }

    def sentence(self, summary: xr.Dataset) -> str:
        return sentence(summary)


_MEASURED = ("cosine_sum", "cosine_count", "head_cosine_sum", "head_cosine_count")
_projections: WeakKeyDictionary[nn.Module, tuple[int, Tensor]] = WeakKeyDictionary()


def _present(stages: Sequence[str] | Mapping[str, str], shape: ModelShape) -> list[str]:
    """Those of the stages that some looped layer has."""
    looped = {e.index for e in shape.executions if e.layer in shape.looped_layers}
    return [stage for stage in stages if looped & set(shape.sites.get(SITE_OF_STAGE[stage], ()))]


def stages_of(sites: Mapping[str, Tensor], layer: nn.Module, seed: int) -> dict[str, Tensor]:
    """The vectors of each stage at the sampled tokens, by head: (B, S, H, D). V random has its draws in place of heads."""
    found = {stage: sites[site] for stage, site in SITE_OF_STAGE.items() if site in sites}
    projection = random_values(layer, seed) if RANDOM in found else None
    if projection is None:
        found.pop(RANDOM, None)
    else:
        x = found["X"].float()
        found[RANDOM] = torch.einsum("bsw,nwr->bsnr", x, projection.to(x.device))
    return {stage: v if v.ndim == 4 else v[:, :, None] for stage, v in found.items()}


def random_values(layer: nn.Module, seed: int) -> Tensor | None:
    """Random projections with the singular values of a layer's W_V: (draw, width, rank), float32.

    R diag(s) of the probe's definition. The signs that a QR decomposition leaves open change no cosine. None where W_V
    cannot be read: it is not a matrix of its own, is packed, or lies outside of memory.
    """
    projection = next((m.v_proj for m in layer.modules() if hasattr(m, "v_proj")), None)
    if not isinstance(projection, nn.Linear):
        return None
    weight = projection.weight  # (out, width)
    if weight.is_meta or not weight.is_floating_point():
        return None
    known = _projections.get(projection)
    if known is None or known[0] != weight._version:  # changed since, by training
        whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight  # of a DTensor
        spectrum = torch.linalg.svdvals(whole.detach().float())  # (rank)
        generator = torch.Generator().manual_seed(seed)
        normal = torch.randn(RANDOM_DRAWS, weight.shape[1], len(spectrum), generator=generator)
        known = weight._version, torch.linalg.qr(normal.to(spectrum.device)).Q * spectrum
        _projections[projection] = known
    return known[1]


def measure_stages(
    first: Mapping[str, Tensor], second: Mapping[str, Tensor], tokens: Sample
) -> dict[str, dict[str, Tensor]]:
    """The cosines of `QkvSimilarity` between the vectors (B, S, H, D) of each stage at two visits.

    `cosine_sum` and `cosine_count` (B, compared), `head_cosine_sum` and `head_cosine_count` (B, compared, H). Stages of one
    size D are measured at once: there is so little to do for each that calls would take most of the time.
    """
    by_size: dict[int, list[str]] = {}
    for stage in first:
        if stage in second:
            by_size.setdefault(first[stage].shape[-1], []).append(stage)
    found = {}
    for stages in by_size.values():
        heads = [first[stage].shape[2] for stage in stages]
        size = sum(first[stage][0].numel() for stage in stages)
        parts = []
        for part in blocks(len(tokens.valid), size):
            one, other = (torch.cat([v[s][part] for s in stages], 2) for v in (first, second))
            parts.append(_measure(one, other, heads, tokens.rows(part.start, part.stop)))
        together, counts, *by_head = (torch.cat(values) for values in zip(*parts, strict=True))
        for i, (stage, *of_heads) in enumerate(
            zip(stages, *(values.split(heads, 2) for values in by_head), strict=True)
        ):
            values = together[..., i], counts[..., i], *of_heads
            found[stage] = dict(zip(_MEASURED, values, strict=True))
    return found


def _measure(first: Tensor, second: Tensor, heads: Sequence[int], tokens: Sample) -> list[Tensor]:
    """Sums and counts by stage (B, compared, stage), of `heads` heads each, and by head (B, compared, H)."""
    valid, partners = tokens.valid, tokens.partners
    one, other = Vectors.of(first), Vectors.of(second)
    one_centred, other_centred = one.centred(valid), other.centred(valid)
    pairs = (
        (one, other),
        (one_centred, other_centred),
        (one, other.at(partners)),
        (one_centred, other_centred.at(partners)),
    )
    by_head, together = cosines(pairs, heads)
    counted = torch.cat([valid, valid, partners.valid, partners.valid])
    measured = *sums(together, counted), *sums(by_head, counted)
    return [values.unflatten(0, (len(COMPARED), -1)).transpose(0, 1) for values in measured]


def sentence(summary: xr.Dataset) -> str:
    """The result in a few sentences, with numbers, floors, the random projection and intervals."""
    documents = over_documents(summary)
    if "cosine" not in summary:
        return f"No layer is visited twice, so there are no visits to compare; {documents}."
    pair = summary.isel(visit_pair=0)
    stages = [
        f"{stage} {value:.3f} ({floor:.3f})"
        for stage, value, floor in zip(
            pair["stage"].values,
            pair["cosine_overall"].values,
            pair["floor_overall"].values,
            strict=True,
        )
        if np.isfinite(value)
    ]
    text = (
        f"Cosine between visits {int(pair['visit_a'])} and {int(pair['visit_b'])}, mean over looped layers, and in brackets "
        f"that of another token: {', '.join(stages) or 'none'}; {documents}."
    )
    if "v_minus_random" not in pair:
        return f"{text} This model does not show its values' projection, so there is no random one to compare."
    value, low, high = (
        float(pair[f"v_minus_random_overall{end}"]) for end in ("", "_low", "_high")
    )
    if not np.isfinite(value):
        return text
    interval = (
        f" [{low:+.3f}, {high:+.3f}]" if np.isfinite(low) else ", too few documents for an interval"
    )
    layers = pair["v_minus_random"].values
    return (
        f"{text} V lies {value:+.3f}{interval} from a random projection of equal spectrum, below it in "
        f"{int((layers < 0).sum())} of {int(np.isfinite(layers).sum())} layers."
    )
