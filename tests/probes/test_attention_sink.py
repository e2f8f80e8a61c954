"""attention-sink against loops over the models' own eager attention, in float64, and exact values."""

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.modeling_layers import GradientCheckpointingLayer

from smeltscope.activations import Attention, attributes_of, capture, open_run
from smeltscope.activations.attention import attend
from smeltscope.model import executions_of, tiny
from smeltscope.probes import AttentionSink, RunOptions, run_probes, summarize
from smeltscope.probes.attention_sink import depth_profile, measure_rows, measure_sink
from smeltscope.probes.positions import position_edges
from smeltscope.probes.regions import TEXT_REGIONS, TextRegions
from smeltscope.probes.rows import rows_of
from smeltscope.probes.runner import empty_arrays, model_shape
from smeltscope.probes.sampling import Sample
from smeltscope.tasks import HeldOut

EXACT = 1e-5
UNIFORM = {16: 0.2113, 64: 0.0741, 256: 0.0239, 1024: 0.00733, 4096: 0.00217}
UNIFORM_WITHOUT_FIRST = {16: 0.1587, 64: 0.0594, 256: 0.0201, 1024: 0.00636, 4096: 0.00193}


def slowly(attention: np.ndarray, length: int, include_first: bool, learned=None) -> dict:
    """Every number of one segment and execution, by its definition: attention (H, T, T) of visible keys, zeros elsewhere."""
    heads, _, keys = attention.shape
    candidates = range(0 if include_first else 1, length)
    counted = [q for q in candidates if attention[0, q, 0] > 0]
    bins = len(position_edges(keys)) - 1
    edges = [0, 1] + [2**i for i in range(1, 30)]
    out = {
        "queries": len(counted),
        "blind_queries": len(candidates) - len(counted),
        "uniform_sum": sum(1 / (attention[0, q] > 0).sum() for q in counted),
        "queries_by_position": np.zeros(bins),
        "uniform_by_position_sum": np.zeros(bins),
        "sink_mass_sum": np.zeros(heads),
        "sink_mass_by_position_sum": np.zeros((heads, bins)),
        "nearby_mass_sum": np.zeros((heads, 4)),
        "heaviest_mass_sum": np.zeros(heads),
        "heaviest_key": np.full(heads, np.nan),
        "sink_alpha": np.full(heads, np.nan),
    }
    for q in counted:
        place = next(i for i in range(bins) if edges[i] <= q < edges[i + 1])
        out["queries_by_position"][place] += 1
        out["uniform_by_position_sum"][place] += 1 / (attention[0, q] > 0).sum()
    for h in range(heads):
        for q in counted:
            place = next(i for i in range(bins) if edges[i] <= q < edges[i + 1])
            out["sink_mass_sum"][h] += attention[h, q, 0]
            out["sink_mass_by_position_sum"][h, place] += attention[h, q, 0]
            for k in range(1, 5):
                if k < keys:
                    out["nearby_mass_sum"][h, k - 1] += attention[h, q, k]
        if counted:
            sampled = [counted[int(i)] for i in spread(len(counted))]
            heaviest = np.argmax(sum(attention[h, q] for q in sampled))
            on_it, on_first = (sum(attention[h, q, k] for q in counted) for k in (heaviest, 0))
            out["heaviest_key"][h] = heaviest if on_it > on_first else 0
            out["heaviest_mass_sum"][h] = max(on_it, on_first)
        if length >= 64:
            out["sink_alpha"][h] = sum(attention[h, q, 0] for q in range(64)) / 64
    if learned is not None:
        out["learned_sink_mass_sum"] = sum((learned[:, q] for q in counted), np.zeros(heads))
    return out


def spread(number: int) -> np.ndarray:
    """16 indices spread evenly over 0 .. number - 1; halves never occur."""
    return np.round(np.arange(16) * (number - 1) / 15)


def compare(measured: dict[str, np.ndarray], expected: dict, scale: float = 1.0) -> None:
    assert measured.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(
            measured[name], value, atol=EXACT * scale, rtol=1e-5, err_msg=name
        )


MODELS = {
    "smelt": {},
    "smelt, 3 visits": {"num_visits": 3},
    "gpt_oss": {},
    "llama": {},
    "inkling2_loop": {},
}


@pytest.mark.parametrize("include_first", [False, True])
@pytest.mark.parametrize("variant", MODELS)
def test_like_slow_loops(variant, include_first):
    """Ragged segments, one of one token and one of two, padded on the right."""
    name = variant.split(",")[0]
    model, lengths = tiny(name, **MODELS[variant]), [70, 64, 63, 31, 5, 2, 1]
    tokens = torch.randint(1, 256, (7, 70), generator=torch.Generator().manual_seed(0))
    measured = []

    def on_site(execution, site, value) -> None:
        learned = None if value.learned_sink is None else value.learned_sink.double().numpy()
        numbers = measure_sink(value, torch.tensor(lengths), include_first)
        measured.append(({n: t.numpy() for n, t in numbers.items()}, learned))

    with torch.inference_mode(), capture(model, on_site=on_site):
        model(tokens)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = eager(tokens, output_attentions=True).attentions
    assert len(attentions) == len(measured)
    for (numbers, learned), attention in zip(measured, attentions, strict=True):
        if learned is not None:
            total = attention.double().sum(-1).numpy()
            np.testing.assert_allclose(learned, 1 - total, atol=EXACT)
        for row, length in enumerate(lengths):
            expected = slowly(
                attention[row].double().numpy(),
                length,
                include_first,
                None if learned is None else 1 - attention[row].double().sum(-1).numpy(),
            )
            compare({n: v[row] for n, v in numbers.items()}, expected, scale=length**0.5)


