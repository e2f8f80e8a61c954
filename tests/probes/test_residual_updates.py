"""residual-updates against loops in float64 over what plain hooks saw, TransformerLens, and exact values."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers.modeling_layers import GradientCheckpointingLayer

from smeltscope.activations import open_run
from smeltscope.errors import SmeltscopeError
from smeltscope.model import executions_of, tiny
from smeltscope.model.executions import label
from smeltscope.probes import RunOptions, run_probes, summarize
from smeltscope.probes.residual_updates import (
    VECTORS,
    WRITES,
    Pairs,
    ResidualUpdates,
    mean_over,
    ratio_sums,
)
from smeltscope.probes.statistics import Estimate

LENGTHS = (20, 13, 30, 3, 2, 1)  # every token of these is sampled
NORMS = ("norm_ratio_sum", "norm_log_ratio_sum", "norm_later_sum", "norm_earlier_sum", "norm_count")
COSINES = ("cosine_sum", "cosine_count", "centred_cosine_sum", "centred_cosine_count")


@pytest.fixture
def run_of(make_run):
    def run(lengths=LENGTHS, name="smelt", **overrides):
        return make_run([ResidualUpdates()], lengths, name, **overrides)

    return run


def seen_by_hooks(model: torch.nn.Module, tokens: np.ndarray) -> list[dict[str, np.ndarray]]:
    """What each layer got, read and gave in one forward over one segment, in float64, call by call."""
    seen: list[dict[str, np.ndarray]] = []
    hooks = []

    def first(args, kwargs):
        return args[0] if args else kwargs["hidden_states"]

    def note(site, value):
        value = value[0] if isinstance(value, tuple) else value
        seen[-1][site] = value.detach().double().reshape(len(tokens), -1).numpy().copy()

    def before_layer(module, args, kwargs):
        seen.append({})
        note("resid_pre", first(args, kwargs))

    for layer in (m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)):
        hooks.append(layer.register_forward_pre_hook(before_layer, with_kwargs=True))
        hooks.append(layer.register_forward_hook(lambda m, a, out: note("resid_post", out)))
        for names, site in ((("self_attn", "attn"), "attn"), (("mlp",), "mlp")):
            part = next(getattr(layer, n) for n in names if hasattr(layer, n))

            def read(m, args, kwargs, site=site):
                note(f"{site}_in", first(args, kwargs))

            hooks.append(part.register_forward_pre_hook(read, with_kwargs=True))
            hooks.append(
                part.register_forward_hook(lambda m, a, out, site=site: note(f"{site}_out", out))
            )
    with torch.no_grad():
        model(torch.from_numpy(tokens.astype(np.int64))[None])
    for hook in hooks:
        hook.remove()
    for sites in seen:
        sites["update"] = sites["resid_post"] - sites["resid_pre"]
    return seen


def norm(vectors: np.ndarray) -> np.ndarray:
    return np.sqrt((vectors**2).sum(-1))


def slowly(seen: list[dict[str, np.ndarray]], executions, writes=WRITES, start: int = 1) -> dict:
    """Every array of one segment by its definition, tokens from `start` on; writes that are not to be known are left out."""
    length, width = seen[0]["resid_pre"].shape
    counted = length - start
    looped = [e.layer for e in executions if e.visit == 2]
    pairs = [(a, b) for a in range(1, 9) for b in range(a + 1, 9)]
    pairs = sorted(p for p in pairs if p[1] <= max(e.visit for e in executions))
    number = len(executions)
    out: dict = {n: np.full((len(looped), len(pairs), len(VECTORS)), np.nan) for n in NORMS}
    out |= {n: np.full((number, number, len(WRITES)), np.nan) for n in COSINES}
    kinds = [v for v in VECTORS if v in writes or v not in WRITES]
    for sites in seen:
        x, dx = (norm(sites[site]) / width**0.5 for site in ("resid_pre", "update"))
        for name, value in {
            "tokens": counted,
            "residual_rms_sum": x[start:].sum(),
            "update_rms_sum": dx[start:].sum(),
            "relative_sum": (dx / x)[start:].sum(),
            "relative_log_sum": np.log(dx / x)[start:].sum(),
            "relative_count": counted,
            "first_residual_rms": x[0],
            "first_update_rms": dx[0],
        }.items():
            out.setdefault(name, []).append(value)
    for later in executions:
        for earlier in executions:
            if earlier.layer != later.layer or earlier.visit >= later.visit:
                continue
            for kind in kinds:
                if any(kind not in seen[e.index] for e in (earlier, later)):
                    continue
                a, b = (norm(seen[e.index][kind][start:]) for e in (earlier, later))
                values = (b / a).sum(), np.log(b / a).sum(), b.sum(), a.sum(), len(a)
                place = looped.index(later.layer), pairs.index((earlier.visit, later.visit))
                for name, value in zip(NORMS, values, strict=True):
                    out[name][*place, VECTORS.index(kind)] = value
    for w, write in enumerate(WRITES):
        for i in range(number):
            for j in range(number):
                if write not in writes or any(write not in seen[e] for e in (i, j)):
                    continue
                a, b = seen[i][write][start:], seen[j][write][start:]
                cosine = (a * b).sum(-1) / norm(a) / norm(b)
                out["cosine_sum"][i, j, w], out["cosine_count"][i, j, w] = cosine.sum(), len(a)
                cosine = np.zeros(0)
                if counted > 1:
                    a, b = a - a.mean(0), b - b.mean(0)
                    cosine = (a * b).sum(-1) / norm(a) / norm(b)
                out["centred_cosine_sum"][i, j, w] = cosine.sum()
                out["centred_cosine_count"][i, j, w] = len(cosine)
    if not looped:
        out = {n: v for n, v in out.items() if n not in NORMS}
    return {name: np.asarray(value, dtype=np.float64) for name, value in out.items()}


def assert_like(run: xr.DataTree, expected_by_length: dict[int, dict], atol: float = 1e-5) -> None:
    """`atol` for a number of one token."""
    data, lengths = run["residual_updates"].dataset, run["segments"]["tokens"].values
    names = {n for n, a in data.data_vars.items() if "segment" in a.dims}
    for row, length in enumerate(lengths):
        assert names == set(expected_by_length[length])
        for name, expected in expected_by_length[length].items():
            np.testing.assert_allclose(
                data[name].values[row],
                expected,
                atol=atol * max(length - 1, 1),
                rtol=atol,
                err_msg=f"{name} of {length} tokens",
            )


MODELS = {
    "smelt": {},
    "smelt, 3 visits": {"num_visits": 3},
    "baseline": {},
    "llama": {},
    "gpt2": {},
    "dory": {},
    "hrm_text": {},
    "inkling2_loop": {},
}


@pytest.mark.parametrize("variant", MODELS)
def test_like_slow_loops(run_of, make_heldout, variant):
    """Each segment alone, through plain hooks; the run has them in padded batches."""
    name = variant.split(",")[0]
    model, heldout = tiny(name, **MODELS[variant]), make_heldout(LENGTHS)
    # Dory rescales the stream, so that what its modules give is not what they write; Inkling's writes pass
    # convolutions, and layers that begin a block of its residual attention have none.
    writes = ("update",) if name in ("dory", "inkling2_loop") else WRITES
    expected = {
        length: slowly(
            seen_by_hooks(model, heldout.segment(i)), executions_of(model.config), writes
        )
        for i, length in enumerate(LENGTHS)
    }
    run = run_of(name=name, **MODELS[variant])
    if name == "inkling2_loop":
        data = run["residual_updates"].dataset
        known = np.array([i in (1, 3, 5, 7, 9) for i in range(10)])
        for write in (1, 2):
            has = np.isfinite(data["cosine_sum"].values[..., write])
            assert (has == np.outer(known, known)).all()
        for part in (data[n] for n in (*NORMS, *COSINES)):
            part.values[..., 1:3] = np.nan
    assert_like(run, expected)


@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # every run has a file of its own
)
@given(data=st.data(), lengths=st.lists(st.integers(1, 80), min_size=1, max_size=4, unique=True))
def test_any_smelt_like_slow_loops(make_run, make_heldout, any_smelt, data, lengths):
    smelt = data.draw(any_smelt)
    model, heldout = tiny("smelt", **smelt), make_heldout(lengths)
    expected = {
        length: slowly(seen_by_hooks(model, heldout.segment(i)), executions_of(model.config))
        for i, length in enumerate(lengths)
    }
    options = RunOptions(max_length=80, batch_tokens=600, sampled_tokens=80)
    assert_like(make_run([ResidualUpdates()], lengths, options=options, **smelt), expected)


@pytest.mark.parametrize("variant", ["smelt, 3 visits", "dory"])
def test_the_first_token_counts_where_it_is_asked_for(make_run, make_heldout, variant):
    name = variant.split(",")[0]
    writes = ("update",) if name == "dory" else WRITES
    model, heldout = tiny(name, **MODELS[variant]), make_heldout(LENGTHS)
    expected = {
        length: slowly(
            seen_by_hooks(model, heldout.segment(i)), executions_of(model.config), writes, start=0
        )
        for i, length in enumerate(LENGTHS)
    }
    probe = ResidualUpdates(include_first=True)
    run = make_run([probe], LENGTHS, name, **MODELS[variant])
    assert_like(run, expected)
    assert run["residual_updates"].attrs["options"] == '{"include_first": true}'
    assert summarize(run, probe, draws=0)["tokens"][0] == sum(LENGTHS)


def test_like_transformer_lens(run_of, make_heldout):
    """Norms, ratios and cosines from the hook points of the same weights."""
    heldout, run = make_heldout(LENGTHS), run_of()
    model = tiny("smelt")
    executions = executions_of(model.config)
    bridge = build_bridge_from_module(model, "SmeltForCausalLM", hf_config=model.config)
    expected = {}
    for i, length in enumerate(LENGTHS):
        with torch.no_grad():
            _, cache = bridge.run_with_cache(
                torch.from_numpy(heldout.segment(i).astype(np.int64))[None]
            )
        seen = []
        for n in range(len(executions)):
            hooks = {
                "resid_pre": "hook_resid_pre",
                "resid_post": "hook_resid_post",
                "attn_in": "ln1.hook_out",
                "mlp_in": "ln2.hook_out",
                "attn_out": "hook_attn_out",
                "mlp_out": "hook_mlp_out",
            }
            sites = {
                site: cache[f"blocks.{n}.{hook}"][0].double().numpy()
                for site, hook in hooks.items()
            }
            seen.append(sites | {"update": sites["resid_post"] - sites["resid_pre"]})
        expected[length] = slowly(seen, executions)
    assert_like(run, expected)


def test_norms_of_unit_gain_have_ratio_1(make_checkpoint, make_heldout, tmp_path):
    """RMSNorm's output has norm sqrt(width) then, whatever the visit."""
    checkpoint = make_checkpoint("smelt", rms_norm_eps=1e-12)
    with torch.no_grad():
        for name, parameter in checkpoint.model.named_parameters():
            if "layernorm" in name:
                parameter.fill_(1)
    options = RunOptions(max_length=50, batch_tokens=400)
    out = run_probes(
        checkpoint, make_heldout((50, 40)), [ResidualUpdates()], tmp_path / "run.h5", options
    )
    summary = summarize(open_run(out), ResidualUpdates(), draws=0)
    for vector in ("attn_in", "mlp_in"):
        for name in ("norm_ratio", "norm_ratio_mean", "norm_ratio_of_sums"):
            np.testing.assert_allclose(summary[name].sel(vector=vector), 1, atol=1e-6)
    assert np.abs(summary["norm_ratio"].sel(vector="update") - 1).min() > 1e-3


