"""Each pair of visits by itself: means over layers and heads, and how sentences name them."""

from collections.abc import Mapping

import numpy as np
import xarray as xr

from smeltscope.probes.statistics import Estimate, Quantities, quantities


def averages(estimates: Mapping[str, Estimate]) -> Quantities:
    """Of estimates over (looped_layer, visit_pair, ...): `X_by_pair` over (visit_pair), the mean over layers and heads, and
    `X_overall`, that over pairs too. Every entry that has a value counts alike."""
    return {
        **quantities((), {f"{n}_overall": e.flatten().mean() for n, e in estimates.items()}),
        **quantities(("visit_pair",), {f"{n}_by_pair": mean_of(e) for n, e in estimates.items()}),
    }


def mean_of(estimate: Estimate) -> Estimate:
    """(looped_layer, visit_pair, ...) -> (visit_pair)."""
    value, draws = np.moveaxis(estimate.value, 1, 0), np.moveaxis(estimate.draws, 2, 1)
    size = value[0].size
    return Estimate(
        value=value.reshape(len(value), size), draws=draws.reshape(*draws.shape[:2], size)
    ).mean()


def first_of(summary: xr.Dataset) -> tuple[xr.Dataset, str]:
    """The numbers of visits 1 and 2, of which sentences speak, and these visits in words."""
    number = summary.sizes["visit_pair"]
    return summary.isel(visit_pair=0), "visits 1 and 2" if number > 1 else "two visits"


def each_of(values: xr.DataArray, form: str) -> str:
    """`visits 1-2: 3.10, 1-3: 2.80, 2-3: 3.40` of values over (visit_pair); nothing where there is one pair."""
    if values.sizes["visit_pair"] == 1:
        return ""
    said = [f"{pair}: {value:{form}}" for pair, value in values.to_series().items()]
    return f"visits {', '.join(said)}"
