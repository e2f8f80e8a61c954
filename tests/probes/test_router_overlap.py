"""router-overlap against loops over the sets that the experts really got, exact values, and simulated routers."""

import re
import zlib
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
import transformers
import xarray as xr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smeltscope.activations import Routing, open_run
from smeltscope.errors import SmeltscopeError
from smeltscope.model.executions import label
from smeltscope.probes import (
    Batch,
    ModelShape,
    RunOptions,
    empty_arrays,
    empty_tables,
    run_probes,
    summarize,
)
from smeltscope.probes.router_overlap import (
    Folds,
    RouterOverlap,
    half_further_on,
    matched_overlap,
    measure_routing,
    previous_of_same_id,
)
from smeltscope.probes.runner import dimensions_of
from smeltscope.probes.sampling import Sample
from smeltscope.tasks import HeldOut

PAGE = Path(__file__).parents[2] / "docs" / "router-overlap.md"
PROBE = RouterOverlap()
LENGTHS = [40, 33, 21, 12, 3, 2, 1]
# E, k: mean, sd, P(0), P(>= 2), mean Jaccard
CHANCE = {
    (16, 8): (4.0, 1.0328, 0.0001, 0.99495, 0.34343),
    (96, 8): (0.6667, 0.7524, 0.4847, 0.13226, 0.04613),
    (288, 8): (0.2222, 0.4591, 0.7960, 0.01743, 0.01500),
    (504, 8): (0.1270, 0.3510, 0.8791, 0.00589, 0.00852),
    (128, 8): (0.5000, 0.6655, 0.5877, 0.07942, 0.03427),
    (8, 2): (0.5000, 0.5669, 0.5357, 0.03571, 0.17857),
}


# What the models' experts get, seen by hooks of our own


def deepseek() -> torch.nn.Module:
    """A DeepSeek-V3 whose selection is biased and grouped, its first layer dense."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16}
    sizes |= {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8}
    config = transformers.DeepseekV3Config(
        **sizes, vocab_size=256, v_head_dim=12, num_hidden_layers=3, first_k_dense_replace=1,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=16, num_experts_per_tok=4,
        n_group=4, topk_group=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return biased(model.eval())


def biased(model: torch.nn.Module) -> torch.nn.Module:
    """Its routers select by more than their logits, with random biases of sd .3."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(
                0.3 * torch.randn(buffer.shape, generator=torch.Generator().manual_seed(0))
            )
    return model


def made(make_checkpoint, name: str, **overrides):
    if name == "deepseek_v3":
        return replace(make_checkpoint("llama"), model=deepseek(), name=name, digest=name)
    checkpoint = make_checkpoint(name, **overrides)
    biased(checkpoint.model)
    return checkpoint


def given_to_experts(model: torch.nn.Module, ids: np.ndarray) -> list[dict[str, np.ndarray]]:
    """For one segment, what the experts of each MoE execution are called with, in order, and the router's logits."""
    calls, logits, hooks = [], [], []

    def experts_hook(module, args, kwargs) -> None:
        _, experts, weights = (*args, *kwargs.values())
        calls.append({"experts": experts.numpy(), "weights": weights.double().numpy()})

    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("Experts"):
            hooks.append(module.register_forward_pre_hook(experts_hook, with_kwargs=True))
        elif kind.lower().endswith("router"):
            hooks.append(
                module.register_forward_hook(lambda m, i, o: logits.append(o[0].double().numpy()))
            )
    with torch.no_grad():
        model(torch.from_numpy(ids)[None])
    for hook in hooks:
        hook.remove()
    return [call | {"logits": each} for call, each in zip(calls, logits, strict=True)]


