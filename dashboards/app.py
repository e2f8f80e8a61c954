"""The pages of `probe view`: an overview, a page for each diagnostic, the viewer of prompts.

A page is a place: which diagnostic, which run, beside which others, and what is picked of it (category, layer,
visit, head, quantity). The address says all of it, so that a link opens the same page; `run` is an index into the runs
given. The frame of a page is made at once; numbers and figures follow when the page asks for them.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain, islice
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qs, urlencode

import dash
import dash_mantine_components as dmc
import xarray as xr
from dash import ALL, MATCH, Input, Output, State, dcc, html, no_update

from smeltscope.dashboards.figures import FIGURES, PLOTLY_CONFIG, FigureKind, choices_of
from smeltscope.dashboards.figures.common import Theme, in_theme, on_one_scale
from smeltscope.dashboards.numbers import choices, quantities_in, table_of
from smeltscope.dashboards.overview import HEADLINES, NOTE, TITLES, Found, headline_rows, headlines
from smeltscope.dashboards.runs import RunFile, baseline_of, context_for, facts_table, holds_both
from smeltscope.dashboards.viewer import add_viewer_routes
from smeltscope.errors import SmeltscopeError
from smeltscope.probes.compare import HEADS
from smeltscope.probes.summary import doubt_of

if TYPE_CHECKING:
    from smeltscope.model import Checkpoint

ASSETS = Path(__file__).parent / "assets"
QUIET = 2.0  # seconds without a request after which work for later ones goes on
REFRESH = 2000  # milliseconds between two looks at a run that is being written
MOST_ROWS = 300  # of a table of numbers
NO_RUN = "none"  # compared with
PICKS = ("category", "layer", "visit", "head", "pair", "write", "centred", "region", "example")
OWN = "the figure's own"  # what is shown unless something is picked

Values = Sequence[str | None]
Ids = Sequence[Mapping[str, str]]


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a page shows, as its address says it."""

    probe: str = ""  # "" is the overview
    run: int = 0
    against: tuple[int, ...] = ()  # the runs beside it
    picked: Mapping[str, str] = field(default_factory=dict)

    @property
    def choices(self) -> dict[str, Any]:
        """What is picked, as figures and tables take it."""
        kinds = {"true": True, "false": False}
        return {
            key: kinds.get(text, int(text) if text.isdigit() else text)
            for key, text in self.picked.items()
            if key not in ("category", "quantity")
        }


class _Prompts(Sequence[xr.DataTree]):
    """What the viewer shows of runs, as they are when it asks; a run that cannot be read raises `SmeltscopeError`."""

    def __init__(self, runs: Sequence[RunFile]) -> None:
        self._runs = runs

    def __len__(self) -> int:
        return len(self._runs)

    def __getitem__(self, i: Any) -> Any:
        trouble = self._runs[i].trouble()
        if trouble is not None:
            raise SmeltscopeError(trouble)
        return self._runs[i].prompts()


def make_app(
    runs: Sequence[RunFile], load: Callable[[int], "Checkpoint"] | None = None
) -> dash.Dash:
    """The application over some runs; it asks no other server for anything.

    `load` gives the checkpoint of a run by its number, for prompts that are run live.
    """
    app = dash.Dash(
        __name__,
        assets_folder=str(ASSETS),
        assets_ignore="report",  # another page's
        title="smeltscope",
        update_title="",
        suppress_callback_exceptions=True,
    )
    app.layout = lambda: _frame(runs)
    _connect(app, runs)
    _work_ahead(app, runs)
    add_viewer_routes(app.server, _Prompts(runs), load, names=[run.name for run in runs])
    return app


def _work_ahead(app: dash.Dash, runs: Sequence[RunFile]) -> None:
    """Work out the pages in their order while nobody asks for one, so that who opens one waits less.

    It steps aside for requests; what hinders a page is said when the page is opened.
    """
    asked = [0.0]

    @app.server.before_request
    def note() -> None:
        asked[0] = monotonic()

    def work() -> None:
        for name in _probes(runs):
            for make in (_card, _as_opened):
                while monotonic() - asked[0] < QUIET:
                    sleep(QUIET / 5)
                with suppress(Exception):
                    make(name, runs)

    Thread(target=work, daemon=True).start()


def _as_opened(probe: str, runs: Sequence[RunFile]) -> None:
    """A diagnostic's page as its plain address has it."""
    place = place_of(f"/{probe}", "", runs)
    _diagnostic(place, runs, "light")
    _further(place, runs, "light")