def test_a_span_that_writes_nothing(run_of):
    """Ratios are 0 / 0, and a vector of length 0 has no direction: no numbers, never 0 or 1."""
    run = run_of(residual_scale=0.0)
    summary = summarize(run, ResidualUpdates(), draws=20)
    visits, layers = summary["visit"].values, summary["layer"].values
    span = np.isin(layers, layers[visits > 1])
    for name in ("norm_ratio", "norm_ratio_mean", "norm_ratio_of_sums"):
        assert np.isnan(summary[name].sel(vector=list(WRITES))).all()
        np.testing.assert_array_equal(summary[name].sel(vector=["attn_in", "mlp_in"]), 1)
    assert (summary["update_rms"].values[span] == 0).all()
    assert np.isnan(summary["relative_update"].values[span]).all()
    assert np.isfinite(summary["relative_update"].values[~span]).all()
    matrix = summary["cosine"].sel(write="update").values
    assert np.isnan(matrix[span]).all() and np.isnan(matrix[:, span]).all()
    np.testing.assert_allclose(np.diag(matrix)[~span], 1, atol=1e-6)
    assert np.isnan(summary["matched_overall"]).all()
    assert "none" in ResidualUpdates().sentence(summary)


@pytest.mark.parametrize(
    ("size", "matched", "nonmatching"), [(15, 15, 210), (6, 6, 30), (2, 2, 2), (1, 1, 0)]
)
def test_pairs_of_a_block(size, matched, nonmatching):
    pairs = Pairs.of(labels(3, size, 2, 2))
    assert pairs.exists.sum() == matched and pairs.nonmatching.sum() == nonmatching
    assert (pairs.second - pairs.first == size).all()
    assert (pairs.nearby_distances == [size - 1, size, size + 1]).all()
    thrice = Pairs.of(labels(3, size, 2, 3))
    assert thrice.exists.sum(0).tolist() == [matched] * 3
    assert thrice.nonmatching.sum((1, 2)).tolist() == [nonmatching] * 3
    assert (thrice.second - thrice.first == np.array([1, 2, 1]) * size).all()


