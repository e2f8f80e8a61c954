"""Groups of a run's documents, each to be summarised by itself: by category, by length, by how hard they are."""

from collections.abc import Mapping
from typing import Literal

import numpy as np
import xarray as xr

from smeltscope.errors import SmeltscopeError
from smeltscope.probes.compare import check_comparable
from smeltscope.probes.probe import Probe
from smeltscope.probes.statistics import DRAWS
from smeltscope.probes.summary import summarize

LENGTH_BOUNDS = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # tokens; those of arXiv 2609.01343
QUARTILES = ("Q1 (lowest)", "Q2", "Q3", "Q4 (highest)")

By = Literal["category", "length", "baseline-loss"]
Groups = Mapping[str, np.ndarray]  # {label: which segments, (segment,) bool}


def groups_of(run: xr.DataTree, by: By, baseline: xr.DataTree | None = None) -> Groups:
    """The segments of a run by a property of their documents.

    - `category`: as the data names it.
    - `length`: tokens of all segments of the document, start tokens included, in the eight buckets 1-32, 33-64, ...,
      2049-4096. Longer documents, if there are any, get a bucket of their own.
    - `baseline-loss`: quartiles, over documents, of the document's mean loss under a Baseline, from a run of the probe
      loss over the same data. Equal losses stay together, so quartiles may differ in size; documents of which no
      token is predicted are in none.

    A bucket without documents is kept, with no segment. Raises `SmeltscopeError` when the Baseline's run is missing, has no
    loss or is over other data.
    """
    segments = run["segments"].dataset
    _, document = np.unique(segments["document"].values, return_inverse=True)
    if by == "category":
        category = segments["category"].values
        return {str(name): category == name for name in np.unique(category)}
    if by == "length":
        length = np.bincount(document, weights=segments["tokens"].values)
        starts = [1, *(bound + 1 for bound in LENGTH_BOUNDS)]
        labels = [f"{a}-{b}" for a, b in zip(starts, LENGTH_BOUNDS, strict=False)]
        bucket = np.searchsorted(LENGTH_BOUNDS, length)  # (document,)
        labels += [f"over {LENGTH_BOUNDS[-1]}"] * bool((bucket == len(labels)).any())
        return {label: bucket[document] == i for i, label in enumerate(labels)}
    loss = _document_losses(run, baseline)
    edges = np.nanquantile(loss, [0.25, 0.5, 0.75])
    quartile = np.where(np.isfinite(loss), np.searchsorted(edges, loss), len(QUARTILES))
    return {label: quartile[document] == i for i, label in enumerate(QUARTILES)}


def restricted(run: xr.DataTree, mask: np.ndarray) -> xr.DataTree:
    """The run over the segments of `mask` (segment,) alone, for `summarize`.

    Tables are kept by category: of a mask that cuts a category in two they hold nothing, and what is estimated from them
    is NaN.
    """
    category = run["segments"].dataset["category"].values
    inside, outside = set(category[mask]), set(category[~mask])
    whole = sorted(inside) if inside.isdisjoint(outside) else []
    part = run.isel(segment=np.flatnonzero(mask))
    for node in part.children.values():
        data = node.to_dataset(inherit=False)
        tables = {
            name: array.where(array["table_category"].isin(whole), 0)
            for name, array in node.dataset.data_vars.items()
            if "table_category" in array.dims
        }
        node.dataset = data.assign(tables)
    return part


def summarize_groups(
    run: xr.DataTree, probe: Probe, groups: Groups, *, draws: int = DRAWS, seed: int = 0
) -> xr.Dataset:
    """The summary of each group along the dimension `group`, labelled with how many `documents` and `segments` it has.

    A group of none has NaN for everything.
    """
    parts = {
        label: summarize(restricted(run, mask), probe, draws=draws, seed=seed)
        for label, mask in groups.items()
        if mask.any()
    }
    labels = xr.DataArray(list(parts), dims="group", name="group")
    found = xr.concat(list(parts.values()), labels, combine_attrs="drop_conflicts")
    counts = {
        name: ("group", [parts[label].attrs[name] if label in parts else 0 for label in groups])
        for name in ("documents", "segments")
    }
    return found.reindex(group=list(groups)).assign_coords(counts)


def _document_losses(run: xr.DataTree, baseline: xr.DataTree | None) -> np.ndarray:
    """Mean loss of each document of `run`, in ascending order of documents, under the Baseline; NaN where it has none."""
    if baseline is None or "loss" not in baseline.children:
        raise SmeltscopeError(
            "Quartiles of Baseline loss need a run of the probe loss with the Baseline over the same data: make "
            "one with probe loss, and name its run file."
        )
    check_comparable(run, baseline)
    _, document = np.unique(baseline["segments"].dataset["document"].values, return_inverse=True)
    loss, tokens = (
        np.bincount(document, weights=baseline["loss"].dataset[name].values)
        for name in ("loss_sum", "tokens")
    )
    with np.errstate(invalid="ignore"):
        return loss / tokens
