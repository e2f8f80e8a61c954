"""`probe compare`: two runs over the same text, paired by document."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from smeltscope.commands import tables, terminal
from smeltscope.errors import SmeltscopeError
from smeltscope.registry import ALL_PROBES, probes_of, recorded_probe

if TYPE_CHECKING:
    import xarray as xr
    from rich.console import Console

    from smeltscope.probes.grouping import By

FEW = 2  # quantities of a probe that are shown, where nothing else is said
# What is shown of each, over rows of their own.
COMPARED: dict[str, tuple[tuple[str, ...], ...]] = {
    "dyck-scores": (("exact", "all_right"), ("token_loss",)),
    "dyck-heads": (("perplexity",), ("dyck_head_rise",)),
    "dyck-map": (
        ("mass_visit_1_overall",),
        ("mass_visit_2_overall",),
        ("change_overall",),
        ("retarget_overall",),
    ),
}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("a", metavar="A.h5", type=click.Path(path_type=Path))
@click.argument("b", metavar="B.h5", type=click.Path(path_type=Path))
@click.option(
    "--by", type=click.Choice(["category", "length", "baseline-loss"]),
    help="For groups of documents apart: by category, by length in tokens, or by quartile of their loss in A, which "
    "then holds a run of the probe loss.",
)  # fmt: skip
@click.option(
    "--csv", "as_csv", is_flag=True,
    help="Every quantity, heads averaged, one a line: B minus A with its interval, X_a and X_b.",
)  # fmt: skip
def compare(a: Path, b: Path, by: Any, as_csv: bool) -> None:
    """What differs between two runs over the same text: B minus A, with intervals.

    Each draw of the bootstrap takes the same documents for both runs.
    """
    from smeltscope.activations import attributes_of, open_run
    from smeltscope.probes.compare import check_comparable, other_differences

    runs = open_run(a, lazy=True), open_run(b, lazy=True)
    check_comparable(*runs)
    of_a, of_b = (probes_of(run) for run in runs)
    shared = [name for name in of_a if name in of_b and name in ALL_PROBES]
    if not shared:
        raise SmeltscopeError(
            f"{a} and {b} share no diagnostic: the first holds {', '.join(of_a)}, the second {', '.join(of_b)}."
        )
    if as_csv:
        if by is None:
            found = {name: _compared(name, *runs, mean_over=tables.HEADS) for name in shared}
        else:
            found = {name: _grouped(name, *runs, by=by)[0] for name in shared}
        tables.print_csv(found)
        return
    console = terminal.make_output()
    for letter, file, run in zip("AB", (a, b), runs, strict=True):
        console.print(f"{letter}: {attributes_of(run)['checkpoint']} ({file})", soft_wrap=True)
    differences = other_differences(*runs)
    if differences:
        console.print(f"Options that differ, A and B: {'; '.join(differences)}.")
    for name in shared:
        console.print(f"\n{name}, B - A", style="bold")
        if by is None:
            _print_rows(console, name, _compared(name, *runs, mean_over=tables.HEADS))
        else:
            _print_groups(console, name, *runs, by=by)
    for letter, own, others in (("A", of_a, of_b), ("B", of_b, of_a)):
        only = [name for name in own if name not in others]
        if only:
            console.print(f"\nOnly {letter} has: {', '.join(only)}.")


def _compared(
    name: str, a: "xr.DataTree", b: "xr.DataTree", *, mean_over: tuple[str, ...]
) -> "xr.Dataset":
    from smeltscope.activations import attributes_of
    from smeltscope.probes.compare import compare as compare_runs

    probe_a, probe_b = (recorded_probe(run, name) for run in (a, b))
    seed = int(attributes_of(a)["identity"]["seed"])
    return compare_runs(a, b, probe_a, probe_b, mean_over=mean_over, seed=seed)


def _print_rows(console: "Console", name: str, found: "xr.Dataset") -> None:
    """The first quantities, each execution or pair of visits by itself, and those that are one number."""
    for shown in _shown(name, found):
        columns = [column for quantity in shown for column in _columns(found, quantity)]
        tables.print_table(console, found, columns)
        for quantity in shown:
            console.print(_decided(found, quantity))
    single = [q for q in _quantities(found) if not found[q].ndim and found[f"{q}_low"].notnull()]
    for quantity in single[:FEW]:
        ends = [found[f"{quantity}{end}"] for end in ("", "_low", "_high")]
        a, b = (terminal.number(found[f"{quantity}_{side}"]) for side in "ab")
        difference = terminal.with_interval(*ends, signed=True)
        console.print(f"{_words(quantity)}: A {a}, B {b}, B - A {difference}")
    if "dyck_head_a" in found:
        heads = (
            f"{side.upper()} head {int(found[f'dyck_head_{side}'])} of layer "
            f"{int(found[f'dyck_head_layer_{side}'])}"
            for side in "ab"
        )
        console.print(f"The Dyck head: {', '.join(heads)}.")
    for side in "ab":
        only = found.attrs[f"only_{side}"]
        if only:
            console.print(f"Only {side.upper()} has {', '.join(map(_words, only))}.", style="dim")


def _grouped(
    name: str, a: "xr.DataTree", b: "xr.DataTree", *, by: "By"
) -> tuple["xr.Dataset", list[str]]:
    """Each group of documents, averaged over heads and over layers, and the groups of none."""
    import xarray as xr

    from smeltscope.probes.grouping import groups_of, restricted

    baseline = a if by == "baseline-loss" else None
    of_a, of_b = (groups_of(run, by, baseline) for run in (a, b))
    parts = {
        label: _compared(
            name,
            restricted(a, of_a[label]),
            restricted(b, of_b[label]),
            mean_over=tables.HEADS + tables.ROWS,
        )
        for label in of_a
        if of_a[label].any()
    }
    labels = [f"{label} ({part.attrs['documents']})" for label, part in parts.items()]
    index = xr.DataArray(labels, dims="group", name="group")
    found = xr.concat(parts.values(), index, combine_attrs="drop_conflicts")
    return found, [label for label in of_a if label not in parts]


def _print_groups(
    console: "Console", name: str, a: "xr.DataTree", b: "xr.DataTree", *, by: "By"
) -> None:
    """The first quantities for each group of documents."""
    found, empty = _grouped(name, a, b, by=by)
    for shown in _shown(name, found):
        columns = [column for quantity in shown for column in _columns(found, quantity)]
        tables.print_table(console, found, columns)
    console.print(
        "Means over layers and heads; in brackets beside a group the number of its documents."
        + (f" No document: {', '.join(empty)}." if empty else ""),
        style="dim",
    )


def _quantities(found: "xr.Dataset") -> list[str]:
    return [str(name) for name in found.data_vars if f"{name}_low" in found]


def _shown(name: str, found: "xr.Dataset") -> list[list[str]]:
    """The quantities of each table: those chosen above, else the first ones that are over the same rows; none that is the
    same in both throughout."""
    every = [tuple(q for table in tables.TABLES.get(name, [_quantities(found)]) for q in table)]
    shown = []
    for chosen in COMPARED.get(name, every):
        differing = [q for q in chosen if q in found and bool((found[q] != 0).any())]
        rows = {q: c[0].rows for q in differing if (c := tables.columns_of(found, q))}
        alike = [q for q in rows if rows[q] == next(iter(rows.values()))]
        if alike:
            shown.append(alike[:FEW])
    return shown


def _columns(found: "xr.Dataset", quantity: str) -> list[tables.Column]:
    """A, B and B - A of a quantity that is one number in a row, B - A alone of others."""
    difference = tables.columns_of(found, quantity, f"{_words(quantity)} B-A", is_difference=True)
    if len(difference) > 1:
        return difference
    return [
        *tables.columns_of(found, f"{quantity}_a", f"{_words(quantity)} A"),
        *tables.columns_of(found, f"{quantity}_b", f"{_words(quantity)} B"),
        *difference,
    ]


def _decided(found: "xr.Dataset", quantity: str) -> str:
    """In how many entries the interval excludes 0."""
    together = f"{quantity}_low_all" in found
    ends = ("_low_all", "_high_all") if together else ("_low", "_high")
    low, high = (found[f"{quantity}{end}"] for end in ends)
    return (
        f"{_words(quantity)}: higher in B in {int((low > 0).sum())} of {int(found[quantity].notnull().sum())}, lower in "
        f"{int((high < 0).sum())} (95 % intervals, judged {'together' if together else 'each alone'})."
    )


def _words(quantity: str) -> str:
    return quantity.replace("_", " ")
