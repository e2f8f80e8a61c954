"""Two runs over the same documents, paired: what differs between two models, or between two settings of one."""

from collections.abc import Collection, Hashable, Iterable, Sequence

import numpy as np
import xarray as xr

from smeltscope.activations import attributes_of, flattened
from smeltscope.errors import SmeltscopeError
from smeltscope.probes.probe import Probe
from smeltscope.probes.statistics import DRAWS, Estimate, Quantities, Quantity, Resampling
from smeltscope.probes.summary import dataset_of

HEADS = ("head", "kv_head")


def compare(
    a: xr.DataTree,
    b: xr.DataTree,
    probe_a: Probe,
    probe_b: Probe,
    *,
    mean_over: Collection[str] = (),
    draws: int = DRAWS,
    seed: int = 0,
) -> xr.Dataset:
    """B minus A, for every quantity that both runs have of a probe.

    `X` is the difference, `X_low` and `X_high` its 95 % interval (`X_low_all` and `X_high_all` as in `summarize`),
    `X_a` and `X_b` what it is the difference of (of the probe's `names` these alone). Each draw of the bootstrap takes the same documents for both, so that
    what varies between texts cancels where it is alike in both. Executions are matched by layer and visit,
    other dimensions by their labels; what only one run has is left out, whole quantities by name in the
    attributes `only_a` and `only_b`, and so are means over pairs of visits (`X_overall` beside `X_by_pair`) of models with
    different numbers of visits. Where the models have different numbers of heads, means over heads are compared.
    Dimensions in `mean_over` are averaged over once they are matched.

    `probe_a` and `probe_b` are the probe with the options of each run. Raises `SmeltscopeError` for
    runs over different data and for unfinished ones.
    """
    check_comparable(a, b)
    found_a, found_b = (
        probe.estimates(run, Resampling.of_run(run, draws=draws, seed=seed))
        for run, probe in ((a, probe_a), (b, probe_b))
    )
    if any(a.sizes.get(head, 0) != b.sizes.get(head, 0) for head in HEADS):
        found_a, found_b = averaged(found_a, HEADS), averaged(found_b, HEADS)
    shared = [n for n in found_a if n in found_b and found_a[n].dims == found_b[n].dims]
    other_visits = a.sizes.get("visit_pair") != b.sizes.get("visit_pair")
    by_pair = [n for n in shared if n.endswith("_by_pair")] if other_visits else []
    mixed = {n.replace("_by_pair", "_overall") for n in by_pair}
    shared = [n for n in shared if n not in mixed]
    sizes_a, sizes_b = (_sizes(found[name] for name in shared) for found in (found_a, found_b))
    places = {
        dim: _matched(_labels(a, dim, sizes_a[dim]), _labels(b, dim, sizes_b[dim]))
        for dim in sizes_a
    }
    sides = [
        {
            name: Quantity(
                dims=found[name].dims,
                estimate=_taken(found[name].estimate, [places[d][side] for d in found[name].dims]),
                family=found[name].family,
            )
            for name in shared
            if all(places[dim][side] for dim in found[name].dims)
        }
        for side, found in enumerate((found_a, found_b))
    ]
    of_a, of_b = (averaged(side, mean_over) for side in sides)
    differences = {
        name: Quantity(
            dims=of_a[name].dims,
            estimate=of_b[name].estimate - of_a[name].estimate,
            family=of_a[name].family,
        )
        for name in of_a
        if name not in probe_a.names
    }
    index = {dim: index for dim, (index, _) in places.items()}
    labels = a.to_dataset().isel(index, missing_dims="ignore")
    values = {
        f"{name}_{end}": (quantity.dims, quantity.estimate.value)
        for end, side in (("a", of_a), ("b", of_b))
        for name, quantity in side.items()
    }
    return (
        dataset_of(differences, xr.DataTree(labels))
        .assign(values)
        .assign_attrs(
            probe=probe_a.name,
            only_a=[name for name in found_a if name not in {*of_a, *mixed}],
            only_b=[name for name in found_b if name not in {*of_b, *mixed}],
            documents=len(np.unique(a["segments"]["document"])),
        )
    )