# ---- the frame


def _frame(runs: Sequence[RunFile]) -> Any:
    return dmc.MantineProvider(
        id="mantine",
        children=[
            dcc.Location(id="url", refresh=False),
            dcc.Store(id="version", data=_versions(runs)),
            *(
                dcc.Store(id=name) for name in ("moved", "picked", "mounted", "named")
            ),  # of callbacks that give nothing
            dcc.Store(id="title"),
            dcc.Interval(id="tick", interval=REFRESH, disabled=_all_finished(runs)),
            html.Header(
                [
                    html.A("smeltscope", href="/", className="brand"),
                    html.Nav(id="nav"),
                    dmc.ColorSchemeToggle(
                        id="scheme",
                        lightIcon="Dark",
                        darkIcon="Light",
                        variant="default",
                        size="lg",
                        **{"aria-label": "Dark or light"},
                    ),
                ],
                className="top",
            ),
            html.Main(id="page"),
        ],
    )


def _connect(app: dash.Dash, runs: Sequence[RunFile]) -> None:
    """All callbacks."""

    @app.callback(
        Output("page", "children"),
        Output("nav", "children"),
        Output("title", "data"),
        Input("url", "pathname"),
        Input("url", "search"),
    )
    def show_page(pathname: str | None, search: str | None) -> tuple[Any, Any, Any]:
        if pathname is None:  # not known yet
            return no_update, no_update, no_update
        place = place_of(pathname, search or "", runs)
        unmet = [_alert(text) for text in unmet_of(place, search or "", runs)]
        return (
            [*unmet, *_in_words(lambda: _page(place, runs))],
            _navigation(place, runs),
            f"{_entries(runs).get(place.probe, place.probe)} - smeltscope",
        )

    @app.callback(
        Output("version", "data"),
        Output("tick", "disabled"),
        Input("tick", "n_intervals"),
        State("version", "data"),
        prevent_initial_call=True,
    )
    def look_again(_: int, before: list[str]) -> tuple[Any, bool]:
        now = _versions(runs)
        return (no_update if now == before else now), _all_finished(runs)

    @app.callback(
        Output({"kind": "card", "probe": MATCH}, "children"),
        Input({"kind": "card", "probe": MATCH}, "id"),
        Input("version", "data"),
    )
    def show_card(card: Mapping[str, str], _: Any) -> Any:
        return _in_words(lambda: _card(card["probe"], runs))

    @app.callback(Output("facts", "children"), Input("version", "data"))
    def show_facts(_: Any) -> Any:
        return _facts(runs)

    @app.callback(
        Output("picks", "children"),
        Output("quantity", "children"),
        Output("ready", "data"),
        Input("frame", "data"),
        Input("version", "data"),
        State("ready", "data"),
    )
    def show_selectors(
        at: Mapping[str, Any], _: Any, ready: Mapping[str, Any] | None
    ) -> tuple[Any, Any, Any]:
        if ready is not None:  # a run that goes on keeps what is picked
            return no_update, no_update, no_update
        place = _place(at)
        made = _in_words(lambda: [_picks(place, runs), _quantities(place, runs)])
        return (*made, at) if len(made) == 2 else (made, [], None)

    picks = (
        Input({"kind": "pick", "name": ALL}, "value"),
        State({"kind": "pick", "name": ALL}, "id"),
    )

    @app.callback(
        Output("first", "children"),
        Output("drawn", "data"),
        Input("ready", "data"),
        *picks,
        Input("version", "data"),
        Input("scheme", "computedColorScheme"),
        prevent_initial_call=True,
    )
    def show_diagnostic(
        at: Mapping[str, Any] | None, values: Values, ids: Ids, _: Any, scheme: Theme | None
    ) -> tuple[Any, Any]:
        if at is None or scheme is None:
            return no_update, no_update
        place = _picked(at, values, ids)
        made = _in_words(lambda: _diagnostic(place, runs, scheme))
        return made, {"at": asdict(place), "scheme": scheme, "versions": _versions(runs)}

    @app.callback(Output("more", "children"), Input("drawn", "data"), prevent_initial_call=True)
    def show_more(drawn: Mapping[str, Any]) -> Any:
        return _in_words(lambda: _further(_place(drawn["at"]), runs, drawn["scheme"]))

    @app.callback(
        Output("numbers", "children"),
        Input("ready", "data"),
        *picks,
        Input({"kind": "quantity", "name": ALL}, "value"),
        Input("version", "data"),
        prevent_initial_call=True,
    )
    def show_numbers(
        at: Mapping[str, Any] | None, values: Values, ids: Ids, quantity: Values, _: Any
    ) -> Any:
        if at is None or not any(quantity):
            return []
        return _in_words(lambda: _numbers(_picked(at, values, ids), str(quantity[0]), runs))

    app.clientside_callback(
        "title => { document.title = title ?? 'smeltscope'; return dash_clientside.no_update; }",
        Output("named", "data"),
        Input("title", "data"),
    )
    # Another run is another page: with an entry in the browser's history, as a link makes one.
    app.clientside_callback(
        """(run, against, shown) => {
            const [beside, wanted] = [shown.against, against].map(runs => runs.join(',') || 'none');
            if (run !== String(shown.run) || wanted !== beside) {
                const query = new URLSearchParams(location.search);
                query.set('run', run);
                query.set('against', wanted);
                history.pushState({}, '', `${location.pathname}?${query}`);
                dispatchEvent(new CustomEvent('_dashprivate_pushstate'));
            }
            return dash_clientside.no_update;
        }""",
        Output("moved", "data"),
        Input("run", "value"),
        Input("against", "value"),
        State("frame", "data"),
        prevent_initial_call=True,
    )
    # What is picked changes the address, not the page.
    app.clientside_callback(
        """(values, ids) => {
            const query = new URLSearchParams(location.search);
            ids.forEach((id, i) => values[i] ? query.set(id.name, values[i]) : query.delete(id.name));
            history.replaceState(history.state, '', `${location.pathname}?${query}`);
            return dash_clientside.no_update;
        }""",
        Output("picked", "data"),
        Input({"kind": ALL, "name": ALL}, "value"),
        State({"kind": ALL, "name": ALL}, "id"),
        prevent_initial_call=True,
    )
    app.clientside_callback(
        """id => {
            window.smeltscopeViewer.mount(document.getElementById(id), {kind: 'server', base: '/viewer'});
            return dash_clientside.no_update;
        }""",
        Output("mounted", "data"),
        Input("viewer", "id"),
    )


