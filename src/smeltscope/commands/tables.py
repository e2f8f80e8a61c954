"""Any probe's results as tables of 80 columns, and as long CSV.

A table has a row for each execution (layer, visit), for each pair of visits of a looped layer, or for each entry of
another dimension; its columns are the probe's first quantities, averaged over heads.
"""

import csv
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from smeltscope.commands import dyck_tables
from smeltscope.commands.terminal import number, with_interval

if TYPE_CHECKING:
    import xarray as xr
    from rich.console import Console

    from smeltscope.probes import Probe

WIDTH = 80
HEADS = ("head", "kv_head")
ROWS = ("group", "step", "execution", "looped_layer", "visit_pair")
MOST_COLUMNS = 8  # entries of a dimension that stand side by side
DIFFERENCES = r"(?<!relative_)change|minus"  # in the names of quantities that have a sign
COUNTS = r"(items|prompts|targets|tokens)(_by_|$)"  # and of those that count something
ENDS = ("_low", "_high", "_low_all", "_high_all")  # of intervals
FEW = 4  # quantities of a table that nobody has chosen

# Scores of Dyck answers that have a guess by Bayes and one by chance beside them.
ANSWER_SCORES = (
    "symbol_accuracy",
    "token_loss",
    "answer_loss",
    "nested_token_loss",
    "nested_answer_loss",
)
GUESSES = ("bayes_nothing", "bayes_query", "bayes_inputs", "bayes_answers", "guess")

