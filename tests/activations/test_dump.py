"""Dumps: what they hold, bit by bit, and what is left of them when something goes wrong."""

import errno
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import xarray as xr

from smeltscope.activations import capture, dump, hdf5
from smeltscope.activations.dump import arrays_of, dump_sites, open_dump
from smeltscope.errors import SmeltscopeError
from smeltscope.model import TINY_MODELS, tiny

LENGTHS = (5, 1, 24, 17, 24, 2, 9)
_ROUTER = ("logits", "experts", "weights")
EVERYTHING = (
    *("resid_pre", "attn_in", "q", "k", "v", "q_norm", "k_norm", "pv", "attn_out"),
    *("resid_mid", "mlp_in", "router", "mlp_out", "resid_post"),
)


def some_text(lengths=LENGTHS) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of segments of these lengths, and their offsets."""
    tokens = np.random.default_rng(0).integers(3, 256, sum(lengths)).astype(np.int32)
    return tokens, np.cumsum([0, *lengths])


def segment(tokens: np.ndarray, offsets: np.ndarray, i: int) -> torch.Tensor:
    return torch.from_numpy(tokens[offsets[i] : offsets[i + 1]].astype(np.int64))[None]


def layer_outputs(model, ids: torch.Tensor) -> list[torch.Tensor]:
    """What plain hooks see behind each layer module of a SMELT or a model without loop."""
    seen = []
    hooks = [
        layer.register_forward_hook(lambda m, a, output: seen.append(output.clone()))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_plain_hooks_see_bit_by_bit(tmp_path, dtype):
    """Batches of one segment, so that every product is the same one."""
    model = tiny("llama").to(dtype)
    lengths = (17, 13, 24, 20)
    tokens, offsets = some_text(lengths)
    out = dump_sites(model, tokens, offsets, ["resid_post"], tmp_path / "dump.h5", batch_tokens=24)
    with open_dump(out) as found:
        assert found.sites == {"resid_post": [0, 1, 2]}
        for i in range(len(lengths)):
            for e, expected in enumerate(layer_outputs(model, segment(tokens, offsets, i))):
                value = found[e, "resid_post"][found.segment(i)]
                assert value.dtype == dtype
                assert torch.equal(value, expected[0])


@pytest.fixture(scope="module")
def one_by_one():
    """{(execution, array): values of all tokens}, from segments that ran alone."""
    parts: dict[tuple[int, str], list[torch.Tensor]] = {}
    model, (tokens, offsets) = tiny("smelt"), some_text()
    with torch.no_grad(), capture(model, EVERYTHING) as run:
        for i in range(len(LENGTHS)):
            model(segment(tokens, offsets, i))
            for e in range(9):
                values = {site: run[e, site] for site in EVERYTHING if site != "router"}
                values |= {f"router_{part}": getattr(run[e, "router"], part) for part in _ROUTER}
                for name, value in values.items():
                    parts.setdefault((e, name), []).append(value[0])
    return {where: torch.cat(values) for where, values in parts.items()}


@pytest.mark.parametrize("batch_tokens", [24, 60, 10_000])
def test_every_site_in_any_batches(tmp_path, one_by_one, batch_tokens):
    out = dump_sites(
        tiny("smelt"), *some_text(), EVERYTHING, tmp_path / "dump.h5", batch_tokens=batch_tokens
    )
    with open_dump(out) as found:
        assert {(e, name) for name, es in found.sites.items() for e in es} == set(one_by_one)
        for (e, name), expected in one_by_one.items():
            value = found[e, name][:]
            assert value.shape == expected.shape
            if name == "router_experts":
                assert torch.equal(value.sort().values, expected.sort().values.int())
            elif name != "router_weights":  # which are in the order of the experts
                assert (value - expected).abs().max() < 1e-5


def test_experts_and_weights_belong_together(tmp_path):
    model = tiny("mixtral")
    out = dump_sites(model, *some_text(), ["router"], tmp_path / "dump.h5")
    with open_dump(out) as found:
        for e in range(3):
            logits, experts, weights = (found[e, f"router_{name}"][:] for name in _ROUTER)
            chosen = logits.softmax(-1).gather(-1, experts.long())
            assert torch.allclose(weights, chosen / chosen.sum(-1, keepdim=True), atol=1e-6)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_every_model(tmp_path, name):
    tokens, offsets = some_text()
    out = dump_sites(tiny(name), tokens, offsets, ["resid_post", "pv"], tmp_path / "dump.h5")
    with open_dump(out) as found, torch.no_grad(), capture(tiny(name), ["resid_post", "pv"]) as run:
        run.model(segment(tokens, offsets, 2))
        assert found.executions == run.executions
        for e in run.executions:
            for site in run.sites:
                value = found[e.index, site][found.segment(2)]
                expected = run[e.index, site][0]
                assert (value - expected).abs().max() < 2e-5 * expected.abs().max()


def test_the_layout_of_the_file(tmp_path):
    """As docs/dump.md describes it: by h5py alone."""
    tokens, offsets = some_text()
    labels = {"document": np.arange(7), "category": np.array(["é", *"bcdefg"])}
    out = dump_sites(
        tiny("smelt").bfloat16(),
        *(tokens, offsets, ["k", "router"], tmp_path / "dump.h5"),
        executions=[6, 2],
        segments=labels,
        attributes={"checkpoint": "tiny", "model_config": {"a": 1}},
    )
    assert [path.name for path in tmp_path.iterdir()] == ["dump.h5"]
    with h5py.File(out) as file:
        assert set(file["k"]) == {"2", "6"}
        assert file.attrs["checkpoint"] == "tiny" and file.attrs["model_config"] == '{"a": 1}'
        keys = file["k/6"]
        assert keys.shape == (82, 2, 8) and keys.dtype == np.uint16
        assert keys.compression == "gzip" and keys.compression_opts == 1 and keys.shuffle
        assert dict(keys.attrs)["smeltscope_dtype"] == "bfloat16"
        assert (keys.attrs["layer"], keys.attrs["visit"]) == (3, 2)
        assert [dim[0].name for dim in keys.dims] == ["/token", "/kv_head", "/size"]
        assert file["router_logits/2"].dtype == np.float32
        assert [dim[0].name for dim in file["router_logits/2"].dims] == ["/token", "/expert"]
        assert file["router_experts/2"].dtype == np.int32
        assert np.array_equal(file["input_ids"][:], tokens)
        assert np.array_equal(file["segments/start"][:], offsets[:-1])
        assert np.array_equal(file["segments/tokens"][:], LENGTHS)
        assert file["segments/category"].asstr()[0] == "é"
        # Widened to float32 as the page says.
        wide = (keys[:].astype(np.uint32) << 16).view(np.float32)
    with open_dump(out) as found:
        assert torch.equal(found[6, "k"][:].float(), torch.from_numpy(wide))
        assert found.attributes["checkpoint"] == "tiny"
        assert found.segments["category"].tolist() == ["é", *"bcdefg"]
        assert torch.equal(found.input_ids, torch.from_numpy(tokens))
        assert [(e.index, e.layer, e.visit) for e in found.executions] == [(2, 2, 1), (6, 3, 2)]


def test_xarray_reads_it_by_name(tmp_path):
    out = dump_sites(tiny("gpt2"), *some_text(), ["q", "resid_post"], tmp_path / "dump.h5")
    with xr.open_datatree(out, engine="h5netcdf") as tree, open_dump(out) as found:
        queries = tree["q/1"]
        assert queries.dims == ("token", "head", "size")
        part = queries.isel(token=found.segment(2))
        assert np.array_equal(part, found[1, "q"][found.segment(2)])
        assert tree["resid_post/2"].dims == ("token", "width")
        assert tree["segments"]["start"].dims == ("segment",)
        assert tree["input_ids"].sizes == {"token": 82}


def test_layers_with_other_sizes(tmp_path):
    """Inkling's windowed layers may have fewer heads: a dimension of their own."""
    model = tiny("inkling2_loop", swa_num_attention_heads=2, swa_num_key_value_heads=1)
    out = dump_sites(model, *some_text(), ["pv"], tmp_path / "dump.h5")
    with open_dump(out) as found, xr.open_datatree(out, engine="h5netcdf") as tree:
        assert found[0, "pv"].shape == (82, 2, 8) and found[1, "pv"].shape == (82, 4, 8)
        assert tree["pv/0"].dims == ("token", "head", "size")
        assert tree["pv/1"].dims == ("token", "head_4", "size")