def _picked(at: Mapping[str, Any], values: Values, ids: Ids) -> Place:
    """The place of a page with what its selectors say."""
    picked = {i["name"]: v for i, v in zip(ids, values, strict=True) if v}
    return replace(_place(at), picked=picked)


def _place(at: Mapping[str, Any]) -> Place:
    """A place as its page keeps it."""
    return Place(**{**at, "against": tuple(at["against"])})


def _in_words(make: Callable[[], list[Any]]) -> list[Any]:
    """What is made, or what hindered it as a sentence."""
    try:
        return make()
    except SmeltscopeError as error:
        return [_alert(str(error))]
    except Exception as error:  # a page says so; the terminal shows where
        logging.getLogger(__name__).exception("A page could not be made")
        return [_alert(f"Unexpected {type(error).__name__}: {error}; the terminal shows where.")]


def _alert(text: str) -> Any:
    return dmc.Alert(text, color="orange", variant="light", className="trouble")


# ---- places


def place_of(pathname: str, search: str, runs: Sequence[RunFile]) -> Place:
    """The place that an address names; what it says of runs that are not there is left aside (`unmet_of` says so)."""
    query = _query(search)
    probe = pathname.strip("/")
    if probe in ("", "viewer"):
        return Place(probe=probe, run=_index(query.get("run"), runs) or 0)
    having = _having(probe, runs)
    run = _index(query.get("run"), runs)
    if run not in having and having:
        run = having[0]
    run = run or 0
    against = [_index(text, runs) for text in _others(query)]
    if "against" not in query:
        baseline = baseline_of(runs[run], runs, probe)
        against = [] if baseline is None else [runs.index(baseline)]
    picked = {key: value for key, value in query.items() if key in (*PICKS, "quantity")}
    return Place(
        probe=probe,
        run=run,
        against=tuple(
            dict.fromkeys(i for i in against if i is not None and i in having and i != run)
        ),
        picked=picked,
    )


