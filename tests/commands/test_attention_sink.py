"""The whole command: what it prints, what it leaves, that it resumes, and that its numbers are its run file's."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

import smeltscope


@pytest.fixture
def sink(probe: Callable[..., Any], tiny_checkpoint: Path, text_folder: Path) -> Callable[..., Any]:
    """`probe attention-sink` in this process, on the tiny checkpoint and text."""

    def call(*args: object, ckpt: Path = tiny_checkpoint, data: Path = text_folder) -> Any:
        return probe("attention-sink", "--ckpt", ckpt, "--data", data, *args)

    return call


def arrays(path: Path) -> dict[str, np.ndarray]:
    """Every number of a run file by the name of its array."""
    tree = smeltscope.open(path)
    return {
        f"{node.name}/{name}": array.values
        for node in tree.subtree
        for name, array in node.dataset.variables.items()
    }


def assert_same(a: Path, b: Path) -> None:
    """The same run twice, bit for bit."""
    first, second = arrays(a), arrays(b)
    assert first.keys() == second.keys()
    for name, values in first.items():
        np.testing.assert_array_equal(values, second[name], err_msg=name)


def summary_of(path: Path, **options: Any) -> xr.Dataset:
    return smeltscope.summarize(smeltscope.open(path), "attention-sink", **options)


@pytest.mark.slow
def test_the_whole_command(
    probe_process: Callable[..., Any], tiny_checkpoint: Path, text_folder: Path, tmp_path: Path
) -> None:
    args = ["attention-sink", "--ckpt", tiny_checkpoint, "--data", text_folder, "--tokens", "2k"]
    args += ["--max-length", 128, "--out", "x.h5", "--html", "x.html"]
    done = probe_process(*args, cwd=tmp_path)
    assert done.code == 0, done.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.h5", "x.html"]
    lines = done.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in done.out, "a column was cut"
    # one row for each execution: 0 | 1 2 3 | 1 2 3 | 4 5
    rows = [tuple(map(int, line.split()[:2])) for line in lines if line.strip()[:1].isdigit()]
    looped = [(layer, visit) for visit in (1, 2) for layer in (1, 2, 3)]
    assert rows == [(0, 1), *looped, (4, 1), (5, 1)]
    assert "Later visits minus visit 1" in done.out
    assert re.match(r"2,000 tokens in \d+ segments of \d+ documents\.\nRun file: x.h5\n", done.err)
    assert str(tmp_path / "x.html") in done.err
    assert "Traceback" not in done.err and "Warning" not in done.err

    before = (tmp_path / "x.h5").read_bytes()
    again = probe_process(*args, cwd=tmp_path)
    assert again.code == 2
    assert again.err == (
        "Error: x.h5 exists already; choose another --out, or pass --force to replace it.\n"
    )
    assert again.out == "" and (tmp_path / "x.h5").read_bytes() == before


def test_a_narrow_terminal_cuts_no_number(
    sink: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    assert "…" not in sink("--out", tmp_path / "x.h5", "--tokens", "1k").out


def test_force_replaces(sink: Callable[..., Any], tmp_path: Path) -> None:
    out, html = tmp_path / "x.h5", tmp_path / "x.html"
    out.write_text("old")
    html.write_text("old")
    assert sink("--out", out, "--html", html, "--tokens", 500, "--force").code == 0
    assert smeltscope.open(out)["segments"].sizes["segment"] > 0
    assert html.read_text().startswith("<!doctype html>")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.h5", "x.html"]


def test_json_is_what_the_run_file_gives(sink: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "x.h5"
    done = sink("--out", out, "--json", "--seed", 3)
    assert done.code == 0
    found = json.loads(done.out)  # and nothing else on standard output
    summary = summary_of(out, seed=3)
    assert found["attributes"] == summary.attrs
    assert found["coordinates"]["layer"] == summary["layer"].values.tolist()
    assert set(found["values"]) == set(summary.data_vars)
    for name, value in found["values"].items():
        assert value["dims"] == list(summary[name].dims)
        data = np.array(value["data"], dtype=float)  # null is NaN
        np.testing.assert_array_equal(data, summary[name].values, err_msg=name)
    # the sums by hand, without the module that made them
    run = smeltscope.open(out)["attention_sink"]
    by_hand = run["sink_mass_sum"].sum("segment") / run["queries"].sum("segment")
    np.testing.assert_allclose(found["values"]["sink_mass"]["data"], by_hand.values, rtol=1e-6)


def test_batches_do_not_change_the_numbers(sink: Callable[..., Any], tmp_path: Path) -> None:
    found = []
    for size in ("512", "8k"):
        out = tmp_path / f"{size}.h5"
        assert sink("--out", out, "--batch-tokens", size, "-q").code == 0
        found.append(summary_of(out))
    for name in ("sink_mass", "nearby_mass", "heaviest_mass", "sink_mass_by_position"):
        np.testing.assert_allclose(found[0][name], found[1][name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize("visits", [1, 3])
def test_another_number_of_visits(sink: Callable[..., Any], tmp_path: Path, visits: int) -> None:
    out = tmp_path / "x.h5"
    page = tmp_path / "x.html"
    done = sink("--out", out, "--html", page, "--visits", visits, "--tokens", "1k")
    assert done.code == 0
    run = smeltscope.open(out)
    assert int(run["visit"].max()) == visits
    assert run.sizes["execution"] == 6 + 3 * (visits - 1)
    assert smeltscope.activations.attributes_of(run)["identity"]["visits"] == visits
    if visits == 1:  # the Baseline: there is no change to show
        assert "change" not in done.out
        assert "No layer is visited twice" in done.out and "No layer" in page.read_text()
        assert np.isnan(summary_of(out)["change"]).all()
    else:
        summary = summary_of(out)
        first = summary["sink_mass"].values[(run["layer"] == 2) & (run["visit"] == 1)]
        third = summary["sink_mass"].values[(run["layer"] == 2) & (run["visit"] == 3)]
        change = summary["change"].values[(run["layer"] == 2) & (run["visit"] == 3)]
        np.testing.assert_allclose(change, third - first)


def test_quiet(sink: Callable[..., Any], tmp_path: Path, tiny_checkpoint: Path) -> None:
    done = sink("--out", tmp_path / "x.h5", "-q", "--tokens", 500)
    assert done.code == 0 and done.err == ""
    assert done.out.startswith(f"attention-sink: {tiny_checkpoint}")


def test_first_query_and_start_token(
    sink: Callable[..., Any], tmp_path: Path, tiny_checkpoint: Path
) -> None:
    runs = {}
    for name, args in {"default": (), "first": ("--include-first",), "bare": ("--no-bos",)}.items():
        out = tmp_path / f"{name}.h5"
        done = sink("--out", out, *args)
        assert done.code == 0
        runs[name] = smeltscope.open(out)
        assert ("No start token, as asked" in done.err) == (name == "bare")
    default, first = (runs[name]["attention_sink"] for name in ("default", "first"))
    # the first query adds one query and a mass of 1 to every segment and head
    np.testing.assert_array_equal(first["queries"], default["queries"] + 1)
    np.testing.assert_allclose(first["sink_mass_sum"], default["sink_mass_sum"] + 1, rtol=1e-5)
    tokens = runs["default"]["segments"]["tokens"].values
    np.testing.assert_array_equal(runs["bare"]["segments"]["tokens"].values, tokens - 1)


def test_token_arrays(sink: Callable[..., Any], tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 250, 900).astype(np.uint16)
    ids[[300, 600]] = 257  # the end token parts three documents
    np.save(tmp_path / "ids.npy", ids)
    ids.tofile(tmp_path / "ids.bin")
    assert sink("--out", tmp_path / "a.h5", data=tmp_path / "ids.npy").code == 0
    args = ("--token-dtype", "uint16", "--out", tmp_path / "b.h5")
    assert sink(*args, data=tmp_path / "ids.bin").code == 0
    documents = smeltscope.open(tmp_path / "a.h5")["segments"]["document"].values
    assert len(set(documents.tolist())) == 3
    a, b = (smeltscope.open(tmp_path / f"{name}.h5")["attention_sink"] for name in "ab")
    # of what is measured on samples: those depend on the document's name, which is the file's
    for name in ("queries", "sink_mass_sum", "heaviest_key", "residual_norm_sum"):
        xr.testing.assert_equal(a[name], b[name])


def test_token_arrays_need_no_tokenizer(
    sink: Callable[..., Any], tmp_path: Path, save_checkpoint: Callable[..., Path]
) -> None:
    folder = save_checkpoint(tmp_path / "ckpt", with_tokenizer=False, bos_token_id=256)
    np.save(tmp_path / "ids.npy", np.arange(500) % 250)
    done = sink("--out", tmp_path / "x.h5", ckpt=folder, data=tmp_path / "ids.npy")
    assert done.code == 0, done.err
    assert "id 256" in done.err


def test_a_labelled_tree(sink: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "x.h5"
    assert sink("--out", out, "--tokens", "1k").code == 0
    run = smeltscope.open(out)
    assert set(run.children) == {"attention_sink", "segments"}
    array = run["attention_sink"]["sink_mass_sum"]
    assert array.dims == ("segment", "execution", "head")
    second = array.where((array["layer"] == 2) & (array["visit"] == 2), drop=True)
    assert second.sizes["execution"] == 1 and float(second["execution"][0]) == 5
    assert set(run["segments"]["category"].values.tolist()) == {"prose", "code", "sums"}
    assert np.isfinite(array).all() and bool((run["segments"]["done"] == 1).all())


@pytest.mark.parametrize("name", ["a[/b]", "[red]x", "ünï cödé", "<script>alert(1)<"])
def test_names_that_could_be_taken_for_something_else(
    sink: Callable[..., Any], tmp_path: Path, tiny_checkpoint: Path, name: str
) -> None:
    ckpt = tmp_path / name
    ckpt.parent.mkdir(parents=True, exist_ok=True)
    ckpt.symlink_to(tiny_checkpoint)
    out, html = tmp_path / f"x{name[0]}[b].h5", tmp_path / "x.html"
    done = sink("--out", out, "--html", html, "--tokens", 300, ckpt=ckpt)
    assert done.code == 0, done.err
    assert f"Run file: {out}" in done.err
    assert "<script>alert" not in html.read_text()


BATCHES = 60


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "smeltscope", "probe", "attention-sink", *map(str, args)]


@pytest.fixture(scope="session")
def long_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text for sixty batches."""
    file = tmp_path_factory.mktemp("long") / "long.jsonl"
    with file.open("w") as lines:
        for number in range(BATCHES):
            lines.write(json.dumps({"text": f"{number} is a number. " * 12}) + "\n")
    return file