def slowly(ids: np.ndarray, routed: dict[int, dict], executions, looped) -> dict[str, dict]:
    """Every number of one segment by its definition: {name: {place: value}}, places without `segment`."""
    counted = range(1, len(ids))
    previous = {
        t: max((u for u in counted if u < t and ids[u] == ids[t]), default=None) for t in counted
    }
    repeated = [t for t in counted if previous[t] is not None]
    found: dict[str, dict] = {"repeated_tokens": {(): len(repeated)}}

    def put(name: str, place: tuple, value: float) -> None:
        found.setdefault(name, {})[place] = value

    sets = {e: [set(row) for row in of["experts"].tolist()] for e, of in routed.items()}

    def chosen(e: int, t: int) -> set[int]:
        return sets[e][t]

    for e, of in routed.items():
        entropies = scipy.stats.entropy(scipy.special.softmax(of["logits"], axis=1), axis=1)
        near, not_top = 0, 0
        for t in counted:
            logits = of["logits"][t].tolist()
            others = [x for i, x in enumerate(logits) if i not in chosen(e, t)]
            gap = min(logits[i] for i in chosen(e, t)) - max(others, default=-np.inf)
            near, not_top = near + (abs(gap) <= 1e-5), not_top + (gap < -1e-5)
        put("tokens", (e,), len(counted))
        put("entropy_sum", (e,), entropies[1:].sum())
        put("near_ties", (e,), near)
        put("not_top_logits", (e,), not_top)
        put("lexical_sum", (e,), sum(len(chosen(e, t) & chosen(e, previous[t])) for t in repeated))
        for i in range(of["logits"].shape[1]):
            put("load", (e, i), sum(i in chosen(e, t) for t in counted))
    visits = sorted({e.visit for e in executions})
    for p, (a, b) in enumerate(combinations(visits, 2)):
        for q, layer in enumerate(looped):
            at = {e.visit: e.index for e in executions if e.layer == layer}
            if b not in at or at[b] not in routed:
                continue
            one, two = at[a], at[b]
            k = routed[one]["experts"].shape[1]
            own = {t: chosen(one, t) & chosen(two, t) for t in counted}
            for o in range(k + 1):
                put("overlap_count", (q, p, o), sum(len(own[t]) == o for t in counted))
            n = len(counted)
            partner = {t: 1 + (t - 1 + n // 2) % n for t in counted}
            others = [len(chosen(one, t) & chosen(two, partner[t])) for t in counted]
            put("other_token_sum", (q, p), sum(others) if n > 1 else np.nan)
            last = [len(chosen(one, previous[t]) & chosen(two, t)) for t in repeated]
            put("previous_sum", (q, p), sum(last))
            put("repeated_overlap_sum", (q, p), sum(len(own[t]) for t in repeated))
            for name, e in (("earlier", one), ("later", two)):
                experts, weights = routed[e]["experts"], routed[e]["weights"]
                share = [
                    sum(w for i, w in zip(experts[t], weights[t], strict=True) if i in own[t])
                    / sum(weights[t])
                    for t in counted
                ]
                put(f"shared_weight_{name}_sum", (q, p), sum(share))
            for i in range(routed[one]["logits"].shape[1]):
                there = [(i in chosen(one, t), i in chosen(two, t)) for t in counted]
                put("core", (q, p, i), there.count((True, True)))
                put("swapped_in", (q, p, i), there.count((False, True)))
                put("swapped_out", (q, p, i), there.count((True, False)))
    return found


MODELS = {
    "smelt": {},
    "smelt, 3 visits": {"num_visits": 3},
    "smelt, every expert": {"num_experts_per_tok": 8},
    "inkling2_loop": {},
    "deepseek_v3": {},
    "mixtral": {},
    "olmoe": {},
    "qwen3_moe": {},
    "gpt_oss": {},
}


def assert_like(run: xr.DataTree, model: torch.nn.Module, heldout: HeldOut) -> None:
    """All arrays of a run, segments of different lengths, against `slowly` on each segment alone."""
    data, segments = run["router_overlap"].dataset, run["segments"].dataset
    lengths = heldout.lengths.tolist()
    layers, visits = data["layer"].values.tolist(), data["visit"].values.tolist()
    executions = label(layers)
    assert [e.visit for e in executions] == visits
    looped = list(dict.fromkeys(layer for layer, v in zip(layers, visits, strict=True) if v == 2))
    with_router = [
        e
        for e, name in enumerate(data["module"].values)
        if hasattr(model.get_submodule(name).mlp, "experts")
    ]
    tables = {n: np.zeros(a.shape) for n, a in data.data_vars.items() if "fold" in a.dims}
    seen = set()
    for row, length in enumerate(segments["tokens"].values):
        ids = heldout.segment(lengths.index(length)).astype(np.int64)
        routed = dict(zip(with_router, given_to_experts(model, ids), strict=True))
        expected = slowly(ids, routed, executions, looped)
        seen |= {name for name, values in expected.items() if values}
        category = data["table_category"].values.tolist().index(segments["category"].values[row])
        fold = zlib.crc32(segments["document_id"].values[row].encode()) % 8
        for name, values in expected.items():
            if name in tables:
                for place, value in values.items():
                    tables[name][(category, fold, *place)] += value
                continue
            whole = np.full(data[name].shape[1:], np.nan)
            for place, value in values.items():
                whole[place] = value
            np.testing.assert_allclose(
                data[name].values[row], whole, rtol=1e-5, atol=2e-5, err_msg=name
            )
    assert seen == set(data.data_vars)
    for name, table in tables.items():
        assert np.array_equal(data[name].values, table), name
    assert np.isfinite(data["tokens"].values[0]).sum() == len(with_router)


def repeating(heldout: HeldOut) -> HeldOut:
    """With few different ids, so that they occur again."""
    return replace(heldout, tokens=heldout.tokens % 23)


@pytest.mark.parametrize("variant", MODELS)
def test_like_slow_sets(variant, make_checkpoint, make_heldout, tmp_path):
    """Ragged segments in batches, against each segment alone: sets, weights, nulls, tables."""
    checkpoint = made(make_checkpoint, variant.split(",")[0], **MODELS[variant])
    heldout = repeating(make_heldout(LENGTHS))
    options = RunOptions(max_length=64, batch_tokens=400)
    run = open_run(run_probes(checkpoint, heldout, [PROBE], tmp_path / "run.h5", options))
    assert_like(run, checkpoint.model, heldout)
    not_top = np.nansum(run["router_overlap"]["not_top_logits"].values)
    assert (not_top > 0) == (variant in ("inkling2_loop", "deepseek_v3"))
    text = PROBE.sentence(summarize(run, PROBE, draws=20))
    assert ("the experts are not the top 2 logits" in text) == (variant == "inkling2_loop")


@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # every run has a file of its own
)
@given(
    data=st.data(),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4, unique=True),
    experts=st.sampled_from([(8, 2), (8, 8), (5, 3), (3, 1)]),
)
def test_any_smelt_like_slow_sets(
    make_checkpoint, make_heldout, tmp_path, any_smelt, data, lengths, experts
):
    sizes = {"num_experts": experts[0], "num_experts_per_tok": experts[1]}
    checkpoint = make_checkpoint("smelt", **data.draw(any_smelt), **sizes)
    heldout = repeating(make_heldout(lengths))
    options = RunOptions(max_length=40, batch_tokens=200)
    out = tmp_path / "run.h5"
    run = open_run(run_probes(checkpoint, heldout, [PROBE], out, options, force=True))
    assert_like(run, checkpoint.model, heldout)


