"""`probe list`: what there is to run, and what to run on it."""

import json
import math
import textwrap
from collections.abc import Iterable
from pathlib import Path

import click

from smeltscope.registry import PROBES, PROMPT_PROBES

CONTROL_LINES = {
    "control-moved-sink": "every looped head: .60 of attention on the first token at visit 1, .02 at visit 2",
    "control-same-visits": "the second visit of a layer repeats the first, bit for bit",
}


@click.command("list", context_settings={"help_option_names": ["-h", "--help"]})
def list_all() -> None:
    """The checkpoints that come with smeltscope, the controls, and the diagnostics."""
    from smeltscope.model import CONTROLS, shipped_checkpoints
    from smeltscope.model.loading import SHIPPED_FOLDER

    trained = [(name, _describe(SHIPPED_FOLDER / name)) for name in shipped_checkpoints()]
    _print("Checkpoints, for --ckpt", trained)
    _print("Controls, built by hand, for --ckpt", [(n, CONTROL_LINES[n]) for n in CONTROLS])
    _print("Diagnostics: probe NAME, or --probes", [(n, line) for n, (_, line) in PROBES.items()])
    dyck = [(name, line) for name, (_, line) in PROMPT_PROBES.items()]
    _print("On prompts of brackets: probe dyck, probe dyck-state", dyck)


def _print(title: str, entries: Iterable[tuple[str, str]]) -> None:
    click.echo(title)
    for name, line in entries:
        click.echo(
            textwrap.fill(line, 80, initial_indent=f"  {name:22}", subsequent_indent=24 * " ")
        )


def _describe(folder: Path) -> str:
    """A SMELT checkpoint in a line: its layers, experts and size."""
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    parameters = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="np") as weights:
            for name in weights.keys():  # noqa: SIM118  # it is no mapping
                parameters += math.prod(weights.get_slice(name).get_shape())
    loop = "each run once"
    if config["num_visits"] > 1:
        first, last = config["loop_start"], config["loop_stop"] - 1
        loop = f"layers {first} to {last} run {config['num_visits']} times"
    return (
        f"{config['num_physical_layers']} layers, {loop}; {config['num_local_experts']} experts, "
        f"{config['num_experts_per_tok']} active; {parameters / 1e6:.1f}M parameters"
    )
