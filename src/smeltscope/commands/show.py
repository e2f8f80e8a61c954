"""What commands write to the terminal: notes and progress on stderr, numbers on stdout."""

import json
import math
import re
import time
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
    counts = {
        "token": int(heldout.lengths.sum()),
        "segment": len(heldout),
        "document": len({int(d) for d in heldout.document}),
    }
    parts = [f"{count:,} {what}{'s' * (count != 1)}" for what, count in counts.items()]
    log.print(f"{parts[0]} in {parts[1]} of {parts[2]}.", highlight=False)
    for note in heldout.notes:
        log.print(note, soft_wrap=True, highlight=False, markup=False)
    left_out = [
        f"{count:,} {_LEFT_OUT.get(why, why)}" for why, count in heldout.dropped.items() if count
    ]
    if left_out:
        log.print(f"Left out: {', '.join(left_out)}.", soft_wrap=True, highlight=False)


_LEFT_OUT = {
    "one_token_tail": "x a last segment of one token",
    "one_token_document": "x a document of one token",
    "empty_document": "x an empty document",
    "doubled_start_token": "x a start token in front of the text, which each segment has anyway",
}
_LINE_EVERY = 30.0  # seconds, where there is no terminal to draw a bar on


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
    if not log.is_terminal:
        yield _progress_lines(log)
        return
    with Progress(*columns, console=log, transient=True, disable=log.quiet) as bar:
        task = bar.add_task("", total=None, rate="")

        def update(done: int, total: int) -> None:
            speed = bar.tasks[task].speed
            rate = f"{speed:,.0f} tokens/s" if speed else ""
            bar.update(task, completed=done, total=total, rate=rate)

        yield update


def _progress_lines(log: "Console") -> Callable[[int, int], None]:
    """Progress for a log file: a line now and then."""
    began = last = time.monotonic()
    first: int | None = None  # a resumed run begins with tokens that cost no time

    def update(done: int, total: int) -> None:
        nonlocal first, last
        now = time.monotonic()
        if first is None:
            first = done
        elif now - last > _LINE_EVERY:
            last = now
            speed = (done - first) / (now - began)
            left = (total - done) / speed
            log.print(
                f"{done / total:.0%}, {done:,} tokens, {speed:,.0f} tokens/s, {left:,.0f} s left",
                highlight=False,
            )

    return update


def number(value: Any, *, signed: bool = False) -> str:
    """Three decimals without the leading zero, .042; a dash where there is no value."""
    value = float(value)
    if math.isnan(value):
        return "-"
    value = round(value, 3) + 0.0  # no minus before a zero
    return re.sub(r"^([+-]?)0\.", r"\1.", f"{value:+.3f}" if signed else f"{value:.3f}")


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
