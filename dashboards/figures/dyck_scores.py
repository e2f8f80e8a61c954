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
LOSSES = {
    "token_loss": ("per token", "circle"),
    "answer_loss": ("per answer", "circle"),
    "nested_token_loss": ("per token, nested prompts", "square"),
    "nested_answer_loss": ("per answer, nested prompts", "square"),
}


def scores_by_shots(summary: xr.Dataset) -> go.Figure:
    """Share of prompts answered right by shots, each seed a small point, over the best answers that need no model."""
    figure, summary = go.Figure(), _scored(summary)
    x, labels, where = _shots(summary)
    for name, (what, dash) in REFERENCES.items():
        figure.add_trace(reference(x, summary[name], name=what, dash=dash))
    for i, (name, (what, symbol)) in enumerate(SCORES.items()):
        look: dict[str, Any] = {
            "name": what,
            "colour": SERIES_COLOURS[i],
            "n": "",
            "symbol": symbol,
        }
        aside = (i - 1) * 0.07
        figure.add_trace(
            points(
                x + aside,
                measured(summary, name),
                where=where,
                mode="lines+markers",
                size=9,
                **look,
            )
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
                )
            )
    paper = _paper(summary)
    if paper is not None:
        figure.add_trace(paper)
    figure.update_xaxes(title_text="shots", **places_axis(labels))
    figure.update_yaxes(title_text="share of prompts, or of symbols", range=[-0.02, 1.04])
    return styled(
        figure,
        "Dyck answers by number of demonstrations",
        "grey lines: what needs no model; small: each seed; whiskers: 95 % intervals over items",
        height=560,
        bottom=170,
    )


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
    """Loss of the answers by shots, per token and per answer, over that of guessed types."""
    figure = make_subplots(rows=1, cols=2, subplot_titles=("per token", "per answer"))
    x, labels, _ = _shots(summary)
    for column, name in enumerate(("token_loss_guess", "answer_loss_guess"), start=1):
        guessed = reference(
            x, summary[name], name="types guessed, scored prompts", showlegend=column == 1
        )
        figure.add_trace(guessed, row=1, col=column)
    for i, (name, (_, symbol)) in enumerate(LOSSES.items()):
        nested = name.startswith("nested")
        _, _, where = _shots(summary, "nested_" if nested else "")
        figure.add_trace(
            points(
                x,
                measured(summary, name),
                where=where,
                name="nested prompts" if nested else "scored prompts",
                colour=SERIES_COLOURS[nested],
                n="",
                symbol=symbol,
                mode="lines+markers",
                legendgroup=str(nested),
                showlegend=i % 2 == 0,
            ),
            row=1,
            col=1 + i % 2,
        )
    figure.update_xaxes(title_text="shots", **places_axis(labels))
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(title_text="loss, nats", col=1)
    return styled(
        figure,
        "Loss of Dyck answers by number of demonstrations",
        "whiskers: 95 % intervals over items",
        top=20,
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
        for name, (what, dash) in REFERENCES.items():
            known = summary[f"{name}_by_readable"].sel(readable=readable)
            figure.add_trace(
                reference(x, known, name=what, dash=dash, legendgroup=name, showlegend=column == 1),
                row=1,
                col=column,
            )
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
