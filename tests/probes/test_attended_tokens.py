"""attended-tokens against loops over the models' own eager attention in float64, exact values and simulated rows."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import scipy.stats
import torch
import xarray as xr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smeltscope.model import tiny
from smeltscope.probes import RunOptions, summarize
from smeltscope.probes.attended_tokens import AttendedTokens, Ranked, measure, measure_control
from smeltscope.probes.rows import Rows
from smeltscope.probes.sampling import Sample
from smeltscope.tasks import HeldOut

PROBE = AttendedTokens()
LENGTHS = [72, 9, 3, 2, 1]
# Every query is sampled, so that the loops need not know how.
ALL = RunOptions(max_length=max(LENGTHS), batch_tokens=1200, sampled_queries=max(LENGTHS))
MODELS = {
    "smelt, 3 visits": {"num_visits": 3},
    "smelt, 1 visit, one key head": {"num_visits": 1, "num_key_value_heads": 1},
    "llama": {},
    "llama, 3 heads": {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24},
    "llama, 1 head": {"num_attention_heads": 1, "num_key_value_heads": 1},
    "gpt2": {},
    "gpt_oss": {},
    "inkling2_loop": {"sliding_window_size": 70},
    "dory": {},
    "hrm_text": {},
}


def eager_attentions(
    model: torch.nn.Module, ids: np.ndarray, run_eagerly: Callable[..., None]
) -> list[np.ndarray]:
    """Attention (H, T, T) of every execution over one segment."""
    seen: list[np.ndarray] = []
    tokens = torch.from_numpy(ids).long()[None]
    run_eagerly(model, tokens, lambda weights, *_, **__: seen.append(weights[0].double().numpy()))
    return seen


def slowly(a: np.ndarray, b: np.ndarray) -> dict[str, np.ndarray]:
    """Sums over the queries of one segment for rows (T, T) of two visits or two heads: (least_keys, first_key)."""
    names = ("queries", "chance_sum", "top1_sum", "top8_sum", "overlap_sum", "near_ties")
    sums = {name: np.zeros((2, 2)) for name in names}
    for q in range(1, len(a)):
        for first in (0, 1):
            keys = np.flatnonzero(a[q] > 0)
            seen = len(keys)
            keys = keys[keys > 0] if first == 1 else keys
            p, r = a[q, keys], b[q, keys]
            if first == 1:
                p, r = p / p.sum(), r / r.sum()
            best, other = keys[np.argsort(-p)].tolist(), keys[np.argsort(-r)].tolist()
            for i, counts in enumerate((len(keys) >= 2, seen >= 64)):
                if not counts:
                    continue
                sums["queries"][i, first] += 1
                sums["chance_sum"][i, first] += 1 / len(keys)
                sums["top1_sum"][i, first] += best[0] == other[0]
                sums["overlap_sum"][i, first] += np.minimum(p, r).sum()
                if i == 1:
                    sums["top8_sum"][i, first] += len({*best[:8]} & {*other[:8]}) / 8
                    eighth, ninth = np.sort(p)[[-8, -9]]
                    sums["near_ties"][i, first] += np.log(eighth / ninth) <= 1e-5
    sums["top8_sum"] = sums["top8_sum"][1]
    return sums


def nearly_tied(a: np.ndarray, b: np.ndarray) -> int:
    """How many times rounding may decide which keys are the most attended ones of a query."""
    count = 0
    for rows in (a[1:], a[1:, 1:], b[1:], b[1:, 1:]):
        ordered = -np.sort(-rows, axis=1)
        for place in (0, 7):
            one, following = (ordered[:, i : i + 1] for i in (place, place + 1))
            count += int(((following > 0) & (one <= (1 + 2e-5) * following)).sum())
    return count


def assert_like(
    run: xr.DataTree,
    model: torch.nn.Module,
    heldout: HeldOut,
    shared: bool,
    run_eagerly: Callable[..., None],
) -> None:
    """All arrays of a run, every query sampled, against `slowly`; `shared`: there is but one K/V head."""
    data = run["attended_tokens"].dataset
    lengths = heldout.lengths.tolist()
    expected = {key: np.full(array.shape, np.nan) for key, array in data.data_vars.items()}
    bound = {key: np.zeros(array.shape) for key, array in expected.items()}
    expected["shared_keys"][:] = shared
    layers, visits = data["layer"].values, data["visit"].values
    assert ("top8_sum" in data) == bool((visits > 1).any())

    def put(place: tuple, prefix: str, h: int, sums: dict, ties: int, alone: bool = False) -> None:
        for key, value in sums.items():
            at: tuple = () if key in ("queries", "chance_sum") else (h,)
            expected[f"{prefix}{key}"][(*place, *at)] = np.nan if alone and at else value
            if key in ("top1_sum", "top8_sum"):
                bound[f"{prefix}{key}"][(*place, *at)] = ties

    for row, length in enumerate(run["segments"]["tokens"].values):
        attentions = eager_attentions(model, heldout.segment(lengths.index(length)), run_eagerly)
        heads = len(attentions[0])
        assert len(attentions) == len(layers)
        for e, attention in enumerate(attentions):
            for h in range(heads):
                other = (h + heads // 2) % heads
                sums = slowly(attention[h], attention[other])
                ties = nearly_tied(attention[h], attention[other])
                expected["near_ties"][row, e, h] = sums.pop("near_ties")[1, 0]
                bound["near_ties"][row, e, h] = ties
                put((row, e), "control_", h, sums, ties, alone=other == h)
                for earlier in np.flatnonzero((layers == layers[e]) & (visits < visits[e])):
                    layer = data["looped_layer"].values.tolist().index(layers[e])
                    names = data["visit_pair"].values.tolist()
                    pair = names.index(f"{visits[earlier]}-{visits[e]}")
                    sums = slowly(attentions[earlier][h], attention[h])
                    del sums["near_ties"]
                    ties = nearly_tied(attentions[earlier][h], attention[h])
                    put((row, layer, pair), "", h, sums, ties)
    for key, value in expected.items():
        np.testing.assert_array_equal(np.isnan(data[key]), np.isnan(value), err_msg=key)
        error = np.abs(np.nan_to_num(data[key].values - value))
        allowed = 3e-5 + 1e-5 * np.abs(np.nan_to_num(value)) + bound[key]
        assert (error <= allowed).all(), (key, (error - allowed).max())


@pytest.mark.parametrize("variant", MODELS)
def test_like_slow_loops(variant, make_run, make_heldout, run_eagerly):
    name, overrides = variant.split(",")[0], MODELS[variant]
    run = make_run([PROBE], LENGTHS, name, options=ALL, **overrides)
    shared = overrides.get("num_key_value_heads") == 1
    assert_like(run, tiny(name, **overrides), make_heldout(LENGTHS), shared, run_eagerly)


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
    shared = smelt["num_key_value_heads"] == 1
    assert_like(run, tiny("smelt", **smelt), make_heldout(lengths), shared, run_eagerly)


def rows_from(scores: torch.Tensor, sink: torch.Tensor | None = None) -> Rows:
    """A block whose queries (B, H, N, K) all see their K keys."""
    size = scores.shape[0], scores.shape[2]
    mass = scores.softmax(-1)
    return Rows(
        queries=Sample(
            positions=torch.full(size, scores.shape[3] - 1),
            valid=torch.ones(size, dtype=torch.bool),
        ),
        query=torch.zeros(*scores.shape[:3], 1),
        scores=scores,
        sink_logit=None,
        mass=mass if sink is None else mass * (1 - sink),
        keys_seen=torch.full(size, scores.shape[3]),
        sees_first=torch.ones(size, dtype=torch.bool),
    )


def measured(*scores: torch.Tensor, sink: torch.Tensor | None = None) -> dict[str, np.ndarray]:
    """Two visits with these scores: sums divided by queries, (H, ...)."""
    a, b = (Ranked.of([rows_from(s, sink)]) for s in scores)
    found = {n: x.sum(0).double().numpy() for n, x in (b.counts | measure(a, b)).items()}
    queries = found.pop("queries")
    return {name: x / (queries[1] if name == "top8_sum" else queries) for name, x in found.items()}


@pytest.mark.parametrize("keys", [64, 200])
def test_random_sets_share_chance(keys):
    generator = torch.Generator().manual_seed(keys)
    found = measured(*(torch.randn(40, 1, 100, keys, generator=generator) for _ in range(2)))
    for first, n in enumerate((keys, keys - 1)):
        overlap = scipy.stats.hypergeom(n, 8, 8)
        assert found["top8_sum"][0, first] == pytest.approx(
            8 / n, abs=4 * overlap.std() / 8 / 4000**0.5
        )
        assert found["top1_sum"][0, 1, first] == pytest.approx(1 / n, abs=4 * (1 / n / 4000) ** 0.5)
        assert found["chance_sum"][1, first] == pytest.approx(1 / n)


def test_alike_rows_agree_in_everything():
    scores = torch.randn(2, 3, 4, 80, generator=torch.Generator().manual_seed(0))
    for name, value in measured(scores, scores + 7).items():
        if name != "chance_sum":
            np.testing.assert_allclose(value, 1, atol=1e-6, err_msg=name)


def test_disjoint_rows_agree_in_nothing():
    low, high = torch.full((1, 1, 1, 100), -1000.0), torch.randn(1, 1, 1, 50)
    a, b = low.clone(), low.clone()
    a[..., :50], b[..., 50:] = high, high
    for name, value in measured(a, b).items():
        if name != "chance_sum":
            np.testing.assert_array_equal(value, 0, err_msg=name)


def test_a_heavy_first_key_hides_what_the_rest_do():
    """By hand: .9 on the first key at both visits, the rest on one other key each."""
    a = torch.full((1, 1, 1, 100), -1e4)
    b = a.clone()
    a[..., 0] = b[..., 0] = np.log(0.9)
    a[..., 20], b[..., 30] = np.log(0.1), np.log(0.1)
    found = measured(a, b)
    np.testing.assert_allclose(found["overlap_sum"][0, 1], [0.9, 0], atol=1e-6)
    np.testing.assert_array_equal(found["top1_sum"][0, 1], [1, 0])
    b[..., 20] = np.log(0.05)  # of .95 + .1, a third of what is not on the first key
    found = measured(a, b)
    share = 0.05 / 0.15
    np.testing.assert_allclose(found["overlap_sum"][0, 1, 1], share, atol=1e-6)


def test_the_first_key_among_the_eight_makes_room_for_the_ninth():
    scores = torch.arange(100.0).flip(0).expand(1, 1, 1, -1)  # key 0 most, then 1, 2, ...
    other = scores.clone()
    other[..., 8] = -1  # the ninth of the first visit is the last of the second
    found = measured(scores, other)["top8_sum"][0]
    np.testing.assert_array_equal(found, [1, 7 / 8])
    other = scores.clone()
    other[..., 0] = -1
    found = measured(scores, other)["top8_sum"][0]
    np.testing.assert_array_equal(found, [7 / 8, 1])


def test_learned_sinks_bound_the_overlap():
    scores = torch.randn(1, 1, 3, 70, generator=torch.Generator().manual_seed(0))
    found = measured(scores, scores, sink=torch.tensor(0.25))["overlap_sum"]
    np.testing.assert_allclose(found[0, 1], [0.75, 1], atol=1e-6)


def test_scores_rank_what_masses_tie():
    scores = -200 * torch.arange(100.0).expand(1, 1, 1, -1)
    assert (scores.softmax(-1) == 0).sum() == 99
    other = scores.clone()
    other[..., 1:] = scores[..., 1:].flip(-1)
    np.testing.assert_array_equal(measured(scores, scores)["top8_sum"][0, 0], 1)
    np.testing.assert_array_equal(measured(scores, other)["top8_sum"][0, 0], 1 / 8)


def test_uniform_rows_are_nearly_tied():
    ranked = Ranked.of([rows_from(torch.zeros(1, 2, 5, 70))])
    assert ranked.near_ties.tolist() == [[5, 5]]
    apart = 1e-3 * torch.arange(70.0).expand(1, 2, 5, -1)
    assert Ranked.of([rows_from(apart)]).near_ties.tolist() == [[0, 0]]


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 8])
def test_control_is_a_permutation_without_fixed_points(heads):
    """Head h peaks on key 10 + h, and one other head peaks there, too: the control finds just that one."""
    partner = {h: (h + heads // 2) % heads for h in range(heads)}
    assert sorted(partner.values()) == list(range(heads))
    for target in range(heads):
        scores = torch.zeros(1, heads, 1, 100)
        for h in range(heads):
            scores[:, h, :, 10 + h] = 5
        scores[:, partner[target], :, 10 + partner[target]] = 0
        scores[:, partner[target], :, 10 + target] = 5
        found = measure_control(Ranked.of([rows_from(scores)]))
        if heads == 1:
            assert found == {}
            continue
        assert partner[target] != target
        same = found["top1_sum"][0, :, 1, 0].tolist()
        agree = [h for h in range(heads) if same[h]]
        assert target in agree
        assert set(agree) <= {target, partner[target]}
        assert (len(agree) == 2) == (heads % 2 == 0)


@pytest.fixture
def run_of(run_checkpoint):
    return partial(run_checkpoint, PROBE)


def test_identical_visits(run_of, make_checkpoint, silenced):
    summary = summarize(run_of(silenced(make_checkpoint("smelt")), LENGTHS), PROBE, draws=20)
    for name in ("top8", "top1", "overlap"):
        for ending in ("", "_without_first", "_any", "_any_without_first"):
            if name + ending in summary:
                np.testing.assert_allclose(summary[f"{name}{ending}"], 1, atol=1e-6)
    control = summary["top8_control"]
    assert ((control > 0) & (control < 1)).all()
    np.testing.assert_allclose(summary["top8_excess"], 1 - control)
    # Two alike visits: their control is that of either.
    for layer in summary["looped_layer"].values:
        one = summary["other_head_top8"][summary["layer"].values == layer]
        np.testing.assert_allclose(control.sel(looped_layer=layer, visit_pair="1-2"), one[0])


def test_summary_like_slow_averages(make_run):
    run = make_run([PROBE], LENGTHS, "hrm_text")
    summary = summarize(run, PROBE, draws=30)
    data = run["attended_tokens"].dataset.astype(np.float64)
    cuts = {"": (1, 0), "_without_first": (1, 1), "_any": (0, 0), "_any_without_first": (0, 1)}
    layers, visits = data["layer"].values.astype(int), data["visit"].values.astype(int)
    execution = {place: e for e, place in enumerate(zip(layers, visits, strict=True))}
    missing = 0
    for i, layer in enumerate(summary["looped_layer"].values):
        for j, pair in enumerate(summary["visit_pair"].values):
            both = [execution.get((int(layer), int(v))) for v in pair.split("-")]
            for ending, cut in cuts.items():
                queries = data["queries"].values[:, i, j, *cut].sum()
                if None in both:
                    assert np.isnan(summary[f"top1{ending}"][i, j]).all()
                    assert np.isnan(summary[f"top1_control{ending}"][i, j]).all()
                    missing += 1
                    continue
                assert summary[f"queries{ending}"][i, j] == queries
                chance = data["chance_sum"].values[:, i, j, *cut].sum() / queries
                np.testing.assert_allclose(summary[f"top1_chance{ending}"][i, j], chance)
                for name in ("top8", "top1", "overlap"):
                    if name == "top8" and "any" in ending:
                        continue
                    inner = cut[1:] if name == "top8" else cut
                    for h in range(4):
                        value = data[f"{name}_sum"].values[:, i, j, h, *inner].sum() / queries
                        np.testing.assert_allclose(summary[f"{name}{ending}"][i, j, h], value)
                        controls = [
                            data[f"control_{name}_sum"].values[:, e, h, *inner].sum()
                            / data["control_queries"].values[:, e, *cut].sum()
                            for e in both
                        ]
                        np.testing.assert_allclose(
                            summary[f"{name}_control{ending}"][i, j, h], np.mean(controls)
                        )
    assert missing > 0  # its low stack is visited more often than its high one
    np.testing.assert_allclose(summary["top8_chance"], 8 * summary["top1_chance"])
    np.testing.assert_allclose(summary["top8_overall"], summary["top8"].mean())
    assert summary["top8_excess_low_all"].dims == summary["top8_excess"].dims


@pytest.mark.parametrize("name", ["smelt", "gpt_oss"])
def test_a_segment_does_not_depend_on_its_neighbours(name, run_of, make_checkpoint):
    """The same segments alone and in other batches, with sampled queries."""
    lengths = [70, 90, 12, 80, 2]
    apart = run_of(make_checkpoint(name), lengths, batch_tokens=90, sampled_queries=20)
    together = run_of(make_checkpoint(name), lengths, batch_tokens=4000, sampled_queries=20)
    order = [list(r["segments"]["tokens"].values) for r in (apart, together)]
    for key, array in together["attended_tokens"].data_vars.items():
        for row, length in enumerate(order[1]):
            alone = apart["attended_tokens"][key].values[order[0].index(length)]
            np.testing.assert_allclose(array.values[row], alone, atol=1e-5, err_msg=str(key))


def test_bfloat16_is_near_float32(run_of, make_checkpoint):
    lengths = [90, 80, 70]
    full = summarize(run_of(make_checkpoint("smelt"), lengths), PROBE, draws=0)
    half = summarize(
        run_of(make_checkpoint("smelt", dtype=torch.bfloat16), lengths), PROBE, draws=0
    )
    for name, bound in (("overlap", 0.03), ("overlap_control", 0.03), ("top8_control", 0.08)):
        assert float(np.abs(full[name] - half[name]).max()) < bound, name


def test_sentences(make_run):
    def told(name: str, lengths=(70, 66, 1), **overrides) -> str:
        run = make_run([PROBE], lengths, name, **overrides)
        return PROBE.sentence(summarize(run, PROBE, draws=20))

    text = told("smelt", num_visits=3)
    assert "over 2 documents, queries that see 64 keys or more: visits 1 and 2 share" in text
    assert text.count("chance") == 2 and "by pair, visits 1-2: " in text and "K/V" not in text
    text = told("smelt", [40, 30], num_key_value_heads=1)
    assert "queries that see 2 keys or more: two visits have the same" in text and "1-2" not in text
    assert "All heads of a layer read one K/V head" in text
    assert told("llama").startswith("No layer is visited twice")
    assert "No query" in told("smelt", [1, 1])


def test_progress_counts_heads_and_queries(make_run):
    run = make_run([PROBE], [90, 80], "smelt")
    arrays = {n: a.values for n, a in run["attended_tokens"].data_vars.items()}
    shape = type("Shape", (), {"visit_pairs": [(1, 2)]})
    ((total, count),) = PROBE.progress(arrays, shape).values()
    summary = summarize(run, PROBE, draws=0)
    assert total / count == pytest.approx(float(summary["top8"].mean()), rel=1e-5)
