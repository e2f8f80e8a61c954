"""The paper's numbers stand beside ours, and beside the right ones."""

import numpy as np
import pytest
import xarray as xr

import smeltscope
from smeltscope.dashboards.overview import headlines
from smeltscope.probes.paper import REPORTED, Reported, reported_by
from smeltscope.registry import ALL_PROBES, PROBES, make_probe


def test_every_entry_names_a_quantity_that_its_probe_has(make_run) -> None:
    """A misspelt name would show no number of ours, in silence."""
    from smeltscope.probes import summarize

    names = sorted({entry.probe for entry in REPORTED})
    assert set(names) <= set(ALL_PROBES)
    names = [name for name in names if name in PROBES]  # the others ask for prompts: below
    sweep = {"loss": {"visits": (1, 2, 3, 4)}}
    probes = [make_probe(name, **sweep.get(name, {})) for name in names]
    run = make_run(probes, lengths=(90, 33, 80, 25))
    for probe in probes:
        summary = summarize(run, probe, draws=2)
        for entry in reported_by(probe.name):
            ours = entry.ours(summary)
            assert ours is not None, entry
            assert np.isfinite(ours).all() and ours[0] <= ours[1]


def test_entries_of_prompts_stand_beside_the_same_number(byte_tokenizer) -> None:
    tokenizer = byte_tokenizer(bos_token="<s>", eos_token="</s>")
    model = smeltscope.tiny(num_physical_layers=2, loop_start=0, loop_stop=1, vocab_size=258)
    asked = {"items": 2, "shots": (0, 1), "seeds": 1, "nested": 8, "examples": 0}
    run = smeltscope.dyck(model, tokenizer=tokenizer, quiet=True, **asked)
    said = {}
    for name in ("dyck-scores", "dyck-map"):
        summary = smeltscope.summarize(run, name, draws=2)
        for entry in reported_by(name):
            asked_for = entry.at.get("shots", 0) in asked["shots"]
            assert (entry.ours(summary) is not None) == asked_for, entry
        said |= {found.what: found.paper for found in headlines(summary, name)}
    assert said["prompts answered right by generation, 0 shots"] == "about 0 % of BIG-bench's items"
    assert said["prompts answered right by generation, 1 shot"] == ""
    assert ".60 to .02" in said["mass on the start token at visit 2 minus visit 1, the Dyck head"]
    assert ".24 to .85" in said["mass on shown answers at visit 2 minus visit 1, the Dyck head"]
    assert (
        said["mass on shown answers at visit 2 minus visit 1"] == ""
    )  # of all heads it says nothing


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


def test_of_three_visits_the_first_two_stand_beside() -> None:
    """Its models have two: other pairs, and third visits, are wider apart and are not what it reports."""
    summary = xr.Dataset(
        {
            "overlap": (("looped_layer", "visit_pair"), [[0.3, 0.1, 0.9], [0.4, 0.0, 1.0]]),
            "change": (("execution", "head"), [[np.nan], [np.nan], [-0.2], [-0.3], [0.7], [-0.9]]),
        },
        coords={
            "looped_layer": [1, 2],
            "visit_pair": ["1-2", "1-3", "2-3"],
            "visit": ("execution", [1, 1, 2, 2, 3, 3]),
        },
    )

    def ours(quantity: str, **at: str) -> tuple[float, float] | None:
        return Reported(probe="p", quantity=quantity, at=at, what="", says="").ours(summary)

    assert ours("overlap") == (0.3, 0.4)
    assert ours("overlap", visit_pair="2-3") == (0.9, 1.0)
    assert ours("overlap", visit_pair="1-4") is None
    assert ours("change") == (-0.3, -0.2)


@pytest.mark.parametrize("probe", ["attention-sink", "residual-updates", "attended-tokens"])
def test_a_run_with_three_visits(make_run, probe: str) -> None:
    from smeltscope.probes import summarize

    made = make_probe(probe)
    run = make_run([made], lengths=(80, 70), num_physical_layers=4, num_visits=3)
    summary = summarize(run, made, draws=2)
    for entry in reported_by(probe):
        values = summary[entry.quantity].sel(entry.at)
        if "visit_pair" in values.dims:
            values = values.sel(visit_pair="1-2")
        else:
            values = values.isel(execution=np.flatnonzero(summary["visit"] == 2))
        heads = [dim for dim in values.dims if dim == "head"]
        values = values.mean(heads).values
        assert entry.ours(summary) == pytest.approx((values.min(), values.max()))
