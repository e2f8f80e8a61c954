"""`probe batch`: many diagnostics in one pass over the text, one forward for all of them."""

from typing import Any

import click

from smeltscope.commands import running, tables, terminal
from smeltscope.commands.options import (
    data_options,
    model_options,
    output_options,
    sampling_options,
)
from smeltscope.registry import PROBES, check_for_text, make_probe


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@model_options
@data_options
@sampling_options
@click.option("--probes", metavar="A,B", help="Which diagnostics, by name. [default: all]")
@output_options
def batch(*, probes: str | None, **given: Any) -> None:
    """Every diagnostic in one pass over the text, into one run file.

    Prints a table and a sentence for each. Interrupted, the same command goes on at the first batch not done. Several
    processes share the work under torchrun: torchrun --nproc-per-node 4 -m smeltscope probe batch ...
    """
    names = list(PROBES) if probes is None else [name.strip() for name in probes.split(",")]
    check_for_text(names)
    chosen = [make_probe(name) for name in dict.fromkeys(names)]
    from smeltscope.activations import check_out

    out = running.out_file("batch", **given)
    check_out(out, force=given["force"])
    log = terminal.make_log(quiet=given["quiet"])
    running.run(chosen, out, log, given)
    if not terminal.is_first_worker():
        return
    results = {
        probe.name: tables.result_of(running.open_result(out, probe), probe, seed=given["seed"])
        for probe in chosen
    }
    if given["as_json"]:
        terminal.print_json({name: terminal.as_json(r.summary) for name, r in results.items()})
    else:
        console, ckpt = terminal.make_output(), given["ckpt"]
        for name, result in results.items():
            tables.print_result(console, result, f"{name}: {ckpt}", brief=True)
    log.print(f"Run file: {out}", soft_wrap=True)
