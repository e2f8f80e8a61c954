"""dyck-map against loops over the attention that the models themselves return, and splits worked out by hand."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smeltscope.activations import open_run
from smeltscope.probes import Resampling, RunOptions, run_probes, summarize
from smeltscope.probes.compare import compare
from smeltscope.probes.dyck_map import LEARNED_SINK, DyckMap, split_change
from smeltscope.probes.dyck_scores import GUESSES, REFERENCES, DyckScores
from smeltscope.tasks import DocumentInfo, HeldOut, Prompts
from smeltscope.tasks.dyck.segments import MARKS, REGIONS

PROBE = DyckMap()
SUMS = ("region_mass_sum", "uniform_sum", "mark_mass_sum", "mark_uniform_sum")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "smelt": ("smelt", {}),
    "3 visits": ("smelt", {"num_visits": 3}),
    "1 visit": ("baseline", {}),
    "1 head": ("smelt", {"num_attention_heads": 1, "num_key_value_heads": 1}),
    "gpt_oss": ("gpt_oss", {}),  # learned sinks, and windows of 16
}


def made_prompts(
    shots: Sequence[int] = (2, 1, 0, 2, 4, 1, 0, 4),
    *,
    kind: str = "nested",
    seed: int = 0,
    per_item: int = 2,
    **labels: Any,
) -> HeldOut:
    """Random tokens with random regions and marks, one to three targets each; the more shots, the longer."""
    rng = np.random.default_rng(seed)
    lengths = [int(12 + 9 * k + rng.integers(0, 8)) for k in shots]
    answers = [np.arange(n - rng.integers(1, 5), n) for n in lengths]
    targets = [np.sort(rng.choice(a, min(len(a), 3), replace=False)) for a in answers]
    regions = []
    for k, n, answer in zip(shots, lengths, answers, strict=True):
        allowed = [1, 2, 3, 4, 5] if k else [1, 4, 5]  # without shots there are no demonstrations
        region = rng.choice(allowed, n)
        region[0], region[answer] = 0, 6
        regions.append(region.astype(np.int8))
    items = [i // per_item for i in range(len(shots))]
    known = {
        "kind": np.array([kind] * len(shots)),
        "item": np.array([f"item {i}" for i in items]),
        "shots": np.array(shots),
        "prompt_seed": np.zeros(len(shots), dtype=int),
        "half": np.array([i % 2 for i in items]),
        "readable": np.zeros(len(shots), dtype=int),
        **labels,
    }
    names = [f"{i}, {k} shots" for i, k in zip(known["item"], shots, strict=True)]
    places = {name: place for place, name in enumerate(dict.fromkeys(names))}
    ids = [np.concatenate([[0], rng.integers(1, 256, n - 1)]) for n in lengths]
    return HeldOut(
        tokens=np.concatenate(ids).astype(np.int32),
        offsets=np.cumsum([0, *lengths]).astype(np.int64),
        document=np.array([places[name] for name in names], dtype=np.int32),
        documents=[
            DocumentInfo(id=name, category=name.split(", ")[1], source="made", file="made")
            for name in places
        ],
        start_token=0,
        dropped={},
        notes=[],
        digest=f"{list(shots)} {kind} {seed} {per_item}",
        prompts=Prompts(
            region_names=REGIONS,
            regions=regions,
            answers=answers,
            targets=targets,
            marks={
                name: [
                    rng.random((len(t), n)) < 0.2 * (np.arange(n) < t[:, None])
                    for t, n in zip(targets, lengths, strict=True)
                ]
                for name in MARKS
            },
            states={},
            labels=known,
            vocabulary=["x"] * 256,
            stop="\n",
        ),
    )


@pytest.fixture
def run_of(tmp_path):
    def run(checkpoint, heldout, probes=(PROBE,), batch_tokens=200):
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}.h5"
        options = RunOptions(max_length=int(heldout.lengths.max()), batch_tokens=batch_tokens)
        return open_run(run_probes(checkpoint, heldout, list(probes), out, options))

    return run


def in_order(heldout: HeldOut) -> np.ndarray:
    """The segments of a held-out set in the order of its run: the longest first."""
    return np.argsort(-heldout.lengths, kind="stable")


def slowly(
    heldout: HeldOut, segment: int, attention: Sequence[np.ndarray], seen: Sequence[np.ndarray]
) -> dict[str, np.ndarray]:
    """The sums of one segment from its attention, (H, T, T) of each execution, key by key."""
    prompts = heldout.prompts
    assert prompts is not None
    executions, heads = len(attention), len(attention[0])
    sums = {
        "region_mass_sum": np.zeros((executions, heads, len(REGIONS) + 1)),
        "uniform_sum": np.zeros((executions, len(REGIONS) + 1)),
        "mark_mass_sum": np.zeros((executions, heads, len(MARKS))),
        "mark_uniform_sum": np.zeros((executions, len(MARKS))),
    }
    for e in range(executions):
        for n, target in enumerate(prompts.targets[segment]):
            row = target - 1
            keys = [k for k in range(len(seen[e])) if seen[e][row, k]]
            for k in keys:
                region, mass = prompts.regions[segment][k], attention[e][:, row, k]
                sums["region_mass_sum"][e, :, region] += mass
                sums["uniform_sum"][e, region] += 1 / len(keys)
                for m, name in enumerate(MARKS):
                    if prompts.marks[name][segment][n, k]:
                        sums["mark_mass_sum"][e, :, m] += mass
                        sums["mark_uniform_sum"][e, m] += 1 / len(keys)
            sums["region_mass_sum"][e, :, -1] += 1 - attention[e][:, row].sum(-1)
    return sums


def eager_attention(model, ids: np.ndarray, run_eagerly) -> list[np.ndarray]:
    """What the model's own eager attention returns for one segment alone: (H, T, T) of each execution."""
    weights: list[np.ndarray] = []
    tokens = torch.from_numpy(ids).long()[None]
    run_eagerly(model, tokens, lambda w, *_, **__: weights.append(w[0].double().numpy()))
    return weights


