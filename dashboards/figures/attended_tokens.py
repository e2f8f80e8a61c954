"""attended-tokens: whether two visits of a head attend to the same tokens, beside another head and chance."""

from functools import partial

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from smeltscope.dashboards.figures.common import (
    GREY,
    SERIES_COLOURS,
    FigureKind,
    add_range,
    measured,
    pair_of,
    pair_words,
    places_axis,
    points,
    reference,
    reported_range,
    spread,
    styled,
)

MEASURES = {  # title, axis
    "top8": ("The 8 most attended tokens", "share in common"),
    "top1": ("The most attended token", "share of queries where it is the same"),
    "overlap": ("Overlap of attention", "sum of the lesser masses"),
}


def attended_overlap(
    summary: xr.Dataset, *, measure: str = "top8", pair: str | None = None
) -> go.Figure:
    """What two visits of a head have in common, by layer; the same of two heads of one visit; chance."""
    figure = go.Figure()
    pair = pair_of(summary, pair)
    layers, heads = summary["looped_layer"].values, summary.sizes["head"]
    queries = summary["queries"].sel(visit_pair=pair).values
    count = int(np.nanmax(queries, initial=0))
    n = f"{summary.attrs.get('documents', 0):,} documents, {count:,} queries"
    x, beside = np.arange(len(layers)), spread(heads, 0.3)
    where = [f"layer {layer}, head {head}" for layer in layers for head in range(heads)]
    for name, what, colour, place, symbol in (
        (measure, f"two visits of a head ({pair_words(pair)})", SERIES_COLOURS[0], -0.2, "circle"),
        (f"{measure}_control", "control: two heads of one visit", GREY, 0.2, "square"),
    ):
        part = measured(summary, name).sel(visit_pair=pair)  # (layer, head)
        if not part["value"].notnull().any():
            continue  # one head has no other
        figure.add_trace(
            points(
                (x[:, None] + place + beside).ravel(),
                part.stack(point=("looped_layer", "head"), create_index=False),
                where=where,
                name=what,
                colour=colour,
                n=n,
                symbol=symbol,
                size=6,
                opacity=0.75,
                legendgroup=name,
            )
        )
        for end, mark, which in (
            ("", "diamond", ""),
            ("_without_first", "diamond-open", " without the first token"),
        ):
            mean = measured(summary, f"{name}{end}_by_pair").sel(visit_pair=[pair])
            figure.add_trace(
                points(
                    [len(layers) + place + (0.1 if end else -0.1)],
                    mean,
                    name=f"{what}{which}, mean over layers and heads",
                    colour=colour,
                    n=n,
                    symbol=mark,
                    size=10,
                    legendgroup=name,
                    showlegend=False,
                )
            )
    if f"{measure}_chance" in summary:
        chance = summary[f"{measure}_chance"].sel(visit_pair=pair).values
        figure.add_trace(reference(x, chance, name="chance", symbol="line-ew-open"))
    ends = (-0.5, len(layers) + 0.5)
    add_range(figure, reported_range("attended-tokens", measure), *ends)
    add_range(
        figure,
        reported_range("attended-tokens", f"{measure}_control"),
        *ends,
        name="the paper's range for the control",
        opacity=0.1,
        legendgroup="paper, control",
    )
    what, axis = MEASURES[measure]
    figure.update_xaxes(
        title_text="looped layer (open diamonds: without the segment's first token)",
        **places_axis([*(str(layer) for layer in layers), "mean"]),
    )
    figure.update_yaxes(title_text=axis, range=[0, 1.02])
    return styled(
        figure,
        f"{what} at {pair_words(pair)}",
        "each head a point; queries that see 64 keys or more; whiskers: 95 % intervals over documents",
        height=500,
        bottom=130,
    )


KINDS = tuple(
    FigureKind(
        name=measure,
        title=title,
        make=partial(attended_overlap, measure=measure),
        takes=("pair",),
        needs=(measure,),
    )
    for measure, (title, _) in MEASURES.items()
)
