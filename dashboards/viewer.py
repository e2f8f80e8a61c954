"""The Dyck viewer: what it shows of runs, as routes of a server and as a fragment of an HTML file.

assets/viewer.js and viewer.css are used by both. The script asks for a head's numbers when it is chosen.
"""

import base64
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import flask
import numpy as np
import xarray as xr

from smeltscope.activations import attributes_of
from smeltscope.dashboards.examples import (
    Example,
    changes,
    finite,
    header_of,
    map_of,
    rows_of,
    stored_example,
    stored_examples,
    thumbs_of,
)
from smeltscope.errors import SmeltscopeError
from smeltscope.probes import summarize
from smeltscope.probes.dyck_heads import DyckHeads, dyck_head_of
from smeltscope.tasks import dyck

if TYPE_CHECKING:
    from smeltscope.dashboards.live import Live
    from smeltscope.model import Checkpoint

ASSETS = Path(__file__).parent / "assets"
MOST_BYTES = 2**17  # of a request; a prompt is text of one context
BUDGET = 2 * 2**20  # of a fragment's numbers


def viewer_examples(run: xr.DataTree) -> list[dict[str, Any]]:
    """The examples that a run holds: number, title, tokens, answer, and how many of its symbols the model gets right."""
    found = []
    for number in range(stored_examples(run)):
        example = stored_example(run, number)
        found.append(
            {
                "example": number,
                "title": example.title,
                "tokens": len(example.tokens),
                "answer": "".join(text.strip() for text in example.gold),
                "right": sum(example.right),
                "targets": len(example.right),
            }
        )
    return found


def describe_run(run: xr.DataTree, name: str | None = None) -> dict[str, Any]:
    """What the page says of a run: its checkpoint, its examples, and how much each head matters where it was measured."""
    return {
        "name": name or str(attributes_of(run)["checkpoint"]),
        "examples": viewer_examples(run),
        "ablation": ablation_of(run),
    }


def template_of(run: xr.DataTree) -> dyck.Template:
    """The layout of a run's prompts; BIG-bench's for a run that says none."""
    recorded = attributes_of(run).get("template")
    return dyck.Template(**recorded) if recorded else dyck.TEMPLATES["bigbench"]


def ablation_of(run: xr.DataTree) -> dict[str, Any] | None:
    """The Dyck head and the rise of perplexity by layer and head on the half it was not chosen on; None where no head was searched."""
    if "dyck_heads" not in run.children:
        return None
    probe = DyckHeads(**json.loads(run["dyck_heads"].attrs["options"]))
    summary = summarize(run, probe, draws=0)
    known = dyck_head_of(summary)
    if known is None:
        return None
    rise = summary["head_rise"].isel(half=1)  # (ablated_visits, looped_layer, head)
    return {
        "kind": str(probe.options()["ablation"]),
        "layer": known[0],
        "head": known[1],
        "layers": rise["looped_layer"].values.tolist(),
        "visits": [str(v) for v in rise["ablated_visits"].values],
        "rise": finite(rise.transpose("ablated_visits", ...).values),
    }