def dense_attention(probabilities: torch.Tensor) -> Attention:
    """An `Attention` with these rows (B, H, T, T): zero queries, and the logarithms as bias."""
    rows, heads, length, _ = probabilities.shape
    zeros = torch.zeros(rows, heads, length, 2)
    bias = probabilities.log().clamp(min=torch.finfo(torch.float32).min)
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = True, 1
    _, attention = attend(module, zeros, zeros, zeros, bias)
    return attention


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 80), st.booleans(), st.integers(0, 10**6)
)
def test_measure_sink_on_made_attention(rows, heads, length, include_first, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, heads, length, length, generator=generator) * 2
    window = int(torch.randint(1, 2 * length + 1, (), generator=generator))
    q, k = torch.arange(length)[:, None], torch.arange(length)[None]
    seen = (k <= q) & (q - k < window)
    probabilities = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    lengths = torch.randint(1, length + 1, (rows,), generator=generator)
    lengths[0] = length
    measured = measure_sink(dense_attention(probabilities), lengths, include_first)
    for row in range(rows):
        expected = slowly(probabilities[row].double().numpy(), int(lengths[row]), include_first)
        compare({n: t[row].numpy() for n, t in measured.items()}, expected, scale=length**0.5)


def uniform(length: int, rows: int = 1, heads: int = 1) -> Attention:
    query = torch.zeros(rows, heads, length, 4)
    key = torch.randn(rows, heads, length, 4, generator=torch.Generator().manual_seed(0))
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = True, 1
    return attend(module, query, key, key, None)[1]


@pytest.mark.parametrize("length", UNIFORM)
def test_uniform_attention(length):
    for include_first, table in ((True, UNIFORM), (False, UNIFORM_WITHOUT_FIRST)):
        numbers = measure_sink(uniform(length), torch.tensor([length]), include_first)
        assert numbers["queries"].item() == length - (not include_first)
        mass = (numbers["sink_mass_sum"] / numbers["queries"]).item()
        digits = 4 if table[length] > 0.01 else 5
        assert round(mass, digits) == table[length]
        assert numbers["uniform_sum"].item() / numbers["queries"].item() == pytest.approx(
            mass, rel=1e-5
        )
        harmonic = sum(1 / i for i in range(1 if include_first else 2, length + 1))
        assert numbers["sink_mass_sum"].item() == pytest.approx(harmonic, rel=1e-6)


def test_the_first_query_has_mass_one():
    numbers = measure_sink(uniform(64), torch.tensor([64]), True)
    assert numbers["sink_mass_by_position_sum"][0, 0, 0] == 1
    assert numbers["queries_by_position"][0].tolist() == [1, 1, 2, 4, 8, 16, 32]
    numbers = measure_sink(uniform(64), torch.tensor([64]), False)
    assert numbers["queries_by_position"][0].tolist() == [0, 1, 2, 4, 8, 16, 32]
    assert numbers["sink_mass_by_position_sum"][0, 0, 0] == 0


def on_key(key: int, length: int, mass: float = 1.0, heads: int = 1) -> torch.Tensor:
    """`mass` on one key where it can be seen, the rest spread over the others; before it, uniform."""
    rows = torch.ones(length, length).tril() / torch.arange(1, length + 1)[:, None]
    for q in range(key, length):
        rows[q, : q + 1] = (1 - mass) / max(q, 1)
        rows[q, key] = mass if q > 0 else 1.0
    return rows.expand(1, heads, -1, -1)


def test_sink_rate_of_gu_et_al():
    """The share of heads whose first key's mean mass over the first 64 queries exceeds .3; query 1 counts."""
    full = measure_sink(dense_attention(on_key(0, 100)), torch.tensor([100]))
    assert full["sink_alpha"].item() == pytest.approx(1, abs=1e-6)
    none = measure_sink(uniform(100), torch.tensor([100]))
    assert none["sink_alpha"].item() == pytest.approx(0.0741, abs=5e-5)
    half = measure_sink(dense_attention(on_key(0, 100, 0.5)), torch.tensor([100]))
    assert half["sink_alpha"].item() == pytest.approx((1 + 63 * 0.5) / 64, abs=1e-6)
    # Query 1 is in the mean whatever the probe's option says.
    other = measure_sink(dense_attention(on_key(0, 100, 0.5)), torch.tensor([100]), True)
    assert other["sink_alpha"].item() == half["sink_alpha"].item()
    for length, known in ((63, False), (64, True), (65, True)):
        for queries in (length, 100):  # alone, or padded
            alpha = measure_sink(uniform(queries), torch.tensor([length]))["sink_alpha"]
            assert alpha.isfinite().item() == known


