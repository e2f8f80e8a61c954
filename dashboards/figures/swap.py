"""swap: whether a later visit reads other places or other content, by its queries or by its keys."""

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from smeltscope.dashboards.figures.common import (
    GREY,
    SERIES_COLOURS,
    FigureKind,
    bars,
    chosen,
    differences_scale,
    documents_of,
    grid,
    heat,
    label,
    largest,
    masses_scale,
    measured,
    pair_of,
    pair_words,
    places_axis,
    points,
    spread,
    styled,
    visits_of,
    without_interval,
)

CHANGES = {
    "mass_change": "change",
    "mass_change_by_queries": "by queries",
    "mass_change_by_keys": "by keys",
}
FIRST = {
    "first_change": ("change", GREY),
    "first_change_by_queries": ("by queries", SERIES_COLOURS[0]),
    "first_change_by_keys": ("by keys", SERIES_COLOURS[1]),
}
CONTENT = {
    "moved_share": ("attention moved", SERIES_COLOURS[0]),
    "values_share": ("values changed", SERIES_COLOURS[1]),
    "interaction_share": ("both together", SERIES_COLOURS[2]),
}


def swapped_attention(
    summary: xr.Dataset,
    *,
    pair: str | None = None,
    layer: int | None = None,
    head: int | None = None,
) -> go.Figure:
    """Mass of each region under the four combinations of queries and keys, and its change split between the two.

    Of one layer or one head; means over all that are not named.
    """
    pair = pair_of(summary, pair)
    earlier, later = visits_of(pair)
    at: dict[str, object] = {"visit_pair": pair}
    if layer is not None:
        at["looped_layer"] = chosen(summary["looped_layer"].values, layer, "looped layer")
    if head is not None:
        at["head"] = chosen(np.arange(summary.sizes["head"]), head, "head")
    combinations = {
        "mass_earlier": f"Q{earlier} K{earlier}",
        "mass_later_queries": f"Q{later} K{earlier}",
        "mass_later_keys": f"Q{earlier} K{later}",
        "mass_later": f"Q{later} K{later}",
    }
    figure = make_subplots(
        rows=1,
        cols=2,
        shared_yaxes=True,
        horizontal_spacing=0.04,
        column_widths=[4, 3],
        subplot_titles=("mass, by queries and keys of visit", "change, and its parts"),
    )
    regions = summary["region"].values.tolist()
    regions = [r for r in regions if summary["mass_earlier"].sel(region=r).notnull().any()]
    for column, (names, signed) in enumerate(((combinations, False), (CHANGES, True)), start=1):
        part = xr.concat([_mean(measured(summary, name).sel(at)) for name in names], "column")
        part = part.sel(region=regions).transpose("region", "column")
        trace = heat(
            part,
            where=grid([label(r) for r in regions], list(names.values())),
            n=documents_of(summary),
            signed=signed,
            x=np.arange(len(names)),
            y=np.arange(len(regions)),
            texttemplate="%{z:+.2r}" if signed else "%{z:.3f}",
            coloraxis="coloraxis2" if signed else "coloraxis",
        )
        figure.add_trace(trace, row=1, col=column)
        figure.update_xaxes(
            tickvals=np.arange(len(names)),
            ticktext=list(names.values()),
            title_text="Shapley values" if signed else "queries and keys",
            row=1,
            col=column,
        )
    figure.update_xaxes(showgrid=False, zeroline=False, tickangle=0)
    figure.update_yaxes(
        autorange="reversed",
        showgrid=False,
        zeroline=False,
        tickvals=np.arange(len(regions)),
        ticktext=[label(r) for r in regions],
    )
    figure.update_yaxes(title_text="region of the key", col=1)
    masses, changes = (trace.z for trace in figure.data)
    figure.update_layout(
        coloraxis=masses_scale(largest(masses)), coloraxis2=differences_scale(largest(changes))
    )
    who = ["all looped layers" if layer is None else f"layer {layer}"]
    who.append("mean over heads" if head is None else f"head {head}")
    return styled(
        figure,
        f"Attention under queries and keys of {pair_words(pair)}",
        f"{', '.join(who)}; sampled queries",
        height=300 + 34 * len(regions),
        top=25,
        bottom=130,
    )


def _mean(part: xr.Dataset) -> xr.Dataset:
    """The mean over layers and heads where there are several; a mean has no interval here."""
    over = [dim for dim in ("looped_layer", "head") if dim in part["value"].dims]
    part = part.drop_vars([c for c in part.coords if c not in part["value"].dims])
    if not over:
        return part
    return without_interval(part["value"].mean(over))


def first_change_split(summary: xr.Dataset, *, pair: str | None = None) -> go.Figure:
    """The first token's change of mass, by queries and by keys: each head a point, all of them a bar."""
    return _by_layer(
        summary,
        FIRST,
        pair,
        title="What moves mass on the first token between",
        axis="change of mass on the first token",
        subtitle="Shapley values; each head a point, from left to right; whiskers: 95 % intervals",
    )


def content_split(summary: xr.Dataset, *, pair: str | None = None) -> go.Figure:
    """What changes in what heads read: other places, other content, or both together; the shares add up to 1."""
    return _by_layer(
        summary,
        CONTENT,
        pair,
        title="What changes in what heads read between",
        axis="share of the change of PV",
        subtitle="each head a point, from left to right; shares add up to 1; whiskers: 95 % intervals",
    )


def _by_layer(
    summary: xr.Dataset,
    series: dict[str, tuple[str, str]],
    pair: str | None,
    *,
    title: str,
    axis: str,
    subtitle: str,
) -> go.Figure:
    figure = go.Figure()
    pair, n = pair_of(summary, pair), documents_of(summary)
    layers, heads = summary["looped_layer"].values, summary.sizes["head"]
    x, places = np.arange(len(layers)), spread(len(series), 0.56)
    for place, (name, (what, colour)) in zip(places, series.items(), strict=True):
        part = measured(summary, name).sel(visit_pair=pair)
        figure.add_trace(
            points(
                (x[:, None] + place + spread(heads, 0.2)).ravel(),
                part.stack(point=("looped_layer", "head"), create_index=False),
                where=[f"layer {i}, head {h}" for i in layers for h in range(heads)],
                name=what,
                colour=colour,
                n=n,
                signed=True,
                size=5,
                opacity=0.75,
                legendgroup=name,
            )
        )
        mean = measured(summary, f"{name}_by_pair").sel(visit_pair=[pair])
        figure.add_trace(
            bars(
                [len(layers) + place],
                mean,
                name=f"{what}, mean over layers and heads",
                colour=colour,
                n=n,
                signed=True,
                width=0.2,
                legendgroup=name,
                showlegend=False,
            )
        )
    figure.add_hline(y=0, line={"color": GREY, "width": 1})
    labels = [*(str(i) for i in layers), "mean"]
    figure.update_xaxes(title_text="looped layer", **places_axis(labels))
    figure.update_yaxes(title_text=axis, zeroline=False)
    return styled(figure, f"{title} {pair_words(pair)}", subtitle, height=480)


KINDS = (
    FigureKind(
        name="attention",
        title="Queries and keys",
        make=swapped_attention,
        takes=("pair", "layer", "head"),
        needs=("mass_earlier",),
    ),
    FigureKind(
        name="first",
        title="The first token's mass",
        make=first_change_split,
        takes=("pair",),
        needs=("first_change",),
    ),
    FigureKind(
        name="content",
        title="Places or content",
        make=content_split,
        takes=("pair",),
        needs=("moved_share",),
    ),
)
