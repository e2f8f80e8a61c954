"""qkv-similarity against loops in float64 over what plain hooks saw, TransformerLens, and exact values."""

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers.modeling_layers import GradientCheckpointingLayer

from smeltscope.activations import capture
from smeltscope.model import executions_of, tiny
from smeltscope.probes import RunOptions, summarize
from smeltscope.probes.cosines import Vectors, cosines
from smeltscope.probes.qkv_similarity import (
    KEY_STAGES,
    QUERY_STAGES,
    RANDOM,
    QkvSimilarity,
    measure_stages,
    random_values,
)
from smeltscope.probes.runner import model_shape
from smeltscope.probes.sampling import Sample

LENGTHS = (20, 13, 30, 3, 2, 1)  # every token of these is sampled
HEAD = 8  # of every tiny model
Stages = list[dict[str, np.ndarray]]  # of each execution: (T, heads, size), float64


@pytest.fixture
def run_of(make_run):
    def run(lengths=LENGTHS, name="smelt", **overrides):
        return make_run([QkvSimilarity()], lengths, name, **overrides)

    return run


def seen_by_hooks(model: nn.Module, tokens: np.ndarray) -> Stages:
    """What passes through the modules of attention in one forward over one segment, call by call."""
    seen: Stages = []
    hooks = []

    def note(stage, value, size=None):
        value = value[0] if isinstance(value, tuple) else value
        value = value.detach().double().numpy()
        if value.ndim == 4 and value.shape[1] != len(tokens):
            value = value.swapaxes(1, 2)
        seen[-1][stage] = value.reshape(len(tokens), -1, size or value.shape[-1]).copy()

    def before(module, args, kwargs):
        seen.append({})
        note("X", args[0] if args else kwargs["hidden_states"])

    for layer in (m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)):
        attention = layer.self_attn
        hooks.append(attention.register_forward_pre_hook(before, with_kwargs=True))
        hooks.append(attention.register_forward_hook(lambda m, a, out: note("O", out)))
        for stage in "QKV":
            part = getattr(attention, f"{stage.lower()}_proj")
            hooks.append(part.register_forward_hook(lambda m, a, out, s=stage: note(s, out, HEAD)))
        for stage in "QK":
            part = getattr(attention, f"{stage.lower()}_norm", nn.Identity())
            if not isinstance(part, nn.Identity):
                hooks.append(
                    part.register_forward_hook(
                        lambda m, a, out, s=stage: note(f"{s} normed", out, HEAD)
                    )
                )
        hooks.append(
            attention.o_proj.register_forward_pre_hook(lambda m, a: note("PV", a[0], HEAD))
        )
    with torch.no_grad():
        model(torch.from_numpy(tokens.astype(np.int64))[None])
    for hook in hooks:
        hook.remove()
    return seen