@pytest.mark.parametrize("window", [1, 4, 16])
def test_windows(window):
    length = 40
    q, k = torch.arange(length)[:, None], torch.arange(length)[None]
    seen = (k <= q) & (q - k < window)
    probabilities = (seen / seen.sum(-1, keepdim=True)).expand(1, 2, -1, -1)
    numbers = measure_sink(dense_attention(probabilities), torch.tensor([length]))
    # Queries 1 .. window - 1 see the first token; all others are blind.
    assert numbers["queries"].item() == window - 1
    assert numbers["blind_queries"].item() == length - window
    expected = sum(1 / (q + 1) for q in range(1, window))
    assert numbers["uniform_sum"].item() == pytest.approx(expected, abs=1e-6)
    assert numbers["sink_mass_sum"][0].tolist() == pytest.approx([expected] * 2, abs=1e-6)
    assert numbers["heaviest_key"].isnan().all().item() == (window == 1)


def test_the_uniform_level_beyond_a_window_is_one_over_it():
    model = tiny("gpt_oss", sliding_window=8)
    with torch.no_grad(), capture(model) as run:
        model(torch.randint(1, 256, (1, 30)))
    assert (1 / run[0, "attention"].keys_seen())[0, 7:].unique().tolist() == [1 / 8]
    numbers = measure_sink(run[0, "attention"], torch.tensor([30]))
    assert numbers["queries"].item() == 7 and numbers["blind_queries"].item() == 22
    assert measure_sink(run[1, "attention"], torch.tensor([30]))["blind_queries"].item() == 0


def test_a_sink_that_moved_is_found():
    stayed = measure_sink(dense_attention(on_key(0, 80, 0.9)), torch.tensor([80]))
    moved = measure_sink(dense_attention(on_key(3, 80, 0.9)), torch.tensor([80]))
    far = measure_sink(dense_attention(on_key(20, 80, 0.9)), torch.tensor([80]))
    assert stayed["sink_mass_sum"].item() / 79 == pytest.approx(0.9, abs=1e-6)
    assert moved["sink_mass_sum"].item() / 79 < 0.02
    assert moved["nearby_mass_sum"][0, 0, 2].item() / 79 > 0.87
    assert [n["heaviest_key"].item() for n in (stayed, moved, far)] == [0, 3, 20]
    assert moved["heaviest_mass_sum"].item() == pytest.approx(77 * 0.9, rel=1e-5)  # queries 3 .. 79
    assert far["heaviest_mass_sum"].item() == pytest.approx(60 * 0.9, rel=1e-5)


def test_segments_of_one_and_two_tokens():
    numbers = measure_sink(uniform(2, rows=2), torch.tensor([2, 1]))
    assert numbers["queries"].tolist() == [1, 0]
    assert numbers["sink_mass_sum"].tolist() == [[0.5], [0]]
    assert numbers["heaviest_key"][1].isnan().all()
    alone = measure_sink(uniform(1), torch.tensor([1]))
    assert alone["queries"].item() == 0 and alone["sink_mass_sum"].item() == 0
    assert measure_sink(uniform(1), torch.tensor([1]), True)["sink_mass_sum"].item() == 1


def test_edges_of_positions():
    assert position_edges(16).tolist() == [0, 1, 2, 4, 8, 16]
    assert position_edges(17).tolist() == [0, 1, 2, 4, 8, 16, 32]
    assert position_edges(1).tolist() == position_edges(2).tolist() == [0, 1, 2]
    for length in range(1, 200):
        edges = position_edges(length)
        assert edges[-1] >= length and (np.diff(edges) > 0).all()
        assert len(edges) <= 3 or edges[-2] < length


@pytest.fixture
def run_of(tmp_path, make_checkpoint, make_heldout):
    def run(
        checkpoint, lengths, *, batch_tokens=1024, max_length=128, per_document=1
    ) -> xr.DataTree:
        number = len(list(tmp_path.iterdir()))
        options = RunOptions(max_length=max_length, batch_tokens=batch_tokens)
        heldout = make_heldout(lengths, per_document)
        out = tmp_path / f"run{number}.h5"
        return open_run(run_probes(checkpoint, heldout, [AttentionSink()], out, options))

    return run