# Exact values


@pytest.mark.parametrize("sizes", CHANCE, ids=str)
def test_chance_levels(sizes):
    """The table of two independent uniform sets, and simulated ones."""
    experts, k = sizes
    run = synthetic([0, 0], *independent([np.ones(experts)] * 2, k, rows=20, tokens=101))
    summary = summarize(run, PROBE, draws=50)
    mean, sd, none, two, jaccard = CHANCE[sizes]
    exact = [float(summary[f"chance{n}"]) for n in ("", "_sd", "_no_overlap", "_two_or_more")]
    np.testing.assert_allclose(exact, (mean, sd, none, two), atol=5.1e-5)
    assert float(summary["chance_jaccard"]) == pytest.approx(jaccard, abs=5.1e-6)
    assert float(summary["chance_weight"]) == pytest.approx(k / experts)
    assert summary["chance_share"].values.sum() == pytest.approx(1)
    found = {n: float(summary[n].squeeze()) for n in ("overlap", "jaccard", "no_overlap")}
    error = sd / np.sqrt(2000)
    assert abs(found["overlap"] - mean) < 4 * error
    assert abs(found["jaccard"] - jaccard) < 4 * error / k
    assert abs(found["no_overlap"] - none) < 4 * np.sqrt(none * (1 - none) / 2000) + 1e-3
    np.testing.assert_allclose(
        summary["overlap_share"].values.squeeze(), summary["chance_share"], atol=0.05
    )
    for name in ("marginal_overlap", "other_token_overlap"):
        assert abs(float(summary[name].squeeze()) - mean) < 5 * error, name
    for name in ("shared_weight_earlier", "shared_weight_later"):
        assert abs(float(summary[name].squeeze()) - k / experts) < 0.02
    np.testing.assert_allclose(summary["load"].values.sum(1), k, rtol=1e-12)


