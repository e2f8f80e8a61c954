"""Tables of what `probe dyck` finds: heads by what their ablation costs, and a head's map of a prompt."""

from typing import TYPE_CHECKING

from smeltscope.commands.terminal import number, with_interval

if TYPE_CHECKING:
    import xarray as xr
    from rich.console import Console
    from rich.table import Table

MOST_HEADS = 8  # rows of the table of heads


def print_heads(console: "Console", summary: "xr.Dataset") -> None:
    """The heads whose ablation costs most on the half that they are chosen on, with what it costs on the other."""
    import numpy as np

    if "dyck_head" not in summary:
        return
    rise = summary["head_rise"]
    chosen = rise.isel(half=0, ablated_visits=0).values  # (looped_layer, head)
    order = np.argsort(-np.nan_to_num(chosen, nan=-np.inf), axis=None)[:MOST_HEADS]
    visits = [str(name) for name in summary["ablated_visits"].values]
    table = _table(
        "layer",
        "head",
        "rise,\nfirst half",
        *(f"rise,\n{'all visits' if name == 'all' else f'visit {name}'}" for name in visits),
        "inter-\naction",
    )
    for place in order:
        layer, head = np.unravel_index(place, chosen.shape)
        if np.isnan(chosen[layer, head]):
            continue
        at = {"looped_layer": layer, "head": head}
        cells = [_shown(summary, "head_rise", at | {"half": 1, "ablated_visits": 0})]
        cells += [
            number(rise.isel(at | {"half": 1, "ablated_visits": v}), signed=True)
            for v in range(1, len(visits))
        ]
        table.add_row(
            str(summary["looped_layer"].values[layer]),
            str(head),
            number(chosen[layer, head], signed=True),
            *cells,
            number(summary["head_interaction"].isel(at | {"half": 1}), signed=True),
        )
    console.print(table)
    console.print(
        "Rise of the targets' perplexity when a head is ablated, on the half of the prompts that did not choose it, and "
        "in the third column on the half that did.",
        style="dim",
    )


def print_map(console: "Console", summary: "xr.Dataset") -> None:
    """Attention by region at each visit of the Dyck head; where none was chosen, of the head that most turned to answers."""
    import numpy as np

    from smeltscope.probes.dyck_heads import dyck_head_of

    if "change" not in summary:
        return
    known = dyck_head_of(summary)
    if known is not None:
        physical, chosen = known
        layer = summary["looped_layer"].values.tolist().index(physical)
        which = "the Dyck head, chosen on other prompts"
    else:
        turned = summary["retarget"].sel(map_region="demo_answer").isel(visit_pair=0)
        if not turned.notnull().any():
            return
        place = turned.fillna(-np.inf).argmax(...)
        layer, chosen = (int(place[dim]) for dim in ("looped_layer", "head"))
        physical = int(summary["looped_layer"].values[layer])
        which = "of all heads the one that most turned to answers, picked here"
    console.print(f"Head {chosen} of layer {physical} ({which}), attention by region:")
    at = {"looped_layer": layer, "head": chosen}
    places = zip(summary["layer"].values, summary["visit"].values, strict=True)
    executions = {int(visit): e for e, (of, visit) in enumerate(places) if of == physical}
    for number_of_pair, pair in enumerate(summary["visit_pair"].values.tolist()):
        visits = [int(visit) for visit in pair.split("-")]
        if set(visits) <= set(executions):  # layers may have other numbers of visits
            two = {visit: executions[visit] for visit in visits}
            _print_map_of_pair(console, summary, two, at | {"visit_pair": number_of_pair})
    console.print(
        "Change from one visit to the other: release is the first token's mass handed out in proportion, retarget the "
        "rest.",
        style="dim",
    )


def _print_map_of_pair(
    console: "Console", summary: "xr.Dataset", executions: dict[int, int], at: dict[str, int]
) -> None:
    """A head's mass by region at two visits, and the change; `executions` by visit."""
    visits = (f"visit {visit}" for visit in executions)
    table = _table("region", "uniform", *visits, "change", "release", "retarget")
    for region in summary["map_region"].values.tolist():
        of_region = summary.sel(map_region=region)
        masses = [
            number(of_region["mass"].isel(execution=e, head=at["head"]))
            for e in executions.values()
        ]
        if set(masses) == {"-"}:
            continue
        table.add_row(
            region,
            number(of_region["uniform"].isel(execution=next(iter(executions.values())))),
            *masses,
            _shown(of_region, "change", at),
            *(number(of_region[n].isel(at), signed=True) for n in ("release", "retarget")),
        )
    console.print(table)


def _table(*headers: str) -> "Table":
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0))
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True, vertical="bottom")
    return table


def _shown(summary: "xr.Dataset", name: str, at: dict[str, int]) -> str:
    ends = (summary[f"{name}{end}"].isel(at) for end in ("", "_low", "_high"))
    return with_interval(*ends, signed=True)
