"""`probe trajectory`: the checkpoints of a training, each as `probe` would measure it alone."""

import csv
import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from safetensors.torch import load_file, save_file

import smeltscope
from smeltscope.dashboards.figures import trajectory_figure
from smeltscope.dashboards.overview import HEADLINES
from smeltscope.errors import SmeltscopeError
from smeltscope.probes.trajectory import trajectory
from smeltscope.registry import recorded_probe

OPTIONS = ("--tokens", "600", "--max-length", "64", "-q")


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory, save_checkpoint: Any) -> Path:
    """The output folder of a training with two whole checkpoints and one that was cut short."""
    folder = tmp_path_factory.mktemp("training")
    for step in (4, 12):
        checkpoint = save_checkpoint(folder / f"checkpoint-{step}")
        weights = load_file(checkpoint / "model.safetensors")
        torch.manual_seed(step)
        moved = {k: w + 0.02 * torch.randn_like(w) for k, w in weights.items()}
        save_file(moved, checkpoint / "model.safetensors", metadata={"format": "pt"})
        (checkpoint / "whole").touch()
    (folder / "checkpoint-16").mkdir()
    return folder


def test_each_step_is_what_probe_says_of_its_checkpoint(
    training: Path, text_folder: Path, probe: Callable[..., Any], tmp_path: Path
) -> None:
    out = tmp_path / "curves"
    ran = probe(
        "trajectory", training, "--data", text_folder, "--out", out, "--csv",
        "--probes", "loss,attention-sink", *OPTIONS,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    rows = list(csv.DictReader(io.StringIO(ran.out)))
    assert {row["step"] for row in rows} == {"4", "12"}
    for step in (4, 12):
        run = smeltscope.probe(
            training / f"checkpoint-{step}", text_folder, ["loss"], tokens=600, max_length=64,
            quiet=True,
        )  # fmt: skip
        alone = smeltscope.summarize(run, "loss")
        (row,) = (r for r in rows if r["quantity"] == "loss" and r["step"] == str(step))
        ends = [float(row[key]) for key in ("value", "low", "high")]
        expected = [float(alone[name]) for name in ("loss", "loss_low", "loss_high")]
        np.testing.assert_allclose(ends, expected, rtol=1e-6)


def test_curves_as_a_page(
    training: Path, text_folder: Path, probe: Callable[..., Any], tmp_path: Path
) -> None:
    page, out = tmp_path / "curves.html", tmp_path / "runs"
    asked = ("trajectory", training, "--data", text_folder, "--out", out, "--report", page)
    ran = probe(*asked, "--probes", "loss,attention-sink", *OPTIONS)
    assert ran.code == 0, ran.err
    text = page.read_text()
    assert text.count("data-figure=") == 2 and "2 checkpoints" in text
    again = probe(*asked, "--probes", "loss,attention-sink", *OPTIONS)
    assert again.code == 2 and "--report" in again.err and "--force" in again.err


def test_a_figure_of_headline_numbers(training: Path, text_folder: Path) -> None:
    runs = {
        step: smeltscope.probe(
            training / f"checkpoint-{step}", text_folder, ["attention-sink", "residual-updates"],
            tokens=600, max_length=64, quiet=True,
        )
        for step in (4, 12)
    }  # fmt: skip
    for name in ("attention-sink", "residual-updates"):
        curve = trajectory(runs, lambda run, name=name: recorded_probe(run, name), draws=20)
        figure = trajectory_figure(curve)
        titles = {note.text for note in figure.layout.annotations}
        (headline, *_) = HEADLINES[name]
        assert headline.what in titles
        (line,) = (t for t in figure.data if t.text[0].startswith(f"{headline.what}, step 4"))
        alone = [
            float(
                smeltscope.summarize(run, name, draws=2)[headline.quantity].sel(headline.at).item()
            )
            for run in runs.values()
        ]
        assert list(line.x) == [4, 12]
        np.testing.assert_allclose(line.y, alone)
    with pytest.raises(SmeltscopeError, match="no headline number of swap"):
        trajectory_figure(xr.Dataset(attrs={"probe": "swap"}))


def test_it_goes_on_and_takes_up_new_checkpoints(
    training: Path, text_folder: Path, probe: Callable[..., Any], tmp_path: Path
) -> None:
    folder = shutil.copytree(training, tmp_path / "run")
    asked = ("trajectory", folder, "--data", text_folder, "--probes", "loss", *OPTIONS)
    assert probe(*asked).code == 0
    first = folder / "trajectory" / "step-4.h5"
    written = first.stat().st_mtime_ns
    shutil.copytree(folder / "checkpoint-12", folder / "checkpoint-20")
    again = probe(*asked)
    assert again.code == 0
    assert first.stat().st_mtime_ns == written
    assert (folder / "trajectory" / "step-20.h5").exists()
    lines = [line.split() for line in again.out.splitlines()]
    assert [line[0] for line in lines if line and line[0] in ("4", "12", "20")] == ["4", "12", "20"]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: folder / "none", "is no folder"),
        (lambda folder: folder, "holds no checkpoint of smelt train"),
        (lambda folder: folder / "checkpoint-4", "is a single checkpoint"),
    ],
)
def test_folders_that_are_none_of_a_training(
    make: Callable[[Path], Path], says: str, probe: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "checkpoint-4").mkdir()
    ran = probe("trajectory", make(tmp_path), "-q")
    assert ran.code == 2 and says in ran.err and "Traceback" not in ran.err
