"""Headline numbers of a diagnostic over the steps of a training."""

from collections.abc import Iterator, Mapping
from itertools import product

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from smeltscope.dashboards.figures.common import (
    documents_of,
    has_values,
    measured,
    points,
    reference,
    series_colour,
    styled,
    without_interval,
)
from smeltscope.dashboards.overview import HEADLINES, TITLES, is_signed
from smeltscope.errors import SmeltscopeError

MOST_LINES = 4  # of a panel; of more their mean is drawn
DASHES = ("dot", "dash", "dashdot")


def trajectory_figure(curve: xr.Dataset) -> go.Figure:
    """A panel for each headline number of a diagnostic, over the steps; chance levels and floors in grey.

    `curve` is what `smeltscope.probes.trajectory.trajectory` gives. Whiskers are 95 % intervals over documents, where the
    number has one. Raises `SmeltscopeError` where it has no headline number.
    """
    probe = str(curve.attrs["probe"])
    panels = [h for h in HEADLINES.get(probe, ()) if has_values(curve, h.quantity)]
    if not panels:
        raise SmeltscopeError(f"There is no headline number of {probe} in these runs.")
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = make_subplots(
        rows=rows,
        cols=columns,
        subplot_titles=[panel.what for panel in panels],
        vertical_spacing=0.3 / rows,
    )
    steps = curve["step"].values
    for i, panel in enumerate(panels):
        at = {"row": 1 + i // columns, "col": 1 + i % columns}
        for number, (name, part) in enumerate(_lines(curve, panel.quantity, panel.at)):
            figure.add_trace(
                points(
                    steps,
                    part,
                    name=name or panel.what,
                    colour=series_colour(number),
                    n=documents_of(curve),
                    where=[f"step {step:,}" for step in steps],
                    signed=is_signed(panel.quantity),
                    mode="lines+markers",
                    showlegend=False,
                ),
                **at,
            )
        for number, (quantity, words) in enumerate(panel.beside.items()):
            for name, part in _lines(curve, quantity, panel.at) if quantity in curve else ():
                figure.add_trace(
                    reference(
                        steps,
                        part["value"].values,
                        name=", ".join(filter(None, (words, name))),
                        dash=DASHES[number % len(DASHES)],
                        showlegend=False,
                    ),
                    **at,
                )
        figure.update_xaxes(title_text="step", rangemode="tozero", **at)
    return styled(
        figure,
        f"{TITLES.get(probe, probe)} over the training",
        "grey: what it is held against (hover says which); whiskers: 95 % intervals over documents",
        height=150 + 260 * rows,
        top=30,
        bottom=60,
    )


def _lines(
    curve: xr.Dataset, quantity: str, labels: Mapping[str, str | int]
) -> Iterator[tuple[str, xr.Dataset]]:
    """A quantity over the steps: a line for each entry of what `labels` leave open, or their mean where those are many."""
    part = measured(curve, quantity)
    part = part.sel({dim: label for dim, label in labels.items() if dim in part["value"].dims})
    open_dims = [str(dim) for dim in part["value"].dims if dim != "step"]
    if np.prod([part.sizes[dim] for dim in open_dims]) > MOST_LINES:
        yield (
            f"mean over {' and '.join(open_dims)}s",
            without_interval(part["value"].mean(open_dims)),
        )
        return
    for entry in product(*(range(part.sizes[dim]) for dim in open_dims)):
        at = dict(zip(open_dims, entry, strict=True))
        name = ", ".join(f"{dim.replace('_', ' ')} {part[dim].values[i]}" for dim, i in at.items())
        yield name if any(part.sizes[dim] > 1 for dim in at) else "", part.isel(at)
