"""Training: the loss falls, a stopped run goes on as if nothing had happened, errors are sentences."""

import csv
import errno
import itertools
import json
import os
import pty
import random
import re
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3MoeForCausalLM,
    TrainerCallback,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention
from transformers.utils import is_flash_attn_2_available

from smeltscope.commands.sinks import watch_sinks
from smeltscope.commands.train import train
from smeltscope.errors import SmeltscopeError
from smeltscope.model import SmeltConfig, SmeltForCausalLM, tiny
from smeltscope.model.losses import router_losses
from smeltscope.model.recipe import load_recipe
from smeltscope.model.rows import Rows, load_rows
from smeltscope.model.run_folder import (
    changed_keys,
    forget_metrics_after,
    full_disk_told,
    last_checkpoint,
    open_run,
    whole_checkpoints,
)
from smeltscope.model.speed import Speed, qwen3_moe_like
from smeltscope.model.trainer import FLASH, RowDataset, one_row
from smeltscope.model.training import build_config, make_model, train_model

FLASH_UTILS = "transformers.modeling_flash_attention_utils"
RECIPE = """
seed = 3
[model]
num_physical_layers = 4
hidden_size = 32
num_attention_heads = 2
num_key_value_heads = 1
qk_norm = false
num_experts = 4
num_experts_per_tok = 2
moe_intermediate_size = 16
tie_word_embeddings = true
max_position_embeddings = 64
router_aux_loss_coef = 0.01
[tokenizer]
vocab_size = 300
[data]
train = ["a.train.jsonl", "b.train.jsonl"]
heldout = ["a.heldout.jsonl", "b.heldout.jsonl"]
context = 32
heldout_tokens = 640
[training]
output = "run"
steps = 12
batch_tokens = 256
learning_rate = 1e-2
warmup_steps = 2
save_every = 4
log_every = 1
eval_every = 6
"""