def add_viewer_routes(
    server: flask.Flask,
    runs: Sequence[xr.DataTree],
    load: Callable[[int], "Checkpoint"] | None = None,
    *,
    names: Sequence[str] | None = None,
    base: str = "/viewer",
) -> None:
    """Routes under `base` that serve `runs` to viewer.js, and prompts run live.

    `runs` is indexed anew at each request; one that cannot be read raises `SmeltscopeError`, and its `trouble` is listed instead. `load` gives the checkpoint of a run by its number and raises `SmeltscopeError` where it
    cannot; without it nothing runs live. A request that another origin sends is refused; `smeltscope.dashboards.server.guard` refuses those
    that come under another name.
    """
    routes = flask.Blueprint("smeltscope_viewer", __name__, url_prefix=base)
    described: dict[int, tuple[xr.DataTree, dict[str, Any]]] = {}

    def describe(number: int) -> dict[str, Any]:
        try:
            run = runs[number]
        except SmeltscopeError as error:
            name = names[number] if names else str(number)
            return {"name": name, "examples": [], "ablation": None, "trouble": str(error)}
        if number not in described or described[number][0] is not run:
            described[number] = run, describe_run(run, names[number] if names else None)
        return described[number][1]

    @cache
    def live() -> "Live":
        from smeltscope.dashboards.live import Live

        if load is None:
            raise SmeltscopeError("No checkpoint was given, so no prompt can be run.")
        return Live(load, lambda number: template_of(_run(runs, number)))

    def example_of(key: str) -> Example:
        parts = re.fullmatch(r"stored/(\d+)/(\d+)|live/(\w+)", key)
        if parts is None:
            flask.abort(404)
        if parts[3] is None:
            return stored_example(_run(runs, int(parts[1])), int(parts[2]))
        found = live().example(parts[3])
        if found is None:
            flask.abort(410)  # the page runs it again
        return found

    def given_prompt(given: dict[str, Any]) -> tuple[str, Example, Example | None]:
        """What a request runs: the name and example, and the example without anything zeroed where something is."""
        run = _whole(given, "run")
        _run(runs, run)
        zeroed = _zeroed(given.get("zeroed", []))

        def go(zeroed: Sequence[Any]) -> tuple[str, Example]:
            if "text" in given:
                return live().run_text(run, str(given["text"]), zeroed)
            stored = stored_example(_run(runs, run), _whole(given, "example"))
            return live().run_again(run, stored, zeroed)

        before = go([])[1] if zeroed else None
        return *go(zeroed), before

    @routes.before_request
    def guard() -> None:
        origin = flask.request.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc != flask.request.host:
            flask.abort(403)
        if flask.request.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none"):
            flask.abort(403)
        if flask.request.method == "POST":
            if flask.request.mimetype != "application/json":
                flask.abort(415)
            if (flask.request.content_length or MOST_BYTES + 1) > MOST_BYTES:
                flask.abort(413)

    @routes.after_request
    def plain(response: flask.Response) -> flask.Response:
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Cache-Control"] = "no-store"
        return response

    @routes.errorhandler(SmeltscopeError)
    def say(error: SmeltscopeError) -> tuple[flask.Response, int]:
        # A prompt with a mistake is nothing that a browser should log as an error of the page.
        return flask.jsonify(error=str(error)), 200 if flask.request.method == "POST" else 400

    @routes.get("/runs")
    def list_runs() -> flask.Response:
        return flask.jsonify(runs=[describe(i) for i in range(len(runs))], live=load is not None)

    @routes.get("/<path:key>/header")
    def header(key: str) -> flask.Response:
        return flask.jsonify(header_of(example_of(key), key))

    @routes.get("/<path:key>/thumbs/<int:execution>")
    def thumbs(key: str, execution: int) -> flask.Response:
        return _block(thumbs_of(example_of(key), execution))

    @routes.get("/<path:key>/rows/<int:execution>/<int:head>")
    def rows(key: str, execution: int, head: int) -> flask.Response:
        return _block(rows_of(example_of(key), execution, head))

    @routes.get("/<path:key>/map/<int:execution>/<int:head>")
    def whole(key: str, execution: int, head: int) -> flask.Response:
        example = example_of(key)
        return _block(map_of(example, execution, head, header_of(example, key)["encoding"]))

    @routes.post("/draw")
    def draw() -> flask.Response:
        given = _json()
        wanted = {name: _whole(given, name) for name in ("run", "shots", "seed", "types")}
        text, shots = live().draw(**wanted, pairs=str(given.get("pairs", "usual")))
        return flask.jsonify(text=text, shots=shots)

    @routes.post("/live")
    def run_live() -> flask.Response:
        given = _json()
        name, example, before = given_prompt(given)
        run = runs[_whole(given, "run")]
        made_with = attributes_of(run)["identity"]["checkpoint_digest"]
        return flask.jsonify(
            view=header_of(example, f"live/{name}"),
            before=None if before is None else header_of(before, ""),
            other_checkpoint=live().digest(_whole(given, "run")) != made_with,
        )

    server.register_blueprint(routes)


