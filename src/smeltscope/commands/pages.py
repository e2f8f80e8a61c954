"""Run files for pages: what `probe view` and `probe report` are given."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from smeltscope.errors import SmeltscopeError
from smeltscope.registry import recorded_probe

if TYPE_CHECKING:
    from smeltscope.dashboards.runs import RunFile
    from smeltscope.model import Checkpoint


def run_files_of(paths: Sequence[Path]) -> "list[RunFile]":
    """Run files by their paths; refused where a file is missing, or none of them can be shown."""
    from smeltscope.dashboards.runs import RunFile

    names = distinct_names(paths)
    runs = [RunFile(path, recorded_probe, name) for path, name in zip(paths, names, strict=True)]
    missing = [str(run.given) for run in runs if run.version() == "missing"]
    if missing:
        raise SmeltscopeError(f"There is no run file {' and no '.join(missing)}.")
    troubles = [trouble for run in runs if (trouble := run.trouble()) is not None]
    if len(troubles) == len(runs) and all(run.path.suffix != ".partial" for run in runs):
        raise SmeltscopeError(" ".join(troubles))
    return runs


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """The files' names, after as many of their folders as tell them apart."""
    all_parts = [path.absolute().parts for path in paths]
    names = []
    for parts in all_parts:
        others = {other for other in all_parts if other != parts}
        length = next(
            n for n in range(1, len(parts) + 1) if all(o[-n:] != parts[-n:] for o in others)
        )
        names.append("/".join(parts[-length:]))
    return names


def checkpoint_of_run(run: "RunFile") -> "Checkpoint":
    """The checkpoint that a run was made with, as it was run, to be run again."""
    from smeltscope.model import UNTRAINED, load_checkpoint

    attributes = run.attributes()
    identity = attributes["identity"]
    loop = {name: identity[name] for name in ("visits", "residual_scale")}
    name = attributes["checkpoint"]
    return load_checkpoint(
        name.removesuffix(UNTRAINED),
        untrained=name.endswith(UNTRAINED),
        dtype=identity["dtype"],
        **(loop if attributes["model_type"] == "smelt" else {}),
    )
