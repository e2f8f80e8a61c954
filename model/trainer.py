"""What `train_model` gives the Trainer of transformers: rows, our losses, whole checkpoints."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback

from smeltscope.errors import SmeltscopeError
from smeltscope.model.rows import Rows

WHOLE = "whole"  # a file in a checkpoint, written last: a kill while saving leaves none


class RowDataset(Dataset):
    """Rows as the Trainer wants them; padding is neither attended nor predicted."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        tokens = torch.from_numpy(self.rows.tokens[i].astype(np.int64))  # (context,)
        real = torch.arange(len(tokens)) < int(self.rows.lengths[i])
        return {
            "input_ids": tokens,
            "attention_mask": real.long(),
            "labels": tokens.masked_fill(~real, -100),
        }


class SmeltTrainer(Trainer):
    """The stock Trainer, with what it does not tell: loss without the router's part, speed."""

    def __init__(self, *, heldout: Rows, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.heldout = heldout
        self.balance_coefficient: float = kwargs["model"].config.router_aux_loss_coef
        self.evaluated: tuple[int, dict[str, float]] = (-1, {})  # step and metrics
        self._start_counting()

    def _start_counting(self) -> None:
        self.text_loss = self.balance = 0.0  # sums over the steps since the last line of the log
        self.steps_seen = self.tokens_seen = 0
        self.clock = time.perf_counter()

    def compute_loss(  # type: ignore[override]
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        tokens = int(inputs["attention_mask"].sum())
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        text_loss = float(loss.detach())
        if not np.isfinite(text_loss):
            raise SmeltscopeError(
                f"The loss is {text_loss} at step {self.state.global_step + 1}: "
                f"{_last_good(Path(str(self.args.output_dir)))}; try a lower learning_rate."
            )
        balance = float(outputs.aux_loss.detach())
        self.text_loss += text_loss - self.balance_coefficient * balance
        self.balance += balance
        self.steps_seen += 1
        self.tokens_seen += tokens
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self.steps_seen:
            seconds = time.perf_counter() - self.clock
            logs["loss"] = self.text_loss / self.steps_seen
            logs["load_balancing_loss"] = self.balance / self.steps_seen
            logs["tokens_per_second"] = self.tokens_seen / seconds
            self._start_counting()
        super().log(logs, start_time)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        if self.evaluated[0] == self.state.global_step:  # the last step is a Trainer's epoch too
            return self.evaluated[1]
        began = time.perf_counter()
        with self.compute_loss_context_manager():
            metrics = heldout_loss(self.model, self.heldout, batch_rows=self.args.train_batch_size)
        self.log(dict(metrics))
        self.clock += time.perf_counter() - began  # speed is training's alone
        self.evaluated = (self.state.global_step, metrics)
        return metrics

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        # A checkpoint holds tied weights once, under one name: the other names are not missing.
        model: Any = self.model
        tied = model.get_expanded_tied_weights_keys()
        load_result.missing_keys[:] = [k for k in load_result.missing_keys if k not in tied]
        super()._issue_warnings_after_load(load_result)


class RunFolder(TrainerCallback):
    """Keeps the metrics file, and marks the checkpoints that were written to the end."""

    def __init__(self, output: Path) -> None:
        self.output = output

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "train_runtime" not in logs:  # the Trainer's closing summary, of the last start only
            with (self.output / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if not all(bool(torch.isfinite(p).all()) for p in model.parameters()):
            raise SmeltscopeError(
                f"Weights are no longer numbers after step {state.global_step}: "
                f"{_last_good(self.output)}; try a lower learning_rate."
            )
        (self.output / f"checkpoint-{state.global_step}" / WHOLE).touch()


def heldout_loss(model: Any, rows: Rows, *, batch_rows: int) -> dict[str, float]:
    """Cross-entropy in nats per predicted token, over all tokens and over those of each category."""
    sums = torch.zeros(len(rows.categories), dtype=torch.float64)
    counts = torch.zeros(len(rows.categories), dtype=torch.float64)
    dataset = RowDataset(rows)
    model.eval()
    for begin in range(0, len(rows), batch_rows):
        chosen = range(begin, min(begin + batch_rows, len(rows)))
        items = [dataset[i] for i in chosen]
        batch = {k: torch.stack([i[k] for i in items]).to(model.device) for k in items[0]}
        labels = batch.pop("labels")[:, 1:]  # (row, position)
        with torch.no_grad():
            logits = model(**batch, use_cache=False, output_router_logits=False).logits[:, :-1]
        losses = cross_entropy(logits.float().transpose(1, 2), labels, reduction="none")
        category = torch.from_numpy(rows.category[begin : begin + len(items)]).long()
        sums.index_add_(0, category, losses.sum(1).double().cpu())
        counts.index_add_(0, category, (labels >= 0).sum(1).double().cpu())
    by_category = (sums / counts).tolist()
    return {
        "heldout_loss": float(sums.sum() / counts.sum()),
        **{f"heldout_loss/{c}": x for c, x in zip(rows.categories, by_category, strict=True)},
    }


def last_checkpoint(output: Path, *, remove_cut_short: bool = False) -> Path | None:
    """The newest checkpoint that was written to the end, if any."""
    whole: list[tuple[int, Path]] = []
    for folder in output.glob("checkpoint-*"):
        if (folder / WHOLE).exists():
            whole.append((int(folder.name.split("-")[1]), folder))
        elif remove_cut_short:
            shutil.rmtree(folder)
    return max(whole)[1] if whole else None


def _last_good(output: Path) -> str:
    checkpoint = last_checkpoint(output)
    if checkpoint is None:
        return "there is no checkpoint from before"
    return f"the last good checkpoint is {checkpoint}"