def averaged(quantities: Quantities, over: Collection[str] = HEADS) -> Quantities:
    """Quantities with their mean over some dimensions; every entry that has a value counts alike."""
    found = {}
    for name, quantity in quantities.items():
        kept = [axis for axis, dim in enumerate(quantity.dims) if dim not in over]
        gone = [axis for axis, dim in enumerate(quantity.dims) if dim in over]
        if not gone:
            found[name] = quantity
            continue
        estimate = quantity.estimate
        value, draws = estimate.value, np.moveaxis(estimate.draws, 0, -1)  # (..., draw)
        shape = [value.shape[axis] for axis in kept]
        value = value.transpose(kept + gone).reshape(*shape, -1)
        draws = draws.transpose(kept + gone + [-1]).reshape(*value.shape, -1)
        estimate = Estimate(value=value, draws=np.moveaxis(draws, -1, 0)).mean()
        dims = tuple(quantity.dims[axis] for axis in kept)
        found[name] = Quantity(dims=dims, estimate=estimate, family=quantity.family)
    return found


def check_comparable(a: xr.DataTree, b: xr.DataTree) -> None:
    """Refuse runs that are unfinished or over different data."""
    for which, run in (("first", a), ("second", b)):
        missing = int((run["segments"].dataset["done"] == 0).sum())
        if missing:
            raise SmeltscopeError(
                f"The {which} run still lacks {missing} of {run.sizes['segment']} segments; finish it with the "
                "command that began it."
            )
    of_a, of_b = (attributes_of(run)["identity"] for run in (a, b))
    if of_a["data_digest"] != of_b["data_digest"]:
        raise SmeltscopeError(
            f"The two runs are over different data ({'; '.join(_data_differences(a, b))}); run both over the same "
            "--data, --tokens and --max-length, with checkpoints that share a tokenizer."
        )


def other_differences(a: xr.DataTree, b: xr.DataTree) -> list[str]:
    """Options in which two runs over the same data differ, as `name: A and B`: each may change numbers."""
    found = [flattened(attributes_of(run)["identity"]) for run in (a, b)]
    unimportant = ("checkpoint_digest", "data_digest", "batch_tokens")
    # A probe without options has none that differ, and one that is off is not known to older files.
    names = {name for of_run in found for name, value in of_run.items() if value != {}}
    return [
        f"{name}: {found[0].get(name, 'none')} and {found[1].get(name, 'none')}"
        for name in sorted(names - set(unimportant))
        if (found[0].get(name) or None) != (found[1].get(name) or None)
    ]


def _data_differences(a: xr.DataTree, b: xr.DataTree) -> list[str]:
    """What the data of two runs differ in, as far as their files say."""
    segments_a, segments_b = (run["segments"].dataset for run in (a, b))
    of_a, of_b = (attributes_of(run) for run in (a, b))
    pairs = {
        "tokenizer": (of_a["tokenizer"], of_b["tokenizer"]),
        "max_length": tuple(of["identity"]["max_length"] for of in (of_a, of_b)),
        "documents": tuple(len(np.unique(s["document_id"])) for s in (segments_a, segments_b)),
        "segments": tuple(s.sizes["segment"] for s in (segments_a, segments_b)),
        "tokens": tuple(int(s["tokens"].sum()) for s in (segments_a, segments_b)),
    }
    differences = [f"{name}: {x} and {y}" for name, (x, y) in pairs.items() if x != y]
    ids_a, ids_b = (set(s["document_id"].values.tolist()) for s in (segments_a, segments_b))
    if ids_a != ids_b:
        differences.append(f"documents in common: {len(ids_a & ids_b)}")
    return differences or ["the token ids"]


def _sizes(quantities: Iterable[Quantity]) -> dict[str, int]:
    return {
        dim: size
        for quantity in quantities
        for dim, size in zip(quantity.dims, quantity.estimate.value.shape, strict=True)
    }


def _labels(run: xr.DataTree, dim: str, size: int) -> list[Hashable]:
    """What an entry of a dimension is matched by; its number where the run has no such dimension."""
    if dim in ("execution", "other_execution"):
        layers, visits = (run.dataset[name].values.tolist() for name in ("layer", "visit"))
        return list(zip(layers, visits, strict=True))
    if dim not in run.dataset.coords:
        return list(range(size))
    labels: list[Hashable] = run.dataset[dim].values.tolist()
    return labels


def _taken(estimate: Estimate, places: Sequence[list[int]]) -> Estimate:
    """An estimate at chosen places along each of its axes."""
    return estimate[np.ix_(*places)] if places else estimate


def _matched(a: Sequence[Hashable], b: Sequence[Hashable]) -> tuple[list[int], list[int]]:
    """Where the labels that both have stand in each, in the order of the first."""
    places = {label: i for i, label in enumerate(b)}
    pairs = [(i, places[label]) for i, label in enumerate(a) if label in places]
    return [i for i, _ in pairs], [j for _, j in pairs]
