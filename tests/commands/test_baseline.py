"""`probe attention-sink --baseline`: a Baseline run over the same tokens, or a run file of it, beside the model."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import smeltscope

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def unlooped(
    tmp_path_factory: pytest.TempPathFactory, save_checkpoint: Callable[..., Path]
) -> Path:
    """A model of other weights whose layers run once."""
    folder = tmp_path_factory.mktemp("unlooped") / "unlooped"
    return save_checkpoint(folder, num_visits=1, initializer_range=0.05)


@pytest.fixture
def sink(probe: Call, tiny_checkpoint: Path, text_folder: Path, tmp_path: Path) -> Call:
    def call(*args: object, ckpt: Path = tiny_checkpoint, out: str = "x.h5") -> Any:
        given = ["--ckpt", ckpt, "--data", text_folder, "--tokens", 900, "--out", tmp_path / out]
        return probe("attention-sink", *given, *args)

    return call


def check_profile(out: str, model: Path, baseline: Path) -> None:
    """The table beside the Baseline holds each execution, its depth and the Baseline's same layer."""
    text = out.split("Beside the Baseline")[1]
    rows = [line.split() for line in text.splitlines() if re.match(r" +\d+ +\d+ +\S+ ", line)]
    found = {
        name: smeltscope.summarize(smeltscope.open(file), "attention-sink")
        for name, file in (("model", model), ("baseline", baseline))
    }
    places = found["model"]["layer"].values, found["model"]["visit"].values
    assert [tuple(map(int, row[:2])) for row in rows] == list(zip(*map(list, places), strict=True))
    for execution, row in enumerate(rows):
        assert float(row[2]) == pytest.approx(execution / 8, abs=5e-4)
        layer = int(row[0])
        mass = found["model"]["sink_mass"].values[execution].mean()
        assert float(row[3]) == pytest.approx(mass, abs=6e-4)
        assert float(row[5]) == pytest.approx(layer / 5, abs=5e-4)
        mass = found["baseline"]["sink_mass"].values[layer].mean()
        assert float(row[6]) == pytest.approx(mass, abs=6e-4)
    assert "Over depth" in text


def test_a_checkpoint_and_its_run_file(sink: Call, unlooped: Path, tmp_path: Path) -> None:
    done = sink("--baseline", unlooped, "--visits", 2)
    assert done.code == 0, done.err
    assert max(map(len, done.out.splitlines()[1:])) <= 80
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x-baseline.h5", "x.h5"]
    check_profile(done.out, tmp_path / "x.h5", tmp_path / "x-baseline.h5")
    ran = smeltscope.activations.attributes_of(smeltscope.open(tmp_path / "x-baseline.h5"))
    assert ran["checkpoint"] == str(unlooped)
    assert ran["identity"]["visits"] == 1, "as it was trained, whatever the model runs with"

    again = sink("--baseline", tmp_path / "x-baseline.h5", out="y.h5")
    assert again.code == 0, again.err
    check_profile(again.out, tmp_path / "y.h5", tmp_path / "x-baseline.h5")
    assert not (tmp_path / "y-baseline.h5").exists()

    blocked = sink("--baseline", unlooped, out="x.h5")
    assert blocked.code == 2 and "x.h5 exists already" in blocked.err


def test_interrupted_in_the_run_of_the_baseline(sink: Call, unlooped: Path, tmp_path: Path) -> None:
    """The same command goes on: what it has finished is left as it is. Another one is refused."""
    assert sink("--baseline", unlooped).code == 0
    (tmp_path / "x-baseline.h5").unlink()  # as if stopped before it was finished
    written = (tmp_path / "x.h5").stat().st_mtime_ns
    other = sink("--baseline", unlooped, "--seed", 5)
    assert other.code == 2 and "x.h5 exists already" in other.err
    again = sink("--baseline", unlooped)
    assert again.code == 0, again.err
    assert (tmp_path / "x.h5").stat().st_mtime_ns == written
    check_profile(again.out, tmp_path / "x.h5", tmp_path / "x-baseline.h5")


def test_json(sink: Call, unlooped: Path) -> None:
    found = json.loads(sink("--baseline", unlooped, "--json", "-q").out)
    profile = found["depth_profile"]
    assert profile["coordinates"]["run"] == ["model"] * 9 + ["baseline"] * 6
    assert "sink_mass_mean" in profile["values"] and "sink_mass" in found["values"]


def test_other_tokens_are_refused(
    sink: Call, save_checkpoint: Callable[..., Path], byte_tokenizer: Any, tmp_path: Path
) -> None:
    other = save_checkpoint(tmp_path / "other", "smelt", with_tokenizer=False)
    byte_tokenizer(bos_token="</s>", eos_token="</s>").save_pretrained(other)
    done = sink("--baseline", other)
    assert done.code == 2 and done.out == ""
    assert str(other) in done.err and "the same tokenizer" in done.err
    assert not (tmp_path / "x-baseline.h5").exists()


def test_a_run_over_other_text_is_refused(
    sink: Call, probe: Call, unlooped: Path, text_folder: Path, tmp_path: Path
) -> None:
    given = ["--ckpt", unlooped, "--data", text_folder, "--out", tmp_path / "b.h5"]
    assert probe("attention-sink", *given, "--tokens", 500, "-q").code == 0
    done = sink("--baseline", tmp_path / "b.h5")
    assert done.code == 2 and "over different data" in done.err


def test_a_baseline_that_is_not_there(sink: Call, tmp_path: Path) -> None:
    done = sink("--baseline", tmp_path / "nope")
    assert done.code == 2 and str(tmp_path / "nope") in done.err


def test_a_model_with_fewer_layers_beside(
    sink: Call, save_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    short = save_checkpoint(tmp_path / "short", "llama")  # 3 layers
    done = sink("--baseline", short)
    assert done.code == 0, done.err
    text = done.out.split("Beside the Baseline")[1]
    rows = [line.split() for line in text.splitlines() if re.match(r" +\d+ +\d+ +\S+ ", line)]
    assert [row[-1] == "-" for row in rows] == [int(row[0]) > 2 for row in rows]


@pytest.mark.parametrize(
    ("ckpt", "shipped", "baseline", "chosen"),
    [
        ("smelt-tiny", ["baseline-tiny", "smelt-tiny"], None, "baseline-tiny"),
        ("smelt-tiny", ["smelt-tiny"], None, None),
        ("other", ["baseline-tiny", "smelt-tiny"], None, None),
        ("smelt-tiny", ["baseline-tiny", "smelt-tiny"], "mine", "mine"),
    ],
)
def test_the_baseline_by_default(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    ckpt: str,
    shipped: list[str],
    baseline: str | None,
    chosen: str | None,
) -> None:
    from smeltscope import model
    from smeltscope.commands.baseline import Baseline

    monkeypatch.setattr(model, "shipped_checkpoints", lambda: shipped)
    found = Baseline.of_options(tmp_path / "x.h5", ckpt=ckpt, baseline=baseline, force=False)
    assert (found and found.name) == chosen
    assert np.all(found is None or found.file == tmp_path / "x-baseline.h5")