@pytest.fixture(scope="session")
def uninterrupted(tiny_checkpoint: Path, long_text: Path) -> Path:
    from smeltscope.cli import probe, run

    out = long_text.with_name("whole.h5")
    given = ["--ckpt", tiny_checkpoint, "--data", long_text, "--out", out, "--batch-tokens", 300]
    assert run(probe, ["attention-sink", *map(str, given), "-q"]) == 0
    return out


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_and_resumed(
    tiny_checkpoint: Path,
    long_text: Path,
    uninterrupted: Path,
    tmp_path: Path,
    sink: Callable[..., Any],
    how: int,
) -> None:
    """The same command finishes what was begun, with the numbers of a run that nobody stopped."""
    out, partial = tmp_path / "x.h5", tmp_path / "x.h5.partial"
    args = ["--batch-tokens", 300]
    given = ["--ckpt", tiny_checkpoint, "--data", long_text, "--out", out, *args]
    with subprocess.Popen(
        command(*given), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        begin = time.monotonic()
        while time.monotonic() - begin < 90 and process.poll() is None:
            if partial.exists() and _done(partial) >= 3:
                break
            time.sleep(0.01)
        process.send_signal(how)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL), stderr
    assert "Traceback" not in stderr and stdout == ""
    if how == signal.SIGINT:
        assert "the same command goes on" in stderr
    assert not out.exists()
    done = _done(partial)
    assert 0 < done < BATCHES
    unfinished = smeltscope.open(partial)  # opens, and says what is not there yet
    rows = unfinished["segments"]["done"].values == 1
    mass = unfinished["attention_sink"]["sink_mass_sum"].values
    assert np.isfinite(mass[rows]).all() and np.isnan(mass[~rows]).all()

    other = sink("--out", out, *args, "--include-first", "-q", data=long_text)
    assert other.code == 2 and "begun by another run" in other.err
    assert sink("--out", out, *args, "-q", data=long_text).code == 0
    assert not partial.exists()
    assert_same(out, uninterrupted)


