"""residual-updates: what each execution writes, how visits compare in length and in direction."""

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from smeltscope.dashboards.figures.common import (
    GREY,
    SERIES_COLOURS,
    FigureKind,
    add_range,
    at_same_depth,
    chosen,
    differences_scale,
    documents_of,
    execution_labels,
    execution_names,
    grid,
    heat,
    log_axis,
    measured,
    pair_of,
    pair_words,
    places_axis,
    points,
    reference,
    reported_range,
    rings,
    series_colour,
    shade_later_visits,
    spread,
    styled,
    thread,
    tick,
    visit_colour,
    visits_of,
)

FLOW = {
    "residual_rms": "residual RMS",
    "update_rms": "update RMS",
    "relative_update": "relative update",
}
VECTORS = {
    "update": "whole update",
    "attn_out": "attention's write",
    "mlp_out": "MLP's write",
    "attn_in": "attention's normed input",
    "mlp_in": "MLP's normed input",
}
WRITES = {"update": "updates", "attn_out": "attention's writes", "mlp_out": "MLP's writes"}


def residual_flow(summary: xr.Dataset, *, baseline: xr.Dataset | None = None) -> go.Figure:
    """RMS of the stream and of the update, and the relative update, at every execution; the Baseline at the same depth."""
    figure = make_subplots(rows=3, cols=1, shared_xaxes=True, vertical_spacing=0.05)
    n, visits, count = documents_of(summary), summary["visit"].values, summary.sizes["execution"]
    names = np.array(execution_names(summary))
    for row, (name, what) in enumerate(FLOW.items(), start=1):
        if baseline is not None:
            figure.add_trace(
                points(
                    at_same_depth(baseline, count),
                    measured(baseline, name),
                    name="Baseline, at the same share of its depth",
                    where=[f"{what}, {at}" for at in execution_names(baseline)],
                    colour=GREY,
                    n=documents_of(baseline),
                    symbol="square",
                    mode="lines+markers",
                    line={"dash": "dash", "width": 1},
                    size=6,
                    legendgroup="Baseline",
                    showlegend=row == 1,
                ),
                row=row,
                col=1,
            )
        part = measured(summary, name)
        figure.add_trace(thread(np.arange(count), part), row=row, col=1)
        for visit in np.unique(visits):
            rows = np.flatnonzero(visits == visit)
            figure.add_trace(
                points(
                    rows,
                    part.isel(execution=rows),
                    where=[f"{what}, {at}" for at in names[rows]],
                    name=f"visit {visit}",
                    colour=visit_colour(int(visit)),
                    n=n,
                    symbol="diamond",
                    size=9,
                    legendgroup=f"visit {visit}",
                    showlegend=row == 1,
                ),
                row=row,
                col=1,
            )
        shade_later_visits(figure, summary, row=row, col=1)
        figure.update_yaxes(title_text=what, **log_axis(part["value"]), row=row, col=1)
    labels = execution_labels(summary)
    figure.update_xaxes(**places_axis(labels))
    figure.update_xaxes(
        title_text="layer, in the order of execution" + " (.2: visit 2)" * bool((visits > 1).any()),
        row=3,
        col=1,
    )
    return styled(
        figure,
        "What runs through the residual stream, and what is written into it",
        "mean over tokens but the first (relative: geometric mean); logarithmic",
        height=720,
    )


