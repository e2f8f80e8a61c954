"""Every diagnostic as a command, and all of them in one batch: tables, run files, JSON, models they have no meaning for."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import smeltscope
from smeltscope.registry import PROBES

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def batch_run(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path, text_folder: Path
) -> Path:
    """All diagnostics in one run."""
    from smeltscope.cli import probe, run

    out = tmp_path_factory.mktemp("batch") / "batch.h5"
    given = ["--ckpt", tiny_checkpoint, "--data", text_folder, "--out", out, "--tokens", "2k"]
    assert run(probe, ["batch", *map(str, given), "-q"]) == 0
    return out


def check_tables(text: str) -> None:
    """Whatever a path in a title measures, no line is wider than a terminal."""
    assert max(len(line) for line in text.splitlines() if "/" not in line) <= 80
    assert "…" not in text, "a column was cut"
    assert "nan" not in text.lower().split()


@pytest.mark.parametrize("name", PROBES)
def test_a_diagnostic_alone_finds_what_the_batch_finds(
    probe: Call,
    tmp_path: Path,
    tiny_checkpoint: Path,
    text_folder: Path,
    batch_run: Path,
    name: str,
) -> None:
    out = tmp_path / "x.h5"
    given = ["--ckpt", tiny_checkpoint, "--data", text_folder, "--out", out, "--tokens", "2k"]
    done = probe(name, *given, "-q")
    assert done.code == 0, done.err
    assert done.err == ""
    check_tables(done.out)
    assert done.out.startswith(f"{name}: {tiny_checkpoint}\n")

    group = name.replace("-", "_")
    alone, together = smeltscope.open(out)[group], smeltscope.open(batch_run)[group]
    assert set(alone.data_vars) == set(together.data_vars)
    for array in alone.data_vars:
        np.testing.assert_allclose(
            alone[array].values, together[array].values, rtol=1e-4, atol=1e-4, err_msg=str(array)
        )
    shown = probe("show", out)
    assert shown.code == 0 and shown.err == ""
    assert shown.out.split("\n", 1)[1] == done.out.split("\n", 1)[1]


def test_a_batch_in_short(
    probe: Call, tmp_path: Path, tiny_checkpoint: Path, text_folder: Path
) -> None:
    out = tmp_path / "x.h5"
    given = ["--ckpt", tiny_checkpoint, "--data", text_folder, "--out", out, "--tokens", "1k"]
    done = probe("batch", *given, "--probes", "loss, router-overlap,loss")
    assert done.code == 0, done.err
    assert re.fullmatch(r"1,000 tokens in .*\nRun file: .*x.h5\n", done.err)
    check_tables(done.out)
    titles = [line for line in done.out.splitlines() if str(tiny_checkpoint) in line]
    assert titles == [f"loss: {tiny_checkpoint}", f"router-overlap: {tiny_checkpoint}"]
    assert done.out.count("layer visits") == 1  # the first table alone, and no paper
    assert "The paper" not in done.out and "The paper" in probe("show", out).out
    assert set(smeltscope.open(out).children) == {"segments", "loss", "router_overlap"}


def test_json_of_a_batch(
    probe: Call, tmp_path: Path, tiny_checkpoint: Path, text_folder: Path
) -> None:
    given = ["--ckpt", tiny_checkpoint, "--data", text_folder, "--out", tmp_path / "x.h5"]
    done = probe("batch", *given, "--tokens", "1k", "--probes", "loss,swap", "--json", "--seed", 2)
    found = json.loads(done.out)
    assert list(found) == ["loss", "swap"]
    run = smeltscope.open(tmp_path / "x.h5")
    for name, content in found.items():
        summary = smeltscope.summarize(run, name)  # with the seed that the run has
        assert content["attributes"] == summary.attrs
        assert content["attributes"]["bootstrap_seed"] == 2
        assert set(content["values"]) == set(summary.data_vars)


@pytest.mark.parametrize(
    ("kind", "size", "says"),
    [
        ("llama", {}, "twice"),  # neither a loop nor a router
        ("smelt", {"num_visits": 1}, "twice"),
        ("smelt", {"num_visits": 3}, "visit"),
        ("gpt2", {}, "router"),
    ],
)
def test_models_that_a_diagnostic_has_no_meaning_for(
    probe: Call,
    tmp_path: Path,
    save_checkpoint: Callable[..., Path],
    text_folder: Path,
    kind: str,
    size: dict[str, int],
    says: str,
) -> None:
    folder = save_checkpoint(tmp_path / "ckpt", kind, **size)
    given = ["--ckpt", folder, "--data", text_folder, "--out", tmp_path / "x.h5"]
    done = probe("batch", *given, "--tokens", 600)
    assert done.code == 0, done.err
    check_tables(done.out)
    assert says in done.out
    titles = [line.split(":")[0] for line in done.out.splitlines() if str(folder) in line]
    assert titles == list(PROBES)


@pytest.mark.parametrize(
    "name", ["attention-sink", "router-overlap", "residual-updates", "qkv-similarity"]
)
def test_the_first_token_counts_where_it_is_asked_for(
    probe: Call, tmp_path: Path, tiny_checkpoint: Path, text_folder: Path, name: str
) -> None:
    from smeltscope.registry import recorded_probe

    out = tmp_path / "x.h5"
    given = ["--ckpt", tiny_checkpoint, "--data", text_folder, "--out", out, "--tokens", 600]
    done = probe(name, *given, "--include-first", "-q")
    assert done.code == 0, done.err
    run = smeltscope.open(out)
    assert recorded_probe(run, name).options() == {"include_first": True}
    identity = smeltscope.activations.attributes_of(run)["identity"]
    assert identity["probes"] == {name: {"include_first": True}}
    assert probe("show", out).out == done.out


def test_a_sweep_of_visits(
    probe: Call, tmp_path: Path, tiny_checkpoint: Path, text_folder: Path
) -> None:
    def loss(*args: object, out: str) -> dict[str, Any]:
        given = ["--ckpt", tiny_checkpoint, "--data", text_folder, "--out", tmp_path / out]
        done = probe("loss", *given, "--tokens", 600, "--json", *args)
        assert done.code == 0, done.err
        return json.loads(done.out)

    sweep = loss("--visits", "0..3", out="sweep.h5")
    assert sweep["coordinates"]["num_visits"] == [0, 1, 2, 3]
    swept = sweep["values"]["swept_loss"]["data"]
    assert swept[2] == sweep["values"]["loss"]["data"]  # the checkpoint has two visits
    for visits in (0, 1, 3):
        alone = loss("--visits", visits, out=f"{visits}.h5")
        assert "swept_loss" not in alone["values"]
        assert alone["values"]["loss"]["data"] == pytest.approx(swept[visits], abs=1e-5)


@pytest.mark.parametrize("value", ["4..1", "a..b", "1..", "-1", "..3", "1,2"])
def test_visits_that_are_none(probe: Call, value: str) -> None:
    done = probe("loss", "--visits", value)
    assert done.code == 2 and "--visits" in done.err and "write 2, or 0..4" in done.err


def test_options_of_the_model(
    probe: Call, tmp_path: Path, tiny_checkpoint: Path, text_folder: Path
) -> None:
    """Each says what ran, and changes the numbers."""

    def loss(*args: object) -> tuple[float, dict[str, Any]]:
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}.h5"
        given = ["--ckpt", tiny_checkpoint, "--data", text_folder, "--out", out, "--tokens", 600]
        done = probe("loss", *given, "-q", *args)
        assert done.code == 0, done.err
        run = smeltscope.open(out)
        found = float(smeltscope.summarize(run, "loss")["loss"])
        return found, smeltscope.activations.attributes_of(run)

    trained, _ = loss()
    half, scaled = loss("--residual-scale", 0.25)
    fresh, untrained = loss("--untrained")
    assert len({trained, half, fresh}) == 3
    assert scaled["model_config"]["residual_scale"] == 0.25
    assert untrained["checkpoint"] == f"{tiny_checkpoint} (untrained)"
    _, few = loss("--sampled-queries", 5, "--sampled-tokens", 7)
    assert (few["identity"]["sampled_queries"], few["identity"]["sampled_tokens"]) == (5, 7)


def test_names_that_are_no_diagnostics(probe: Call, tmp_path: Path) -> None:
    done = probe("batch", "--probes", "loss,router-ovrlap", "--out", tmp_path / "x.h5")
    assert done.code == 2 and done.out == ""
    assert done.err == ("Error: No probe is called 'router-ovrlap'. Did you mean router-overlap?\n")
    done = probe("batch", "--probes", "", "--out", tmp_path / "x.h5")
    assert done.code == 2 and "There is: attention-sink, router-overlap" in done.err
    done = probe("batch", "--probes", "loss,dyck-map", "--out", tmp_path / "x.h5")
    assert done.code == 2
    assert done.err == "Error: dyck-map measures Dyck prompts, not text; probe dyck runs it.\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_two_processes_speak_once(
    probe_process: Call, tmp_path: Path, tiny_checkpoint: Path, text_folder: Path
) -> None:
    import sys

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", "2"]
    given = ["--ckpt", tiny_checkpoint, "--data", text_folder, "--tokens", 900]
    done = probe_process(
        *("batch", *given, "--batch-tokens", 300, "--probes", "loss", "--out", "x.h5"),
        cwd=tmp_path,
        python=torchrun,
    )
    assert done.code == 0, done.err
    assert done.out.count("loss: ") == 1 and "Mean loss of" in done.out
    assert done.err.count("Run file: x.h5") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["x.h5"]


def test_what_was_done_before_is_in_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar of a notebook, in a run that goes on: half of the tokens cost no time."""
    import tqdm.auto
    from rich.console import Console

    from smeltscope.commands import terminal

    bars: list[Any] = []

    class Kept(tqdm.auto.tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            bars.append(self)

    monkeypatch.setattr(tqdm.auto, "tqdm", Kept)
    log = Console()
    monkeypatch.setattr(log, "is_jupyter", True)
    with terminal.progress(log) as update:
        update(500_000, 1_000_000, {})
        assert bars[0].format_dict["initial"] == bars[0].n == 500_000
        update(500_100, 1_000_000, {"loss": 2.5})
    known = bars[0].format_dict
    assert (known["n"], known["initial"], known["total"]) == (500_100, 500_000, 1_000_000)


def test_one_of_several_processes_speaks_of_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from rich.console import Console

    from smeltscope.commands import terminal

    now = iter([0.0, 0.0, 40.0])
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(now))
    monkeypatch.setenv("WORLD_SIZE", "2")
    file = io.StringIO()
    with terminal.progress(Console(file=file, width=60)) as update:
        update(0, 9000, {})
        update(4000, 9000, {})
    assert file.getvalue() == "44%, 4,000 tokens of this process, 100 tokens/s, 50 s left\n"
