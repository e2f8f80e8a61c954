"""dyck-scores: how many prompts are answered right, by number of demonstrations, beside what needs no model."""

from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from smeltscope.dashboards.figures.common import (
    GREY,
    SERIES_COLOURS,
    FigureKind,
    has_values,
    measured,
    places_axis,
    points,
    reference,
    series_colour,
    styled,
)

SCORES = {
    "exact": ("exact text, written by itself", "circle"),
    "all_right": ("all tokens right", "diamond"),
    "symbol_accuracy": ("symbols right", "triangle-up"),
}
REFERENCES = {  # each without the model: what it is, dash
    "bayes_answers": ("Bayes: demonstrations' answers too", "solid"),
    "bayes_inputs": ("Bayes: demonstrations' inputs too", "longdash"),
    "bayes_query": ("Bayes: query", "dash"),
    "bayes_nothing": ("Bayes: grammar alone", "dashdot"),
    "most_common": ("the most common answer", "dot"),
    "guess": ("types guessed", "longdashdot"),
}
# Exact text by shots in arXiv 2609.01343, over BIG-bench's items with 10 seeds; the Baseline's with 32.
PAPER_EXACT, PAPER_BASELINE = {0: 0.0, 32: 0.298}, 0.264
LOSSES = {  # of a prompt's kind: its name, colour, symbol
    "": ("scored prompts", SERIES_COLOURS[0], "circle"),
    "nested_": ("nested prompts", SERIES_COLOURS[1], "square"),
}


def scores_by_shots(summary: xr.Dataset) -> go.Figure:
    """Shares of prompts and of symbols answered right by shots, each seed a small point, over the best answers that need no model."""
    summary = _scored(summary)
    figure = make_subplots(
        rows=1,
        cols=2,
        column_widths=[0.6, 0.4],
        shared_yaxes=True,
        horizontal_spacing=0.04,
        subplot_titles=("of prompts", "of symbols, those before known"),
    )
    x, labels, where = _shots(summary)
    for i, (name, (what, symbol)) in enumerate(SCORES.items()):
        of_symbols = name == "symbol_accuracy"
        place = {"row": 1, "col": 1 + of_symbols}
        if name != "all_right":  # beside `exact`, over the same references
            _references(figure, x, summary, f"{name}_" if of_symbols else "", place)
        look: dict[str, Any] = {
            "name": what,
            "colour": SERIES_COLOURS[i],
            "n": "",
            "symbol": symbol,
        }
        aside = 0.0 if of_symbols else (i - 0.5) * 0.1
        figure.add_trace(
            points(
                x + aside,
                measured(summary, name),
                where=where,
                mode="lines+markers",
                size=9,
                **look,
            ),
            **place,
        )
        by_seed = f"{name}_by_seed"
        if by_seed in summary and summary.sizes["prompt_seed"] > 1:
            part = measured(summary, by_seed)
            seeds = summary["prompt_seed"].values
            figure.add_trace(
                points(
                    np.repeat(x + aside, len(seeds)),
                    part.stack(point=("shots", "prompt_seed"), create_index=False),
                    where=[f"{label} shots, seed {seed}" for label in labels for seed in seeds],
                    intervals=False,
                    opacity=0.4,
                    showlegend=False,
                    **(look | {"size": 5}),
                ),
                **place,
            )
    paper = _paper(summary)
    if paper is not None:
        figure.add_trace(paper, row=1, col=1)
    figure.update_xaxes(title_text="shots", **places_axis(labels))
    figure.update_yaxes(range=[-0.02, 1.04])
    figure.update_yaxes(title_text="share that is right", col=1)
    return styled(
        figure,
        "Dyck answers by number of demonstrations",
        "grey lines: what needs no model; small: each seed; whiskers: 95 % intervals over items",
        height=580,
        top=20,
        bottom=170,
    )


def _references(
    figure: go.Figure,
    x: np.ndarray,
    summary: xr.Dataset,
    score: str,
    place: dict[str, int],
    end: str = "",
) -> None:
    """The grey lines of what needs no model, for one score; in the legend once for all of a figure."""
    for name, (what, dash) in REFERENCES.items():
        if f"{score}{name}{end}" in summary:
            known = any(trace.legendgroup == name for trace in figure.data)
            line = reference(
                x,
                summary[f"{score}{name}{end}"],
                name=what,
                dash=dash,
                legendgroup=name,
                showlegend=not known,
            )
            figure.add_trace(line, **place)


def _paper(summary: xr.Dataset) -> go.Scatter | None:
    """What the paper reports of exact text, at the numbers of shots that are here too; None where none is."""
    there = np.isfinite(summary["exact"].values)
    shots = summary["shots"].values.tolist()
    x = [i for i, k in enumerate(shots) if there[i] and k in PAPER_EXACT]
    if not x:
        return None
    says = {k: f"{value:.3f}" for k, value in PAPER_EXACT.items()}
    says |= {0: "about 0", 32: f"{says[32]}, its Baseline {PAPER_BASELINE:.3f}"}
    return go.Scatter(
        x=x,
        y=[PAPER_EXACT[shots[i]] for i in x],
        mode="markers",
        marker={"symbol": "cross", "color": GREY, "size": 9},
        name="the paper's exact text",
        text=[
            f"the paper's exact text, {shots[i]} shots: {says[shots[i]]}<br>of BIG-bench's items: context, not a target"
            for i in x
        ],
        hovertemplate="%{text}<extra></extra>",
    )


