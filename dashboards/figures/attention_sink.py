"""attention-sink: mass on the first token by head, over depth, by position, beside the Baseline; where it goes."""

from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from smeltscope.dashboards.figures.common import (
    GREY,
    ROW_PIXELS,
    FigureKind,
    Panel,
    bars,
    chosen,
    documents_of,
    execution_labels,
    execution_names,
    label,
    looped,
    measured,
    of_visit,
    places_axis,
    points,
    position_labels,
    reference,
    row_of_maps,
    series_colour,
    shade_later_visits,
    spread,
    styled,
    thread,
    tick,
    visit_colour,
    without_interval,
)

MASS = "mass on the first token"


def sink_heatmaps(summary: xr.Dataset) -> go.Figure:
    """Sink mass of every head: a map of layer by head for each visit, and the change from visit 1."""
    layers, visits = np.unique(summary["layer"].values), np.unique(summary["visit"].values)
    later = [int(v) for v in visits if v > 1]
    panels = [
        Panel(title=f"Visit {v}", part=of_visit(measured(summary, "sink_mass"), v, layers))
        for v in visits
    ]
    panels += [
        Panel(
            title=f"Visit {v}<br>minus visit 1",
            part=of_visit(measured(summary, "change"), v, layers),
            signed=True,
        )
        for v in later
    ]
    # a cell without a number is a layer not run in that visit
    figure = row_of_maps(panels, layers, n=documents_of(summary))
    return styled(
        figure,
        "Attention on the first token, by head",
        height=290 + ROW_PIXELS * len(layers),
        top=45,
        bottom=130,
    )


def sink_depth_profile(summary: xr.Dataset) -> go.Figure:
    """Sink mass over executed depth: each head a point, their mean a line with its interval, the uniform level dotted."""
    figure = go.Figure()
    executions, visits = summary["execution"].values, summary["visit"].values
    names, n = np.array(execution_names(summary)), documents_of(summary)
    mean = measured(summary, "sink_mass_mean")
    shaded = shade_later_visits(figure, summary)
    figure.add_trace(reference(executions, summary["uniform"], name="uniform attention"))
    heads = summary.sizes["head"]
    for visit in np.unique(visits):
        rows = np.flatnonzero(visits == visit)
        part = measured(summary, "sink_mass").isel(execution=rows)
        figure.add_trace(
            points(
                np.repeat(executions[rows], heads),
                part.stack(point=("execution", "head"), create_index=False),
                where=[f"{names[e]}, head {h}" for e in rows for h in range(heads)],
                name=f"visit {visit}, heads",
                colour=visit_colour(int(visit)),
                n=n,
                intervals=False,  # of so many they would hide each other; hovering shows them
                size=5,
                opacity=0.35,
                legendgroup=f"visit {visit}",
            )
        )
        figure.add_trace(
            points(
                executions[rows],
                mean.isel(execution=rows),
                where=names[rows].tolist(),
                name=f"visit {visit}, mean over heads",
                colour=visit_colour(int(visit)),
                n=n,
                size=10,
                symbol="diamond",
                legendgroup=f"visit {visit}",
            )
        )
    figure.add_trace(thread(executions, mean))
    figure.update_xaxes(
        title_text="layer, in the order of execution" + " (shaded: later visits)" * shaded,
        **places_axis([f"L{layer}" for layer in summary["layer"].values]),
    )
    figure.update_yaxes(title_text=MASS, rangemode="tozero")
    return styled(figure, "Attention on the first token, over depth", height=480)


