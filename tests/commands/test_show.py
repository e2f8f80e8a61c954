"""`probe show`: the tables again, the numbers as CSV, unfinished runs, runs of other versions, files that are no runs."""

import csv
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import smeltscope

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def run_file(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path, text_folder: Path
) -> Path:
    """A run of attention-sink and loss. Don't write into it."""
    from smeltscope.cli import probe, run

    out = tmp_path_factory.mktemp("show") / "run.h5"
    given = ["--ckpt", tiny_checkpoint, "--data", text_folder, "--out", out, "--tokens", "1k"]
    assert run(probe, ["batch", *map(str, given), "--probes", "attention-sink,loss", "-q"]) == 0
    return out


def test_one_diagnostic_of_several(probe: Call, run_file: Path) -> None:
    both, sink = probe("show", run_file), probe("show", run_file, "--probe", "attention-sink")
    loss = probe("show", run_file, "--probe", "loss")
    assert both.code == sink.code == loss.code == 0
    assert both.out == sink.out + loss.out
    assert "sink" in sink.out and "Mean loss of" not in sink.out
    assert "The paper" in sink.out and "The paper" not in loss.out  # which reports no such loss


def test_csv_holds_every_number(probe: Call, run_file: Path) -> None:
    done = probe("show", run_file, "--csv")
    assert done.code == 0
    rows = list(csv.DictReader(io.StringIO(done.out)))
    run = smeltscope.open(run_file)
    for name in ("attention-sink", "loss"):
        summary = smeltscope.summarize(run, name)
        quantities = {row["quantity"] for row in rows if row["probe"] == name}
        assert quantities == {str(q) for q in summary if f"{q}_low" in summary}
        for q in quantities:
            found = [r for r in rows if r["probe"] == name and r["quantity"] == q]
            for column in ("value", "low", "high", "low_all", "high_all"):
                numbers = np.array([float(r[column] or "nan") for r in found])
                end = "" if column == "value" else f"_{column}"
                expected = summary.get(f"{q}{end}", summary[q] * np.nan)
                np.testing.assert_array_equal(numbers, expected.values.ravel())
        assert any(r["low_all"] for r in rows if r["quantity"] == "change")
    place = summary = smeltscope.summarize(run, "attention-sink")["sink_mass"]
    row = next(
        r
        for r in rows
        if (r["quantity"], r["layer"], r["visit"], r["head"]) == ("sink_mass", "2", "2", "3")
    )
    assert float(row["value"]) == float(place.sel(execution=5, head=3))
    assert row["position"] == row["num_visits"] == "" if "num_visits" in row else True
    only = probe("show", run_file, "--csv", "--probe", "loss").out
    assert {r["probe"] for r in csv.DictReader(io.StringIO(only))} == {"loss"}


@pytest.fixture
def copied(run_file: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(run_file, tmp_path / "copy.h5"))


def test_an_unfinished_run(
    probe: Call, tmp_path: Path, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of its segments: as if the others were not there."""
    with h5py.File(copied, "r+") as file:
        done = file["segments/done"][:]
        half = len(done) // 2
        file["segments/done"][half:] = 0
        for group in ("attention_sink", "loss"):
            for array in file[group].values():
                array[half:] = np.nan
    partial = copied.rename(tmp_path / "run.h5.partial")
    shown = probe("show", tmp_path / "run.h5")  # named as it will be
    assert shown.code == 0
    assert shown.err == f"Unfinished: {half} of {len(done)} segments are done, the longest first.\n"
    assert shown.out == probe("show", partial).out
    tokens = smeltscope.open(partial)["segments"]["tokens"].values[:half]
    assert f"Mean loss of {tokens.sum() - half} predicted tokens" in shown.out
    with h5py.File(partial, "r+") as file:
        file["segments/done"][:] = 0
    none = probe("show", partial)
    assert none.code == 2 and "has no segment yet" in none.err and none.out == ""


def test_a_diagnostic_that_is_not_known(probe: Call, copied: Path) -> None:
    with h5py.File(copied, "r+") as file:
        file.move("loss", "some_thing")
        file["some_thing"].attrs["definition"] = "Counts some [things].\n\n    By whom?"
    done = probe("show", copied)
    assert done.code == 0
    assert "sink" in done.out.splitlines()[1]
    unknown = done.out.split("some-thing: ")[1]
    assert "no such diagnostic" in unknown
    assert "Counts some [things]." in unknown and "By whom?" in unknown
    assert "loss_sum (segment): loss, summed over tokens" in unknown
    assert probe("show", copied, "--probe", "some-thing").out == f"some-thing: {unknown}"
    assert {
        r["probe"] for r in csv.DictReader(io.StringIO(probe("show", copied, "--csv").out))
    } == {"attention-sink"}


def test_options_of_another_version(probe: Call, copied: Path) -> None:
    with h5py.File(copied, "r+") as file:
        file["loss"].attrs["options"] = json.dumps({"visits": [], "speed": 3})
    done = probe("show", copied)
    assert done.code == 2 and "loss was made with options" in done.err and "speed" in done.err


def test_the_options_of_the_run_are_those_of_its_tables(
    probe: Call, tmp_path: Path, tiny_checkpoint: Path, text_folder: Path
) -> None:
    out = tmp_path / "x.h5"
    given = ["--ckpt", tiny_checkpoint, "--data", text_folder, "--out", out, "--tokens", 600]
    made = probe("loss", *given, "--visits", "0..2", "--seed", 3)
    assert probe("show", out).out == made.out
    from smeltscope.registry import recorded_probe

    run = smeltscope.open(out)
    assert recorded_probe(run, "loss").options() == {"visits": (0, 1, 2)}


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--probe", "swap"), "holds no swap; it holds attention-sink, loss."),
        (("--probe", "lss"), "No probe is called 'lss'. Did you mean loss?"),
    ],
)
def test_a_diagnostic_that_is_not_there(
    probe: Call, run_file: Path, args: tuple[str, str], says: str
) -> None:
    done = probe("show", run_file, *args)
    assert done.code == 2 and says in done.err and done.out == ""


def test_files_that_are_no_runs(probe: Call, tmp_path: Path) -> None:
    text, other = tmp_path / "text.h5", tmp_path / "other.h5"
    text.write_text("no HDF5")
    with h5py.File(other, "w") as file:
        file["x"] = 1
    for file, says in (
        (tmp_path / "nope.h5", "There is no run file"),
        (tmp_path, "There is no run file"),
        (text, "is no HDF5 file"),
        (other, "no run file of smeltscope"),
    ):
        done = probe("show", file)
        assert done.code == 2 and done.out == ""
        assert says in done.err and str(file) in done.err
        assert len(done.err.splitlines()) == 1