def losses_by_shots(summary: xr.Dataset) -> go.Figure:
    """Loss of the answers by shots, per token and per answer, over the least that is to be had without the model."""
    kinds = [kind for kind in LOSSES if has_values(summary, f"{kind}token_loss")]
    figure = make_subplots(
        rows=len(kinds),
        cols=2,
        shared_xaxes=True,
        vertical_spacing=0.1,
        subplot_titles=[
            f"{LOSSES[kind][0]}, per {of}" for kind in kinds for of in ("token", "answer")
        ],
    )
    x, labels, _ = _shots(summary)
    for row, kind in enumerate(kinds, start=1):
        name, colour, symbol = LOSSES[kind]
        there = np.flatnonzero(np.isfinite(summary[f"{kind}token_loss"].values))
        of_kind = summary.isel(shots=there)
        _, _, where = _shots(of_kind, kind)
        for col, of in enumerate(("token", "answer"), start=1):
            place = {"row": row, "col": col}
            _references(figure, x[there], of_kind, f"{kind}{of}_loss_", place)
            loss = points(
                x[there],
                measured(of_kind, f"{kind}{of}_loss"),
                where=where,
                name=name,
                colour=colour,
                n="",
                symbol=symbol,
                mode="lines+markers",
                legendgroup=kind or "scored",
                showlegend=col == 1,
            )
            figure.add_trace(loss, **place)
    figure.update_xaxes(**places_axis(labels))
    figure.update_xaxes(title_text="shots", row=len(kinds))
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(title_text="loss, nats", col=1)
    return styled(
        figure,
        "Loss of Dyck answers by number of demonstrations",
        "grey lines: what needs no model; whiskers: 95 % intervals over items",
        height=250 + 240 * len(kinds),
        top=20,
        bottom=150,
    )


def scores_by_readable(summary: xr.Dataset) -> go.Figure:
    """Prompts whose closers all stand in the query's own input, and those that need the demonstrations."""
    summary = _scored(summary)
    figure = make_subplots(
        rows=1,
        cols=2,
        shared_yaxes=True,
        horizontal_spacing=0.04,
        subplot_titles=("closers stand in the query", "some closer does not"),
    )
    x, labels, _ = _shots(summary)
    for column, readable in enumerate((1, 0), start=1):
        items = summary["items_by_readable"].sel(readable=readable).values
        where = [f"{k} shots, {c:,.0f} items" for k, c in zip(labels, items, strict=True)]
        place = {"row": 1, "col": column}
        _references(figure, x, summary.sel(readable=readable), "", place, "_by_readable")
        for i, name in enumerate(("exact", "all_right")):
            what, symbol = SCORES[name]
            figure.add_trace(
                points(
                    x + (i - 0.5) * 0.1,
                    measured(summary, f"{name}_by_readable").sel(readable=readable),
                    where=where,
                    name=what,
                    colour=series_colour(i),
                    n="",
                    symbol=symbol,
                    mode="lines+markers",
                    legendgroup=name,
                    showlegend=column == 1,
                ),
                row=1,
                col=column,
            )
    figure.update_xaxes(title_text="shots", **places_axis(labels))
    figure.update_yaxes(range=[-0.02, 1.04])
    figure.update_yaxes(title_text="share of prompts", col=1)
    return styled(
        figure,
        "Dyck answers by what the query itself shows",
        "grey lines: what needs no model; whiskers: 95 % intervals over items",
        height=520,
        top=20,
        bottom=150,
    )


def _scored(summary: xr.Dataset) -> xr.Dataset:
    """Without the numbers of shots that only nested prompts have."""
    return summary.isel(shots=np.isfinite(summary["all_right"].values))


def _shots(summary: xr.Dataset, kind: str = "") -> tuple[np.ndarray, list[str], list[str]]:
    """Places of the numbers of shots, their labels, and how many prompts of a kind each has."""
    shots = summary["shots"].values.tolist()
    of_kind = (summary[f"{kind}{name}"].values for name in ("prompts", "items"))
    counts = zip(shots, *of_kind, strict=True)
    where = [
        f"{k} shots, {prompts:,.0f} prompts of {items:,.0f} items" for k, prompts, items in counts
    ]
    return np.arange(len(shots)), [str(k) for k in shots], where


KINDS = (
    FigureKind(name="shots", title="By shots", make=scores_by_shots, needs=("all_right",)),
    FigureKind(name="losses", title="Loss of answers", make=losses_by_shots, needs=("token_loss",)),
    FigureKind(
        name="readable",
        title="By what the query shows",
        make=scores_by_readable,
        needs=("all_right_by_readable",),
    ),
)
