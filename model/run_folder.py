"""The folder of a training run: its recipe, its checkpoints, its metrics."""

import csv
import errno
import json
import shutil
import tomllib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from smeltscope.errors import SmeltscopeError
from smeltscope.model.recipe import Recipe

WHOLE = "whole"  # a file in a checkpoint, written last: a kill while saving leaves none
NEWEST = 2  # checkpoints that stay, whatever else does
# Keys of [training] that change nothing of what the run up to its end computes.
FREE_KEYS = ("training.output", "training.branches", "training.branch_steps")
# Of these one is left wherever something would be lost.
BEGUN = ("rows.npz", "metrics.jsonl", "checkpoint-*", "final")
NO_ROOM = 1_000_000  # bytes that a full disk may still have


def open_run(recipe: Recipe) -> Path:
    """The output folder of a recipe, made if it is missing.

    Raises SmeltscopeError when it holds something else, or a run of another recipe.
    """
    output = recipe.training.output
    kept = output / "recipe.toml"
    if output.exists() and not output.is_dir():
        raise SmeltscopeError(f"{output} is a file: name a folder for the output.")
    begun = any(any(output.glob(name)) for name in BEGUN)
    if begun and kept.exists():
        changed = changed_keys(kept.read_text(encoding="utf-8"), recipe.text)
        if changed:
            raise SmeltscopeError(
                f"{output} holds a run of another recipe, which differs in {', '.join(changed)}: "
                "give --out another folder, or remove it."
            )
    foreign = {_partial(kept).name, "lost+found"}  # that every new disk has
    if not kept.exists() and output.exists() and {f.name for f in output.iterdir()} - foreign:
        raise SmeltscopeError(f"{output} is not empty and holds no run: give --out a new folder.")
    try:
        output.mkdir(parents=True, exist_ok=True)
        _write_whole(kept, recipe.text)
    except OSError as error:
        raise SmeltscopeError(
            f"The output folder {output} cannot be made or written ({error.strerror}): give --out another."
        ) from error
    return output


def _write_whole(path: Path, text: str) -> None:
    """Write a file such that a kill leaves the one before or all of it."""
    partial = _partial(path)
    partial.write_text(text, encoding="utf-8")
    partial.rename(path)


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def keep_sizes(output: Path, sizes: dict[str, int]) -> None:
    """Write down the text files of a run and their bytes, in order, before its rows are made of them."""
    _write_whole(output / "text.json", json.dumps(sizes, indent=1))


def check_sizes(output: Path, sizes: dict[str, int]) -> None:
    """Raise SmeltscopeError where the text files are not those that the rows of a run were made of."""
    kept = output / "text.json"
    before = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else sizes
    changed = [
        f"{name} ({_bytes(before.get(name))}, now {_bytes(sizes.get(name))})"
        for name in dict.fromkeys([*before, *sizes])
        if before.get(name) != sizes.get(name)
    ]
    if changed:
        raise SmeltscopeError(
            f"{output} holds a run over other text, which differs in {', '.join(changed)}: "
            "point --data to the text of before, or give --out another folder."
        )


def _bytes(size: int | None) -> str:
    return "not there" if size is None else f"{size:,} bytes"


def changed_keys(text: str, other: str) -> list[str]:
    """The keys in which two recipes differ, but those that change nothing: `training.learning_rate (0.01, now 0.1)`."""
    before, now = _leaves(tomllib.loads(text)), _leaves(tomllib.loads(other))
    return [
        f"{key} ({before.get(key, 'not set')}, now {now.get(key, 'not set')})"
        for key in dict.fromkeys([*before, *now])
        if key not in FREE_KEYS and before.get(key) != now.get(key)
    ]


def _leaves(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in table.items():
        inner = dict(enumerate(value, 1)) if _is_tables(value) else value
        leaves |= (
            _leaves(inner, f"{prefix}{key}.")
            if isinstance(inner, dict)
            else {f"{prefix}{key}": inner}
        )
    return leaves


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, dict) for item in value)