def _zeroed(given: Any) -> list[Any]:
    from smeltscope.dashboards.live import Zeroed

    names = {field.name for field in fields(Zeroed)}
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise SmeltscopeError("`zeroed` is a list of objects with layer, visit and head.")
    for one in given:
        for name, value in one.items():
            if name not in names or not (value is None or type(value) is int):
                raise SmeltscopeError(
                    f"{name} = {value!r} zeroes nothing: give whole numbers for {', '.join(sorted(names))}."
                )
    return [Zeroed(**one) for one in given]


def _json() -> dict[str, Any]:
    given = flask.request.get_json(silent=True)
    if not isinstance(given, dict):
        raise SmeltscopeError("The request is no JSON object.")
    return given


def _whole(given: dict[str, Any], name: str) -> int:
    value = given.get(name)
    if type(value) is not int:
        raise SmeltscopeError(f"{name} is a whole number, not {value!r}.")
    return value


def _run(runs: Sequence[xr.DataTree], number: int) -> xr.DataTree:
    if not 0 <= number < len(runs):
        raise SmeltscopeError(f"There is no run {number}: {len(runs)} are open, counted from 0.")
    return runs[number]


def _block(data: bytes) -> flask.Response:
    return flask.Response(data, mimetype="application/octet-stream")


def viewer_fragment(
    runs: Sequence[xr.DataTree], *, names: Sequence[str] | None = None, budget: int = BUDGET
) -> str:
    """The viewer with the examples of `runs`, as HTML that stands by itself; empty where no run holds an example.

    At most about `budget` bytes of numbers: of every example thumbnails and the targets' rows first, then whole patterns, those heads first whose
    mass on the start token changes most between visits. What is left out says so on the page.
    """
    described = [describe_run(run, names[i] if names else None) for i, run in enumerate(runs)]
    found = {
        f"stored/{i}/{number}": stored_example(run, number)
        for i, run in enumerate(runs)
        for number in range(stored_examples(run))
    }
    if not found:
        return ""
    blocks, left = {}, budget
    for name, make in _blocks_in_order(found):
        data = base64.b64encode(zlib.compress(make(), 6)).decode()
        left -= len(data)
        if left < 0:
            break
        blocks[name] = data
    payload = {
        "runs": described,
        "headers": {key: header_of(example, key, "u1") for key, example in found.items()},
        "blocks": blocks,
    }
    # Nothing in a token may end the script: "<" is written as an escape of JSON.
    inside = json.dumps(payload, separators=(",", ":")).replace("<", "\\u003c")
    style, script = (
        (ASSETS / f"viewer.{end}").read_text(encoding="utf-8") for end in ("css", "js")
    )
    return f"""<style>{style}</style>
<div id="smeltscope-viewer"></div>
<script type="application/json" id="smeltscope-viewer-data">{inside}</script>
<script>{script}
(() => {{
  const payload = JSON.parse(document.getElementById("smeltscope-viewer-data").textContent);
  const element = document.getElementById("smeltscope-viewer");
  window.smeltscopeViewer.mount(element, {{ kind: "inline", ...payload }});
}})();
</script>
"""


def _blocks_in_order(found: Mapping[str, Example]) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Names and makers of blocks, those first that the page can least do without."""
    for key, example in found.items():
        for execution in range(len(example.layer)):
            if example.heads[execution]:
                yield f"{key}/thumbs/{execution}", partial(thumbs_of, example, execution)
    ranked = {key: _ranked(example) for key, example in found.items()}
    for key, heads in ranked.items():
        for execution, head in heads:
            name = f"{key}/rows/{execution}/{head}"
            yield name, partial(rows_of, found[key], execution, head)
    for alike in zip_longest(*ranked.values()):  # the first head of every example, then the second
        for (key, example), place in zip(found.items(), alike, strict=True):
            if place is not None and example.pattern is not None:
                execution, head = place
                name = f"{key}/map/{execution}/{head}"
                yield name, partial(map_of, example, execution, head, "u1")


def _ranked(example: Example) -> list[tuple[int, int]]:
    """(execution, head), all visits of a head together, by the change of its mass on the first region."""
    change = np.abs(np.nan_to_num(changes(example)))  # (layer, head)
    places = [
        (execution, head) for execution, heads in enumerate(example.heads) for head in range(heads)
    ]
    return sorted(places, key=lambda at: (-change[example.layer[at[0]], at[1]], at[1]))
