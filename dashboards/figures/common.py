"""What all figures share: colours, the look of axes and legends, and how a number is said.

Colours: Cividis for masses and RdBu for differences, both readable without red-green vision; visits and series take
the colours of Okabe and Ito's palette.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go
import plotly.io
import xarray as xr
from plotly.subplots import make_subplots

from smeltscope.errors import SmeltscopeError
from smeltscope.probes.paper import reported_by

VISIT_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
SERIES_COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#8C6BB1",
    "#A6761D",
)
GREY = "#808080"  # references: chance, controls, the paper's range; legible on white and on black
MUTED = "#666666"  # text that explains
MOST_WHISKERS = 100  # of a series: more would hide each other; hovering shows them all
ROW_PIXELS = 26  # of a heat map: high enough to point at

# plotly.js shows a button that sends figures to its makers' server unless told otherwise.
PLOTLY_CONFIG = {"showSendToCloud": False, "displaylogo": False, "responsive": True}

Theme = Literal["light", "dark"]
BACKGROUND = {"light": "#ffffff", "dark": "#242424"}
DARK = {  # on a dark page
    "#0072B2": "#3D9BE0",
    "#D55E00": "#F07F30",
    "#009E73": "#22BA90",
    "#56B4E9": "#A5D8F5",
    "#8C6BB1": "#B79BDB",
    GREY: "#A0A0A0",
    MUTED: "#B5B5B5",
}


@dataclass(frozen=True, kw_only=True)
class FigureKind:
    """A figure that a probe has.

    `make(summary, **context)` draws it; `takes` names the context that it can use, `given` what of it the figure cannot do
    without, and `needs` the quantities of the summary that must hold a value somewhere.
    """

    name: str  # unique within its probe
    title: str  # what a menu calls it
    make: Callable[..., go.Figure]
    takes: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    def applies(self, summary: xr.Dataset, **context: Any) -> bool:
        """Whether there is anything to show."""
        return all(has_values(summary, name) for name in self.needs) and all(
            context.get(name) is not None for name in self.given
        )

    def draw(self, summary: xr.Dataset, **context: Any) -> go.Figure:
        """The figure, with what it can use of `context`."""
        return self.make(
            summary, **{k: v for k, v in context.items() if k in self.takes and v is not None}
        )


def has_values(summary: xr.Dataset, name: str) -> bool:
    """Whether a quantity is there and not NaN everywhere."""
    return name in summary and bool(np.isfinite(summary[name].values).any())


def on_one_scale(figures: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copies of figures of one kind, as plotly.js takes them, in which a colour stands for the same value."""
    ends: dict[str, dict[str, float]] = {}
    for figure in figures:
        for name, axis in figure["layout"].items():
            if name.startswith("coloraxis") and axis.get("showscale", True) and "cmax" in axis:
                end = ends.setdefault(name, {"cmin": axis["cmin"], "cmax": axis["cmax"]})
                end["cmin"] = min(end["cmin"], axis["cmin"])
                end["cmax"] = max(end["cmax"], axis["cmax"])
    alike = []
    for figure in figures:
        layout = figure["layout"]
        axes = {name: layout[name] | end for name, end in ends.items() if name in layout}
        alike.append(figure | {"layout": layout | axes})
    return alike


def themed(figure: go.Figure, theme: Theme) -> go.Figure:
    """A copy of the figure in light or dark colours: Plotly does not follow the page that it stands on."""
    return go.Figure(in_theme(figure.to_dict(), theme))


def in_theme(figure: dict[str, Any], theme: Theme) -> dict[str, Any]:
    """`themed` of a figure as plotly.js takes it."""
    if theme == "dark":
        figure = _lightened(figure)
    return {**figure, "layout": {**figure["layout"], **layout_of(theme)}}


@cache
def layout_of(theme: Theme) -> dict[str, Any]:
    """What a theme sets of a figure's layout."""
    template = plotly.io.templates["plotly_white" if theme == "light" else "plotly_dark"]
    ground = {name: BACKGROUND[theme] for name in ("paper_bgcolor", "plot_bgcolor")}
    return {"template": template.to_plotly_json(), **ground}


def _lightened(part: Any) -> Any:
    """Colours that are too dark on black, exchanged; text that happens to name one stays."""
    if isinstance(part, list | tuple):
        return [_lightened(entry) for entry in part]
    if not isinstance(part, dict):
        return part
    return {
        key: DARK.get(value, value)
        if key.endswith("color") and isinstance(value, str)
        else _lightened(value)
        for key, value in part.items()
    }


