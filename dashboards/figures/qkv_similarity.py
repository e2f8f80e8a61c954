"""qkv-similarity: at which stage of attention two visits of a layer part ways."""

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from smeltscope.dashboards.figures.common import (
    GREY,
    ROW_PIXELS,
    SERIES_COLOURS,
    FigureKind,
    Panel,
    add_range,
    documents_of,
    measured,
    pair_of,
    pair_words,
    places_axis,
    points,
    reported_range,
    row_of_maps,
    spread,
    styled,
)

MEASURES = {  # of the summary: what it is called, colour, mark
    "cosine": ("same token", SERIES_COLOURS[0], "circle"),
    "cosine_centred": ("same token, centred", SERIES_COLOURS[1], "diamond"),
    "floor": ("other token (floor)", GREY, "square"),
    "floor_centred": ("other token, centred", GREY, "square-open"),
}


def stage_cosines(summary: xr.Dataset, *, pair: str | None = None) -> go.Figure:
    """Cosine between two visits at each stage, raw and centred, over its floors: each layer a point, their mean beside it."""
    figure = go.Figure()
    pair, n = pair_of(summary, pair), documents_of(summary)
    stages, layers = summary["stage"].values.tolist(), summary["looped_layer"].values
    x, places = np.arange(len(stages)), spread(len(MEASURES), 0.6)
    beside = spread(len(layers), 0.13)
    for place, (name, (what, colour, symbol)) in zip(places, MEASURES.items(), strict=True):
        part = measured(summary, name).sel(visit_pair=pair)  # (stage, layer)
        figure.add_trace(
            points(
                (x[:, None] + place + beside).ravel(),
                part.stack(point=("stage", "looped_layer"), create_index=False),
                where=[f"{stage}, layer {layer}" for stage in stages for layer in layers],
                name=what,
                colour=colour,
                n=n,
                intervals=False,
                size=4,
                opacity=0.5,
                legendgroup=name,
                showlegend=False,
            )
        )
        figure.add_trace(
            points(
                x + place,
                measured(summary, f"{name}_overall").sel(visit_pair=pair),
                where=[f"{stage}, mean over looped layers" for stage in stages],
                name=what,
                colour=colour,
                n=n,
                symbol=symbol,
                size=9,
                legendgroup=name,
            )
        )
    shown = False
    for i, stage in enumerate(stages):
        ends = reported_range("qkv-similarity", "cosine", stage=stage)
        add_range(figure, ends, i - 0.42, i + 0.42, showlegend=ends is not None and not shown)
        shown = shown or ends is not None
    figure.update_xaxes(title_text="stage of attention", **places_axis(stages))
    figure.update_yaxes(title_text="cosine", zeroline=True, zerolinecolor=GREY)
    return styled(
        figure,
        f"How alike the stages of attention are at {pair_words(pair)}",
        "large: mean over looped layers with its 95 % interval; small: each layer; V random: the null for V",
        height=520,
        bottom=130,
    )


def cosines_by_layer(summary: xr.Dataset, *, pair: str | None = None) -> go.Figure:
    """Cosine between two visits by layer: a line for each stage, raw above and centred below."""
    figure = make_subplots(
        rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.1, subplot_titles=("raw", "centred")
    )
    pair, n = pair_of(summary, pair), documents_of(summary)
    layers, stages = summary["looped_layer"].values, summary["stage"].values.tolist()
    x, beside = np.arange(len(layers)), spread(len(stages), 0.3)
    for row, name in enumerate(("cosine", "cosine_centred"), start=1):
        colours = iter(SERIES_COLOURS * 2)
        for i, stage in enumerate(stages):
            is_null = stage.endswith("random")
            colour = GREY if is_null else next(colours)
            figure.add_trace(
                points(
                    x + beside[i],
                    measured(summary, name).sel(visit_pair=pair, stage=stage),
                    where=[f"layer {layer}" for layer in layers],
                    name=stage,
                    colour=colour,
                    n=n,
                    mode="lines+markers",
                    line={"width": 1, "dash": "dot" if is_null else "solid"},
                    size=6,
                    legendgroup=stage,
                    showlegend=row == 1,
                ),
                row=row,
                col=1,
            )
    figure.update_xaxes(**places_axis([str(layer) for layer in layers]))
    figure.update_xaxes(title_text="looped layer", row=2, col=1)
    figure.update_yaxes(title_text="cosine")
    return styled(
        figure,
        f"Cosines between {pair_words(pair)}, by layer",
        "whiskers: 95 % intervals over documents",
        height=620,
        top=20,
    )


def cosines_by_head(summary: xr.Dataset, *, pair: str | None = None) -> go.Figure:
    """Cosine between two visits of each head's vectors, centred: queries and what is read, keys and values."""
    pair, n = pair_of(summary, pair), documents_of(summary)
    panels = [
        Panel(
            title=stage,
            part=measured(summary, name)
            .sel({"visit_pair": pair, dim: stage})
            .transpose("looped_layer", head),
            column="head" if head == "head" else "K/V head",
            says=f"{stage}, ",
        )
        for name, dim, head in (
            ("query_head_cosine_centred", "query_stage", "head"),
            ("key_head_cosine_centred", "key_stage", "kv_head"),
        )
        if name in summary
        for stage in summary[dim].values.tolist()
    ]
    layers = summary["looped_layer"].values
    figure = row_of_maps(panels, layers, n=n, row="looped layer", mass="cosine")
    values = np.concatenate([panel.part["value"].values.ravel() for panel in panels])
    figure.update_layout(coloraxis={"cmin": float(np.nanmin(values, initial=0.0)), "cmax": 1.0})
    return styled(
        figure,
        f"Centred cosines between {pair_words(pair)}, by head",
        height=290 + ROW_PIXELS * len(layers),
        top=25,
        bottom=130,
    )


KINDS = (
    FigureKind(
        name="stages",
        title="By stage",
        make=stage_cosines,
        takes=("pair",),
        needs=("cosine_overall",),
    ),
    FigureKind(
        name="layers", title="By layer", make=cosines_by_layer, takes=("pair",), needs=("cosine",)
    ),
    FigureKind(
        name="heads",
        title="By head",
        make=cosines_by_head,
        takes=("pair",),
        needs=("query_head_cosine_centred",),
    ),
)
