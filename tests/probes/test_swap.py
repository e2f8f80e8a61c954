"""swap against loops over the queries, keys and values of the models' own eager attention, and constructions by hand."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from smeltscope.activations import Attention
from smeltscope.activations.attention import attend
from smeltscope.model import tiny
from smeltscope.probes import AttentionSink, RunOptions, summarize
from smeltscope.probes.regions import TEXT_REGIONS, TextRegions
from smeltscope.probes.rows import rows_of
from smeltscope.probes.sampling import Sample
from smeltscope.probes.swap import SWAPS, TERMS, Swap, Visit, measure_swap
from smeltscope.tasks import HeldOut

PROBE = Swap()
LENGTHS = [40, 21, 3, 2, 1]
# Every query is sampled, so that the loops need not know how.
ALL = RunOptions(max_length=max(LENGTHS), batch_tokens=1200, sampled_queries=max(LENGTHS))
MODELS = {
    "smelt": {},
    "smelt, 3 visits": {"num_visits": 3},
    "smelt, 1 head": {"num_attention_heads": 1, "num_key_value_heads": 1},
    "inkling2_loop": {},  # windows, a bias that depends on the query, learned sinks
    "dory": {},
    "hrm_text": {},
}


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What one execution's attention is computed from, in float64: (H, T, D), and the bias and sink of each query."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scale: float
    bias: np.ndarray  # (H, T, T), -inf where hidden
    sink: np.ndarray  # (H, T), -inf where there is none


def parts_of(weights: Tensor, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Parts:
    """The parts of one execution over one segment, from what the model's own eager function was given and made."""
    repeats = query.shape[1] // key.shape[1]
    q, k, v = (
        x[0].detach().double().numpy()
        for x in (query, key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1))
    )
    scale = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    # Bias and sink from the weights that came out: log w = score - log of the sum, for each query.
    w = weights[0].double().numpy()
    with np.errstate(divide="ignore"):
        rest = np.log(w) - scale * q @ k.transpose(0, 2, 1)
        # Free up to a constant for each query, which the sink shares.
        sink = np.log(np.maximum(1 - w.sum(-1), 0))
    sink[w.sum(-1) > 1 - 1e-6] = -np.inf
    return Parts(q=q, k=k, v=v, scale=scale, bias=rest, sink=sink)


def eager_parts(
    model: torch.nn.Module, ids: np.ndarray, run_eagerly: Callable[..., None]
) -> list[Parts]:
    """The parts of every execution over one segment."""
    seen: list[Parts] = []
    tokens = torch.from_numpy(ids).long()[None]
    run_eagerly(model, tokens, lambda *given, **named: seen.append(parts_of(*given[:4], **named)))
    return seen


def row(queries: Parts, keys: Parts, h: int, q: int) -> np.ndarray:
    """Attention of one query under (queries, keys): the bias and the sink go with the query."""
    score = queries.scale * keys.k[h] @ queries.q[h, q] + queries.bias[h, q]
    exp = np.exp(np.append(score, queries.sink[h, q]))
    return exp[:-1] / exp.sum()


def region_of(q: int, j: int) -> int:
    """Without a tokenizer no token is a delimiter."""
    if j == 0:
        return 0
    return {0: 1, 1: 2}.get(q - j, 3 if q - j < 8 else 5)


