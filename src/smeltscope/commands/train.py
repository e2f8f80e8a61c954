"""`smelt train`: make a checkpoint from a recipe.

smelt train model/checkpoints/smelt-tiny/recipe.toml --data FOLDER
"""

import errno
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from smeltscope.model.recipe import Recipe
    from smeltscope.model.rows import Rows

PIECE = 4_000_000  # characters tokenized in one call
SAMPLE_PROMPT = "The"


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
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
def train(recipe_file: Path, data: Path | None, out: Path | None, device: str, quiet: bool) -> None:
    """Train a model by RECIPE, a TOML file; the same command resumes a stopped run."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from smeltscope.errors import SmeltscopeError
    from smeltscope.model.loading import choose_device
    from smeltscope.model.recipe import load_recipe
    from smeltscope.model.rows import load_rows
    from smeltscope.model.smelt import SmeltForCausalLM
    from smeltscope.model.training import open_run, sample_text, train_model

    logging.disable_progress_bar()
    choose_device(device)
    recipe = load_recipe(recipe_file, data=data, output=out)
    output = open_run(recipe)
    try:
        if not (output / "rows.npz").exists():
            _prepare(recipe, output, quiet=quiet)
        tokenizer = AutoTokenizer.from_pretrained(output / "tokenizer")
        final = train_model(
            recipe,
            tokenizer=tokenizer,
            rows=load_rows(output / "rows.npz", "train"),
            heldout=load_rows(output / "rows.npz", "heldout"),
            device=device,
            callbacks=() if quiet else (_progress(),),
        )
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise SmeltscopeError(
            f"The disk is full: {output} could not be written; free some space and run the command again, "
            "it goes on from the last whole checkpoint."
        ) from error
    model = SmeltForCausalLM.from_pretrained(final, dtype="float32").eval()
    click.echo(f"model: {final}")
    click.echo(
        sample_text(model, tokenizer, prompt=SAMPLE_PROMPT, tokens=60, seed=recipe.seed).strip()
    )


def _prepare(recipe: "Recipe", output: Path, *, quiet: bool) -> None:
    """Make the tokenizer and the rows of a run, and keep them in its folder."""
    from smeltscope.errors import SmeltscopeError
    from smeltscope.model.loading import load_tokenizer
    from smeltscope.model.rows import cut_rows, save_rows, training_order
    from smeltscope.model.tokenizer import train_tokenizer
    from smeltscope.model.training import build_config

    def say(text: str) -> None:
        if not quiet:
            click.echo(text, err=True)

    say("reading the text")
    texts = _read(recipe.data.train)
    if recipe.tokenizer.path is not None:
        if not recipe.tokenizer.path.is_dir():
            raise SmeltscopeError(f"[tokenizer] path {recipe.tokenizer.path} is no folder.")
        tokenizer: PreTrainedTokenizerBase = load_tokenizer(recipe.tokenizer.path)
        if tokenizer is None:
            raise SmeltscopeError(f"[tokenizer] path {recipe.tokenizer.path} holds no tokenizer.")
    else:
        assert recipe.tokenizer.vocab_size is not None
        say("learning the tokenizer")
        tokenizer = train_tokenizer(
            _excerpt(texts, recipe.tokenizer.characters, recipe.seed),
            vocab_size=recipe.tokenizer.vocab_size,
            max_length=recipe.model.get("max_position_embeddings", recipe.data.context),
        )
    build_config(recipe, tokenizer)  # what is wrong with the model is told before the long part
    tokenizer.save_pretrained(output / "tokenizer")

    def chosen(texts: dict[str, list[str]], count: int) -> "Rows":
        rows = cut_rows(
            _tokenized(texts, tokenizer),
            context=recipe.data.context,
            start=tokenizer.bos_token_id,
            end=tokenizer.eos_token_id,
            pad=tokenizer.pad_token_id,
        )
        return rows.take(training_order(rows, count=count, seed=recipe.seed))

    say("tokenizing the training text")
    rows = chosen(texts, recipe.training.total_steps * recipe.batch_rows)
    texts.clear()
    say("tokenizing the held-out text")
    heldout_texts = _read(recipe.data.heldout)
    count = max(recipe.data.heldout_tokens // recipe.data.context, len(heldout_texts))
    save_rows(output / "rows.npz", train=rows, heldout=chosen(heldout_texts, count))


def _read(paths: tuple[Path, ...]) -> dict[str, list[str]]:
    """{category: the texts of its documents}, in the order of the files."""
    from smeltscope.errors import SmeltscopeError
    from smeltscope.tasks.files import documents, find_files, quiet_datasets

    texts: dict[str, list[str]] = {}
    files, _ = find_files(paths)
    with quiet_datasets():
        for file in files:
            for document in documents(file):
                if not isinstance(document.content, str):
                    raise SmeltscopeError(f"{file.path} holds tokens: training reads text.")
                texts.setdefault(document.category, []).append(document.content)
    return texts


def _excerpt(texts: dict[str, list[str]], characters: int, seed: int) -> Iterator[str]:
    """Whole documents of every category, drawn from `seed`, each category with the same share."""
    for category, members in texts.items():
        left = characters // len(texts)
        for text in random.Random(f"{seed} {category}").sample(members, len(members)):
            if left <= 0:
                break
            yield text[:left]
            left -= len(text)


def _tokenized(
    texts: dict[str, list[str]], tokenizer: "PreTrainedTokenizerBase"
) -> Iterator[tuple[str, Any]]:
    """(category, token ids) of every document, tokenized some at a time for speed."""
    for category, members in texts.items():
        begin = 0
        while begin < len(members):
            end, size = begin, 0
            while end < len(members) and size < PIECE:
                size += len(members[end])
                end += 1
            encoded = tokenizer(
                members[begin:end],
                add_special_tokens=False,
                return_attention_mask=False,
                verbose=False,
            )
            for ids in encoded["input_ids"]:
                yield category, ids
            begin = end


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
            if self.bar is not None:
                self.bar.close()
                self.bar = None

        def __init__(self) -> None:
            self.bar_values: dict[str, str] = {}

    return Progress()


SHOWN = ("loss", "heldout_loss", "tokens_per_second")