def test_sets_drawn_by_use_have_the_marginal_overlap():
    """A few experts are popular at both visits: more than k^2 / E is shared though sets know nothing of each other."""
    popularity = 1.0 / np.arange(1, 17)
    run = synthetic([0, 0], *independent([popularity] * 2, 4, rows=40, tokens=101))
    summary = summarize(run, PROBE)
    value, null = (float(summary[n].squeeze()) for n in ("overlap", "marginal_overlap"))
    assert null > 1.3 * float(summary["chance"])
    assert value == pytest.approx(null, abs=0.06)
    use = summary["load"].values
    assert null == pytest.approx((use[0] * use[1]).sum(), rel=1e-12)
    assert summary["lexical_marginal"].values == pytest.approx((use**2).sum(1), rel=1e-12)
    assert float(summary["marginal_overlap_low"].squeeze()) < null


def test_identical_visits_share_everything(make_checkpoint, make_heldout, tmp_path):
    checkpoint = make_checkpoint("smelt")
    for layer in checkpoint.model.model.layers[1:4]:  # what the span writes is zero
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.experts.down_proj.data.zero_()
    options = RunOptions(max_length=64, batch_tokens=400)
    run = open_run(
        run_probes(checkpoint, make_heldout(LENGTHS), [PROBE], tmp_path / "run.h5", options)
    )
    summary = summarize(run, PROBE, draws=50)
    for name, value in {
        "overlap": 2, "jaccard": 1, "no_overlap": 0, "two_or_more": 1, "repeated_overlap": 2,
        "swapped_in": 0, "swapped_out": 0,
    }.items():  # fmt: skip
        for end in ("", "_low", "_high"):
            assert (summary[name + end] == value).all(), name
    for name in ("shared_weight_earlier", "shared_weight_later"):
        np.testing.assert_allclose(summary[name], 1, atol=1e-6)
    np.testing.assert_array_equal(summary["core"].values[:, 0], summary["load"].values[1:4])
    np.testing.assert_array_equal(
        summary["previous_overlap"].values[:, 0], summary["lexical_overlap"].values[1:4]
    )


def test_every_expert_chosen(make_run):
    summary = summarize(make_run([PROBE], num_experts_per_tok=8), PROBE, draws=20)
    for name in ("overlap", "marginal_overlap", "other_token_overlap", "previous_overlap"):
        np.testing.assert_allclose(summary[name], 8, rtol=1e-12, err_msg=name)
    assert (summary["near_ties"] == 0).all()
    assert float(summary["chance"]) == 8 and float(summary["chance_jaccard"]) == 1


# Routers made up


def shape_of(layers: list[int], experts: int, k: int, categories=("a", "b")) -> ModelShape:
    executions = label(layers)
    return ModelShape(
        executions=executions, layers=[torch.nn.Identity()] * len(executions),
        modules=[f"layer {e.layer}" for e in executions],
        sites={"router": [e.index for e in executions]}, heads=0, kv_heads=0, experts=experts,
        experts_per_token=k, max_length=512, categories=categories, regions=(),
    )  # fmt: skip


def batch_of(shape: ModelShape, ids: torch.Tensor, lengths: torch.Tensor) -> Batch:
    rows = np.arange(len(ids))
    none = Sample(positions=torch.zeros(len(ids), 1).long(), valid=torch.zeros(len(ids), 1).bool())
    return Batch(
        shape=shape, input_ids=ids, lengths=lengths, queries=none, tokens=none, regions=None,
        category=rows % len(shape.categories), fold=rows // len(shape.categories) % 8,
    )  # fmt: skip


