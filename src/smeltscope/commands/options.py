"""Options that several commands share, and what they make of them."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from smeltscope.errors import SmeltscopeError

if TYPE_CHECKING:
    from smeltscope.model import Checkpoint
    from smeltscope.probes import RunOptions
    from smeltscope.tasks import HeldOut

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]  # what click.option gives

DEFAULT_MAX_LENGTH = 4096


class TokenCount(click.ParamType):
    """A number of tokens: 4096, 200k, 1M."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", value.replace("_", "").replace(",", ""))
        if match is None:
            self.fail(f"{value!r} is no number of tokens; write 4096, 200k or 1M.", param, ctx)
        count = round(float(match[1]) * {"": 1, "k": 1_000, "m": 1_000_000}[match[2].lower()])
        if count < 1:
            self.fail("at least one token is needed.", param, ctx)
        return count


def together(*options: Decorator) -> Decorator:
    """Several options as one decorator, in the order of --help."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


one_number_of_visits = click.option(
    "--visits", type=click.IntRange(0), metavar="N",
    help="Run a SMELT checkpoint or its Baseline with this many visits; 0 leaves the looped layers out.",
)  # fmt: skip


ckpt_option = click.option(
    "--ckpt", default="smelt-tiny", show_default=True, metavar="NAME",
    help="A checkpoint folder, a hub name (OWNER/NAME), or one of `probe list`.",
)  # fmt: skip


def make_model_options(visits: Decorator, ckpt: Decorator = ckpt_option) -> Decorator:
    """Which model, and how it runs; `visits` and `ckpt` are the options of these names."""
    return together(
        ckpt,
        visits,
        click.option(
            "--residual-scale", type=float, metavar="X",
            help="Scale what looped layers write by X. [default: as the checkpoint was trained]",
        ),
        click.option(
            "--untrained", is_flag=True,
            help="Random weights in the checkpoint's configuration: what the architecture does alone.",
        ),
        click.option(
            "--device", default="auto", show_default=True, metavar="auto|cpu|cuda",
            help="Where the model runs; auto takes a GPU if there is one.",
        ),
        click.option(
            "--dtype", type=click.Choice(["auto", "float32", "bfloat16"]), default="auto",
            show_default=True,
            help="Number type of the model; auto is float32 on the CPU, else the checkpoint's.",
        ),
        click.option(
            "--device-map", type=click.Choice(["auto"]),
            help="Spread the layers over all GPUs, and over main memory where they do not suffice.",
        ),
        click.option(
            "--tensor-parallel", is_flag=True,
            help="Split each layer over the processes that torchrun started, a GPU each.",
        ),
        click.option(
            "--allow-pickle", is_flag=True,
            help="Load pickled weights, which can run code; safetensors only by default.",
        ),
        click.option(
            "--trust-remote-code", is_flag=True, help="Run code that comes with the checkpoint."
        ),
    )  # fmt: skip


model_options = make_model_options(one_number_of_visits)
run_model_options = make_model_options(one_number_of_visits, ckpt=together())  # of many checkpoints


batch_tokens_option = click.option(
    "--batch-tokens", type=TokenCount(), default="8192", show_default=True, metavar="N",
    help="Tokens of one forward, padding included; bounds the memory.",
)  # fmt: skip


# Which text, and how it is cut.
data_options = together(
    click.option(
        "--data", multiple=True, metavar="PATH",
        help="Text to run on: .txt and .jsonl (also .gz, .xz, .zst, .bz2), .parquet, a datasets folder, token arrays "
        ".npy or .bin, or a folder of these; repeatable. [default: the shipped held-out text]",
    ),
    click.option(
        "--tokens", type=TokenCount(), metavar="N",
        help="How many tokens to run on, start tokens included: 200k, 1M. [default: all]",
    ),
    click.option(
        "--max-length", type=TokenCount(), metavar="N",
        help=f"The longest segment. [default: the model's context, at most {DEFAULT_MAX_LENGTH}]",
    ),
    click.option(
        "--no-bos", is_flag=True, help="Don't begin each segment with the start token."
    ),
    click.option(
        "--token-dtype", metavar="DTYPE", help="Number type of .bin token files: uint16, uint32."
    ),
    click.option(
        "--split-token", type=click.IntRange(0), metavar="ID",
        help="Token that parts the documents of token arrays. [default: start and end token]",
    ),
    batch_tokens_option,
)  # fmt: skip


# How much of it probes look at that would cost too much on all of it.
sampling_options = together(
    click.option(
        "--sampled-queries", type=click.IntRange(1), default=64, show_default=True, metavar="N",
        help="Queries of each segment whose whole attention rows are looked at.",
    ),
    click.option(
        "--sampled-tokens", type=click.IntRange(1), default=64, show_default=True, metavar="N",
        help="Tokens of each segment between whose vectors cosines are taken.",
    ),
)  # fmt: skip


# Where results go.
output_options = together(
    click.option(
        "--seed", type=click.IntRange(0), default=0, show_default=True,
        help="Seed of the samples and of the bootstrap.",
    ),
    click.option(
        "--out", type=click.Path(path_type=Path), metavar="FILE",
        help="The run file. [default: named after the probe and the checkpoint]",
    ),
    click.option("--force", is_flag=True, help="Replace files that exist."),
    click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON."),
    click.option("-q", "--quiet", is_flag=True, help="No progress and no notes."),
)  # fmt: skip


def load_model(
    *,
    ckpt: str,
    visits: int | None,
    residual_scale: float | None,
    untrained: bool,
    device: str,
    dtype: str,
    device_map: str | None,
    tensor_parallel: bool,
    allow_pickle: bool,
    trust_remote_code: bool,
    **_: Any,
) -> "Checkpoint":
    """The checkpoint that the model options ask for."""
    from smeltscope.model import load_checkpoint

    return load_checkpoint(
        ckpt,
        visits=visits,
        residual_scale=residual_scale,
        untrained=untrained,
        device=device,
        dtype=dtype,
        device_map=device_map,
        tensor_parallel=tensor_parallel,
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
    )


def load_data(
    checkpoint: "Checkpoint",
    *,
    data: tuple[str, ...] = (),
    tokens: int | None = None,
    max_length: int | None = None,
    no_bos: bool = False,
    token_dtype: str | None = None,
    split_token: int | None = None,
    **_: Any,
) -> tuple["HeldOut", int]:
    """The held-out text that the data options ask for, and the longest segment."""
    from smeltscope.tasks import SpecialTokens, load_heldout, shipped_heldout

    if max_length is None:
        max_length = min(checkpoint.context, DEFAULT_MAX_LENGTH)
    elif max_length > checkpoint.context:
        raise SmeltscopeError(
            f"--max-length {max_length} exceeds the context of {checkpoint.name}; give {checkpoint.context} or less."
        )
    config = checkpoint.model.config.get_text_config(decoder=True)
    special = SpecialTokens(
        bos_token_id=config.bos_token_id, eos_token_id=_first(config.eos_token_id)
    )
    embeddings: Any = checkpoint.model.get_input_embeddings()
    heldout = load_heldout(
        list(data) or shipped_heldout(),
        checkpoint.tokenizer or special,
        tokens=tokens,
        max_length=max_length,
        bos=not no_bos,
        vocab_size=embeddings.weight.shape[0],
        token_dtype=token_dtype,
        split_token=split_token,
    )
    return heldout, max_length


def run_options(
    *,
    max_length: int,
    batch_tokens: int,
    seed: int,
    sampled_queries: int,
    sampled_tokens: int,
    **_: Any,
) -> "RunOptions":
    """How the run goes over its data."""
    from smeltscope.probes import RunOptions

    return RunOptions(
        max_length=max_length,
        batch_tokens=batch_tokens,
        seed=seed,
        sampled_queries=sampled_queries,
        sampled_tokens=sampled_tokens,
    )


def _first(token: int | list[int] | None) -> int | None:
    """A configuration may list several end tokens."""
    return token[0] if isinstance(token, list) else token