@pytest.mark.parametrize("variant", MODELS)
def test_like_slow_loops(run_of, make_checkpoint, run_eagerly, variant):
    name, overrides = MODELS[variant]
    checkpoint, heldout = make_checkpoint(name, **overrides), made_prompts()
    run = run_of(checkpoint, heldout)
    data = run["dyck_map"].dataset
    assert data["region_mass_sum"].dims == ("segment", "execution", "head", "map_region")
    assert data["map_region"].values.tolist() == [*REGIONS, LEARNED_SINK]
    for place, segment in enumerate(in_order(heldout)):
        attention = eager_attention(checkpoint.model, heldout.segment(segment), run_eagerly)
        assert len(attention) == data.sizes["execution"]
        # A key of no mass at all in any head is one that a window hides.
        expected = slowly(heldout, segment, attention, [(a > 0).any(0) for a in attention])
        if name != "gpt_oss":
            expected["region_mass_sum"][..., -1] = np.nan
            expected["uniform_sum"][..., -1] = np.nan
        for key in SUMS:
            np.testing.assert_allclose(
                data[key].values[place], expected[key], atol=1e-5, rtol=1e-5, err_msg=key
            )
        targets = len(heldout.prompts.targets[segment])
        assert data["targets"].values[place].sum() == targets
        assert data["targets"].sel(shots=heldout.prompts.labels["shots"][segment])[place] == targets
        total = np.nansum(data["region_mass_sum"].values[place], axis=-1)
        np.testing.assert_allclose(total / targets, 1, atol=1e-5)
        total = np.nansum(data["uniform_sum"].values[place], axis=-1)
        np.testing.assert_allclose(total / targets, 1, atol=1e-5)
    if name == "gpt_oss":
        assert (data["region_mass_sum"].values[..., -1] > 0.01).any()


def test_like_output_attentions(run_of, make_checkpoint):
    """transformers' public switch, for a model that it returns every execution of."""
    checkpoint, heldout = make_checkpoint("llama"), made_prompts()
    data = run_of(checkpoint, heldout)["dyck_map"].dataset
    checkpoint.model.set_attn_implementation("eager")
    for place, segment in enumerate(in_order(heldout)):
        ids = torch.from_numpy(heldout.segment(segment)).long()[None]
        with torch.no_grad():
            found = checkpoint.model(ids, output_attentions=True).attentions
        attention = [a[0].double().numpy() for a in found]
        expected = slowly(heldout, segment, attention, [(a > 0).any(0) for a in attention])
        mass = data["region_mass_sum"].values[place][..., :-1]
        np.testing.assert_allclose(mass, expected["region_mass_sum"][..., :-1], atol=1e-5)


def test_a_prompt_does_not_depend_on_its_neighbours(run_of, make_checkpoint):
    checkpoint, heldout = make_checkpoint("smelt"), made_prompts()
    apart, together = (
        run_of(checkpoint, heldout, batch_tokens=n)["dyck_map"].dataset for n in (60, 4000)
    )
    for name, array in together.data_vars.items():
        np.testing.assert_allclose(apart[name], array, atol=1e-5, err_msg=str(name))