def observed(shape: ModelShape, batch: Batch, routings: list[Routing]) -> dict[str, np.ndarray]:
    arrays = empty_arrays(PROBE, shape, len(batch.input_ids)) | empty_tables(PROBE, shape)
    earlier: dict = {}
    for execution, routing in zip(shape.executions, routings, strict=True):
        kept = PROBE.observe(arrays, batch, execution, {"router": routing}, earlier)
        assert (kept is None) == shape.is_last_visit(execution)
        earlier[execution.index] = kept
    return arrays


def synthetic(layers: list[int], ids, lengths, routings, categories=("a", "b")) -> xr.DataTree:
    """A run of a made-up router, one document for each segment."""
    experts, k = routings[0].logits.shape[-1], routings[0].experts.shape[-1]
    shape = shape_of(layers, experts, k, categories)
    batch = batch_of(shape, ids, lengths)
    arrays = observed(shape, batch, routings)
    variables = {**PROBE.variables(shape), **PROBE.tables(shape)}
    visits = np.array(shape.visit_pairs).reshape(-1, 2)
    labels = {n: (n, v) for n, v in dimensions_of([PROBE], shape).items()}
    labels |= {
        "layer": ("execution", [e.layer for e in shape.executions]),
        "visit": ("execution", [e.visit for e in shape.executions]),
        "visit_a": ("visit_pair", visits[:, 0]),
        "visit_b": ("visit_pair", visits[:, 1]),
    }
    data = xr.Dataset({n: (variables[n].dims, a) for n, a in arrays.items()}, coords=labels)
    rows = np.arange(len(ids))
    segments = {
        "document": rows, "category": np.array(categories)[batch.category], "tokens": lengths,
    }  # fmt: skip
    root = xr.Dataset(coords=labels, attrs={"experts": f'{{"all": {experts}, "per_token": {k}}}'})
    tree = xr.DataTree.from_dict({"/": root, "/router_overlap": data})
    tree["segments"] = xr.DataTree(
        xr.Dataset({n: ("segment", np.asarray(v)) for n, v in segments.items()})
    )
    return tree


def choosing(logits: torch.Tensor, k: int) -> Routing:
    weights, experts = logits.softmax(-1).topk(k)
    return Routing(logits=logits, experts=experts, weights=weights)


def independent(popularities: list[np.ndarray], k: int, rows: int, tokens: int):
    """Token ids, lengths, and routers that choose without looking at the token: Gumbel noise over log popularity."""
    rng = np.random.default_rng(0)
    shape = (rows, tokens, len(popularities[0]))
    routings = [
        choosing(torch.from_numpy(np.log(p) + rng.gumbel(size=shape)).float(), k)
        for p in popularities
    ]
    ids = torch.from_numpy(rng.integers(1, 50, shape[:2]))
    return ids, torch.full((rows,), tokens), routings


def test_layers_with_different_numbers_of_visits():
    """Layer 0 runs twice and layer 1 three times: pairs that a layer lacks have no value, and are in no mean."""
    layers = [0, 1, 0, 1, 1, 2]
    ids, lengths, routings = independent([np.ones(8)] * len(layers), 2, rows=12, tokens=30)
    summary = summarize(synthetic(layers, ids, lengths, routings), PROBE, draws=50)
    has = np.array([[True, False, False], [True, True, True]])
    assert summary["looped_layer"].values.tolist() == [0, 1]
    for name, array in summary.data_vars.items():
        if array.dims[:2] == ("looped_layer", "visit_pair"):
            present = np.isfinite(array.values).reshape(2, 3, -1).all(-1)
            assert (present == has).all(), name
    of = {e: routing.experts for e, routing in enumerate(routings)}
    for place, (one, two) in {
        (0, 0): (0, 2),
        (1, 0): (1, 3),
        (1, 1): (1, 4),
        (1, 2): (3, 4),
    }.items():
        o = (of[one][..., None] == of[two][..., None, :]).sum((-2, -1))[:, 1:].double().mean()
        assert float(summary["overlap"].values[place]) == pytest.approx(float(o), rel=1e-6)
    assert float(summary["overlap_overall"]) == pytest.approx(
        np.nanmean(summary["overlap"].values), rel=1e-12
    )
    assert "Mean over 2 looped layers" in PROBE.sentence(summary)
    assert "1-3: " in PROBE.sentence(summary)


