"""What commands write to the terminal: notes and progress on stderr, numbers on stdout."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import xarray as xr
    from rich.console import Console

    from smeltscope.tasks import HeldOut


def data(log: "Console", heldout: "HeldOut") -> None:
    """What the run goes over, and what was left out of it."""
    documents = len({int(d) for d in heldout.document})
    log.print(
        f"{int(heldout.lengths.sum()):,} tokens in {len(heldout):,} segments of {documents:,} documents.",
        highlight=False,
    )
    for note in heldout.notes:
        log.print(note, soft_wrap=True, highlight=False, markup=False)
    for reason, count in heldout.dropped.items():
        if count:
            log.print(f"Left out: {count:,} x {reason.replace('_', ' ')}.", highlight=False)


@contextmanager
def progress(log: "Console") -> Iterator[Callable[[int, int], None]]:
    """A bar with tokens per second and the time left; gives the function to call with (done, total)."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.percentage:>3.0f} %"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} tokens"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=log, transient=True, disable=log.quiet or not log.is_terminal
    ) as bar:
        task = bar.add_task("", total=None, rate="")

        def update(done: int, total: int) -> None:
            speed = bar.tasks[task].speed
            rate = f"{speed:,.0f} tokens/s" if speed else ""
            bar.update(task, completed=done, total=total, rate=rate)

        yield update


def number(value: Any, *, signed: bool = False) -> str:
    """Three decimals without the leading zero, .042; a dash where there is no value."""
    value = float(value)
    if math.isnan(value):
        return "-"
    text = f"{value:+.3f}" if signed else f"{value:.3f}"
    return text.replace("-0.000", "+0.000").replace("0.", ".", 1)


def with_interval(row: "xr.Dataset", name: str, *, signed: bool = False) -> str:
    """`.123 [.101,.145]`, or the value alone where no interval could be drawn."""
    text = number(row[name], signed=signed)
    low, high = (number(row[f"{name}_{end}"], signed=signed) for end in ("low", "high"))
    return text if "-" in (low, high) else f"{text} [{low},{high}]"


def as_json(summary: "xr.Dataset") -> None:
    """A summary on stdout as JSON: {"attributes", "coordinates", "values"}, each value with its dimensions; NaN is null."""
    content = {
        "attributes": summary.attrs,
        "coordinates": {name: array.values.tolist() for name, array in summary.coords.items()},
        "values": {
            name: {"dims": list(array.dims), "data": _nulled(array.values.tolist())}
            for name, array in summary.data_vars.items()
        },
    }
    click.echo(json.dumps(content, indent=1))


def _nulled(value: Any) -> Any:
    if isinstance(value, list):
        return [_nulled(v) for v in value]
    return None if isinstance(value, float) and math.isnan(value) else value