# ---------------------------------------------------------------- checkpoints


def whole_checkpoints(output: Path) -> dict[int, Path]:
    """{step: folder} of the checkpoints that were written to the end, oldest first."""
    found = {step_of(f): f for f in output.glob("checkpoint-*") if (f / WHOLE).exists()}
    return dict(sorted(found.items()))


def last_checkpoint(output: Path) -> Path | None:
    """The newest checkpoint that was written to the end, if any."""
    return next(reversed(whole_checkpoints(output).values()), None)


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(checkpoint.name.split("-")[1])


def processes_of(checkpoint: Path) -> int:
    """How many processes wrote a checkpoint: each leaves its random state there."""
    return len(list(checkpoint.glob("rng_state*.pth")))


def last_good(output: Path, start: Path | None = None) -> str:
    """Half a sentence that names the newest whole checkpoint; without one, `start`, where the run begins."""
    checkpoint = last_checkpoint(output) or start
    if checkpoint is None:
        return "there is no checkpoint from before"
    return f"the last good checkpoint is {checkpoint}"


def check_space(output: Path, needed: int, what: str, start: Path | None = None) -> None:
    """Raise SmeltscopeError when `needed` bytes do not fit on the disk of `output`; `start` as in `last_good`."""
    free = shutil.disk_usage(output).free
    if free < needed:
        raise SmeltscopeError(
            f"{what} needs {needed / 1e6:.1f} MB, but the disk of {output} has {free / 1e6:.1f} MB left; "
            f"{last_good(output, start)}. Free some space and run the command again: it goes on from there."
        )


@contextmanager
def full_disk_told(output: Path) -> Iterator[None]:
    """Raise SmeltscopeError in place of what a writer raises when the disk is full, OSError or not."""
    try:
        yield
    except Exception as error:
        if not _is_full_disk(error, output):
            raise
        raise SmeltscopeError(
            f"The disk is full: {output} could not be written; free some space and run the command again, "
            "it goes on from the last whole checkpoint."
        ) from error


def _is_full_disk(error: Exception, output: Path) -> bool:
    text = str(error).lower()
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return True
    if "no space left" in text or "os error 28" in text:  # safetensors and tokenizers
        return True
    # torch.save names a line of its source and no reason
    return "inline_container" in text and shutil.disk_usage(output).free < NO_ROOM


def finish_checkpoint(checkpoint: Path, *, kept: Collection[int]) -> None:
    """Mark a checkpoint as whole; then remove those older than the two newest, but the steps in `kept`."""
    (checkpoint / WHOLE).touch()
    for step, folder in list(whole_checkpoints(checkpoint.parent).items())[:-NEWEST]:
        if step not in kept:
            (folder / WHOLE).unlink()  # a kill while removing must not leave half of a whole one
            shutil.rmtree(folder)


def remove_cut_short(output: Path) -> None:
    """Remove checkpoints that were not written to the end."""
    for folder in output.glob("checkpoint-*"):
        if not (folder / WHOLE).exists():
            shutil.rmtree(folder)


# ---------------------------------------------------------------- metrics


def add_metrics(output: Path, line: dict[str, Any]) -> None:
    """Add a line to the metrics of a run."""
    with (output / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def forget_metrics_after(output: Path, step: int) -> None:
    """Drop the lines that a resumed run will write again, and one that a kill cut short."""
    path = output / "metrics.jsonl"
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except ValueError:
            continue
    _write_whole(path, "".join(kept))


def write_curve(output: Path, path: Path) -> None:
    """The metrics of a run as CSV, without what is no single number."""
    text = (output / "metrics.jsonl").read_text()
    lines = [
        {k: v for k, v in json.loads(line).items() if not isinstance(v, list | dict)}
        for line in text.splitlines()
    ]
    columns = list(dict.fromkeys(key for line in lines for key in line))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(lines)