# Averages


def test_summary_like_slow_averages(run_of, make_checkpoint):
    """Nested prompts of half 1 alone, pooled and by shots."""
    heldout = made_prompts((2, 1, 0, 2, 4, 1, 0, 4, 1, 2))
    run = run_of(make_checkpoint("smelt"), heldout)
    summary, data = summarize(run, PROBE, draws=40), run["dyck_map"].dataset
    labels = heldout.prompts.labels
    half, shots = (labels[name][in_order(heldout)] for name in ("half", "shots"))
    assert summary["nested"] == 1 and summary["prompts"] == 4 and summary["items"] == 2
    for level in (None, *summary["shots"].values):
        inside = (half == 1) & ((shots == level) | (level is None))
        targets = data["targets"].values[inside].sum()
        part = summary if level is None else summary.sel(shots=level)
        end = "" if level is None else "_by_shots"
        if not inside.any():
            assert np.isnan(part[f"mass{end}"]).all()
            continue
        with np.errstate(invalid="ignore"):
            mass, uniform, marked, by_chance = (
                data[name].values[inside].sum(0) / targets for name in SUMS
            )
        if level == 0:
            mass[..., 2:4], uniform[..., 2:4] = np.nan, np.nan  # no demonstrations
        np.testing.assert_allclose(part[f"mass{end}"], mass, atol=1e-6)
        np.testing.assert_allclose(part[f"uniform{end}"], uniform, atol=1e-6)
        np.testing.assert_allclose(part[f"mass_mean{end}"], mass.mean(1), atol=1e-6)
        np.testing.assert_allclose(part[f"mark_mass{end}"], marked, atol=1e-6)
        np.testing.assert_allclose(part[f"mark_uniform{end}"], by_chance, atol=1e-6)
        for i, layer in enumerate(summary["looped_layer"].values):
            first, second = np.flatnonzero(summary["layer"].values == layer)
            for h, r in np.ndindex(mass.shape[1:]):
                a1, a2 = mass[first, h, r], mass[second, h, r]
                b1, b2 = mass[first, h, 0], mass[second, h, 0]
                found = {
                    n: float(part[f"{n}{end}"][i, 0, h, r])
                    for n in ("change", "release", "retarget")
                }
                np.testing.assert_allclose(found["change"], a2 - a1, atol=1e-6)
                if r == 0:
                    assert np.isnan(found["release"]) and np.isnan(found["retarget"])
                    continue
                release, retarget = a1 * ((1 - b2) / (1 - b1) - 1), a2 - a1 * (1 - b2) / (1 - b1)
                np.testing.assert_allclose(found["release"], release, atol=1e-6)
                np.testing.assert_allclose(found["retarget"], retarget, atol=1e-6)
    np.testing.assert_allclose(
        summary["release_overall"], summary["release"].mean(("looped_layer", "visit_pair", "head"))
    )
    parts = summary[["change", "release", "retarget"]].isel(map_region=slice(1, 7))
    np.testing.assert_allclose(parts["release"] + parts["retarget"], parts["change"], atol=1e-15)
    # What BOS gives up is handed out, and retargeting moves it between the others.
    fall = -summary["change"].isel(map_region=0)
    np.testing.assert_allclose(parts["release"].sum("map_region"), fall, atol=1e-6)
    np.testing.assert_allclose(parts["retarget"].sum("map_region"), 0, atol=1e-6)
    low, high = summary["retarget_low"], summary["retarget_high"]
    assert (low <= high).sum() == parts["retarget"].size
    assert "retarget_low_all" in summary and "change_high_all" in summary


def test_learned_sinks_share_in_what_bos_gives_up():
    """Masses of a model with learned sinks: the last region is one like the others."""
    rng = np.random.default_rng(0)
    earlier, later = rng.dirichlet(np.ones(8), (2, 5))
    parts = split_change(earlier, later)
    np.testing.assert_allclose(np.nansum(parts["release"], -1), earlier[:, 0] - later[:, 0])
    np.testing.assert_allclose(np.nansum(parts["retarget"], -1), 0, atol=1e-15)


def test_scored_prompts_are_mapped_where_none_is_nested(run_of, make_checkpoint):
    heldout = made_prompts((2, 1, 0, 2), kind="scored")
    summary = summarize(run_of(make_checkpoint("smelt"), heldout), PROBE, draws=20)
    assert summary["nested"] == 0 and summary["prompts"] == 4
    assert "in 4 prompts (2 items)" in PROBE.sentence(summary)