def test_parts_are_read_from_the_disk(tmp_path, monkeypatch):
    out = dump_sites(tiny("llama").bfloat16(), *some_text(), ["resid_post"], tmp_path / "dump.h5")
    with open_dump(out) as found:
        array = found[1, "resid_post"]
        everything = array[:]
        read: list[int] = []
        whole = h5py.Dataset.__getitem__

        def counted(self, index, *rest):
            result = whole(self, index, *rest)
            read.append(np.size(result))
            return result

        monkeypatch.setattr(h5py.Dataset, "__getitem__", counted)
        assert array.shape == (82, 32) and len(array) == 82 and array.dtype == torch.bfloat16
        assert read == []
        assert torch.equal(array[3], everything[3])
        assert torch.equal(array[3, 5], everything[3, 5])
        assert torch.equal(array[10:20:3, :4], everything[10:20:3, :4])
        assert torch.equal(array[[1, 7, 30]], everything[[1, 7, 30]])
        assert torch.equal(array[np.arange(82) == 9], everything[9:10])
        assert read == [32, 1, 16, 96, 32]


def test_one_segment_of_one_token(tmp_path):
    out = dump_sites(tiny("smelt"), *some_text((1,)), EVERYTHING, tmp_path / "dump.h5")
    with open_dump(out) as found:
        assert found[8, "resid_post"].shape == (1, 32) and found.segment(0) == slice(0, 1)


