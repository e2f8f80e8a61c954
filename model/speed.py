"""How fast training is, beside transformers' own Qwen3-MoE in transformers' own Trainer."""

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset
from transformers import (
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainerCallback,
    set_seed,
)

from smeltscope.errors import SmeltscopeError
from smeltscope.model.configuration import SmeltConfig
from smeltscope.model.recipe import Recipe
from smeltscope.model.rows import Rows
from smeltscope.model.trainer import RowDataset, SmeltTrainer, silence
from smeltscope.model.training import make_arguments, make_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROUNDS = 3  # in which the two take turns, so that a busy machine slows both
STEPS = 4  # of each in a round; the first is not timed


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Tokens per second of training, without padding: medians over rounds."""

    ours: float
    qwen3_moe: float

    @property
    def ratio(self) -> float:
        return self.ours / self.qwen3_moe


def measure_speed(
    recipe: Recipe, *, tokenizer: "PreTrainedTokenizerBase", rows: Rows, device: str = "auto"
) -> Speed:
    """Train the recipe's model and a Qwen3-MoE of its size for some steps on the same rows, in turns.

    The Qwen3-MoE has a layer for each execution, with weights of its own, the same sizes otherwise, transformers'
    losses and the same options of the Trainer. Neither model is kept.
    """
    if len(rows) < STEPS * recipe.batch_rows:
        raise SmeltscopeError(
            f"--measure takes {STEPS} steps, but there are rows for {len(rows) // recipe.batch_rows}."
        )
    set_seed(recipe.seed)
    smelt = make_model(recipe, tokenizer)
    qwen: Any = Qwen3MoeForCausalLM(qwen3_moe_like(smelt.config))
    if recipe.training.compile:
        for layer in qwen.model.layers:
            layer.compile()
    real = recipe.batch_rows * (STEPS - 1)
    tokens = int(rows.lengths[recipe.batch_rows :][:real].sum())
    seconds: tuple[list[float], list[float]] = ([], [])
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(ROUNDS):
            for model, found in zip((smelt, qwen), seconds, strict=True):
                found.append(_timed(recipe, model, rows, Path(folder), device))
    ours, theirs = (tokens / statistics.median(found) for found in seconds)
    return Speed(ours=ours, qwen3_moe=theirs)


def qwen3_moe_like(config: SmeltConfig) -> Qwen3MoeConfig:
    """Qwen3-MoE with a layer for each execution of a SMELT."""
    known = Qwen3MoeConfig().to_dict().keys() - {"model_type", "architectures"}
    known |= {"head_dim"}  # which its layers read, though its configuration does not name it
    return Qwen3MoeConfig(**{k: v for k, v in config.to_dict().items() if k in known})


def _timed(recipe: Recipe, model: PreTrainedModel, rows: Rows, folder: Path, device: str) -> float:
    """Seconds of all steps but the first."""
    arguments = make_arguments(recipe, folder, device, steps=STEPS, decay_steps=0)
    arguments.set_save(strategy="no").set_evaluate(strategy="no").set_logging(strategy="no")
    arguments.report_to = []
    dataset, clock = RowDataset(rows), _Clock()
    given: dict[str, Any] = {"model": model, "args": arguments, "callbacks": [clock]}
    if isinstance(model, Qwen3MoeForCausalLM):
        trainer = Trainer(**given, train_dataset=_Bare(dataset))
    else:
        trainer = SmeltTrainer(**given, train_dataset=dataset, heldout=rows)
    silence(trainer)
    trainer.train()
    return clock.times[-1] - clock.times[0]


class _Bare(Dataset):
    """Rows with nothing that transformers' loss does not take."""

    def __init__(self, rows: RowDataset) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {k: v for k, v in self.rows[i].items() if k not in ("real", "category")}


class _Clock(TrainerCallback):
    """The end of every step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
