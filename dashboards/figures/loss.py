"""loss: by category, by length, by position, and with other numbers of visits."""

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from smeltscope.dashboards.figures.common import (
    GREY,
    SERIES_COLOURS,
    FigureKind,
    documents_of,
    label,
    measured,
    places_axis,
    points,
    position_labels,
    reference,
    styled,
)

BLUE, RED = SERIES_COLOURS[:2]
LOSS = "loss, nats per token"


def loss_by_category(
    summary: xr.Dataset, *, by_category: xr.Dataset, baseline_by_category: xr.Dataset | None = None
) -> go.Figure:
    """Mean loss of each category, and over all of the run."""
    return _by_group(summary, by_category, baseline_by_category, "category")


def loss_by_length(
    summary: xr.Dataset, *, by_length: xr.Dataset, baseline_by_length: xr.Dataset | None = None
) -> go.Figure:
    """Mean loss of documents by how long they are."""
    return _by_group(summary, by_length, baseline_by_length, "length of the document, tokens")


def _by_group(
    summary: xr.Dataset, groups: xr.Dataset, baseline: xr.Dataset | None, what: str
) -> go.Figure:
    figure = go.Figure()
    there = groups["documents"].values > 0
    names = groups["group"].values[there].tolist()
    for data, name, colour, symbol, aside in (
        (groups, "this model", BLUE, "circle", -0.1),
        (baseline, "Baseline", GREY, "square", 0.1),
    ):
        if data is None:
            continue
        part = measured(data.sel(group=names), "loss")
        counts = data["documents"].sel(group=names).values
        figure.add_trace(
            points(
                np.arange(len(names)) + (aside if baseline is not None else 0),
                part,
                where=[f"{label(g)}, {c:,} documents" for g, c in zip(names, counts, strict=True)],
                name=name,
                colour=colour,
                n="",
                symbol=symbol,
                size=10,
            )
        )
    ends = [-0.5, len(names) - 0.5]
    figure.add_trace(
        reference(ends, [float(summary["loss"])] * 2, name="this model, all documents", dash="dash")
    )
    figure.update_xaxes(title_text=what, **places_axis([label(g, 24) for g in names]))
    figure.update_yaxes(title_text=LOSS)
    return styled(
        figure,
        f"Loss by {what.split(',')[0]}",
        "every predicted token counts alike; whiskers: 95 % intervals over documents",
    )


def loss_by_position(summary: xr.Dataset, *, baseline: xr.Dataset | None = None) -> go.Figure:
    """Mean loss by the position that predicts, and that of equal probability for all tokens."""
    figure = go.Figure()
    shown = np.isfinite(summary["loss_by_position"].values)
    position = summary["position"].values
    labels = position_labels(position)[shown]
    x = np.arange(len(labels))
    for data, name, colour, symbol in (
        (summary, "this model", BLUE, "circle"),
        (baseline, "Baseline", GREY, "square"),
    ):
        if data is None:
            continue
        part = measured(data, "loss_by_position").reindex(position=position).isel(position=shown)
        tokens = data["tokens_by_position"].reindex(position=position).values[shown]
        where = [
            f"position {at}, {count:,.0f} tokens" for at, count in zip(labels, tokens, strict=True)
        ]
        figure.add_trace(
            points(
                x,
                part,
                where=where,
                name=name,
                colour=colour,
                n=documents_of(data),
                symbol=symbol,
                mode="lines+markers",
                line={"dash": "solid" if data is summary else "dash"},
            )
        )
    uniform = float(summary["uniform"])
    figure.add_trace(
        reference([-0.5, len(x) - 0.5], [uniform] * 2, name=f"equal probability ({uniform:.2f})")
    )
    figure.update_xaxes(title_text="position that predicts", **places_axis(labels))
    figure.update_yaxes(title_text=LOSS, rangemode="tozero")
    return styled(
        figure, "Loss by position in the segment", "whiskers: 95 % intervals over documents"
    )


def loss_by_visits(summary: xr.Dataset) -> go.Figure:
    """The same checkpoint with other numbers of visits: its loss, and how far its predictions are from its own."""
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    visits, n = summary["num_visits"].values, documents_of(summary)
    where = [f"{v} visit" + "s" * int(v != 1) for v in visits]
    for row, (name, what, axis, colour) in enumerate(
        (
            ("swept_loss", "loss", LOSS, BLUE),
            ("swept_kl", "divergence from the model as trained", "KL, nats per token", RED),
        ),
        start=1,
    ):
        figure.add_trace(
            points(
                visits,
                measured(summary, name),
                where=where,
                name=what,
                colour=colour,
                n=n,
                mode="lines+markers",
                size=9,
            ),
            row=row,
            col=1,
        )
        figure.update_yaxes(title_text=axis, row=row, col=1)
    ends = [visits.min() - 0.3, visits.max() + 0.3]
    loss = float(summary["loss"])
    figure.add_trace(
        reference(ends, [loss] * 2, name=f"loss as trained ({loss:.3f})"), row=1, col=1
    )
    own = float(summary["own_visits"]) if "own_visits" in summary else np.nan
    if np.isfinite(own):
        figure.add_vline(
            x=own, line={"color": GREY, "dash": "dash", "width": 1}, name="own", row="all", col=1
        )
    figure.update_yaxes(rangemode="tozero", row=2, col=1)
    figure.update_xaxes(range=ends, dtick=1, zeroline=False)
    figure.update_xaxes(title_text="visits of the looped layers", row=2, col=1)
    zero = "0: looped layers left out; " if 0 in visits else ""
    own_words = f"dashed: its own {own:.0f}; " if np.isfinite(own) else ""
    return styled(
        figure,
        "The same weights with other numbers of visits",
        f"{own_words}{zero}whiskers: 95 % intervals over documents",
        height=560,
    )


KINDS = (
    FigureKind(
        name="categories",
        title="By category",
        make=loss_by_category,
        takes=("by_category", "baseline_by_category"),
        given=("by_category",),
        needs=("loss",),
    ),
    FigureKind(
        name="lengths",
        title="By length",
        make=loss_by_length,
        takes=("by_length", "baseline_by_length"),
        given=("by_length",),
        needs=("loss",),
    ),
    FigureKind(
        name="positions",
        title="By position",
        make=loss_by_position,
        takes=("baseline",),
        needs=("loss_by_position",),
    ),
    FigureKind(
        name="visits", title="Numbers of visits", make=loss_by_visits, needs=("swept_loss",)
    ),
)
