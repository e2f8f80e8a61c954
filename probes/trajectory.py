"""Many checkpoints of one training: what a diagnostic finds, along the steps."""

from collections.abc import Callable, Collection, Mapping

import xarray as xr

from smeltscope.errors import SmeltscopeError
from smeltscope.probes.compare import averaged, check_comparable
from smeltscope.probes.probe import Probe
from smeltscope.probes.statistics import DRAWS
from smeltscope.probes.summary import dataset_of, estimate


def trajectory(
    runs: Mapping[int, xr.DataTree],
    probe_of: Callable[[xr.DataTree], Probe],
    *,
    mean_over: Collection[str] = (),
    draws: int = DRAWS,
    seed: int = 0,
) -> xr.Dataset:
    """The summary of a probe for each of `runs`, {step: run}, along the dimension `step`, in ascending order.

    `probe_of` gives the probe with the options of a run. Dimensions in `mean_over` are averaged over, as in `compare`. Every
    draw of the bootstrap takes the same documents at all steps. Raises `SmeltscopeError` when there is no run, and for runs over
    different data.
    """
    if not runs:
        raise SmeltscopeError("A trajectory needs at least one run.")
    steps = sorted(runs)
    for step in steps[1:]:
        check_comparable(runs[steps[0]], runs[step])
    parts = [
        dataset_of(averaged(estimate(run, probe_of(run), draws=draws, seed=seed), mean_over), run)
        for run in map(runs.__getitem__, steps)
    ]
    found = xr.concat(parts, xr.DataArray(steps, dims="step", name="step"), join="outer")
    return found.assign_attrs(probe=probe_of(runs[steps[0]]).name)