def _done(partial: Path) -> int:
    import h5py

    try:
        with h5py.File(partial, "r") as file:
            return int(file["segments/done"][:].sum())
    except (OSError, KeyError):  # the writer has it, or has only begun
        return 0


@pytest.mark.slow
def test_a_closed_pipe_is_no_error(
    tiny_checkpoint: Path, text_folder: Path, tmp_path: Path
) -> None:
    """`probe ... | head -1`: no traceback, and the files are there all the same."""
    given = ["--ckpt", tiny_checkpoint, "--data", text_folder, "--out", tmp_path / "x.h5"]
    given += ["--html", tmp_path / "x.html", "--tokens", 300]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        command(*given), check=False, stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.h5", "x.html"]


def test_a_closed_pipe_for_json(
    tiny_checkpoint: Path, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from smeltscope.cli import probe, run

    given = ["--ckpt", tiny_checkpoint, "--data", text_folder, "--out", tmp_path / "x.h5"]
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        assert run(probe, ["attention-sink", *map(str, given), "--json", "--tokens", "300"]) == 0
    assert (tmp_path / "x.h5").exists()


def test_attention_without_a_value_is_never_shown_as_zero(
    sink: Callable[..., Any], tmp_path: Path, tiny_checkpoint: Path
) -> None:
    """Finite weights whose attention scores overflow are refused, not shown as .000."""
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(tiny_checkpoint, tmp_path / "ckpt")
    weights = load_file(folder / "model.safetensors")
    for name in ("q_norm", "k_norm"):
        weights[f"model.layers.1.self_attn.{name}.weight"][:] = 3e38
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "x.h5"
    done = sink("--out", out, "--tokens", 300, ckpt=folder)
    assert done.code == 2
    assert "layer 1 at visit 1" in done.err and "scores overflow" in done.err


def test_files_of_the_user_are_left_alone(sink: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "x.h5.probe").write_text("mine")
    assert sink("--out", tmp_path / "x.h5", "--tokens", 300).code == 0
    assert (tmp_path / "x.h5.probe").read_text() == "mine"
