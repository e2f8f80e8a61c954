"""Training on two processes computes what one does, with weights tied across visits, held twice (DDP) or spread."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from smeltscope.errors import SmeltscopeError
from smeltscope.model.loading import load_checkpoint
from smeltscope.model.recipe import load_recipe
from smeltscope.model.run_folder import processes_of
from smeltscope.model.training import make_arguments

SCRIPT = """
import sys
from dataclasses import replace
from pathlib import Path
import numpy as np
import torch
import torch.distributed as dist
from accelerate import PartialState
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from smeltscope.commands.sinks import watch_sinks
from smeltscope.model.recipe import load_recipe
from smeltscope.model.rows import Rows
from smeltscope.model.run_folder import open_run
from smeltscope.model.sharding import local_part
from smeltscope.model.tokenizer import train_tokenizer
from smeltscope.model.training import train_model

here, names = Path(sys.argv[1]), sys.argv[2:]
torch.set_num_threads(1)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


class Keep(TrainerCallback):
    # The gradients that the optimiser gets, and how many numbers a process holds.
    def __init__(self, stop):
        self.stop, self.steps, self.held = stop, [], {}

    def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **_):
        named = list(model.named_parameters())
        self.steps.append({n.removeprefix("module."): whole(p.grad) for n, p in named})
        moments = [s["exp_avg"] for s in optimizer.state.values()]
        held = {"weights": [p for _, p in named], "gradients": [p.grad for _, p in named], "moments": moments}
        self.held = {n: sum(local_part(t).numel() for t in tensors) for n, tensors in held.items()}

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.stop:
            raise KeyboardInterrupt


rng = np.random.default_rng(0)
tokens = np.cumsum(rng.integers(1, 4, (32, 16)), axis=1) % 250 + 5
lengths = rng.integers(6, 17, 32)  # processes get different numbers of tokens
columns = np.arange(16)
rows = Rows(
    tokens=tokens.astype(np.int32),
    positions=np.where(columns < lengths[:, None], columns, columns - lengths[:, None]),
    predicted=(columns > 0) & (columns < lengths[:, None]),
    lengths=lengths,
    category=np.arange(32) % 2,
    categories=("x", "y"),
)
# The same tokens, said to be two segments each.
cuts = rng.integers(2, 5, 32)[:, None]
placed = np.where((columns >= cuts) & (columns < lengths[:, None]), columns - cuts, rows.positions)
packed = replace(rows, positions=placed, predicted=rows.predicted & (placed > 0))
processes = PartialState(cpu=True)
rank = processes.process_index
tokenizer = train_tokenizer(["words and others (1) or [none] <at> all"] * 9, vocab_size=265, max_length=16)
for name in names:
    recipe = load_recipe(here / f"{name}.toml", output=here / name)
    if rank == 0:
        open_run(recipe)
    processes.wait_for_everyone()
    for stop in (3, None) if name == "stopped" else (None,):
        keep, read = Keep(stop), packed if "packed" in name else rows
        try:
            train_model(
                recipe, tokenizer=tokenizer, rows=read, heldout=read, device="cpu", callbacks=(keep,),
                watch=watch_sinks(read),
            )
        except KeyboardInterrupt:
            pass
    torch.save((keep.steps, keep.held), here / f"{name}.rank{rank}.pt")
if dist.is_initialized():
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
steps = 4
batch_tokens = 128
learning_rate = 1e-3
warmup_steps = 1
log_every = 1
save_every = 2
eval_every = 2
"""


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Bit by bit."""
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    largest = max(g.abs().max() for g in theirs.values())
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).abs().max() < 1e-5 * largest, name


