"""`probe report`: some runs as one HTML file, and through a browser as PDF or picture."""

from pathlib import Path

import click

from smeltscope.commands import terminal
from smeltscope.errors import SmeltscopeError


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument(
    "run_files", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The report. [default: named after the first run]",
)
@click.option(
    "--pdf",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also as PDF, through a Chromium that is installed.",
)
@click.option(
    "--png", type=click.Path(path_type=Path), metavar="FILE", help="Also as a picture, likewise."
)
@click.option("--force", is_flag=True, help="Replace files that exist.")
@click.option("-q", "--quiet", is_flag=True, help="No notes.")  # fmt: skip
def report(
    run_files: tuple[Path, ...],
    out: Path | None,
    pdf: Path | None,
    png: Path | None,
    force: bool,
    quiet: bool,
) -> None:
    """RUN files as one HTML file that needs no server: findings, figures, prompts, how it was measured."""
    from smeltscope.activations import check_out

    out = (
        Path(f"{run_files[0].name.removesuffix('.partial').removesuffix('.h5')}.html")
        if out is None
        else out
    )
    given = {"--out": out, "--pdf": pdf, "--png": png}
    wanted = {option: path for option, path in given.items() if path is not None}
    for option, path in wanted.items():
        check_out(path, force=force, option=option)
    paths = [path.resolve() for path in (*wanted.values(), *run_files)]
    if len(set(paths)) < len(wanted) + len({path.resolve() for path in run_files}):
        raise SmeltscopeError("--out, --pdf, --png and the runs need a file each.")
    from smeltscope.commands.pages import run_files_of
    from smeltscope.dashboards.browser import check_browser, write_pdf, write_png
    from smeltscope.dashboards.report import MOST_BYTES, write_report

    if pdf is not None or png is not None:
        check_browser()
    runs = run_files_of(run_files)
    troubles = [trouble for run in runs if (trouble := run.trouble()) is not None]
    if troubles:
        raise SmeltscopeError(
            f"{' '.join(troubles)} No report was written: mend these, or leave them out."
        )
    log = terminal.make_log(quiet=quiet)
    write_report(runs, out)
    log.print(f"Report: {out.resolve()}", soft_wrap=True)
    size = out.stat().st_size
    if size > MOST_BYTES:
        log.print(
            f"It has {size / 1e6:.1f} MB, more than {MOST_BYTES / 1e6:.0f}: its figures and tables fill it; give fewer runs.",
            soft_wrap=True,
        )
    if pdf is not None:
        log.print(f"PDF: {write_pdf(out, pdf).resolve()}", soft_wrap=True)
    if png is not None:
        log.print(f"PNG: {write_png(out, png).resolve()}", soft_wrap=True)
