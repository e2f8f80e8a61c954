"""Training a SMELT on rows of tokens with transformers' Trainer.

`train_model` is the whole of it: it resumes from the last whole checkpoint of its output folder,
writes metrics there as JSON lines and for TensorBoard, and leaves the finished model in `final`.
"""

import dataclasses
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.integrations import TensorBoardCallback, is_tensorboard_available
from transformers.utils import is_flash_attn_2_available

from smeltscope.errors import SmeltscopeError
from smeltscope.model.configuration import SmeltConfig
from smeltscope.model.recipe import Recipe
from smeltscope.model.rows import Rows
from smeltscope.model.run_folder import (
    check_space,
    forget_metrics_after,
    full_disk_told,
    last_checkpoint,
    processes_of,
    remove_cut_short,
    step_of,
    whole_checkpoints,
    write_curve,
)
from smeltscope.model.smelt import SmeltForCausalLM
from smeltscope.model.trainer import (
    BYTES_BESIDE,
    FLASH,
    RowDataset,
    SmeltTrainer,
    Watch,
    bytes_of_checkpoint,
    silence,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Fields of SmeltConfig that the tokenizer or the loop decides, or that mean nothing in training.
NOT_IN_RECIPE = {
    *("transformers_version", "architectures", "dtype", "bos_token_id", "eos_token_id"),
    *("pad_token_id", "num_hidden_layers", "output_router_logits", "use_cache"),
}


def build_config(recipe: Recipe, tokenizer: "PreTrainedTokenizerBase") -> SmeltConfig:
    """The configuration that a recipe and a tokenizer make; the vocabulary is the tokenizer's.

    Raises SmeltscopeError for unknown or contradictory fields and a context that is too long.
    """
    known = {field.name for field in dataclasses.fields(SmeltConfig)} - NOT_IN_RECIPE
    for key in recipe.model:
        if key not in known:
            raise SmeltscopeError(
                f"[model] has an unknown key {key!r}: it takes the fields of SmeltConfig, "
                f"{', '.join(sorted(known))}."
            )
    vocab_size = recipe.model.get("vocab_size", len(tokenizer))
    if vocab_size != len(tokenizer):
        raise SmeltscopeError(
            f"[model] vocab_size is {vocab_size}, but the tokenizer has {len(tokenizer)} tokens: "
            "leave vocab_size out."
        )
    for name in ("bos", "eos", "pad"):
        if getattr(tokenizer, f"{name}_token_id") is None:
            raise SmeltscopeError(f"The tokenizer has no {name}_token, which training rows need.")
    words = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    try:
        config = SmeltConfig(**{**recipe.model, "vocab_size": vocab_size, **words})
    except StrictDataclassError as error:
        raise SmeltscopeError(f"[model] {error}") from error
    if recipe.data.context > config.max_position_embeddings:
        raise SmeltscopeError(
            f"[data] context is {recipe.data.context}, but the model's max_position_embeddings is "
            f"{config.max_position_embeddings}."
        )
    return config


def train_model(
    recipe: Recipe,
    *,
    tokenizer: "PreTrainedTokenizerBase",
    rows: Rows,
    heldout: Rows,
    device: str = "auto",
    callbacks: tuple[TrainerCallback, ...] = (),
    watch: Watch | None = None,
) -> Path:
    """Train on `rows`, in their order, to the end of the recipe, then its branches; returns the folder of the model.

    The folder comes from `open_run`; a branch lies in `branch-STEP` of it. A run that was interrupted goes on from
    its last whole checkpoint, and computes what it would have computed without the interruption. `device` is auto,
    cpu or cuda; on CUDA the forward is computed in bfloat16, elsewhere in float32. What `watch` finds at each
    evaluation is logged. Under torchrun each process computes a share of every step's rows.
    Raises SmeltscopeError when the loss is no longer a number, the disk too small for a checkpoint, or the number of
    processes another than that which wrote the checkpoint to go on from.
    """
    training = recipe.training
    output = training.output
    _check_vocabulary(build_config(recipe, tokenizer), rows, heldout)

    def train_into(folder: Path, *, steps: int, decay_steps: int, start: int | None) -> None:
        if (folder / "final").exists():
            return
        folder.mkdir(exist_ok=True)
        checkpoint, begin = last_checkpoint(folder), None
        if checkpoint is None and start is not None:
            checkpoint = begin = _start_of_branch(output, start)
        step = step_of(checkpoint) if checkpoint else 0
        arguments = make_arguments(recipe, folder, device, steps=steps, decay_steps=decay_steps)
        set_seed(recipe.seed)
        model = make_model(recipe, tokenizer)
        if not arguments.use_cpu and is_flash_attn_2_available():
            model.set_attn_implementation(FLASH)
        trainer = SmeltTrainer(
            model=model,
            args=arguments,
            train_dataset=RowDataset(rows),
            eval_dataset=RowDataset(heldout),
            processing_class=tokenizer,  # every checkpoint has it: one can be probed as it is
            heldout=heldout,
            router_z_loss=training.router_z_loss,
            kept=_kept(recipe) if start is None else (),
            start=begin,
            watch=watch,
            compiled=training.compile,
            sharded=training.shard,
            callbacks=list(callbacks),
        )
        silence(trainer)
        main, train = trainer.is_world_process_zero(), step < steps  # else `final` alone is missing
        if checkpoint and train:
            _check_processes(checkpoint, arguments.world_size)
        if main:
            remove_cut_short(folder)
            forget_metrics_after(folder, step)
            if train and is_tensorboard_available():
                trainer.add_callback(_tensorboard(folder, step))
        trainer.accelerator.wait_for_everyone()
        if train:
            # Before hours are spent on what cannot be kept, and after what was cut short is gone.
            check_space(folder, bytes_of_checkpoint(model), "A checkpoint", begin)
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        if main:
            with full_disk_told(folder):
                save_final(tokenizer, folder / "final", run=folder, recipe=recipe)
        trainer.accelerator.wait_for_everyone()

    train_into(output, steps=training.total_steps, decay_steps=training.decay_steps, start=None)
    for step in training.branches:
        train_into(
            output / f"branch-{step}",
            steps=step + training.branch_steps,
            decay_steps=training.branch_steps,
            start=step,
        )
    return output / "final"


def make_model(recipe: Recipe, tokenizer: "PreTrainedTokenizerBase") -> SmeltForCausalLM:
    """A model to be trained, with weights drawn from torch's generator."""
    config = build_config(recipe, tokenizer)
    config.output_router_logits = True
    config.use_cache = False
    model = SmeltForCausalLM(config)
    model.router_aux_loss_coef = 0.0  # the Trainer has a loss of its own for it
    if (
        recipe.training.compile
    ):  # by layer: all of them take a compilation or two, the whole model minutes
        for layer in model.model.layers:
            layer.compile()
    return model


def save_final(
    tokenizer: "PreTrainedTokenizerBase",
    folder: Path,
    *,
    run: Path,
    recipe: Recipe,
) -> None:
    """Write the model of a run's last checkpoint for use, in bfloat16, with tokenizer, recipe and training curve."""
    model = SmeltForCausalLM.from_pretrained(last_checkpoint(run), dtype=torch.bfloat16)
    needed = 2 * sum(p.numel() for p in model.parameters())
    check_space(run, needed + BYTES_BESIDE, "The finished model")
    model.config.output_router_logits = False
    model.config.use_cache = True
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    (partial / "recipe.toml").write_text(recipe.text, encoding="utf-8")
    write_curve(run, partial / "training_curve.csv")
    for file in partial.iterdir():
        file.chmod(0o644)  # safetensors makes its file readable by its owner alone
    partial.rename(folder)


def sample_text(
    model: Any, tokenizer: "PreTrainedTokenizerBase", *, prompt: str, tokens: int, seed: int
) -> str:
    """`prompt` and up to `tokens` sampled tokens after it (temperature .8, top-p .95)."""
    ids = [tokenizer.bos_token_id, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]
    set_seed(seed)
    made = model.generate(
        torch.tensor([ids], device=model.device),
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
        max_new_tokens=tokens,
    )
    return str(tokenizer.decode(made[0], skip_special_tokens=True))


def make_arguments(
    recipe: Recipe, output: Path, device: str, *, steps: int, decay_steps: int
) -> TrainingArguments:
    """What the Trainer is told of a run of so many steps."""
    training = recipe.training
    cuda = device != "cpu" and torch.cuda.is_available()
    if device == "cuda" and not cuda:
        raise SmeltscopeError("--device cuda: PyTorch sees no CUDA device here.")
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    batches = training.accumulate * processes
    if recipe.batch_rows % batches:
        raise SmeltscopeError(
            f"A step's {recipe.batch_rows} rows cannot be shared among {processes} processes with "
            f"accumulate {training.accumulate}: batch_tokens / context must be a multiple of {batches}."
        )
    if training.shard and processes == 1:
        raise SmeltscopeError(
            "[training] shard spreads a model over several processes, and here is one: start them with torchrun "
            "--nproc-per-node N -m smeltscope smelt train RECIPE, or leave shard out."
        )
    arguments = TrainingArguments(
        output_dir=str(output),
        max_steps=steps,
        per_device_train_batch_size=recipe.batch_rows // batches,
        gradient_accumulation_steps=training.accumulate,
        train_sampling_strategy="sequential",  # the rows are in their order already
        remove_unused_columns=False,
        learning_rate=training.learning_rate,
        adam_beta2=0.95,
        weight_decay=training.weight_decay,
        warmup_steps=training.warmup_steps,
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": decay_steps, "decay_type": "1-sqrt"},
        activation_checkpointing=training.checkpoint_activations,
        ddp_backend="gloo" if processes > 1 and not cuda else None,
        ddp_find_unused_parameters=False,
        seed=recipe.seed,
        bf16=cuda,
        use_cpu=not cuda,
        dataloader_pin_memory=cuda,
        logging_steps=training.log_every,
        logging_nan_inf_filter=False,  # such a loss stops the run
        eval_strategy="steps",
        eval_steps=training.eval_every,
        save_steps=training.save_every,
        disable_tqdm=True,
        report_to="none",
    )
    if cuda:
        arguments._n_gpu = 1  # one process uses one device; transformers would split the batch
    return arguments


def _kept(recipe: Recipe) -> set[int]:
    """The steps of a run whose checkpoints stay."""
    training = recipe.training
    every = training.keep_every
    return {*training.branches, *(range(every, training.total_steps + 1, every) if every else ())}


def _start_of_branch(output: Path, step: int) -> Path:
    checkpoint = whole_checkpoints(output).get(step)
    if checkpoint is None:
        raise SmeltscopeError(
            f"[training] branches has {step}, but {output} holds no checkpoint of that step: a branch that is added "
            "later starts where one was kept (keep_every) or is among the two newest."
        )
    return checkpoint


def _check_processes(checkpoint: Path, processes: int) -> None:
    """Each process balances the routers within its own share of a step: another number computes something else."""
    before = processes_of(checkpoint)
    if before != processes:
        raise SmeltscopeError(
            f"{checkpoint} was written by {before} processes, and here are {processes}, which would compute something "
            f"else: go on with {before}."
        )


class _TensorBoard(TensorBoardCallback):
    """transformers' own, and for each execution a histogram of what its experts were given: i to i + 1 is expert i."""

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **given: Any
    ) -> None:
        numbers = {name: value for name, value in logs.items() if name != "expert_load"}
        for execution, load in zip(
            model.config.executions, logs.get("expert_load", ()), strict=False
        ):
            self.tb_writer.add_histogram_raw(
                f"expert_load/layer {execution.layer} visit {execution.visit}",
                min=0,
                max=len(load),
                num=sum(load),
                sum=sum((i + 0.5) * x for i, x in enumerate(load)),
                sum_squares=sum((i + 0.5) ** 2 * x for i, x in enumerate(load)),
                bucket_limits=range(1, len(load) + 1),
                bucket_counts=load,
                global_step=state.global_step,
            )
        super().on_log(args, state, control, logs=numbers, **given)


def _tensorboard(output: Path, step: int) -> TensorBoardCallback:
    """What was logged after `step`, where the run goes on, is hidden."""
    from torch.utils.tensorboard import SummaryWriter

    folder = str(output / "tensorboard")
    callback = _TensorBoard(SummaryWriter(folder, purge_step=step + 1))
    callback.logging_dir = folder
    return callback


def _check_vocabulary(config: SmeltConfig, *sets: Rows) -> None:
    for rows in sets:
        highest = int(rows.tokens.max())
        if highest >= config.vocab_size:
            raise SmeltscopeError(
                f"The rows hold token {highest}, but the vocabulary ends at "
                f"{config.vocab_size - 1}: they were made with another tokenizer."
            )
