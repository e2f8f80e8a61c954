"""dyck-state: what of the brackets' state can be read from the residual stream at each execution."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from smeltscope.dashboards.figures.common import (
    GREY,
    SERIES_COLOURS,
    FigureKind,
    at_same_depth,
    bars,
    documents_of,
    execution_labels,
    execution_names,
    measured,
    pair_of,
    pair_words,
    places_axis,
    points,
    reference,
    shade_later_visits,
    styled,
    visit_colour,
)

STATES = {
    "depth": "depth",
    "stack_top": "type on top of the stack",
    "match": "how far back it opened",
    "closer": "what closes it",
    "shown_closer": "what closes it, where shown before",
}


def accuracy_by_execution(summary: xr.Dataset, *, baseline: xr.Dataset | None = None) -> go.Figure:
    """Accuracy of linear probes at every execution, over the control task, the commonest class and the token alone."""
    figure = _panels(summary)
    names, visits = np.array(execution_names(summary)), summary["visit"].values
    count = summary.sizes["execution"]
    x = np.arange(count)
    for state, n, at, first in _states(summary):
        shown: dict[str, Any] = {"showlegend": first}
        for name, what, dash in (
            ("majority", "commonest class", "dot"),
            ("token", "by the token alone", "dash"),
        ):
            value = float(summary[name].sel(state=state))
            figure.add_trace(
                reference(
                    [-0.5, count - 0.5],
                    [value] * 2,
                    name=what,
                    dash=dash,
                    legendgroup=name,
                    **shown,
                ),
                **at,
            )
        figure.add_trace(
            points(
                x,
                measured(summary, "control").sel(state=state),
                where=names.tolist(),
                name="control task",
                colour=GREY,
                n=n,
                symbol="square",
                size=6,
                legendgroup="control",
                **shown,
            ),
            **at,
        )
        if baseline is not None:
            figure.add_trace(
                points(
                    at_same_depth(baseline, count),
                    measured(baseline, "accuracy").sel(state=state),
                    where=execution_names(baseline),
                    name="Baseline, at the same share of its depth",
                    colour=GREY,
                    n=documents_of(baseline),
                    symbol="triangle-up-open",
                    legendgroup="Baseline",
                    **shown,
                ),
                **at,
            )
        for visit in np.unique(visits):
            rows = np.flatnonzero(visits == visit)
            figure.add_trace(
                points(
                    rows,
                    measured(summary, "accuracy").sel(state=state).isel(execution=rows),
                    where=names[rows].tolist(),
                    name=f"visit {visit}",
                    colour=visit_colour(int(visit)),
                    n=n,
                    symbol="diamond",
                    legendgroup=f"visit {visit}",
                    **shown,
                ),
                **at,
            )
        shade_later_visits(figure, summary, **at)
    figure.update_xaxes(**places_axis(execution_labels(summary), 12, tickangle=-60))
    _title_below(figure, summary, "layer, in the order of execution")
    figure.update_yaxes(range=[0, 1.02])
    figure.update_yaxes(title_text="accuracy", col=1)
    return styled(
        figure,
        "What linear probes read of the brackets' state, by execution",
        "on items that they were not fitted on; whiskers: 95 % intervals over items",
        height=150 + 245 * _rows(summary),
        top=20,
        bottom=150,
    )


def change_by_layer(summary: xr.Dataset, *, pair: str | None = None) -> go.Figure:
    """What a later visit of each layer gains and loses, and the same of the control task."""
    figure = _panels(summary)
    pair = pair_of(summary, pair)
    layers = summary["looped_layer"].values
    x, where = np.arange(len(layers)), [f"layer {layer}" for layer in layers]
    for state, n, at, first in _states(summary):
        shown: dict[str, Any] = {"showlegend": first}

        def of(name: str, state: str = state) -> xr.Dataset:
            return measured(summary, name).sel(visit_pair=pair, state=state)

        for name, colour, sign in (
            ("gained", SERIES_COLOURS[2], 1),
            ("lost", SERIES_COLOURS[1], -1),
        ):
            trace = bars(
                x,
                of(name),
                where=where,
                name=name,
                colour=colour,
                n=n,
                opacity=0.6,
                legendgroup=name,
                **shown,
            )
            # what is lost hangs below 0; hovering still says it as a share
            trace.update(y=sign * of(name)["value"].values, width=0.5, error_y=None)
            figure.add_trace(trace, **at)
        for name, what, colour, symbol, aside in (
            ("change", "change = gained - lost", SERIES_COLOURS[0], "diamond", -0.1),
            ("control_change", "change of the control task", GREY, "square", 0.12),
        ):
            figure.add_trace(
                points(
                    x + aside,
                    of(name),
                    where=where,
                    name=what,
                    colour=colour,
                    n=n,
                    signed=True,
                    symbol=symbol,
                    legendgroup=name,
                    **shown,
                ),
                **at,
            )
        figure.add_hline(y=0, line={"color": GREY, "width": 1}, **at)
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(**places_axis([str(layer) for layer in layers]))
    _title_below(figure, summary, "looped layer")
    figure.update_yaxes(zeroline=False)
    figure.update_yaxes(title_text="share of tokens", col=1)
    return styled(
        figure,
        f"What can be read at {pair_words(pair)}: gained and lost",
        "share of tokens read rightly at one visit only; whiskers: 95 % intervals over items",
        height=130 + 245 * _rows(summary),
        top=20,
        bottom=130,
    )


def _rows(summary: xr.Dataset) -> int:
    """Rows of panels, two states in each."""
    return -(-summary.sizes["state"] // 2)


def _panels(summary: xr.Dataset) -> go.Figure:
    rows = _rows(summary)
    return make_subplots(
        rows=rows,
        cols=2,
        shared_yaxes=True,
        horizontal_spacing=0.05,
        vertical_spacing=0.28 / rows,
        subplot_titles=[STATES.get(s, s) for s in summary["state"].values.tolist()],
    )


def _title_below(figure: go.Figure, summary: xr.Dataset, title: str) -> None:
    """The title of the lowest panel of each column; a place that no state fills stays empty."""
    for _, _, at, _ in list(_states(summary))[-2:]:
        figure.update_xaxes(title_text=title, **at)
    if summary.sizes["state"] % 2:
        empty = {"row": _rows(summary), "col": 2}
        figure.update_xaxes(visible=False, **empty)
        figure.update_yaxes(visible=False, **empty)


def _states(summary: xr.Dataset) -> Iterator[tuple[str, str, dict[str, int], bool]]:
    """Each state with what its numbers rest on, where its panel is, and whether it is the first that shows anything."""
    for i, state in enumerate(summary["state"].values.tolist()):
        tokens = float(summary["tokens"].sel(state=state))
        n = f"{documents_of(summary)}, {tokens:,.0f} tokens"
        yield state, n, {"row": 1 + i // 2, "col": 1 + i % 2}, i == 0


KINDS = (
    FigureKind(
        name="accuracy",
        title="By execution",
        make=accuracy_by_execution,
        takes=("baseline",),
        needs=("accuracy",),
    ),
    FigureKind(
        name="changes",
        title="Gained and lost",
        make=change_by_layer,
        takes=("pair",),
        needs=("change",),
    ),
)
