"""Training on two processes computes the gradients of one, with weights tied across visits."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = """
import sys
from pathlib import Path
import numpy as np
import torch
import torch.distributed as dist
from accelerate import PartialState
from torch.distributed.device_mesh import init_device_mesh
from transformers import TrainerCallback
from smeltscope.model import SmeltConfig, SmeltForCausalLM
from smeltscope.model.losses import router_losses, token_losses
from smeltscope.model.recipe import load_recipe
from smeltscope.model.rows import Rows
from smeltscope.model.run_folder import open_run
from smeltscope.model.sharding import shard
from smeltscope.model.tokenizer import train_tokenizer
from smeltscope.model.training import train_model

here, out = Path(sys.argv[1]), Path(sys.argv[2])
torch.set_num_threads(1)


class KeepGradients(TrainerCallback):
    steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        named = model.named_parameters()
        self.steps.append({n: p.grad.clone() for n, p in named})


rng = np.random.default_rng(0)
tokens = np.cumsum(rng.integers(1, 4, (24, 16)), axis=1) % 250 + 5
lengths = rng.integers(6, 17, 24)  # processes get different numbers of tokens
columns = np.arange(16)
rows = Rows(
    tokens=tokens.astype(np.int32),
    positions=np.where(columns < lengths[:, None], columns, columns - lengths[:, None]),
    predicted=(columns > 0) & (columns < lengths[:, None]),
    lengths=lengths,
    category=np.arange(24) % 2,
    categories=("x", "y"),
)
recipe = load_recipe(here / f"{out.name}.toml", output=out)
processes = PartialState(cpu=True)
rank = processes.process_index
if rank == 0:
    open_run(recipe)
processes.wait_for_everyone()
tokenizer = train_tokenizer(["words and others (1) or [none] <at> all"] * 9, vocab_size=265, max_length=16)
train_model(
    recipe, tokenizer=tokenizer, rows=rows, heldout=rows, device="cpu", callbacks=(KeepGradients(),)
)
torch.save(KeepGradients.steps, here / f"{out.name}.rank{rank}.pt")

if dist.is_initialized():  # the same for a model whose weights are spread
    config = SmeltConfig(**recipe.model, vocab_size=265, output_router_logits=True)
    torch.manual_seed(0)
    whole = SmeltForCausalLM(config)
    torch.manual_seed(0)
    spread = shard(SmeltForCausalLM(config), mesh=init_device_mesh("cpu", (2,)))
    ids = torch.from_numpy(tokens[:8])
    all_real = torch.ones(4, 16, dtype=torch.bool)

    def loss(model, ids):
        outputs = model(ids, use_cache=False)
        balance = router_losses(outputs.router_logits, all_real, top_k=2).balance
        return token_losses(outputs.logits, ids).mean() + 0.1 * balance

    (sum(loss(whole, half) for half in ids.chunk(2)) / 2).backward()
    loss(spread, ids.chunk(2)[rank]).backward()
    found = {
        "whole": {n: p.grad for n, p in whole.named_parameters()},
        "spread": {n: p.grad.full_tensor() for n, p in spread.named_parameters()},
        "held": sum(p.to_local().numel() for p in spread.parameters()),
        "all": sum(p.numel() for p in whole.parameters()),
    }
    torch.save(found, here / f"spread.rank{rank}.pt")
    dist.destroy_process_group()
"""
RECIPE = """
seed = 3
[model]
num_physical_layers = 4
num_visits = 3
hidden_size = 32
num_attention_heads = 2
num_key_value_heads = 1
num_experts = 4
num_experts_per_tok = 2
moe_intermediate_size = 16
tie_word_embeddings = true
router_aux_loss_coef = 0.1
[tokenizer]
vocab_size = 265
[data]
train = ["text.jsonl"]
heldout = ["text.jsonl"]
context = 16
[training]
output = "run"
steps = 3
batch_tokens = 128
learning_rate = 1e-3
warmup_steps = 1
log_every = 1
save_every = 2
"""


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    largest = max(g.abs().max() for g in theirs.values())
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).abs().max() < 1e-5 * largest, name


@pytest.mark.slow
def test_two_processes_compute_the_gradients_of_one(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "x"}')
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "two.toml").write_text(RECIPE + "checkpoint_activations = true")
    (tmp_path / "one.toml").write_text(RECIPE + "accumulate = 2")  # the same batches, in turn
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    def start(name: str, *launcher: str) -> Any:
        command = [sys.executable, *launcher, tmp_path / "script.py", tmp_path, tmp_path / name]
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr

    start("one")
    start("two", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    one, *two = (
        torch.load(tmp_path / f"{name}.pt") for name in ("one.rank0", "two.rank0", "two.rank1")
    )
    for rank in two:
        assert len(rank) == 3
        for ours, theirs in zip(rank, one, strict=True):
            assert_close(ours, theirs)
    logs = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("one", "two")]
    assert len(logs[0]) == len(logs[1]) == 4  # of the first process alone
    for ours, theirs in zip(*(map(json.loads, log) for log in logs), strict=True):
        assert ours.get("expert_load") == theirs.get("expert_load")
        for key in ours.keys() - {"tokens_per_second", "expert_load"}:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4), key
    checkpoint = tmp_path / "two" / "checkpoint-2"
    states = {file.name for file in checkpoint.glob("rng_state*")}
    assert (checkpoint / "whole").exists() and states == {"rng_state_0.pth", "rng_state_1.pth"}
    spread = [torch.load(tmp_path / f"spread.rank{rank}.pt") for rank in (0, 1)]
    for found in spread:
        assert_close(found["spread"], found["whole"])
        assert found["held"] == pytest.approx(found["all"] / 2, rel=0.01)
    assert (
        sum(found["held"] for found in spread) == spread[0]["all"]
    )  # a layer of three visits once