def unmet_of(place: Place, search: str, runs: Sequence[RunFile]) -> list[str]:
    """What an address asks for and its page cannot show, in words."""
    if not place.probe:
        return []
    query, found = _query(search), []
    asked = [("run", query["run"])] if "run" in query else []
    asked += [("against", text) for text in _others(query)]
    for key, text in asked:
        i = _index(text, runs)
        if i is not None and i in (place.against if key == "against" else (place.run,)):
            continue
        instead = f"{runs[place.run].name} is shown" if key == "run" else "it is not shown beside"
        if i is None:
            last = len(runs) - 1
            found.append(f"There is no run {text} here (they go from 0 to {last}); {instead}.")
        elif trouble := runs[i].trouble():
            found.append(f"{trouble.removesuffix('.')}; {instead}.")
        elif i == place.run:
            found.append(f"{runs[i].name} is not compared with itself.")
        else:
            found.append(f"{runs[i].name} holds no {place.probe}; {instead}.")
    return found


def address_of(place: Place) -> str:
    """The address of a place."""
    query: dict[str, Any] = {"run": place.run} if place.probe else {}
    if place.against:
        query["against"] = ",".join(map(str, place.against))
    return f"/{place.probe}?{urlencode(query | dict(place.picked), safe=',')}".removesuffix("?")


def _others(query: Mapping[str, str]) -> list[str]:
    """The runs beside, as an address names them: `1,2`."""
    texts = query.get("against", NO_RUN).split(",")
    return [text for text in texts if text not in ("", NO_RUN)]


def _query(search: str) -> dict[str, str]:
    return {key: values[-1] for key, values in parse_qs(search.removeprefix("?")).items()}


def _index(text: str | None, runs: Sequence[RunFile]) -> int | None:
    return int(text) if text is not None and text.isdigit() and int(text) < len(runs) else None


def _having(probe: str, runs: Sequence[RunFile]) -> list[int]:
    """The runs that hold a diagnostic."""
    return [i for i, run in enumerate(runs) if run.trouble() is None and probe in run.probes()]


def _versions(runs: Sequence[RunFile]) -> list[str]:
    return [run.version() for run in runs]


def _all_finished(runs: Sequence[RunFile]) -> bool:
    return all(run.path.suffix != ".partial" and run.version() != "missing" for run in runs)


def _probes(runs: Sequence[RunFile]) -> list[str]:
    """The diagnostics of all runs, in the order in which they are explained."""
    held = {name for run in runs if run.trouble() is None for name in run.probes()}
    order = list(TITLES)
    return sorted(held, key=lambda name: (order.index(name) if name in order else 99, name))


# ---- pages


def _navigation(place: Place, runs: Sequence[RunFile]) -> list[Any]:
    return [
        dcc.Link(
            title,
            href=_link(name, place, runs),
            className="here" if name == place.probe else "",
        )
        for name, title in _entries(runs).items()
    ]


def _entries(runs: Sequence[RunFile]) -> dict[str, str]:
    """What the pages are called."""
    of_probes = {name: TITLES.get(name, name) for name in _probes(runs)}
    return {"": "Overview", **of_probes, "viewer": "Dyck viewer"}


def _link(name: str, place: Place, runs: Sequence[RunFile]) -> str:
    """Where an entry leads: to the same run, if it has what is shown there."""
    if not name:
        return "/"
    viewer = name == "viewer"
    having = _having_prompts(runs) if viewer else _having(name, runs)
    run = place.run if place.run in having or not having else having[0]
    return address_of(Place(probe=name, run=run))


def _having_prompts(runs: Sequence[RunFile]) -> list[int]:
    """The runs that keep the attention of prompts."""
    return [i for i, run in enumerate(runs) if run.patterns() is not None]


def _page(place: Place, runs: Sequence[RunFile]) -> list[Any]:
    if not place.probe:
        return _overview(runs)
    if place.probe == "viewer":
        return [html.H1("Dyck viewer"), html.Div(id="viewer")]
    having = _having(place.probe, runs)
    if not having:
        names = ", ".join(_probes(runs)) or "no diagnostic that can be shown"
        return [
            html.H1("No such page"),
            _alert(f"No run here holds {place.probe!r}; there is: {names}."),
            *_troubles(runs),
        ]
    title = TITLES.get(place.probe, place.probe)
    return [
        html.H1(title),
        *([html.P(runs[place.run].label, className="note")] if len(having) == 1 else []),
        html.Div(_selectors(place, runs, having), className="selectors", role="group"),
        dcc.Store(id="frame", data=asdict(place)),
        dcc.Store(id="ready"),
        html.Div(id="picks", className="selectors"),
        html.Div([html.Div(dmc.Skeleton(height=420), id="first"), html.Div(id="more")], id="shown"),
        dcc.Store(id="drawn"),
        # The browser loads and compiles plotly.js while the numbers are worked out, not after.
        html.Div(dcc.Graph(figure={}, config=cast(Any, PLOTLY_CONFIG)), hidden=True),
        html.H2("Numbers"),
        html.Div(id="quantity", className="selectors"),
        html.Div(id="numbers"),
        html.Details(
            [html.Summary("How it was measured"), html.Pre(runs[place.run].definition(place.probe))]
        ),
    ]


