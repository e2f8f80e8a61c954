"""`probe dyck-state`: what of the brackets' state can be read from the residual stream, at each execution."""

import os
from typing import Any

import click

from smeltscope.commands import running, tables, terminal
from smeltscope.commands.dyck import (
    make_prompt_options,
    make_prompts,
    options_of_run,
)
from smeltscope.commands.options import (
    batch_tokens_option,
    load_model,
    model_options,
    output_options,
)
from smeltscope.errors import SmeltscopeError
from smeltscope.registry import make_probe

ITEMS = 150


@click.command("dyck-state", context_settings={"help_option_names": ["-h", "--help"]})
@model_options
@make_prompt_options(items=str(ITEMS), shots="4", seeds=1)
@batch_tokens_option
@output_options
def dyck_state(**given: Any) -> None:
    """What of the brackets' state linear probes read from the residual stream at each execution.

    Depth, the type on top of the stack, how far back it was opened, and what closes it, on items that the probes
    were not fitted on; beside a control task, the commonest class, and what the token alone says.
    """
    from smeltscope.activations import check_out
    from smeltscope.probes.dyck_state import DyckState, measure_state

    if "WORLD_SIZE" in os.environ:
        raise SmeltscopeError("probe dyck-state runs in one process; start it without torchrun.")
    out = running.out_file("dyck-state", **given)
    check_out(out, force=given["force"])
    log = terminal.make_log(quiet=given["quiet"])
    checkpoint = load_model(**given)
    _, heldout = make_prompts(checkpoint, log, **given, generated=ITEMS)
    probe = make_probe("dyck-state")
    assert isinstance(probe, DyckState)
    with terminal.progress(log) as on_progress:
        measure_state(
            checkpoint,
            heldout,
            out,
            options_of_run(heldout, **given),
            probe,
            force=given["force"],
            on_progress=on_progress,
        )
    result = tables.result_of(running.open_result(out, probe), probe, seed=given["seed"])
    if given["as_json"]:
        terminal.print_json(terminal.as_json(result.summary))
    else:
        tables.print_result(terminal.make_output(), result, f"dyck-state: {given['ckpt']}")
    log.print(f"Run file: {out}", soft_wrap=True)