def write_text(folder: Path) -> None:
    """Four files of documents made of a few words, with digits, brackets and accents."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdeé", k=rng.randint(2, 5))) for _ in range(40)]
    words += ["(", ")", "[x]", "12", "<a>"]
    for name in ("a.train", "b.train", "a.heldout", "b.heldout"):
        lines = [
            json.dumps({"text": " ".join(rng.choices(words, k=rng.randint(5, 120)))})
            for _ in range(30)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for one another make these tiny models ten times slower on busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    write_text(folder)
    (folder / "recipe.toml").write_text(RECIPE)
    return folder


def run_command(config: Path, *options: str | Path) -> Any:
    return CliRunner().invoke(train, [str(config), *map(str, options)], catch_exceptions=True)


@pytest.fixture(scope="module")
def finished(data: Path) -> Path:
    """The output folder of a whole run of the command."""
    output = data / "whole"
    result = run_command(data / "recipe.toml", "--out", output)
    assert result.exception is None, result.exception
    assert f"model: {output / 'final'}" in result.stdout
    assert "loss" not in result.stdout  # progress is told on standard error
    assert len(result.stdout.splitlines()[1]) > 20  # the sample
    return output


def metrics(output: Path, *, drop: tuple[str, ...] = ("tokens_per_second",)) -> list[dict]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in drop} for line in lines]


def parts(finished: Path) -> dict[str, Any]:
    """What the command hands to train_model."""
    heldout = load_rows(finished / "rows.npz", "heldout")
    return {
        "tokenizer": AutoTokenizer.from_pretrained(finished / "tokenizer"),
        "rows": load_rows(finished / "rows.npz", "train"),
        "heldout": heldout,
        "device": "cpu",
        "watch": watch_sinks(heldout),
    }


# ---------------------------------------------------------------- a whole run


def test_a_checkpoint_can_be_loaded_as_it_is(finished: Path) -> None:
    newest = last_checkpoint(finished)
    assert newest is not None
    tokenizer = AutoTokenizer.from_pretrained(newest)
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(finished / "final").get_vocab()


def test_loss_falls_and_the_run_is_written_down(finished: Path) -> None:
    lines = metrics(finished, drop=())
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 12
    assert losses[0] == pytest.approx(np.log(300), abs=0.2)  # it starts from nothing
    assert losses[-1] < losses[0] - 1
    rates = [line["learning_rate"] for line in lines if "loss" in line]
    assert rates[0] < rates[3] == max(rates) > rates[-1] > 0
    heldout = [line for line in lines if "heldout_loss" in line]
    assert [line["step"] for line in heldout] == [6, 12]
    assert heldout[1]["heldout_loss"] < heldout[0]["heldout_loss"]
    assert heldout[1]["heldout_loss/a"] > 0 and heldout[1]["heldout_loss/b"] > 0
    with (finished / "final" / "training_curve.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(lines)
    assert len(list(finished.glob("checkpoint-*"))) == 2


def test_final_model_loads_with_its_visits_tied(finished: Path) -> None:
    final = finished / "final"
    model = AutoModelForCausalLM.from_pretrained(final)
    assert model.dtype == torch.bfloat16
    assert not model.config.output_router_logits and model.config.use_cache
    layers = model.model.layers
    assert layers[1].mlp.gate.weight is layers[3].mlp.gate.weight  # layer 1, visits 1 and 2
    with safe_open(final / "model.safetensors", framework="pt") as file:
        names = list(file.keys())
        assert all(file.get_tensor(name).dtype == torch.bfloat16 for name in names)
    assert {int(n.split(".")[2]) for n in names if ".layers." in n} == {0, 1, 2, 5}
    assert "lm_head.weight" not in names
    tokenizer = AutoTokenizer.from_pretrained(final)
    assert model.config.vocab_size == len(tokenizer) == 300
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert (final / "recipe.toml").read_text() == RECIPE
    assert {file.stat().st_mode & 0o777 for file in final.iterdir()} == {0o644}


def test_reloaded_model_gives_the_heldout_loss_that_was_logged(finished: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(last_checkpoint(finished), dtype=torch.float32)
    rows = load_rows(finished / "rows.npz", "heldout")
    total, count = 0.0, 0
    for tokens, length in zip(rows.tokens, rows.lengths, strict=True):
        ids = torch.from_numpy(tokens[:length].astype(np.int64))[None]
        with torch.no_grad():
            logits = model(ids).logits[0, :-1]
        total += float(cross_entropy(logits, ids[0, 1:], reduction="sum"))
        count += int(length) - 1
    logged = [line["heldout_loss"] for line in metrics(finished) if "heldout_loss" in line]
    assert total / count == pytest.approx(logged[-1], abs=1e-4)


def test_no_tensorboard_is_told(
    finished: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.integrations.is_tensorboard_available", lambda: False)
    told = run_command(data / "recipe.toml", "--out", finished).stderr
    assert "metrics.jsonl alone: for TensorBoard, pip install tensorboard." in told


def test_speed_is_measured_beside_transformers_own_model(finished: Path, data: Path) -> None:
    result = run_command(data / "recipe.toml", "--out", finished, "-q", "--measure")
    assert result.exception is None, result.exception
    told = re.match(r"speed: (\d+) tokens/s, ([\d.]+) x .*Qwen3-MoE.* \((\d+)\)", result.stdout)
    assert told is not None
    ours, ratio, theirs = map(float, told.groups())
    assert ratio == pytest.approx(ours / theirs, abs=0.01)
    recipe = load_recipe(data / "recipe.toml")
    smelt = make_model(recipe, parts(finished)["tokenizer"])
    qwen = Qwen3MoeForCausalLM(qwen3_moe_like(smelt.config))
    # also where heads are no even share of the width, as in baseline-tiny
    sizes = {"hidden_size": 152, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32}
    odd = qwen3_moe_like(SmeltConfig(**sizes))
    assert Qwen3MoeAttention(odd, 0).head_dim == 32
    assert len(qwen.model.layers) == len(smelt.model.layers) == 6
    shapes = {name: p.shape for name, p in qwen.named_parameters(remove_duplicate=False)}
    norms = {name for name in shapes if "q_norm" in name or "k_norm" in name}  # it always has them
    assert {n: s for n, s in shapes.items() if n not in norms} == {
        name: p.shape for name, p in smelt.named_parameters(remove_duplicate=False)
    }


def test_finished_run_is_not_trained_again(finished: Path, data: Path) -> None:
    before = (finished / "final" / "model.safetensors").stat().st_mtime_ns
    result = run_command(data / "recipe.toml", "--out", finished, "-q")
    assert result.exception is None and result.stderr == ""
    assert (finished / "final" / "model.safetensors").stat().st_mtime_ns == before


def test_log_tells_losses_by_category_and_load_by_expert(finished: Path) -> None:
    lines = metrics(finished, drop=())
    first = lines[0]
    rows = parts(finished)["rows"].take(np.arange(8))  # those of step 1
    counts = [rows.predicted[rows.category == c, 1:].sum() for c in range(2)]
    mixed = np.average([first["loss/a"], first["loss/b"]], weights=counts)
    assert first["loss"] == pytest.approx(mixed, rel=1e-6)
    load = np.array(first["expert_load"])
    assert load.shape == (6, 4) and load.mean(1) == pytest.approx(np.ones(6), abs=1e-3)
    executions = ["0 visit 1", "1 visit 1", "2 visit 1", "1 visit 2", "2 visit 2", "3 visit 1"]
    for of_execution, name in zip(load, executions, strict=True):
        largest = first[f"expert_load_max/layer {name}"]
        assert largest == pytest.approx(of_execution.max(), abs=1e-3)
        assert first[f"experts_unused/layer {name}"] == (of_execution == 0).mean()
    heldout = next(line for line in lines if "heldout_loss" in line)
    for name in ("a", "b"):
        assert 0 <= heldout[f"max_head_sink/{name}/visit 2"] <= 1
    assert all(0 < line["tokens_per_second"] < 1e9 for line in lines if "loss" in line)
    board = events(finished)
    losses = [(e.step, e.value) for e in board.Scalars("train/loss")]
    logged = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    assert [step for step, _ in losses] == [step for step, _ in logged]
    assert [x for _, x in losses] == pytest.approx([x for _, x in logged], rel=1e-6)
    assert "train/max_head_sink/a/visit 2" in board.Tags()["scalars"]
    assert len(board.Tags()["histograms"]) == 6
    for e, name in enumerate(executions):
        found = board.Histograms(f"expert_load/layer {name}")
        assert [f.step for f in found] == [step for step, _ in logged]
        for f, line in zip(found, (line for line in lines if "loss" in line), strict=True):
            assert f.histogram_value.bucket == line["expert_load"][e]
            assert f.histogram_value.bucket_limit == [1, 2, 3, 4]


def events(output: Path) -> Any:
    """What TensorBoard shows of a run."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    everything = {"scalars": 0, "histograms": 0}
    board = accumulator.EventAccumulator(str(output / "tensorboard"), size_guidance=everything)
    return board.Reload()


@pytest.mark.parametrize(("ratio", "noted"), [(0.94, True), (0.96, False)])
def test_slow_training_is_noted(
    finished: Path, data: Path, monkeypatch: pytest.MonkeyPatch, ratio: float, noted: bool
) -> None:
    speed = Speed(ours=ratio * 1000, qwen3_moe=1000)
    monkeypatch.setattr("smeltscope.model.speed.measure_speed", lambda *_, **__: speed)
    result = run_command(data / "recipe.toml", "--out", finished, "-q", "--measure")
    assert result.stdout.startswith(f"speed: {ratio * 1000:.0f} tokens/s")
    assert ("note: less than 0.95 x" in result.stderr) == noted


def test_text_comes_from_the_folder_of_data(finished: Path, data: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.replace("steps = 12", "steps = 1").replace("steps = 2", "steps = 0"))
    failed = run_command(recipe, "--out", tmp_path / "out", "-q")
    assert "a.train.jsonl, named in [data], does not exist" in str(failed.exception)
    result = run_command(recipe, "--out", tmp_path / "out", "-q", "--data", data)
    assert result.exception is None, result.exception
    rows, theirs = (load_rows(run / "rows.npz", "train") for run in (tmp_path / "out", finished))
    assert (rows.tokens == theirs.tokens[: len(rows)]).all() and len(rows) == 8


