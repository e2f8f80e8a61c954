"""`probe compare`: two run files, as a whole and by groups of documents; what it refuses and what it names."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path, text_folder: Path
) -> Callable[..., Path]:
    """The run file of some arguments, made once."""
    from smeltscope.cli import probe, run

    files: dict[tuple[str, ...], Path] = {}
    folder = tmp_path_factory.mktemp("runs")

    def make(*args: object, probes: str = "loss,router-overlap", data: Path = text_folder) -> Path:
        given = ["--ckpt", tiny_checkpoint, "--data", data, "--probes", probes, *args]
        key = tuple(map(str, given))
        if key not in files:
            files[key] = folder / f"{len(files)}.h5"
            assert run(probe, ["batch", *key, "--out", str(files[key]), "-q"]) == 0
        return files[key]

    return make


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"[+-]?\d*\.\d+", text)]


def test_a_run_and_the_same_in_other_batches(
    probe: Call, made: Callable[..., Path], tiny_checkpoint: Path
) -> None:
    a, b = made(), made("--batch-tokens", 600)
    done = probe("compare", a, b)
    assert done.code == 0, done.err
    assert done.err == ""
    assert f"A: {tiny_checkpoint} ({a})\nB: {tiny_checkpoint} ({b})\n" in done.out
    assert "Options that differ" not in done.out
    assert "router-overlap, B - A" in done.out and "loss, B - A" in done.out
    assert "higher in B in 0 of" in done.out or "B - A .000 [.000,.000]" in done.out


def test_another_number_of_visits(probe: Call, made: Callable[..., Path]) -> None:
    a, b = made("--visits", 1), made()
    done = probe("compare", a, b)
    assert done.code == 0, done.err
    assert max(map(len, done.out.splitlines()[2:])) <= 80
    assert "Options that differ, A and B: visits: 1 and 2." in done.out
    assert re.search(r"^Only B has overlap", done.out, re.MULTILINE)
    line = next(line for line in done.out.splitlines() if line.startswith("loss: A"))
    of_a, of_b, difference, low, high = numbers(line)
    assert difference == pytest.approx(of_b - of_a, abs=0.002)
    assert low <= difference <= high
    places = [line.split()[:2] for line in done.out.splitlines() if re.match(r" +\d+ +1 ", line)]
    assert places[:6] == [[str(layer), "1"] for layer in range(6)]  # the first visits


def test_by_category(probe: Call, made: Callable[..., Path]) -> None:
    done = probe("compare", made("--visits", 1), made(), "--by", "category")
    assert done.code == 0, done.err
    for part in done.out.split("B - A\n")[1:]:
        rows = [line.split()[:2] for line in part.splitlines() if re.search(r" \(\d+\) ", line)]
        assert rows == [["code", "(4)"], ["prose", "(4)"], ["sums", "(4)"]]
    assert "Means over layers and heads" in done.out and "No document" not in done.out


def test_by_length(probe: Call, made: Callable[..., Path]) -> None:
    done = probe("compare", made("--visits", 1), made(), "--by", "length")
    assert done.code == 0, done.err
    groups = re.findall(r"^ *(\S+) \((\d+)\) ", done.out.split("B - A")[1], re.MULTILINE)
    assert [label for label, _ in groups] == ["65-128", "129-256", "257-512"]
    assert sum(int(count) for _, count in groups) == 12
    assert "No document: 1-32, 33-64, 513-1024, 1025-2048" in " ".join(done.out.split())


def test_by_the_loss_of_the_first(probe: Call, made: Callable[..., Path]) -> None:
    done = probe("compare", made("--visits", 1), made(), "--by", "baseline-loss")
    assert done.code == 0, done.err
    rows = re.findall(r"^ *(Q\d(?: \(\w+\))?) \(3\) +(\S+)", done.out, re.MULTILINE)
    assert [row[0] for row in rows[:4]] == ["Q1 (lowest)", "Q2", "Q3", "Q4 (highest)"]
    losses = re.findall(r"Q\d.*? \(3\) +(\S+)", done.out.split("loss, B - A")[1])
    assert losses == sorted(losses, key=float)
    none = made(probes="router-overlap")
    refused = probe("compare", none, none, "--by", "baseline-loss")
    assert refused.code == 2 and "run of the probe loss" in refused.err


def test_every_number_as_csv(probe: Call, made: Callable[..., Path]) -> None:
    a, b = made("--visits", 1), made()
    shown = csv.DictReader(probe("compare", a, b, "--csv").out.splitlines())
    numbers = {
        r["quantity"]: float(r["value"])
        for r in shown
        if r["probe"] == "loss" and not r["position"]
    }
    assert numbers["loss"] == pytest.approx(numbers["loss_b"] - numbers["loss_a"])
    grouped = probe("compare", a, b, "--by", "category", "--csv").out.splitlines()
    rows = [r for r in csv.DictReader(grouped) if r["quantity"] == "loss"]
    assert [r["group"] for r in rows] == ["code (4)", "prose (4)", "sums (4)"]
    assert all(float(r["low"]) <= float(r["value"]) <= float(r["high"]) for r in rows)


def test_what_only_one_has_is_named(probe: Call, made: Callable[..., Path]) -> None:
    done = probe("compare", made(), made(probes="loss,swap"))
    assert done.code == 0
    assert "Only A has: router-overlap." in done.out and "Only B has: swap." in done.out
    refused = probe("compare", made(probes="router-overlap"), made(probes="swap"))
    assert refused.code == 2
    assert "share no diagnostic: the first holds router-overlap, the second swap" in refused.err


def test_options_of_a_probe_and_of_the_samples(probe: Call, made: Callable[..., Path]) -> None:
    a = made("--tokens", 900, probes="loss,swap")
    b = made("--tokens", 900, "--sampled-queries", 9, "--dtype", "bfloat16", probes="loss,swap")
    done = probe("compare", a, b)
    assert done.code == 0
    text = " ".join(done.out.split())
    assert "A and B: dtype: float32 and bfloat16; sampled_queries: 64 and 9." in text


def test_other_data(probe: Call, made: Callable[..., Path], tmp_path: Path) -> None:
    other = made("--tokens", 900)
    done = probe("compare", made(), other)
    assert done.code == 2 and done.out == ""
    assert "over different data" in done.err and "and 900" in done.err
    assert len(done.err.splitlines()) == 1


def test_files_that_cannot_be_compared(
    probe: Call, made: Callable[..., Path], tmp_path: Path
) -> None:
    import shutil

    run = made()
    missing = probe("compare", run, tmp_path / "nope.h5")
    assert missing.code == 2 and "There is no run file" in missing.err
    partial = shutil.copy(run, tmp_path / "part.h5")
    with h5py.File(partial, "r+") as file:
        file["segments/done"][-1] = 0
    done = probe("compare", run, partial)
    assert done.code == 2 and "second run still lacks 1 of" in done.err
    assert probe("compare", run).code == 2
    assert probe("compare", run, run, "--by", "size").code == 2


def test_a_diagnostic_of_another_version_is_passed_over(
    probe: Call, made: Callable[..., Path], tmp_path: Path
) -> None:
    import shutil

    run = shutil.copy(made(), tmp_path / "x.h5")
    with h5py.File(run, "r+") as file:
        file.copy("loss", "some_thing")
        identity = json.loads(file.attrs["identity"])
        file.attrs["identity"] = json.dumps(identity)
    done = probe("compare", run, run)
    assert done.code == 0 and "some-thing" not in done.out