def norm_ratios(summary: xr.Dataset, *, pair: str | None = None) -> go.Figure:
    """Norms at a later visit over those at an earlier one, by layer, for what is read and what is written."""
    figure = go.Figure()
    pair, n = pair_of(summary, pair), documents_of(summary)
    layers = summary["looped_layer"].values
    where, x = [f"layer {layer}" for layer in layers], np.arange(len(layers))
    series = [(measured(summary, "norm_ratio").sel(vector=v), w) for v, w in VECTORS.items()]
    if "relative_update_ratio" in summary:
        series.append((measured(summary, "relative_update_ratio"), "relative update"))
    beside = spread(len(series), 0.6)
    symbols = ("circle", "square", "triangle-up", "diamond", "cross", "x")
    for i, (part, what) in enumerate(series):
        of_pair = part.sel(visit_pair=pair)
        if of_pair["value"].notnull().any():
            figure.add_trace(
                points(
                    x + beside[i],
                    of_pair,
                    where=where,
                    name=what,
                    colour=series_colour(i),
                    n=n,
                    symbol=symbols[i],
                )
            )
    ends = (-0.5, len(layers) - 0.5)
    figure.add_trace(reference(ends, [1, 1], name="as long at both visits"))
    add_range(figure, reported_range("residual-updates", "norm_ratio", vector="update"), *ends)
    earlier, later = visits_of(pair)
    figure.update_xaxes(title_text="looped layer", **places_axis([str(i) for i in layers]))
    figure.update_yaxes(
        title_text=f"norm at visit {later} / norm at visit {earlier}",
        **log_axis(summary["norm_ratio"]),
    )
    return styled(
        figure,
        f"Lengths at {pair_words(pair)}",
        "geometric mean over tokens; logarithmic; whiskers: 95 % intervals over documents",
        height=500,
        bottom=150,
    )


def update_cosines(
    summary: xr.Dataset, *, write: str | None = None, centred: bool = False
) -> go.Figure:
    """Cosine of what any two executions write, the visits of the span framed and pairs of one layer marked."""
    write = chosen(list(WRITES), write, "write")
    name = "cosine_centred" if centred else "cosine"
    part = measured(summary, name).sel(write=write)
    names, labels = execution_names(summary), execution_labels(summary)
    count, visits = len(labels), summary["visit"].values
    figure = go.Figure(
        heat(
            part,
            where=grid(names, names),
            n=documents_of(summary),
            signed=True,
            x=np.arange(count),
            y=np.arange(count),
            coloraxis="coloraxis",
        ).update(xgap=0, ygap=0)
    )
    layers = summary["layer"].values
    i, j = np.nonzero((layers[:, None] == layers) & ~np.eye(count, dtype=bool))
    if len(i):
        figure.add_trace(rings(j, i, size=8, width=1.5, name="the same layer"))
        looped = np.isin(layers, layers[visits > 1])
        blocks = [np.flatnonzero(looped & (visits == v)) for v in np.unique(visits)]
        for a in blocks:
            for b in blocks:
                figure.add_shape(
                    type="rect",
                    x0=a.min() - 0.5,
                    x1=a.max() + 0.5,
                    y0=b.min() - 0.5,
                    y1=b.max() + 0.5,
                    line={"color": "#000000", "width": 1.5},
                )
    axis = {"showgrid": False, "zeroline": False, "title_text": "layer, in the order of execution"}
    step = tick(count, 20)
    axis |= {"tickvals": np.arange(count)[::step], "ticktext": labels[::step]}
    figure.update_xaxes(**axis, constrain="domain", tickangle=0 if count <= 12 else -90)
    figure.update_yaxes(**axis, autorange="reversed", scaleanchor="x", constrain="domain")
    figure.update_layout(coloraxis=differences_scale(1.0, "cosine"))
    figure = styled(
        figure,
        f"Cosine of {WRITES[write]} of any two executions" + ", centred" * centred,
        "mean over sampled tokens; framed: visits of the looped layers"
        if len(i)
        else "mean over sampled tokens",
        height=min(900, 380 + 22 * count),
        bottom=130,
    )
    return figure