# The tables of each probe, where its first quantities would not do. What holds no value is left out anyway.
TABLES: dict[str, tuple[tuple[str, ...], ...]] = {
    "attention-sink": (
        (
            "sink_mass",
            "change",
            "uniform",
            "nearby_mass",
            "heaviest_mass",
            "sink_rate",
            "learned_sink_mass",
        ),
    ),
    "router-overlap": (
        (
            "overlap",
            "marginal_overlap",
            "other_token_overlap",
            "previous_overlap",
            "repeated_overlap",
        ),
        ("entropy", "lexical_overlap", "near_ties"),
    ),
    "residual-updates": (
        ("norm_ratio",),
        ("matched_cosine", "nearby_cosine"),
        ("relative_update", "residual_rms", "update_rms"),
    ),
    "qkv-similarity": (("cosine",), ("floor",), ("cosine_centred",)),
    "attended-tokens": (("top8", "top8_control", "top8_chance", "top1", "overlap"),),
    "swap": (
        ("moved_share", "values_share", "interaction_share", "change_square"),
        ("first_change", "first_change_by_queries", "first_change_by_keys"),
    ),
    "loss": (("loss",), ("swept_loss", "swept_change", "swept_kl"), ("loss_by_position",)),
    "dyck-scores": (
        ("exact", "all_right", "bayes_query", "bayes_answers", "guess", "kept_shots"),
        (*GUESSES, "most_common"),
        *((score, *(f"{score}_{guess}" for guess in GUESSES)) for score in ANSWER_SCORES),
        ("exact_by_readable", "all_right_by_readable", "items_by_readable"),
        ("bayes_query_by_readable", "bayes_inputs_by_readable", "bayes_answers_by_readable"),
        ("guess_by_readable", "most_common_by_readable"),
        ("exact_sd", "all_right_sd"),
    ),
    "dyck-state": (("accuracy", "control"), ("change", "gained", "lost")),
    "dyck-heads": (),
    "dyck-map": (),
}
# What a table is of, by its first quantity, where a probe has several tables.
TITLES = {
    "bayes_nothing": "The whole answer right, without the model, by what is known of the pairs",
    "symbol_accuracy": "Symbols right, each given those before it",
    "token_loss": "Loss of a token of the answer, nats",
    "answer_loss": "Loss of an answer, nats",
    "nested_token_loss": "Nested prompts: loss of a token of the answer, nats",
    "nested_answer_loss": "Nested prompts: loss of an answer, nats",
    "exact_by_readable": "By whether the query's input shows every closer (1) or not (0)",
    "bayes_query_by_readable": "The same without the model",
    "exact_sd": "Standard deviation over the seeds of demonstrations",
}
# A dimension whose entries have tables of their own.
APART = {"dyck-state": "state"}


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a probe found in a run."""

    summary: "xr.Dataset"  # every quantity with its intervals
    averaged: "xr.Dataset"  # the same with the mean over heads in place of each head
    sentence: str


def result_of(run: "xr.DataTree", probe: "Probe", *, seed: int) -> Result:
    """What `probe` found in a run."""
    from smeltscope.probes.compare import averaged
    from smeltscope.probes.statistics import DRAWS
    from smeltscope.probes.summary import dataset_of, estimate, summary_of

    quantities = estimate(run, probe, seed=seed)
    summary = summary_of(quantities, run, probe, DRAWS, seed)
    return Result(
        summary=summary,
        averaged=dataset_of(averaged(quantities), run),
        sentence=probe.sentence(summary),
    )


def _print_levels(console: "Console", summary: "xr.Dataset") -> None:
    """What is to be had of each state without a probe."""
    console.print(
        "Without a probe: the most common class, and that of the same token:", style="dim"
    )
    columns = [c for name in ("majority", "token") for c in columns_of(summary, name)]
    print_table(console, summary, columns)


OWN_TABLES: dict[str, Callable[["Console", "xr.Dataset"], None]] = {
    "dyck-heads": dyck_tables.print_heads,
    "dyck-map": dyck_tables.print_map,
    "dyck-state": _print_levels,
}


def quantities_in(summary: "xr.Dataset") -> list[str]:
    """The quantities of a summary, without the ends of their intervals."""
    names = [str(name) for name in summary.data_vars]
    ends = {f"{name}{end}" for name in names for end in ENDS}
    return [name for name in names if name not in ends]


def print_result(console: "Console", result: Result, title: str, *, brief: bool = False) -> None:
    """The tables of a probe, what it found in a sentence, and what the paper reports; if `brief`, the first table alone."""
    from smeltscope.probes.summary import doubt_of

    console.print(title, style="bold", soft_wrap=True)
    tables = tables_of(result.averaged, str(result.summary.attrs["probe"]))
    for table in tables[:1] if brief else tables:
        if table.title:
            console.print(f"{table.title}:", style="dim")
        print_table(console, result.averaged, table.columns)
    own_table = OWN_TABLES.get(str(result.summary.attrs["probe"]))
    if own_table is not None:
        own_table(console, result.summary)
    lows = [low for name, low in result.summary.data_vars.items() if str(name).endswith("_low")]
    if any(bool(low.notnull().any()) for low in lows):
        averaged = [c for t in tables for c in t.columns if {*HEADS} & {*_dims(result, c)}]
        what = "Means over heads, " if averaged else ""
        over = result.summary.attrs["resampled"]
        console.print(
            f"{what}[95 % intervals] over {over}; all: probe show RUN --csv.", style="dim"
        )
        if doubt := doubt_of(result.summary):
            console.print(doubt)
    console.print(result.sentence)
    if not brief:
        _print_paper(console, result.summary)
    console.print()


def _dims(result: Result, column: "Column") -> tuple[str, ...]:
    """Of the quantity that a column is of, before heads were averaged."""
    return tuple(map(str, result.summary[str(column.values.name)].dims))


def _print_paper(console: "Console", summary: "xr.Dataset") -> None:
    from smeltscope.probes.paper import MODELS, reported_by

    entries = [(entry, entry.ours(summary)) for entry in reported_by(str(summary.attrs["probe"]))]
    # A sweep is there where it was asked for.
    entries = [(e, ours) for e, ours in entries if "num_visits" not in e.at or ours is not None]
    if entries:
        console.print(f"The paper ({MODELS}; context, not a target), and here:", style="dim")
    for entry, ours in entries:
        signed = "minus" in entry.what
        here = [] if ours is None else [number(value, signed=signed) for value in ours]
        line = f"{entry.what}: {entry.says}; here {' to '.join(dict.fromkeys(here)) or '-'}"
        wrapped = textwrap.fill(line, console.width - 2, break_on_hyphens=False)
        console.print(textwrap.indent(wrapped, "  "), style="dim")


@dataclass(frozen=True, kw_only=True)
class Table:
    """Columns over the same rows, and what they are of where that needs words."""

    title: str
    columns: list["Column"]


def tables_of(summary: "xr.Dataset", probe: str) -> list[Table]:
    """The tables that are chosen above, else one for each kind of row."""
    if probe in TABLES:
        dim, tables = APART.get(probe), []
        parts = {"": summary}
        if dim is not None:
            parts = {str(label): summary.sel({dim: label}) for label in summary[dim].values}
        for title, part in parts.items():
            for names in TABLES[probe]:
                columns = [c for name in names if name in part for c in columns_of(part, name)]
                if columns:
                    tables.append(Table(title=TITLES.get(names[0], title), columns=columns))
        return tables
    by_rows: dict[tuple[str, ...], list[list[Column]]] = {}
    for name in quantities_in(summary):
        columns = columns_of(summary, name)
        if columns:
            by_rows.setdefault(columns[0].rows, []).append(columns)
    return [
        Table(title="", columns=[c for columns in found[:FEW] for c in columns])
        for found in by_rows.values()
    ]


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table: a number, with or without the ends of its interval, for each row."""

    header: str
    rows: tuple[str, ...]  # the dimensions that the rows run over
    values: "xr.DataArray"
    low: "xr.DataArray"
    high: "xr.DataArray"
    signed: bool = False
    counts: bool = False  # whole numbers
    needs_interval: bool = False  # it gets a place with its interval before other intervals do


