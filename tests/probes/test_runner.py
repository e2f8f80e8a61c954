"""The runner over made held-out sets: batching, resuming after a kill, identity."""

import os
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from smeltscope.activations import attributes_of, capture, open_run
from smeltscope.errors import SmeltscopeError
from smeltscope.model import with_visits
from smeltscope.probes import AttentionSink, RunOptions, run_probes, summarize
from smeltscope.probes.attention_sink import measure_sink
from smeltscope.probes.runner import Measurement
from smeltscope.registry import PROBES, make_probe
from smeltscope.tasks import HeldOut, plan_batches

LENGTHS = [9, 70, 2, 33, 64, 1, 17, 3, 70, 5, 128, 12]
OPTIONS = RunOptions(max_length=128, batch_tokens=600)


def reordered(heldout: HeldOut, order: list[int]) -> HeldOut:
    segments = [heldout.segment(i) for i in order]
    return replace(
        heldout,
        tokens=np.concatenate(segments),
        offsets=np.cumsum([0, *map(len, segments)]).astype(np.int64),
        document=heldout.document[order],
    )


def by_segment(run) -> list[dict[str, np.ndarray]]:
    """The rows of a run, sorted by document and length: independent of the order in the file."""
    segments, data = run["segments"].dataset, run["attention_sink"].dataset
    order = np.lexsort([segments["tokens"].values, segments["document"].values])
    arrays = {n: a.values for n, a in data.data_vars.items() if a.dims[0] == "segment"}
    return [
        {"document": segments["document"].values[i]} | {n: a[i] for n, a in arrays.items()}
        for i in order
    ]


def assert_close(one, other, atol: float = 1e-5) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_allclose(a[name], b[name], atol=atol, rtol=1e-5, err_msg=name)


@pytest.fixture
def probe(tmp_path):
    def run(checkpoint, heldout, options=OPTIONS, name="run.h5", sink=None, **kwargs):
        out = tmp_path / name
        return open_run(
            run_probes(checkpoint, heldout, [sink or AttentionSink()], out, options, **kwargs)
        )

    return run


@pytest.mark.parametrize("name", ["smelt", "gpt_oss", "inkling2_loop"])
def test_batching_and_order_change_nothing(probe, make_checkpoint, make_heldout, name):
    checkpoint, heldout = make_checkpoint(name), make_heldout(LENGTHS)
    together = by_segment(probe(checkpoint, heldout, name="a.h5"))
    alone = RunOptions(max_length=128, batch_tokens=128)
    assert_close(by_segment(probe(checkpoint, heldout, alone, "b.h5")), together)
    mixed = reordered(heldout, [4, 2, 0, 11, 10, 1, 3, 5, 9, 8, 7, 6])
    large = RunOptions(max_length=128, batch_tokens=4 * 128 * len(LENGTHS))
    assert_close(by_segment(probe(checkpoint, mixed, large, "c.h5")), together)


def test_every_segment_as_if_it_ran_alone(probe, make_checkpoint, make_heldout):
    checkpoint, heldout = make_checkpoint("smelt"), make_heldout(LENGTHS)
    run = probe(checkpoint, heldout)
    data, segments = run["attention_sink"].dataset, run["segments"].dataset
    assert sorted(segments["tokens"].values) == sorted(LENGTHS)
    for row in range(len(LENGTHS)):
        document, length = segments["document"].values[row], segments["tokens"].values[row]
        (index,) = [
            i
            for i in range(len(LENGTHS))
            if heldout.document[i] == document and heldout.lengths[i] == length
        ]
        assert segments["document_id"].values[row] == f"doc{document}"
        assert segments["category"].values[row] == "ab"[document % 2]
        tokens = torch.from_numpy(heldout.segment(index).astype(np.int64))[None]
        with torch.inference_mode(), capture(checkpoint.model) as alone:
            checkpoint.model(tokens)
        for execution in range(9):
            numbers = measure_sink(alone[execution, "attention"], torch.tensor([length]))
            for name in ("queries", "sink_mass_sum", "heaviest_mass_sum", "sink_alpha"):
                got = data[name].values[row, execution]
                np.testing.assert_allclose(got, numbers[name][0], atol=1e-5, rtol=1e-5)


