"""dyck-map: where heads look when an answer is due, and how that changes between visits."""

from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from smeltscope.dashboards.figures.common import (
    GREY,
    ROW_PIXELS,
    FigureKind,
    Panel,
    bars,
    chosen,
    differences_scale,
    errors,
    has_values,
    heat,
    label,
    largest,
    looped,
    masses_scale,
    measured,
    of_visit,
    pair_of,
    places_axis,
    reference,
    row_of_maps,
    said,
    series_colour,
    styled,
    tick,
    visit_colour,
    visits_of,
    without_interval,
)
from smeltscope.probes.dyck_heads import dyck_head_of

PARTS = {"change": GREY, "release": "#E69F00", "retarget": "#56B4E9"}
ANSWERS = "demo_answer"
PAPER_HEAD = (0.35, 0.26)  # release and retarget on answers of the one head in arXiv 2609.01343
# Regions of a prompt, in the order of `region_name`: Okabe and Ito's, grey for what only separates.
REGION_COLOURS = ("#000000", "#999999", "#56B4E9", "#D55E00", "#CCCCCC", "#0072B2", "#CC79A7")
TARGET_PIXELS = 30
MOST_CROSSES = 40  # points with both intervals drawn: more hide each other


def regions_overall(summary: xr.Dataset) -> go.Figure:
    """Mass of each region at each visit, mean over looped layers and heads; its change, split into release and retarget."""
    visits, rows = summary["visit"].values, looped(summary)
    masses = {int(v): measured(summary, f"mass_visit_{v}_overall") for v in np.unique(visits[rows])}
    parts = {name: f"{name}_overall" for name in PARTS}
    return _regions(
        summary,
        masses,
        summary["uniform"].isel(execution=rows).mean("execution").values,
        {k: measured(summary, v) for k, v in parts.items() if has_values(summary, v)},
        title="Attention on Dyck prompts, by region",
        who="mean over looped layers and heads"
        if (visits > 1).any()
        else "mean over layers and heads",
    )


def regions_of_head(
    summary: xr.Dataset,
    *,
    layer: int | None = None,
    head: int | None = None,
    pair: str | None = None,
) -> go.Figure:
    """The same of one head: the Dyck head, else the one that most turns to demonstrations' answers, unless named."""
    layer, head = head_of_map(summary, layer, head)
    rows = np.flatnonzero(summary["layer"].values == layer)
    mass, at = measured(summary, "mass"), {"head": head}
    masses = {int(summary["visit"].values[e]): mass.isel(execution=e).isel(at) for e in rows}
    parts = {}
    if "visit_pair" in summary.dims and layer in summary["looped_layer"].values:
        pair = pair_of(summary, pair)
        masses = {v: m for v, m in masses.items() if str(v) in visits_of(pair)}
        parts = {
            name: measured(summary, name).sel(looped_layer=layer, visit_pair=pair).isel(at)
            for name in PARTS
        }
    return _regions(
        summary,
        masses,
        summary["uniform"].isel(execution=rows[0]).values,
        parts,
        title=f"Attention of head {head} of layer {layer} on Dyck prompts, by region",
        who="the Dyck head" if (layer, head) == dyck_head_of(summary) else "",
    )


def regions_there(summary: xr.Dataset) -> list[str]:
    """The regions that these prompts have."""
    regions = summary["map_region"].values.tolist()
    return [r for r in regions if has_values(summary.sel(map_region=r), "mass")]


def head_of_map(
    summary: xr.Dataset, layer: int | None = None, head: int | None = None
) -> tuple[int, int]:
    """(layer, head): those named, else the Dyck head, where the run has one; else the looped head that most turns to
    demonstrations' answers, which was picked on the prompts that it is shown on.

    Without a loop it is the head that most looks there; head 0 of the first layer where there are no demonstrations.
    """
    known = dyck_head_of(summary)
    if known is not None and layer in (None, known[0]) and head in (None, known[1]):
        return known
    there = regions_there(summary)
    region = ANSWERS if ANSWERS in there else there[-1]
    if has_values(summary, "retarget") and has_values(summary.sel(map_region=region), "retarget"):
        values = summary["retarget"].sel(map_region=region).isel(visit_pair=0).values
        layers = summary["looped_layer"].values
    else:
        values = summary["mass"].sel(map_region=region).values  # (execution, head)
        layers = summary["layer"].values
    if layer is not None:
        chosen(summary["layer"].values, layer, "layer")
        if layer in layers:
            values = np.where((layers == layer)[:, None], values, np.nan)
    if head is not None:
        chosen(np.arange(values.shape[1]), head, "head")
        values = np.where(np.arange(values.shape[1]) == head, values, np.nan)
    row, column = np.unravel_index(np.argmax(np.nan_to_num(values, nan=-np.inf)), values.shape)
    return (
        int(layers[row]) if layer is None else layer,
        int(column) if head is None else head,
    )