def sink_against_baseline(summary: xr.Dataset, *, baseline: xr.Dataset) -> go.Figure:
    """Mean sink mass beside the Baseline's: by executed depth, and by layer."""
    figure = make_subplots(
        rows=1,
        cols=2,
        shared_yaxes=True,
        horizontal_spacing=0.04,
        subplot_titles=("by depth", "by layer"),
    )
    for data, of_baseline in ((summary, False), (baseline, True)):
        part, visits = measured(data, "sink_mass_mean"), data["visit"].values
        names, n = np.array(execution_names(data)), documents_of(data)
        fraction = np.arange(len(visits)) / max(1, len(visits) - 1)
        for column, x in enumerate((fraction, data["layer"].values), start=1):
            if column == 1:
                figure.add_trace(
                    thread(x, part, "dash" if of_baseline else "solid"), row=1, col=column
                )
            for visit in np.unique(visits):
                rows = visits == visit
                figure.add_trace(
                    points(
                        x[rows],
                        part.isel(execution=rows),
                        where=names[rows].tolist(),
                        name="Baseline" if of_baseline else f"visit {visit}",
                        colour=GREY if of_baseline else visit_colour(int(visit)),
                        n=n,
                        symbol="square" if of_baseline else "diamond",
                        mode="markers" if column == 1 else "lines+markers",
                        line={"width": 1, "dash": "dash" if of_baseline else "solid"},
                        legendgroup="Baseline" if of_baseline else f"visit {visit}",
                        showlegend=column == 1,
                    ),
                    row=1,
                    col=column,
                )
            if not of_baseline:
                figure.add_trace(
                    reference(
                        x,
                        data["uniform"],
                        name="uniform attention",
                        legendgroup="uniform",
                        showlegend=column == 1,
                    ),
                    row=1,
                    col=column,
                )
    layers = max(int(data["layer"].max()) for data in (summary, baseline)) + 1
    figure.update_xaxes(title_text="execution / (executions - 1)", zeroline=False, row=1, col=1)
    figure.update_xaxes(title_text="layer", dtick=tick(layers, 10), zeroline=False, row=1, col=2)
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(title_text=MASS, col=1)
    return styled(
        figure, "Attention on the first token, beside the Baseline", "mean over heads", top=20
    )


def sink_by_position(summary: xr.Dataset, *, layer: int | None = None) -> go.Figure:
    """Sink mass by query position, and the uniform level: mean over heads, of one layer or over all that are looped."""
    figure = go.Figure()
    visits, positions, n = (
        summary["visit"].values,
        summary["position"].values,
        documents_of(summary),
    )
    rows = looped(summary)
    if layer is not None:
        layer = chosen(np.unique(summary["layer"].values), layer, "layer")
        rows = summary["layer"].values == layer
    shown = np.isfinite(summary["uniform_by_position"].values).any(0)
    labels = position_labels(positions)[shown]
    x = np.arange(len(labels))
    for visit in np.unique(visits[rows]):
        if layer is None:
            part = measured(summary, f"sink_mass_by_position_visit_{visit}")
        else:
            of_layer = int(np.flatnonzero(rows & (visits == visit))[0])
            part = measured(summary, "sink_mass_by_position").isel(execution=of_layer)
        figure.add_trace(
            points(
                x,
                part.isel(position=shown),
                where=[f"queries {at}" for at in labels],
                name=f"visit {visit}",
                colour=visit_colour(int(visit)),
                n=n,
                mode="lines+markers",
            )
        )
    uniform = measured(summary, "uniform_by_position").isel(execution=rows, position=shown)
    figure.add_trace(
        reference(x, _mean_over(uniform, "execution")["value"], name="uniform attention")
    )
    figure.update_xaxes(title_text="position of the query in its segment", **places_axis(labels))
    figure.update_yaxes(
        title_text=MASS, type="log", dtick=1, minor={"dtick": "D1", "showgrid": True}
    )
    what = "looped layers" if (visits > 1).any() else "all layers"
    what = what if layer is None else f"layer {layer}"
    return styled(figure, f"Attention on the first token, by query position ({what})", height=440)


def _mean_over(part: xr.Dataset, dim: str) -> xr.Dataset:
    """The mean over the entries that have a value."""
    counts = part["value"].notnull().sum(dim)
    return without_interval(part["value"].fillna(0).sum(dim) / counts.where(counts > 0))