def test_identical_visits_do_not_change(run_of, make_checkpoint):
    """When the span writes nothing, the second visit sees what the first saw: a change of exactly 0."""
    checkpoint = make_checkpoint("smelt", residual_scale=0.0)
    run = run_of(checkpoint, [80, 64, 40, 12, 3, 2])
    summary = summarize(run, AttentionSink(), draws=50)
    later = summary["visit"].values > 1
    assert later.sum() == 3
    for end in ("", "_low", "_high"):
        assert (summary[f"change{end}"].values[later] == 0).all()
        assert np.isnan(summary[f"change{end}"].values[~later]).all()
        assert summary[f"change_overall{end}"] == 0
        regions = summary[f"region_change_overall{end}"]
        assert (regions[regions.region != "delimiter"] == 0).all()
    text = AttentionSink().sentence(summary)
    assert "minus visit 1: +0 [+0, +0], lower in 0 of 12 heads" in text
    assert "first +0 [+0, +0], self +0 [+0, +0]" in text and "delimiter" not in text
    data = run["attention_sink"].dataset
    first = {int(e): i for i, e in enumerate(data["layer"].values) if data["visit"].values[i] == 1}
    for name, array in data.data_vars.items():
        if "execution" not in array.dims:
            continue
        for e in np.flatnonzero(later):
            one, two = (
                array.isel(execution=first[int(data["layer"][e])]),
                array.isel(execution=int(e)),
            )
            assert np.array_equal(one.values, two.values, equal_nan=True), name


def test_different_visits_do_change(run_of, make_checkpoint):
    run = run_of(make_checkpoint("smelt"), [80, 64, 40, 12])
    summary = summarize(run, AttentionSink(), draws=50)
    later = summary["visit"].values > 1
    assert (np.abs(summary["change"].values[later]) > 0).all()


def test_summary_like_slow_averages(run_of, make_checkpoint):
    lengths = [90, 70, 64, 33, 17, 6, 3, 2]
    run = run_of(make_checkpoint("gpt_oss"), lengths, per_document=2)
    summary, data = summarize(run, AttentionSink(), draws=100), run["attention_sink"].dataset
    assert summary.attrs["segments"] == 8 and summary.attrs["documents"] == 4
    assert summary.attrs["tokens"] == sum(lengths)
    values = {name: array.values.astype(np.float64) for name, array in data.data_vars.items()}
    for e in range(4):
        queries = [values["queries"][s, e] for s in range(8)]
        for h in range(4):

            def mean(name: str, e=e, h=h, queries=queries) -> float:
                return sum(values[name][s, e, h] for s in range(8)) / sum(queries)

            np.testing.assert_allclose(summary["sink_mass"][e, h], mean("sink_mass_sum"))
            np.testing.assert_allclose(summary["heaviest_mass"][e, h], mean("heaviest_mass_sum"))
            np.testing.assert_allclose(
                summary["learned_sink_mass"][e, h], mean("learned_sink_mass_sum")
            )
            nearby = np.nansum(values["nearby_mass_sum"][:, e, h]) / sum(queries)
            np.testing.assert_allclose(summary["nearby_mass"][e, h], nearby)
            alpha = values["sink_alpha"][:, e, h]
            assert np.isfinite(alpha).sum() == 3
            rate = sum(a > 0.3 for a in alpha if np.isfinite(a)) / 3
            np.testing.assert_allclose(summary["sink_rate"][e, h], rate)
        np.testing.assert_allclose(summary["sink_mass_mean"][e], summary["sink_mass"][e].mean())
        blind = values["blind_queries"][:, e].sum()
        assert (blind > 0) == (e in (0, 2))
        np.testing.assert_allclose(summary["blind_share"][e], blind / (blind + sum(queries)))
    for overall, by_execution in (("sink_mass", "sink_mass_mean"), ("uniform", "uniform")):
        value, low, high = (
            float(summary[f"{overall}_overall{end}"]) for end in ("", "_low", "_high")
        )
        np.testing.assert_allclose(value, summary[by_execution].mean())
        assert low < value < high
        # Draws take the same documents for all executions: no wider than the mean of their intervals.
        assert float(summary[f"{by_execution}_low"].mean()) <= low + 1e-9
        assert float(summary[f"{by_execution}_high"].mean()) >= high - 1e-9


def test_mass_by_position_of_all_looped_layers(run_of, make_checkpoint):
    """The mean of their executions at the visit, entries without queries left out; of all layers without a loop."""
    run = run_of(make_checkpoint("smelt"), [7, 40, 90])
    summary = summarize(run, AttentionSink(), draws=50)
    layer, visit = summary["layer"].values, summary["visit"].values
    for number in (1, 2):
        rows = np.isin(layer, layer[visit == 2]) & (visit == number)
        value, low, high = (
            summary[f"sink_mass_by_position_visit_{number}{end}"].values
            for end in ("", "_low", "_high")
        )
        expected = summary["sink_mass_by_position"].values[rows]
        np.testing.assert_allclose(value, expected.mean(0))
        known = np.isfinite(value)
        assert (low[known] <= value[known]).all() and (high[known] >= value[known]).all()
    alone = summarize(run_of(make_checkpoint("llama"), [7, 40]), AttentionSink(), draws=0)
    np.testing.assert_allclose(
        alone["sink_mass_by_position_visit_1"], alone["sink_mass_by_position"].mean("execution")
    )


def test_nearby_mass_of_short_segments_counts(run_of, make_checkpoint):
    """Segments shorter than the nearby keys: no mass there is mass 0, not a missing number."""
    together, apart = (
        summarize(run_of(make_checkpoint("llama"), [3, 3, 40], **options), AttentionSink(), draws=0)
        for options in ({}, {"batch_tokens": 40})
    )
    for name in ("nearby_mass", "sink_mass", "sink_mass_by_position", "heaviest_mass"):
        np.testing.assert_allclose(apart[name], together[name], atol=1e-6, err_msg=name)
    run = run_of(make_checkpoint("llama"), [3, 3, 4])
    nearby = run["attention_sink"]["nearby_mass_sum"].values
    assert np.isfinite(nearby).all()
    assert (nearby[..., 3] == 0).all()


