"""router-overlap: experts that a token keeps between visits, beside every null; how experts are used."""

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from smeltscope.dashboards.figures.common import (
    GREY,
    ROW_PIXELS,
    SERIES_COLOURS,
    FigureKind,
    add_range,
    bars,
    chosen,
    documents_of,
    execution_labels,
    execution_names,
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
    reference,
    series_colour,
    spread,
    styled,
    tick,
    without_interval,
)

BLUE = SERIES_COLOURS[0]
NULLS = {  # of the summary: what it is called, and its mark
    "marginal_overlap": ("sets drawn by use of the experts", "triangle-up"),
    "other_token_overlap": ("another token of the segment", "square"),
    "previous_overlap": ("last occurrence of the same token", "cross"),
}
# Of 504 experts, arXiv 2609.01343; where others are chosen the number of kept ones is no such number.
PAPER_CHOSEN, PAPER_KEPT = 8, (2, 3)


def overlap_histogram(
    summary: xr.Dataset, *, layer: int | None = None, pair: str | None = None
) -> go.Figure:
    """Share of tokens by how many experts they keep, over independent uniform sets: of one layer, or mean over layers."""
    figure = go.Figure()
    pair, n = pair_of(summary, pair), documents_of(summary)
    part = measured(summary, "overlap_share").sel(visit_pair=pair)  # (layer, shared)
    layers, shared = summary["looped_layer"].values, summary["shared_experts"].values
    who = f"layer {layer}"
    if layer is None:
        of_all = without_interval(part["value"].mean("looped_layer"))
        who = "mean over looped layers"
    else:
        chosen(layers, layer, "looped layer")
        of_all = part.sel(looped_layer=layer)
    names = [f"{i} experts" if i != 1 else "1 expert" for i in shared]
    figure.add_trace(bars(shared, of_all, name=who, colour=BLUE, n=n, where=names, opacity=0.55))
    if layer is None:
        cells = part.transpose("shared_experts", "looped_layer")
        figure.add_trace(
            points(
                (shared[:, None] + spread(len(layers), 0.6)).ravel(),
                cells.stack(point=("shared_experts", "looped_layer"), create_index=False),
                where=[f"{name}, layer {i}" for name in names for i in layers],
                name="each layer",
                colour=BLUE,
                n=n,
                size=6,
            )
        )
    figure.add_trace(
        reference(
            shared,
            summary["chance_share"],
            name="independent uniform sets (hypergeometric)",
            symbol="circle-open",
        )
    )
    for name, (what, value, colour, dash) in _means(summary, pair, layer).items():
        figure.add_shape(
            type="line",
            x0=value,
            x1=value,
            y0=0,
            y1=1,
            yref="paper",
            line={"color": colour, "dash": dash, "width": 1.5},
            name=f"mean, {what}: {value:.2f}" if name != "overlap" else f"mean: {value:.2f}",
            showlegend=True,
        )
    figure.update_xaxes(
        title_text="experts that a token keeps",
        dtick=tick(len(shared)),
        range=[-0.6, len(shared) - 0.4],
        zeroline=False,
    )
    figure.update_yaxes(title_text="share of tokens", rangemode="tozero")
    return styled(
        figure,
        f"Experts kept between {pair_words(pair)}",
        f"{who}; {len(shared) - 1} of {summary.sizes['expert']} experts for each token"
        if "expert" in summary.sizes
        else who,
        height=500,
        bottom=160,
    )


def _means(
    summary: xr.Dataset, pair: str, layer: int | None
) -> dict[str, tuple[str, float, str, str]]:
    """Mean overlap and that of each null: {quantity: (what it is, value, colour, dash)}."""
    looks = {"overlap": ("measured", BLUE, "solid")}
    looks |= {
        name: (what, colour, "dash")
        for (name, (what, _)), colour in zip(NULLS.items(), SERIES_COLOURS[1:], strict=False)
    }
    found = {}
    for name, (what, colour, dash) in looks.items():
        values = summary[name].sel(visit_pair=pair)
        value = float(values.mean() if layer is None else values.sel(looped_layer=layer))
        if np.isfinite(value):
            found[name] = (what, value, colour, dash)
    return found