def label(text: object, most: int = 48) -> str:
    """Text of a file or a prompt, as text: Plotly takes some HTML for markup wherever it writes."""
    words = str(text)
    return escape(words if len(words) <= most else words[: most - 3] + "...", quote=False)


def measured(summary: xr.Dataset, name: str) -> xr.Dataset:
    """A quantity as `value`, `low` and `high`, to be chosen from together."""
    missing = xr.full_like(summary[name], np.nan, dtype=float)
    return xr.Dataset(
        {
            "value": summary[name],
            "low": summary.get(f"{name}_low", missing),
            "high": summary.get(f"{name}_high", missing),
        }
    )


def documents_of(summary: xr.Dataset) -> str:
    return f"{summary.attrs.get('documents', 0):,} documents"


def said(part: xr.Dataset, n: str, *, signed: bool = False, digits: int = 4) -> np.ndarray:
    """Each number for hovering over: value, interval, and how much it rests on."""
    form = f"{'+' if signed else ''}.{digits}f"
    found = np.empty(part["value"].shape, dtype=object)
    values, lows, highs = (part[end].values for end in ("value", "low", "high"))
    for at in np.ndindex(found.shape):
        value, low, high = values[at], lows[at], highs[at]
        if not np.isfinite(value):
            found[at] = "no value"
            continue
        interval = f" [{low:{form}}, {high:{form}}]" if np.isfinite(low) else ""
        found[at] = f"{value:{form}}{interval}" + (f"<br>{n}" if n else "")
    return found


def errors(part: xr.Dataset, colour: str | None = None) -> dict[str, Any] | None:
    """The interval as Plotly's error bars; None where there is none."""
    value, low, high = (part[end].values for end in ("value", "low", "high"))
    if not np.isfinite(low).any():
        return None
    bars = {"array": high - value, "arrayminus": value - low, "thickness": 1.2, "width": 3}
    return bars | ({"color": colour} if colour else {})


def hovered(name: str, where: Sequence[str] | None, numbers: np.ndarray) -> list[str]:
    """What hovering over each entry of a series says: what it is, where, and its number as `said`."""
    places = [""] * numbers.size if where is None else [f", {place}" for place in where]
    return [f"{name}{place}<br>{number}" for place, number in zip(places, numbers, strict=True)]


def points(
    x: Any,
    part: xr.Dataset,
    *,
    name: str,
    colour: str,
    n: str,
    where: Sequence[str] | None = None,
    signed: bool = False,
    intervals: bool = True,
    mode: str = "markers",
    size: int = 8,
    symbol: str = "circle",
    opacity: float = 1.0,
    line: Mapping[str, Any] | None = None,
    **more: Any,
) -> go.Scatter:
    """A series with its intervals; hovering says what it is, where, the number, its interval and n."""
    numbers = said(part, n, signed=signed)
    return go.Scatter(
        x=np.asarray(x),
        y=part["value"].values,
        error_y=errors(part, colour) if intervals and numbers.size <= MOST_WHISKERS else None,
        name=name,
        mode=mode,
        marker={"color": colour, "size": size, "symbol": symbol, "opacity": opacity},
        line={"color": colour, "width": 1.5} | dict(line or {}),
        text=hovered(name, where, numbers),
        hovertemplate="%{text}<extra></extra>",
        **more,
    )


def bars(
    x: Any,
    part: xr.Dataset,
    *,
    name: str,
    colour: str,
    n: str,
    where: Sequence[str] | None = None,
    signed: bool = False,
    intervals: bool = True,
    **more: Any,
) -> go.Bar:
    """As `points`, as bars."""
    return go.Bar(
        x=np.asarray(x),
        y=part["value"].values,
        error_y=errors(part, GREY) if intervals else None,
        name=name,
        marker={"color": colour, "line": {"width": 0}},
        text=hovered(name, where, said(part, n, signed=signed)),
        textposition="none",
        hovertemplate="%{text}<extra></extra>",
        **more,
    )