def _overview(runs: Sequence[RunFile]) -> list[Any]:
    return [
        html.H1("Overview"),
        html.Div(id="facts"),
        *(
            html.Section(
                [
                    html.H2(dcc.Link(TITLES.get(name, name), href=f"/{name}")),
                    html.Div(dmc.Skeleton(height=90), id={"kind": "card", "probe": name}),
                ]
            )
            for name in _probes(runs)
        ),
        html.P(NOTE, className="note"),
    ]


def _facts(runs: Sequence[RunFile]) -> list[Any]:
    shown = [run for run in runs if run.trouble() is None]
    return [*_troubles(runs), *([_table(*facts_table(shown))] if shown else [])]


def _troubles(runs: Sequence[RunFile]) -> list[Any]:
    return [_alert(trouble) for run in runs if (trouble := run.trouble()) is not None]


def _card(probe: str, runs: Sequence[RunFile]) -> list[Any]:
    """What stands first of a diagnostic, of all runs that hold it; of one that has no segment yet, that."""
    shown, found, parts = [], [], []
    for run in (runs[i] for i in _having(probe, runs)):
        name = [html.Strong(f"{run.name}: ")] if len(runs) > 1 else []
        try:
            found.append(headlines(run.summary(probe), probe))
            shown.append(run)
            parts.append(html.P([*name, run.sentence(probe)], className="sentence"))
            parts += _doubt(run.summary(probe))
        except SmeltscopeError as error:
            parts.append(_alert(str(error)))
    return [_headline_table(shown, found), *parts] if any(found) else parts


def _headline_table(runs: Sequence[RunFile], found: Sequence[Sequence[Found]]) -> Any:
    return _table(*headline_rows([run.name for run in runs], found), className="headlines")


def _selectors(place: Place, runs: Sequence[RunFile], having: Sequence[int]) -> list[Any]:
    """Which run, and beside which."""
    labels = {str(i): runs[i].label for i in having}
    others = {key: text for key, text in labels.items() if key != str(place.run)}
    beside = dmc.MultiSelect(
        label="Beside",
        id="against",
        value=[str(i) for i in place.against],
        data=[{"value": key, "label": text} for key, text in others.items()],
        placeholder="" if place.against else "no other run",
        clearable=True,
        size="sm",
    )
    found = [_select("Run", "run", str(place.run), labels), beside]
    return found if others else [html.Div(found, hidden=True)]


def _picks(place: Place, runs: Sequence[RunFile]) -> list[Any]:
    """What can be picked of a run's diagnostic: by its figures, and of its numbers."""
    run = runs[place.run]
    summary = run.summary(place.probe)
    offers: dict[str, dict[str, str]] = {}
    if len(run.categories()) > 1:
        offers["category"] = {name: name for name in run.categories()}
    found: dict[str, list[Any]] = choices(summary)
    asked = {name for kind in FIGURES.get(place.probe, ()) for name in kind.takes}
    for kind in FIGURES.get(place.probe, ()):
        patterns = run.patterns() if "patterns" in kind.takes else None
        for name, values in choices_of(kind, summary, patterns).items():
            found[name] = list(dict.fromkeys([*found.get(name, []), *values]))
    words = {"pair": "visits {}", "centred": "{}", "write": "{}", "region": "{}"}
    for name in PICKS:
        if len(found.get(name, [])) > 1:
            offers[name] = {
                str(v).lower() if isinstance(v, bool) else str(v): words.get(
                    name, f"{name} {{}}"
                ).format(v)
                for v in found[name]
            }
    if "centred" in offers:
        offers["centred"] = {"false": "as they are", "true": "mean taken off"}
    titles = {"pair": "Visits compared", "centred": "Vectors"}
    missing = [
        f"{name} {value}"
        for name, value in place.picked.items()
        if name != "quantity" and value not in offers.get(name, {})
    ]
    unmet = (
        f"{run.name} offers no choice of {', '.join(missing)}; that part of the link is left aside."
    )
    selects = [
        _select(
            titles.get(name, name.capitalize()),
            {"kind": "pick", "name": name},
            value if (value := place.picked.get(name)) in offered else None,
            offered,
            placeholder=OWN if name in asked else "all",
        )
        for name, offered in offers.items()
    ]
    return [*([_alert(unmet)] if missing else []), *selects]


