"""Several processes on one run, and a batch that does not fit: the same numbers as alone."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smeltscope.activations import open_run
from smeltscope.errors import SmeltscopeError
from smeltscope.probes import RunOptions, group_name, run_probes
from smeltscope.probes.workers import split_batches
from smeltscope.registry import PROBES, make_probe

LENGTHS = [9, 70, 2, 33, 64, 1, 17, 3, 70, 5, 128, 12]
OPTIONS = RunOptions(max_length=128, batch_tokens=600)


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
    wide = open_run(run_probes(checkpoint, heldout, probes, tmp_path / "wide.h5", OPTIONS))
    sizes = []

    def check(module, args, kwargs) -> None:
        sizes.append(kwargs["input_ids"].numel())
        if sizes[-1] > 160:
            raise torch.OutOfMemoryError("CUDA out of memory")

    checkpoint.model.model.register_forward_pre_hook(check, with_kwargs=True)
    narrow = open_run(run_probes(checkpoint, heldout, probes, tmp_path / "narrow.h5", OPTIONS))
    assert sum(size > 160 for size in sizes) == 1, "it keeps to what fitted"
    for group in narrow.children:
        for name, array in narrow[group].data_vars.items():
            expected = wide[group][name].values
            if array.dtype.kind == "f":
                np.testing.assert_allclose(array, expected, atol=2e-5, rtol=1e-4, err_msg=name)
            elif array.dtype.kind in "iu":
                np.testing.assert_array_equal(array, expected, err_msg=name)


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
    """Tensor parallelism: heads gathered, one process writes, numbers as of one process."""
    folder = save_checkpoint(tmp_path / "smelt", "smelt")
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
    one, other = (open_run(tmp_path / f"{name}.h5") for name in ("spread", "alone"))
    assert set(one.children) == {"segments", *map(group_name, PROBES)}
    for group in one.children:
        for name, array in one[group].data_vars.items():
            if array.dtype.kind == "f":
                np.testing.assert_allclose(
                    array, other[group][name], atol=1e-3, rtol=1e-4, err_msg=f"{group}/{name}"
                )