def reference(
    x: Any, y: Any, *, name: str, dash: str = "dot", symbol: str | None = None, **more: Any
) -> go.Scatter:
    """A chance level, floor or other thing to hold numbers against: grey, without an interval."""
    return go.Scatter(
        x=np.asarray(x),
        y=np.asarray(y, dtype=float),
        name=name,
        mode="lines" if symbol is None else "lines+markers",
        line={"color": GREY, "dash": dash, "width": 1.5},
        marker={"color": GREY, "symbol": symbol or "circle", "size": 7},
        text=[f"{name}: {value:.4f}" for value in np.asarray(y, dtype=float)],
        hovertemplate="%{text}<extra></extra>",
        **more,
    )


def thread(x: Any, part: xr.Dataset, dash: str = "solid") -> go.Scatter:
    """A grey line through points that are drawn by themselves."""
    return go.Scatter(
        x=x,
        y=part["value"].values,
        mode="lines",
        line={"color": GREY, "width": 1, "dash": dash},
        hoverinfo="skip",
        showlegend=False,
    )


def rings(x: Any, y: Any, *, size: float, width: float, name: str | None = None) -> go.Scatter:
    """White rings that mark cells of a map; with a name in the legend."""
    return go.Scatter(
        x=x,
        y=y,
        mode="markers",
        marker={
            "symbol": "circle",
            "size": size,
            "color": "#ffffff",
            "line": {"color": "#000000", "width": width},
        },
        name=name,
        hoverinfo="skip",
        showlegend=name is not None,
    )


def heat(
    part: xr.Dataset, *, where: np.ndarray, n: str, signed: bool = False, **more: Any
) -> go.Heatmap:
    """A map of (row, column); `where` says for each cell what it is."""
    text = where + "<br>" + said(part, n, signed=signed)
    return go.Heatmap(
        z=part["value"].values,
        text=text,
        hovertemplate="%{text}<extra></extra>",
        xgap=1,
        ygap=1,
        **more,
    )