def labels(before: int, size: int, after: int, visits: int) -> xr.Dataset:
    """The labels of a run whose span of `size` layers runs as a block."""
    span = list(range(before, before + size))
    order = [*range(before), *span * visits, *range(before + size, before + size + after)]
    executions = label(order)
    both = [(a, b) for a in range(1, visits + 1) for b in range(a + 1, visits + 1)]
    return xr.Dataset(
        coords={
            "layer": ("execution", [e.layer for e in executions]),
            "visit": ("execution", [e.visit for e in executions]),
            "looped_layer": span,
            "visit_a": ("visit_pair", [a for a, _ in both]),
            "visit_b": ("visit_pair", [b for _, b in both]),
        }
    )


@pytest.mark.parametrize("visits", [2, 3])
def test_nearby_is_the_level_at_the_matched_distance(visits):
    """Where a cosine falls with distance alone, and linearly, a matched pair is as `nearby` says."""
    size = 5
    data = labels(2, size, 1, visits)
    pairs, number = Pairs.of(data), len(data["layer"])
    index = np.arange(number)
    cosine = 1 - 0.03 * np.abs(index[:, None] - index)
    matrix = Estimate(value=cosine[None], draws=cosine[None, None])
    levels = mean_over(matrix, pairs.nonmatching_at_distance)
    near = levels[:, pairs.number[..., None], pairs.nearby_distances].mean()
    for found in (near.value[0], near.draws[0, 0]):
        np.testing.assert_allclose(found, 1 - 0.03 * (pairs.second - pairs.first))
    assert np.isnan(levels.value[0, 0, [0, size, 2 * size]]).all()
    assert np.isfinite(levels.value[0, 0, [1, size - 1, size + 1, 2 * size - 1]]).all()