def test_what_the_file_says_about_the_run(probe, make_checkpoint, make_heldout):
    run = probe(make_checkpoint("smelt"), make_heldout(LENGTHS))
    data = run["attention_sink"].dataset
    assert data["layer"].values.tolist() == [0, 1, 2, 3, 1, 2, 3, 4, 5]
    assert data["visit"].values.tolist() == [1, 1, 1, 1, 2, 2, 2, 1, 1]
    assert data["module"].values[4] == "model.layers.4"
    assert data["head"].values.tolist() == [0, 1, 2, 3]
    attributes = attributes_of(run)
    assert attributes["identity"] == {
        "checkpoint_digest": "smelt []",
        "data_digest": f"{LENGTHS} 0",
        "visits": 2,
        "residual_scale": 0.5,
        "device": "cpu",
        "tensor_parallel": 1,
        "dtype": "float32",
        "max_length": 128,
        "batch_tokens": 600,
        "seed": 0,
        "sampled_queries": 64,
        "sampled_tokens": 64,
        "probes": {"attention-sink": {"include_first": False}},
    }
    assert attributes["model_type"] == "smelt"
    assert attributes["model_config"]["num_visits"] == 2
    assert attributes["packages"]["torch"] == torch.__version__
    assert attributes["threads"] == torch.get_num_threads()
    assert attributes["attention"] == "sdpa"
    assert "sink_mass_sum" in run["attention_sink"].attrs["definition"]


def test_the_same_run_twice_gives_the_same_bits(probe, make_checkpoint, make_heldout):
    runs = [probe(make_checkpoint("smelt"), make_heldout(LENGTHS), name=n) for n in "ab"]
    for name, array in runs[0]["attention_sink"].data_vars.items():
        other = runs[1]["attention_sink"][name]
        assert np.array_equal(array.values, other.values, equal_nan=True)


def test_a_model_with_one_visit(probe, make_checkpoint, make_heldout):
    run = probe(make_checkpoint("baseline"), make_heldout(LENGTHS))
    summary = summarize(run, AttentionSink(), draws=20)
    assert summary.sizes["execution"] == 6
    assert np.isnan(summary["change"]).all() and np.isnan(summary["change_overall"])
    assert np.isfinite(summary["sink_mass"]).all()


def test_bfloat16(probe, make_checkpoint, make_heldout):
    """The same model in 16 bits: sink masses near those of float32, and recorded as another run."""
    exact = probe(make_checkpoint("smelt"), make_heldout(LENGTHS), name="a.h5")
    rounded = probe(
        make_checkpoint("smelt", dtype=torch.bfloat16), make_heldout(LENGTHS), name="b.h5"
    )
    assert attributes_of(rounded)["identity"]["dtype"] == "bfloat16"
    one, two = (
        summarize(r, AttentionSink(), draws=0)["sink_mass"].values for r in (exact, rounded)
    )
    assert np.isfinite(two).all()
    assert np.abs(one - two).max() < 0.02  # the model's own rounding


def test_the_head_with_the_first_query(probe, make_checkpoint, make_heldout):
    heldout, checkpoint = make_heldout(LENGTHS), make_checkpoint("llama")
    without = probe(checkpoint, heldout, name="a.h5")["attention_sink"]
    including = probe(checkpoint, heldout, name="b.h5", sink=AttentionSink(include_first=True))
    including = including["attention_sink"]
    np.testing.assert_allclose(including["queries"] - without["queries"], 1)
    np.testing.assert_allclose(including["sink_mass_sum"] - without["sink_mass_sum"], 1, atol=2e-5)


def test_progress(probe, make_checkpoint, make_heldout):
    told = []
    probe(
        make_checkpoint("baseline"),
        make_heldout(LENGTHS),
        on_progress=lambda seen, total, _: told.append((seen, total)),
    )
    assert told[0] == (0, sum(LENGTHS)) and told[-1] == (sum(LENGTHS), sum(LENGTHS))
    assert told == sorted(set(told)) and len(told) > 3


