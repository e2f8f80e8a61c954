"""`probe show`: what a run file holds, in the tables of the command that made it."""

import inspect
from pathlib import Path
from typing import TYPE_CHECKING

import click

from smeltscope.commands import tables, terminal
from smeltscope.errors import SmeltscopeError
from smeltscope.registry import ALL_PROBES, make_probe, probes_of, recorded_probe

if TYPE_CHECKING:
    import xarray as xr
    from rich.console import Console


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run_file", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--probe", "name", metavar="NAME", help="Only this diagnostic. [default: all]")
@click.option(
    "--csv", "as_csv", is_flag=True,
    help="Every number, one a line: probe, quantity, coordinates, value, ends of its interval.",
)  # fmt: skip
def show(run_file: Path, name: str | None, as_csv: bool) -> None:
    """The tables of RUN, a run file, finished or still being written."""
    from smeltscope.activations import attributes_of, open_run

    unfinished = run_file.with_name(run_file.name + ".partial")
    if unfinished.exists() and not run_file.exists():
        run_file = unfinished
    run = _only_done(open_run(run_file, lazy=True), run_file)
    names = probes_of(run)
    if name is not None and name not in names:
        make_probe(name)  # a name that nobody knows is refused as such
        raise SmeltscopeError(f"{run_file} holds no {name}; it holds {', '.join(names)}.")
    if name is not None:
        names = [name]
    attributes = attributes_of(run)
    seed = int(attributes["identity"]["seed"])
    known = [n for n in names if n in ALL_PROBES]
    results = {n: tables.result_of(run, recorded_probe(run, n), seed=seed) for n in known}
    if as_csv:
        tables.print_csv({n: result.summary for n, result in results.items()})
        return
    console = terminal.make_output()
    for n in names:
        title = f"{n}: {attributes['checkpoint']}"
        if n in results:
            tables.print_result(console, results[n], title)
        else:
            _print_unknown(console, run[n.replace("-", "_")].dataset, title)


def _only_done(run: "xr.DataTree", run_file: Path) -> "xr.DataTree":
    """The segments that have been run; says how many those are where some are missing."""
    done = run["segments"].dataset["done"].values == 1
    if done.all():
        return run
    if not done.any():
        raise SmeltscopeError(f"{run_file} has no segment yet; look again in a while.")
    terminal.make_log(quiet=False).print(
        f"Unfinished: {done.sum():,} of {len(done):,} segments are done, the longest first.",
        soft_wrap=True,
    )
    return run.isel(segment=done.nonzero()[0])


def _print_unknown(console: "Console", group: "xr.Dataset", title: str) -> None:
    """A diagnostic of another version, or of somebody else: what its file says of itself."""
    console.print(title, style="bold", soft_wrap=True)
    console.print("This smeltscope has no such diagnostic; the file says of it:")
    console.print(inspect.cleandoc(str(group.attrs.get("definition", ""))), style="dim")
    for name, array in group.data_vars.items():
        described = f": {array.attrs['description']}" if "description" in array.attrs else ""
        console.print(f"{name} ({', '.join(map(str, array.dims))}){described}", soft_wrap=True)
