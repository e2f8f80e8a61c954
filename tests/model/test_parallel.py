"""Layers spread over processes: two of them on the CPU compute what one does."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from smeltscope.model import load_checkpoint

MODELS = {
    "smelt": {},
    "smelt, three visits, no QK-norm": {"num_visits": 3, "qk_norm": False},
    "smelt, untied": {"tie_word_embeddings": False, "residual_scale": 0.7},
    "baseline": {},
    "llama": {},
    "qwen3_moe": {},
    "dory": {},
}
# Each process loads every model, and leaves its logits and what it holds of the weights.
SCRIPT = """
import sys
from pathlib import Path
import torch
import torch.distributed
from smeltscope import SmeltscopeError
from smeltscope.model import decoder_stack, load_checkpoint

here = Path(sys.argv[1])
left = {}
for folder in sorted(p for p in here.iterdir() if p.is_dir()):
    try:
        checkpoint = load_checkpoint(folder, tensor_parallel=True)
    except SmeltscopeError as error:
        left[folder.name] = str(error)
        continue
    with torch.no_grad():
        logits = checkpoint.model(torch.arange(1, 25).reshape(2, 12)).logits
    layers = decoder_stack(checkpoint.model)[1]
    shares = [layer.self_attn.q_proj.weight for layer in layers]
    shares = [s.to_local() if hasattr(s, "to_local") else s for s in shares]
    left[folder.name] = {
        "logits": logits,
        "digest": checkpoint.digest,
        "held": [tuple(s.shape) for s in shares],
        "storages": len({s.data_ptr() for s in shares}),
    }
torch.save(left, here / f"rank{torch.distributed.get_rank()}.pt")
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_compute_what_one_does(
    tmp_path: Path, save_checkpoint: Callable[..., Path]
) -> None:
    save_checkpoint(tmp_path / "hrm_text", "hrm_text", with_tokenizer=False)
    for name, overrides in MODELS.items():
        kind = name.partition(",")[0]
        save_checkpoint(tmp_path / name, kind, with_tokenizer=False, **overrides)
    (tmp_path / "script.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", tmp_path / "script.py", tmp_path],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1)]
    # Its q_proj would hold rows of gate_proj: logits off by 4.6.
    assert all("splits wrongly over processes" in left["hrm_text"] for left in ranks)
    for name in MODELS:
        checkpoint = load_checkpoint(tmp_path / name, device="cpu")
        with torch.no_grad():
            expected = checkpoint.model(torch.arange(1, 25).reshape(2, 12)).logits
        for left in ranks:
            assert (left[name]["logits"] - expected).abs().max() < 1e-5, name
            assert left[name]["digest"] == checkpoint.digest
            share = 32 if name == "dory" else 16  # transformers splits only Dory's embeddings
            assert set(left[name]["held"]) == {(share, 32)}, name
        if name.startswith("smelt"):  # visits are tied in each process too
            assert ranks[0][name]["storages"] == checkpoint.model.config.num_physical_layers