class Stop(Exception):
    pass


def stop_after(batches: int):
    calls = []

    def on_progress(seen: int, total: int, headlines) -> None:
        calls.append(seen)
        if len(calls) == 1 + batches:  # the first comes before them
            raise Stop

    return on_progress


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"batch_tokens": 256}, "batch_tokens: was 600, is 256"),
        ({"max_length": 256}, "max_length: was 128, is 256"),
        ({"seed": 1}, "seed: was 0, is 1"),
        ("checkpoint", "checkpoint_digest: was 'smelt "),
        ("visits", "visits: was 2, is 3"),
        ("no visit", "visits: was 2, is 0"),
        ("scale", "residual_scale: was 0.5, is 1.0"),
        ("dtype", "dtype: was 'float32', is 'bfloat16'"),
        ("data", "data_digest"),
        ("probe", "probes.attention-sink.include_first: was False, is True"),
    ],
)
def test_resuming_another_run_is_refused(tmp_path, make_checkpoint, make_heldout, change, named):
    checkpoint, heldout, out = make_checkpoint("smelt"), make_heldout(LENGTHS), tmp_path / "run.h5"
    with pytest.raises(Stop):
        run_probes(checkpoint, heldout, [AttentionSink()], out, OPTIONS, on_progress=stop_after(2))
    options, sink = OPTIONS, AttentionSink()
    if isinstance(change, dict):
        options = replace(OPTIONS, **change)
    elif change == "checkpoint":
        checkpoint = replace(checkpoint, digest="another")
    elif change == "visits":
        checkpoint = replace(make_checkpoint("smelt", num_visits=3), digest=checkpoint.digest)
    elif change == "no visit":
        checkpoint = replace(checkpoint, model=with_visits(checkpoint.model, 0))
    elif change == "scale":
        checkpoint = replace(checkpoint, model=with_visits(checkpoint.model, 2, residual_scale=1.0))
    elif change == "dtype":
        checkpoint = make_checkpoint("smelt", dtype=torch.bfloat16)
    elif change == "data":
        heldout = make_heldout(LENGTHS, seed=1)
    else:
        sink = AttentionSink(include_first=True)
    with pytest.raises(SmeltscopeError, match=named):
        run_probes(checkpoint, heldout, [sink], out, options)
    run_probes(checkpoint, heldout, [sink], out, options, force=True)


def test_an_interrupted_run_goes_on(
    tmp_path, assert_same_bits, probe, make_checkpoint, make_heldout
):
    checkpoint, heldout = make_checkpoint("smelt"), make_heldout(LENGTHS)
    whole = probe(checkpoint, heldout, name="whole.h5")
    with pytest.raises(Stop):
        run_probes(
            checkpoint,
            heldout,
            [AttentionSink()],
            tmp_path / "cut.h5",
            OPTIONS,
            on_progress=stop_after(2),
        )
    done = open_run(tmp_path / "cut.h5.partial")["segments/done"].values
    assert 0 < done.sum() < len(LENGTHS)
    forwards = []
    hook = checkpoint.model.model.register_forward_hook(lambda *_: forwards.append(1))
    cut = probe(checkpoint, heldout, name="cut.h5")
    hook.remove()
    batches = len(plan_batches(heldout.lengths, OPTIONS.batch_tokens, OPTIONS.sampled_queries))
    assert len(forwards) == 1 + batches - 2  # the first tells the shape; two batches were done
    assert_same_bits(tmp_path / "whole.h5", tmp_path / "cut.h5")
    assert cut["segments/done"].all() and whole["segments/done"].all()


def interrupted(tmp_path: Path, checkpoint, heldout, probes) -> Path:
    """A run that ended after two batches: its file."""
    out = tmp_path / "run.h5"
    with pytest.raises(Stop):
        run_probes(checkpoint, heldout, probes, out, OPTIONS, on_progress=stop_after(2))
    return out