def _select(
    label: str, id: Any, value: str | None, options: Mapping[str, str], placeholder: str = ""
) -> Any:
    return dmc.Select(
        label=label,
        id=id,
        value=value,
        data=[{"value": key, "label": text} for key, text in options.items()],
        placeholder=placeholder,
        clearable=bool(placeholder),
        allowDeselect=bool(placeholder),
        searchable=len(options) > 12,
        size="sm",
    )


def _diagnostic(place: Place, runs: Sequence[RunFile], scheme: Theme) -> list[Any]:
    """What was found, headline numbers and the first figure: the browser draws it while the others are made."""
    run = runs[place.run]
    category = _category_of(place, run)
    summary = run.summary(place.probe, category)
    parts = []
    if not run.is_finished():
        parts.append(
            dmc.Alert(
                f"Not finished: {run.state()}. The page follows as it goes on; one that was stopped goes on where its "
                "command is run again.",
                color="blue",
                variant="light",
                className="unfinished",
            )
        )
    sentence = run.probe(place.probe).sentence(summary)
    where = f"In {category}: " if category is not None else ""
    parts.append(html.P(where + sentence, className="sentence"))
    others, troubles = _beside(place, runs, category)
    found = [headlines(of.summary(place.probe, category), place.probe) for of in (run, *others)]
    parts += map(_alert, troubles)
    if any(found):
        parts.append(_headline_table([run, *others], found))
    parts += _doubt(summary)
    return parts + next(_all_figures(place, runs, scheme), [])


def _doubt(summary: xr.Dataset) -> list[Any]:
    """A sentence on intervals that are too narrow, where they are."""
    doubt = doubt_of(summary)
    return [html.P(doubt, className="note")] if doubt else []


def _further(place: Place, runs: Sequence[RunFile], scheme: Theme) -> list[Any]:
    """The figures behind the first one."""
    try:
        return list(chain.from_iterable(islice(_all_figures(place, runs, scheme), 1, None)))
    except SmeltscopeError:  # said in the place of the first
        return []


def _beside(
    place: Place, runs: Sequence[RunFile], category: str | None
) -> tuple[list[RunFile], list[str]]:
    """The other runs that have something to show, and what hinders the rest: it hides no other."""
    others, troubles = [], []
    for other in (runs[i] for i in place.against):
        try:
            other.summary(place.probe, category)
            others.append(other)
        except SmeltscopeError as error:
            troubles.append(str(error))
    return others, troubles


def _all_figures(place: Place, runs: Sequence[RunFile], scheme: Theme) -> Iterator[list[Any]]:
    """Each kind of figure that there is something to show in."""
    run = runs[place.run]
    others, _ = _beside(place, runs, _category_of(place, run))
    for kind in FIGURES.get(place.probe, ()):
        if made := _figures(kind, place, run, others, scheme):
            yield made


def _figures(
    kind: FigureKind, place: Place, run: RunFile, others: Sequence[RunFile], scheme: Theme
) -> list[Any]:
    """A figure of the run with each of the others; where one cannot hold two runs, of each run."""
    category = _category_of(place, run)
    choices = tuple((k, v) for k, v in place.choices.items() if k in kind.takes)
    shown: list[tuple[RunFile, RunFile | None]]
    if others and holds_both(kind):
        shown = [(run, other) for other in others]
    else:
        shown = [(of, None) for of in (run, *others)]
    made: list[Any] = []
    graphs: list[Any] = []
    for of, beside in shown:
        versions = (of.version(), beside and beside.version())
        words = of.label if beside is None else f"{of.label}, beside it {beside.label}"
        caption = [html.Figcaption(words)] if len(shown) > 1 else []
        try:
            figure = _drawn(kind, place.probe, of, beside, category, choices, versions)
        except SmeltscopeError as error:  # what is picked of one run another may not have
            made.append(html.Figure([*caption, _alert(str(error))]))
            continue
        if figure is None:
            continue
        graph = dcc.Graph(
            id={"kind": "figure", "name": f"{kind.name}-{len(graphs)}"},
            figure=figure,
            config=cast(Any, PLOTLY_CONFIG),
            style={"height": figure["layout"].get("height", 450)},  # or it takes what its frame has
        )
        graphs.append(graph)
        made.append(html.Figure([*caption, graph]))
    for graph, figure in zip(graphs, on_one_scale([g.figure for g in graphs]), strict=True):
        graph.figure = in_theme(figure, scheme)
    return [html.Div(made, className="figures")] if made else []


