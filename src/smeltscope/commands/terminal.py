"""What commands write to the terminal: notes and progress on stderr, numbers on stdout."""

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import xarray as xr
    from rich.console import Console

    from smeltscope.tasks import HeldOut

OnProgress = Callable[[int, int, Mapping[str, float]], None]

_LEFT_OUT = {
    "one_token_tail": "x a last segment of one token",
    "one_token_document": "x a document of one token",
    "empty_document": "x an empty document",
    "demonstrations": "x a demonstration that did not fit",
    "doubled_start_token": "x a start token in front of the text, which each segment has anyway",
}
_LINE_EVERY = 30.0  # seconds, where there is no terminal to draw a bar on


def is_first_worker() -> bool:
    """Whether this process is the one that speaks: of several that torchrun started, the first."""
    return os.environ.get("RANK", "0") == "0"


def make_log(*, quiet: bool) -> "Console":
    """Where notes and progress go."""
    from rich.console import Console

    return Console(stderr=True, quiet=quiet or not is_first_worker(), markup=False, highlight=False)


def make_output() -> "Console":
    """Where tables and sentences go; never so narrow that numbers would be cut."""
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    console.width = max(console.width, 80)
    return console


def data(log: "Console", heldout: "HeldOut") -> None:
    """What the run goes over, and what was left out of it."""
    tokens = counted(int(heldout.lengths.sum()), "token")
    if heldout.prompts is None:
        documents = counted(len({int(d) for d in heldout.document}), "document")
        log.print(f"{tokens} in {counted(len(heldout), 'segment')} of {documents}.")
    else:
        items = counted(len(set(heldout.prompts.labels["item"])), "item")
        log.print(f"{tokens} in {counted(len(heldout), 'prompt')} of {items}.")
    for note in heldout.notes:
        log.print(note, soft_wrap=True)
    left_out = [
        f"{count:,} {_LEFT_OUT.get(why, why)}" for why, count in heldout.dropped.items() if count
    ]
    if left_out:
        log.print(f"Left out: {', '.join(left_out)}.", soft_wrap=True)


@contextmanager
def progress(log: "Console") -> Iterator[OnProgress]:
    """Tokens done, tokens per second, time left, and the headline numbers so far.

    A bar on a terminal or in a notebook, elsewhere a line now and then. Gives the function to call with
    (done, total, headline numbers); its first call says what was done before. Of several processes one speaks, of its own
    share of the tokens.
    """
    if log.quiet:
        yield lambda done, total, headlines: None
    elif log.is_jupyter:
        yield from _notebook_bar()
    elif log.is_terminal:
        yield from _bar(log)
    else:
        yield _lines(log)


def _bar(log: "Console") -> Iterator[OnProgress]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Bar(Progress):
        """With the headline numbers beneath."""

        headlines = ""

        def get_renderables(self) -> Iterator[Any]:
            yield self.make_tasks_table(self.tasks)
            yield Text(self.headlines, style="dim")

    columns = (
        TextColumn("{task.percentage:>3.0f} %"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} tokens" + _share()),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=log, transient=True) as bar:
        task = bar.add_task("", total=None, rate="")

        def update(done: int, total: int, headlines: Mapping[str, float]) -> None:
            speed = bar.tasks[task].speed
            rate = f"{speed:,.0f} tokens/s" if speed else ""
            bar.headlines = _joined(headlines)
            bar.update(task, completed=done, total=total, rate=rate)

        yield update


def _notebook_bar() -> Iterator[OnProgress]:
    from tqdm.auto import tqdm

    with tqdm(unit=" tokens", unit_scale=True) as bar:
        began = False

        def update(done: int, total: int, headlines: Mapping[str, float]) -> None:
            nonlocal began
            if not began:
                began = True
                bar.reset(total)
                bar.n = bar.initial = bar.last_print_n = done  # in no rate
            bar.set_postfix_str(_joined(headlines), refresh=False)
            bar.update(done - bar.n)

        yield update


def _lines(log: "Console") -> OnProgress:
    """Progress for a log file."""
    began = last = time.monotonic()
    first: int | None = None  # a resumed run begins with tokens that cost no time

    def update(done: int, total: int, headlines: Mapping[str, float]) -> None:
        nonlocal first, last
        now = time.monotonic()
        if first is None:
            first = done
        elif now - last > _LINE_EVERY:
            last = now
            speed = (done - first) / (now - began)
            left = (total - done) / speed
            line = f"{done / total:.0%}, {done:,} tokens{_share()}, {speed:,.0f} tokens/s, {left:,.0f} s left"
            log.print("; ".join(filter(None, (line, _joined(headlines)))), soft_wrap=True)

    return update


def _share() -> str:
    return " of this process" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""


def _joined(headlines: Mapping[str, float]) -> str:
    return ", ".join(f"{label} {number(value)}" for label, value in headlines.items())


def counted(count: int, what: str) -> str:
    """`1 document`, `1,200 documents`."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def number(value: Any, *, signed: bool = False) -> str:
    """Three decimals without the leading zero, .042, or three digits where that says more; a dash for no value."""
    value = float(value)
    if math.isnan(value):
        return "-"
    sign = "+" if signed else ""
    size = abs(value)
    if size < 1e-6:  # what rounding leaves of a zero
        return ".000"
    if size >= 10:
        return f"{value:{sign}.{1 if size < 99.95 else 0}f}"
    if size < 5e-4:
        return re.sub(r"e-0?", "e-", f"{value:{sign}.0e}")
    return re.sub(r"^([+-]?)0\.", r"\1.", f"{value:{sign}.3f}")


def with_interval(value: Any, low: Any, high: Any, *, signed: bool = False) -> str:
    """`.123 [.101,.145]`, or the value alone where no interval could be drawn."""
    text = number(value, signed=signed)
    low, high = (number(end, signed=signed) for end in (low, high))
    return text if "-" in (low, high) else f"{text} [{low},{high}]"


def as_json(summary: "xr.Dataset") -> dict[str, Any]:
    """A summary for JSON: {"attributes", "coordinates", "values"}, each value with its dimensions; NaN is null."""
    return {
        "attributes": summary.attrs,
        "coordinates": {name: array.values.tolist() for name, array in summary.coords.items()},
        "values": {
            name: {"dims": list(array.dims), "data": _nulled(array.values.tolist())}
            for name, array in summary.data_vars.items()
        },
    }


def print_json(content: Any) -> None:
    """JSON on stdout."""
    click.echo(json.dumps(content, indent=1))


def _nulled(value: Any) -> Any:
    if isinstance(value, list):
        return [_nulled(v) for v in value]
    return None if isinstance(value, float) and math.isnan(value) else value
