"""Three visits: every pair by itself, against averages in plain loops; visits 1 and 2 are those of a model of two."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import xarray as xr

from smeltscope.activations import open_run
from smeltscope.dashboards.overview import headlines
from smeltscope.model import with_visits
from smeltscope.probes import RunOptions, run_probes, summarize
from smeltscope.probes.compare import compare
from smeltscope.registry import make_probe

PAIRS = ["1-2", "1-3", "2-3"]
NAMES = ("attention-sink", "router-overlap", "attended-tokens", "swap", "residual-updates")
LENGTHS = (90, 80, 70, 30, 12, 2, 1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, make_checkpoint, make_heldout) -> dict[int, xr.DataTree]:
    """By number of visits: the same weights over the same text."""
    folder, probes = tmp_path_factory.mktemp("runs"), [make_probe(name) for name in NAMES]
    options, heldout = RunOptions(max_length=90, batch_tokens=1600), make_heldout(LENGTHS)
    checkpoint, made = make_checkpoint("smelt", num_physical_layers=4), {}
    for visits in (1, 2, 3):
        out, model = folder / f"{visits}.h5", with_visits(checkpoint.model, visits)
        run_probes(replace(checkpoint, model=model), heldout, probes, out, options)
        made[visits] = open_run(out)
    return made


@pytest.fixture(scope="module")
def summaries(runs) -> dict[str, xr.Dataset]:
    return {name: summarize(runs[3], make_probe(name), draws=40) for name in NAMES}


def test_changes_of_the_sink_like_slow_loops(runs, summaries) -> None:
    summary, data = summaries["attention-sink"], runs[3]["attention_sink"].dataset
    layers, visits = data["layer"].values.tolist(), data["visit"].values.tolist()
    place = {at: e for e, at in enumerate(zip(layers, visits, strict=True))}
    queries, sampled = (data[n].values.astype(float) for n in ("queries", "sampled_queries"))
    looped = sorted({layer for layer, visit in place if visit == 3})
    assert summary["looped_layer"].values.tolist() == looped
    assert summary["visit_pair"].values.tolist() == PAIRS
    for p, (a, b) in enumerate(((1, 2), (1, 3), (2, 3))):
        all_heads, by_region = [], []
        for i, layer in enumerate(looped):
            for h in range(summary.sizes["head"]):
                means, masses = [], []
                for visit in (a, b):
                    e = place[layer, visit]
                    means.append(data["sink_mass_sum"].values[:, e, h].sum() / queries[:, e].sum())
                    masses.append(
                        data["region_mass_sum"].values[:, e, h].sum(0) / sampled[:, e].sum()
                    )
                change = means[1] - means[0]
                found = float(summary["pair_change"][i, p, h])
                assert found == pytest.approx(change, abs=1e-6)
                if a == 1:  # as the change of the execution says
                    assert found == float(summary["change"][place[layer, b], h])
                all_heads.append(change)
                by_region.append(masses[1] - masses[0])
        assert float(summary["change_by_pair"][p]) == pytest.approx(np.mean(all_heads), abs=1e-6)
        regions = summary["region_change_by_pair"][p].values
        kept = np.isfinite(regions)
        np.testing.assert_allclose(regions[kept], np.mean(by_region, axis=0)[kept], atol=1e-6)
    assert {"pair_change_low_all", "change_by_pair_low"} <= set(summary.data_vars)


@pytest.mark.parametrize("name", ["router-overlap", "attended-tokens", "swap"])
def test_means_of_each_pair_like_slow_loops(summaries, name: str) -> None:
    summary, compared = summaries[name], 0
    assert summary["visit_pair"].values.tolist() == PAIRS
    for quantity in map(str, summary.data_vars):
        if not quantity.endswith("_by_pair"):
            continue
        whole = summary[quantity.removesuffix("_by_pair")]
        means = []
        for pair in PAIRS:
            entries = [float(x) for x in whole.sel(visit_pair=pair).values.ravel()]
            means.append(np.mean([x for x in entries if np.isfinite(x)] or [np.nan]))
        np.testing.assert_allclose(summary[quantity], means, atol=1e-9)
        overall = summary[quantity.replace("_by_pair", "_overall")]
        np.testing.assert_allclose(overall, np.mean(means), atol=1e-9)  # as many layers in each
        compared += 1
    assert compared >= 10


def test_one_pair_is_the_mean_over_all(runs) -> None:
    for name in ("attention-sink", "router-overlap", "attended-tokens", "swap"):
        summary = summarize(runs[2], make_probe(name), draws=40)
        names = [n for n in map(str, summary.data_vars) if "_by_pair" in n]
        assert names
        for quantity in names:
            overall = summary[quantity.replace("_by_pair", "_overall")]
            assert summary[quantity].sizes["visit_pair"] == 1
            np.testing.assert_allclose(summary[quantity][0], overall, rtol=1e-6, atol=1e-9)


def test_one_visit_has_no_pairs(runs) -> None:
    for name in NAMES:
        summary = summarize(runs[1], make_probe(name), draws=2)
        assert "visit_pair" not in summary.dims, name
        assert make_probe(name).sentence(summary)


def test_sentences_speak_of_visits_1_and_2(runs, summaries) -> None:
    for name in ("router-overlap", "attended-tokens", "swap"):
        text = make_probe(name).sentence(summaries[name])
        assert "visit 2" in text or "visits 1 and 2" in text, text
        assert "two visits" not in text and "a later visit" not in text, text
        assert text.count("visits 1-2: ") == text.count(", 1-3: ") == text.count(", 2-3: ") == 1
        two = make_probe(name).sentence(summarize(runs[2], make_probe(name), draws=40))
        assert "1-2" not in two and "visits 1 and 2" not in two
    shared = float(summaries["router-overlap"]["overlap_by_pair"][0])
    text = make_probe("router-overlap").sentence(summaries["router-overlap"])
    assert f"visits 1 and 2 share {shared:.2f} [" in text
    changes = summaries["attention-sink"]["change_by_pair"].values
    said = ", ".join(f"{p}: {c:+.2g}" for p, c in zip(PAIRS, changes, strict=True))
    text = make_probe("attention-sink").sentence(summaries["attention-sink"])
    assert f" (visits {said}), lower in " in text


def test_headline_numbers_of_each_pair(runs, summaries) -> None:
    found = {f.what: f for f in headlines(summaries["attention-sink"], "attention-sink")}
    assert [w for w in found if w.startswith("sink mass at")] == [
        f"sink mass at visit {b} minus visit {a}" for a, b in ((1, 2), (1, 3), (2, 3))
    ]
    assert "nearly all" in found["sink mass at visit 2 minus visit 1"].paper
    assert found["sink mass at visit 3 minus visit 2"].paper == ""
    assert found["sink mass at visit 3 minus visit 2"].layers
    said = [f.what for f in headlines(summaries["router-overlap"], "router-overlap")]
    assert said == [f"experts shared by two visits, visits {pair}" for pair in PAIRS]
    said = [f.what for f in headlines(summaries["residual-updates"], "residual-updates")]
    assert "norm at visit 3 / at visit 2, whole update" in said
    for name in NAMES:
        summary = summarize(runs[2], make_probe(name), draws=2)
        assert not [f.what for f in headlines(summary, name) if "3" in f.what or "1-2" in f.what]


def test_models_of_two_and_of_three_visits_are_compared_pair_by_pair(runs) -> None:
    """Visits 1 and 2 of both are the same execution of the same weights; what mixes pairs is not compared."""
    probe = make_probe("router-overlap")
    found = compare(runs[2], runs[3], probe, probe, draws=2)
    assert found["visit_pair"].values.tolist() == ["1-2"]
    np.testing.assert_allclose(found["overlap_by_pair"], 0, atol=1e-9)
    assert "overlap_overall" not in found
    assert not [n for side in "ab" for n in found.attrs[f"only_{side}"]]
    same = compare(runs[3], runs[3], probe, probe, draws=2)
    assert float(same["overlap_overall"]) == 0


def test_every_pair_is_named_in_order(summaries) -> None:
    for summary in summaries.values():
        pairs = [*zip(summary["visit_a"].values, summary["visit_b"].values, strict=True)]
        assert all(a < b for a, b in pairs) and pairs == sorted(pairs)
        assert {*pairwise((1, 2, 3))} <= set(pairs)  # consecutive ones too