def test_items_are_drawn_whole(run_of, make_checkpoint):
    """An item with the same prompt many times over says no more than one prompt of it."""
    once = made_prompts((2, 2, 2, 2), kind="scored", per_item=1)
    run = run_of(make_checkpoint("smelt"), once)
    doubled = run.isel(segment=np.repeat(np.arange(4), 5))
    one, many = (summarize(r, PROBE, draws=200) for r in (run, doubled))
    for end in ("", "_low", "_high"):
        np.testing.assert_allclose(one[f"mass{end}"], many[f"mass{end}"], atol=1e-12)


@given(
    earlier=st.lists(st.floats(0.01, 1), min_size=3, max_size=8),
    later=st.lists(st.floats(0.01, 1), min_size=8, max_size=8),
)
def test_parts_add_up(earlier, later):
    a = np.array(earlier) / sum(earlier)
    b = np.array(later[: len(a)]) / sum(later[: len(a)])
    parts = split_change(a, b)
    np.testing.assert_array_equal(parts["change"], b - a)
    total = parts["release"][1:] + parts["retarget"][1:]
    np.testing.assert_allclose(total, parts["change"][1:], rtol=0, atol=1e-15)


def test_the_papers_head():
    """BOS .60 -> .02, demonstration answers .24 -> .85: .35 by release, .26 by retargeting."""
    parts = split_change(np.array([0.60, 0.24, 0.16]), np.array([0.02, 0.85, 0.13]))
    assert round(float(parts["release"][1]), 2) == 0.35
    assert round(float(parts["retarget"][1]), 2) == 0.26
    np.testing.assert_allclose(parts["change"][1], 0.61)


def test_no_mass_off_bos_has_no_split():
    parts = split_change(np.array([[1.0, 0.0], [1 - 1e-8, 1e-8]]), np.array([[0.5, 0.5]] * 2))
    assert np.isnan(parts["release"]).all() and np.isnan(parts["retarget"]).all()
    np.testing.assert_allclose(parts["change"], [[-0.5, 0.5]] * 2, atol=1e-7)


# Through whole runs


def test_identical_visits_do_not_shift(run_of, make_checkpoint):
    """Nothing is written in the looped span, so that its visits are alike."""
    checkpoint = make_checkpoint("smelt")
    config = checkpoint.model.config
    for layer in checkpoint.model.model.layers[config.loop_start : config.loop_stop]:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.experts.down_proj.data.zero_()
    summary = summarize(run_of(checkpoint, made_prompts()), PROBE, draws=20)
    for name in ("change", "release", "retarget"):
        values = summary[name].isel(map_region=slice(1, 7))
        assert (values == 0).all(), name
        assert (summary[f"{name}_low"].isel(map_region=slice(1, 7)) == 0).all()
    assert (summary["change"].isel(map_region=0) == 0).all()


@pytest.mark.parametrize("variant", ["smelt", "3 visits", "1 visit"])
def test_mass_at_each_visit_over_looped_layers_and_heads(run_of, make_checkpoint, variant):
    """Means by hand; their intervals lie between the least and the greatest item."""
    name, overrides = MODELS[variant]
    heldout = made_prompts((2, 1, 0, 2, 4, 1, 0, 4, 1, 2, 3, 3))
    run = run_of(make_checkpoint(name, **overrides), heldout)
    summary = summarize(run, PROBE, draws=50)
    layers, visits = summary["layer"].values, summary["visit"].values
    looped = set(layers[visits > 1]) or set(layers)
    found = [n for n in summary if str(n).startswith("mass_visit_") and str(n).endswith("_overall")]
    assert found == [f"mass_visit_{v}_overall" for v in sorted(set(visits))]
    data, labels = run["dyck_map"].dataset, heldout.prompts.labels
    half, item = (labels[n][in_order(heldout)] for n in ("half", "item"))
    segments = np.flatnonzero(half == 1)
    items = sorted(set(item[segments]))
    for visit in sorted(set(visits)):
        rows = [e for e in range(len(layers)) if visits[e] == visit and layers[e] in looped]
        sums = {i: 0.0 for i in items}
        counts = dict(sums)
        for s in segments:  # BOS, which every prompt has
            sums[item[s]] += data["region_mass_sum"].values[s][rows, :, 0].mean()
            counts[item[s]] += data["targets"].values[s].sum()
        mean = sum(sums.values()) / sum(counts.values())
        bos = summary[f"mass_visit_{visit}_overall"].isel(map_region=0)
        assert float(bos) == pytest.approx(mean, abs=1e-6)
        # A mean of draws lies between those of the least and the greatest item alone.
        alone = [sums[i] / counts[i] for i in items]
        low, high = (
            float(summary[f"mass_visit_{visit}_overall_{end}"][0]) for end in ("low", "high")
        )
        assert min(alone) - 1e-6 <= low < mean < high <= max(alone) + 1e-6
    if "change_overall" in summary and len(found) == 2:
        np.testing.assert_allclose(
            summary["mass_visit_2_overall"] - summary["mass_visit_1_overall"],
            summary["change_overall"],
            atol=1e-12,
        )