def slowly(a: Parts, b: Parts, h: int) -> dict[str, np.ndarray]:
    """Every number of one segment and head, query by query."""
    sums = {
        "queries": np.zeros(()),
        "mass_sum": np.zeros((len(TEXT_REGIONS), len(SWAPS))),
        "term_dot_sum": np.zeros(len(TERMS)),
        "term_square_sum": np.zeros(len(TERMS)),
        "change_square_sum": np.zeros(()),
        "read_square_sum": np.zeros(()),
    }
    for q in range(1, a.q.shape[1]):
        sees_first = np.isfinite(b.bias[h, q, 0])  # no window hides it
        sums["queries"] += sees_first
        rows = [row(x, y, h, q) for x, y in ((a, a), (b, a), (a, b), (b, b))]
        for i, p in enumerate(rows):
            for j in range(q + 1):
                sums["mass_sum"][region_of(q, j), i] += sees_first * p[j]
        before, after = rows[0], rows[3]
        change = after @ b.v[h] - before @ a.v[h]
        terms = (
            (after - before) @ a.v[h],
            before @ (b.v[h] - a.v[h]),
            (after - before) @ (b.v[h] - a.v[h]),
        )
        np.testing.assert_allclose(sum(terms), change, atol=1e-9)
        for i, term in enumerate(terms):
            sums["term_dot_sum"][i] += term @ change
            sums["term_square_sum"][i] += term @ term
        sums["change_square_sum"] += change @ change
        sums["read_square_sum"] += np.square(before @ a.v[h]).sum()
    return sums


def assert_like(
    run: xr.DataTree, model: torch.nn.Module, heldout: HeldOut, run_eagerly: Callable[..., None]
) -> bool:
    """All arrays of a run, every query sampled, against `slowly`. Whether there are learned sinks."""
    data, lengths = run["swap"].dataset, heldout.lengths.tolist()
    expected = {key: np.full(array.shape, np.nan) for key, array in data.data_vars.items()}
    assert data["mass_sum"].dims[3:] == ("head", "region", "swapped")
    layers, visits = run["layer"].values, run["visit"].values
    sinks = 0
    for segment_row, length in enumerate(run["segments"]["tokens"].values):
        parts = eager_parts(model, heldout.segment(lengths.index(length)), run_eagerly)
        assert len(parts) == len(layers)
        for e, later in enumerate(parts):
            for earlier in np.flatnonzero((layers == layers[e]) & (visits < visits[e])):
                layer = data["looped_layer"].values.tolist().index(layers[e])
                names = data["visit_pair"].values.tolist()
                pair = names.index(f"{visits[earlier]}-{visits[e]}")
                sinks += np.isfinite(later.sink).any()
                for h in range(len(later.q)):
                    for key, value in slowly(parts[earlier], later, h).items():
                        at = () if key == "queries" else (h,)
                        expected[key][(segment_row, layer, pair, *at)] = value
    for key, value in expected.items():
        np.testing.assert_allclose(data[key], value, atol=5e-5, rtol=2e-5, err_msg=key)
    return bool(sinks)


@pytest.mark.parametrize("variant", MODELS)
def test_like_slow_loops(variant, make_run, make_heldout, run_eagerly):
    name, overrides = variant.split(",")[0], MODELS[variant]
    run = make_run([PROBE], LENGTHS, name, options=ALL, **overrides)
    sinks = assert_like(run, tiny(name, **overrides), make_heldout(LENGTHS), run_eagerly)
    assert sinks == (name == "inkling2_loop")


@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # every run has a file of its own
)
@given(data=st.data(), lengths=st.lists(st.integers(1, 80), min_size=1, max_size=3, unique=True))
def test_any_smelt_like_slow_loops(make_run, make_heldout, run_eagerly, any_smelt, data, lengths):
    smelt = data.draw(any_smelt)
    options = RunOptions(max_length=80, batch_tokens=600, sampled_queries=80)
    run = make_run([PROBE], lengths, options=options, **smelt)
    if smelt["num_visits"] == 1:
        assert len(run["swap"].data_vars) == 0
        return
    assert not assert_like(run, tiny("smelt", **smelt), make_heldout(lengths), run_eagerly)


# By hand


def attention_of(query: Tensor, key: Tensor, value: Tensor) -> Attention:
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = True, query.shape[1] // key.shape[1]
    return attend(module, query, key, value, None)[1]


