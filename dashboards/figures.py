"""Pure functions from a run's numbers to Plotly figures, usable in a notebook.

Colours: Cividis for masses and RdBu for differences, both readable without red-green vision; visits
take the first colours of Okabe and Ito's palette.
"""

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

VISIT_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
_GREY = "#767676"
_ROW_PIXELS = 26


def sink_heatmaps(summary: xr.Dataset) -> go.Figure:
    """Sink mass of every head: a map of layer by head for each visit, and the change from visit 1.

    `summary` is that of `smeltscope.probes.attention_sink`.
    """
    layers = np.unique(summary["layer"].values)
    visits = np.unique(summary["visit"].values)
    later = [int(v) for v in visits if v > 1]
    titles = [f"Visit {v}" for v in visits] + [f"Visit {v}<br>minus visit 1" for v in later]
    figure = make_subplots(
        rows=1, cols=len(titles), subplot_titles=titles, shared_yaxes=True, horizontal_spacing=0.04
    )
    panels = [("sink_mass", int(v), "coloraxis") for v in visits]
    panels += [("change", v, "coloraxis2") for v in later]
    for column, (name, visit, axis) in enumerate(panels, start=1):
        values, text = _layer_by_head(summary, name, visit, layers)
        figure.add_trace(
            go.Heatmap(
                z=values,
                x=np.arange(values.shape[1]),
                y=layers,
                text=text,
                hovertemplate="layer %{y}, head %{x}<br>%{text}<extra></extra>",
                coloraxis=axis,
                xgap=1,
                ygap=1,
            ),
            row=1,
            col=column,
        )
        labels = max(4, 24 // len(titles))
        figure.update_xaxes(
            title_text="head", dtick=_tick(values.shape[1], labels), tickangle=0, row=1, col=column
        )
    figure.update_yaxes(dtick=_tick(len(layers)), autorange="reversed", constrain="domain")
    figure.update_yaxes(title_text="layer", col=1)
    # a cell without a number is a layer not run in that visit
    figure.update_xaxes(showgrid=False, zeroline=False)
    figure.update_yaxes(showgrid=False, zeroline=False)
    top = _largest(summary["sink_mass"].values)
    width = _largest(summary["change"].values)
    # Beneath the maps, one beside the other: at the side they overlap in a narrow window.
    bar = {"orientation": "h", "thickness": 12, "len": 0.45, "tickformat": ".2~g", "nticks": 5}
    bar |= {"yref": "container", "y": 0.01, "yanchor": "bottom"}
    figure.update_layout(
        title="Attention on the first token, by head",
        height=270 + _ROW_PIXELS * len(layers),
        coloraxis={
            "colorscale": "Cividis",
            "cmin": 0,
            "cmax": top,
            "colorbar": bar | {"title": "mass", "x": 0, "xanchor": "left"},
        },
        coloraxis2={
            "colorscale": "RdBu",
            "reversescale": True,
            "cmin": -width,
            "cmax": width,
            "showscale": bool(later),
            "colorbar": bar | {"title": "change", "x": 1, "xanchor": "right"},
        },
    )
    figure.update_annotations(font={"size": 13})
    _styled(figure)
    return figure.update_layout(margin={"t": 95, "b": 130})


def sink_depth_profile(summary: xr.Dataset) -> go.Figure:
    """Sink mass over executed depth: each head a point, their mean a line with its interval, the uniform level dotted."""
    figure = go.Figure()
    executions, visits = summary["execution"].values, summary["visit"].values
    mean, heads = summary["sink_mass_mean"], summary["sink_mass"].values
    for visit in np.unique(visits[visits > 1]):
        inside = executions[visits == visit]
        figure.add_vrect(
            x0=inside.min() - 0.5,
            x1=inside.max() + 0.5,
            fillcolor=_colour(int(visit)),
            opacity=0.08,
            line_width=0,
            layer="below",
        )
    figure.add_trace(
        go.Scatter(
            x=executions,
            y=summary["uniform"].values,
            mode="lines",
            line={"color": _GREY, "dash": "dot", "width": 1.5},
            name="uniform attention",
            hovertemplate="uniform attention: %{y:.4f}<extra></extra>",
        )
    )
    for visit in np.unique(visits):
        rows = np.flatnonzero(visits == visit)
        points = [(executions[e], heads[e, h], h) for e in rows for h in range(heads.shape[1])]
        figure.add_trace(
            go.Scatter(
                x=[p[0] for p in points],
                y=[p[1] for p in points],
                text=[
                    f"layer {int(summary['layer'][e])}, visit {visit}, head {h}<br>{_described(summary, 'sink_mass', e, h)}"
                    for e, _, h in points
                ],
                hovertemplate="%{text}<extra></extra>",
                mode="markers",
                marker={"color": _colour(int(visit)), "size": 5, "opacity": 0.35},
                name=f"visit {visit}, heads",
                legendgroup=f"visit {visit}",
            )
        )
        low, high = (summary[f"sink_mass_mean_{end}"].values[rows] for end in ("low", "high"))
        figure.add_trace(
            go.Scatter(
                x=executions[rows],
                y=mean.values[rows],
                error_y={
                    "array": high - mean.values[rows],
                    "arrayminus": mean.values[rows] - low,
                    "thickness": 1.2,
                    "width": 4,
                },
                mode="markers",
                marker={"color": _colour(int(visit)), "size": 10, "symbol": "diamond"},
                name=f"visit {visit}, mean over heads",
                legendgroup=f"visit {visit}",
                text=[f"layer {int(summary['layer'][e])}, visit {visit}" for e in rows],
                hovertemplate="%{text}: %{y:.4f}<extra></extra>",
            )
        )
    figure.add_trace(
        go.Scatter(
            x=executions,
            y=mean.values,
            mode="lines",
            line={"color": _GREY, "width": 1},
            hoverinfo="skip",
            showlegend=False,
        )
    )
    labels = [f"L{int(layer)}" for layer in summary["layer"].values]
    figure.update_xaxes(
        title_text="layer, in the order of execution"
        + (" (shaded: later visits)" if (visits > 1).any() else ""),
        tickvals=executions[:: _tick(len(executions))],
        ticktext=labels[:: _tick(len(executions))],
    )
    figure.update_yaxes(title_text="mass on the first token", rangemode="tozero")
    figure.update_layout(title="Attention on the first token, over depth", height=480)
    return _styled(figure)


def sink_by_position(summary: xr.Dataset) -> go.Figure:
    """Sink mass by query position (mean over heads and over the layers that have later visits), and the uniform level."""
    figure = go.Figure()
    visits, layers = summary["visit"].values, summary["layer"].values
    looped = (
        np.isin(layers, layers[visits > 1]) if (visits > 1).any() else np.ones(len(layers), bool)
    )
    positions = summary["position"].values
    shown = np.isfinite(summary["uniform_by_position"].values).any(0)
    labels = [f"{p}-{2 * p - 1}" if p > 1 else str(p) for p in positions]
    for visit in np.unique(visits[looped]):
        rows = looped & (visits == visit)
        figure.add_trace(
            go.Scatter(
                x=np.asarray(labels)[shown],
                y=_mean_over_layers(summary["sink_mass_by_position"].values[rows])[shown],
                mode="lines+markers",
                marker={"color": _colour(int(visit)), "size": 8},
                name=f"visit {visit}",
                hovertemplate=f"visit {visit}, queries %{{x}}: %{{y:.4f}}<extra></extra>",
            )
        )
    figure.add_trace(
        go.Scatter(
            x=np.asarray(labels)[shown],
            y=_mean_over_layers(summary["uniform_by_position"].values[looped])[shown],
            mode="lines",
            line={"color": _GREY, "dash": "dot", "width": 1.5},
            name="uniform attention",
            hovertemplate="uniform, queries %{x}: %{y:.4f}<extra></extra>",
        )
    )
    figure.update_xaxes(title_text="position of the query in its segment", type="category")
    figure.update_yaxes(
        title_text="mass on the first token",
        type="log",
        dtick=1,
        minor={"dtick": "D1", "showgrid": True},
    )
    what = "looped layers" if (visits > 1).any() else "all layers"
    figure.update_layout(
        title=f"Attention on the first token, by query position ({what})", height=420
    )
    return _styled(figure)


def _mean_over_layers(values: np.ndarray) -> np.ndarray:
    """(layer, bin) -> (bin,), over the layers whose queries see the first token from there."""
    counts = np.isfinite(values).sum(0)
    return np.where(counts > 0, np.nansum(values, 0) / np.maximum(counts, 1), np.nan)


def _layer_by_head(
    summary: xr.Dataset, name: str, visit: int, layers: np.ndarray
) -> tuple[np.ndarray, list[list[str]]]:
    heads = summary.sizes["head"]
    values = np.full((len(layers), heads), np.nan)
    text = [[""] * heads for _ in layers]
    rows = {layer: row for row, layer in enumerate(layers)}
    for e in np.flatnonzero(summary["visit"].values == visit):
        row = rows[int(summary["layer"][e])]
        values[row] = summary[name].values[e]
        text[row] = [_described(summary, name, int(e), h) for h in range(heads)]
    return values, text


def _described(summary: xr.Dataset, name: str, execution: int, head: int) -> str:
    """A number for hovering over: value, interval, and how much it rests on."""
    value, low, high = (
        float(summary[f"{name}{end}"].values[execution, head]) for end in ("", "_low", "_high")
    )
    interval = f" [{low:.4f}, {high:.4f}]" if np.isfinite(low) else ""
    return f"{value:.4f}{interval}<br>{summary.attrs['documents']} documents"


def _tick(count: int, most: int = 20) -> int:
    """Every how-manieth label to show, so that at most `most` stand side by side."""
    return max(1, int(np.ceil(count / most)))


def _largest(values: np.ndarray) -> float:
    """The largest absolute value, for the end of a colour scale; 1 where there is none or all are 0."""
    return float(np.abs(values[np.isfinite(values)]).max(initial=0)) or 1.0


def _colour(visit: int) -> str:
    return VISIT_COLOURS[(visit - 1) % len(VISIT_COLOURS)]


def _styled(figure: go.Figure) -> go.Figure:
    figure.update_layout(
        template="plotly_white",
        font={"family": "system-ui, sans-serif", "size": 13},
        title={"x": 0, "xanchor": "left", "font": {"size": 16}},
        margin={"l": 60, "r": 20, "t": 60, "b": 110},
        # beneath, where it stays clear of the title in a narrow window
        legend={"orientation": "h", "yref": "container", "y": 0.01, "yanchor": "bottom", "x": 0},
    )
    return figure
