"""Two runs, paired: against differences computed by hand, with rows, executions and heads in other orders and numbers."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xarray as xr

from smeltscope.activations import open_run
from smeltscope.errors import SmeltscopeError
from smeltscope.probes import (
    AttentionSink,
    Probe,
    Quantity,
    RunOptions,
    run_probes,
    summarize,
)
from smeltscope.probes.compare import averaged, compare, other_differences
from smeltscope.probes.statistics import Estimate, exact
from smeltscope.registry import PROBES, make_probe

SINK = AttentionSink()
LENGTHS = (40, 33, 70, 12, 25, 8, 30, 19)


@pytest.fixture(scope="module")
def sink_run(make_checkpoint, make_heldout, tmp_path_factory) -> Callable[..., xr.DataTree]:
    """A run of attention-sink on a tiny model; made once for the same arguments."""
    folder = tmp_path_factory.mktemp("runs")

    @functools.cache
    def made(
        name: str, lengths: Any, probe: Probe, batch_tokens: int, text: int, dtype: Any, size: Any
    ) -> xr.DataTree:
        out = folder / f"{len(list(folder.iterdir()))}.h5"
        options = RunOptions(max_length=max(lengths), batch_tokens=batch_tokens)
        heldout = make_heldout(lengths, seed=text)
        checkpoint = make_checkpoint(name, dtype=dtype, **dict(size))
        return open_run(run_probes(checkpoint, heldout, [probe], out, options))

    def run(
        name: str = "smelt",
        lengths: tuple[int, ...] = LENGTHS,
        probe: Probe = SINK,
        batch_tokens: int = 1200,
        text: int = 0,
        dtype: Any = None,
        **size: Any,
    ) -> xr.DataTree:
        size_ = tuple(sorted(size.items()))
        return made(name, lengths, probe, batch_tokens, text, dtype, size_).copy(deep=True)

    return run


def per_document(run: xr.DataTree) -> tuple[np.ndarray, np.ndarray]:
    """Sums of sink mass (document, execution, head) and of queries (document, execution), document by document."""
    data, document = run["attention_sink"].dataset, run["segments"].dataset["document"].values
    names = np.unique(document)
    return tuple(  # type: ignore[return-value]
        np.stack([data[n].values[document == d].astype(np.float64).sum(0) for d in names])
        for n in ("sink_mass_sum", "queries")
    )


def test_the_difference_and_its_interval_by_hand(sink_run) -> None:
    a, b = sink_run(), sink_run(initializer_range=0.05)
    b = b.isel(segment=np.random.default_rng(0).permutation(len(LENGTHS)))  # rows in another order
    found = compare(a, b, SINK, SINK, draws=200, seed=5)

    (up_a, down_a), (up_b, down_b) = per_document(a), per_document(b)
    mass_a, mass_b = up_a.sum(0) / down_a.sum(0)[:, None], up_b.sum(0) / down_b.sum(0)[:, None]
    np.testing.assert_allclose(found["sink_mass"], mass_b - mass_a, atol=1e-7)
    np.testing.assert_allclose(found["sink_mass_a"], mass_a, atol=1e-7)
    np.testing.assert_allclose(found["sink_mass_b"], mass_b, atol=1e-7)

    # the same draws for both: categories alternate, two documents each
    rng, draws = np.random.default_rng(5), []
    weights = np.zeros((200, 4))
    for category in (0, 1):
        weights[:, category::2] = rng.multinomial(2, [0.5, 0.5], size=200)
    for w in weights:
        of_a = np.tensordot(w, up_a, 1) / (w @ down_a)[:, None]
        of_b = np.tensordot(w, up_b, 1) / (w @ down_b)[:, None]
        draws.append(of_b - of_a)
    low, high = np.percentile(draws, [2.5, 97.5], axis=0)
    np.testing.assert_allclose(found["sink_mass_low"], low, atol=1e-7)
    np.testing.assert_allclose(found["sink_mass_high"], high, atol=1e-7)


def test_a_run_differs_from_itself_by_nothing(sink_run) -> None:
    run, again = sink_run(), sink_run(batch_tokens=80)  # the same rows in other batches
    found = compare(run, again, SINK, SINK, draws=50)
    for name in ("sink_mass", "sink_mass_low", "sink_mass_high", "change", "nearby_mass"):
        values = found[name].values
        np.testing.assert_allclose(values[np.isfinite(values)], 0, atol=1e-6, err_msg=name)
    assert found.attrs["only_a"] == found.attrs["only_b"] == []
    # noise that both share is in neither interval
    assert float((found["sink_mass_high"] - found["sink_mass_low"]).max()) < 1e-6


@pytest.mark.parametrize("name", PROBES)
def test_every_diagnostic_is_compared(sink_run, name: str) -> None:
    """With itself to nothing, every quantity; with a model of other visits where both have the same."""
    probe = make_probe(name)
    a, b = sink_run(probe=probe), sink_run(probe=probe, num_visits=3)
    same = compare(a, a, probe, probe, draws=5)
    summary = summarize(a, probe, draws=0)
    for quantity in (str(n) for n in summary.data_vars if f"{n}_low" in summary):
        assert (
            same[quantity].dropna("execution") == 0
            if "execution" in same[quantity].dims
            else np.nan_to_num(same[quantity]) == 0
        ).all(), quantity
        unlabelled = set(same[quantity].dims) - set(same.coords)
        assert not unlabelled, f"{quantity}: {unlabelled} has no labels for --csv"
    differences = compare(a, b, probe, probe, draws=5)
    assert any(
        np.isfinite(differences[f"{n}_a"]).any()
        for n in summary.data_vars
        if f"{n}_a" in differences
    )


def test_the_interval_is_narrower_than_those_of_the_runs(sink_run) -> None:
    """The same model but for a little: what differs between documents cancels."""
    a, b = sink_run(), sink_run(residual_scale=0.49)
    alone, paired = summarize(a, SINK, draws=200), compare(a, b, SINK, SINK, draws=200)
    width = {
        name: float((s["sink_mass_high"] - s["sink_mass_low"]).mean())
        for name, s in (("alone", alone), ("paired", paired))
    }
    assert width["paired"] < width["alone"] / 3


def test_executions_are_matched_by_layer_and_visit(sink_run) -> None:
    one, three = sink_run(num_visits=1), sink_run(num_visits=3)
    found = compare(one, three, SINK, SINK, draws=10)
    places = list(zip(found["layer"].values.tolist(), found["visit"].values.tolist(), strict=True))
    assert places == [(layer, 1) for layer in range(6)]
    assert found["execution"].values.tolist() == [0, 1, 2, 3, 4, 5]  # as numbered in the first
    last = {n: r["attention_sink"].dataset for n, r in (("one", one), ("three", three))}
    mass = [
        float(d["sink_mass_sum"][:, -1, 2].sum() / d["queries"][:, -1].sum()) for d in last.values()
    ]
    np.testing.assert_allclose(found["sink_mass"][5, 2], mass[1] - mass[0], atol=1e-6)
    back = compare(three, one, SINK, SINK, draws=10)
    np.testing.assert_allclose(back["sink_mass"], -found["sink_mass"])


def test_models_with_other_numbers_of_heads(sink_run) -> None:
    a, b = sink_run("llama"), sink_run("llama", num_attention_heads=8, num_key_value_heads=2)
    found = compare(a, b, SINK, SINK, draws=10)
    assert found["sink_mass"].dims == ("execution",)
    mean = [(up.sum(0) / down.sum(0)[:, None]).mean(1) for up, down in map(per_document, (a, b))]
    np.testing.assert_allclose(found["sink_mass"], mean[1] - mean[0], atol=1e-7)


def test_means_over_what_is_matched(sink_run) -> None:
    a, b = sink_run(num_visits=1), sink_run(num_visits=2)
    found = compare(a, b, SINK, SINK, mean_over=("execution", "head"), draws=100)
    apart = compare(a, b, SINK, SINK, draws=100)
    assert found["sink_mass"].dims == ()
    np.testing.assert_allclose(found["sink_mass"], apart["sink_mass"].mean(), atol=1e-7)
    assert (
        float(found["sink_mass_low"]) <= float(found["sink_mass"]) <= float(found["sink_mass_high"])
    )


@dataclass(frozen=True, kw_only=True)
class Numbers(Probe):
    """Quantities that are given, whatever the run."""

    given: Any

    name = "attention-sink"
    sites = ()

    def variables(self, shape: Any) -> Any:
        return {}

    def estimates(self, run: Any, resampling: Any) -> Any:
        executions = run.sizes["execution"]
        return self.given(executions)


def test_both_axes_of_a_matrix_over_executions_are_matched(sink_run) -> None:
    """`other_execution` numbers executions too: a Baseline's 5 is not the looped model's 5."""
    one, two = sink_run(num_visits=1), sink_run(num_visits=2)
    for run in (one, two):  # as residual-updates has it
        run.dataset = run.to_dataset().assign_coords(other_execution=run["execution"].values)
        place = run.dataset["layer"].values * 10 + run.dataset["visit"].values
        run.attrs["place"] = place

    def given(executions: int) -> Any:
        run = one if executions == 6 else two
        place = run.attrs["place"]
        cells = exact(place[:, None] * 100.0 + place)
        return {"cosine": Quantity(dims=("execution", "other_execution"), estimate=cells)}

    found = compare(one, two, Numbers(given=given), Numbers(given=given), draws=2)
    assert found["cosine"].shape == (6, 6)
    assert (found["cosine"] == 0).all()


def test_what_only_one_has_is_named(sink_run) -> None:
    run = sink_run()

    def quantity(*dims: str) -> Quantity:
        return Quantity(dims=dims, estimate=exact(np.ones([run.sizes[d] for d in dims])))

    a = Numbers(given=lambda _: {"x": quantity(), "y": quantity("execution"), "z": quantity()})
    b = Numbers(given=lambda _: {"x": quantity(), "y": quantity(), "w": quantity()})
    found = compare(run, run, a, b, draws=2)
    assert found.attrs["only_a"] == ["y", "z"] and found.attrs["only_b"] == ["y", "w"]
    assert float(found["x"]) == 0 and np.isnan(found["x_low"])


def test_no_execution_in_common(sink_run) -> None:
    """Quantities of which nothing matches are listed, not empty."""
    a, b = sink_run(), sink_run()
    b.dataset = b.to_dataset().assign_coords(layer=("execution", b.dataset["layer"].values + 100))
    found = compare(a, b, SINK, SINK, draws=2)
    assert "sink_mass" in found.attrs["only_a"] and "sink_mass" in found.attrs["only_b"]
    assert "change_overall" in found


# ---- averages


def test_averages_leave_out_what_has_no_value() -> None:
    value = np.array([[1.0, np.nan, 3.0], [4.0, 5.0, 6.0]])  # (execution, head)
    draws = np.stack([value, value + 1])
    quantity = Quantity(
        dims=("execution", "head"), estimate=Estimate(value=value, draws=draws), family=True
    )
    found = averaged({"x": quantity})["x"]
    assert found.dims == ("execution",) and found.family
    np.testing.assert_allclose(found.estimate.value, [2, 5])
    np.testing.assert_allclose(found.estimate.draws, [[2, 5], [3, 6]])
    both = averaged({"x": quantity}, ("head", "execution"))["x"]
    assert both.dims == () and float(both.estimate.value) == pytest.approx(19 / 5)
    first = averaged({"x": quantity}, ("execution",))["x"]
    np.testing.assert_allclose(first.estimate.value, [2.5, 5, 4.5])


# ---- what is refused, what is named


def test_other_data_is_refused_with_what_differs(sink_run) -> None:
    run = sink_run()
    with pytest.raises(SmeltscopeError, match="over different data") as error:
        compare(run, sink_run(lengths=(40, 33, 60)), SINK, SINK)
    for part in ("documents: 4 and 2", "segments: 8 and 3", "tokens: 237 and 133", "in common: 2"):
        assert part in str(error.value)
    with pytest.raises(SmeltscopeError, match=r"\(the token ids\)"):
        compare(run, sink_run(text=1), SINK, SINK)


def test_an_unfinished_run_is_refused(sink_run) -> None:
    run = sink_run()
    partial = run.copy(deep=True)
    partial["segments"]["done"][2:] = 0
    with pytest.raises(SmeltscopeError, match="second run still lacks 6 of 8 segments"):
        compare(run, partial, SINK, SINK)


def test_options_that_differ_are_named(sink_run) -> None:
    import torch

    run = sink_run()
    assert other_differences(run, sink_run(batch_tokens=80)) == []
    first = AttentionSink(include_first=True)
    found = other_differences(run, sink_run(probe=first, num_visits=3, dtype=torch.bfloat16))
    assert found == [
        "dtype: float32 and bfloat16",
        "probes.attention-sink.include_first: False and True",
        "residual_scale: 0.5 and 0.3333333333333333",
        "visits: 2 and 3",
    ]
    made = SimpleNamespace(attrs={"identity": '{"seed": 0}'})
    other = SimpleNamespace(attrs={"identity": '{"seed": 0, "sampled_tokens": 32}'})
    assert other_differences(made, other) == ["sampled_tokens: none and 32"]  # type: ignore[arg-type]
