"""`probe attention-sink`: run the probe, print its table, leave a run file and a page."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from smeltscope.commands.options import data_options, load_data, model_options, output_options
from smeltscope.errors import SmeltscopeError

if TYPE_CHECKING:
    import xarray as xr


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@model_options
@data_options
@click.option(
    "--include-first", is_flag=True, help="Count the first query, whose mass on itself is 1."
)
@output_options
@click.option(
    "--html",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also write a page with figures.",
)
def attention_sink(
    *,
    ckpt: str,
    visits: int | None,
    device: str,
    dtype: str,
    allow_pickle: bool,
    trust_remote_code: bool,
    batch_tokens: int,
    include_first: bool,
    seed: int,
    out: Path | None,
    force: bool,
    as_json: bool,
    quiet: bool,
    html: Path | None,
    **data: Any,
) -> None:
    """How much attention rests on a segment's first token, by layer, head and visit.

    Prints a table by execution and writes a run file (HDF5) with a row for each segment. Interrupted, the
    same command goes on at the first batch not done.
    """
    from rich.console import Console

    from smeltscope.activations import check_out, open_run
    from smeltscope.commands import show
    from smeltscope.dashboards import write_sink_page
    from smeltscope.model import load_checkpoint
    from smeltscope.probes import AttentionSink, RunOptions, run_probes
    from smeltscope.probes.attention_sink import summarize

    out = out or Path(f"attention-sink-{Path(ckpt).name}.h5")
    check_out(out, force=force)
    if html is not None:
        check_out(html, force=force, option="--html")
        if html.resolve() == out.resolve():
            raise SmeltscopeError(f"--html and --out both name {out}; give them different files.")
    log = Console(stderr=True, quiet=quiet, markup=False)
    checkpoint = load_checkpoint(
        ckpt,
        visits=visits,
        device=device,
        dtype=dtype,
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
    )
    heldout, max_length = load_data(checkpoint, **data)
    show.data(log, heldout)
    with show.progress(log) as on_progress:
        run_probes(
            checkpoint,
            heldout,
            [AttentionSink(include_first=include_first)],
            out,
            RunOptions(max_length=max_length, batch_tokens=batch_tokens, seed=seed),
            force=force,
            on_progress=on_progress,
        )
    run = open_run(out)
    summary = summarize(run, seed=seed)
    if html is not None:
        write_sink_page(run, summary, html)
    if as_json:
        show.as_json(summary)
    else:
        console = Console(markup=False)
        console.width = max(console.width, 80)  # narrower, numbers would be cut
        _print_table(console, summary, ckpt)
    log.print(f"Run file: {out}", soft_wrap=True, highlight=False)
    if html is not None:
        log.print(f"Page to open: {html.resolve()}", soft_wrap=True, highlight=False)


def _print_table(console: Any, summary: "xr.Dataset", ckpt: str) -> None:
    """One row for each execution, means over heads; narrow enough for 80 columns."""
    from rich.table import Table
    from rich.text import Text

    from smeltscope.commands.show import number, with_interval
    from smeltscope.probes.attention_sink import sentence

    looped = bool((summary["visit"] > 1).any())
    learned = bool(summary["learned_sink_mass"].notnull().any())
    title = Text(f"Attention on the first token: {ckpt}")
    table = Table(title=title, box=None, padding=(0, 1, 0, 0))
    columns = [
        "layer",
        "visit",
        "sink mass",
        "uni-\nform",
        "keys\n1-4",
        "heaviest\nkey",
        "sink\nrate",
    ]
    columns += ["learned\nsink"] if learned else []
    columns += ["change from\nvisit 1", "heads\nlower"] if looped else []
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True, vertical="bottom")
    for e in summary["execution"].values:
        row = summary.sel(execution=e)
        later = int(row["visit"]) > 1
        cells = [
            str(int(row["layer"])),
            str(int(row["visit"])),
            with_interval(row, "sink_mass_mean"),
            number(row["uniform"]),
            number(row["nearby_mass"].mean()),
            number(row["heaviest_mass"].mean()),
            number(row["sink_rate"].mean()),
        ]
        if learned:
            cells.append(number(row["learned_sink_mass"].mean()))
        if looped:
            lower = f"{int((row['change'] < 0).sum())}/{int(row['change'].notnull().sum())}"
            cells.append(with_interval(row, "change_mean", signed=True) if later else "")
            cells.append(lower if later else "")
        table.add_row(*cells, style="bold" if later else "")
    console.print(table)
    if summary["change_overall_low"].notnull() or summary["sink_mass_mean_low"].notnull().any():
        console.print("Means over heads, [95 % intervals] from resampling documents.", style="dim")
    console.print(sentence(summary), highlight=False)
