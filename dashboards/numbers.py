"""Any quantity of a summary as the rows of a table, for what is picked of layers, visits and heads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from smeltscope.dashboards.overview import is_signed, number, with_interval

_WORDS = {"looped_layer": "layer", "visit_pair": "visits", "kv_head": "key/value head"}


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """A table: the names of its columns, its rows, and how many more there are."""

    columns: list[str]
    rows: list[list[str]]
    more: int


def quantities_in(summary: xr.Dataset) -> list[str]:
    """The quantities of a summary that have a value, without the ends of their intervals."""
    return [
        name
        for name in map(str, summary.data_vars)
        if f"{name}_low" in summary and bool(np.isfinite(summary[name].values).any())
    ]


def choices(summary: xr.Dataset) -> dict[str, list[int]]:
    """What there is to pick from: the layers, visits and heads of a summary, where there is more than one."""
    found = {
        name: np.unique(summary[name]).tolist()
        for name in ("layer", "visit", "head")
        if name in summary.coords
    }
    if "layer" not in found and "looped_layer" in summary.coords:
        found["layer"] = summary["looped_layer"].values.tolist()
    return {name: values for name, values in found.items() if len(values) > 1}


def table_of(
    summary: xr.Dataset, quantity: str, picked: Mapping[str, Any], *, most: int
) -> Numbers:
    """The entries of a quantity that have a value, each with its interval; of a comparison with both runs' values."""
    array = summary[quantity]
    dims = [str(dim) for dim in array.dims]
    sides = [f"{quantity}_{side}" for side in "ba" if f"{quantity}_b" in summary]
    kept = np.isfinite(array.values)
    for axis, dim in enumerate(dims):
        wanted = _wanted(summary, dim, picked)
        kept &= np.expand_dims(wanted, [i for i in range(len(dims)) if i != axis])
    places = np.argwhere(kept)
    signed = bool(sides) or is_signed(quantity)
    ends = [summary[f"{quantity}{end}"].values for end in ("", "_low", "_high")]
    rows = [
        [
            *(
                label
                for dim, i in zip(dims, place, strict=True)
                for label in _labels(summary, dim, i)
            ),
            *(number(summary[side].values[tuple(place)]) for side in sides),
            with_interval(*(float(end[tuple(place)]) for end in ends), signed=signed),
        ]
        for place in places[:most]
    ]
    columns = [name for dim in dims for name in _columns(dim)]
    columns += ["this run", "the other", "difference [95 %]"] if sides else ["value [95 %]"]
    return Numbers(columns=columns, rows=rows, more=max(0, len(places) - most))


def _wanted(summary: xr.Dataset, dim: str, picked: Mapping[str, Any]) -> np.ndarray:
    """Which entries of a dimension are picked."""
    wanted = np.ones(summary.sizes[dim], dtype=bool)
    if dim == "execution":
        for name in ("layer", "visit"):
            if name in picked:
                wanted &= summary[name].values == picked[name]
    elif dim == "looped_layer" and "layer" in picked:
        wanted = summary[dim].values == picked["layer"]
    elif dim == "visit_pair" and "visit" in picked:
        wanted = (summary["visit_a"].values == picked["visit"]) | (
            summary["visit_b"].values == picked["visit"]
        )
    elif dim in ("head", "write", "map_region"):
        name = dim.removeprefix("map_")
        if name in picked:
            wanted = summary[dim].values == picked[name]
    return wanted


def _columns(dim: str) -> list[str]:
    return ["layer", "visit"] if dim == "execution" else [_WORDS.get(dim, dim.replace("_", " "))]


def _labels(summary: xr.Dataset, dim: str, i: int) -> list[str]:
    if dim == "execution":
        return [str(summary[name].values[i]) for name in ("layer", "visit")]
    return [str(summary[dim].values[i] if dim in summary.coords else i)]
