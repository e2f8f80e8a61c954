"""Summaries: what a probe's rows amount to, as a labelled dataset with intervals."""

from typing import Any

import numpy as np
import xarray as xr

from smeltscope.errors import SmeltscopeError
from smeltscope.probes.probe import Probe, group_name
from smeltscope.probes.prompts import by_item
from smeltscope.probes.statistics import DRAWS, Quantities, Resampling

FEWEST = 6  # documents of a category: of fewer, intervals are too narrow by more than a tenth


def summarize(run: xr.DataTree, probe: Probe, *, draws: int = DRAWS, seed: int = 0) -> xr.Dataset:
    """Everything that `probe` estimates from a run, with 95 % intervals from resampling its documents.

    Each `X` comes with `X_low` and `X_high`, percentiles over draws of documents within each category;
    quantities of which many are judged at once (every head, say) also with `X_low_all` and `X_high_all`, an interval that
    holds for all of them together (max-t). NaN where there is no value or no interval. Raises
    `SmeltscopeError` when the run has no such probe.
    """
    return summary_of(estimate(run, probe, draws=draws, seed=seed), run, probe, draws, seed)


def estimate(run: xr.DataTree, probe: Probe, *, draws: int = DRAWS, seed: int = 0) -> Quantities:
    """What `summarize` labels: every quantity of a probe with its draws."""
    if group_name(probe.name) not in run.children:
        raise SmeltscopeError(
            f"This run holds no {probe.name}; make one with --probes {probe.name}."
        )
    return probe.estimates(run, Resampling.of_run(run, draws=draws, seed=seed))


def summary_of(
    quantities: Quantities, run: xr.DataTree, probe: Probe, draws: int, seed: int
) -> xr.Dataset:
    """Quantities as a dataset that says what they were made from.

    `drawn`: how many documents (or items, where these are drawn) there are; `fewest`: how many of them the smallest category
    (kind and half of the prompts) has.
    """
    segments = run["segments"].dataset
    documents = drawn = Resampling.of_run(run, draws=0)
    if probe.resampled == "items" and "label_item" in segments:  # a run over text has none
        drawn = by_item(run, documents)
    return dataset_of(quantities, run).assign_attrs(
        probe=probe.name,
        resampled=probe.resampled,
        drawn=len(drawn.documents),
        fewest=drawn.documents.fewest,
        segments=len(segments["document"]),
        documents=len(documents.documents),
        tokens=int(segments["tokens"].sum()),
        bootstrap_draws=draws,
        bootstrap_seed=seed,
    )


def doubt_of(summary: xr.Dataset) -> str:
    """What to say of intervals that were drawn from too few documents; nothing where they were not, or there are none."""
    over, fewest = summary.attrs["resampled"], summary.attrs["fewest"]
    lows = [low for name, low in summary.data_vars.items() if str(name).endswith("_low")]
    if fewest >= FEWEST or not any(bool(low.notnull().any()) for low in lows):
        return ""
    over = over.removesuffix("s") if fewest == 1 else over
    return f"Intervals are too narrow: drawn from as few as {fewest} {over} of one kind."


def dataset_of(quantities: Quantities, run: xr.DataTree) -> xr.Dataset:
    """Quantities as a dataset, labelled as in the run; a dimension of no stored array is counted from 0."""
    arrays: dict[str, Any] = {}
    for name, quantity in quantities.items():
        dims, estimate = quantity.dims, quantity.estimate
        low, high = quantity.interval()
        arrays |= {name: (dims, estimate.value)}
        arrays |= {f"{name}_low": (dims, low), f"{name}_high": (dims, high)}
        if quantity.family:
            low, high = estimate.simultaneous_interval()
            arrays |= {f"{name}_low_all": (dims, low), f"{name}_high_all": (dims, high)}
    used = {
        dim: size for dims, v in arrays.values() for dim, size in zip(dims, v.shape, strict=True)
    }
    labels: dict[Any, Any] = {dim: np.arange(size) for dim, size in used.items()}
    labels |= {n: c for n, c in run.dataset.coords.items() if set(c.dims) <= set(used)}
    return xr.Dataset(arrays, coords=labels)