@lru_cache(maxsize=48)
def _drawn(
    kind: FigureKind,
    probe: str,
    run: RunFile,
    against: RunFile | None,
    category: str | None,
    choices: tuple[tuple[str, Any], ...],
    versions: Any,  # of the files: a figure of what they were before is not this one
) -> dict[str, Any] | None:
    """A figure as plotly.js takes it; None where there is nothing to show."""
    summary = run.summary(probe, category)
    context = dict(choices) | context_for(kind, run, probe, against=against, category=category)
    if not kind.applies(summary, **context):
        return None
    found: dict[str, Any] = kind.draw(summary, **context).to_plotly_json()
    return found


def _category_of(place: Place, run: RunFile) -> str | None:
    """The category that is picked, if the run has it."""
    category = place.picked.get("category")
    return category if category in run.categories() else None


def _quantities(place: Place, runs: Sequence[RunFile]) -> list[Any]:
    """What the table of numbers can show."""
    names = quantities_in(runs[place.run].summary(place.probe))
    first = [h.by_layer for h in HEADLINES.get(place.probe, ()) if h.by_layer in names] or names
    value = place.picked.get("quantity")
    offered = {name: name.replace("_", " ") for name in names}
    value = value if value in offered else next(iter(first), None)
    return [_select("Quantity", {"kind": "quantity", "name": "quantity"}, value, offered)]


def _numbers(place: Place, quantity: str, runs: Sequence[RunFile]) -> list[Any]:
    """The tables of a quantity: of this run, or of it and each one that it is compared with."""
    run = runs[place.run]
    category = _category_of(place, run)
    others = [runs[i] for i in place.against]
    if not others:
        return _numbers_of(run.summary(place.probe, category), quantity, place, run, "")
    parts: list[Any] = []
    for other in others:
        heading = [html.H3(f"{run.name} and {other.name}")] if len(others) > 1 else []
        make = partial(_numbers_beside, place, quantity, run, other, category)
        parts += [*heading, *_in_words(make)]
    return parts


def _numbers_beside(
    place: Place, quantity: str, run: RunFile, other: RunFile, category: str | None
) -> list[Any]:
    own, summary = run.summary(place.probe, category), run.compared(other, place.probe, category)
    if quantity not in quantities_in(summary):
        note = f"; {other.name} has no {quantity.replace('_', ' ')} to compare it with"
        return _numbers_of(own, quantity, place, run, note)
    averaged = {*HEADS} & {*own[quantity].dims} if quantity in own else ()
    note = "; means over heads" * bool(averaged)
    note += f"; each draw takes the same {own.attrs['resampled']} for both runs"
    return _numbers_of(summary.assign_attrs(own.attrs), quantity, place, run, note)


def _numbers_of(
    summary: xr.Dataset, quantity: str, place: Place, run: RunFile, note: str
) -> list[Any]:
    table = table_of(summary, quantity, place.choices, most=MOST_ROWS)
    if table.more:
        note += (
            f"; {table.more:,} more rows: pick a layer or a head, or probe show {run.name} --csv"
        )
    return [
        html.Div(_table(table.columns, table.rows), className="scroll", tabIndex=0),
        html.P(f"{summary.attrs['drawn']:,} {summary.attrs['resampled']}{note}", className="note"),
    ]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], className: str = "") -> Any:
    return html.Div(
        html.Table(
            [
                html.Thead(html.Tr([html.Th(name, scope="col") for name in columns])),
                html.Tbody(
                    [
                        html.Tr(
                            [html.Th(row[0], scope="row"), *(html.Td(cell) for cell in row[1:])]
                        )
                        for row in rows
                    ]
                ),
            ],
            className=className or None,
        ),
        className="wide",
    )