def cosines_by_distance(
    summary: xr.Dataset,
    *,
    write: str | None = None,
    pair: str | None = None,
    centred: bool = False,
) -> go.Figure:
    """Cosine of the updates of a layer's two visits, and of different layers as far apart in executions."""
    figure = go.Figure()
    write, pair = chosen(list(WRITES), write, "write"), pair_of(summary, pair)
    n, end = documents_of(summary), "_centred" if centred else ""

    def of(name: str) -> xr.Dataset:
        return measured(summary, name).sel(write=write, visit_pair=pair)

    others = of(f"nonmatching_by_distance{end}")
    there = np.flatnonzero(np.isfinite(others["value"].values))
    figure.add_trace(
        points(
            there,
            others.isel(distance=there),
            where=[f"{d} executions apart" for d in there],
            name="different looped layers",
            colour=GREY,
            n=n,
            signed=True,
            mode="lines+markers",
            symbol="square",
        )
    )
    matched = of(f"matched_cosine{end}")
    layers = summary["looped_layer"].values
    apart = _apart(summary, pair)
    figure.add_trace(
        points(
            apart + _beside(apart),
            matched,
            where=[
                f"layer {i}, {d:.0f} executions apart" for i, d in zip(layers, apart, strict=True)
            ],
            name="the same layer, each",
            colour=SERIES_COLOURS[1],
            n=n,
            signed=True,
        )
    )
    overall = float(np.nanmean(apart)) if np.isfinite(apart).any() else 0.0
    for name, what, colour, symbol in (
        (f"matched_overall{end}", "the same layer, mean", SERIES_COLOURS[1], "diamond"),
        (
            f"nearby_overall{end}",
            "different layers as far apart, mean",
            SERIES_COLOURS[0],
            "diamond",
        ),
    ):
        mean = of(name).expand_dims("mean")
        if mean["value"].notnull().any():
            figure.add_trace(
                points(
                    [overall + 0.45],
                    mean,
                    name=what,
                    colour=colour,
                    n=n,
                    signed=True,
                    size=11,
                    symbol=symbol,
                )
            )
    far = max([1, *there.tolist(), *apart[np.isfinite(apart)].tolist()])
    if write == "update" and not centred:
        add_range(
            figure,
            reported_range("residual-updates", "matched_cosine", write="update"),
            0.5,
            far + 0.8,
        )
    figure.add_hline(y=0, line={"color": GREY, "width": 1})
    figure.update_xaxes(title_text="executions apart", dtick=tick(int(far)), range=[0.5, far + 0.8])
    figure.update_yaxes(title_text="cosine", zeroline=False)
    return styled(
        figure,
        f"Cosine of {WRITES[write]} at {pair_words(pair)}, by distance" + ", centred" * centred,
        "whiskers: 95 % intervals over documents",
        height=480,
        bottom=140,
    )


def _apart(summary: xr.Dataset, pair: str) -> np.ndarray:
    """How many executions lie between the two visits of each looped layer; NaN where it has only one of them."""
    layers, visits = summary["layer"].values, summary["visit"].values
    places = {(int(a), int(v)): e for e, (a, v) in enumerate(zip(layers, visits, strict=True))}
    earlier, later = map(int, visits_of(pair))
    return np.array(
        [
            places.get((int(layer), later), np.nan) - places.get((int(layer), earlier), np.nan)
            for layer in summary["looped_layer"].values
        ],
        dtype=float,
    )


def _beside(apart: np.ndarray) -> np.ndarray:
    """Where points of one distance stand beside each other."""
    found = np.zeros(len(apart))
    for distance in np.unique(apart[np.isfinite(apart)]):
        found[apart == distance] = spread(int((apart == distance).sum()), 0.5)
    return found


KINDS = (
    FigureKind(
        name="flow",
        title="Residual stream",
        make=residual_flow,
        takes=("baseline",),
        needs=("residual_rms",),
    ),
    FigureKind(
        name="ratios",
        title="Lengths at two visits",
        make=norm_ratios,
        takes=("pair",),
        needs=("norm_ratio",),
    ),
    FigureKind(
        name="cosines",
        title="Cosines of all executions",
        make=update_cosines,
        takes=("write", "centred"),
        needs=("cosine",),
    ),
    FigureKind(
        name="distance",
        title="Cosines by distance",
        make=cosines_by_distance,
        takes=("write", "pair", "centred"),
        needs=("matched_cosine",),
    ),
)