def test_sink_rate_is_logged_where_segments_are_long_enough(data: Path, tmp_path: Path) -> None:
    text = RECIPE.replace("context = 32", "context = 64").replace("steps = 12", "steps = 2")
    (data / "long.toml").write_text(text.replace("warmup_steps = 2", "warmup_steps = 0"))
    result = run_command(data / "long.toml", "--out", tmp_path / "run", "-q")
    assert result.exception is None, result.exception
    [logged] = [line for line in metrics(tmp_path / "run") if "heldout_loss" in line]
    heldout = load_rows(tmp_path / "run" / "rows.npz", "heldout")
    model = AutoModelForCausalLM.from_pretrained(
        last_checkpoint(tmp_path / "run"), dtype=torch.float32, attn_implementation="eager"
    )
    for c, name in enumerate(heldout.categories):
        shares: dict[str, list[bool]] = {}
        for row in np.flatnonzero(heldout.category == c)[:8]:
            if heldout.lengths[row] < 64:
                continue
            ids = torch.from_numpy(heldout.tokens[row : row + 1].astype(np.int64))
            with torch.no_grad():
                attentions = model(ids, output_attentions=True).attentions
            for e, weights in zip(model.config.executions, attentions, strict=True):
                looped = e.layer in model.config.span
                where = f"visit {e.visit}" if looped else "other layers"
                above = weights[0, :, :, 0].mean(1) > 0.3  # (head,), over all 64 queries
                shares.setdefault(where, []).extend(above.tolist())
        assert set(shares) == {"visit 1", "visit 2", "other layers"}
        for where, found in shares.items():
            assert logged[f"sink_rate/{name}/{where}"] == pytest.approx(np.mean(found))