def test_chosen_executions(tmp_path):
    tokens, offsets = some_text()
    model = tiny("smelt")
    arrays = arrays_of(model, ["resid_post", "router"], [6, 2, 6])
    assert [(a.execution.index, a.name, a.shape) for a in arrays if a.name != "router_weights"] == [
        (e, *rest)
        for e in (2, 6)
        for rest in (("router_logits", (8,)), ("router_experts", (2,)), ("resid_post", (32,)))
    ]
    assert sum(a.bytes_per_token for a in arrays) == 2 * 4 * (8 + 2 + 2 + 32)
    out = dump_sites(
        model, tokens, offsets, ["resid_post"], tmp_path / "dump.h5", executions=[6, 2]
    )
    with open_dump(out) as found:
        assert found.sites == {"resid_post": [2, 6]}
        with pytest.raises(
            SmeltscopeError, match=r"no 'resid_post' of execution 3; it holds resid_post of 2, 6\."
        ):
            found[3, "resid_post"]
        with pytest.raises(SmeltscopeError, match="no 'q' of execution 2"):
            found[2, "q"]


@pytest.mark.parametrize(
    ("sites", "executions", "refusal"),
    [
        (["attention"], None, "'attention' has no value for each token alone; dump q, k and v"),
        (["resid"], None, "No site is called resid; there are"),
        (["q_norm"], None, "No layer of LlamaForCausalLM has the site 'q_norm'"),
        (["resid_post"], [3], "There is no execution 3; the model has 0 to 2"),
        (["resid_post"], [-1], "There is no execution -1"),
    ],
)
def test_what_cannot_be_dumped(tmp_path, sites, executions, refusal):
    with pytest.raises(SmeltscopeError, match=refusal):
        dump_sites(tiny("llama"), *some_text(), sites, tmp_path / "dump.h5", executions=executions)
    assert list(tmp_path.iterdir()) == []


def test_executions_that_lack_a_site(tmp_path):
    model = tiny("inkling2_loop")
    with pytest.raises(
        SmeltscopeError,
        match=r"None of the executions asked for has the site 'mlp_out'; these have it: 1, 3, 5",
    ):
        arrays_of(model, ["mlp_out", "resid_post"], [0, 2])
    out = dump_sites(model, *some_text(), ["mlp_out", "resid_post"], tmp_path / "dump.h5")
    with open_dump(out) as found:
        assert found.sites == {"mlp_out": [1, 3, 5, 7, 9], "resid_post": list(range(10))}


def test_a_segment_that_is_too_long(tmp_path):
    with pytest.raises(
        SmeltscopeError, match=r"24 tokens does not fit .* raise --batch-tokens to 24"
    ):
        dump_sites(
            tiny("llama"), *some_text(), ["resid_post"], tmp_path / "dump.h5", batch_tokens=20
        )


def test_batches_are_neighbours_and_within_the_budget():
    lengths = np.random.default_rng(0).integers(1, 30, 200)
    batches = list(dump._batches(lengths, 64))
    assert batches[0][0] == 0 and batches[-1][1] == 200
    assert all(a[1] == b[0] for a, b in pairwise(batches))
    for first, last in batches:
        rows = lengths[first:last]
        assert 0 < len(rows) * rows.max() <= 64
        if last < 200:  # one more would not have fitted
            assert (len(rows) + 1) * max(rows.max(), lengths[last]) > 64


def test_a_gpu_that_is_too_small(tmp_path, monkeypatch):
    def full(*_) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(dump, "decode", full)
    with pytest.raises(
        SmeltscopeError, match="does not fit into the GPU's memory; lower --batch-tok"
    ):
        arrays_of(tiny("llama"), ["resid_post"])