def test_headlines_go_on_where_they_stood(tmp_path, make_checkpoint, make_heldout):
    """Tokens and headline numbers of what was done before stand in the first call; the last is as without a break."""
    checkpoint, heldout = make_checkpoint("smelt"), make_heldout(LENGTHS)
    probes = [make_probe(name) for name in PROBES]
    whole: list = []
    run_probes(
        checkpoint, heldout, probes, tmp_path / "whole.h5", OPTIONS,
        on_progress=lambda *given: whole.append(given),
    )  # fmt: skip
    assert whole[0] == (0, sum(LENGTHS), {})
    told: list = []
    out = interrupted(tmp_path, checkpoint, heldout, probes)
    run_probes(
        checkpoint, heldout, probes, out, OPTIONS, on_progress=lambda *given: told.append(given)
    )
    assert len(told) == len(whole) - 2
    for one, other in zip(told, whole[2:], strict=True):
        assert one[:2] == other[:2] and one[2] == pytest.approx(other[2])
    assert len(told[0][2]) >= len(PROBES) - 1


@pytest.mark.parametrize("old", [False, True])
def test_other_threads_are_told(tmp_path, make_checkpoint, make_heldout, monkeypatch, old):
    checkpoint, heldout = make_checkpoint("smelt"), make_heldout(LENGTHS)
    out = interrupted(tmp_path, checkpoint, heldout, [AttentionSink()])
    if old:  # a file that does not say
        with h5py.File(tmp_path / "run.h5.partial", "r+") as file:
            del file.attrs["threads"], file.attrs["attention"]
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 3)
    notes: list[str] = []
    run_probes(checkpoint, heldout, [AttentionSink()], out, OPTIONS, on_note=notes.append)
    if old:
        assert notes == []
        return
    (note,) = notes
    assert f"run.h5.partial was begun under other conditions (threads: was {threads}, " in note
    assert f"is {threads + 3}): " in note and "last bits" in note
    assert open_run(out)["segments/done"].all()


def test_the_same_conditions_are_not_spoken_of(tmp_path, make_checkpoint, make_heldout):
    checkpoint, heldout = make_checkpoint("smelt"), make_heldout(LENGTHS)
    out = interrupted(tmp_path, checkpoint, heldout, [AttentionSink()])
    notes: list[str] = []
    run_probes(checkpoint, heldout, [AttentionSink()], out, OPTIONS, on_note=notes.append)
    assert notes == []


def test_memory_is_freed_when_the_batch_is_gone(
    tmp_path, make_checkpoint, make_heldout, monkeypatch
):
    """The traceback of the error holds the batch's tensors: the cache is emptied behind it."""
    checkpoint, heldout = make_checkpoint("smelt"), make_heldout([30, 30, 30, 30])
    refused: list[weakref.ref] = []
    alive: list[bool] = []
    measure = Measurement._measure

    def small(self, rows):
        if len(rows) > 2:
            tensor = torch.zeros(4)
            refused.append(weakref.ref(tensor))
            raise torch.OutOfMemoryError
        return measure(self, rows)

    monkeypatch.setattr(Measurement, "_measure", small)
    monkeypatch.setattr(
        torch.cuda, "empty_cache", lambda: alive.extend(ref() is not None for ref in refused)
    )
    options = RunOptions(max_length=30, batch_tokens=2000)
    out = run_probes(checkpoint, heldout, [AttentionSink()], tmp_path / "run.h5", options)
    assert alive == [False]
    assert open_run(out)["segments/done"].all()


