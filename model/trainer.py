"""What `train_model` gives the Trainer of transformers: rows, our losses, what is logged, whole checkpoints."""

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import Dataset
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    default_data_collator,
)
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from smeltscope.errors import SmeltscopeError
from smeltscope.model.losses import router_losses, token_losses
from smeltscope.model.rows import Rows
from smeltscope.model.run_folder import (
    add_metrics,
    check_space,
    finish_checkpoint,
    full_disk_told,
    last_good,
)
from smeltscope.model.sharding import (
    local_part,
    shard,
    spread_optimizer_state,
    whole_optimizer_state,
    whole_weights,
)

# Looks at the model whenever it is evaluated, and names what it found.
Watch = Callable[[PreTrainedModel], Mapping[str, float]]

FLASH = "flash_attention_2"  # transformers' name for the package flash-attn

BYTES_OF_PARAMETER = 12  # in a checkpoint: float32, as the two moments of AdamW are
BYTES_BESIDE = 2_000_000  # states of schedule, generators and Trainer


def bytes_of_checkpoint(model: torch.nn.Module) -> int:
    """What a checkpoint of a training takes on the disk, and a little more."""
    return BYTES_OF_PARAMETER * sum(p.numel() for p in model.parameters()) + BYTES_BESIDE


class RowDataset(Dataset):
    """Rows as the Trainer wants them; `token_batch` says what becomes of them."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        real = np.arange(rows.tokens.shape[1]) < rows.lengths[:, None]  # (row, position)
        self.packed = bool((real[:, 1:] & (rows.positions[:, 1:] == 0)).any())

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        rows = self.rows
        tokens = torch.from_numpy(rows.tokens[i].astype(np.int64))  # (context,)
        item = {
            "input_ids": tokens,
            "labels": tokens.masked_fill(~torch.from_numpy(rows.predicted[i]), -100),
            "real": torch.arange(len(tokens)) < int(rows.lengths[i]),
            "category": torch.tensor(int(rows.category[i])),
        }
        if self.packed:
            # Where positions begin anew, transformers separates segments, if no mask is given. Rows of
            # one segment need neither: in a causal model no token sees the padding behind it.
            item["position_ids"] = torch.from_numpy(rows.positions[i].astype(np.int64))
        return item


def one_row(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """A batch of packed rows as one row, in which positions still tell the segments apart: (1, rows x context).

    Each row, and the padding at its end, begins at position 0, as a segment does. transformers gives flash-attn
    the borders of segments in batches of one row only, and mixes them in larger ones.
    """
    return {name: tensor.reshape(1, -1) for name, tensor in inputs.items()}


class SmeltTrainer(Trainer):
    """The stock Trainer with our losses, logged by category and expert; it keeps whole checkpoints only.

    `kept` are the steps whose checkpoints are written and stay; `start` is the checkpoint of another run that this one
    begins from; `watch` is called at each evaluation. Layers that are `compiled` run uncompiled there: what looks into
    them would have them compiled again. For the same reason attention runs on PyTorch's kernels there. A `sharded` model
    is spread over the processes when training begins.
    """

    loss_is_scaled_for_ga = True

    def __init__(
        self,
        *,
        heldout: Rows,
        router_z_loss: float = 0.0,
        kept: Collection[int] = (),
        start: Path | None = None,
        watch: Watch | None = None,
        compiled: bool = False,
        sharded: bool = False,
        **kwargs: Any,
    ) -> None:
        self.sharded = sharded  # the Trainer asks for it while it is made
        # With a tokenizer's own collator there would be an attention mask, and then positions would not separate segments.
        super().__init__(data_collator=default_data_collator, **kwargs)
        self.compiled = compiled
        self.heldout = heldout
        self.router_z_loss = router_z_loss
        self.kept = kept
        self.start = start
        self.watch = watch
        self.categories: tuple[str, ...] = kwargs["train_dataset"].rows.categories
        self.evaluated: tuple[int, dict[str, float]] = (-1, {})  # step and metrics
        self.add_callback(_Saves(kept))
        self._start_counting()

    @property
    def output(self) -> Path:
        return Path(str(self.args.output_dir))

    # ------------------------------------------------------------ losses

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """This process's share of a step's loss.

        The text's is the mean over the predicted tokens of the whole step, however they are split over batches and
        processes; the routers' are means over batches and processes, each balanced by itself.
        """
        config = self.accelerator.unwrap_model(model).config
        labels, real, category = (inputs.pop(name) for name in ("labels", "real", "category"))
        if config._attn_implementation == FLASH and "position_ids" in inputs:
            inputs = one_row(inputs)
        outputs = model(
            **inputs, use_cache=False
        )  # with a cache, positions would not separate segments
        logits = outputs.logits.view(*labels.shape, -1)  # (row, position, token)
        losses = token_losses(logits, labels)  # (row, position)
        routers = router_losses(outputs.router_logits, real, top_k=config.num_experts_per_tok)
        predicted = (labels[:, 1:] >= 0).sum(1)  # (row,)
        counted = predicted.sum() if num_items_in_batch is None else num_items_in_batch
        # Gradients are averaged over processes, but their sum is wanted.
        loss = losses.sum() * self.accelerator.num_processes / counted
        of_routers = config.router_aux_loss_coef * routers.balance + self.router_z_loss * routers.z
        loss = loss + of_routers / self.args.gradient_accumulation_steps
        if not bool(torch.isfinite(loss)):
            raise SmeltscopeError(
                f"The loss is {loss.item()} at step {self.state.global_step + 1}: "
                f"{last_good(self.output, self.start)}; train anew, into another folder, with a lower learning_rate."
            )
        of_category = torch.zeros(2, len(self.categories), device=loss.device)
        of_category.index_add_(1, category, torch.stack([losses.detach().sum(1), predicted]))
        scalars = (routers.balance, routers.z, torch.ones_like(loss), real.sum())
        self._count("categories", of_category)
        self._count("scalars", torch.stack([x.detach().float() for x in scalars]))
        self._count("load", routers.load)
        return (loss, outputs) if return_outputs else loss

    def _start_counting(self) -> None:
        self.sums: dict[str, Tensor] = {}  # since the last line of the log, of this process
        self.clock = time.perf_counter()

    def _count(self, name: str, value: Tensor) -> None:
        self.sums[name] = self.sums[name] + value if name in self.sums else value

    # ------------------------------------------------------------ the log

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        if "train_runtime" in logs:  # the Trainer's closing summary, of the last start only
            return
        if "loss" in logs and self.sums:
            seconds = time.perf_counter() - self.clock
            sums: Any = self.accelerator.reduce(self.sums, "sum")
            self._start_counting()
            losses, predicted = sums["categories"].double().cpu().numpy()  # (category,)
            balance, z, batches, tokens = sums["scalars"].double().tolist()
            logs["loss"] = losses.sum() / predicted.sum()
            logs |= {
                f"loss/{name}": losses[c] / predicted[c]
                for c, name in enumerate(self.categories)
                if predicted[c]
            }
            logs["load_balancing_loss"] = balance / batches
            logs["router_z_loss"] = z / batches
            logs["tokens_per_second"] = tokens / seconds
            config: Any = self.model.config  # type: ignore[union-attr]
            load = sums[
                "load"
            ].double()  # (execution, expert), from here 1 where all are used alike
            load = load / load.mean(1, keepdim=True)
            for e in config.executions:
                where = f"layer {e.layer} visit {e.visit}"
                logs[f"expert_load_max/{where}"] = load[e.index].max().item()
                logs[f"experts_unused/{where}"] = (load[e.index] == 0).double().mean().item()
            logs["expert_load"] = load.cpu().numpy().round(3).tolist()
        super().log(logs, start_time)
        self.state.log_history.clear()  # every checkpoint would hold the whole of it
        if self.is_world_process_zero():
            add_metrics(self.output, {"step": self.state.global_step, **logs})

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        if self.evaluated[0] == self.state.global_step:  # the last step is a Trainer's epoch too
            return self.evaluated[1]
        began = time.perf_counter()
        model: Any = self.model
        attention = model.config._attn_implementation
        model.set_attn_implementation("sdpa")
        with torch.compiler.set_stance("force_eager") if self.compiled else nullcontext():
            metrics = heldout_loss(model, self.heldout, batch_rows=self.args.train_batch_size)
            if self.watch is not None:
                metrics |= self.watch(model)
        model.set_attn_implementation(attention)
        if self.sharded:
            model.reshard()  # without a backward, the embeddings stay gathered
        self.log(dict(metrics))
        self.clock += time.perf_counter() - began  # speed is training's alone
        self.evaluated = (self.state.global_step, metrics)
        return metrics

    # ------------------------------------------------------------ checkpoints

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        began = time.perf_counter()
        parameters = list(self.model.parameters())  # type: ignore[union-attr]
        finite = all(bool(torch.isfinite(local_part(p)).all()) for p in parameters)
        broken: Any = self.accelerator.reduce(
            torch.tensor(not finite, device=self.args.device).int()
        )
        if broken:  # anywhere, so that all processes stop
            raise SmeltscopeError(
                f"Weights are no longer numbers after step {self.state.global_step}: "
                f"{last_good(self.output, self.start)}; train anew, into another folder, with a lower learning_rate."
            )
        needed = bytes_of_checkpoint(self.model)  # type: ignore[arg-type]
        what = f"The checkpoint of step {self.state.global_step}"
        check_space(self.output, needed, what, self.start)
        with full_disk_told(self.output):  # for another program may have filled it meanwhile
            super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()  # each process writes a part of it
        if self.is_world_process_zero():
            checkpoint = self.output / f"checkpoint-{self.state.global_step}"
            finish_checkpoint(checkpoint, kept=self.kept)
        self.clock += time.perf_counter() - began

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self.sharded:
            super().save_model(output_dir, _internal_call)
            return
        main = self.is_world_process_zero()
        weights = whole_weights(self.model, keep=main)  # type: ignore[arg-type]
        if main:
            self._save(output_dir, state_dict=weights)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.sharded:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        state = whole_optimizer_state(self.model, self.optimizer)  # type: ignore[arg-type]
        if self.is_world_process_zero():
            schedule: Any = self.lr_scheduler
            torch.save(state, Path(output_dir) / OPTIMIZER_NAME)
            torch.save(schedule.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self.sharded:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        state = {}
        if self.is_world_process_zero():
            state = torch.load(Path(checkpoint) / OPTIMIZER_NAME, map_location="cpu")
        spread_optimizer_state(self.model, self.optimizer, state)  # type: ignore[arg-type]
        schedule: Any = self.lr_scheduler
        schedule.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME))

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        if not self.sharded:  # else it may be too big: each layer goes there when it is spread
            super()._move_model_to_device(model, device)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        if self.sharded:  # a checkpoint's weights have been loaded by now, as into any model
            mesh = init_device_mesh(self.args.device.type, (self.args.world_size,))
            shard(self.model, mesh=mesh)  # type: ignore[arg-type]
        # Of such a model the Trainer makes no DDP; it counts on more of its own only while training.
        self.is_distributed_loading_by_transformers = self.sharded
        prepared = super()._prepare_for_training(*args, **kwargs)
        self.is_distributed_loading_by_transformers = False
        return prepared

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        # A checkpoint holds tied weights once, under one name: the other names are not missing.
        model: Any = self.model
        tied = model.get_expanded_tied_weights_keys()
        load_result.missing_keys[:] = [k for k in load_result.missing_keys if k not in tied]
        super()._issue_warnings_after_load(load_result)


class _Saves(TrainerCallback):
    """Saves after the steps that are kept; a line of the log before every save, so that none spans a resumption."""

    def __init__(self, kept: Collection[int]) -> None:
        self.kept = kept

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save |= state.global_step in self.kept
        control.should_log |= control.should_save


def heldout_loss(model: Any, rows: Rows, *, batch_rows: int) -> dict[str, float]:
    """Cross-entropy in nats per predicted token, over all tokens and over those of each category."""
    sums = np.zeros((len(rows.categories), 2))  # of losses, and predicted tokens
    dataset = RowDataset(rows)
    model.eval()
    for begin in range(0, len(rows), batch_rows):
        items = [dataset[i] for i in range(begin, min(begin + batch_rows, len(rows)))]
        batch = {k: torch.stack([i[k] for i in items]).to(model.device) for k in items[0]}
        labels, _, category = (batch.pop(name) for name in ("labels", "real", "category"))
        with torch.no_grad():
            logits = model(**batch, use_cache=False, output_router_logits=False).logits
        losses = token_losses(logits, labels).sum(1).double().cpu().numpy()  # (row,)
        predicted = (labels[:, 1:] >= 0).sum(1).cpu().numpy()
        np.add.at(sums, category.cpu().numpy(), np.stack([losses, predicted], axis=1))
    return {
        "heldout_loss": float(sums[:, 0].sum() / sums[:, 1].sum()),
        **{
            f"heldout_loss/{name}": float(loss / count)
            for name, (loss, count) in zip(rows.categories, sums, strict=True)
            if count
        },
    }


def silence(trainer: Trainer) -> None:
    """Take away the callbacks that print metrics among the results."""
    for noisy in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(noisy)