RUNS = {
    "one": "accumulate = 4",  # the batches of two processes, in turn
    "two": "accumulate = 2\ncheckpoint_activations = true",
    "spread": "accumulate = 2\nshard = true",
    "stopped": "accumulate = 2\nshard = true",
    "again": "accumulate = 2\nshard = true\ncheckpoint_activations = true",
    "packed": "accumulate = 4",  # of one process, as the first
    "two-packed": "accumulate = 2",
    "spread-packed": "accumulate = 2\nshard = true",
}
ALONE = ("one", "packed")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of RUNS: those of ALONE of a single process, the others of two."""
    folder = tmp_path_factory.mktemp("parallel")
    (folder / "text.jsonl").write_text('{"text": "x"}')
    (folder / "script.py").write_text(SCRIPT)
    for name, line in RUNS.items():
        (folder / f"{name}.toml").write_text(RECIPE + line)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    others = [name for name in RUNS if name not in ALONE]
    for launcher, names in (((), ALONE), (torchrun, others)):
        command = [sys.executable, *launcher, folder / "script.py", folder, *names]
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
    return folder


def kept(runs: Path, name: str) -> list[Any]:
    """(gradients of each step, {what: how many numbers of it are held}) of each process."""
    return [torch.load(path) for path in sorted(runs.glob(f"{name}.rank*.pt"))]


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two", "spread", "again", "two-packed", "spread-packed"])
def test_two_processes_compute_what_one_does(runs: Path, name: str) -> None:
    alone = "packed" if "packed" in name else "one"
    [(one, _)] = kept(runs, alone)
    for steps, _ in kept(runs, name):
        assert len(steps) == len(one) == 4
        for ours, theirs in zip(steps, one, strict=True):
            assert_close(ours, theirs)
    logs = metrics(runs / alone), metrics(runs / name)
    assert len(logs[0]) == len(logs[1]) == 6  # of the first process alone
    for ours, theirs in zip(*logs, strict=True):
        assert ours.keys() == theirs.keys()
        assert ours.get("expert_load") == theirs.get("expert_load")
        for key in ours.keys() - {"tokens_per_second", "expert_load"}:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4), key
    checkpoint = runs / name / "checkpoint-2"
    states = {file.name for file in checkpoint.glob("rng_state*")}
    assert (checkpoint / "whole").exists() and states == {"rng_state_0.pth", "rng_state_1.pth"}


@pytest.mark.slow
def test_packed_rows_are_others_than_the_same_tokens_unpacked(runs: Path) -> None:
    [(one, _)], [(packed, _)] = kept(runs, "one"), kept(runs, "packed")
    largest = max(g.abs().max() for g in one[0].values())
    assert max((packed[0][name] - g).abs().max() for name, g in one[0].items()) > 0.01 * largest


@pytest.mark.slow
def test_a_checkpoint_tells_how_many_processes_wrote_it(runs: Path) -> None:
    assert processes_of(runs / "one" / "checkpoint-4") == 1
    assert all(processes_of(runs / name / "checkpoint-4") == 2 for name in ("two", "spread"))


@pytest.mark.slow
def test_gradients_are_clipped_at_the_norm_of_all_processes(runs: Path) -> None:
    norms = [line["grad_norm"] for line in metrics(runs / "spread") if "grad_norm" in line]
    [(one, _), _] = kept(runs, "spread")
    assert max(norms) > 1
    for norm, gradients in zip(norms, one, strict=True):
        clipped = torch.cat([g.flatten() for g in gradients.values()]).norm().item()
        assert clipped == pytest.approx(min(norm, 1), rel=1e-4)


@pytest.mark.slow
def test_a_process_holds_its_part_of_a_spread_model(runs: Path) -> None:
    [(_, whole)] = kept(runs, "one")
    parts = [held for _, held in kept(runs, "spread")]
    for name, count in whole.items():
        assert sum(held[name] for held in parts) == count  # a layer of three visits once
        assert all(held[name] == pytest.approx(count / 2, rel=0.01) for held in parts)


@pytest.mark.slow
def test_a_stopped_spread_run_goes_on_as_if_uninterrupted(runs: Path) -> None:
    assert [len(steps) for steps, _ in kept(runs, "stopped")] == [
        2,
        2,
    ]  # after the checkpoint of step 2
    for ours, theirs in zip(metrics(runs / "stopped"), metrics(runs / "spread"), strict=True):
        assert ours | {"tokens_per_second": 0} == theirs | {"tokens_per_second": 0}
    for name in ("checkpoint-4", "final"):
        assert_same(
            *(load_file(runs / r / name / "model.safetensors") for r in ("stopped", "spread"))
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["checkpoint-2", "checkpoint-4", "final"])
def test_what_a_spread_run_writes_is_in_the_ordinary_format(runs: Path, name: str) -> None:
    spread, two = (load_file(runs / run / name / "model.safetensors") for run in ("spread", "two"))
    assert spread.keys() == two.keys()  # of tied weights the first visit's
    if name != "final":  # in which one may be rounded up and the other down
        assert_close(spread, two)
    files = [{f.name for f in (runs / run / name).iterdir()} for run in ("spread", "two")]
    assert files[0] == files[1]
    model = load_checkpoint(runs / "spread" / name).model
    tied = {**spread, **{tie: spread[source] for tie, source in model._tied_weights_keys.items()}}
    assert_same(model.state_dict(), tied)


def test_a_model_is_not_spread_over_one_process(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "x"}')
    (tmp_path / "recipe.toml").write_text(RECIPE + "shard = true")
    recipe = load_recipe(tmp_path / "recipe.toml")
    with pytest.raises(
        SmeltscopeError, match="several processes, and here is one: start them with"
    ):
        make_arguments(recipe, tmp_path, "cpu", steps=1, decay_steps=0)