def slowly(first: np.ndarray, second: np.ndarray) -> dict[str, np.ndarray]:
    """The sums of one segment and stage by their definition; (T, heads, size) without the first token."""
    tokens, heads, _ = first.shape
    out = {name: np.zeros(4) for name in ("cosine_sum", "cosine_count")}
    out |= {f"head_{name}": np.zeros((4, heads)) for name in out}
    for compared in range(4 if tokens > 1 else tokens):
        a, b = first, second
        if compared % 2:
            a, b = a - a.mean(0), b - b.mean(0)
        if compared >= 2:
            b = b[[(t + tokens // 2) % tokens for t in range(tokens)]]
        for prefix, one, two in (
            ("", a.reshape(tokens, -1), b.reshape(tokens, -1)),
            ("head_", a, b),
        ):
            cosines = (one * two).sum(-1) / np.sqrt((one**2).sum(-1) * (two**2).sum(-1))
            out[f"{prefix}cosine_sum"][compared] = cosines.sum(0)
            out[f"{prefix}cosine_count"][compared] = tokens
    return out


def assert_like(
    run: xr.DataTree, seen_by_length: dict[int, Stages], executions, stages, start: int = 1
) -> None:
    """All arrays of a run, but for V random, against `slowly`; `atol` grows with the number of tokens."""
    data = run["qkv_similarity"].dataset
    looped = data["looped_layer"].values.tolist()
    visits = [*zip(data["visit_a"].values, data["visit_b"].values, strict=True)]
    compared = 0
    for row, length in enumerate(run["segments"]["tokens"].values):
        for later in executions:
            for earlier in executions:
                if earlier.layer != later.layer or earlier.visit >= later.visit:
                    continue
                place = looped.index(later.layer), visits.index((earlier.visit, later.visit))
                for stage in stages:
                    expected = slowly(
                        *(seen_by_length[length][e.index][stage][start:] for e in (earlier, later))
                    )
                    for name, value in expected.items():
                        array, dim = name.removeprefix("head_"), "stage"
                        if name.startswith("head_"):
                            if stage not in QUERY_STAGES + KEY_STAGES:
                                continue
                            dim = "query_stage" if stage in QUERY_STAGES else "key_stage"
                            array = name.replace("head", dim.replace("stage", "head"))
                        ours = data[array].sel({dim: stage}).values[row][place]
                        np.testing.assert_allclose(
                            ours, value, atol=1e-5 * length, err_msg=f"{name} of {stage}, {length}"
                        )
                        compared += 1
    pairs = sum(e.visit - 1 for e in executions)
    assert compared >= 2 * len(stages) * pairs * len(seen_by_length)


MODELS = {
    "smelt": {},
    "smelt, 3 visits": {"num_visits": 3},
    "smelt, no QK-norm": {"qk_norm": False},
    "smelt, one head": {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": HEAD},
    "dory": {},
    "hrm_text": {},
}


@pytest.mark.parametrize("variant", MODELS)
def test_like_slow_loops(run_of, make_heldout, variant):
    """Each segment alone, through plain hooks; the run has them in padded batches."""
    name = variant.split(",")[0]
    model, heldout = tiny(name, **MODELS[variant]), make_heldout(LENGTHS)
    seen = {n: seen_by_hooks(model, heldout.segment(i)) for i, n in enumerate(LENGTHS)}
    stages = set(seen[20][0])
    if name != "smelt":
        stages -= {"PV"}  # their output projection reads a gated one
    if name == "dory":
        stages -= {"O"}  # nor is what attention gives what it writes
    run = run_of(name=name, **MODELS[variant])
    ours = set(run["qkv_similarity"]["stage"].values.tolist())
    assert ours == stages | {"PV", RANDOM}
    assert_like(run, seen, executions_of(model.config), stages)


@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # every run has a file of its own
)
@given(data=st.data(), lengths=st.lists(st.integers(1, 80), min_size=1, max_size=4, unique=True))
def test_any_smelt_like_slow_loops(make_run, make_heldout, any_smelt, data, lengths):
    smelt = data.draw(any_smelt) | {"head_dim": HEAD}
    options = RunOptions(max_length=80, batch_tokens=600, sampled_tokens=80)
    run = make_run([QkvSimilarity()], lengths, options=options, **smelt)
    if smelt["num_visits"] == 1:
        assert len(run["qkv_similarity"].data_vars) == 0
        return
    model, heldout = tiny("smelt", **smelt), make_heldout(lengths)
    seen = {n: seen_by_hooks(model, heldout.segment(i)) for i, n in enumerate(lengths)}
    assert_like(run, seen, executions_of(model.config), set(seen[lengths[0]][0]))


def test_the_first_token_counts_where_it_is_asked_for(make_run, make_heldout):
    model, heldout = tiny("smelt", num_visits=3), make_heldout(LENGTHS)
    seen = {n: seen_by_hooks(model, heldout.segment(i)) for i, n in enumerate(LENGTHS)}
    probe = QkvSimilarity(include_first=True)
    run = make_run([probe], LENGTHS, num_visits=3)
    assert_like(run, seen, executions_of(model.config), set(seen[20][0]), start=0)
    assert run["qkv_similarity"].attrs["options"] == '{"include_first": true}'
    counts = run["qkv_similarity"]["cosine_count"].sel(compared="same token")
    assert counts.isel(stage=0, looped_layer=0, visit_pair=0).sum() == sum(LENGTHS)


def test_like_transformer_lens(run_of, make_heldout):
    heldout, model = make_heldout(LENGTHS), tiny("smelt")
    executions = executions_of(model.config)
    bridge = build_bridge_from_module(model, "SmeltForCausalLM", hf_config=model.config)
    hooks = {
        "X": "ln1.hook_out",
        "Q": "attn.hook_q",
        "K": "attn.hook_k",
        "V": "attn.hook_v",
        "PV": "attn.hook_z",
        "O": "hook_attn_out",
    }
    seen = {}
    for i, length in enumerate(LENGTHS):
        tokens = torch.from_numpy(heldout.segment(i).astype(np.int64))[None]
        with torch.no_grad():
            _, cache = bridge.run_with_cache(tokens)
        seen[length] = [
            {
                stage: cache[f"blocks.{n}.{hook}"][0]
                .double()
                .reshape(length, -1, 32 if stage in "XO" else HEAD)
                .numpy()
                for stage, hook in hooks.items()
            }
            for n in range(len(executions))
        ]
    assert_like(run_of(), seen, executions, hooks)


def test_identical_visits(run_of):
    """When the span writes nothing, the second visit sees what the first saw: every cosine is 1 up to O, which is 0."""
    summary = summarize(run_of(residual_scale=0.0), QkvSimilarity(), draws=20)
    for name in ("cosine", "cosine_centred", "query_head_cosine", "key_head_cosine_centred"):
        values = summary[name]
        if "stage" in values.dims:
            assert np.isnan(values.sel(stage="O")).all()  # a vector of length 0 has no cosine
            values = values.drop_sel(stage="O")
        np.testing.assert_allclose(values, 1, atol=1e-6)
    np.testing.assert_allclose(summary["v_minus_random"], 0, atol=1e-6)
    # The floor is that of tokens within a visit, not 1.
    assert (summary["floor"].drop_sel(stage="O") < 0.9).all()
    assert np.isnan(summary["floor"].sel(stage="O")).all()


def test_rotation_changes_no_cosine_at_one_position(run_of, make_heldout):
    """Before rotary embedding or after: queries and keys of two visits at one position are as alike; others are not."""
    model = tiny("smelt")
    tokens = torch.from_numpy(make_heldout((40,)).segment(0).astype(np.int64))[None]
    with torch.no_grad(), capture(model, ("attention", "q_norm", "k_norm")) as run:
        model(tokens)
    for site, name in (("q_norm", "query"), ("k_norm", "key")):
        plain = [Vectors.of(run[e, site]) for e in (1, 4)]
        rotated = [Vectors.of(getattr(run[e, "attention"], name).transpose(1, 2)) for e in (1, 4)]
        for one, other in zip(cosines([(*plain,)]), cosines([(*rotated,)]), strict=True):
            assert (one - other).abs().max() < 5e-7
        index = torch.arange(40).roll(7)[None]
        partner = Sample(positions=index, valid=index >= 0)
        one = cosines([(plain[0], plain[1].at(partner))])[0]
        other = cosines([(rotated[0], rotated[1].at(partner))])[0]
        assert (one - other).abs().max() > 0.1


def sample(rows: int, tokens: int) -> Sample:
    return Sample(
        positions=torch.arange(tokens).expand(rows, -1) + 1,
        valid=torch.ones(rows, tokens, dtype=torch.bool),
    )


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_unrelated_vectors_are_at_the_floor():
    """Cosines of random directions of size n: mean 0, sd 1 / sqrt(n); what all tokens share lifts cosine and floor alike."""
    first, second = normal(8, 64, 1, 64), normal(8, 64, 1, 64, seed=1)
    same, _, other, _ = _means(first, second)
    assert abs(same) < 0.02 and abs(other) < 0.02
    shared = 2 * normal(1, 1, 1, 64, seed=2)
    same, same_centred, other, other_centred = _means(first + shared, second + shared)
    assert same == pytest.approx(0.8, abs=0.02) and other == pytest.approx(0.8, abs=0.02)
    assert abs(same_centred) < 0.02 and abs(other_centred) < 0.02


def _means(first: torch.Tensor, second: torch.Tensor) -> list[float]:
    found = measure_stages({"X": first}, {"X": second}, sample(*first.shape[:2]))["X"]
    return (found["cosine_sum"].sum(0) / found["cosine_count"].sum(0)).tolist()


def test_repeated_key_heads_leave_their_mean_unchanged():
    """Grouped heads: what three query heads read is one head, once or three times."""
    first, second = normal(2, 9, 2, 5), normal(2, 9, 2, 5, seed=1)
    found, repeated = (
        measure_stages(*({"V": v.repeat_interleave(n, 2)} for v in (first, second)), sample(2, 9))[
            "V"
        ]
        for n in (1, 3)
    )
    for name in ("head_cosine_sum", "head_cosine_count"):
        torch.testing.assert_close(found[name].mean(2), repeated[name].mean(2))
    torch.testing.assert_close(found["cosine_sum"], repeated["cosine_sum"])


class Layer(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.attention = nn.Module()
        self.attention.v_proj = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        self.attention.v_proj.weight = nn.Parameter(weight)


def test_random_values_have_the_spectrum_of_the_layer():
    layer = Layer(normal(6, 20) * torch.logspace(-3, 1, 6)[:, None])
    spectrum = torch.linalg.svdvals(layer.attention.v_proj.weight.detach())
    drawn = random_values(layer, seed=3)
    assert drawn.shape == (4, 20, 6)
    for one in drawn:
        torch.testing.assert_close(torch.linalg.svdvals(one), spectrum, rtol=1e-5, atol=1e-7)
    assert len({tuple(one.flatten().tolist()) for one in drawn}) == 4
    assert torch.equal(drawn, random_values(layer, seed=3))
    again = Layer(layer.attention.v_proj.weight.detach().clone())
    assert torch.equal(drawn, random_values(again, seed=3))  # of the seed, not of the run
    other = Layer(layer.attention.v_proj.weight.detach().clone())
    assert not torch.equal(drawn, random_values(other, seed=4))
    with torch.no_grad():
        layer.attention.v_proj.weight.mul_(2)  # as training does
    torch.testing.assert_close(random_values(layer, seed=3), 2 * drawn)


def test_random_values_of_weights_that_cannot_be_read():
    assert random_values(nn.Linear(3, 3), 0) is None
    assert random_values(Layer(normal(2, 3)).to("meta"), 0) is None
    wide = random_values(Layer(normal(12, 5)), 0)  # more rows than columns
    assert wide.shape == (4, 5, 5)


@pytest.mark.parametrize("shape", [(32, 128), (16, 16)])
def test_left_singular_vectors_change_no_cosine(shape):
    """X R diag(s) U^T against X R diag(s): U is left out of the random projection for this."""
    projection = random_values(Layer(normal(*shape)), 0)[0]
    rotation = torch.linalg.qr(normal(shape[0], shape[0], seed=5)).Q[:, : projection.shape[1]]
    first, second = (normal(1, 7, shape[1], seed=s) @ projection for s in (1, 2))
    plain, rotated = (
        cosines([(Vectors.of((first @ r)[:, :, None]), Vectors.of((second @ r)[:, :, None]))])[1]
        for r in (torch.eye(len(rotation.T)), rotation.T)
    )
    torch.testing.assert_close(plain, rotated, atol=1e-5, rtol=0)


def test_random_weights_are_as_their_random_null():
    """A Gaussian W_V has Haar singular vectors: V lies where V random does."""
    first = normal(16, 64, 256)
    second = first + normal(16, 64, 256, seed=1)
    weight = normal(64, 256, seed=2)
    null = random_values(Layer(weight), 0)
    null_cosine = np.mean(
        [_means((first @ p)[:, :, None], (second @ p)[:, :, None])[0] for p in null]
    )
    cosine = _means((first @ weight.T)[:, :, None], (second @ weight.T)[:, :, None])[0]
    assert cosine == pytest.approx(null_cosine, abs=0.02)
    # Values that read only what the visits do not share lie far below it.
    second[..., :64] = normal(16, 64, 64, seed=3)
    narrow = torch.eye(64, 256)
    null_cosine = np.mean(
        [
            _means((first @ p)[:, :, None], (second @ p)[:, :, None])[0]
            for p in random_values(Layer(narrow), 0)
        ]
    )
    cosine = _means((first @ narrow.T)[:, :, None], (second @ narrow.T)[:, :, None])[0]
    assert abs(cosine) < 0.02 and null_cosine > 0.4


def test_v_random_of_a_run(run_of, make_heldout):
    """From what both visits read, through the layer's own drawn projections, like a plain loop."""
    heldout, model, run = make_heldout(LENGTHS), tiny("smelt"), run_of()
    data = run["qkv_similarity"].dataset
    tokens = run["segments"]["tokens"].values.tolist()
    for i, length in enumerate(LENGTHS):
        seen = seen_by_hooks(model, heldout.segment(i))
        for place, layer in enumerate((1, 2, 3)):
            draws = random_values(model.model.layers[layer], layer).double().numpy()
            first, second = (seen[e]["X"][1:, 0] for e in (layer, layer + 3))
            expected = [slowly((first @ p)[:, None], (second @ p)[:, None]) for p in draws]
            ours = data["cosine_sum"].sel(stage=RANDOM).values[tokens.index(length), place, 0]
            mean = np.mean([e["cosine_sum"] for e in expected], axis=0)
            np.testing.assert_allclose(ours, mean, atol=1e-5 * length)


def test_averages_like_slow_ones(run_of):
    run = run_of()
    summary, data = summarize(run, QkvSimilarity(), draws=20), run["qkv_similarity"].dataset
    up, down = (data[f"cosine_{s}"].values.astype(np.float64).sum(0) for s in ("sum", "count"))
    stages = data["stage"].values.tolist()
    for i, name in enumerate(("cosine", "cosine_centred", "floor", "floor_centred")):
        expected = (up / down)[..., i]  # (layer, pair, stage)
        ours = summary[name].transpose("looped_layer", "visit_pair", "stage")
        np.testing.assert_allclose(ours, expected)
        overall = summary[f"{name}_overall"].transpose("visit_pair", "stage")
        np.testing.assert_allclose(overall, expected.mean(0))
        assert (summary[f"{name}_overall_low"] <= summary[f"{name}_overall_high"]).all()
        for kind in ("query", "key"):
            up_, down_ = (
                data[f"{kind}_head_cosine_{s}"].values.astype(np.float64).sum(0)
                for s in ("sum", "count")
            )
            ours = summary[f"{kind}_head_{name}"].transpose("looped_layer", "visit_pair", ...)
            np.testing.assert_allclose(ours, (up_ / down_)[:, :, :, i])
    difference = (up / down)[..., stages.index("V"), 0] - (up / down)[..., stages.index(RANDOM), 0]
    np.testing.assert_allclose(summary["v_minus_random"], difference, atol=1e-9)
    np.testing.assert_allclose(summary["v_minus_random_overall"], difference.mean(0), atol=1e-9)
    assert "from a random projection" in QkvSimilarity().sentence(summary)


def test_a_model_without_qk_norm_has_no_normed_stages(run_of):
    run = run_of(qk_norm=False)
    data = run["qkv_similarity"].dataset
    assert data["stage"].values.tolist() == ["X", "Q", "K", "V", RANDOM, "PV", "O"]
    assert data["query_stage"].values.tolist() == ["Q", "PV"]
    assert data["key_stage"].values.tolist() == ["K", "V"]


def test_a_model_whose_projections_are_not_seen(run_of):
    """Inkling's pass convolutions: X, PV and O are left, O where its write is known."""
    run = run_of(name="inkling2_loop")
    summary = summarize(run, QkvSimilarity(), draws=20)
    assert summary["stage"].values.tolist() == ["X", "PV", "O"]
    assert not {n for n in summary.data_vars if n.startswith(("key_head", "v_minus"))}
    known = np.isfinite(summary["cosine"].sel(stage="O").values).all(-1)
    assert dict(zip(summary["looped_layer"].values.tolist(), known, strict=True)) == {
        2: False,
        3: True,
    }
    assert np.isfinite(summary["cosine"].sel(stage=["X", "PV"])).all()
    assert "does not show" in QkvSimilarity().sentence(summary)


@pytest.mark.parametrize("name", ["baseline", "llama", "gpt2"])
def test_a_model_with_one_visit_has_nothing_to_compare(run_of, name):
    run = run_of(name=name)
    summary = summarize(run, QkvSimilarity(), draws=20)
    assert len(summary.data_vars) == 0
    assert "No layer is visited twice" in QkvSimilarity().sentence(summary)


@pytest.mark.parametrize("lengths", [(1, 1), (2, 2, 1)])
def test_segments_without_tokens_to_compare(run_of, lengths):
    """One token: nothing. Two: one that counts, which has a cosine, but no mean and no other."""
    summary = summarize(run_of(lengths), QkvSimilarity(), draws=0)
    assert np.isfinite(summary["cosine"]).all() == (max(lengths) > 1)
    for name in ("cosine_centred", "floor", "floor_centred", "query_head_floor"):
        assert np.isnan(summary[name]).all()
    QkvSimilarity().sentence(summary)


def test_batches_and_their_order_change_nothing(make_run):
    lengths = (40, 33, 70, 2, 1, 90)
    runs = [
        make_run([QkvSimilarity()], lengths, options=RunOptions(max_length=90, batch_tokens=n))
        for n in (90, 6 * 90)
    ]
    rows = [np.argsort(run["segments"]["tokens"].values) for run in runs]
    for name, array in runs[0]["qkv_similarity"].data_vars.items():
        if "segment" in array.dims:
            other = runs[1]["qkv_similarity"][name].values[rows[1]]
            np.testing.assert_allclose(array.values[rows[0]], other, atol=1e-4, err_msg=name)


def test_bfloat16(run_of):
    """The same model in 16 bits: its own rounding, no more; visits that are identical stay so to the last digits."""
    exact, rounded = (
        summarize(run_of(dtype=dtype), QkvSimilarity(), draws=0) for dtype in (None, torch.bfloat16)
    )
    for name in ("cosine", "floor", "cosine_centred"):
        assert np.isfinite(rounded[name]).all()
        assert np.abs(exact[name] - rounded[name]).max() < 0.02, name
    same = summarize(run_of(dtype=torch.bfloat16, residual_scale=0.0), QkvSimilarity(), draws=0)
    np.testing.assert_allclose(same["cosine"].drop_sel(stage="O"), 1, atol=1e-5)


def test_progress_shows_what_the_summary_will(make_run, make_checkpoint, make_heldout):
    run, probe = make_run([QkvSimilarity()], (20, 10)), QkvSimilarity()
    shape = model_shape(make_checkpoint("smelt"), make_heldout((20, 10)), 20)
    arrays = {n: a.values for n, a in run["qkv_similarity"].data_vars.items()}
    found = probe.progress(arrays, shape)
    assert set(found) == {"cosine of X", "cosine of V", "cosine of O"}
    up, down = found["cosine of V"]
    cosine = summarize(run, probe, draws=0)["cosine"]
    assert up / down == pytest.approx(cosine.sel(stage="V").values.mean(), rel=1e-5)
    baseline = model_shape(make_checkpoint("baseline"), make_heldout((20, 10)), 20)
    assert probe.progress({}, baseline) == {}