def columns_of(
    summary: "xr.Dataset", name: str, header: str | None = None, *, is_difference: bool = False
) -> list[Column]:
    """A quantity as columns: one for each entry of a dimension that is no dimension of rows; none if that are too many."""
    import xarray as xr

    array = summary[name]
    dims = [str(dim) for dim in array.dims]
    rows = tuple(dim for dim in dims if dim in ROWS) or tuple(dims[:1])
    others = [dim for dim in dims if dim not in rows]
    if not rows or math.prod(summary.sizes[dim] for dim in others) > MOST_COLUMNS:
        return []
    header = name.replace("_", " ") if header is None else header
    columns = []
    for entry in product(*(range(summary.sizes[dim]) for dim in others)):
        at = dict(zip(others, entry, strict=True))
        labels = [str(summary[dim].values[i]) for dim, i in at.items()]
        parts = [
            summary[key].isel(at)
            if (key := f"{name}{end}") in summary
            else xr.full_like(array.isel(at), math.nan)
            for end in ("", "_low", "_high")
        ]
        if bool(parts[0].notnull().any()):
            columns.append(
                Column(
                    header=" ".join([header, *labels]),
                    rows=rows,
                    values=parts[0],
                    low=parts[1],
                    high=parts[2],
                    signed=is_difference or bool(re.search(DIFFERENCES, name)),
                    counts=bool(re.match(COUNTS, name)),
                    needs_interval=is_difference,
                )
            )
    return columns


def print_table(console: "Console", summary: "xr.Dataset", columns: Sequence[Column]) -> None:
    """As many columns as have room, all over the same rows; intervals wherever there is room for them."""
    from rich.table import Table

    rows = columns[0].rows
    labels, places, later = _rows(summary, rows, columns)
    fixed = [(header, [row[i] for row in labels]) for i, header in enumerate(_row_headers(rows))]
    plain = [_cells(column, places, intervals=False) for column in columns]
    full = [_cells(column, places, intervals=True) for column in columns]
    room = WIDTH - sum(_width(header, cells) for header, cells in fixed)
    chosen: dict[int, list[str]] = {}

    def offer(i: int, cells: list[str]) -> None:
        nonlocal room
        now = _width(columns[i].header, chosen[i]) if i in chosen else 0
        needed = _width(columns[i].header, cells) - now
        if needed <= room:
            chosen[i] = cells
            room -= needed

    for i, column in enumerate(columns):
        if column.needs_interval:
            offer(i, full[i])
        if i not in chosen:
            offer(i, plain[i])
    for i in sorted(chosen):
        offer(i, full[i])

    table = Table(box=None, padding=(0, 1, 0, 0))
    shown = [*fixed, *((columns[i].header, chosen[i]) for i in sorted(chosen))]
    for header, _ in shown:
        table.add_column(
            header.replace(" ", "\n"), justify="right", no_wrap=True, vertical="bottom"
        )
    for row in range(len(places)):
        table.add_row(*(cells[row] for _, cells in shown), style="bold" if later[row] else "")
    console.print(table)


