"""`smelt match`: looped configurations that cost what a Baseline costs.

smelt match baseline-tiny --head-size 32 --out smelt.toml
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from smeltscope.commands.info import describe, length_of
from smeltscope.commands.options import TokenCount
from smeltscope.commands.terminal import make_output, number, print_json
from smeltscope.errors import SmeltscopeError

if TYPE_CHECKING:
    from smeltscope.model.matching import Match


class Span(click.ParamType):
    """Layers from the first to the one behind the last, as loop_start and loop_stop: 2:6."""

    name = "span"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        match = re.fullmatch(r"(\d+):(\d+)", value)
        if match is None or int(match[1]) >= int(match[2]):
            self.fail(f"{value!r} is no span of layers; 2:6 is layers 2, 3, 4 and 5.", param, ctx)
        return int(match[1]), int(match[2])


size = click.IntRange(1)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("baseline", metavar="BASELINE")
@click.option(
    "--visits",
    type=click.IntRange(2),
    default=2,
    show_default=True,
    metavar="N",
    help="How often the span runs.",
)
@click.option(
    "--span",
    type=Span(),
    metavar="A:B",
    help="The looped layers, from A to before B. [default: the middle half]",
)
@click.option("--width", type=size, metavar="N", help="Fix the width of the residual stream.")
@click.option("--experts", type=size, metavar="N", help="Fix the number of experts of a layer.")
@click.option("--expert-width", type=size, metavar="N", help="Fix the width of an expert.")
@click.option("--head-size", type=size, metavar="N", help="Fix the size of an attention head.")
@click.option(
    "--gqa", "gqa_ratio", type=size, metavar="N", help="Fix the query heads for each K/V head."
)
@click.option(
    "--document-length",
    type=TokenCount(),
    metavar="N",
    help="Tokens that attention reaches back over: the length of documents. [default: the context]",
)
@click.option(
    "--most",
    type=size,
    default=10,
    show_default=True,
    metavar="N",
    help="How many are listed at most.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the first as the [model] table of a recipe.",
)
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")  # fmt: skip
def match(
    baseline: str,
    visits: int,
    span: tuple[int, int] | None,
    document_length: int | None,
    most: int,
    out: Path | None,
    force: bool,
    as_json: bool,
    **fixed: int | None,
) -> None:
    """Looped configurations with the parameters, FLOPs and KV cache of BASELINE, by mismatch.

    BASELINE is named as for `smelt info`. What is not fixed by an option is searched on multiples of 8.
    """
    from smeltscope.model.budgets import has_sizes
    from smeltscope.model.config_files import load_config, model_table
    from smeltscope.model.matching import TOLERANCES, Choices, find_matches

    if out is not None and out.exists() and not force:
        raise SmeltscopeError(f"{out} exists; name another file, or give --force to replace it.")
    config = load_config(baseline)
    if config.model_type != "smelt":
        raise SmeltscopeError(
            f"{baseline} is a {config.model_type}; a match begins with a Baseline, a SMELT configuration of one visit."
        )
    if not has_sizes(config):
        raise SmeltscopeError(
            f"{baseline} has a sliding window, whose FLOPs and cache are not counted: match a configuration without one."
        )
    length = length_of(config, document_length)
    matches = find_matches(
        config,
        visits=visits,
        span=span,
        document_length=length,
        fixed=Choices(**fixed),
        most=most,
    )
    if out is not None:
        _write(out, matches[0], baseline=baseline, length=length)
    if as_json:
        entries = [
            {"model": model_table(m.config), "excess": m.excess, "mismatch": m.mismatch}
            for m in matches
        ]
        print_json({"baseline": baseline, "document_length": length, "matches": entries})
        return
    _print(matches, f"{baseline}: {describe(config)}", length, TOLERANCES)
    if out is not None:
        click.echo(f"The first is written to {out}.", err=True)


def _print(matches: list["Match"], title: str, length: int, tolerances: dict[str, float]) -> None:
    from rich.table import Table

    console = make_output()
    console.print(title, soft_wrap=True)
    loop = matches[0].config
    console.print(
        f"Layers {loop.span.start} to {loop.span.stop - 1} run {loop.num_visits} times, {len(loop.executions)} "
        f"executions; documents of {length} tokens."
    )
    table = Table(box=None, padding=(0, 1, 0, 0))
    sizes = {
        "width": "hidden_size",
        "heads": "num_attention_heads",
        "K/V heads": "num_key_value_heads",
        "head size": "head_dim",
        "experts": "num_experts",
        "expert width": "moe_intermediate_size",
    }
    for header in (*sizes, "FLOPs %", "parameters %", "cache %", "mismatch"):
        table.add_column(header.replace(" ", "\n"), justify="right", vertical="bottom")
    for found in matches:
        chosen = [str(getattr(found.config, field)) for field in sizes.values()]
        shares = [f"{100 * found.excess[name]:+.2f}" for name in tolerances]
        table.add_row(*chosen, *shares, number(found.mismatch))
    console.print(table)
    limits = " / ".join(f"{100 * most:.0f}" for most in tolerances.values())
    console.print(
        f"Mismatch: the largest difference as a share of what is tolerated, {limits} % of FLOPs / parameters / cache."
    )
    if matches[0].mismatch > 1:
        console.print("None lies within these: free a choice, or take the nearest.")


def _write(out: Path, match: "Match", *, baseline: str, length: int) -> None:
    from smeltscope.model.config_files import model_table, write_table

    flops, parameters, cache = (f"{100 * share:+.2f} %" for share in match.excess.values())
    comment = (
        f"# Matched with {baseline} for documents of {length} tokens: training FLOPs {flops}, parameters\n"
        f"# {parameters}, KV cache {cache}. A recipe of `smelt train` takes this table as it is.\n"
    )
    try:
        out.write_text(comment + write_table(model_table(match.config)), encoding="utf-8")
    except OSError as error:
        raise SmeltscopeError(f"{out} cannot be written: {error.strerror}.") from error