def overlap_and_nulls(summary: xr.Dataset, *, pair: str | None = None) -> go.Figure:
    """Mean number of kept experts of each looped layer, beside each null."""
    figure = go.Figure()
    pair, n = pair_of(summary, pair), documents_of(summary)
    layers = summary["looped_layer"].values
    where, x = [f"layer {layer}" for layer in layers], np.arange(len(layers))
    rows = [("overlap", "the same token", "circle")]
    rows += [(name, what, symbol) for name, (what, symbol) in NULLS.items()]
    beside = spread(len(rows), 0.45)
    for i, (name, what, symbol) in enumerate(rows):
        figure.add_trace(
            points(
                x + beside[i],
                measured(summary, name).sel(visit_pair=pair),
                where=where,
                name=what,
                colour=series_colour(i),
                n=n,
                symbol=symbol,
                size=10 if name == "overlap" else 8,
            )
        )
    most = summary.sizes["shared_experts"] - 1
    ends = [-0.5, len(layers) - 0.5]
    chance = float(summary["chance"])
    figure.add_trace(reference(ends, [chance] * 2, name="independent uniform sets (k²/E)"))
    figure.add_trace(reference(ends, [most] * 2, name="all of them", dash="dash"))
    if most == PAPER_CHOSEN:
        add_range(figure, PAPER_KEPT, *ends, name="the paper's range with 504 experts")
    figure.update_xaxes(title_text="looped layer", **places_axis([str(i) for i in layers]))
    figure.update_yaxes(title_text=f"experts kept, of {most}", range=[0, most * 1.05])
    return styled(
        figure,
        f"Experts kept between {pair_words(pair)}, and what chance keeps",
        "mean over tokens; whiskers: 95 % intervals over documents",
        bottom=140,
    )


def overlap_by_category(summary: xr.Dataset, *, pair: str | None = None) -> go.Figure:
    """Kept experts by category of text, over what use of the experts alone would keep: each layer a point."""
    figure = go.Figure()
    pair, n = pair_of(summary, pair), ""
    layers = summary["looped_layer"].values
    categories = summary["table_category"].values.tolist()
    x = np.arange(len(categories))
    for name, what, colour, symbol in (
        ("overlap_by_category", "the same token", BLUE, "circle"),
        ("marginal_overlap_by_category", NULLS["marginal_overlap"][0], GREY, "triangle-up"),
    ):
        part = measured(summary, name).sel(visit_pair=pair)
        part = part.transpose("table_category", "looped_layer")
        figure.add_trace(
            points(
                (x[:, None] + spread(len(layers), 0.6)).ravel(),
                part.stack(point=("table_category", "looped_layer"), create_index=False),
                where=[f"{label(c)}, layer {i}" for c in categories for i in layers],
                name=what,
                colour=colour,
                n=n,
                symbol=symbol,
            )
        )
    most = summary.sizes["shared_experts"] - 1
    figure.update_xaxes(title_text="category", **places_axis([label(c, 24) for c in categories]))
    figure.update_yaxes(title_text=f"experts kept, of {most}", range=[0, most * 1.05])
    return styled(
        figure,
        f"Experts kept between {pair_words(pair)}, by category",
        "each looped layer a point, from left to right",
    )


def expert_load(summary: xr.Dataset) -> go.Figure:
    """Share of tokens that choose each expert, at every execution."""
    part = measured(summary, "load")
    part = part.isel(execution=np.isfinite(part["value"].values).any(1))
    labels, experts = execution_labels(part), summary.sizes["expert"]
    even = float(part["value"].sum("expert").mean()) / experts
    figure = go.Figure(
        heat(
            part,
            where=grid(execution_names(part), [f"expert {e}" for e in range(experts)]),
            n=f"{documents_of(summary)}; an even share is {even:.4f}",
            x=np.arange(experts),
            y=np.arange(len(labels)),
            coloraxis="coloraxis",
        )
    )
    figure.update_xaxes(title_text="expert", dtick=tick(experts), showgrid=False, zeroline=False)
    figure.update_yaxes(
        title_text="layer, in the order of execution",
        autorange="reversed",
        showgrid=False,
        zeroline=False,
        tickvals=np.arange(len(labels)),
        ticktext=labels,
    )
    figure.update_layout(coloraxis=masses_scale(largest(part["value"]), "share of tokens"))
    return styled(
        figure,
        "Load of the experts, by execution",
        f"an even share is {even:.3f}"
        + "; L2.2 is visit 2 of layer 2" * bool((part["visit"] > 1).any()),
        height=230 + max(20, ROW_PIXELS - len(labels) // 4) * len(labels),
        bottom=130,
    )


KINDS = (
    FigureKind(
        name="overlap",
        title="Experts kept",
        make=overlap_histogram,
        takes=("layer", "pair"),
        needs=("overlap_share",),
    ),
    FigureKind(
        name="nulls",
        title="Beside chance",
        make=overlap_and_nulls,
        takes=("pair",),
        needs=("overlap",),
    ),
    FigureKind(
        name="categories",
        title="By category",
        make=overlap_by_category,
        takes=("pair",),
        needs=("overlap_by_category",),
    ),
    FigureKind(name="load", title="Load of the experts", make=expert_load, needs=("load",)),
)