def grid(rows: Sequence[str], columns: Sequence[str]) -> np.ndarray:
    """`row, column` for each cell of a map."""
    return np.array([[f"{row}, {column}" for column in columns] for row in rows], dtype=object)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One map of layer by head among several that stand side by side."""

    title: str
    part: xr.Dataset  # (layer, head)
    column: str = "head"
    signed: bool = False  # a difference
    says: str = ""  # what hovering says first


def row_of_maps(
    panels: Sequence[Panel],
    layers: np.ndarray,
    *,
    n: str,
    row: str = "layer",
    mass: str = "mass",
    change: str = "change",
    mark: tuple[float, float] | None = None,
) -> go.Figure:
    """Maps of layer by head side by side; a cell without a number has no value there. `mark` frames one (layer, head)."""
    heads = [panel.part["value"].shape[1] for panel in panels]
    figure = make_subplots(
        rows=1,
        cols=len(panels),
        subplot_titles=[panel.title for panel in panels],
        shared_yaxes=True,
        horizontal_spacing=0.04,
        column_widths=[2 + number for number in heads],
    )
    room = max(3, 20 // len(panels))
    for column, (panel, number) in enumerate(zip(panels, heads, strict=True), start=1):
        where = grid(
            [f"{panel.says}layer {x}" for x in layers],
            [f"{panel.column} {h}" for h in range(number)],
        )
        axis = "coloraxis2" if panel.signed else "coloraxis"
        at = {"row": 1, "col": column}
        figure.add_trace(
            heat(
                panel.part,
                where=where,
                n=n,
                signed=panel.signed,
                x=np.arange(number),
                y=layers,
                coloraxis=axis,
            ),
            **at,
        )
        if mark is not None:
            figure.add_trace(rings([mark[1]], [mark[0]], size=9, width=2), **at)
        figure.update_xaxes(title_text=panel.column, dtick=tick(number, room), tickangle=0, **at)
    figure.update_xaxes(showgrid=False, zeroline=False)
    figure.update_yaxes(
        dtick=tick(len(layers)),
        autorange="reversed",
        constrain="domain",
        showgrid=False,
        zeroline=False,
    )
    figure.update_yaxes(title_text=row, col=1)
    scales = (
        ("coloraxis", masses_scale, mass, False),
        ("coloraxis2", differences_scale, change, True),
    )
    for axis, scale, title, signed in scales:
        values = [p.part["value"].values.ravel() for p in panels if p.signed is signed]
        end = largest(np.concatenate(values)) if values else 1.0
        figure.update_layout({axis: scale(end, title, showscale=bool(values))})
    return figure


def masses_scale(top: float, title: str = "mass", **more: Any) -> dict[str, Any]:
    return {"colorscale": "Cividis", "cmin": 0, "cmax": top, "colorbar": _bar(title, 0)} | more


def differences_scale(width: float, title: str = "change", **more: Any) -> dict[str, Any]:
    """Red above 0, blue below."""
    scale = {"colorscale": "RdBu", "reversescale": True, "cmin": -width, "cmax": width}
    return scale | {"colorbar": _bar(title, 1)} | more


def _bar(title: str, side: int) -> dict[str, Any]:
    # Beneath the maps, one beside the other: at the side they overlap in a narrow window.
    bar = {"orientation": "h", "thickness": 12, "len": 0.45, "tickformat": ".2~g", "nticks": 5}
    bar |= {"yref": "container", "y": 0.01, "yanchor": "bottom"}
    bar |= {"title": {"text": title, "side": "bottom", "font": {"size": 13}}}
    return bar | {"x": side, "xanchor": ("left", "right")[side]}


def spread(count: int, width: float = 0.5) -> np.ndarray:
    """Where `count` points that belong to one place stand beside each other."""
    return np.linspace(-width / 2, width / 2, count) if count > 1 else np.zeros(count)


def tick(count: int, most: int = 20) -> int:
    """Every how-manieth label to show, so that at most `most` stand side by side."""
    return max(1, int(np.ceil(count / most)))


def places_axis(labels: Sequence[str], most: int = 20, **more: Any) -> dict[str, Any]:
    """An axis over places 0, 1, ... with names: two places may have the same one, and a name may look like a number."""
    step = tick(len(labels), most)
    places = np.arange(len(labels))[::step]
    axis = {"tickvals": places, "ticktext": list(labels)[::step]}
    return axis | {"range": [-0.6, len(labels) - 0.4], "zeroline": False} | more


def largest(values: Any) -> float:
    """The largest absolute value, for the end of a colour scale; 1 where there is none or all are 0."""
    numbers = np.asarray(values, dtype=float)
    return float(np.abs(numbers[np.isfinite(numbers)]).max(initial=0)) or 1.0


def visit_colour(visit: int) -> str:
    return VISIT_COLOURS[(visit - 1) % len(VISIT_COLOURS)]


def series_colour(number: int) -> str:
    return SERIES_COLOURS[number % len(SERIES_COLOURS)]


def without_interval(values: xr.DataArray) -> xr.Dataset:
    """Numbers that were averaged here, over what rests on the same documents: they have no interval."""
    empty = xr.full_like(values, np.nan, dtype=float)
    return xr.Dataset({"value": values, "low": empty, "high": empty})


def looped(summary: xr.Dataset) -> np.ndarray:
    """Which executions are of layers that run more than once; all of them where none does."""
    visits, layers = summary["visit"].values, summary["layer"].values
    later = visits > 1
    return np.isin(layers, layers[later]) if later.any() else np.ones(len(layers), dtype=bool)


def execution_names(summary: xr.Dataset) -> list[str]:
    layers, visits = (summary[name].values.tolist() for name in ("layer", "visit"))
    return [f"layer {layer}, visit {visit}" for layer, visit in zip(layers, visits, strict=True)]


def execution_labels(summary: xr.Dataset) -> list[str]:
    """`L2`, and `L2.2` for its visit 2."""
    layers, visits = (summary[name].values.tolist() for name in ("layer", "visit"))
    return [
        f"L{layer}" + (f".{visit}" if visit > 1 else "")
        for layer, visit in zip(layers, visits, strict=True)
    ]


def of_visit(part: xr.Dataset, visit: int, layers: np.ndarray) -> xr.Dataset:
    """(execution, ...) -> (layer, ...) at one visit, NaN for layers that have no such visit."""
    part = part.isel(execution=part["visit"].values == visit).swap_dims(execution="layer")
    part = part.drop_vars(("execution", "visit", "module"), errors="ignore")
    return part.reindex(layer=layers)


def at_same_depth(baseline: xr.Dataset, executions: int) -> np.ndarray:
    """Where a Baseline's executions stand among so many others, by their share of the depth."""
    others = baseline.sizes["execution"]
    return np.arange(others) / max(1, others - 1) * (executions - 1)


def position_labels(positions: np.ndarray) -> np.ndarray:
    """The bins of positions that begin at these: `0`, `1`, `2-3`, `4-7`, ..."""
    return np.array([f"{p}-{2 * p - 1}" if p > 1 else str(p) for p in positions])