def interrupting(done: int, total: int) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def failing(done: int, total: int) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("stop", "error"), [(interrupting, KeyboardInterrupt), (failing, ZeroDivisionError)]
)
@pytest.mark.parametrize("existing", [False, True])
def test_nothing_half_written_is_left(tmp_path, stop, error, existing):
    out, model = tmp_path / "dump.h5", tiny("llama")
    if existing:
        out.write_text("an earlier dump")
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(error):
        dump_sites(
            model, *some_text(), ["resid_post"], out, batch_tokens=24, force=existing,
            on_progress=stop,
        )  # fmt: skip
    assert signal.getsignal(signal.SIGINT) is handler
    assert not model.model.layers[0]._forward_hooks
    if existing:
        assert out.read_text() == "an earlier dump"
    assert [p.name for p in tmp_path.iterdir()] == ["dump.h5"] * existing
    # The same command starts anew.
    dump_sites(model, *some_text(), ["resid_post"], out, force=existing)
    with open_dump(out) as found:
        assert found[2, "resid_post"][:].isfinite().all()


def test_a_killed_dump_leaves_no_dump(tmp_path):
    """What is left of it has another name, does not open as one, and is replaced by the next."""
    script = """
import os, signal, sys
import numpy as np
from smeltscope.activations.dump import dump_sites
from smeltscope.model import tiny
lengths = [24] * 40
tokens = np.arange(sum(lengths)) % 200 + 3
dump_sites(tiny("llama"), tokens, np.cumsum([0, *lengths]), ["resid_post"], sys.argv[1], batch_tokens=24,
           on_progress=lambda done, total: done > 200 and os.kill(os.getpid(), signal.SIGKILL))
"""
    out = tmp_path / "dump.h5"
    done = subprocess.run([sys.executable, "-c", script, str(out)], check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert not out.exists()
    for left in tmp_path.iterdir():
        with pytest.raises(SmeltscopeError, match="damaged"):
            open_dump(left)
    dump_sites(tiny("llama"), *some_text(), ["resid_post"], out)
    assert [path.name for path in tmp_path.iterdir()] == ["dump.h5"]


def test_a_full_disk(tmp_path, monkeypatch):
    written = []
    write = hdf5._NewFile.write

    def limited(self, data):
        written.append(len(data))
        if sum(written) > 6000:
            self._keep(OSError(errno.ENOSPC, "No space left on device"))
        return write(self, data)

    monkeypatch.setattr(hdf5._NewFile, "write", limited)
    out = tmp_path / "dump.h5"
    with pytest.raises(SmeltscopeError, match=r"The disk is full: .*dump.h5 could not be written"):
        dump_sites(tiny("llama"), *some_text(), ["resid_post"], out, batch_tokens=24)
    assert list(tmp_path.iterdir()) == []


def test_an_out_that_exists_stays(tmp_path):
    out = tmp_path / "dump.h5"
    out.write_text("something else")
    with pytest.raises(
        SmeltscopeError, match="exists already; choose another --out, or pass --force"
    ):
        dump_sites(tiny("llama"), *some_text(), ["resid_post"], out)
    assert out.read_text() == "something else"
    dump_sites(tiny("llama"), *some_text(), ["resid_post"], out, force=True)
    with open_dump(out) as found:
        assert len(found[0, "resid_post"]) == 82


def test_files_that_are_no_dumps(tmp_path):
    path = tmp_path / "file.h5"
    with pytest.raises(SmeltscopeError, match="There is no dump"):
        open_dump(path)
    path.write_text("no HDF5")
    with pytest.raises(SmeltscopeError, match="is no HDF5 file, or a damaged one"):
        open_dump(path)
    with h5py.File(path, "w") as file:
        file.attrs["smeltscope_schema"] = 1
    with pytest.raises(SmeltscopeError, match="but no dump of smeltscope"):
        open_dump(path)
    with h5py.File(path, "r+") as file:
        file.attrs["smeltscope_dump"] = 7
    with pytest.raises(
        SmeltscopeError, match="a dump of version 7; this smeltscope reads version 1"
    ):
        open_dump(path)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_dump(tmp_path):
    """160 MB of numbers that cannot be packed, in a process that grows by a fraction of that."""
    script = """
import resource, sys
import numpy as np
from smeltscope.activations.dump import arrays_of, dump_sites
from smeltscope.model import tiny

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000

model = tiny("llama", hidden_size=256, intermediate_size=64)
sites = ["resid_pre", "attn_in", "resid_mid", "resid_post"]
lengths = [256] * int(sys.argv[2])
tokens = np.random.default_rng(0).integers(3, 256, sum(lengths))
offsets = np.cumsum([0, *lengths])
dump_sites(model, tokens[:2048], offsets[:9], sites, sys.argv[1], batch_tokens=1024)
before = peak()
dump_sites(model, tokens, offsets, sites, sys.argv[1], batch_tokens=1024, force=True)
size = sum(a.bytes_per_token for a in arrays_of(model, sites)) * len(tokens) / 1e6
print(size, peak() - before)
"""
    out = tmp_path / "dump.h5"
    done = subprocess.run(
        [sys.executable, "-c", script, str(out), "51"],
        check=True, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    size, growth = map(float, done.stdout.split())
    assert size > 150 and out.stat().st_size > 100e6
    assert growth < 30


def test_the_command(tmp_path, probe, tiny_checkpoint, text_folder):
    out = tmp_path / "dump.h5"
    options = ["--ckpt", tiny_checkpoint, "--data", text_folder, "--device", "cpu", "--out", out]
    options += ["--sites", "resid_post, router", "--executions", "1,4-5", "--max-length", 64]
    result = probe("dump", *options, "--tokens", 900)
    assert result.code == 0, result.err
    assert "12 arrays, " in result.err and f"Dump: {out}" in result.err.replace("\n", "")
    with open_dump(out) as found:
        assert {e.index for e in found.executions} == {1, 4, 5}
        assert set(found.sites) == {"resid_post", *(f"router_{name}" for name in _ROUTER)}
        assert len(found.input_ids) == 900 == len(found[4, "resid_post"])
        assert set(found.segments) == {
            *("start", "tokens", "document", "document_id", "category", "source")
        }
        assert set(found.segments["category"]) == {"code", "prose", "sums"}
        assert len(found.attributes["checkpoint_digest"]) == 64
        assert found.attributes["model_type"] == "smelt"
        # A row is what the model gives for that segment.
        from smeltscope.model import load_checkpoint

        model = load_checkpoint(tiny_checkpoint, device="cpu").model
        where = found.segment(3)
        value = layer_outputs(model, found.input_ids[where].long()[None])[4][0]
        assert (found[4, "resid_post"][where] - value).abs().max() < 1e-5
    again = probe("dump", *options)
    assert again.code == 2 and "exists already" in again.err
    quiet = probe("dump", *options, "--tokens", 300, "--force", "-q")
    assert (quiet.code, quiet.out, quiet.err) == (0, "", "")


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (["--executions", "5-2"], "names no executions; write all, 6, 2-5 or 0,6-8"),
        (["--executions", "two"], "'two' names no executions"),
        (["--executions", "9"], "There is no execution 9; the model has 0 to 8"),
        (["--sites", "attention"], "dump q, k and v"),
        (["--sites", "resid_post,"], "No site is called"),
        (["--tensor-parallel"], "use --device-map auto"),
    ],
)
def test_the_commands_refusals(tmp_path, probe, tiny_checkpoint, text_folder, options, refusal):
    out = tmp_path / "dump.h5"
    result = probe("dump", "--ckpt", tiny_checkpoint, "--data", text_folder, "--out", out, *options)
    assert result.code == 2 and refusal in result.err.replace("\n", " ")
    assert "Traceback" not in result.err and list(tmp_path.iterdir()) == []


