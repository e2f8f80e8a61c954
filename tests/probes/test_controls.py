"""Models built by hand, in which every diagnostic is known: what is there is found, what is not there is not."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import smeltscope
from smeltscope.registry import PROBES

PAGE = Path(__file__).parents[2] / "docs" / "controls.md"
TYPES = ("float32", "bfloat16")
# What every probe has to say of visits that are the same, wherever it says anything.
SAME: dict[str, dict[str, float]] = {
    "attention-sink": {"change": 0, "region_change": 0},
    "router-overlap": {
        "overlap": 2, "jaccard": 1, "shared_weight_earlier": 1, "shared_weight_later": 1,
        "no_overlap": 0, "swapped_in": 0, "swapped_out": 0,
    },
    "residual-updates": {"norm_ratio": 1, "relative_update_ratio": 1, "matched_cosine": 1},
    "qkv-similarity": {
        "cosine": 1, "query_head_cosine": 1, "key_head_cosine": 1, "cosine_centred": 1,
        "query_head_cosine_centred": 1, "key_head_cosine_centred": 1, "v_minus_random": 0,
    },
    "attended-tokens": {"top1": 1, "top8": 1, "overlap": 1, "top8_without_first": 1},
    "swap": {
        "first_change": 0, "first_change_by_queries": 0, "first_change_by_keys": 0,
        "mass_change": 0, "change_square": 0,
    },
}  # fmt: skip
# What has no value in them, for it would be 0 / 0.
NOTHING = {
    "residual-updates": ["matched_cosine_centred"],
    "swap": ["moved_share", "values_share", "interaction_share"],
}


@pytest.fixture(scope="module")
def found() -> Callable[[str, str], dict[str, xr.Dataset]]:
    """Every probe's summary of a control over the shipped text."""

    @cache
    def summaries(name: str, dtype: str) -> dict[str, xr.Dataset]:
        run = smeltscope.probe(name, probes=list(PROBES), tokens=6_000, dtype=dtype, quiet=True)
        return {probe: smeltscope.summarize(run, probe, draws=50) for probe in PROBES}

    return summaries


# bfloat16 rounds the rotary tables: where few positions are averaged, .60 is .59 to .62.
@pytest.mark.parametrize(("dtype", "by_position"), [("float32", 0.02), ("bfloat16", 0.03)])
def test_the_moved_sink_is_found(found, dtype: str, by_position: float) -> None:
    summary = found("control-moved-sink", dtype)["attention-sink"]
    looped = np.isin(summary["layer"], summary["layer"][summary["visit"] == 2])
    for visit, mass in ((1, 0.60), (2, 0.02)):
        chosen = summary.isel(execution=looped & (summary["visit"].values == visit))
        np.testing.assert_allclose(chosen["sink_mass"], mass, atol=0.005)
        bins = chosen["sink_mass_by_position"].values[:, 1:]
        np.testing.assert_allclose(bins[np.isfinite(bins)], mass, atol=by_position)
    later = summary["visit"].values == 2
    assert (summary["change"].values[later] < -0.57).all()
    assert (summary["change_high_all"].values[later] < 0).all()


@pytest.mark.parametrize("dtype", TYPES)
def test_where_the_moved_sink_went(found, dtype: str) -> None:
    """All that the first token loses goes to the query's own key; nothing else moves."""
    summary = found("control-moved-sink", dtype)["attention-sink"]
    by_region = summary["region_change"].mean("head").isel(execution=summary["visit"].values == 2)
    np.testing.assert_allclose(by_region.sel(region="first"), -0.58, atol=0.005)
    np.testing.assert_allclose(by_region.sel(region="self"), 0.58, atol=0.005)
    for region in ("previous", "local", "rest"):
        np.testing.assert_allclose(by_region.sel(region=region), 0, atol=0.005)


@pytest.mark.parametrize("dtype", TYPES)
def test_swap_says_what_moved_it(found, dtype: str) -> None:
    """The split between queries and keys adds up to the change."""
    summary = found("control-moved-sink", dtype)["swap"]
    parts = summary["first_change_by_queries"] + summary["first_change_by_keys"]
    np.testing.assert_allclose(parts, summary["first_change"], atol=1e-5)
    np.testing.assert_allclose(summary["first_change"], -0.58, atol=0.005)
    np.testing.assert_allclose(summary["first_change_by_queries"], -0.58, atol=0.01)


@pytest.mark.parametrize("dtype", TYPES)
def test_the_same_visits_differ_in_nothing(found, dtype: str) -> None:
    same = found("control-same-visits", dtype)
    for probe, expected in SAME.items():
        for name, value in expected.items():
            values = same[probe][name].values
            missing = np.isnan(values)
            if name in ("change", "region_change"):  # first visits have no earlier one
                missing = missing[same[probe]["visit"].values > 1]
            elif name == "cosine_centred":  # all writes of attention are the same
                missing = missing[same[probe]["stage"].values != "O"]
            assert not missing.any() and missing.size, name
            bound = 0 if value == 0 else 1e-6
            np.testing.assert_allclose(values[~np.isnan(values)], value, atol=bound, err_msg=name)
    for probe, names in NOTHING.items():
        for name in names:
            assert np.isnan(same[probe][name]).all(), name
    assert np.isnan(same["qkv-similarity"]["cosine_centred"].sel(stage="O")).all()


def test_the_page_names_what_has_no_value() -> None:
    named = set(re.findall(r"`(\w+)`", PAGE.read_text()))
    assert {name for names in NOTHING.values() for name in names} <= named
