"""A report: one HTML file with findings, figures, prompts to look into, and how all of it was measured.

It needs no server and asks the network for nothing. plotly.js and the figures stand in it compressed, and the page
inflates them: a third of their size.
"""

import base64
import inspect
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import xarray as xr
from plotly.io.json import to_json_plotly
from plotly.offline import get_plotlyjs

from smeltscope.dashboards.figures import FIGURES, PLOTLY_CONFIG, trajectory_figure
from smeltscope.dashboards.figures.common import DARK, layout_of, on_one_scale
from smeltscope.dashboards.overview import NOTE, TITLES, Found, headline_rows, headlines
from smeltscope.dashboards.runs import RunFile, baseline_of, context_for, facts_table, holds_both
from smeltscope.dashboards.viewer import viewer_fragment
from smeltscope.errors import SmeltscopeError
from smeltscope.probes.summary import doubt_of

MOST_BYTES = 8_000_000
VIEWER_BYTES = 2_000_000  # of prompts' attention, where there is room

_ASSETS = Path(__file__).parent / "assets"


def write_report(
    runs: Sequence[RunFile], path: str | Path, *, probes: Sequence[str] | None = None
) -> Path:
    """The report of some runs, of all their diagnostics or of those named, with the viewer where a run holds prompts.

    Raises `SmeltscopeError` for a run that cannot be read and where the file cannot be written; nothing half-written stays.
    """
    return write_page(path, render_report(runs, probes=probes))


def write_page(path: str | Path, text: str) -> Path:
    """A page in its place; refused in a sentence where it cannot be written, and nothing half-written stays."""
    path = Path(path)
    unfinished = path.with_name(path.name + ".partial")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    except BaseException as error:
        unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise SmeltscopeError(
                f"The page {path} could not be written: {error.strerror}."
            ) from error
        raise
    return path


def render_report(runs: Sequence[RunFile], *, probes: Sequence[str] | None = None) -> str:
    """The HTML of a report."""
    held = {name for run in runs for name in run.probes()}
    names = [name for name in TITLES if name in held]
    names = [name for name in names if probes is None or name in probes]
    figures: list[dict[str, Any]] = []
    sections = [_section(name, runs, figures) for name in names]
    title = (
        f"smeltscope: {', '.join(dict.fromkeys(str(r.attributes()['checkpoint']) for r in runs))}"
    )
    parts = [
        f"<h1>{escape(title)}</h1>",
        _in_short(names, runs),
        *sections,
        "<!-- viewer -->",
        '<section id="runs"><h2>What was run</h2>',
        _table(*facts_table(runs)),
        "</section>",
        f'<p class="note">{NOTE}</p>',
    ]
    page = _page(title, _contents(names), parts, figures)
    if probes is None:
        room = min(VIEWER_BYTES, MOST_BYTES - len(page.encode()) - 300_000)
        having = [run for run in runs if run.patterns() is not None]
        fragment = viewer_fragment(
            [run.prompts() for run in having], names=[run.name for run in having], budget=room
        )
        if fragment:
            section = f'<section id="viewer"><h2>Dyck viewer</h2>{fragment}</section>'
            link = '<a href="#viewer">Dyck viewer</a>'
            page = page.replace("<!-- viewer -->", section, 1)
            page = page.replace('<a href="#runs">', link + '<a href="#runs">', 1)
    return page


def render_trajectory(curves: Mapping[str, xr.Dataset], title: str) -> str:
    """The HTML of diagnostics over a training: of each its headline numbers over the steps."""
    figures: list[dict[str, Any]] = []
    sections = [
        f'<section id="{escape(name)}"><h2>{escape(TITLES.get(name, name))}</h2>'
        + _drawn(trajectory_figure(curve).to_plotly_json(), figures)
        + "</section>"
        for name, curve in curves.items()
    ]
    return _page(title, _links(curves), [f"<h1>{escape(title)}</h1>", *sections], figures)