def random_parts(seed: int, heads: int = 4, groups: int = 2, length: int = 30) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "query": torch.randn(2, heads, length, 8, generator=generator),
        "key": torch.randn(2, groups, length, 8, generator=generator),
        "value": torch.randn(2, groups, length, 8, generator=generator),
    }


def swapped(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """Two visits with these queries, keys and values: sums over both segments, every query sampled."""
    length = a["query"].shape[2]
    positions = torch.arange(1, length).expand(2, -1)
    queries = Sample(positions=positions, valid=torch.ones_like(positions, dtype=torch.bool))
    visits = []
    for parts in (a, b):
        attention = attention_of(**parts)
        rows = rows_of(attention, queries)
        visits.append(Visit(key=attention.key, value=attention.value, rows=rows))
    regions = TextRegions(delimiter=torch.zeros(2, length, dtype=torch.bool))
    found = measure_swap(visits[0], visits[1], regions)
    return {name: values.sum(0).double().numpy() for name, values in found.items()}


def shapley(masses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The parts of queries and keys in the change of (..., swap): means over both orders of exchanging them."""
    earlier, later_queries, later_keys, later = np.moveaxis(masses, -1, 0)
    by_queries = np.mean([later_queries - earlier, later - later_keys], axis=0)
    by_keys = np.mean([later_keys - earlier, later - later_queries], axis=0)
    return by_queries, by_keys


def test_when_queries_alone_change_all_of_it_is_theirs():
    a = random_parts(0)
    found = swapped(a, a | {"query": random_parts(1)["query"]})
    by_queries, by_keys = shapley(found["mass_sum"])
    change = found["mass_sum"][..., 3] - found["mass_sum"][..., 0]
    assert np.abs(change).max() > 1
    np.testing.assert_allclose(by_queries, change, rtol=1e-12)
    np.testing.assert_array_equal(by_keys, 0)
    # The values are the same: reading changes by moved attention alone.
    np.testing.assert_array_equal(found["term_square_sum"][:, 1:], 0)
    np.testing.assert_allclose(found["term_dot_sum"][:, 0], found["change_square_sum"])


def test_when_keys_alone_change_all_of_it_is_theirs():
    a = random_parts(0)
    found = swapped(a, a | {"key": random_parts(1)["key"]})
    by_queries, by_keys = shapley(found["mass_sum"])
    change = found["mass_sum"][..., 3] - found["mass_sum"][..., 0]
    np.testing.assert_allclose(by_keys, change, atol=1e-4)
    np.testing.assert_allclose(by_queries, 0, atol=1e-4)


def test_when_values_alone_change_nothing_has_moved():
    a = random_parts(0)
    found = swapped(a, a | {"value": random_parts(1)["value"]})
    np.testing.assert_array_equal(found["mass_sum"], found["mass_sum"][..., :1].repeat(4, -1))
    np.testing.assert_array_equal(found["term_square_sum"][:, [0, 2]], 0)
    np.testing.assert_allclose(found["term_dot_sum"][:, 1], found["change_square_sum"])


def test_when_nothing_changes_there_is_no_share():
    a = random_parts(0)
    found = swapped(a, a)
    np.testing.assert_array_equal(found["mass_sum"], found["mass_sum"][..., :1].repeat(4, -1))
    np.testing.assert_array_equal(found["change_square_sum"], 0)
    assert (found["read_square_sum"] > 0).all()


def test_everything_adds_up():
    found = swapped(random_parts(0), random_parts(1))
    masses = found["mass_sum"]
    np.testing.assert_allclose(masses.sum(1), found["queries"], rtol=1e-5)  # over regions
    by_queries, by_keys = shapley(masses)
    np.testing.assert_allclose(by_queries + by_keys, masses[..., 3] - masses[..., 0], atol=1e-9)
    np.testing.assert_allclose(found["term_dot_sum"].sum(-1), found["change_square_sum"], rtol=1e-5)


def test_two_keys_by_hand():
    """One query on two keys, values 0 and 1 along one axis: attention on the second key goes from 1/2 to p, its value to v."""
    zeros = torch.zeros(2, 1, 2, 1)
    a = {"query": zeros.clone(), "key": zeros.clone(), "value": zeros.clone()}
    b = {name: tensor.clone() for name, tensor in a.items()}
    a["value"][:, :, 1] = 1
    b["value"][:, :, 1] = 3
    a["query"][:, :, 1], a["key"][:, :, 1] = 1, 0
    b["query"][:, :, 1], b["key"][:, :, 1] = 2, 0.5  # D = 1: scores are products
    p, both = 1 / (1 + np.exp(-1)), 1 / (1 + np.exp(-0.5))  # q2 k2 = 1; q1 k2 = .5; q2 k1 = 0
    found = swapped(a, b)
    np.testing.assert_allclose(found["mass_sum"][0, 1] / 2, [0.5, 0.5, both, p], rtol=1e-6)
    terms = np.array([(p - 0.5) * 1, 0.5 * 2, (p - 0.5) * 2])
    change = 3 * p - 0.5
    np.testing.assert_allclose(terms.sum(), change)
    np.testing.assert_allclose(found["term_dot_sum"][0] / 2, terms * change, rtol=1e-6)
    np.testing.assert_allclose(found["term_square_sum"][0] / 2, terms**2, rtol=1e-6)
    np.testing.assert_allclose(found["change_square_sum"][0] / 2, change**2, rtol=1e-6)
    np.testing.assert_allclose(found["read_square_sum"][0] / 2, 0.25, rtol=1e-6)


def test_shared_key_heads_are_as_repeated_ones():
    a, b = random_parts(0), random_parts(1)
    repeated = [
        {name: x if name == "query" else x.repeat_interleave(2, 1) for name, x in parts.items()}
        for parts in (a, b)
    ]
    one, two = swapped(a, b), swapped(*repeated)
    for name, values in one.items():
        np.testing.assert_allclose(values, two[name], rtol=1e-5, err_msg=name)


# Through whole runs


@pytest.fixture
def run_of(run_checkpoint):
    return partial(run_checkpoint, PROBE)


def test_identical_visits(run_of, make_checkpoint, silenced):
    summary = summarize(run_of(silenced(make_checkpoint("smelt")), LENGTHS), PROBE, draws=20)
    for name in ("moved_share", "values_share", "interaction_share", "moved_square"):
        assert np.isnan(summary[name]).all()
    for name in ("first_change", "first_change_by_queries", "mass_change_by_keys", "change_square"):
        assert (summary[name] == 0).all()
    assert "reads what the earlier one read" in PROBE.sentence(summary)


def test_summary_like_slow_averages(make_run):
    run = make_run([PROBE], [60, 50, 40, 12, 1], "hrm_text")
    summary = summarize(run, PROBE, draws=30)
    sums = {n: x.values.astype(np.float64) for n, x in run["swap"].dataset.data_vars.items()}
    total = {n: np.nansum(x, axis=0) for n, x in sums.items()}
    exists = total["queries"] > 0  # its low stack is visited more often than its high one
    assert 0 < exists.sum() < exists.size
    for i, term in enumerate(TERMS):
        with np.errstate(invalid="ignore"):
            share = total["term_dot_sum"][..., i] / total["change_square_sum"]
            square = total["term_square_sum"][..., i] / total["change_square_sum"]
        np.testing.assert_allclose(summary[f"{term}_share"], share)
        np.testing.assert_allclose(summary[f"{term}_square"], square)
    shares = sum(summary[f"{term}_share"] for term in TERMS).values
    np.testing.assert_allclose(shares[exists], 1, rtol=1e-5)
    with np.errstate(invalid="ignore"):
        masses = total["mass_sum"] / total["queries"][..., None, None, None]
    by_queries, by_keys = shapley(masses)
    for i, name in enumerate(SWAPS):
        np.testing.assert_allclose(summary[f"mass_{name}"], masses[..., i])
    change = masses[..., 3] - masses[..., 0]
    np.testing.assert_allclose(summary["mass_change"], change, atol=1e-9)
    np.testing.assert_allclose(summary["mass_change_by_queries"], by_queries, atol=1e-9)
    np.testing.assert_allclose(summary["mass_change_by_keys"], by_keys, atol=1e-9)
    np.testing.assert_allclose(summary["first_change"], change[..., 0], atol=1e-9)
    np.testing.assert_allclose(summary["first_change_by_keys"], by_keys[..., 0], atol=1e-9)
    np.testing.assert_allclose(summary["moved_share_overall"], summary["moved_share"].mean())
    assert "moved_share_low_all" in summary and "first_change_low_all" in summary


def test_the_first_region_is_the_first_token(make_run):
    run = make_run([PROBE, AttentionSink()], LENGTHS, options=ALL)
    swap, sink = (run[group].dataset for group in ("swap", "attention_sink"))
    for i, layer in enumerate(swap["looped_layer"].values):
        first, second = np.flatnonzero(sink["layer"].values == layer)
        for execution, name in ((first, "earlier"), (second, "later")):
            mass = swap["mass_sum"].sel(swapped=name, region="first").values[:, i, 0]
            np.testing.assert_allclose(mass, sink["sink_mass_sum"].values[:, execution], atol=1e-5)


def test_a_segment_does_not_depend_on_its_neighbours(run_of, make_checkpoint):
    """The same segments alone and in other batches, with sampled queries."""
    lengths = [70, 90, 12, 80, 2]
    apart = run_of(make_checkpoint("smelt"), lengths, batch_tokens=90, sampled_queries=20)
    together = run_of(make_checkpoint("smelt"), lengths, batch_tokens=4000, sampled_queries=20)
    order = [list(r["segments"]["tokens"].values) for r in (apart, together)]
    for key, array in together["swap"].data_vars.items():
        for i, length in enumerate(order[1]):
            alone = apart["swap"][key].values[order[0].index(length)]
            np.testing.assert_allclose(
                array.values[i], alone, atol=1e-5, rtol=1e-5, err_msg=str(key)
            )


def test_bfloat16_is_near_float32(run_of, make_checkpoint):
    full = summarize(run_of(make_checkpoint("smelt"), [90, 80]), PROBE, draws=0)
    half = summarize(
        run_of(make_checkpoint("smelt", dtype=torch.bfloat16), [90, 80]), PROBE, draws=0
    )
    for name, bound in (("moved_share", 0.05), ("values_share", 0.05), ("mass_change", 0.02)):
        assert float(np.abs(full[name] - half[name]).max()) < bound, name


def test_sentences(make_run):
    def told(name: str, lengths=(40, 33, 12, 1), **overrides) -> str:
        run = make_run([PROBE], lengths, name, **overrides)
        return PROBE.sentence(summarize(run, PROBE, draws=20))

    text = told("smelt")
    assert "over 2 documents" in text and "% is attention that moved, " in text
    assert "by the queries" in text and "[" in text
    assert "(visits 1-2: " in told("smelt", num_visits=3)
    assert told("gpt_oss") == "No layer is visited twice, so there is nothing to swap."
    assert "No query was counted" in told("smelt", [1, 1])


def test_progress_is_the_share_of_moved_attention(make_run):
    run = make_run([PROBE], [40, 30])
    arrays = {n: a.values for n, a in run["swap"].data_vars.items()}
    ((moved, change),) = PROBE.progress(
        arrays, type("Shape", (), {"visit_pairs": [(1, 2)]})
    ).values()
    assert moved == pytest.approx(arrays["term_dot_sum"][..., 0].sum())
    assert change == pytest.approx(arrays["change_square_sum"].sum())