_SCRIPT = """
import importlib.util, os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
spec = importlib.util.spec_from_file_location("made", sys.argv[1])
made = importlib.util.module_from_spec(spec)
spec.loader.exec_module(made)
from smeltscope.probes import AttentionSink, RunOptions, run_probes

def run(out, kill):
    calls = []
    def on_progress(seen, total, headlines):
        calls.append(seen)
        if len(calls) == kill:
            os.kill(os.getpid(), signal.SIGKILL)
    heldout = made._heldout([9, 70, 2, 33, 64, 17, 3, 70, 5, 128, 12])
    options = RunOptions(max_length=128, batch_tokens=600)
    run_probes(made._checkpoint("smelt"), heldout, [AttentionSink()], out, options, on_progress=on_progress)

# Each run is a process of its own; forked, so that torch is imported once.
folder = Path(sys.argv[2])
for name, kill in (("cut.h5", 3), ("cut.h5", None), ("whole.h5", None)):
    pid = os.fork()
    if pid == 0:
        run(folder / name, kill)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(name, status, (folder / (name + ".partial")).exists(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kill -9")
def test_killed_and_run_again(tmp_path, assert_same_bits):
    """Other processes: one killed, one that goes on, and the bits of one that was never interrupted."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    made = Path(__file__).with_name("conftest.py")
    command = [sys.executable, str(script), str(made), str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert told.splitlines() == ["cut.h5 -9 True", "cut.h5 0 False", "whole.h5 0 False"]
    assert_same_bits(tmp_path / "whole.h5", tmp_path / "cut.h5")


def test_a_model_that_cannot_be_captured_leaves_no_file(tmp_path, make_checkpoint, make_heldout):
    checkpoint = make_checkpoint("llama")
    checkpoint.model.set_attn_implementation("flex_attention")
    with pytest.raises(SmeltscopeError, match="flex_attention"):
        run_probes(
            checkpoint, make_heldout([5, 6]), [AttentionSink()], tmp_path / "run.h5", OPTIONS
        )
    assert list(tmp_path.iterdir()) == []


def test_the_model_is_left_as_it_was(probe, make_checkpoint, make_heldout):
    checkpoint = make_checkpoint("smelt")
    tokens = torch.arange(1, 20)[None]
    with torch.no_grad():
        before = checkpoint.model(tokens).logits
        probe(checkpoint, make_heldout(LENGTHS))
        assert torch.equal(checkpoint.model(tokens).logits, before)
    assert checkpoint.model.config._attn_implementation == "sdpa"
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in checkpoint.model.model.layers)


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("gpt2", ["transformer.h.0", "transformer.h.1", "transformer.h.2"]),
        (  # layers 2 and 3 of six run three times, as the same modules
            "inkling2_loop",
            [f"model.layers.{layer}" for layer in (0, 1, 2, 3, 2, 3, 2, 3, 4, 5)],
        ),
    ],
)
def test_modules_go_by_their_name_in_the_model(probe, make_checkpoint, make_heldout, name, modules):
    run = probe(make_checkpoint(name), make_heldout([9, 5]))
    assert run["attention_sink"]["module"].values.tolist() == modules


def test_layers_of_different_heads_and_windows(probe, make_checkpoint, make_heldout):
    """What a layer lacks is NaN, in no mean, and the curve over positions stays drawn."""
    from smeltscope.dashboards import sink_by_position

    checkpoint = make_checkpoint("inkling2_loop", swa_num_attention_heads=2)
    summary = summarize(probe(checkpoint, make_heldout([100, 60, 80, 30])), AttentionSink())
    narrow = np.array([0, 2, 4, 6, 8])  # every other layer slides, with two heads of four
    for name in ("sink_mass", "nearby_mass", "heaviest_mass", "learned_sink_mass"):
        values = summary[name].values
        assert np.isnan(values[narrow, 2:]).all(), name
        assert np.isfinite(values[narrow, :2]).all() and np.isfinite(values[narrow + 1]).all(), name
    np.testing.assert_allclose(
        summary["sink_mass_mean"][narrow], summary["sink_mass"].values[narrow, :2].mean(1)
    )
    assert (summary["blind_share"].values[narrow] > 0).all()
    assert (summary["queries"].values[narrow] < summary["queries"].values[1]).all()
    for trace in sink_by_position(summary).data:
        assert np.isfinite(np.asarray(trace.y, dtype=float)).all(), trace.name