def test_three_visits_have_three_pairs(run_of, make_checkpoint):
    summary = summarize(
        run_of(make_checkpoint("smelt", num_visits=3), made_prompts()), PROBE, draws=2
    )
    change = summary["change"].isel(map_region=slice(0, 7))
    assert summary["visit_pair"].values.tolist() == ["1-2", "1-3", "2-3"]
    np.testing.assert_allclose(
        change.sel(visit_pair="1-3"),
        change.sel(visit_pair="1-2") + change.sel(visit_pair="2-3"),
        atol=1e-12,
    )


def test_layers_with_other_numbers_of_visits(run_of, make_checkpoint):
    """HRM's low stack runs more often than its high one: pairs that a layer lacks have no change."""
    summary = summarize(run_of(make_checkpoint("hrm_text"), made_prompts()), PROBE, draws=10)
    missing = np.isnan(summary["change"].isel(map_region=0)).all("head")
    assert 0 < missing.sum() < missing.size


def test_bfloat16_is_near_float32(run_of, make_checkpoint):
    full, half = (
        summarize(run_of(make_checkpoint("smelt", dtype=dtype), made_prompts()), PROBE, draws=0)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert float(np.abs(full["mass"] - half["mass"]).max()) < 0.05
    total = half["mass"].isel(map_region=slice(0, 7)).sum("map_region")
    np.testing.assert_allclose(total, 1, atol=1e-5)


def test_with_the_other_probes_of_prompts(run_of, make_checkpoint):
    """Labels of segments have the names of dimensions: that must not change a number."""
    names = [*REFERENCES, *(f"right_symbols_{name}" for name in GUESSES)]
    heldout = made_prompts(**{name: np.full(8, 0.5) for name in names})
    alone = summarize(run_of(make_checkpoint("smelt"), heldout), PROBE, draws=20)
    run = run_of(make_checkpoint("smelt"), heldout, [PROBE, DyckScores()])
    both = summarize(run, PROBE, draws=20)
    for name in ("mass", "retarget", "retarget_low", "mass_by_shots"):
        np.testing.assert_array_equal(alone[name], both[name])


def test_against_another_checkpoint(run_of, make_checkpoint):
    heldout = made_prompts()
    runs = [run_of(make_checkpoint("smelt", seed=seed), heldout) for seed in (0, 1)]
    first, second = (summarize(run, PROBE, draws=0) for run in runs)
    difference = compare(*runs, PROBE, PROBE, draws=20)
    np.testing.assert_allclose(difference["retarget"], second["retarget"] - first["retarget"])
    baseline = run_of(make_checkpoint("baseline"), heldout)
    assert "retarget" in compare(runs[0], baseline, PROBE, PROBE, draws=5).attrs["only_a"]


def test_sentences(run_of, make_checkpoint, make_heldout):
    def told(name: str = "smelt", heldout: HeldOut | None = None, **overrides: Any) -> str:
        run = run_of(make_checkpoint(name, **overrides), heldout or made_prompts())
        return PROBE.sentence(summarize(run, PROBE, draws=20))

    text = told()
    assert "nested prompts of half 1 (2 items)" in text and "at visit 2 (uniform " in text
    assert "release and" in text and "The head that most turned there: head " in text
    assert "picked here" in text and "The Dyck head" not in text  # no head was searched for
    assert "No layer is visited twice" in told("baseline")
    assert "no demonstration is answered in them" in told(heldout=made_prompts((0, 0, 0, 0)))
    half_0 = made_prompts((1, 2), half=np.zeros(2, dtype=int))
    assert told(heldout=half_0) == "No target stands in nested prompts of half 1."
    assert "over text" in told(heldout=make_heldout([9, 5]))


def test_draws_are_as_many_as_asked_for(run_of, make_checkpoint):
    run = run_of(make_checkpoint("smelt"), made_prompts())
    found = PROBE.estimates(run, Resampling.of_run(run, draws=7))
    assert found["mass_by_shots"].estimate.draws.shape[0] == 7
    assert found["mass_by_shots"].dims[0] == "shots"
