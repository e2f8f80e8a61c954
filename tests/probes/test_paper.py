"""The paper's numbers stand beside ours, and beside the right ones."""

import numpy as np
import pytest
import xarray as xr

from smeltscope.probes.paper import REPORTED, Reported, reported_by
from smeltscope.registry import PROBES, make_probe


def test_every_entry_names_a_quantity_that_its_probe_has(make_run) -> None:
    """A misspelt name would show no number of ours, in silence."""
    from smeltscope.probes import summarize

    names = sorted({entry.probe for entry in REPORTED})
    assert set(names) <= set(PROBES)
    probes = [make_probe(name) for name in names]
    run = make_run(probes, lengths=(90, 33, 80, 25))
    for probe in probes:
        summary = summarize(run, probe, draws=2)
        for entry in reported_by(probe.name):
            ours = entry.ours(summary)
            assert ours is not None, entry
            assert np.isfinite(ours).all() and ours[0] <= ours[1]


@pytest.mark.parametrize("probe", PROBES)
def test_nothing_is_said_of_a_model_without_a_loop(make_run, probe: str) -> None:
    from smeltscope.probes import summarize

    made = make_probe(probe)
    summary = summarize(make_run([made], lengths=(20, 12), name="llama"), made, draws=2)
    for entry in reported_by(probe):
        assert entry.ours(summary) is None


def test_least_and_greatest_over_layers_of_the_mean_over_heads() -> None:
    values = np.array([[[0.1, 0.3], [0.5, np.nan]], [[0.9, 0.9], [np.nan, np.nan]]])
    summary = xr.Dataset(
        {"cosine": (("stage", "looped_layer", "head"), values)},
        coords={"stage": ["X", "V"], "looped_layer": [3, 4]},
    )

    def ours(**at: str) -> tuple[float, float] | None:
        return Reported(probe="p", quantity="cosine", at=at, what="", says="").ours(summary)

    assert ours(stage="X") == (0.2, 0.5)
    assert ours(stage="V") == (0.9, 0.9)
    assert ours(stage="nonesuch") is None
    assert Reported(probe="p", quantity="x", what="", says="").ours(summary) is None
