"""Several processes on one run, and a batch that does not fit: the same numbers as alone."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smeltscope.activations import open_run
from smeltscope.errors import SmeltscopeError
from smeltscope.model import SmeltForCausalLM
from smeltscope.probes import RunOptions, group_name, run_probes
from smeltscope.probes.workers import split_batches
from smeltscope.registry import PROBES, make_probe

LENGTHS = [9, 70, 2, 33, 64, 1, 17, 3, 70, 5, 128, 12]
OPTIONS = RunOptions(max_length=128, batch_tokens=600)


def assert_alike(
    path: Path, other: Path, atol: float, rtol: float, without: Sequence[str] = ()
) -> None:
    """Runs of the same numbers but for rounding; counts, and what is chosen, are the same. `without` these stages."""
    one, two = open_run(path), open_run(other)
    assert set(one.children) == set(two.children) == {"segments", *map(group_name, PROBES)}
    for group in one.children:
        assert set(one[group].data_vars) == set(two[group].data_vars)
        for name, array in one[group].data_vars.items():
            expected, where = two[group][name], f"{group}/{name}"
            if "stage" in array.dims:
                array, expected = (a.drop_sel(stage=list(without)) for a in (array, expected))
            if array.dtype.kind == "f":
                np.testing.assert_allclose(array, expected, atol=atol, rtol=rtol, err_msg=where)
            else:
                np.testing.assert_array_equal(array, expected, err_msg=where)


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=30), st.integers(1, 9))
def test_each_batch_goes_to_one_process_in_order(tokens, ranks):
    shares = split_batches(tokens, ranks)
    assert len(shares) == ranks
    assert [b for share in shares for b in share] == list(range(len(tokens)))
    most = max(sum(tokens[b] for b in share) for share in shares)
    assert most <= sum(tokens) / ranks + max(tokens)


_SCRIPT = """
import importlib.util, sys
import torch
torch.set_num_threads(1)
spec = importlib.util.spec_from_file_location("made", sys.argv[1])
made = importlib.util.module_from_spec(spec)
spec.loader.exec_module(made)
from smeltscope.model import SmeltForCausalLM
from smeltscope.probes import RunOptions, run_probes
from smeltscope.registry import PROBES, make_probe
out = run_probes(
    made._checkpoint("smelt"), made._heldout({lengths}), [make_probe(name) for name in PROBES],
    sys.argv[2], RunOptions(max_length=128, batch_tokens=600),
)
assert out.exists()
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_processes_write_the_bits_of_one(tmp_path, assert_same_bits, ranks):
    script, made = tmp_path / "script.py", Path(__file__).with_name("conftest.py")
    script.write_text(_SCRIPT.format(lengths=LENGTHS))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    alone = [sys.executable, script, made, tmp_path / "alone.h5"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    shared = [*torchrun, f"--nproc-per-node={ranks}", script, made, tmp_path / "shared.h5"]
    for command in (alone, shared):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert_same_bits(tmp_path / "alone.h5", tmp_path / "shared.h5")
    assert sorted(p.name for p in tmp_path.glob("*.h5*")) == ["alone.h5", "shared.h5"]


def test_a_batch_that_does_not_fit_is_halved(tmp_path, make_checkpoint, make_heldout):
    """A model that runs out of memory over 160 tokens measures what one with enough of it does."""
    checkpoint, heldout = make_checkpoint("smelt"), make_heldout(LENGTHS)
    probes = [make_probe(name) for name in PROBES]
    run_probes(checkpoint, heldout, probes, tmp_path / "wide.h5", OPTIONS)
    sizes = []

    def check(module, args, kwargs) -> None:
        sizes.append(kwargs["input_ids"].numel())
        if sizes[-1] > 160:
            raise torch.OutOfMemoryError("CUDA out of memory")

    checkpoint.model.model.register_forward_pre_hook(check, with_kwargs=True)
    run_probes(checkpoint, heldout, probes, tmp_path / "narrow.h5", OPTIONS)
    assert sum(size > 160 for size in sizes) == 1, "it keeps to what fitted"
    assert_alike(tmp_path / "narrow.h5", tmp_path / "wide.h5", atol=2e-5, rtol=1e-4)


def test_one_segment_that_does_not_fit_is_said(tmp_path, make_checkpoint, make_heldout):
    checkpoint = make_checkpoint("smelt")

    def check(module, args, kwargs) -> None:
        if kwargs["input_ids"].shape[1] > 20:
            raise torch.OutOfMemoryError("CUDA out of memory")

    checkpoint.model.model.register_forward_pre_hook(check, with_kwargs=True)
    with pytest.raises(SmeltscopeError, match=r"segment of 70 tokens does not fit .*--max-length"):
        run_probes(
            checkpoint, make_heldout([9, 70]), [make_probe("loss")], tmp_path / "run.h5", OPTIONS
        )


@pytest.mark.slow
def test_a_model_spread_over_processes(tmp_path, save_checkpoint, text_folder):
    """Tensor parallelism, three visits: heads gathered, one process writes, numbers as of one process."""
    folder = save_checkpoint(tmp_path / "smelt", "smelt", num_visits=3)
    batch = ["-m", "smeltscope", "probe", "batch", "--ckpt", folder, "--data", text_folder]
    batch += ["--tokens", "1k", "-q"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    spread = [*torchrun, *batch, "--tensor-parallel", "--out", tmp_path / "spread.h5"]
    alone = [*batch, "--device", "cpu", "--out", tmp_path / "alone.h5"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for arguments in (spread, alone):
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert_alike(tmp_path / "spread.h5", tmp_path / "alone.h5", atol=1e-4, rtol=1e-4)
    run = open_run(tmp_path / "alone.h5")
    assert run["visit_pair"].values.tolist() == ["1-2", "1-3", "2-3"]
    assert run["router_overlap/core"].values.sum() > 0


def test_a_device_map(tmp_path, probe, save_checkpoint, text_folder):
    """`--device-map auto`: layers wherever there is room, numbers as on one device."""
    folder = save_checkpoint(tmp_path / "smelt", "smelt")
    batch = ["batch", "--ckpt", folder, "--data", text_folder, "--tokens", "600", "-q"]
    for name, where in (("spread", ["--device-map", "auto"]), ("whole", ["--device", "cpu"])):
        result = probe(*batch, *where, "--out", tmp_path / f"{name}.h5")
        assert result.code == 0, result.err
    assert_alike(tmp_path / "spread.h5", tmp_path / "whole.h5", atol=1e-4, rtol=1e-4)


def test_layers_that_do_not_fit_anywhere(tmp_path, make_checkpoint, make_heldout):
    """Half of the model waits on the disk, where its weights cannot be read: there is no V random, all else is the same."""
    whole, heldout = make_checkpoint("smelt"), make_heldout(LENGTHS)
    whole.model.save_pretrained(tmp_path / "model")
    spread = SmeltForCausalLM.from_pretrained(
        tmp_path / "model",
        device_map="auto",
        max_memory={"cpu": sum(p.numel() * 4 for p in whole.model.parameters()) // 2},
        offload_folder=tmp_path / "disk",
    )
    assert any(p.device.type == "meta" for p in spread.parameters())
    for name, model in (("spread", spread.eval()), ("whole", whole.model)):
        probes = [make_probe(name) for name in PROBES]
        run_probes(replace(whole, model=model), heldout, probes, tmp_path / f"{name}.h5", OPTIONS)
    files = tmp_path / "spread.h5", tmp_path / "whole.h5"
    assert_alike(*files, atol=2e-5, rtol=1e-5, without=["V random"])
    unread = open_run(files[0])["qkv_similarity/cosine_sum"].sel(stage="V random")
    assert np.isnan(unread).any()
