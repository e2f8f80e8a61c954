"""Models built by hand, in which every diagnostic is known: what is there is found, what is not there is not."""

import numpy as np
import pytest
import xarray as xr

import smeltscope
from smeltscope.registry import PROBES


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, xr.Dataset]]:
    """Every probe's summary of both controls over the same shipped text."""
    summaries = {}
    for name in ("control-moved-sink", "control-same-visits"):
        run = smeltscope.probe(name, probes=list(PROBES), tokens=6_000, quiet=True)
        summaries[name] = {probe: smeltscope.summarize(run, probe, draws=50) for probe in PROBES}
    return summaries


def test_the_moved_sink_is_found(found) -> None:
    summary = found["control-moved-sink"]["attention-sink"]
    looped = np.isin(summary["layer"], summary["layer"][summary["visit"] == 2])
    for visit, mass in ((1, 0.60), (2, 0.02)):
        chosen = summary.isel(execution=looped & (summary["visit"].values == visit))
        np.testing.assert_allclose(chosen["sink_mass"], mass, atol=0.02)
        by_position = chosen["sink_mass_by_position"].values[:, 1:]
        np.testing.assert_allclose(by_position[np.isfinite(by_position)], mass, atol=0.02)
    change = summary["change"].values[summary["visit"].values == 2]
    assert (change < -0.5).all()
    assert (summary["change_high_all"].values[summary["visit"].values == 2] < 0).all()


def test_where_the_moved_sink_went(found) -> None:
    """All that the first token loses goes to the query's own key; nothing else moves."""
    summary = found["control-moved-sink"]["attention-sink"]
    by_region = summary["region_change"].mean("head").isel(execution=summary["visit"].values == 2)
    np.testing.assert_allclose(by_region.sel(region="first"), -0.58, atol=0.02)
    np.testing.assert_allclose(by_region.sel(region="self"), 0.58, atol=0.02)
    for region in ("previous", "local", "rest"):
        np.testing.assert_allclose(by_region.sel(region=region), 0, atol=0.01)


def test_swap_says_what_moved_it(found) -> None:
    """The split between queries and keys adds up to the change."""
    summary = found["control-moved-sink"]["swap"]
    parts = summary["first_change_by_queries"] + summary["first_change_by_keys"]
    np.testing.assert_allclose(parts, summary["first_change"], atol=1e-5)
    np.testing.assert_allclose(summary["first_change"], -0.58, atol=0.03)


def test_the_same_visits_differ_in_nothing(found) -> None:
    same = found["control-same-visits"]
    sink = same["attention-sink"]
    later = sink["visit"].values == 2
    np.testing.assert_allclose(sink["change"].values[later], 0, atol=1e-6)
    overlap = same["router-overlap"]["overlap"]
    experts = same["router-overlap"]["shared_experts"].values[-1]
    np.testing.assert_allclose(overlap, experts, atol=1e-6)
    ratios = same["residual-updates"]["norm_ratio"].values
    np.testing.assert_allclose(ratios[np.isfinite(ratios)], 1, atol=1e-5)
    cosines = same["qkv-similarity"]["cosine"].values
    assert np.isfinite(cosines).any()
    np.testing.assert_allclose(cosines[np.isfinite(cosines)], 1, atol=1e-5)
    attended = same["attended-tokens"]
    for name in ("top1", "top8", "overlap"):
        values = attended[name].values
        np.testing.assert_allclose(values[np.isfinite(values)], 1, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(same["swap"]["first_change"], 0, atol=1e-6)
