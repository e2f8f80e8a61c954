"""dyck-heads: which looped head the answers need, at which visit."""

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from smeltscope.dashboards.figures.common import (
    GREY,
    ROW_PIXELS,
    SERIES_COLOURS,
    FigureKind,
    Panel,
    has_values,
    measured,
    places_axis,
    points,
    row_of_maps,
    series_colour,
    styled,
)

CHOSEN, MEASURED = (
    0,
    1,
)  # halves of the prompts: the head is chosen on one, its effect is that on the other
RISE = "rise of perplexity"


def ablation_maps(summary: xr.Dataset) -> go.Figure:
    """What ablating each head costs at all visits and at each alone, and what of it is neither's; the Dyck head is marked."""
    return _maps(summary, "head", "head", "a head")


def group_ablation_maps(summary: xr.Dataset) -> go.Figure:
    """The same for K/V groups: all query heads that read one key/value head."""
    return _maps(summary, "group", "kv_head", "a K/V group")


def _maps(summary: xr.Dataset, which: str, dim: str, what: str) -> go.Figure:
    layers = summary["looped_layer"].values
    rise = measured(summary, f"{which}_rise").isel(half=MEASURED)
    column = "head" if which == "head" else "K/V group"
    panels = [
        Panel(
            title="All visits" if visit == "all" else f"Visit {visit} alone",
            part=rise.sel(ablated_visits=visit).transpose("looped_layer", dim),
            column=column,
            signed=True,
        )
        for visit in summary["ablated_visits"].values.tolist()
    ]
    if f"{which}_interaction" in summary and len(panels) > 2:
        panels.append(
            Panel(
                title="All minus the sum<br>of single visits",
                part=measured(summary, f"{which}_interaction").isel(half=MEASURED),
                column=column,
                signed=True,
            )
        )
    name, mark, where = f"dyck_{which}", None, ""
    if has_values(summary, name):
        mark = (float(summary[f"{name}_layer"]), float(summary[name]))
        where = f"ringed: layer {mark[0]:.0f}, {column} {mark[1]:.0f}, chosen on half 0"
    figure = row_of_maps(
        panels, layers, n=_targets(summary), row="looped layer", change=RISE, mark=mark
    )
    base = float(summary["perplexity"].isel(half=MEASURED))
    figure = styled(
        figure,
        f"Rise of perplexity when {what} is ablated",
        "; ".join(filter(None, [f"half 1 of the prompts, perplexity {base:.2f}", where])),
        height=300 + ROW_PIXELS * len(layers),
        top=45,
        bottom=130,
    )
    figure.update_layout(coloraxis2_colorbar={"x": 0, "xanchor": "left"})
    return figure


def halves(summary: xr.Dataset) -> go.Figure:
    """The rise of each head on the half that heads are chosen on, and on the other."""
    figure = go.Figure()
    part = measured(summary, "head_rise").sel(ablated_visits="all")
    layers, heads = summary["looped_layer"].values, summary.sizes["head"]
    where = [f"layer {i}, head {h}" for i in layers for h in range(heads)]
    kept, other = (
        part.isel(half=half).stack(point=("looped_layer", "head"), create_index=False)
        for half in (CHOSEN, MEASURED)
    )
    x = kept["value"].values
    at = (float(summary["dyck_head_layer"]), float(summary["dyck_head"]))
    is_head = np.array([(i, h) == at for i in layers for h in range(heads)])
    for rows, name, colour, symbol in (
        (~is_head, "other heads", SERIES_COLOURS[0], "circle"),
        (is_head, "the Dyck head", SERIES_COLOURS[1], "diamond"),
    ):
        figure.add_trace(
            points(
                x[rows],
                other.isel(point=rows),
                where=[place for place, row in zip(where, rows, strict=True) if row],
                name=name,
                colour=colour,
                n=_targets(summary),
                signed=True,
                symbol=symbol,
                size=8 if name == "other heads" else 12,
            )
        )
    ends = [float(np.nanmin(x, initial=0)), float(np.nanmax(x, initial=0))]
    figure.add_trace(
        go.Scatter(
            x=ends,
            y=ends,
            mode="lines",
            line={"color": GREY, "dash": "dot", "width": 1.5},
            name="equal on both halves",
            hoverinfo="skip",
        )
    )
    stable = float(summary["head_rank_stability"].sel(ablated_visits="all"))
    figure.update_xaxes(
        title_text=f"{RISE} on half 0, where the head is chosen",
        zerolinecolor=GREY,
        zerolinewidth=1,
    )
    figure.update_yaxes(title_text=f"{RISE} on half 1", zerolinecolor=GREY, zerolinewidth=1)
    return styled(
        figure,
        "Whether the search finds the same heads in new prompts",
        "each looped head ablated at all visits"
        + (f"; Spearman's correlation {stable:+.2f}" if np.isfinite(stable) else ""),
    )


def rise_by_shots(summary: xr.Dataset) -> go.Figure:
    """What ablating the Dyck head costs, by number of demonstrations."""
    figure = go.Figure()
    part = measured(summary, "dyck_head_rise_by_shots")
    there = np.isfinite(part["value"].values).any(1)
    labels = [str(k) for k in summary["shots"].values[there]]
    x = np.arange(len(labels))
    visits = summary["ablated_visits"].values.tolist()
    for i, visit in enumerate(visits):
        what = "at all visits" if visit == "all" else f"at visit {visit} alone"
        figure.add_trace(
            points(
                x + (i - (len(visits) - 1) / 2) * 0.08,
                part.isel(shots=there).sel(ablated_visits=visit),
                where=[f"{k} shots" for k in labels],
                name=what,
                colour=GREY if visit == "all" else series_colour(i - 1),
                n=f"{_targets(summary)} of all shots together",
                signed=True,
                mode="lines+markers",
            )
        )
    figure.add_hline(y=0, line={"color": GREY, "width": 1})
    figure.update_xaxes(title_text="shots", **places_axis(labels))
    figure.update_yaxes(title_text=RISE, zeroline=False)
    return styled(
        figure,
        f"The Dyck head (layer {float(summary['dyck_head_layer']):.0f}, head "
        f"{float(summary['dyck_head']):.0f}) ablated, by number of demonstrations",
        "half 1 of the prompts; whiskers: 95 % intervals over items",
    )


def _targets(summary: xr.Dataset) -> str:
    return f"{float(summary['targets'].isel(half=MEASURED)):,.0f} targets"


KINDS = (
    FigureKind(name="maps", title="Each head ablated", make=ablation_maps, needs=("head_rise",)),
    FigureKind(
        name="groups",
        title="Each K/V group ablated",
        make=group_ablation_maps,
        needs=("group_rise",),
    ),
    FigureKind(
        name="halves", title="On new prompts", make=halves, needs=("head_rise", "dyck_head")
    ),
    FigureKind(
        name="shots", title="By shots", make=rise_by_shots, needs=("dyck_head_rise_by_shots",)
    ),
)