def test_the_command_says_that_the_disk_may_be_too_small(
    tmp_path, probe, tiny_checkpoint, text_folder, monkeypatch
):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 5, 2000))
    out = tmp_path / "dump.h5"
    options = ["--ckpt", tiny_checkpoint, "--data", text_folder, "--out", out, "--tokens", 300]
    result = probe("dump", *options)
    assert result.code == 0 and out.exists()
    assert "345.6 kB before packing" in result.err
    assert "Only 2.0 kB are free there: the dump may not fit." in result.err


def test_the_interrupted_command(tmp_path, probe, tiny_checkpoint, text_folder, monkeypatch):
    out = tmp_path / "dump.h5"
    monkeypatch.setattr(dump, "decode", _interrupted_after(3, dump.decode))
    result = probe("dump", "--ckpt", tiny_checkpoint, "--data", text_folder, "--out", out)
    assert result.code == 130
    assert f"Interrupted: there is no {out}, and the same command starts anew." in result.err
    assert list(tmp_path.iterdir()) == []


def _interrupted_after(count: int, decode):
    calls = []

    def run(*arguments):
        calls.append(1)
        if len(calls) == count:
            os.kill(os.getpid(), signal.SIGINT)
        return decode(*arguments)

    return run


def test_the_default_name(tmp_path, probe, tiny_checkpoint, text_folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = probe("dump", "--ckpt", tiny_checkpoint, "--data", text_folder, "--tokens", 200)
    assert result.code == 0
    assert [path.name for path in tmp_path.iterdir()] == [f"dump-{Path(tiny_checkpoint).name}.h5"]
