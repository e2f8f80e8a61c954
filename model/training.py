"""Training a SMELT on rows of tokens with transformers' Trainer.

`train_model` is the whole of it: it resumes from the last whole checkpoint of its output folder,
writes metrics there as JSON lines, and leaves the finished model in `final`.
"""

import csv
import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from smeltscope.errors import SmeltscopeError
from smeltscope.model.configuration import SmeltConfig
from smeltscope.model.recipe import Recipe, same_recipe
from smeltscope.model.rows import Rows
from smeltscope.model.smelt import SmeltForCausalLM
from smeltscope.model.trainer import RowDataset, RunFolder, SmeltTrainer, last_checkpoint

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


def open_run(recipe: Recipe) -> Path:
    """The output folder of a recipe, made if it is missing.

    Raises SmeltscopeError when it holds something else, or a run of another recipe.
    """
    output = recipe.training.output
    kept = output / "recipe.toml"
    if output.exists() and not output.is_dir():
        raise SmeltscopeError(f"{output} is a file: name a folder for the output.")
    begun = (output / "rows.npz").exists()  # before that, nothing would be lost
    if begun and kept.exists():
        if not same_recipe(kept.read_text(encoding="utf-8"), recipe.text):
            raise SmeltscopeError(
                f"{output} holds a run of another recipe: give --out another folder, or remove it."
            )
        return output
    if not kept.exists() and output.exists() and any(output.iterdir()):
        raise SmeltscopeError(f"{output} is not empty and holds no run: give --out a new folder.")
    try:
        output.mkdir(parents=True, exist_ok=True)
        partial = output.with_name(f"{output.name}.recipe.partial")
        partial.write_text(recipe.text, encoding="utf-8")
        partial.rename(kept)
    except OSError as error:
        raise SmeltscopeError(
            f"The output folder {output} cannot be made or written ({error.strerror}): give --out another."
        ) from error
    return output


def train_model(
    recipe: Recipe,
    *,
    tokenizer: "PreTrainedTokenizerBase",
    rows: Rows,
    heldout: Rows,
    device: str = "auto",
    callbacks: tuple[TrainerCallback, ...] = (),
) -> Path:
    """Train on `rows`, in their order, to the end of the recipe; returns the folder of the model.

    The folder comes from `open_run`. A run that was interrupted goes on from its last whole
    checkpoint, and computes what it would have computed without the interruption. `device` is
    auto, cpu or cuda; on CUDA the forward is computed in bfloat16, elsewhere in float32.
    Raises SmeltscopeError when the loss is no longer a number.
    """
    output, final = recipe.training.output, recipe.training.output / "final"
    if final.exists():
        return final
    config = build_config(recipe, tokenizer)
    _check_vocabulary(config, rows, heldout)
    config.output_router_logits = True  # every execution's router is in the load-balancing loss
    config.use_cache = False
    set_seed(recipe.seed)
    model = SmeltForCausalLM(config)
    trainer = SmeltTrainer(
        model=model,
        args=_arguments(recipe, device),
        train_dataset=RowDataset(rows),
        eval_dataset=RowDataset(heldout),
        heldout=heldout,
        callbacks=[RunFolder(output), *callbacks],
    )
    for noisy in (PrinterCallback, ProgressCallback):  # they print metrics among the results
        trainer.remove_callback(noisy)
    checkpoint = last_checkpoint(output, remove_cut_short=True)
    _forget_metrics_after(output, int(checkpoint.name.split("-")[1]) if checkpoint else 0)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    trainer.evaluate()
    save_final(model, tokenizer, final, run=output)
    return final


def save_final(
    model: SmeltForCausalLM, tokenizer: "PreTrainedTokenizerBase", folder: Path, *, run: Path
) -> None:
    """Write a model for use, in bfloat16, with its tokenizer, recipe and training curve.

    `run` is the output folder of the training. The model is changed: its weights are rounded.
    """
    model.config.output_router_logits = False
    model.config.use_cache = True
    model.bfloat16()
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    shutil.copy(run / "recipe.toml", partial / "recipe.toml")
    _write_curve(run / "metrics.jsonl", partial / "training_curve.csv")
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


def _arguments(recipe: Recipe, device: str) -> TrainingArguments:
    training = recipe.training
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise SmeltscopeError("smelt train runs on one device: start it without torchrun.")
    cuda = device != "cpu" and torch.cuda.is_available()
    if device == "cuda" and not cuda:
        raise SmeltscopeError("--device cuda: PyTorch sees no CUDA device here.")
    arguments = TrainingArguments(
        output_dir=str(training.output),
        max_steps=training.total_steps,
        per_device_train_batch_size=recipe.batch_rows,
        train_sampling_strategy="sequential",  # the rows are in their order already
        learning_rate=training.learning_rate,
        adam_beta2=0.95,
        weight_decay=training.weight_decay,
        warmup_steps=training.warmup_steps,
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": training.decay_steps, "decay_type": "1-sqrt"},
        seed=recipe.seed,
        bf16=cuda,
        use_cpu=not cuda,
        dataloader_pin_memory=cuda,
        logging_steps=training.log_every,
        eval_strategy="steps",
        eval_steps=training.eval_every,
        save_steps=training.save_every,
        save_total_limit=2,
        disable_tqdm=True,
        report_to="none",
    )
    if cuda:
        arguments._n_gpu = 1  # one process uses one device; transformers would split the batch
    return arguments


def _check_vocabulary(config: SmeltConfig, *sets: Rows) -> None:
    for rows in sets:
        highest = int(rows.tokens.max())
        if highest >= config.vocab_size:
            raise SmeltscopeError(
                f"The rows hold token {highest}, but the vocabulary ends at "
                f"{config.vocab_size - 1}: they were made with another tokenizer."
            )


def _forget_metrics_after(output: Path, step: int) -> None:
    """Drop the lines that a resumed run will write again, and one that a kill cut short."""
    path = output / "metrics.jsonl"
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except ValueError:
            continue
    path.write_text("".join(kept))


def _write_curve(metrics: Path, path: Path) -> None:
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    columns = list(dict.fromkeys(key for line in lines for key in line))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(lines)