@pytest.mark.parametrize("variant", ["smelt", "smelt, 3 visits", "hrm_text"])
def test_matched_and_nonmatching_like_slow_means(run_of, variant):
    name = variant.split(",")[0]
    summary = summarize(run_of(name=name, **MODELS[variant]), ResidualUpdates(), draws=20)
    where = {
        (int(n), int(v)): i
        for i, (n, v) in enumerate(zip(summary["layer"].values, summary["visit"].values))  # noqa: B905
    }
    looped = summary["looped_layer"].values
    for end in ("", "_centred"):
        for w, write in enumerate(WRITES):
            matrix = summary[f"cosine{end}"].values[w]
            np.testing.assert_allclose(matrix, matrix.T, atol=1e-6)
            np.testing.assert_allclose(np.diag(matrix), 1, atol=1e-6)
            for p in range(summary.sizes["visit_pair"]):
                a, b = int(summary["visit_a"][p]), int(summary["visit_b"][p])
                have = [int(n) for n in looped if (n, a) in where and (n, b) in where]
                matched, nearby, others = [], [], {}
                for n in have:
                    for m in have:
                        i, j = where[n, a], where[m, b]
                        if n != m:
                            others.setdefault(abs(i - j), []).append(matrix[i, j])
                for n in have:
                    i, j = where[n, a], where[n, b]
                    matched.append(matrix[i, j])
                    ds = [d for d in (j - i - 1, j - i, j - i + 1) if d in others]
                    nearby.append(np.mean([np.mean(others[d]) for d in ds]))
                at = {"write": write, "visit_pair": summary["visit_pair"][p]}
                got = summary[f"matched_cosine{end}"].sel(at).values
                np.testing.assert_allclose(got[np.isfinite(got)], matched, atol=1e-6)
                assert np.isfinite(got).tolist() == [int(n) in have for n in looped]
                got = summary[f"nearby_cosine{end}"].sel(at).values
                np.testing.assert_allclose(got[np.isfinite(got)], nearby, atol=1e-6)
                for quantity, expected in {
                    "matched_overall": np.mean(matched),
                    "nearby_overall": np.mean(nearby),
                    "matched_minus_nearby_overall": np.mean(matched) - np.mean(nearby),
                    "nonmatching_overall": np.mean(np.concatenate([*others.values()])),
                }.items():
                    np.testing.assert_allclose(
                        summary[f"{quantity}{end}"].sel(at), expected, atol=1e-6
                    )
                    assert summary[f"{quantity}{end}_low"].sel(at) <= summary[
                        f"{quantity}{end}_high"
                    ].sel(at)
                levels = summary[f"nonmatching_by_distance{end}"].sel(at).values
                for d, level in enumerate(levels):
                    expected = np.mean(others[d]) if d in others else np.nan
                    np.testing.assert_allclose(level, expected, atol=1e-6)
                assert summary["matched_pairs"][p] == len(have)
                assert summary["nonmatching_pairs"][p] == len(have) * (len(have) - 1)
    ResidualUpdates().sentence(summary)


