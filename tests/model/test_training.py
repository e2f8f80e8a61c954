"""Training: the loss falls, a stopped run goes on as if nothing had happened, errors are sentences."""

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from torch.nn.functional import cross_entropy, one_hot
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from smeltscope.commands.train import train
from smeltscope.errors import SmeltscopeError
from smeltscope.model.recipe import load_recipe, same_recipe
from smeltscope.model.rows import load_rows
from smeltscope.model.trainer import last_checkpoint
from smeltscope.model.training import build_config, open_run, train_model

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
    return {
        "tokenizer": AutoTokenizer.from_pretrained(finished / "tokenizer"),
        "rows": load_rows(finished / "rows.npz", "train"),
        "heldout": load_rows(finished / "rows.npz", "heldout"),
        "device": "cpu",
    }


# ---------------------------------------------------------------- a whole run


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


def test_finished_run_is_not_trained_again(finished: Path, data: Path) -> None:
    before = (finished / "final" / "model.safetensors").stat().st_mtime_ns
    result = run_command(data / "recipe.toml", "--out", finished, "-q")
    assert result.exception is None and result.stderr == ""
    assert (finished / "final" / "model.safetensors").stat().st_mtime_ns == before


def test_load_balancing_counts_every_execution(finished: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(finished / "final", dtype=torch.float32)
    rows = load_rows(finished / "rows.npz", "heldout").take(np.arange(6))
    ids = torch.from_numpy(rows.tokens.astype(np.int64))
    real = torch.arange(ids.shape[1]) < torch.from_numpy(rows.lengths)[:, None]
    assert not real.all()
    out = model(ids, attention_mask=real.long(), output_router_logits=True)
    assert len(out.router_logits) == model.config.num_hidden_layers == 6  # not 4 layers
    scores = torch.cat([logits[real.flatten()] for logits in out.router_logits]).softmax(-1)
    chosen = one_hot(scores.topk(2).indices, 4).sum(1).float()  # (tokens x executions, expert)
    expected = 4 * (chosen.mean(0) * scores.mean(0)).sum()
    assert out.aux_loss.item() == pytest.approx(expected.item(), rel=1e-5)


# ---------------------------------------------------------------- interruptions


class StopAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def test_stopped_run_goes_on_as_if_uninterrupted(
    finished: Path, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = load_recipe(data / "recipe.toml", output=data / "stopped")
    output = open_run(recipe)
    with pytest.raises(KeyboardInterrupt):
        train_model(recipe, **parts(finished), callbacks=(StopAfter(7),))
    # As if the kill had come while the next checkpoint was written, and a line of the metrics.
    cut_short = output / "checkpoint-8"
    cut_short.mkdir()
    (cut_short / "model.safetensors").write_bytes(b"half")
    with (output / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')
    assert last_checkpoint(output) == output / "checkpoint-4"
    train_model(recipe, **parts(finished))
    assert "missing keys" not in caplog.text
    for ours, whole in zip(metrics(output), metrics(finished), strict=True):
        assert ours == pytest.approx(whole, rel=1e-5)


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
    assert "tokenizing" not in done.stderr  # the rows were kept
    assert "step 12/12" in done.stderr and "step 1/12" not in done.stderr
    for ours, whole in zip(metrics(output), metrics(finished), strict=True):
        assert ours == pytest.approx(whole, rel=1e-5)


def test_loss_that_is_no_number_stops_the_run(finished: Path, data: Path, tmp_path: Path) -> None:
    (data / "nan.toml").write_text(RECIPE.replace("learning_rate = 1e-2", "learning_rate = 1e30"))
    recipe = load_recipe(data / "nan.toml", output=tmp_path / "nan")
    open_run(recipe)
    with pytest.raises(SmeltscopeError, match=r"at step \d+: there is no checkpoint|after step"):
        train_model(recipe, **parts(finished))
    assert last_checkpoint(tmp_path / "nan") is None


# ---------------------------------------------------------------- sentences for what is wrong


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("seed = 3", "sead = 3", "unknown key 'sead'"),
        ("seed = 3", "seed = true", "expected a number"),
        ("seed = 3", "seed = ", "no TOML file"),
        ("seed = 3", "seed = -1", "0 or more"),
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
    ],
)
def test_wrong_recipe(data: Path, tmp_path: Path, old: str, new: str, match: str) -> None:
    (data / "empty.jsonl").write_text("")
    assert old in RECIPE
    (data / "wrong.toml").write_text(RECIPE.replace(old, new, 1))
    result = run_command(data / "wrong.toml", "--out", tmp_path / "out", "-q")
    assert isinstance(result.exception, SmeltscopeError), result.exception
    assert match in str(result.exception)
    if old != "seed = 3":  # nothing was computed, so the recipe put right may use the same folder
        open_run(load_recipe(data / "recipe.toml", output=tmp_path / "out"))


def test_missing_recipe(tmp_path: Path) -> None:
    with pytest.raises(SmeltscopeError, match=r"no\.toml cannot be read"):
        load_recipe(tmp_path / "no.toml")


def test_folder_of_another_run_is_refused(data: Path, finished: Path, tmp_path: Path) -> None:
    (data / "other.toml").write_text(RECIPE.replace("seed = 3", "seed = 4"))
    with pytest.raises(SmeltscopeError, match="run of another recipe"):
        open_run(load_recipe(data / "other.toml", output=finished))
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(SmeltscopeError, match="not empty and holds no run"):
        open_run(load_recipe(data / "recipe.toml", output=tmp_path))
    assert same_recipe(RECIPE, RECIPE.replace('"run"', '"elsewhere"') + "# a remark")


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
