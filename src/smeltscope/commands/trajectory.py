"""`probe trajectory`: diagnostics of many checkpoints of one training, over the same text."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from smeltscope.commands import running, tables, terminal
from smeltscope.commands.options import data_options, run_model_options, sampling_options
from smeltscope.errors import SmeltscopeError
from smeltscope.registry import check_for_text, make_probe, recorded_probe

if TYPE_CHECKING:
    import xarray as xr

DEFAULT = "attention-sink,router-overlap,residual-updates,loss"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("folder", metavar="RUN_FOLDER", type=click.Path(path_type=Path))
@run_model_options
@data_options
@sampling_options
@click.option(
    "--probes", metavar="A,B", default=DEFAULT, show_default=True,
    help="Which diagnostics, by name.",
)  # fmt: skip
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True,
    help="Seed of the samples and of the bootstrap.",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="FOLDER",
    help="Folder of the run files, one for each checkpoint. [default: trajectory in RUN_FOLDER]",
)  # fmt: skip
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also as curves: one HTML file.",
)
@click.option("--force", is_flag=True, help="Replace files that exist.")
@click.option(
    "--csv", "as_csv", is_flag=True,
    help="Every number, one a line, in place of the tables: probe, quantity, step and other coordinates, value, ends of its interval.",
)  # fmt: skip
@click.option("-q", "--quiet", is_flag=True, help="No progress and no notes.")
def trajectory(
    *,
    folder: Path,
    probes: str,
    out: Path | None,
    report: Path | None,
    as_csv: bool,
    quiet: bool,
    **given: Any,
) -> None:
    """How the diagnostics develop over a training: RUN_FOLDER is the output folder of `smelt train`.

    Every whole checkpoint in it is run over the same text (by default the first 50,000 tokens of the shipped one), each into a run file
    `step-N.h5`; `keep_every` of the recipe says which checkpoints stay. Interrupted, the same command goes on; later it adds the
    checkpoints that are new.
    """
    names = list(dict.fromkeys(name.strip() for name in probes.split(",")))
    check_for_text(names)
    chosen = [make_probe(name) for name in names]
    from smeltscope.activations import check_out, open_run
    from smeltscope.probes.trajectory import trajectory as along_steps

    found = checkpoints_of(folder)
    if report is not None:
        check_out(report, force=given["force"], option="--report")
    out = out or folder / "trajectory"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SmeltscopeError(
            f"The folder {out} cannot be made ({error.strerror}): give --out another."
        ) from error
    log = terminal.make_log(quiet=quiet)
    given |= {"tokens": given["tokens"] or 50_000}
    text = None
    for step, checkpoint in found.items():
        log.print(f"step {step:,}")
        text, _ = running.run(
            chosen, out / f"step-{step}.h5", log, {**given, "ckpt": str(checkpoint)}, text, reuse=True
        )  # fmt: skip
    if not terminal.is_first_worker():
        return
    runs = {step: open_run(out / f"step-{step}.h5") for step in found}

    def summary_of(name: str, mean_over: tuple[str, ...]) -> "xr.Dataset":
        return along_steps(
            runs, lambda run: recorded_probe(run, name), mean_over=mean_over, seed=given["seed"]
        )

    if report is not None:
        from smeltscope.dashboards.report import render_trajectory, write_page

        title = f"{folder.resolve().name}: {len(runs)} checkpoints"
        write_page(report, render_trajectory({n: summary_of(n, ()) for n in names}, title))
        log.print(f"Report: {report.resolve()}", soft_wrap=True)
    if as_csv:
        tables.print_csv({name: summary_of(name, ()) for name in names})
        return
    console = terminal.make_output()
    for name in names:
        console.print(name, style="bold")
        summary = summary_of(name, tables.HEADS + tables.ROWS)
        for table in tables.tables_of(summary, name)[:1]:
            tables.print_table(console, summary, table.columns)
        console.print()
    console.print(
        "Means over heads and layers, with 95 % intervals over documents; all: --csv.", style="dim"
    )
    log.print(f"Run files: {out}/step-N.h5", soft_wrap=True)


def checkpoints_of(folder: Path) -> dict[int, Path]:
    """{step: folder} of the whole checkpoints that a training left, in the order of steps."""
    from smeltscope.model.run_folder import whole_checkpoints

    if not folder.is_dir():
        raise SmeltscopeError(f"{folder} is no folder: name the output folder of a training.")
    found = whole_checkpoints(folder)
    if found:
        return found
    if re.fullmatch(r"checkpoint-\d+", folder.name) or (folder / "config.json").exists():
        raise SmeltscopeError(
            f"{folder} is a single checkpoint: name the folder of the training, or use probe batch."
        )
    raise SmeltscopeError(
        f"{folder} holds no checkpoint of smelt train (checkpoint-N, written to the end): name its output "
        "folder, after the first save."
    )
