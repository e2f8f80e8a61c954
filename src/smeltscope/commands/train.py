"""`smelt train`: make a checkpoint from a recipe.

smelt train model/checkpoints/smelt-tiny/recipe.toml --data FOLDER
"""

import sys
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

SAMPLE_PROMPT = "The"
SLOW = 0.95  # of what transformers' model reaches: a note says so


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("recipe_file", metavar="RECIPE", type=click.Path(path_type=Path))
@click.option("--data", type=click.Path(path_type=Path), help="Folder of the recipe's text files.")
@click.option("--out", type=click.Path(path_type=Path), help="Output folder, not the recipe's.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Where the model is trained; auto takes a GPU if there is one.",
)
@click.option(
    "--measure",
    is_flag=True,
    help="First measure tokens per second, beside transformers' Qwen3-MoE of the same size.",
)
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
def train(
    recipe_file: Path, data: Path | None, out: Path | None, device: str, measure: bool, quiet: bool
) -> None:
    """Train a model by RECIPE, a TOML file; the same command resumes a stopped run."""
    from accelerate import PartialState
    from transformers import AutoTokenizer
    from transformers.integrations import is_tensorboard_available
    from transformers.utils import logging

    from smeltscope.commands.prepare import prepare, sizes_of_text
    from smeltscope.commands.sinks import watch_sinks
    from smeltscope.model.loading import choose_device
    from smeltscope.model.recipe import load_recipe
    from smeltscope.model.rows import load_rows
    from smeltscope.model.run_folder import check_sizes, full_disk_told, open_run
    from smeltscope.model.smelt import SmeltForCausalLM
    from smeltscope.model.speed import measure_speed
    from smeltscope.model.training import sample_text, train_model

    logging.disable_progress_bar()
    # Several under torchrun; the others wait while the first one makes the rows.
    processes = PartialState(cpu=choose_device(device) == "cpu", timeout=timedelta(days=1))
    recipe = load_recipe(recipe_file, data=data, output=out)
    output = recipe.training.output
    quiet = quiet or not processes.is_main_process
    with full_disk_told(output), closing(_progress()) as progress:
        if processes.is_main_process:
            open_run(recipe)
            if (output / "rows.npz").exists():
                check_sizes(output, sizes_of_text(recipe))
            else:
                prepare(recipe, output, quiet=quiet)
        processes.wait_for_everyone()
        tokenizer = AutoTokenizer.from_pretrained(output / "tokenizer")
        rows = load_rows(output / "rows.npz", "train")
        heldout = load_rows(output / "rows.npz", "heldout")
        if not is_tensorboard_available() and not quiet:
            click.echo(
                "Metrics go to metrics.jsonl alone: for TensorBoard, pip install tensorboard.",
                err=True,
            )
        if measure:
            speed = measure_speed(recipe, tokenizer=tokenizer, rows=rows, device=device)
            if processes.is_main_process:
                click.echo(
                    f"speed: {speed.ours:.0f} tokens/s, {speed.ratio:.2f} x transformers' Qwen3-MoE "
                    f"of the same size ({speed.qwen3_moe:.0f})"
                )
                if speed.ratio < SLOW:
                    click.echo(
                        f"note: less than {SLOW} x; a busy machine can do that, so measure again on a quiet one.",
                        err=True,
                    )
        final = train_model(
            recipe,
            tokenizer=tokenizer,
            rows=rows,
            heldout=heldout,
            device=device,
            callbacks=() if quiet else (progress,),
            watch=watch_sinks(heldout),
        )
    if not processes.is_main_process:
        return
    model = SmeltForCausalLM.from_pretrained(final, dtype="float32").eval()
    click.echo(f"model: {final}")
    click.echo(
        sample_text(model, tokenizer, prompt=SAMPLE_PROMPT, tokens=60, seed=recipe.seed).strip()
    )


def _progress() -> Any:
    """A bar on a terminal; elsewhere a line for each logged step, on standard error too."""
    from tqdm import tqdm
    from transformers import TrainerCallback

    class Progress(TrainerCallback):
        bar: Any = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if sys.stderr.isatty():
                self.bar = tqdm(
                    total=state.max_steps, initial=state.global_step, unit="step", file=sys.stderr
                )

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.bar is not None:
                self.bar.update(state.global_step - self.bar.n)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            shown = {k: f"{v:.4g}" for k, v in logs.items() if k in SHOWN}
            if self.bar is not None:
                self.bar.set_postfix({**self.bar_values, **shown})
                self.bar_values.update(shown)
            elif shown:
                line = "  ".join(f"{k} {v}" for k, v in shown.items())
                click.echo(f"step {state.global_step}/{state.max_steps}  {line}", err=True)

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.close()

        def close(self) -> None:
            # also where training fails: what is told then begins a line of its own
            if self.bar is not None:
                self.bar.close()
                self.bar = None

        def __init__(self) -> None:
            self.bar_values: dict[str, str] = {}

    return Progress()


SHOWN = ("loss", "heldout_loss", "tokens_per_second")
