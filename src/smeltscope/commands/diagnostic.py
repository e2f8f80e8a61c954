"""`probe attention-sink`, `probe router-overlap`, ...: one diagnostic, its table and its run file."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from smeltscope.commands import running, tables, terminal
from smeltscope.commands.baseline import Baseline, print_profile
from smeltscope.commands.options import (
    Decorator,
    data_options,
    make_model_options,
    one_number_of_visits,
    output_options,
    sampling_options,
    together,
)
from smeltscope.errors import SmeltscopeError
from smeltscope.registry import PROBES, make_probe

if TYPE_CHECKING:
    import xarray as xr

    from smeltscope.probes import Probe


class Visits(click.ParamType):
    """One number of visits, 2, or several, 0..4."""

    name = "visits"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | tuple[int, ...]:
        match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", str(value))
        if match is None or int(match[1]) > int(match[2] or match[1]):
            self.fail(f"{value!r} is no number of visits; write 2, or 0..4.", param, ctx)
        first, last = int(match[1]), match[2]
        return first if last is None else tuple(range(first, int(last) + 1))


SWEEP = click.option(
    "--visits", type=Visits(), metavar="N|0..N",
    help="Run with this many visits; 0..4 measures the loss with each of these numbers.",
)  # fmt: skip

INCLUDE_FIRST = click.option(
    "--include-first", is_flag=True,
    help="Count the first token of a segment, which is special in many models.",
)  # fmt: skip

# What the command of a probe has beside the options of all. Options named like a field of the probe are given to it.
OWN_OPTIONS: dict[str, Decorator] = {
    "router-overlap": INCLUDE_FIRST,
    "residual-updates": INCLUDE_FIRST,
    "qkv-similarity": INCLUDE_FIRST,
    "attention-sink": together(
        click.option(
            "--include-first", is_flag=True,
            help="Count the first query, whose mass on itself is 1.",
        ),
        click.option(
            "--baseline", metavar="NAME|RUN",
            help="A checkpoint to run over the same data, or its run file: compared by layer and depth. "
            "[default: baseline-tiny for smelt-tiny]",
        ),
        click.option(
            "--html", type=click.Path(path_type=Path), metavar="FILE",
            help="Also write a page with figures.",
        ),
    ),
}  # fmt: skip


def diagnostic(name: str) -> click.Command:
    """The command of a probe."""

    @click.command(
        name,
        help=f"""{PROBES[name][1]}

        Prints a table and writes a run file (HDF5) with a row for each segment. Interrupted, the same
        command goes on at the first batch not done.""",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    @make_model_options(SWEEP if name == "loss" else one_number_of_visits)
    @data_options
    @sampling_options
    @OWN_OPTIONS.get(name, together())
    @output_options
    def command(**given: Any) -> None:
        _run(name, given)

    return command


def _run(name: str, given: dict[str, Any]) -> None:
    from smeltscope.activations import check_out

    out, html, force = running.out_file(name, **given), given.get("html"), given["force"]
    baseline = Baseline.of_options(out, **given) if "baseline" in given else None
    # Interrupted in the Baseline's run, the command finds its own finished.
    reuse = baseline is not None and not baseline.file.exists() and not force
    if not reuse:
        check_out(out, force=force)
    if baseline is not None and not baseline.is_given:
        check_out(baseline.file, force=force)
    if html is not None:
        check_out(html, force=force, option="--html")
        if html.resolve() == out.resolve():
            raise SmeltscopeError(f"--html and --out both name {out}; give them different files.")
    options = {option: given[option] for option in make_probe(name).options() if option in given}
    if isinstance(options.get("visits"), tuple):  # a sweep is the probe's: the model runs as it is
        given["visits"] = None
    else:
        options.pop("visits", None)
    probe = make_probe(name, **options)
    log = terminal.make_log(quiet=given["quiet"])
    text = running.run([probe], out, log, given, reuse=reuse)
    if baseline is not None:
        baseline.run(probe, log, given, text)
    if not terminal.is_first_worker():
        return
    _report(running.open_result(out, probe), out, probe, given, baseline)
    log.print(f"Run file: {out}", soft_wrap=True)
    if html is not None:
        log.print(f"Page to open: {html.resolve()}", soft_wrap=True)


def _report(
    run: "xr.DataTree", out: Path, probe: "Probe", given: dict[str, Any], baseline: Baseline | None
) -> None:
    result = tables.result_of(run, probe, seed=given["seed"])
    profile = None
    if baseline is not None:
        profile = baseline.profile(run, result.summary, seed=given["seed"])
    if given.get("html") is not None:
        from smeltscope.commands.pages import run_files_of
        from smeltscope.dashboards.report import write_report

        files = [out] if baseline is None else [out, baseline.file]
        write_report(run_files_of(files), given["html"], probes=[probe.name])
    if given["as_json"]:
        beside = {} if profile is None else {"depth_profile": terminal.as_json(profile)}
        terminal.print_json(terminal.as_json(result.summary) | beside)
        return
    console = terminal.make_output()
    tables.print_result(console, result, f"{probe.name}: {given['ckpt']}")
    if baseline is not None and profile is not None:
        print_profile(console, profile, baseline.name)