def _regions(
    summary: xr.Dataset,
    masses: dict[int, xr.Dataset],
    uniform: np.ndarray,
    parts: dict[str, xr.Dataset],
    *,
    title: str,
    who: str,
) -> go.Figure:
    there = [
        i
        for i in range(summary.sizes["map_region"])
        if any(np.isfinite(m["value"].values[i]) for m in masses.values())
    ]
    names = [label(summary["map_region"].values[i]) for i in there]
    x, n = np.arange(len(there)), _prompts(summary)
    rows = 2 if parts else 1
    figure = make_subplots(rows=rows, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    for visit, part in masses.items():
        figure.add_trace(
            bars(
                x,
                part.isel(map_region=there),
                where=names,
                name=f"visit {visit}",
                colour=visit_colour(visit),
                n=n,
            ),
            row=1,
            col=1,
        )
    level = reference(x, uniform[there], name="uniform attention", symbol="line-ew-open")
    level.update(mode="markers", marker={"size": 30, "line": {"width": 2, "color": GREY}})
    figure.add_trace(level, row=1, col=1)
    for name, colour in PARTS.items():
        if name in parts:
            figure.add_trace(
                bars(
                    x,
                    parts[name].isel(map_region=there),
                    where=names,
                    name=name,
                    colour=colour,
                    n=n,
                    signed=True,
                ),
                row=2,
                col=1,
            )
    if parts:
        figure.add_hline(y=0, line={"color": GREY, "width": 1}, row=2, col=1)
        figure.update_yaxes(title_text="change of mass", zeroline=False, row=2, col=1)
    figure.update_xaxes(**places_axis(names))
    figure.update_xaxes(title_text="region of the prompt", row=rows, col=1)
    figure.update_yaxes(title_text="attention mass", rangemode="tozero", row=1, col=1)
    figure.update_layout(barmode="group", bargap=0.3)
    return styled(
        figure,
        title,
        "; ".join(filter(None, [who, n, "whiskers: 95 % intervals over items"])),
        height=300 + 220 * rows,
        bottom=130,
    )


def region_by_head(
    summary: xr.Dataset, *, region: str | None = None, pair: str | None = None
) -> go.Figure:
    """Mass on one region by layer and head at each visit, and its change; on demonstrations' answers unless named."""
    regions = regions_there(summary)
    region = chosen(regions, region, "region", ANSWERS if ANSWERS in regions else regions[0])
    mass = measured(summary, "mass").sel(map_region=region)
    layers, visits = np.unique(summary["layer"].values), summary["visit"].values
    panels = []
    for visit in np.unique(visits):
        panels.append(Panel(title=f"Visit {visit}", part=of_visit(mass, visit, layers)))
    if "change" in summary:
        change = measured(summary, "change").sel(map_region=region)
        for each in summary["visit_pair"].values.tolist() if pair is None else [pair]:
            earlier, later = visits_of(pair_of(summary, each))
            part = change.sel(visit_pair=each).rename(looped_layer="layer").reindex(layer=layers)
            title = f"Visit {later}<br>minus visit {earlier}"
            panels.append(Panel(title=title, part=part, signed=True))
    figure = row_of_maps(panels, layers, n=_prompts(summary))
    return styled(
        figure,
        f"Attention on {label(region)} when an answer is due, by head",
        height=290 + ROW_PIXELS * len(layers),
        top=45,
        bottom=130,
    )


def split_by_head(
    summary: xr.Dataset, *, region: str | None = None, pair: str | None = None
) -> go.Figure:
    """Each looped head by what a region got of the mass that the start token gave up, and what was moved to it besides.

    Unless named the region is demonstrations' answers, where the paper's head stands beside.
    """
    regions = [
        r for r in regions_there(summary) if has_values(summary.sel(map_region=r), "retarget")
    ]
    region = chosen(regions, region, "region", ANSWERS if ANSWERS in regions else regions[0])
    pair = pair_of(summary, pair)
    change, release, retarget = (
        measured(summary, name).sel(map_region=region, visit_pair=pair) for name in PARTS
    )
    n, figure = _prompts(summary), go.Figure()
    drawn = int(np.isfinite(retarget["value"].values).sum()) <= MOST_CROSSES
    for i, layer in enumerate(summary["looped_layer"].values.tolist()):
        at = {"looped_layer": i}
        crosses = [
            _thin(errors(part.isel(at), GREY)) if drawn else None for part in (release, retarget)
        ]
        numbers = [said(part.isel(at), "", signed=True) for part in (change, release, retarget)]
        figure.add_trace(
            go.Scatter(
                x=release["value"].isel(at).values,
                y=retarget["value"].isel(at).values,
                error_x=crosses[0],
                error_y=crosses[1],
                mode="markers",
                marker={"color": series_colour(i), "size": 8},
                name=f"layer {layer}",
                text=[
                    f"layer {layer}, head {head}<br>change {whole}<br>release {given}<br>retarget {moved}<br>{n}"
                    for head, (whole, given, moved) in enumerate(zip(*numbers, strict=True))
                ],
                hovertemplate="%{text}<extra></extra>",
            )
        )
    known = dyck_head_of(summary)
    if known is not None:
        at = {"looped_layer": known[0], "head": known[1]}
        figure.add_trace(
            go.Scatter(
                x=[float(release["value"].sel(at))],
                y=[float(retarget["value"].sel(at))],
                mode="markers",
                marker={"symbol": "circle-open", "color": GREY, "size": 16, "line": {"width": 2}},
                name="the Dyck head",
                hoverinfo="skip",
            )
        )
    if region == ANSWERS and pair == "1-2":
        figure.add_trace(
            go.Scatter(
                x=[PAPER_HEAD[0]],
                y=[PAPER_HEAD[1]],
                mode="markers",
                marker={"symbol": "cross", "color": GREY, "size": 9},
                name="the paper's head",
                text=["the paper's Dyck head, one prompt of 4 shots (1.6B): context, not a target"],
                hovertemplate="%{text}<extra></extra>",
            )
        )
    figure.update_xaxes(title_text="release", zerolinecolor=GREY, zerolinewidth=1)
    figure.update_yaxes(title_text="retarget", zerolinecolor=GREY, zerolinewidth=1)
    return styled(
        figure,
        f"What changed on {label(region)} from visit {visits_of(pair)[0]} to {visits_of(pair)[1]}, by head",
        "release: the start token's mass handed out in proportion; retarget: moved there besides<br>"
        + (
            "whiskers: 95 % intervals over items" if drawn else "95 % intervals: hover over a point"
        ),
        height=540,
        top=18,
        bottom=120,
    )


def _thin(bars: dict[str, Any] | None) -> dict[str, Any] | None:
    """Error bars without caps, that stand behind many points."""
    return None if bars is None else bars | {"thickness": 0.7, "width": 0}


def prompt_map(
    summary: xr.Dataset,
    *,
    patterns: xr.Dataset,
    layer: int | None = None,
    head: int | None = None,
    pair: str | None = None,
    example: int | None = None,
) -> go.Figure:
    """One prompt: attention of a head from where each target is predicted on all tokens, at two visits, and the difference.

    `patterns` is a run's `dyck_patterns` with its coordinates: `run["dyck_patterns"].to_dataset()`.
    """
    layer, head = head_of_map(summary, layer, head)
    example = int(chosen(patterns["example"].values, example, "example"))
    prompt = patterns.sel(example=example)
    keys = np.flatnonzero(prompt["key_region"].values >= 0)
    targets = np.flatnonzero(prompt["target"].values >= 0)
    rows = {
        int(patterns["visit"].values[e]): prompt["row"].values[e, head][np.ix_(targets, keys)]
        for e in np.flatnonzero(patterns["layer"].values == layer)
    }
    visits = sorted(rows)
    if len(visits) > 1:
        pair = (
            pair_of(summary, pair)
            if "visit_pair" in summary.dims
            else "-".join(map(str, visits[:2]))
        )
        visits = [int(v) for v in visits_of(pair)]
    maps = [(f"visit {v}", rows[v], False) for v in visits]
    if len(visits) > 1:
        maps.append(
            (f"visit {visits[1]} minus visit {visits[0]}", rows[visits[1]] - rows[visits[0]], True)
        )
    heights = [1.0, *[max(2.5, 2.0 * len(targets))] * len(maps)]
    plot_pixels = 30 + len(maps) * (50 + TARGET_PIXELS * max(1, len(targets)))
    figure = make_subplots(
        rows=1 + len(maps),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=max(0.06, 26 / plot_pixels),  # room for a title
        row_heights=heights,
        subplot_titles=["", *(name for name, _, _ in maps)],
    )
    regions = prompt["key_region"].values[keys]
    names = [label(name) for name in patterns["region_name"].values.tolist()]
    tokens = [visible(token) for token in prompt["token"].values[keys].tolist()]
    place = [
        f"{k}: {token} ({names[r]})" for k, token, r in zip(keys, tokens, regions, strict=True)
    ]
    _region_strip(figure, regions, names, place)
    said_right = []
    for number in targets:
        gold, predicted = (visible(prompt[what].values[number]) for what in ("gold", "predicted"))
        said_right.append(f"{gold}  right" if gold == predicted else f"{gold}  says {predicted}")
    for row, (name, values, signed) in enumerate(maps, start=2):
        part = without_interval(xr.DataArray(values, dims=("target", "key")))
        where = np.array(
            [[f"{name}, target {gold}<br>on {at}" for at in place] for gold in said_right],
            dtype=object,
        )
        figure.add_trace(
            heat(
                part,
                where=where,
                n="",
                signed=signed,
                x=keys,
                y=np.arange(len(targets)),
                coloraxis="coloraxis2" if signed else "coloraxis",
            ).update(xgap=0),
            row=row,
            col=1,
        )
        figure.update_yaxes(
            autorange="reversed",
            tickvals=np.arange(len(targets)),
            ticktext=said_right,
            title_text="target",
            row=row,
            col=1,
        )
    figure.update_xaxes(showgrid=False, zeroline=False, range=[-0.5, len(keys) - 0.5])
    figure.update_yaxes(showgrid=False, zeroline=False)
    figure.update_xaxes(
        title_text="position of the token in the prompt",
        dtick=tick(len(keys), 12),
        row=len(maps) + 1,
        col=1,
    )
    differences = [values for _, values, signed in maps if signed]
    figure.update_layout(
        coloraxis=masses_scale(largest([v for _, v, signed in maps if not signed])),
        coloraxis2=differences_scale(largest(differences), showscale=bool(differences)),
    )
    figure = styled(
        figure,
        f"Head {head} of layer {layer}: attention from each target on the prompt",
        f"example {example}: {label(prompt['example_id'].item(), 60)}",
        height=260 + plot_pixels,
        bottom=190,
    )
    # the legend of regions above the scales
    return figure.update_layout(legend={"y": 84 / figure.layout.height}, margin={"l": 96})


def _region_strip(
    figure: go.Figure, regions: np.ndarray, names: list[str], place: list[str]
) -> None:
    """The region of every token as a row of colours, and a legend for it."""
    there = [r for r in range(len(names)) if (regions == r).any()]
    numbers = np.array([there.index(r) for r in regions], dtype=float)
    colours = [REGION_COLOURS[r % len(REGION_COLOURS)] for r in there]
    steps = np.linspace(0, 1, len(there) + 1)
    scale = [[float(end), c] for i, c in enumerate(colours) for end in steps[i : i + 2]]
    figure.add_trace(
        go.Heatmap(
            z=[numbers],
            y=[0],
            colorscale=scale,
            zmin=-0.5,
            zmax=len(there) - 0.5,
            showscale=False,
            text=[place],
            hovertemplate="%{text}<extra></extra>",
        ),
        row=1,
        col=1,
    )
    for r, colour in zip(there, colours, strict=True):
        figure.add_trace(
            go.Scatter(
                x=[None],
                y=[None],
                mode="markers",
                marker={
                    "symbol": "square",
                    "size": 11,
                    "color": colour,
                    "line": {"color": GREY, "width": 1},
                },
                name=names[r],
            ),
            row=1,
            col=1,
        )
    figure.update_yaxes(tickvals=[0], ticktext=["region"], row=1, col=1)


def visible(token: str) -> str:
    """A token as text that shows its spaces and line breaks."""
    shown = token.replace("\n", "\\n").replace("\t", "\\t").replace(" ", "␣")
    return label(shown or "(empty)", 24)


def _prompts(summary: xr.Dataset) -> str:
    prompts, items, targets = (int(summary[name]) for name in ("prompts", "items", "targets"))
    return f"{targets:,} targets in {prompts:,} prompts of {items:,} items"


KINDS = (
    FigureKind(
        name="map",
        title="One prompt",
        make=prompt_map,
        takes=("patterns", "layer", "head", "pair", "example"),
        given=("patterns",),
        needs=("mass",),
    ),
    FigureKind(
        name="head",
        title="One head, by region",
        make=regions_of_head,
        takes=("layer", "head", "pair"),
        needs=("mass",),
    ),
    FigureKind(name="regions", title="All heads, by region", make=regions_overall, needs=("mass",)),
    FigureKind(
        name="heads",
        title="A region, by head",
        make=region_by_head,
        takes=("region", "pair"),
        needs=("mass",),
    ),
    FigureKind(
        name="split",
        title="Release and retarget, by head",
        make=split_by_head,
        takes=("region", "pair"),
        needs=("retarget",),
    ),
)