def test_near_ties_and_other_selections():
    """Gaps of the logits of 0, 1e-6, 1e-4; and a set that is not the top of the logits."""
    logits = torch.tensor(
        [[0.0, 0, 0], [2, 1, 1], [2, 1, 1 - 1e-6], [2, 1, 1 - 1e-4], [2, 1, 0.5], [3, 2, 1]]
    )[None]
    experts = torch.tensor([[0, 1], [0, 1], [0, 1], [0, 1], [0, 2], [1, 0]])[None]
    routing = Routing(logits=logits, experts=experts, weights=torch.ones(1, 6, 2))
    counted = torch.tensor([[False, True, True, True, True, True]])
    found = measure_routing(routing, counted, torch.full((1, 6), -1))
    assert found["near_ties"].item() == 2
    assert found["not_top_logits"].item() == 1
    run = synthetic([0], torch.arange(1, 7)[None], torch.tensor([6]), [routing], categories=("a",))
    summary = summarize(run, PROBE, draws=10)
    assert np.isnan(summary["near_ties"]).all()
    assert summary["not_top_logits"].values == pytest.approx([0.2])


def test_uniform_entropy():
    routing = choosing(torch.zeros(1, 9, 32), 4)
    found = measure_routing(routing, torch.ones(1, 9).bool(), torch.full((1, 9), -1))
    assert found["entropy_sum"].item() == pytest.approx(9 * np.log(32), rel=1e-6)
    assert found["near_ties"].item() == 9
    sure = torch.zeros(1, 9, 32)
    sure[..., 3] = 200
    found = measure_routing(choosing(sure, 4), torch.ones(1, 9).bool(), torch.full((1, 9), -1))
    assert found["entropy_sum"].item() == 0


def test_logits_that_are_no_numbers_are_refused():
    ids, lengths, routings = independent([np.ones(8)] * 2, 2, rows=2, tokens=5)
    routings[1].logits[1, 3, 2] = torch.nan
    with pytest.raises(SmeltscopeError, match="layer 0 at visit 2 are not finite"):
        synthetic([0, 0], ids, lengths, routings)
    lengths[1] = 3  # a padded token does not matter
    synthetic([0, 0], ids, lengths, routings)