def _page(title: str, links: str, parts: Sequence[str], figures: Sequence[dict[str, Any]]) -> str:
    """A page that needs no other file: its parts, and figures that its script draws."""
    script = (_ASSETS / "report.js").read_text(encoding="utf-8")
    style = (_ASSETS / "report.css").read_text(encoding="utf-8")
    drawn = {
        "figures": figures,
        "layouts": {"light": layout_of("light"), "dark": layout_of("dark")},
        "lighter": DARK,
        "config": PLOTLY_CONFIG,
    }
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><style>{style}</style></head>
<body><header><nav aria-label="Sections">{links}</nav>
<button id="scheme" type="button">Dark</button></header>
<main>
{"".join(parts)}
</main>
<script type="text/plain" id="plotly-js">{_plotlyjs()}</script>
<script type="text/plain" id="figures">{_deflated(to_json_plotly(drawn))}</script>
<script>{script}</script>
</body></html>
"""


@cache
def _plotlyjs() -> str:
    return _deflated(get_plotlyjs())


def _deflated(text: str) -> str:
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


# ---- parts of the page


def _contents(names: Sequence[str]) -> str:
    return f'<a href="#short">In short</a>{_links(names)}<a href="#runs">What was run</a>'


def _links(names: Iterable[str]) -> str:
    return "".join(f'<a href="#{name}">{escape(TITLES.get(name, name))}</a>' for name in names)


def _in_short(names: Sequence[str], runs: Sequence[RunFile]) -> str:
    """The first headline number of each diagnostic of each run."""
    items = []
    for name in names:
        for run in runs:
            found = headlines(run.summary(name), name) if name in run.probes() else []
            if found:
                items.append(f"<li>{escape(_said(_leading(found), run, runs))}</li>")
    body = (
        f"<ul>{''.join(items)}</ul>"
        if items
        else "<p>These runs hold no number that stands first.</p>"
    )
    return f'<section id="short"><h2>In short</h2>{body}</section>'


def _leading(found: Sequence[Found]) -> Found:
    """The first headline number, with the most shots."""
    what = found[0].what.split(", 0 shots")[0]
    return [
        f for f in found if f is found[0] or (f.what.startswith(f"{what}, ") and "shot" in f.what)
    ][-1]


def _said(found: Found, run: RunFile, runs: Sequence[RunFile]) -> str:
    where = f"{run.name}: " if len(runs) > 1 else ""
    beside = f" ({found.beside})" if found.beside else ""
    layers = f"; by layer {found.layers}" if found.layers else ""
    paper = f"; the paper: {found.paper}" if found.paper else ""
    return f"{where}{found.what} {found.here}{beside}{layers}{paper}."


def _section(name: str, runs: Sequence[RunFile], figures: list[dict[str, Any]]) -> str:
    shown = [run for run in runs if name in run.probes()]
    found = [headlines(run.summary(name), name) for run in shown]
    parts = [f'<section id="{escape(name)}"><h2>{escape(TITLES.get(name, name))}</h2>']
    for run in shown:
        which = f"<strong>{escape(run.name)}:</strong> " if len(runs) > 1 else ""
        parts.append(f'<p class="sentence">{which}{escape(run.sentence(name))}</p>')
        if doubt := doubt_of(run.summary(name)):
            parts.append(f'<p class="note">{escape(doubt)}</p>')
    if any(found):
        table = headline_rows([run.name for run in shown], found)
        parts.append(_table(*table, kind="headlines"))
    for run, figure in _figures(name, shown):
        parts.append(_drawn(figure, figures, run.label if len(shown) > 1 else ""))
    definition = inspect.cleandoc(shown[0].definition(name))
    options = json.dumps(shown[0].probe(name).options())
    parts.append(
        f"<details><summary>How it was measured</summary><pre>{escape(definition)}</pre>"
        f"<p>Options: {escape(options)}</p></details></section>"
    )
    return "\n".join(parts)


def _drawn(figure: dict[str, Any], figures: list[dict[str, Any]], caption: str = "") -> str:
    """The place of a figure, which joins those that the page draws."""
    figures.append(figure)
    height = int(figure["layout"].get("height", 450))
    return (
        f"<figure>{f'<figcaption>{escape(caption)}</figcaption>' if caption else ''}"
        f'<div class="figure" data-figure="{len(figures) - 1}" style="height:{height}px"></div></figure>'
    )


def _figures(name: str, runs: Sequence[RunFile]) -> Iterator[tuple[RunFile, dict[str, Any]]]:
    """The figures of a diagnostic: of each run, with its Baseline where a figure can hold both."""
    baselines = {run: baseline_of(run, runs, name) for run in runs}
    for kind in FIGURES.get(name, ()):
        together = holds_both(kind)
        drawn = []
        for run in runs:
            if together and run in baselines.values():
                continue  # it stands in the figure of the other
            context = context_for(
                kind, run, name, against=baselines[run] if together else None, category=None
            )
            summary = run.summary(name)
            if kind.applies(summary, **context):
                drawn.append((run, kind.draw(summary, **context).to_plotly_json()))
        figures = on_one_scale([figure for _, figure in drawn])
        yield from zip([run for run, _ in drawn], figures, strict=True)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