def test_one_token_segments_are_no_evidence(run_of, make_checkpoint):
    summary = summarize(run_of(make_checkpoint("smelt"), [1, 1, 1]), AttentionSink(), draws=20)
    for name, values in summary.data_vars.items():
        if not name.startswith("queries"):
            assert np.isnan(values).all(), name
    AttentionSink().sentence(summary)


def test_dimensions_hold_what_is_measured(make_checkpoint, make_heldout):
    shape = model_shape(make_checkpoint("smelt"), make_heldout([100]), 100)
    dimensions = AttentionSink().dimensions(shape)
    assert dimensions["position"].tolist() == [0, 1, 2, 4, 8, 16, 32, 64]
    for variable in AttentionSink().variables(shape).values():
        assert variable.dims[:2] == ("segment", "execution")
        shared = {"segment", "execution", "head", "kv_head", "region"}
        assert set(variable.dims) <= shared | {*dimensions}


# --- sampled queries: regions, entropy, what the first token adds; what the first token is like ---


def region_of(key: int, query: int, delimiter) -> int:
    if key == 0:
        return 0
    if key == query:
        return 1
    if key == query - 1:
        return 2
    if query - key < 8:
        return 3
    return 4 if delimiter[key] else 5


def slowly_sampled(attention: np.ndarray, value: np.ndarray, queries, delimiter) -> dict:
    """Every number over sampled queries of one segment by its definition: attention (H, T, T), value (G, T, D)."""
    heads = len(attention)
    queries = [q for q in queries if attention[0, q, 0] > 0]
    out = {
        "sampled_queries": len(queries),
        "region_mass_sum": np.zeros((heads, 6)),
        "region_uniform_sum": np.zeros(6),
        "entropy_sum": np.zeros(heads),
        "relative_entropy_sum": np.zeros(heads),
        "first_share_sum": np.zeros(heads),
        "first_share_queries": np.zeros(heads),
    }
    for q in queries:
        keys = [k for k in range(q + 1) if attention[0, q, k] > 0]
        for k in keys:
            region = region_of(k, q, delimiter)
            out["region_uniform_sum"][region] += 1 / len(keys)
            out["region_mass_sum"][:, region] += attention[:, q, k]
        for h in range(heads):
            p = attention[h, q, keys] / attention[h, q, keys].sum()
            entropy = -sum(x * np.log(x) for x in p)
            out["entropy_sum"][h] += entropy
            out["relative_entropy_sum"][h] += entropy / np.log(len(keys))
            v = value[h * len(value) // heads]
            read = sum(attention[h, q, k] * v[k] for k in keys)
            if np.linalg.norm(read) > 0:
                share = np.linalg.norm(attention[h, q, 0] * v[0]) / np.linalg.norm(read)
                out["first_share_sum"][h] += share
                out["first_share_queries"][h] += 1
    return out


@contextmanager
def eagerly(model) -> Iterator[tuple[torch.nn.Module, list, list]]:
    """What a model's own eager attention is given and makes, and what its layers are given, by execution."""
    eager, kernel, residual = copy.deepcopy(model), [], []
    eager.set_attn_implementation("eager")
    own = sys.modules[type(next(m for m in eager.modules() if hasattr(m, "layer_idx"))).__module__]
    original = own.eager_attention_forward

    def forward(module, query, key, value, *args, **kwargs):
        output, weights = original(module, query, key, value, *args, **kwargs)
        if hasattr(module, "layer_idx"):
            kernel.append([x.detach().double().numpy() for x in (weights, key, value)])
        return output, weights

    for layer in eager.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.register_forward_pre_hook(
                lambda _, args, kwargs: residual.append(
                    (args[0] if args else kwargs["hidden_states"]).detach().double().numpy()
                ),
                with_kwargs=True,
            )
    own.eager_attention_forward = forward
    try:
        yield eager, kernel, residual
    finally:
        own.eager_attention_forward = original


def norms(x: np.ndarray, length: int) -> tuple:
    """Norm of the first of `length` vectors (..., T, size), and those of the others summed."""
    norm = np.linalg.norm(x, axis=-1)
    return norm[..., 0], norm[..., 1:length].sum(-1)


def assert_like(
    run: xr.DataTree, model: torch.nn.Module, heldout: HeldOut, *, include_first: bool = False
) -> None:
    """All arrays of a run, every query sampled, segments of different lengths, against both slow references."""
    data, lengths = run["attention_sink"].dataset, heldout.lengths.tolist()
    longest, seen = attributes_of(run)["identity"]["max_length"], set()
    for row, length in enumerate(run["segments"]["tokens"].values):
        tokens = torch.from_numpy(heldout.segment(lengths.index(length))).long()[None]
        with eagerly(model) as (eager, kernel, residual), torch.no_grad():
            eager(tokens, use_cache=False)
        assert len(kernel) == len(residual) == len(executions_of(model.config))
        for e, ((attention, key, value), x) in enumerate(zip(kernel, residual, strict=True)):
            (attention,) = attention
            learned = 1 - attention.sum(-1)
            expected = slowly(
                np.pad(attention, ((0, 0), (0, 0), (0, longest - length))),  # for as many bins
                length,
                include_first,
                None if np.abs(learned).max() < EXACT else learned,
            )
            no_token = np.zeros(length, dtype=bool)
            expected |= slowly_sampled(attention, value[0], range(1, length), no_token)
            for which, vectors in {"residual": x[0], "key": key[0], "value": value[0]}.items():
                first, others = norms(vectors, length)
                expected |= {f"first_{which}_norm": first, f"{which}_norm_sum": others}
            for n, wanted in expected.items():
                found = data[n].values[row, e]
                np.testing.assert_allclose(found, wanted, atol=2e-5, rtol=2e-5, err_msg=n)
            seen |= set(expected)
            total = data["region_mass_sum"].values[row, e].sum(-1)
            learned = np.nan_to_num(data["learned_sink_mass_sum"].values[row, e])
            if not include_first:
                np.testing.assert_allclose(
                    total + learned, data["queries"].values[row, e], rtol=1e-5
                )
    unknown = set(data.data_vars) - seen
    assert unknown <= {"learned_sink_mass_sum"} and all(np.isnan(data[n]).all() for n in unknown)


@pytest.mark.parametrize("variant", [*MODELS, "gpt2", "dory", "hrm_text"])
def test_sampled_queries_like_slow_loops(make_run, make_heldout, variant):
    """All queries sampled; ragged segments, one of one token and one of two, padded on the right."""
    name, overrides = variant.split(",")[0], MODELS.get(variant, {})
    lengths = [30, 12, 2, 1]
    options = RunOptions(max_length=30, batch_tokens=1600)
    run = make_run([AttentionSink()], lengths, name, options=options, **overrides)
    assert_like(run, tiny(name, **overrides), make_heldout(lengths))


@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # every run has a file of its own
)
@given(
    data=st.data(),
    lengths=st.lists(st.integers(1, 80), min_size=1, max_size=3, unique=True),
    include_first=st.booleans(),
)
def test_any_smelt_like_slow_loops(make_run, make_heldout, any_smelt, data, lengths, include_first):
    smelt = data.draw(any_smelt)
    options = RunOptions(max_length=80, batch_tokens=600, sampled_queries=80)
    run = make_run([AttentionSink(include_first=include_first)], lengths, options=options, **smelt)
    assert_like(run, tiny("smelt", **smelt), make_heldout(lengths), include_first=include_first)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3), st.sampled_from([(1, 1), (4, 2)]), st.integers(1, 60), st.integers(0, 10**6)
)
def test_measure_rows_on_made_attention(rows, heads, length, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, heads[0], length, length, generator=generator) * 3
    window = int(torch.randint(1, 2 * length + 1, (), generator=generator))
    q, k = torch.arange(length)[:, None], torch.arange(length)[None]
    probabilities = scores.masked_fill(~((k <= q) & (q - k < window)), -torch.inf).softmax(-1)
    value = torch.randn(rows, heads[1], length, 3, generator=generator)
    delimiter = torch.rand(rows, length, generator=generator) < 0.3
    chosen = [
        sorted({int(x) for x in torch.randint(1, length, (9,), generator=generator)})
        if length > 1
        else []
        for _ in range(rows)
    ]
    positions = torch.tensor([[*c, *[max(length - 1, 0)] * (9 - len(c))] for c in chosen])
    valid = torch.arange(9) < torch.tensor([len(c) for c in chosen])[:, None]
    attention = replace(dense_attention(probabilities), value=value)
    pv = (probabilities @ value.repeat_interleave(heads[0] // heads[1], 1)).transpose(1, 2)
    sampled = rows_of(attention, Sample(positions=positions, valid=valid))
    measured = measure_rows(sampled, attention, pv, TextRegions(delimiter=delimiter))
    for row in range(rows):
        expected = slowly_sampled(
            probabilities[row].double().numpy(),
            value[row].double().numpy(),
            chosen[row],
            delimiter[row],
        )
        found = {n: t[row].numpy() for n, t in measured.items()}
        share = expected.pop("first_share_sum")  # of a small output, so relative
        np.testing.assert_allclose(found.pop("first_share_sum"), share, atol=1e-5, rtol=1e-3)
        compare(found, expected, scale=3)


def all_rows(attention: Attention, pv: torch.Tensor, **regions) -> dict[str, torch.Tensor]:
    """`measure_rows` over every query but the first."""
    length = attention.query.shape[2]
    positions = torch.arange(1, length).expand(len(attention.query), -1)
    sample = Sample(positions=positions, valid=torch.ones_like(positions, dtype=torch.bool))
    delimiter = torch.zeros(len(positions), length, dtype=torch.bool)
    regions = TextRegions(delimiter=delimiter)
    return measure_rows(rows_of(attention, sample), attention, pv, regions)


def test_uniform_attention_has_all_the_entropy_there_is():
    length = 300
    attention = uniform(length)
    numbers = all_rows(attention, torch.ones(1, length, 1, 4))
    n = numbers["sampled_queries"].item()
    assert n == 299
    assert numbers["relative_entropy_sum"].item() == pytest.approx(n, rel=1e-6)
    entropy = sum(np.log(q + 1) for q in range(1, length))
    assert numbers["entropy_sum"].item() == pytest.approx(entropy, rel=1e-6)
    torch.testing.assert_close(numbers["region_mass_sum"][:, 0], numbers["region_uniform_sum"])
    harmonic = sum(1 / i for i in range(2, length + 1))
    by_region = dict(zip(TEXT_REGIONS, numbers["region_uniform_sum"][0].tolist(), strict=True))
    assert by_region["first"] == pytest.approx(harmonic, rel=1e-6)
    assert by_region["self"] == pytest.approx(harmonic, rel=1e-6)
    assert by_region["previous"] == pytest.approx(harmonic - 1 / 2, rel=1e-6)  # key 0 is `first`
    assert by_region["delimiter"] == 0
    assert sum(by_region.values()) == pytest.approx(n, rel=1e-6)


def test_all_mass_on_the_first_token():
    """No entropy, and all that a head reads is the first token's value."""
    length = 50
    value = torch.randn(1, 1, length, 4, generator=torch.Generator().manual_seed(0))
    # What has no mass at all would count as hidden.
    attention = replace(dense_attention(on_key(0, length).tril().clamp(min=1e-30)), value=value)
    pv = value[:, :, :1].expand(-1, -1, length, -1).transpose(1, 2)
    numbers = all_rows(attention, pv)
    by_region = numbers["region_mass_sum"][0, 0].tolist()
    assert by_region == pytest.approx([49, 0, 0, 0, 0, 0], abs=1e-20)
    for name in ("entropy_sum", "relative_entropy_sum"):
        assert numbers[name].item() == pytest.approx(0, abs=1e-20)
    assert numbers["first_share_sum"].item() == pytest.approx(49, rel=1e-6)
    # A sink without a value of its own does nothing, however much mass it has.
    silent = replace(attention, value=value * (torch.arange(length) > 0)[:, None])
    assert all_rows(silent, pv)["first_share_sum"].item() == 0
    # Zero outputs have no share.
    nothing = all_rows(attention, torch.zeros_like(pv))
    assert nothing["first_share_queries"].item() == nothing["first_share_sum"].item() == 0


def test_without_a_tokenizer_there_are_no_delimiters(run_of, make_checkpoint, byte_tokenizer):
    checkpoint = make_checkpoint("smelt")
    lengths = [90, 70, 64, 33]
    without = summarize(run_of(checkpoint, lengths), AttentionSink(), draws=20)
    tokenizer = byte_tokenizer(bos_token="<s>")
    with_them = summarize(
        run_of(replace(checkpoint, tokenizer=tokenizer), lengths), AttentionSink(), draws=20
    )
    names = ("region_mass", "region_mass_mean", "region_uniform", "region_change_overall")
    for name in names:
        assert np.isnan(without[name].sel(region="delimiter")).all()
        assert np.isfinite(without[name].sel(region="rest")).any()
        assert np.isfinite(with_them[name].sel(region="delimiter")).any()
    for summary in (without, with_them):
        np.testing.assert_allclose(summary["region_mass"].sum("region"), 1, atol=1e-6)
        np.testing.assert_allclose(summary["region_uniform"].sum("region"), 1, atol=1e-6)
    # What the delimiters have was the rest's.
    moved = with_them["region_mass"].sel(region=["delimiter", "rest"]).sum("region")
    np.testing.assert_allclose(moved, without["region_mass"].sel(region="rest"), atol=1e-6)
    assert float(with_them["region_mass"].sel(region="delimiter").min()) > 0


def test_summary_of_sampled_queries_like_slow_averages(run_of, make_checkpoint):
    run = run_of(
        make_checkpoint("smelt", num_visits=3), [90, 70, 64, 33, 17, 6, 1, 2], per_document=2
    )
    summary, data = summarize(run, AttentionSink(), draws=100), run["attention_sink"].dataset
    values = {name: array.values.astype(np.float64) for name, array in data.data_vars.items()}
    sampled = values["sampled_queries"].sum(0)  # (execution,)
    tokens = run["segments"].dataset["tokens"].values
    for e in range(12):
        first = {1: 1, 2: 2, 3: 3}.get(int(summary["layer"][e]))
        for h in range(4):
            mass = values["region_mass_sum"][:, e, h].sum(0) / sampled[e]
            mass[TEXT_REGIONS.index("delimiter")] = np.nan
            np.testing.assert_allclose(summary["region_mass"][e, h], mass)
            if summary["visit"][e] > 1:
                change = mass - summary["region_mass"][first, h]
                np.testing.assert_allclose(summary["region_change"][e, h], change)
            share = (
                values["first_share_sum"][:, e, h].sum()
                / values["first_share_queries"][:, e, h].sum()
            )
            np.testing.assert_allclose(summary["first_share"][e, h], share)
            entropy = values["relative_entropy_sum"][:, e, h].sum() / sampled[e]
            np.testing.assert_allclose(summary["relative_entropy"][e, h], entropy)
        np.testing.assert_allclose(
            summary["relative_entropy_mean"][e], summary["relative_entropy"][e].mean()
        )
        np.testing.assert_allclose(
            summary["region_mass_mean"][e], summary["region_mass"][e].mean("head")
        )
        # Each segment's first token beside the mean of its other tokens, every other token alike.
        ratio = sum((tokens[s] - 1) * values["first_residual_norm"][s, e] for s in range(8)) / sum(
            values["residual_norm_sum"][s, e] for s in range(8)
        )
        np.testing.assert_allclose(summary["first_residual_norm"][e], ratio)
    later = summary["visit"].values > 1
    np.testing.assert_allclose(
        summary["region_change_overall"],
        summary["region_change"][later].mean(["execution", "head"]),
    )
    assert np.isnan(summary["region_change"].values[~later]).all()
    text = AttentionSink().sentence(summary)
    assert "at visit 3" in text and "rest " in text


def test_a_model_with_one_visit(run_of, make_checkpoint):
    summary = summarize(run_of(make_checkpoint("gpt2"), [40, 30, 12]), AttentionSink(), draws=20)
    assert np.isnan(summary["region_change"]).all() and np.isnan(summary["change_overall"])
    assert np.isfinite(summary["first_share"]).all()
    text = AttentionSink().sentence(summary)
    assert "No layer is visited twice" in text and "nan" not in text


def test_bfloat16(run_of, make_checkpoint):
    """In 16 bits only the model itself rounds: what is measured stays near, and masses sum to 1."""
    exact, rounded = (
        summarize(run_of(make_checkpoint("smelt", dtype=t), [90, 64, 33]), AttentionSink(), draws=0)
        for t in (torch.float32, torch.bfloat16)
    )
    bounds = {"region_mass": 0.02, "relative_entropy": 0.02, "first_share": 0.03}
    bounds |= {"first_residual_norm": 0.03, "first_key_norm": 0.03, "first_value_norm": 0.03}
    for quantity, bound in bounds.items():
        assert float(np.abs(exact[quantity] - rounded[quantity]).max()) < bound, quantity
    np.testing.assert_allclose(rounded["region_mass"].sum("region"), 1, atol=1e-5)


def test_progress(make_checkpoint, make_heldout):
    probe = AttentionSink()
    for name, labels in (
        ("smelt", ["sink at visit 1", "at later visits"]),
        ("llama", ["sink"]),
    ):
        shape = model_shape(make_checkpoint(name), make_heldout([9]), 9)
        arrays = empty_arrays(probe, shape, 2)
        arrays["queries"][:] = 8
        arrays["sink_mass_sum"][:] = np.arange(len(shape.executions))[:, None] * 4
        found = probe.progress(arrays, shape)
        assert list(found) == labels
        means = [total / count for total, count in found.values()]
        # Layers 1, 2, 3 at executions 1, 2, 3 and again at 4, 5, 6.
        assert means == ([1.0, 2.5] if name == "smelt" else [0.5])


def made_summary(layers: list[int], visits: list[int], mass: float) -> xr.Dataset:
    values = mass + 0.01 * np.arange(len(layers))
    names = [n + end for n in ("sink_mass_mean", "uniform") for end in ("", "_low", "_high")]
    return xr.Dataset(
        {name: ("execution", values + i) for i, name in enumerate(names)}
        | {"sink_mass": (("execution", "head"), np.zeros((len(layers), 2)))},
        coords={
            "execution": np.arange(len(layers)),
            "layer": ("execution", layers),
            "visit": ("execution", visits),
        },
    )


def test_depth_profile():
    looped = made_summary([0, 1, 2, 1, 2, 3], [1, 1, 1, 2, 2, 1], 0.3)
    baseline = made_summary([0, 1, 2, 3], [1, 1, 1, 1], 0.2)
    profile = depth_profile(looped, baseline)
    assert profile.sizes == {"row": 10}
    assert profile["run"].values.tolist() == ["model"] * 6 + ["baseline"] * 4
    assert profile["layer"].values.tolist() == [0, 1, 2, 1, 2, 3, 0, 1, 2, 3]
    assert profile["visit"].values.tolist() == [1, 1, 1, 2, 2, 1, 1, 1, 1, 1]
    depth = [*np.arange(6) / 5, *np.arange(4) / 3]
    np.testing.assert_allclose(profile["depth"], depth)
    for name in ("sink_mass_mean", "sink_mass_mean_low", "sink_mass_mean_high", "uniform"):
        together = [*looped[name].values, *baseline[name].values]
        assert profile[name].values.tolist() == together
    one_layer = made_summary([0], [1], 0.1)
    assert depth_profile(one_layer, one_layer)["depth"].values.tolist() == [0, 0]