def _cells(column: Column, places: Sequence[dict[str, int]], *, intervals: bool) -> list[str]:
    if column.counts:
        found = [float(column.values.isel(at)) for at in places]
        return [number(value) if math.isnan(value) else f"{value:,.0f}" for value in found]
    if not intervals:
        return [number(column.values.isel(at), signed=column.signed) for at in places]
    return [
        with_interval(
            column.values.isel(at), column.low.isel(at), column.high.isel(at), signed=column.signed
        )
        for at in places
    ]


def _width(header: str, cells: Sequence[str]) -> int:
    return max(map(len, [*header.split(" "), *cells])) + 1


def _row_headers(rows: Sequence[str]) -> list[str]:
    names = {"looped_layer": ["layer"], "visit_pair": ["visits"], "execution": ["layer", "visit"]}
    return [label for dim in rows for label in names.get(dim, [dim.replace("_", " ")])]


def _rows(
    summary: "xr.Dataset", rows: Sequence[str], columns: Sequence[Column]
) -> tuple[list[list[str]], list[dict[str, int]], list[bool]]:
    """Labels, places and whether it is a later visit, of every row in which some column has a value."""
    labels, places, later = [], [], []
    for entry in product(*(range(summary.sizes[dim]) for dim in rows)):
        at = dict(zip(rows, entry, strict=True))
        if all(bool(column.values.isel(at).isnull()) for column in columns):
            continue
        label: list[str] = []
        for dim, i in at.items():
            if dim == "execution":
                label += [str(int(summary[name].values[i])) for name in ("layer", "visit")]
            else:
                label.append(str(summary[dim].values[i]))
        labels.append(label)
        places.append(at)
        later.append("execution" in at and int(summary["visit"].values[at["execution"]]) > 1)
    return labels, places, later


def print_csv(summaries: Mapping[str, "xr.Dataset"]) -> None:
    """Every number of some probes' summaries on stdout, one a line.

    Columns: probe, quantity, every coordinate of any of them (empty where a quantity has none), value, low, high
    (the 95 % interval, empty where there is none), low_all, high_all (the one that holds for all entries together, of
    quantities that have one).
    """
    coordinates = list(dict.fromkeys(str(c) for s in summaries.values() for c in s.coords))
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(
        ["probe", "quantity", *coordinates, "value", *(end.removeprefix("_") for end in ENDS)]
    )
    for probe, summary in summaries.items():
        for quantity in quantities_in(summary):
            for labels, numbers in _long(summary, quantity):
                shown = ["" if math.isnan(v) else repr(v) for v in numbers]
                where = [labels.get(name, "") for name in coordinates]
                writer.writerow([probe, quantity, *where, *shown])


def _long(
    summary: "xr.Dataset", name: str
) -> Iterator[tuple[dict[str, object], tuple[float, ...]]]:
    """Each entry of a quantity with its labels: ({coordinate: label}, (value, low, high, low_all, high_all))."""
    array = summary[name]
    labels = {
        str(c): label.broadcast_like(array).transpose(*array.dims).values.ravel().tolist()
        for c, label in array.coords.items()
    }
    none = [math.nan] * array.size
    columns = [
        summary[key].values.ravel().tolist() if (key := f"{name}{end}") in summary else none
        for end in ("", *ENDS)
    ]
    for i, numbers in enumerate(zip(*columns, strict=True)):
        yield {c: values[i] for c, values in labels.items()}, numbers