def region_masses(summary: xr.Dataset, *, head: int | None = None) -> go.Figure:
    """Attention by region at every execution, the uniform level at the end: of one head, or mean over heads."""
    figure = go.Figure()
    part, n = measured(summary, "region_mass_mean"), documents_of(summary)
    if head is not None:
        head = chosen(np.arange(summary.sizes["head"]), head, "head")
        part = measured(summary, "region_mass").isel(head=head)
    labels, names = execution_labels(summary), execution_names(summary)
    count = len(labels)
    aside = count + 0.2 + count / 30  # where uniform attention stands
    level = _mean_over(
        measured(summary, "region_uniform").isel(execution=looped(summary)), "execution"
    )
    for i, region in enumerate(summary["region"].values.tolist()):
        if not np.isfinite(part["value"].sel(region=region)).any():
            continue
        look: dict[str, Any] = {
            "name": label(region),
            "colour": series_colour(i),
            "legendgroup": label(region),
        }
        figure.add_trace(
            bars(
                np.arange(count), part.sel(region=region), where=names, n=n, intervals=False, **look
            )
        )
        figure.add_trace(
            bars(
                [aside],
                level.sel(region=[region]),
                where=["uniform attention"],
                n="",
                width=0.85 + count / 40,
                showlegend=False,
                **look,
            )
        )
    figure.update_layout(barmode="stack", bargap=0.15)
    shade_later_visits(figure, summary)
    step = tick(count, 20)
    figure.update_xaxes(
        title_text="layer, in the order of execution (.2: visit 2)"
        if (summary["visit"] > 1).any()
        else "layer",
        tickvals=[*range(0, count, step), aside],
        ticktext=[*labels[::step], "uniform"],
        range=[-0.6, aside + 0.6 + count / 25],
    )
    figure.update_yaxes(title_text="attention mass", range=[0, 1.02])
    who = "mean over heads" if head is None else f"head {head}"
    return styled(
        figure, f"Where attention goes, by execution ({who})", "sampled queries", height=480
    )


def freed_mass(summary: xr.Dataset) -> go.Figure:
    """What each region gains or loses from visit 1 to a later visit: every layer a point, all of them a diamond."""
    figure = go.Figure()
    visits, layers, n = summary["visit"].values, summary["layer"].values, documents_of(summary)
    change = measured(summary, "region_change_mean")
    regions = [
        r
        for r in summary["region"].values.tolist()
        if change["value"].sel(region=r).notnull().any()
    ]
    x = np.arange(len(regions))
    later = np.unique(visits[visits > 1])
    for visit in later:
        rows = np.flatnonzero(visits == visit)
        part = change.isel(execution=rows).sel(region=regions).transpose("region", "execution")
        figure.add_trace(
            points(
                (x[:, None] + spread(len(rows), 0.5) + 0.1).ravel(),
                part.stack(point=("region", "execution"), create_index=False),
                where=[f"{label(r)}, layer {layers[e]}" for r in regions for e in rows],
                name=f"visit {visit} minus visit 1, each layer",
                colour=visit_colour(int(visit)),
                n=n,
                signed=True,
                size=6,
                opacity=0.6,
            )
        )
    figure.add_trace(
        points(
            x - 0.32,
            measured(summary, "region_change_overall").sel(region=regions),
            where=[label(r) for r in regions],
            name="all layers" + " and later visits" * (len(later) > 1),
            colour=GREY,
            n=n,
            signed=True,
            symbol="diamond",
            size=11,
        )
    )
    figure.add_hline(y=0, line={"color": GREY, "width": 1})
    figure.update_xaxes(title_text="region of the key", **places_axis([label(r) for r in regions]))
    figure.update_yaxes(title_text="change of attention mass", zeroline=False)
    return styled(
        figure,
        "Where attention moves from visit 1 to later visits",
        "means over heads, sampled queries; changes add up to 0",
    )


KINDS = (
    FigureKind(name="heads", title="By head", make=sink_heatmaps, needs=("sink_mass",)),
    FigureKind(
        name="depth", title="Over depth", make=sink_depth_profile, needs=("sink_mass_mean",)
    ),
    FigureKind(
        name="baseline",
        title="Beside the Baseline",
        make=sink_against_baseline,
        takes=("baseline",),
        given=("baseline",),
        needs=("sink_mass_mean",),
    ),
    FigureKind(
        name="positions",
        title="By query position",
        make=sink_by_position,
        takes=("layer",),
        needs=("sink_mass_by_position",),
    ),
    FigureKind(
        name="freed",
        title="Where the mass moves",
        make=freed_mass,
        needs=("region_change_mean",),
    ),
    FigureKind(
        name="regions",
        title="By region",
        make=region_masses,
        takes=("head",),
        needs=("region_mass_mean",),
    ),
)