def shade_later_visits(figure: go.Figure, summary: xr.Dataset, **where: Any) -> bool:
    """Colour behind the executions of later visits; whether there are any."""
    executions, visits = np.arange(summary.sizes["execution"]), summary["visit"].values
    for visit in np.unique(visits[visits > 1]):
        inside = executions[visits == visit]
        figure.add_vrect(
            x0=inside.min() - 0.5,
            x1=inside.max() + 0.5,
            fillcolor=visit_colour(int(visit)),
            opacity=0.08,
            line_width=0,
            layer="below",
            **where,
        )
    return bool((visits > 1).any())


def pair_of(summary: xr.Dataset, pair: str | None = None) -> str:
    """The label of a pair of visits, the first one unless named."""
    return str(chosen(summary["visit_pair"].values, pair, "pair of visits"))


def chosen(labels: Any, value: Any, what: str, default: Any = None) -> Any:
    """`value` if it is one of `labels`; `default` or the first where None is asked for."""
    known = list(np.asarray(labels).tolist())
    if value is None:
        return known[0] if default is None else default
    if value not in known:
        raise SmeltscopeError(
            f"There is no {what} {value} in this figure; it has {', '.join(map(str, known))}."
        )
    return value


def visits_of(pair: str) -> tuple[str, str]:
    earlier, later = pair.split("-")
    return earlier, later


def pair_words(pair: str) -> str:
    return "visits " + " and ".join(visits_of(pair))


def reported_range(probe: str, quantity: str, **at: str) -> tuple[float, float] | None:
    """The range that the paper gives for a quantity, if it gives one as `A to B`."""
    for entry in reported_by(probe):
        if entry.quantity == quantity and dict(entry.at) == at:
            return entry.between
    return None


def add_range(
    figure: go.Figure, ends: tuple[float, float] | None, x0: float, x1: float, **more: Any
) -> None:
    """The paper's range as a grey band."""
    if ends is not None:
        figure.add_shape(
            type="rect",
            x0=x0,
            x1=x1,
            y0=ends[0],
            y1=ends[1],
            fillcolor=GREY,
            line_width=0,
            layer="below",
            **{
                "name": "the paper's range",
                "showlegend": True,
                "legendgroup": "paper",
                "opacity": 0.2,
            }
            | more,
        )


def styled(
    figure: go.Figure,
    title: str,
    subtitle: str = "",
    *,
    height: int = 460,
    top: int = 0,
    bottom: int = 105,
) -> go.Figure:
    """The look of every figure; `top` and `bottom` are the margins that titles of panels and legends need."""
    figure.update_layout(
        template="plotly_white",
        font={"family": "system-ui, sans-serif", "size": 13},
        title={
            "text": title,
            "x": 0,
            "xanchor": "left",
            "xref": "container",
            "pad": {"l": 12},
            "yref": "container",
            "y": 1 - 14 / height,
            "yanchor": "top",
            "font": {"size": 16},
            "subtitle": {"text": subtitle, "font": {"size": 12, "color": MUTED}},
        },
        height=height,
        margin={"l": 64, "r": 16, "t": (72 if subtitle else 52) + top, "b": bottom},
        # beneath, where it stays clear of the title in a narrow window
        legend={
            "orientation": "h",
            "yref": "container",
            "y": 0.01,
            "yanchor": "bottom",
            "x": 0,
            "font": {"size": 12},
        },
        hoverlabel={"align": "left"},
    )
    figure.update_annotations(font={"size": 13})
    figure.update_xaxes(title={"font": {"size": 13}, "standoff": 8})
    figure.update_yaxes(title={"font": {"size": 13}})
    return figure


def log_axis(values: Any) -> dict[str, Any]:
    """A logarithmic axis for these values, labelled with whole numbers: Plotly's own labels leave a leading digit alone."""
    numbers = np.asarray(values, dtype=float)
    numbers = numbers[np.isfinite(numbers) & (numbers > 0)]
    decades = np.log10(numbers.max() / numbers.min()) if numbers.size else 0
    steps: tuple[float, ...] = (
        (1, 1.5, 2, 3, 5, 7) if decades < 1 else (1, 2, 5) if decades < 2 else (1, 3)
    )
    steps = steps if decades < 4 else (1,)
    ticks = [step * 10.0**power for power in range(-12, 13) for step in steps]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{value:g}" for value in ticks]}