def test_averages_like_slow_ones(run_of):
    run = run_of()
    summary, data = summarize(run, ResidualUpdates(), draws=20), run["residual_updates"].dataset
    total = {
        n: np.nansum(a.values.astype(np.float64), axis=0)
        for n, a in data.data_vars.items()
        if "segment" in a.dims
    }
    close = np.testing.assert_allclose
    counts = total["relative_count"]
    close(summary["relative_update"], np.exp(total["relative_log_sum"] / counts))
    close(summary["relative_update_mean"], total["relative_sum"] / counts)
    close(summary["relative_update_of_sums"], total["update_rms_sum"] / total["residual_rms_sum"])
    close(summary["residual_rms"], total["residual_rms_sum"] / total["tokens"])
    close(summary["first_update_rms"], data["first_update_rms"].values.mean(0), rtol=1e-6)
    logs = total["norm_log_ratio_sum"] / total["norm_count"]  # (layer, pair, vector)
    ratio = summary["norm_ratio"].transpose("looped_layer", "visit_pair", "vector")
    close(ratio, np.exp(logs))
    close(summary["norm_ratio_overall"].T, np.exp(logs.mean(0)))
    of_sums = summary["norm_ratio_of_sums"].transpose("looped_layer", "visit_pair", "vector")
    close(of_sums, total["norm_later_sum"] / total["norm_earlier_sum"])
    visits, layers = data["visit"].values, data["layer"].values
    relative = dict(
        zip(zip(layers, visits, strict=True), summary["relative_update"].values, strict=True)
    )
    for i, layer in enumerate(summary["looped_layer"].values):
        close(summary["relative_update_ratio"][i, 0], relative[layer, 2] / relative[layer, 1])
    by_layer = [relative[layer, 2] / relative[layer, 1] for layer in summary["looped_layer"].values]
    overall = summary.isel(visit_pair=0)
    close(overall["relative_update_ratio_overall"], np.prod(by_layer) ** (1 / len(by_layer)))
    low, high = (float(overall[f"relative_update_ratio_overall_{end}"]) for end in ("low", "high"))
    assert low < float(overall["relative_update_ratio_overall"]) < high
    assert (summary["tokens"] == sum(n - 1 for n in LENGTHS)).all()
    # A geometric mean is at most the arithmetic one.
    assert (summary["norm_ratio"] <= summary["norm_ratio_mean"] + 1e-9).all()


def test_ratio_sums_count_only_where_neither_is_0():
    later = torch.tensor([[9.0, 2.0, 0.0, 3.0, 8.0]])
    earlier = torch.tensor([[1.0, 1.0, 2.0, 0.0, 2.0]])
    counted = torch.tensor([[False, True, True, True, True]])
    found = {n: v.item() for n, v in ratio_sums(later, earlier, counted).items()}
    assert found == {
        "ratio_sum": 6.0,
        "log_ratio_sum": pytest.approx(np.log(8)),
        "later_sum": 10.0,
        "earlier_sum": 3.0,
        "count": 2.0,
    }