def test_adamw_decays_matrices_and_no_norms(finished: Path, data: Path, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    class Look(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            seen.update(given)
            seen["decay"] = {
                id(p): group["weight_decay"]
                for group in given["optimizer"].param_groups
                for p in group["params"]
            }

    short = ("steps = 1", "warmup_steps = 0", "weight_decay = 0.3")
    run_recipe(data, parts(finished), tmp_path / "run", *short, callbacks=(Look(),))
    decay = {name: seen["decay"][id(p)] for name, p in seen["model"].named_parameters()}
    norms = {name for name in decay if "norm" in name}
    assert len(norms) == 4 * 2 + 1 and len(decay) == len(seen["decay"]) > 2 * len(norms)
    assert decay == {name: 0.0 if name in norms else 0.3 for name in decay}
    optimizer = seen["optimizer"].optimizer
    assert isinstance(optimizer, torch.optim.AdamW)
    assert all(group["betas"] == (0.9, 0.95) for group in optimizer.param_groups)


# ---------------------------------------------------------------- batches


def run_recipe(data: Path, given: dict[str, Any], output: Path, *changes: str, **more: Any) -> Path:
    """Train by RECIPE with lines put in the place of those of the same keys, or added to [training]."""
    text = RECIPE
    for line in changes:
        key = line.split(" =")[0]
        known = [old for old in text.splitlines() if old.split(" =")[0] == key]
        text = text.replace(known[0], line) if known else text + line + "\n"
    (data / f"{output.name}.toml").write_text(text)
    recipe = load_recipe(data / f"{output.name}.toml", output=output)
    open_run(recipe)
    train_model(recipe, **given, **more)
    return output


def weights(output: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(output / f"checkpoint-{step}" / "model.safetensors")


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Bit by bit."""
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


class KeepGradients(TrainerCallback):
    """The gradients of the first step, clipped as the optimiser gets them."""

    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if not self.gradients:
            named = given["model"].named_parameters()
            self.gradients = {name: p.grad.clone() for name, p in named}


class CountAttention(TrainerCallback):
    """How often attention is computed in training."""

    calls = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        def count(module: torch.nn.Module, *_: Any) -> None:
            self.calls += module.training

        for layer in given["model"].model.layers:
            layer.self_attn.register_forward_hook(count)


def test_accumulated_batches_make_the_step_of_one(
    finished: Path, data: Path, tmp_path: Path
) -> None:
    given, short = parts(finished), ("steps = 2", "warmup_steps = 0", "router_aux_loss_coef = 0.0")
    one, four = KeepGradients(), KeepGradients()
    whole = run_recipe(data, given, tmp_path / "whole", *short, callbacks=(one,))
    parted = run_recipe(
        data, given, tmp_path / "parted", *short, "accumulate = 4", callbacks=(four,)
    )
    largest = max(g.abs().max() for g in one.gradients.values())
    for name, gradient in one.gradients.items():
        assert (four.gradients[name] - gradient).abs().max() < 1e-6 * largest, name
    for ours, theirs in zip(metrics(parted), metrics(whole), strict=True):
        assert ours["step"] == theirs["step"]
        for name in {"loss", "loss/a", "heldout_loss", "grad_norm"} & ours.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4), name


def test_activations_computed_again_give_the_same_bits(
    finished: Path, data: Path, tmp_path: Path
) -> None:
    options = ("steps = 2", "warmup_steps = 0", "router_z_loss = 0.1")
    given = parts(finished)
    once, twice = CountAttention(), CountAttention()
    plain = run_recipe(data, given, tmp_path / "plain", *options, callbacks=(once,))
    again = run_recipe(
        data,
        given,
        tmp_path / "again",
        *options,
        "checkpoint_activations = true",
        callbacks=(twice,),
    )
    assert (once.calls, twice.calls) == (2 * 6, 2 * 6 * 2)  # steps, executions, again
    assert_same(weights(again, 2), weights(plain, 2))
    without = run_recipe(data, given, tmp_path / "without", *options[:2])
    gate = "model.layers.1.mlp.gate.weight"  # the router's losses reach it
    assert not torch.equal(weights(without, 2)[gate], weights(plain, 2)[gate])


def test_segments_of_a_packed_row_do_not_see_each_other() -> None:
    model = tiny("smelt").eval()
    tokens = torch.randint(5, 60, (2, 20), generator=torch.Generator().manual_seed(0)).numpy()
    positions = np.concatenate([np.arange(7), np.arange(9), np.arange(4)])  # and padding
    rows = Rows(
        tokens=tokens,
        positions=np.stack([positions, np.arange(20)]),
        predicted=np.ones((2, 20), dtype=bool),
        lengths=np.array([16, 20]),
        category=np.zeros(2, dtype=np.int32),
        categories=("x",),
    )
    items = [RowDataset(rows)[i] for i in range(2)]
    assert items[0]["real"].sum() == 16
    ids, places = (torch.stack([item[n] for item in items]) for n in ("input_ids", "position_ids"))
    with torch.no_grad():
        logits = model(ids, position_ids=places, use_cache=False).logits
        for row, begin, stop in ((0, 0, 7), (0, 7, 16), (1, 0, 20)):
            alone = model(ids[row : row + 1, begin:stop]).logits[0]
            assert (logits[row, begin:stop] - alone).abs().max() < 1e-5
    unpacked = RowDataset(rows.take(np.array([1])))
    assert "position_ids" not in unpacked[0]


def test_batch_laid_as_one_row_is_computed_as_before() -> None:
    model = tiny("smelt").eval()
    model.config.output_router_logits = True
    given = torch.Generator().manual_seed(0)
    labels = torch.randint(5, 60, (3, 12), generator=given)
    positions = torch.tensor([[*range(5), *range(4), *range(3)], range(12), [0, *range(11)]])
    real = torch.arange(12) < torch.tensor([9, 12, 12])[:, None]
    batch = {"input_ids": labels, "position_ids": positions}
    with torch.no_grad():
        batched, laid = (model(**b, use_cache=False) for b in (batch, one_row(batch)))
    assert laid.logits.shape[:2] == (1, 36)
    assert (laid.logits.view_as(batched.logits) - batched.logits).abs().max() < 1e-5
    ours, theirs = (router_losses(o.router_logits, real, top_k=2) for o in (laid, batched))
    assert torch.equal(ours.load, theirs.load)
    assert ours.balance.item() == pytest.approx(theirs.balance.item(), rel=1e-6)


def packed_rows(rows: Rows) -> Rows:
    """The same tokens, said to be segments of 11 tokens."""
    columns, lengths = np.arange(rows.tokens.shape[1]), rows.lengths[:, None]
    positions = np.where(columns < lengths, columns % 11, columns - lengths)
    return replace(rows, positions=positions, predicted=rows.predicted & (positions > 0))


def test_training_computes_each_segment_as_if_it_were_alone(
    finished: Path, data: Path, tmp_path: Path
) -> None:
    given = parts(finished)
    rows = given["rows"] = packed_rows(given["rows"])
    run = run_recipe(data, given, tmp_path / "run", "steps = 1", "warmup_steps = 0")
    torch.manual_seed(3)
    model = make_model(load_recipe(data / "run.toml"), given["tokenizer"])
    total, count = 0.0, 0
    for row in range(8):  # those of step 1
        length = rows.lengths[row]
        begins = [*np.flatnonzero(rows.positions[row, :length] == 0), length]
        for begin, end in itertools.pairwise(begins):
            ids = torch.from_numpy(rows.tokens[row, begin:end].astype(np.int64))
            with torch.no_grad():
                logits = model(ids[None]).logits[0]
            predicted = torch.from_numpy(rows.predicted[row, begin:end])[1:]
            total += float(
                cross_entropy(logits[:-1][predicted], ids[1:][predicted], reduction="sum")
            )
            count += int(predicted.sum())
    assert metrics(run)[0]["loss"] == pytest.approx(total / count, rel=1e-5)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: Any = None,
    causal: bool = False,
) -> torch.Tensor:
    """What the package computes, of (row, position, head, channel)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    attended = scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True
    )
    return attended.transpose(1, 2)


def test_flash_attn_is_told_the_segments_of_packed_rows(
    finished: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments: list[list[int]] = []

    def flash_attn_varlen_func(
        q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, **options: Any
    ) -> torch.Tensor:
        sizes = cu_seqlens_q.diff().tolist()
        segments.append(sizes)
        split = zip(*(x[None].split(sizes, dim=1) for x in (q, k, v)), strict=True)
        return torch.cat([flash_attn_func(*qkv, **options)[0] for qkv in split])

    def make_flash_model(recipe: Any, tokenizer: Any) -> Any:
        model = make_model(recipe, tokenizer)
        model.set_attn_implementation(FLASH)
        return model

    given = parts(finished)
    for name in ("rows", "heldout"):
        given[name] = packed_rows(given[name])
    short = ("steps = 3", "warmup_steps = 1", "eval_every = 2")
    plain = run_recipe(data, given, tmp_path / "plain", *short)
    # transformers calls the package as ever, and this stands in for it.
    kernels = (flash_attn_func, flash_attn_varlen_func, None, None, None)
    monkeypatch.setattr(f"{FLASH_UTILS}._lazy_imports", lambda *_, **__: kernels)
    monkeypatch.setattr(f"{FLASH_UTILS}._loaded_implementation", None)
    monkeypatch.setattr(
        SmeltForCausalLM, "_check_and_adjust_attn_implementation", lambda _, name, **__: name
    )
    monkeypatch.setattr("smeltscope.model.training.make_model", make_flash_model)
    flash = run_recipe(data, given, tmp_path / "flash", *short)
    monkeypatch.setattr(f"{FLASH_UTILS}._loaded_implementation", None)
    first = given["rows"].positions[:8].ravel()
    begins = np.flatnonzero(first == 0)
    assert segments[0] == np.diff([*begins, first.size]).tolist()  # those of the first step
    assert len(segments) == 3 * 6  # of each step and execution, not of evaluations
    for ours, theirs in zip(metrics(flash), metrics(plain), strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours.keys() - {"expert_load"}:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4), key


@pytest.mark.slow
def test_compiled_layers_learn_the_same(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []

    def compile_layer(layer: torch.nn.Module) -> None:
        compiled.append(layer)
        layer._compiled_call_impl = torch.compile(
            layer._call_impl, backend="aot_eager"
        )  # in seconds

    monkeypatch.setattr(torch.nn.Module, "compile", compile_layer)
    # Packed: segments, which the mask is made of, lie elsewhere in every row.
    few = RECIPE.replace("steps = 12", "steps = 4").replace(
        "context = 32", "context = 32\npacked = true"
    )
    (tmp_path / "recipe.toml").write_text(few)
    plain_run = tmp_path / "plain"
    assert (
        run_command(tmp_path / "recipe.toml", "-q", "--data", data, "--out", plain_run).exception
        is None
    )
    rows = load_rows(plain_run / "rows.npz", "train")
    assert ((rows.positions[:, 1:] == 0) & (np.arange(1, 32) < rows.lengths[:, None])).any()
    recipe = load_recipe(tmp_path / "recipe.toml", data=data, output=tmp_path / "run")
    recipe = replace(recipe, training=replace(recipe.training, compile=True))
    open_run(recipe)
    train_model(recipe, **parts(plain_run))
    run = recipe.training.output
    assert len(compiled) == 6
    for ours, plain in zip(metrics(run), metrics(plain_run), strict=True):
        assert ours.keys() == plain.keys()
        for name in ours.keys() - {"expert_load"}:
            assert ours[name] == pytest.approx(plain[name], rel=1e-3), name


# ---------------------------------------------------------------- interruptions


class StopAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def test_stopped_run_goes_on_as_if_uninterrupted(
    finished: Path, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = parts(finished)
    options = ("accumulate = 2", "log_every = 3", "router_z_loss = 0.01")
    whole = run_recipe(data, given, tmp_path / "whole", *options)
    output = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        run_recipe(data, given, output, *options, callbacks=(StopAfter(7),))
    # As if the kill had come while the next checkpoint was written, and a line of the metrics.
    cut_short = output / "checkpoint-8"
    cut_short.mkdir()
    (cut_short / "model.safetensors").write_bytes(b"half")
    with (output / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')
    assert last_checkpoint(output) == output / "checkpoint-4"
    run_recipe(data, given, output, *options)
    assert "missing keys" not in caplog.text
    # A line before every save: the sums of a line never span a resumption.
    assert [line["step"] for line in metrics(whole) if "loss" in line] == [3, 4, 6, 8, 9, 12]
    assert metrics(output) == metrics(whole)
    boards = events(output), events(whole)
    for tag in ("train/loss", "train/heldout_loss"):  # what came before the stop is there once
        ours, theirs = ([(e.step, e.value) for e in board.Scalars(tag)] for board in boards)
        assert ours == theirs
    assert_same(weights(output, 12), weights(whole, 12))
    assert_same(
        *(load_file(run / "final" / "model.safetensors") for run in (output, whole)),
    )


@pytest.mark.slow
def test_killed_command_resumes(finished: Path, data: Path) -> None:
    output = data / "killed"
    code = "from smeltscope.commands.train import train; train()"
    command = [sys.executable, "-c", code, str(data / "recipe.toml"), "--out", str(output)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step 5/"):
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (output / "final").exists()
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "rows" not in done.stderr  # they were kept
    assert "step 12/12" in done.stderr and "step 1/12" not in done.stderr
    assert metrics(output) == metrics(finished)


@pytest.mark.slow
def test_run_killed_while_saving_goes_on_from_the_checkpoint_before(
    finished: Path, data: Path
) -> None:
    output = data / "killed while saving"
    code = """
import os, torch
save = torch.save
def die(thing, file, *more, **options):  # the weights are written by then
    if "checkpoint-8" in str(file):
        os._exit(9)
    save(thing, file, *more, **options)
torch.save = die
from smeltscope.commands.train import train
train()
"""
    command = [sys.executable, "-c", code, str(data / "recipe.toml"), "--out", str(output), "-q"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, timeout=120, check=False)
    assert done.returncode == 9, done.stderr
    assert (output / "checkpoint-8" / "model.safetensors").exists()
    assert last_checkpoint(output) == output / "checkpoint-4"
    result = run_command(data / "recipe.toml", "--out", output, "-q")
    assert result.exception is None, result.exception
    assert metrics(output) == metrics(finished)
    assert_same(weights(output, 12), weights(finished, 12))


def test_run_goes_on_with_as_many_processes(finished: Path, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    shutil.rmtree(run / "final")
    shutil.rmtree(run / "checkpoint-12")
    state = run / "checkpoint-8" / "rng_state.pth"
    shutil.copy(state, state.with_name("rng_state_0.pth"))  # as two processes leave them
    state.rename(state.with_name("rng_state_1.pth"))
    before = (run / "metrics.jsonl").read_bytes()
    told = "checkpoint-8 was written by 2 processes, and here are 1, .*: go on with 2"
    with pytest.raises(SmeltscopeError, match=told):
        run_recipe(data, parts(finished), run)
    assert (run / "metrics.jsonl").read_bytes() == before


def test_metrics_are_whole_whenever_the_kill_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    metrics_file = tmp_path / "metrics.jsonl"
    metrics_file.write_text('{"step": 1}\n{"step": 2}\n{"st')
    for method in ("write_text", "rename"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Path, method, kill)
            forget_metrics_after(tmp_path, 1)
        assert metrics_file.read_text() == '{"step": 1}\n{"step": 2}\n{"st'
    forget_metrics_after(tmp_path, 1)
    assert metrics_file.read_text() == '{"step": 1}\n'
    assert list(tmp_path.iterdir()) == [metrics_file]


def test_loss_that_is_no_number_stops_the_run(finished: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(SmeltscopeError, match=r"at step \d+: there is no checkpoint|after step"):
        run_recipe(data, parts(finished), tmp_path / "nan", "learning_rate = 1e30")
    assert last_checkpoint(tmp_path / "nan") is None


def test_lost_run_names_the_checkpoint_to_go_back_to(
    finished: Path, data: Path, tmp_path: Path
) -> None:
    class Break(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == 6:
                with torch.no_grad():
                    given["model"].lm_head.weight[0, 0] = torch.nan

    output = tmp_path / "nan"
    told = f"The loss is nan at step 7: the last good checkpoint is {output / 'checkpoint-4'};"
    with pytest.raises(SmeltscopeError, match=re.escape(told)):
        run_recipe(data, {**parts(finished), "watch": None}, output, callbacks=(Break(),))


def test_full_disk_is_told_before_a_checkpoint_is_written(
    finished: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FillTheDisk(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 8:
                usage = shutil.disk_usage(tmp_path)._replace(free=1_234_567)
                monkeypatch.setattr("shutil.disk_usage", lambda _: usage)

    given, output = parts(finished), tmp_path / "full"
    with pytest.raises(SmeltscopeError) as told:
        run_recipe(data, given, output, callbacks=(FillTheDisk(),))
    model = AutoModelForCausalLM.from_pretrained(finished / "final")
    needed = 12 * sum(p.numel() for p in model.parameters()) / 1e6 + 2
    assert f"The checkpoint of step 8 needs {needed:.1f} MB" in str(told.value)
    assert f"1.2 MB left; the last good checkpoint is {output / 'checkpoint-4'}" in str(told.value)
    written = sum(f.stat().st_size for f in (output / "checkpoint-4").iterdir()) / 1e6
    assert written < needed  # what was asked for suffices
    assert sorted(f.name for f in output.glob("checkpoint-*")) == ["checkpoint-4"]
    monkeypatch.undo()
    run_recipe(data, given, output)
    assert metrics(output) == metrics(finished)


def test_a_disk_too_small_from_the_start_is_told_at_the_start(
    finished: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1_234_567)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    given, output = parts(finished), tmp_path / "small"
    with pytest.raises(
        SmeltscopeError, match=r"A checkpoint needs .* has 1\.2 MB left; there is no"
    ):
        run_recipe(data, given, output)
    assert not (output / "metrics.jsonl").exists()
    monkeypatch.undo()
    run_recipe(data, given, output)
    assert metrics(output) == metrics(finished)


# What safetensors and PyTorch say when the disk is full; the latter names no reason.
FULL = {
    "safetensors": SafetensorError("I/O error: No space left on device (os error 28)"),
    "torch": RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"),
}


@pytest.mark.parametrize(
    ("writer", "error", "moment"),
    [
        ("transformers.modeling_utils.safe_save_file", "safetensors", "on_step_end"),
        ("torch.save", "torch", "on_step_end"),
        ("transformers.modeling_utils.safe_save_file", "safetensors", "on_train_end"),
    ],
)
def test_disk_that_fills_up_while_saving_is_told(
    finished: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    writer: str,
    error: str,
    moment: str,
) -> None:
    def full(*_: Any, **__: Any) -> None:
        usage = shutil.disk_usage(tmp_path)._replace(free=4096)
        monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
        raise FULL[error]

    class Fill(TrainerCallback):
        def on_event(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step in (8, 12):
                monkeypatch.setattr(writer, full)

    setattr(Fill, moment, Fill.on_event)
    output = tmp_path / "full"
    with pytest.raises(SmeltscopeError, match=f"The disk is full: {output} could not be written"):
        run_recipe(data, parts(finished), output, callbacks=(Fill(),))
    whole = [4] if moment == "on_step_end" else [8, 12]
    assert list(whole_checkpoints(output)) == whole
    monkeypatch.undo()
    run_recipe(data, parts(finished), output)
    assert metrics(output) == metrics(finished)
    assert_same(*(load_file(run / "final" / "model.safetensors") for run in (output, finished)))


def test_other_errors_of_a_writer_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(SmeltscopeError, match="The disk is full"), full_disk_told(tmp_path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for error in (FULL["torch"], OSError(errno.EIO, "Input/output error"), ValueError("x")):
        with pytest.raises(type(error)) as told, full_disk_told(tmp_path):
            raise error
        assert told.value is error


# ---------------------------------------------------------------- branches, and what is kept


@pytest.fixture(scope="module")
def branched(finished: Path, data: Path) -> Path:
    """A run with a branch, whose last steps are no multiples of `eval_every`."""
    options = ("steps = 8", "eval_every = 5", "branches = [5]", "branch_steps = 2")
    return run_recipe(data, parts(finished), data / "branched", *options)


def test_run_that_lacks_its_finished_model_alone_gets_it(
    branched: Path, finished: Path, data: Path, tmp_path: Path
) -> None:
    run = tmp_path / "branched"
    shutil.copytree(branched, run)
    for folder in (run, run / "branch-5"):
        shutil.rmtree(folder / "final")
    recipe = load_recipe(data / "branched.toml", output=run)
    train_model(recipe, **parts(finished))
    for name, evaluated in ((".", [5, 8]), ("branch-5", [7])):
        ours, theirs = run / name, branched / name
        assert (ours / "metrics.jsonl").read_text() == (theirs / "metrics.jsonl").read_text()
        assert [m["step"] for m in metrics(ours) if "heldout_loss" in m] == evaluated
        assert list(whole_checkpoints(ours)) == list(whole_checkpoints(theirs))
        shown = [[e.step for e in events(r).Scalars("train/heldout_loss")] for r in (ours, theirs)]
        assert shown == [evaluated, evaluated]
        assert_same(*(load_file(r / "final" / "model.safetensors") for r in (ours, theirs)))


def test_lost_branch_names_the_checkpoint_it_began_from(
    branched: Path, finished: Path, data: Path, tmp_path: Path
) -> None:
    class Break(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            with torch.no_grad():
                given["model"].lm_head.weight[0, 0] = torch.nan

    run = tmp_path / "branched"
    shutil.copytree(branched, run)
    shutil.rmtree(run / "branch-5")
    recipe = load_recipe(data / "branched.toml", output=run)
    told = f"The loss is nan at step 7: the last good checkpoint is {run / 'checkpoint-5'};"
    with pytest.raises(SmeltscopeError, match=re.escape(told)):
        train_model(recipe, **{**parts(finished), "watch": None}, callbacks=(Break(),))


def test_branch_decays_from_a_step_on_its_own(finished: Path, data: Path, tmp_path: Path) -> None:
    given = parts(finished)
    branches = ("branches = [5, 9]", "branch_steps = 3", "keep_every = 6")
    run = run_recipe(data, given, tmp_path / "run", *branches)
    # The run is what it is without branches, and the branch from the end of its stable stretch is its decay.
    assert_same(weights(run, 12), weights(finished, 12))
    assert_same(weights(run / "branch-9", 12), weights(run, 12))
    assert list(whole_checkpoints(run)) == [5, 6, 9, 12]  # of 4 and 8 nothing is left
    lines = [line for line in metrics(run / "branch-5") if "loss" in line]
    assert [line["step"] for line in lines] == [6, 7, 8]
    decay = [1e-2 * (1 - (i / 3) ** 0.5) for i in range(3)]
    assert [line["learning_rate"] for line in lines] == pytest.approx(decay)
    first = next(line for line in metrics(finished) if line["step"] == 6)
    assert lines[0]["loss"] == first["loss"]  # the rows that the run itself sees next
    # A branch that was stopped goes on too, and one may be added later where a checkpoint is.
    shutil.rmtree(run / "branch-5" / "final")
    shutil.rmtree(run / "branch-5" / "checkpoint-8")
    before = metrics(run / "branch-5")
    later = ("branches = [5, 9, 6]", *branches[1:])
    run_recipe(data, given, run, *later)
    assert metrics(run / "branch-5") == before
    assert (run / "branch-6" / "final" / "model.safetensors").exists()
    with pytest.raises(SmeltscopeError, match="holds no checkpoint of that step"):
        run_recipe(data, given, run, "branches = [7]", *branches[1:])


# ---------------------------------------------------------------- sentences for what is wrong


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("seed = 3", "sead = 3", "unknown key 'sead'"),
        ("seed = 3", "seed = true", "expected a number"),
        ("seed = 3", "seed = ", "no TOML file"),
        ("seed = 3", "seed = -1", "0 or more"),
        ("seed = 3", "seed = 4294967296", "seed is 4294967296: it must be 0 or more, and below"),
        (
            "[model]",
            "[model]\nrms_norm_eps = nan",
            "[model] rms_norm_eps is nan: it must be a finite",
        ),
        ("hidden_size", "hiden_size", "unknown key 'hiden_size'"),
        ("hidden_size = 32", 'hidden_size = "32"', "hidden_size"),
        ("num_attention_heads = 2", "num_attention_heads = 3", "not divisible"),
        ("[model]", "[model]\nvocab_size = 7", "the tokenizer has 300 tokens"),
        ("vocab_size = 300", "", "either path or vocab_size"),
        ("vocab_size = 300", 'path = "nowhere"', "nowhere is no folder"),
        ('"a.train.jsonl"', '"c.train.jsonl"', "c.train.jsonl, named in"),
        ('train = ["a.train.jsonl", "b.train.jsonl"]', "train = []", "names no file"),
        ('["a.heldout.jsonl", "b.heldout.jsonl"]', '"a"', "list of paths"),
        ('["a.heldout.jsonl", "b.heldout.jsonl"]', '["empty.jsonl"]', "empty"),
        ("context = 32", "context = 128", "max_position_embeddings is 64"),
        ("context = 32", "context = 30", "whole rows"),
        ("context = 32", "", "lacks context"),
        ("steps = 12", "steps = 12\ntokens = 5", "either steps or tokens"),
        ("steps = 12", "steps = 0", "above 0"),
        ("warmup_steps = 2", "warmup_steps = 11", "do not fit"),
        ("learning_rate = 1e-2", 'learning_rate = "high"', "expected"),
        ("learning_rate = 1e-2", "learning_rate = 1e-2\ndecay_share = 2", "share"),
        (
            "learning_rate = 1e-2",
            "learning_rate = nan",
            "[training] learning_rate is nan: it must be a",
        ),
        ("learning_rate = 1e-2", "learning_rate = inf", "[training] learning_rate is inf"),
        ("steps = 12", "steps = 12\nweight_decay = nan", "[training] weight_decay is nan"),
        ("steps = 12", "steps = 12\nrouter_z_loss = -nan", "[training] router_z_loss is nan"),
        ("steps = 12", "steps = 12\ndecay_share = nan", "[training] decay_share is nan"),
        ("steps = 12", "steps = 12\naccumulate = 3", "must divide"),
        ("steps = 12", "steps = 12\naccumulate = 0", "above 0"),
        ("steps = 12", "steps = 12\nrouter_z_loss = -1", "at least 0"),
        ("steps = 12", "steps = 12\nbranches = [4]", "goes with branch_steps"),
        ("steps = 12", "steps = 12\nbranches = [0.5]\nbranch_steps = 2", "whole numbers"),
        ("steps = 12", "steps = 12\nbranches = [10]\nbranch_steps = 2", "stable stretch, 2 to 9"),
        ("steps = 12", "steps = 12\nbranches = [9]\nbranch_steps = 4", "would end at 13"),
    ],
)
def test_wrong_recipe(data: Path, tmp_path: Path, old: str, new: str, match: str) -> None:
    (data / "empty.jsonl").write_text("")
    assert old in RECIPE
    (data / "wrong.toml").write_text(RECIPE.replace(old, new, 1))
    result = run_command(data / "wrong.toml", "--out", tmp_path / "out", "-q")
    assert isinstance(result.exception, SmeltscopeError), result.exception
    assert match in str(result.exception)
    # Nothing was computed, so the recipe put right may use the same folder.
    open_run(load_recipe(data / "recipe.toml", output=tmp_path / "out"))


def test_missing_recipe(tmp_path: Path) -> None:
    with pytest.raises(SmeltscopeError, match=r"no\.toml cannot be read"):
        load_recipe(tmp_path / "no.toml")


def test_run_into_the_folder_where_one_is(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert open_run(load_recipe(data / "recipe.toml", output=Path("."))) == Path(".")
        assert [file.name for file in tmp_path.iterdir()] == ["recipe.toml"]


@pytest.mark.parametrize("left", ["rows.npz", "metrics.jsonl", "checkpoint-4", "final"])
def test_whatever_is_left_of_a_run_keeps_other_recipes_away(
    data: Path, tmp_path: Path, left: str
) -> None:
    recipe = load_recipe(data / "recipe.toml", output=tmp_path / "run")
    open_run(recipe)
    (tmp_path / "run" / left).mkdir()
    open_run(recipe)
    with pytest.raises(SmeltscopeError, match=r"another recipe, .* in seed \(3, now 4\)"):
        open_run(replace(recipe, text=RECIPE.replace("seed = 3", "seed = 4")))


def test_folder_of_another_run_is_refused(data: Path, finished: Path, tmp_path: Path) -> None:
    other = RECIPE.replace("seed = 3", "seed = 4").replace("steps = 12", "tokens = 9_000")
    (data / "other.toml").write_text(other)
    with pytest.raises(SmeltscopeError, match="run of another recipe") as told:
        open_run(load_recipe(data / "other.toml", output=finished))
    assert "differs in seed (3, now 4), training.steps (12, now not set), training.tokens" in str(
        told.value
    )
    assert (finished / "recipe.toml").read_text() == RECIPE
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(SmeltscopeError, match="not empty and holds no run"):
        open_run(load_recipe(data / "recipe.toml", output=tmp_path))


def test_a_run_over_other_text_is_refused(data: Path, tmp_path: Path) -> None:
    recipe, text = tmp_path / "recipe.toml", tmp_path / "text"
    text.mkdir()
    for file in data.glob("*.jsonl"):
        shutil.copy(file, text)
    recipe.write_text(RECIPE.replace("steps = 12", "steps = 1").replace("steps = 2", "steps = 0"))
    options = ("-q", "--out", tmp_path / "run", "--data")
    assert run_command(recipe, *options, data).exception is None
    assert run_command(recipe, *options, text).exception is None  # the same elsewhere
    rows = (tmp_path / "run" / "rows.npz").stat()
    with (text / "a.train.jsonl").open("a") as file:
        file.write('\n{"text": "more"}')
    told = str(run_command(recipe, *options, text).exception)
    size = (text / "a.train.jsonl").stat().st_size
    assert (
        f"other text, which differs in a.train.jsonl ({size - 17:,} bytes, now {size:,} bytes)"
        in told
    )
    assert (tmp_path / "run" / "rows.npz").stat().st_mtime_ns == rows.st_mtime_ns


def test_bar_on_a_terminal(data: Path, tmp_path: Path) -> None:
    """Drawn, and where training fails the sentence begins a line of its own."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.replace("1e-2", "1e30").replace("steps = 2", "steps = 0"))
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    command = [sys.executable, "-m", "smeltscope", "smelt", "train", str(recipe)]
    command += ["--data", str(data), "--out", str(tmp_path / "run"), "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # a terminal whose other end is closed
            while part := os.read(ours, 4096):
                shown += part
    os.close(ours)
    assert process.returncode == 2
    *before, last = shown.decode().rstrip().splitlines()
    assert "/12 [" in "".join(before) and "loss=" in "".join(before)
    assert last.startswith("Error: ") and "step" in last and "/12 [" not in last


def test_changed_keys() -> None:
    assert not changed_keys(RECIPE, RECIPE.replace('"run"', '"elsewhere"') + "# a remark")
    assert not changed_keys(RECIPE, RECIPE + "branches = [4]\nbranch_steps = 2")
    mixture = '[[mixture]]\nsource = "text"\nweight = {}\n'
    before, now = (f"{RECIPE}{mixture.format(1)}{mixture.format(w)}" for w in (1, 2))
    assert changed_keys(before, now) == ["mixture.2.weight (1, now 2)"]
    assert changed_keys(RECIPE, before)[0] == "mixture.1.source (not set, now text)"


def test_rows_of_another_tokenizer_are_refused(finished: Path, data: Path, tmp_path: Path) -> None:
    recipe = load_recipe(data / "recipe.toml", output=tmp_path / "run")
    open_run(recipe)
    given = parts(finished)
    given["rows"].tokens[0, 0] = 300
    with pytest.raises(SmeltscopeError, match="token 300, but the vocabulary ends at 299"):
        train_model(recipe, **given)


def test_tokens_become_steps(data: Path, finished: Path) -> None:
    (data / "tokens.toml").write_text(RECIPE.replace("steps = 12", "tokens = 2_600"))
    recipe = load_recipe(data / "tokens.toml")
    assert recipe.training.total_steps == 11 and recipe.batch_rows == 8
    config = build_config(recipe, parts(finished)["tokenizer"])
    assert config.vocab_size == 300 and config.num_hidden_layers == 6


# ---------------------------------------------------------------- bfloat16


@pytest.mark.cuda
def test_bfloat16_on_cuda(finished: Path, data: Path, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    recipe = load_recipe(data / "recipe.toml", output=tmp_path / "run")
    output = open_run(recipe)
    began = time.perf_counter()
    train_model(recipe, **{**parts(finished), "device": "cuda"})
    assert time.perf_counter() - began < 120
    losses = [line["loss"] for line in metrics(output) if "loss" in line]
    assert losses == pytest.approx([m["loss"] for m in metrics(finished) if "loss" in m], abs=0.1)


@pytest.mark.cuda
def test_flash_attn_on_cuda(
    finished: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_flash_attn_2_available():  # asks for a CUDA device too
        pytest.skip("needs a CUDA device and the package flash-attn")
    given = {**parts(finished), "device": "cuda"}
    given["rows"] = packed_rows(given["rows"])
    seen = Implementations()
    flash = run_recipe(data, given, tmp_path / "flash", callbacks=(seen,))
    monkeypatch.setattr("smeltscope.model.training.is_flash_attn_2_available", lambda: False)
    plain = run_recipe(data, given, tmp_path / "plain", callbacks=(seen,))
    assert seen.names == [*[FLASH] * 12, *["sdpa"] * 12]
    losses = [[m["loss"] for m in metrics(run) if "loss" in m] for run in (flash, plain)]
    assert losses[0] == pytest.approx(losses[1], abs=0.05)


class Implementations(TrainerCallback):
    """What attention runs on, in every step."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.names.append(given["model"].config._attn_implementation)
