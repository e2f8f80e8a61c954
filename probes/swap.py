"""swap: whether a later visit reads other places or other content, and whether its queries or its keys moved it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from smeltscope import activations
from smeltscope.activations import Variable
from smeltscope.probes.labels import over_documents
from smeltscope.probes.probe import Batch, ModelShape, Probe
from smeltscope.probes.regions import Regions
from smeltscope.probes.rows import Rows, check_rows, products, softmax_with_sink
from smeltscope.probes.statistics import Quantities, Resampling, quantities
from smeltscope.probes.visit_pairs import averages, each_of, first_of

if TYPE_CHECKING:
    from smeltscope.model import Execution

# Whose queries and keys make the attention.
SWAPS = ("earlier", "later_queries", "later_keys", "later")
TERMS = ("moved", "values", "interaction")

_BY_PAIR = ("segment", "looped_layer", "visit_pair")


@dataclass(frozen=True, kw_only=True)
class Swap(Probe):
    """Whether a later visit of a layer reads other places or other content, in function and not in cosines.

    No second forward: the queries, keys and values of two visits a < b are combined with each other. Queries are sampled: up
    to `sampled_queries` of each segment, evenly over the logarithm of their position, never the first token.
    P(q_v, k_w) = softmax over visible keys j of scale * q_v . k_w[j] + bias_v[j], for each segment, looped layer, pair of visits
    and head. The bias and a learned sink's logit go with the query.

    Places. `mass_sum`: attention mass by region of the keys, summed over queries, along `swapped` under (q_a, k_a) `earlier`,
    (q_b, k_a) `later_queries`, (q_a, k_b) `later_keys` and (q_b, k_b) `later`. The regions' masses add up to 1, less that of
    learned sinks. The change of a mass m from (q_a, k_a) to (q_b, k_b) is split by Shapley values:
    by queries 1/2 [m(q_b, k_a) - m(q_a, k_a) + m(q_b, k_b) - m(q_a, k_b)], by keys 1/2 [m(q_a, k_b) - m(q_a, k_a) + m(q_b, k_b)
    - m(q_b, k_a)]. The two add up to the change.

    Content. What a query reads is P V; its change D = P_b V_b - P_a V_a is the sum of three terms, along `term`: attention
    `moved` (P_b - P_a) V_a, `values` changed P_a (V_b - V_a), and their `interaction` (P_b - P_a) (V_b - V_a). Summed over
    queries: `term_dot_sum`, <term, D>; `change_square_sum`, |D|^2; `term_square_sum`, |term|^2; `read_square_sum`,
    |P_a V_a|^2. A term's share of the change is the ratio of sums <term, D> / |D|^2: shares add up to 1, may be negative, and
    queries weigh by how much their reading changes. Where nothing changes there is no share.

    `queries` counts queries that see the first key (a sliding window hides it from late ones); masses are sums over them, each
    weighing alike, and what is read is summed over all. There is no chance level: P is the model's own. Ours; arXiv
    2609.01343 compares the visits by cosines.
    """

    name = "swap"
    sites = ("attention", "rows")

    def dimensions(self, shape: ModelShape) -> Mapping[str, np.ndarray]:
        return {"swapped": np.array(SWAPS), "term": np.array(TERMS)}

    def variables(self, shape: ModelShape) -> Mapping[str, Variable]:
        if not shape.visit_pairs:
            return {}
        by_head = (*_BY_PAIR, "head")
        return {
            "queries": Variable(
                dims=_BY_PAIR, description="sampled queries that see the first key"
            ),
            "mass_sum": Variable(
                dims=(*by_head, "region", "swapped"),
                description="attention mass on the region, summed over queries",
            ),
            "term_dot_sum": Variable(
                dims=(*by_head, "term"),
                description="term times the whole change of what is read, summed over queries",
            ),
            "term_square_sum": Variable(
                dims=(*by_head, "term"),
                description="squared length of the term, summed over queries",
            ),
            "change_square_sum": Variable(
                dims=by_head,
                description="squared length of the whole change, summed over queries",
            ),
            "read_square_sum": Variable(
                dims=by_head,
                description="squared length of what the earlier visit reads, summed over queries",
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
        attention, rows = sites["attention"], sites["rows"]
        now = Visit(key=attention.key, value=attention.value, rows=rows)
        for pair in batch.shape.pairs_of(execution):
            check_rows(rows, execution)
            measured = measure_swap(earlier[pair.earlier], now, batch.regions)
            for name, values in measured.items():
                # A layer may have fewer heads than others.
                place: Any = (slice(None), pair.layer, pair.pair, *map(slice, values.shape[1:]))
                arrays[name][place] = values.cpu().numpy()
        return None if batch.shape.is_last_visit(execution) else now

    def progress(
        self, arrays: Mapping[str, np.ndarray], shape: ModelShape
    ) -> Mapping[str, tuple[float, float]]:
        if not shape.visit_pairs:
            return {}
        moved, change = arrays["term_dot_sum"][..., 0], arrays["change_square_sum"]
        return {"change by moved attention": (float(np.nansum(moved)), float(np.nansum(change)))}

    def estimates(self, run: xr.DataTree, resampling: Resampling) -> Quantities:
        """Ratios of sums over queries.

        Over (looped_layer, visit_pair, head): `moved_share`, `values_share`, `interaction_share`, the shares of the
        change of what is read, <term, D> / |D|^2; `first_change`, the change of the mass on the first region, which is the
        segment's first token, and its parts `first_change_by_queries`, `first_change_by_keys`; `change_square`,
        |D|^2 / |P_a V_a|^2; `moved_square`, `values_square`, `interaction_square`, |term|^2 / |D|^2.

        Over (looped_layer, visit_pair, head, region): `mass_earlier`, `mass_later_queries`, `mass_later_keys`, `mass_later`;
        `mass_change`, `mass_change_by_queries`, `mass_change_by_keys`.

        Over (visit_pair): `..._by_pair`, means over layers and heads; `..._overall`: over pairs too.
        """
        data = run["swap"].dataset
        if "mass_sum" not in data:
            return {}
        queries, masses = data["queries"].values, data["mass_sum"].values.astype(np.float64)
        earlier, later_queries, later_keys, later = np.moveaxis(masses, -1, 0)
        parts = {
            "mass_change": later - earlier,
            "mass_change_by_queries": (later_queries - earlier + later - later_keys) / 2,
            "mass_change_by_keys": (later_keys - earlier + later - later_queries) / 2,
        }
        by_region = {
            f"mass_{swap}": resampling.ratio(masses[..., i], queries)
            for i, swap in enumerate(SWAPS)
        }
        by_region |= {name: resampling.ratio(part, queries) for name, part in parts.items()}

        change = data["change_square_sum"].values
        dots, squares = data["term_dot_sum"].values, data["term_square_sum"].values
        by_head = {
            f"{term}_share": resampling.ratio(dots[..., i], change) for i, term in enumerate(TERMS)
        }
        by_head |= {name.replace("mass", "first"): by_region[name][..., 0] for name in parts}
        by_head["change_square"] = resampling.ratio(change, data["read_square_sum"].values)
        by_head |= {
            f"{term}_square": resampling.ratio(squares[..., i], change)
            for i, term in enumerate(TERMS)
        }
        dims = ("looped_layer", "visit_pair", "head")
        family = ("moved_share", "first_change")
        return {
            **quantities(dims, by_head, family=family),
            **quantities((*dims, "region"), by_region),
            **averages(by_head),
        }

    def sentence(self, summary: xr.Dataset) -> str:
        return sentence(summary)


def sentence(summary: xr.Dataset) -> str:
    """The result in a few sentences, with numbers and intervals."""
    if "moved_share" not in summary:
        return "No layer is visited twice, so there is nothing to swap."
    documents = over_documents(summary)
    if not np.isfinite(summary["first_change_overall"]):
        return f"No query was counted {documents}: segments of one token have none but the first."

    first, visits = first_of(summary)
    later, earlier = (
        ("visit 2", "visit 1") if "1" in visits else ("a later visit", "the earlier one")
    )

    def shown(name: str, scale: float, form: str) -> str:
        value, low, high = (
            format(scale * float(first[f"{name}_by_pair{end}"]), form)
            for end in ("", "_low", "_high")
        )
        return f"{value} [{low}, {high}]" if np.isfinite(first[f"{name}_by_pair_low"]) else value

    change, by_queries, by_keys = (
        shown(f"first_change{part}", 1, "+.2g") for part in ("", "_by_queries", "_by_keys")
    )
    places = f"The mass on the first token changes by {change}: {by_queries} by the queries, {by_keys} by the keys."
    if not np.isfinite(first["moved_share_by_pair"]):
        return f"{later.capitalize()} reads what {earlier} read, {documents}. {places}"
    moved, values, interaction = (shown(f"{term}_share", 100, ".1f") for term in TERMS)
    by_pair = each_of(100 * summary["moved_share_by_pair"], ".1f")
    return (
        f"Mean over looped layers and heads, {documents}: of the change in what {later} reads, {moved} % is "
        f"attention that moved{by_pair and f' ({by_pair})'}, {values} % values that changed, {interaction} % both together. {places}"
    )


@dataclass(frozen=True, kw_only=True)
class Visit:
    """What is kept of one visit: to be combined with another, keys and values are needed whole."""

    key: Tensor  # (B, G, K, D)
    value: Tensor  # (B, G, K, D)
    rows: Sequence[Rows]


def measure_swap(then: Visit, now: Visit, regions: Regions) -> dict[str, Tensor]:
    """The numbers of `Swap` for an earlier and a later visit: each (B, ...)."""
    keys_change = (now.key.float() - then.key.float()).contiguous()
    value = then.value.float()
    values = torch.cat([value, now.value.float() - value], dim=-1)  # (B, G, K, 2 D)
    blocks = list(zip(then.rows, now.rows, strict=True))
    masses = [_masses(a, b, keys_change, regions) for a, b in blocks]
    products = torch.stack([_products(a, b, values) for a, b in blocks]).sum(0)
    squares = products.diagonal(dim1=2, dim2=3)  # of the earlier reading, the terms and their sum
    return {
        "queries": torch.stack([(b.queries.valid & b.sees_first).sum(1) for _, b in blocks]).sum(0),
        "mass_sum": torch.stack(masses).sum(0),
        "term_dot_sum": products[:, :, 1:-1, -1],
        "term_square_sum": squares[:, :, 1:-1],
        "change_square_sum": squares[:, :, -1],
        "read_square_sum": squares[:, :, 0],
    }


def _masses(then: Rows, now: Rows, keys_change: Tensor, regions: Regions) -> Tensor:
    """Attention mass by region, summed over queries: (B, H, region, swapped)."""
    keys = now.scores.shape[3]
    # Exchanging the keys changes the products; the bias stays with its query.
    query = torch.cat([now.query, then.query], dim=2)
    of_now, of_then = products(query, keys_change, keys).chunk(2, dim=2)  # (B, H, N, K)
    masses: tuple[Tensor, ...] = (
        then.mass,
        softmax_with_sink(now.scores - of_now, now.sink_logit),
        softmax_with_sink(then.scores + of_then, then.sink_logit),
        now.mass,
    )
    if not now.sees_first.all():  # a window hides the first key from late queries
        blind = ~now.sees_first[:, None, :, None]
        masses = tuple(mass.masked_fill(blind, 0.0) for mass in masses)
    return torch.stack([regions.sums(mass, now.queries) for mass in masses], dim=3)


def _products(then: Rows, now: Rows, values: Tensor) -> Tensor:
    """Of what heads read at the earlier visit, the terms of its change and the change itself, each with each, summed over
    queries: (B, H, 5, 5)."""
    mass = torch.cat([then.mass, now.mass - then.mass], dim=2)
    read = activations.values_of(mass, values).unflatten(2, (2, -1))  # (B, H, 2, N, 2 D)
    (then_then, then_change), (moved, both) = (part.chunk(2, dim=-1) for part in read.unbind(2))
    reads = torch.stack([then_then, moved, then_change, both, moved + then_change + both], dim=2)
    if not now.queries.valid.all():
        reads.masked_fill_(~now.queries.valid[:, None, None, :, None], 0.0)
    reads = reads.flatten(3)  # (B, H, 5, N * D)
    return reads @ reads.mT