def test_layers_of_different_sizes_are_refused():
    ids, lengths, (routing,) = independent([np.ones(8)], 2, rows=2, tokens=5)
    _, _, (other,) = independent([np.ones(6)], 2, rows=2, tokens=5)
    with pytest.raises(SmeltscopeError, match="Layer 1 chooses 2 of 6 experts"):
        synthetic([0, 1], ids, lengths, [routing, other])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=4), st.integers(1, 5), st.integers(0, 10**6)
)
def test_which_token_is_compared_with_which(lengths, vocabulary, seed):
    rng = np.random.default_rng(seed)
    longest = max(*lengths, 1)
    ids = torch.from_numpy(rng.integers(0, vocabulary, (len(lengths), longest)))
    position = torch.arange(longest)
    counted = (position > 0) & (position < torch.tensor(lengths)[:, None])
    previous, partner = previous_of_same_id(ids, counted), half_further_on(counted)
    assert partner.min() >= 0 and partner.max() < longest
    for row, length in enumerate(lengths):
        for t in range(longest):
            before = [u for u in range(1, t) if ids[row, u] == ids[row, t]]
            expected = before[-1] if before and t < length else -1
            assert previous[row, t] == expected
            if 1 <= t < length:
                n = length - 1
                assert partner[row, t] == 1 + (t - 1 + n // 2) % n
                assert (partner[row, t] != t) == (n > 1)


# Averages and intervals


def test_summary_like_slow_averages(make_run):
    run = make_run([PROBE], lengths=(90, 70, 64, 33, 17, 6, 3, 2), num_visits=3)
    summary, data = summarize(run, PROBE, draws=100), run["router_overlap"].dataset
    values = {name: array.values.astype(np.float64) for name, array in data.data_vars.items()}
    category = run["segments"]["category"].values
    counts = values["overlap_count"]  # (segment, layer, pair, o)
    for q in range(3):
        for p in range(3):
            n = counts[:, q, p].sum()
            mean = sum(o * counts[:, q, p, o].sum() for o in range(3)) / n
            assert float(summary["overlap"][q, p]) == pytest.approx(mean, rel=1e-12)
            jaccard = sum(o / (4 - o) * counts[:, q, p, o].sum() for o in range(3)) / n
            assert float(summary["jaccard"][q, p]) == pytest.approx(jaccard, rel=1e-12)
            for name in ("other_token", "previous", "repeated_overlap", "shared_weight_later"):
                up = np.nansum(values[f"{name}_sum"][:, q, p])
                down = (
                    values["repeated_tokens"].sum()
                    if name in ("previous", "repeated_overlap")
                    else n
                )
                if name == "other_token":
                    down -= 1  # the segment of two tokens has one counted token, without another
                shown = name if "overlap" in name or "weight" in name else f"{name}_overlap"
                assert float(summary[shown][q, p]) == pytest.approx(up / down, rel=1e-6), name
            for c, name in enumerate("ab"):
                of = counts[category == name, q, p]
                mean = (of.sum(0) @ np.arange(3)) / of.sum()
                assert float(summary["overlap_by_category"][c, q, p]) == pytest.approx(
                    mean, rel=1e-12
                )
                one, two = [(1, 4), (1, 7), (4, 7)][p]
                load = values["load"][c].sum(0)[[one + q, two + q]]  # (2, expert)
                use = load / (load.sum(1, keepdims=True) / 2)
                null = float(summary["marginal_overlap_by_category"][c, q, p])
                assert null == pytest.approx((use[0] * use[1]).sum(), rel=1e-12)
    core, swapped_in, swapped_out = (values[n] for n in ("core", "swapped_in", "swapped_out"))
    for p, (one, two) in enumerate([(1, 4), (1, 7), (4, 7)]):
        for q in range(3):
            assert (core + swapped_out)[:, :, q, p].tolist() == values["load"][
                :, :, one + q
            ].tolist()
            assert (core + swapped_in)[:, :, q, p].tolist() == values["load"][
                :, :, two + q
            ].tolist()
    shared = summary["core"].sum("expert")
    np.testing.assert_allclose(shared, summary["overlap"], rtol=1e-12)
    assert "overlap_low_all" in summary and (summary["overlap_low_all"] <= summary["overlap"]).all()


@pytest.mark.parametrize(("concentration", "categories"), [(20, 3), (5, 3)])
def test_intervals_of_the_marginal_null_hold_the_truth(concentration, categories):
    """Documents with tastes of their own: drawn folds, as they are, would lie above the truth in up to 4 of 10."""
    rng = np.random.default_rng(0)
    tastes = [rng.dirichlet(np.ones(32)) for _ in range(categories)]
    truth = float(((4 * np.mean(tastes, axis=0)) ** 2).sum())
    held = 0
    for _ in range(80):
        load = np.zeros((categories, 8, 1, 32), dtype=np.int64)
        for document in range(60 * categories):
            c, fold = document % categories, rng.integers(8)
            taste = rng.dirichlet(tastes[c] * concentration)
            load[c, fold, 0] += 4 * rng.multinomial(200, taste)
        use = Folds.of(load, 4, draws=200, seed=0).use()
        low, high = matched_overlap(use, use).interval()
        held += low[0] <= truth <= high[0]
    assert held / 80 > 0.82


def test_one_document_has_no_interval(make_run):
    summary = summarize(make_run([PROBE], lengths=(30, 20)), PROBE, draws=50)
    assert summary.attrs["documents"] == 1
    for name in ("overlap", "marginal_overlap", "load", "core", "overlap_by_category"):
        assert np.isfinite(summary[name]).any() and np.isnan(summary[f"{name}_low"]).all(), name
    assert "[" not in PROBE.sentence(summary)


def test_a_category_of_one_document_has_no_interval(make_run):
    summary = summarize(make_run([PROBE], lengths=(30, 20, 25, 24, 23, 22)), PROBE, draws=50)
    for name in ("overlap_by_category", "marginal_overlap_by_category"):
        assert np.isfinite(summary[name]).all(), name
        assert np.isnan(summary[f"{name}_low"].sel(table_category="b")).all(), name
        assert np.isfinite(summary["overlap_by_category_low"].sel(table_category="a")).all()


# Edges


def test_bfloat16(make_checkpoint, make_heldout, tmp_path):
    """Sets flip where logits are near; means move by less than a tenth of an expert."""
    summaries = {}
    for dtype in (torch.float32, torch.bfloat16):
        out = tmp_path / f"{dtype}.h5"
        options = RunOptions(max_length=128, batch_tokens=1600)
        run_probes(
            make_checkpoint("smelt", dtype=dtype),
            make_heldout([120, 100, 90, 80]),
            [PROBE],
            out,
            options,
        )
        summaries[dtype] = summarize(open_run(out), PROBE, draws=0)
    one, other = summaries.values()
    for name, bound in {
        "overlap": 0.1, "marginal_overlap": 0.1, "previous_overlap": 0.1, "entropy": 0.01,
        "shared_weight_later": 0.05,
    }.items():  # fmt: skip
        assert np.abs(one[name] - other[name]).max() < bound, name


def test_one_token_segments_are_no_evidence(make_run):
    summary = summarize(make_run([PROBE], lengths=(1, 1, 1)), PROBE, draws=20)
    for name, array in summary.data_vars.items():
        assert name.startswith("chance") or np.isnan(array).all(), name
    assert "No token was counted" in PROBE.sentence(summary)


@pytest.mark.parametrize("name", ["baseline", "mixtral"])
def test_one_visit(name, make_run):
    run = make_run([PROBE], name=name)
    summary = summarize(run, PROBE, draws=20)
    assert "overlap_count" not in run["router_overlap"] and "core" not in run["router_overlap"]
    assert np.isfinite(summary["entropy"]).all() and np.isfinite(summary["lexical_overlap"]).all()
    assert "no visits to compare" in PROBE.sentence(summary)


@pytest.mark.parametrize("name", ["llama", "gpt2", "dory", "hrm_text"])
def test_no_router(name, make_run):
    run = make_run([PROBE], name=name)
    summary = summarize(run, PROBE, draws=20)
    assert not run["router_overlap"].dataset.data_vars and not summary.data_vars
    assert "No layer of this model has a router" in PROBE.sentence(summary)


def test_sentence_and_progress(make_run):
    run = make_run([PROBE], lengths=(40, 33, 70, 20, 30, 31, 20, 10))
    summary = summarize(run, PROBE, draws=50)
    text = PROBE.sentence(summary)
    assert f"share {float(summary['overlap_overall']):.2f} [" in text
    assert "Uniform sets of 2 among 8 would share 0.50" in text and "over 4 documents" in text
    assert "not the top" not in text
    data = run["router_overlap"].dataset
    (sum_and_count,) = PROBE.progress(
        {"overlap_count": data["overlap_count"].values}, shape_of([0, 0], 8, 2)
    ).values()
    assert sum_and_count[1] == 3 * 246
    assert sum_and_count[0] / sum_and_count[1] == pytest.approx(float(summary["overlap_overall"]))


# The page


def test_the_page_has_the_chance_levels():
    rows = re.findall(r"^\| (\d+), (\d+) \| (.*) \|$", PAGE.read_text(), flags=re.MULTILINE)
    assert len(rows) == 5
    for experts, k, cells in rows:
        experts, k = int(experts), int(k)
        o, drawn = np.arange(k + 1), scipy.stats.hypergeom(experts, k, k)
        p = drawn.pmf(o)
        expected = [drawn.mean(), drawn.std(), p[0], p[2:].sum(), p @ (o / (2 * k - o))]
        shown = [float(cell) for cell in cells.split(" | ")]
        np.testing.assert_allclose(shown, expected, atol=5.1e-4)


def test_the_page_names_every_column(make_run):
    summary = summarize(make_run([PROBE]), PROBE, draws=20)
    columns = {
        name for name in map(str, summary.data_vars) if not re.search(r"_(low|high)(_all)?$", name)
    }
    named = set(re.findall(r"`(\w+)`", PAGE.read_text()))
    plain = {n for n in columns if not n.endswith(("_overall", "_by_pair", "_by_category"))}
    assert {n for n in plain if n not in named and not n.startswith("chance")} == set()