def test_one_token_segments_have_a_first_token_and_nothing_else(run_of):
    summary = summarize(run_of((1, 1, 1)), ResidualUpdates(), draws=20)
    for name, array in summary.data_vars.items():
        if name.startswith("first_"):
            assert np.isfinite(array).all(), name
        elif not name.startswith(("tokens", "matched_pairs", "nonmatching_pairs")):
            assert np.isnan(array).all(), name
    assert (summary["tokens"] == 0).all()
    ResidualUpdates().sentence(summary)


def test_two_token_segments_have_no_centred_cosine(run_of):
    summary = summarize(run_of((2, 2)), ResidualUpdates(), draws=0)
    assert np.isfinite(summary["cosine"]).all() and np.isnan(summary["cosine_centred"]).all()


def test_a_model_with_one_visit_has_no_visits_to_compare(run_of):
    run = run_of(name="baseline")
    summary = summarize(run, ResidualUpdates(), draws=20)
    assert not {"looped_layer", "visit_pair", "vector"} & set(run["residual_updates"].dataset.dims)
    assert np.isfinite(summary["relative_update"]).all()
    assert summary["cosine"].shape == (3, 6, 6)
    assert "No layer is visited twice" in ResidualUpdates().sentence(summary)


def test_writes_that_are_not_known_apart(run_of):
    summary = summarize(run_of(name="dory"), ResidualUpdates(), draws=20)
    assert np.isfinite(summary["cosine"].sel(write="update")).all()
    assert np.isnan(summary["cosine"].sel(write=["attn_out", "mlp_out"])).all()
    assert "not known apart" in ResidualUpdates().sentence(summary)


def test_batches_and_their_order_change_nothing(make_run):
    lengths = (40, 33, 70, 2, 1, 90)
    alone = RunOptions(max_length=90, batch_tokens=90)
    runs = [
        make_run([ResidualUpdates()], lengths, options=RunOptions(max_length=90, batch_tokens=n))
        for n in (alone.batch_tokens, 6 * 90)
    ]
    rows = [np.argsort(run["segments"]["tokens"].values) for run in runs]
    for name in runs[0]["residual_updates"].data_vars:
        one, other = (r["residual_updates"][name] for r in runs)
        if "segment" in one.dims:
            np.testing.assert_allclose(
                one.values[rows[0]], other.values[rows[1]], atol=1e-4, rtol=1e-5, err_msg=name
            )


def test_cosines_of_a_sample_of_tokens(make_run):
    """70 of 199 tokens: their number, and about the same mean."""
    few, all_of_them = (
        make_run(
            [ResidualUpdates()],
            (200, 150),
            options=RunOptions(max_length=200, batch_tokens=1600, sampled_tokens=n),
        )
        for n in (70, 200)
    )
    assert (few["residual_updates"]["cosine_count"] == 70).all()
    assert set(all_of_them["residual_updates"]["cosine_count"].values.ravel()) == {199, 149}
    one, other = (summarize(r, ResidualUpdates(), draws=0)["cosine"] for r in (few, all_of_them))
    assert 1e-5 < np.abs(one - other).max() < 0.1


def test_bfloat16(run_of):
    """The same model in 16 bits: its own rounding, no more."""
    exact, rounded = (
        summarize(run_of(dtype=dtype), ResidualUpdates(), draws=0)
        for dtype in (None, torch.bfloat16)
    )
    for name, bound in {"norm_ratio": 0.02, "relative_update": 0.01, "cosine": 0.02}.items():
        assert np.isfinite(rounded[name]).all()
        assert np.abs(exact[name] - rounded[name]).max() < bound, name
    np.testing.assert_allclose(np.diagonal(rounded["cosine"], axis1=1, axis2=2), 1, atol=1e-6)


def test_a_stream_that_overflows_is_refused(make_checkpoint, make_heldout, tmp_path):
    checkpoint = make_checkpoint("llama")
    with torch.no_grad():
        checkpoint.model.model.layers[1].mlp.down_proj.weight.mul_(1e38).mul_(1e5)
    with pytest.raises(SmeltscopeError, match="layer 1 at visit 1 is not a number"):
        run_probes(
            checkpoint,
            make_heldout((20, 10)),
            [ResidualUpdates()],
            tmp_path / "run.h5",
            RunOptions(max_length=20, batch_tokens=40),
        )


def test_progress_shows_the_relative_update():
    shape = SimpleNamespace()
    arrays = {"relative_sum": np.array([[1.0, np.nan]]), "relative_count": np.array([[4.0, 0.0]])}
    assert ResidualUpdates().progress(arrays, shape) == {"relative update": (1.0, 4.0)}
