"""The Dyck viewer: what it is sent equals the run's numbers; the page itself in a real browser."""

import base64
import json
import re
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flask
import numpy as np
import pytest
import xarray as xr
from werkzeug.serving import make_server

import smeltscope
from smeltscope.activations import open_run
from smeltscope.dashboards import examples, viewer
from smeltscope.dashboards.examples import Example, header_of, stored_example
from smeltscope.dashboards.server import guard
from smeltscope.errors import SmeltscopeError
from smeltscope.model import Checkpoint, load_checkpoint
from smeltscope.probes import RunOptions, run_probes
from smeltscope.probes.dyck_heads import DyckHeads
from smeltscope.probes.patterns import patterns_of
from smeltscope.tasks import dyck

EVIL = "<script>document.title = 'broken'</script>"


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Path) -> Checkpoint:
    return load_checkpoint(tiny_checkpoint, device="cpu")


@pytest.fixture(scope="module")
def run(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> xr.DataTree:
    """Two examples, and a search for heads; a token, an id and the checkpoint's name are code."""
    heldout = dyck.make_prompts(
        dyck.nested_sets(4, 1, 0),
        checkpoint.tokenizer,
        shots=[1],
        template=dyck.Template(name="short"),
        context=checkpoint.context,
        seed=0,
        kind="nested",
    )
    file = run_probes(
        checkpoint,
        heldout,
        [DyckHeads(ablation="zero")],
        tmp_path_factory.mktemp("viewer") / "run.h5",
        RunOptions(max_length=int(heldout.lengths.max()), batch_tokens=4096),
        beside=patterns_of(checkpoint, heldout, [1, 3]),
    )
    tree = open_run(file)
    tree.attrs["checkpoint"] = EVIL
    patterns = tree["dyck_patterns"]
    patterns["token"].values[0, 3] = EVIL  # in an input
    patterns["example_id"].values[1] = EVIL
    return tree


def many_heads(tokens: int, heads: int, executions: int, pattern: bool = True) -> Example:
    """Random attention of a large model: two visits of all layers."""
    rng = np.random.default_rng(0)
    targets = np.array([tokens - 3, tokens - 1])
    rows = np.zeros((executions, heads, 2, tokens), dtype=np.float32)
    for i, target in enumerate(targets):
        rows[..., i, :target] = rng.dirichlet(np.ones(target), (executions, heads))

    def whole(execution: int, head: int, queries: np.ndarray) -> np.ndarray:
        made = np.tril(rng.random((tokens, tokens), dtype=np.float32))
        made /= made.sum(1, keepdims=True)
        made[targets - 1] = rows[execution, head]
        return made[queries]

    region = np.full(tokens, 4)
    region[0], region[targets] = 0, 6
    half = executions // 2
    return Example(
        title="large",
        tokens=["<s>", *["x"] * (tokens - 1)],
        regions=region,
        region_names=dyck.REGIONS,
        targets=targets,
        gold=[")", ")"],
        predicted=[")", "]"],
        probability=None,
        marks={},
        layer=[*range(half), *range(half)],
        visit=[1] * half + [2] * half,
        rows=rows,
        pattern=whole if pattern else None,
    )


# ---------------------------------------------------------------- numbers


def test_masses_are_sums_of_the_run_s_rows(run: xr.DataTree) -> None:
    patterns = run["dyck_patterns"]
    for number in range(2):
        example = stored_example(run, number)
        header = header_of(example, "key")
        row = patterns["row"].values[number]  # (execution, head, target, key)
        region = patterns["key_region"].values[number]
        names = patterns["region_name"].values.tolist()
        assert header["regions"] == [*names, "learned_sink"]
        for execution, head in np.ndindex(row.shape[:2]):
            expected = [0.0] * (len(names) + 1)
            for target in range(row.shape[2]):
                for key in np.flatnonzero(region >= 0):
                    expected[region[key]] += row[execution, head, target, key] / row.shape[2]
            np.testing.assert_allclose(header["mass"][execution][head], expected, atol=1e-6)
        assert [t["gold"] for t in header["targets"]] == patterns["gold"].values[number].tolist()
        assert header["tokens"] == patterns["token"].values[number].tolist()


def test_blocks_hold_the_run_s_patterns(run: xr.DataTree) -> None:
    patterns = run["dyck_patterns"]["pattern"].values[1]
    rows = run["dyck_patterns"]["row"].values[1]
    example = stored_example(run, 1)
    length = len(example.tokens)
    for execution, head in np.ndindex(patterns.shape[:2]):
        sent = np.frombuffer(examples.rows_of(example, execution, head), "<f4")
        np.testing.assert_array_equal(sent.reshape(-1, length), rows[execution, head])
        exact = np.frombuffer(examples.map_of(example, execution, head, "f4"), "<f4")
        coarse = np.frombuffer(examples.map_of(example, execution, head, "u1"), np.uint8)
        assert len(exact) == len(coarse) == length * (length + 1) // 2
        for query in range(length):
            start = query * (query + 1) // 2
            expected = patterns[execution, head, query, : query + 1]
            np.testing.assert_array_equal(exact[start : start + query + 1], expected)
            off = coarse[start : start + query + 1] / 255 - np.sqrt(expected)
            assert np.abs(off).max() <= 0.5 / 255 + 1e-6


@pytest.mark.parametrize("length", [1, 2, 47, 48, 49, 130, 600])
def test_thumbnails(length: int) -> None:
    """The largest mass of each cell, by a slow loop; the first token has cells of its own."""
    rng = np.random.default_rng(length)
    pattern = np.tril(rng.random((length, length), dtype=np.float32))
    example = Example(
        title="",
        tokens=["x"] * length,
        regions=np.zeros(length, dtype=int),
        region_names=("bos",),
        targets=np.array([length - 1]),
        gold=["x"],
        predicted=["x"],
        probability=None,
        marks={},
        layer=[0],
        visit=[1],
        rows=pattern[None, None, -1:],
        pattern=lambda _, __, queries: pattern[queries],
    )
    size = header_of(example, "")["thumb"]
    assert size == min(length, 48)
    thumb = np.frombuffer(examples.thumbs_of(example, 0), np.uint8).reshape(size, size)
    cell = [
        0 if i == 0 else next(c for c in range(size) if i in cells(c, length, size))
        for i in range(length)
    ]
    expected = np.zeros((size, size))
    for query in range(length):
        for key in range(length):
            if length > 512 and query + 1 < length and cell[query + 1] == cell[query]:
                continue  # the last query stands for its cell
            place = cell[query], cell[key]
            expected[place] = max(expected[place], pattern[query, key])
    np.testing.assert_array_equal(thumb, np.rint(255 * np.sqrt(expected)))


def cells(number: int, length: int, size: int) -> range:
    """Which tokens a cell of a thumbnail holds: the first one, and even shares of the others."""
    if length == size:
        return range(number, number + 1)
    if number == 0:
        return range(1)
    start, stop = (1 + i * (length - 1) // (size - 1) for i in (number - 1, number))
    return range(start, stop)


def test_a_prompt_too_long_to_keep_whole_patterns() -> None:
    example = many_heads(100, 2, 4, pattern=False)
    header = header_of(example, "")
    assert not header["whole"]
    assert len(examples.thumbs_of(example, 0)) == 2 * 2 * header["thumb"]  # heads, targets
    with pytest.raises(SmeltscopeError, match="rows of the answer alone"):
        examples.map_of(example, 0, 0, "f4")


@pytest.mark.parametrize(("tokens", "encoding"), [(512, "f4"), (513, "u1"), (2048, "u1")])
def test_long_prompts_go_in_bytes(tokens: int, encoding: str) -> None:
    example = many_heads(tokens, 1, 2)
    assert header_of(example, "")["encoding"] == encoding
    assert len(examples.thumbs_of(example, 1)) == 48 * 48


def test_layers_of_fewer_heads() -> None:
    example = many_heads(20, 3, 4)
    example.rows[1, 2] = np.nan
    assert example.heads == [3, 2, 3, 3]
    header = header_of(example, "")
    assert header["mass"][1][2] == [None] * 8
    json.dumps(header, allow_nan=False)
    assert len(examples.thumbs_of(example, 1)) == 2 * 20 * 20
    with pytest.raises(SmeltscopeError, match="no head 2 at execution 1"):
        examples.rows_of(example, 1, 2)


def test_the_run_s_heads(run: xr.DataTree) -> None:
    found = viewer.describe_run(run)["ablation"]
    summary = smeltscope.summarize(run, "dyck-heads", draws=0)
    assert (found["layer"], found["head"]) == (summary["dyck_head_layer"], summary["dyck_head"])
    rise = summary["head_rise"].sel(half=1)
    for i, visits in enumerate(found["visits"]):
        np.testing.assert_allclose(found["rise"][i], rise.sel(ablated_visits=visits), atol=1e-6)
    assert found["kind"] == "zero"


def test_runs_without_prompts() -> None:
    empty = xr.DataTree.from_dict({"/": xr.Dataset(attrs={"checkpoint": '"x"'})})
    assert viewer.viewer_examples(empty) == []
    assert viewer.viewer_fragment([empty]) == ""
    with pytest.raises(SmeltscopeError, match="no example 0"):
        stored_example(empty, 0)


def payload_of(fragment: str) -> dict[str, Any]:
    found = re.search(r'id="smeltscope-viewer-data">(.*?)</script>', fragment, re.DOTALL)
    assert found is not None
    payload: dict[str, Any] = json.loads(found[1])
    return payload


def test_the_fragment_keeps_to_its_budget(run: xr.DataTree) -> None:
    whole = payload_of(viewer.viewer_fragment([run]))["blocks"]
    executions, heads = run["dyck_patterns"]["row"].shape[1:3]
    assert len(whole) == 2 * executions * (1 + 2 * heads)
    example = stored_example(run, 1)
    raw = zlib.decompress(base64.b64decode(whole["stored/0/1/map/4/2"]))
    assert raw == examples.map_of(example, 4, 2, "u1")
    small = payload_of(viewer.viewer_fragment([run], budget=60_000))["blocks"]
    assert 0 < sum(map(len, small.values())) <= 60_000
    assert len(small) < len(whole)
    assert {f"stored/0/{e}/thumbs/0" for e in range(2)} <= set(small)


def test_the_fragment_holds_no_code_of_the_run(run: xr.DataTree) -> None:
    fragment = viewer.viewer_fragment([run])
    assert "document.title" in fragment and EVIL not in fragment
    assert fragment.count("<script") == fragment.count("</script>") == 2


# ---------------------------------------------------------------- routes


@pytest.fixture(scope="module")
def server(run: xr.DataTree, tiny_checkpoint: Path) -> flask.Flask:
    """The viewer's routes, its assets, and a page with the viewer alone."""
    server = flask.Flask(__name__)
    viewer.add_viewer_routes(
        server,
        [run, run, run.drop_nodes(["dyck_patterns"])],
        lambda _: load_checkpoint(tiny_checkpoint, device="cpu"),
        names=["a", EVIL, "bare"],
    )
    guard(server, port=8050, token=None)

    @server.get("/")
    def page() -> str:
        return """<!doctype html><html lang="en"><meta charset="utf-8"><title>viewer</title>
<link rel="icon" href="data:,"><link rel="stylesheet" href="/assets/viewer.css"><div id="viewer"></div>
<script src="/assets/viewer.js"></script><script>
viewer = smeltscopeViewer.mount(document.getElementById("viewer"), {kind: "server", base: "/viewer"})
</script></html>"""

    @server.get("/assets/<name>")
    def asset(name: str) -> flask.Response:
        return flask.send_from_directory(viewer.ASSETS, name)

    return server


LOCAL = {"base_url": "http://127.0.0.1:8050"}


def test_routes_give_the_run(server: flask.Flask, run: xr.DataTree) -> None:
    client = server.test_client()
    listed = client.get("/viewer/runs", **LOCAL).json
    assert listed["live"] and [r["name"] for r in listed["runs"]] == ["a", EVIL, "bare"]
    assert listed["runs"][0]["examples"] == viewer.viewer_examples(run)
    example = stored_example(run, 1)
    header = client.get("/viewer/stored/1/1/header", **LOCAL).json
    assert header == json.loads(json.dumps(header_of(example, "stored/1/1")))
    assert client.get("/viewer/stored/0/1/thumbs/3", **LOCAL).data == examples.thumbs_of(example, 3)
    assert client.get("/viewer/stored/0/1/rows/3/2", **LOCAL).data == examples.rows_of(
        example, 3, 2
    )
    whole = client.get("/viewer/stored/0/1/map/3/2", **LOCAL).data
    assert whole == examples.map_of(example, 3, 2, "f4")


def test_a_live_prompt(server: flask.Flask, checkpoint: Checkpoint) -> None:
    client = server.test_client()
    drawn = client.post("/viewer/draw", json={"run": 0, "shots": 1, "seed": 3, "types": 2}, **LOCAL)
    text = drawn.json["text"]
    plain = client.post("/viewer/live", json={"run": 0, "text": text}, **LOCAL).json
    zeroed = [{"layer": 2, "visit": 2, "head": 1}]
    changed = client.post("/viewer/live", json={"run": 0, "text": text, "zeroed": zeroed}, **LOCAL)
    view, before = changed.json["view"], changed.json["before"]
    assert plain["before"] is None and not plain["other_checkpoint"]
    assert before["mass"] == plain["view"]["mass"] != view["mass"]
    assert view["targets"][0]["probability"] != before["targets"][0]["probability"]
    block = client.get(f"/viewer/{view['key']}/map/5/0", **LOCAL)
    assert (
        block.status_code == 200
        and len(block.data) == 4 * len(view["tokens"]) * (len(view["tokens"]) + 1) // 2
    )
    assert client.get("/viewer/live/0123/header", **LOCAL).status_code == 410


def test_a_stored_prompt_with_a_head_zeroed(server: flask.Flask, run: xr.DataTree) -> None:
    given = {"run": 0, "example": 1, "zeroed": [{"layer": 2}]}
    found = server.test_client().post("/viewer/live", json=given, **LOCAL).json
    stored = header_of(stored_example(run, 1), "")
    np.testing.assert_allclose(found["before"]["mass"], stored["mass"], atol=1e-5)
    assert [t["gold"] for t in found["view"]["targets"]] == [t["gold"] for t in stored["targets"]]


@pytest.mark.parametrize(
    ("path", "given", "says"),
    [
        ("live", {"run": 0, "text": "Input: ) \nOutput:"}, "input 1"),
        ("live", {"run": 9, "text": "x"}, "There is no run 9"),
        ("live", {"run": "0", "text": "x"}, "run is a whole number"),
        ("live", {"run": 0, "example": 7}, "no example 7"),
        ("live", {"run": 0}, "example is a whole number"),
        ("live", {"run": 0, "text": "x", "zeroed": [{"layer": "all"}]}, "zeroes nothing"),
        ("live", {"run": 0, "text": "x", "zeroed": [{"depth": 1}]}, "zeroes nothing"),
        ("live", {"run": 0, "text": "x", "zeroed": "all"}, "list of objects"),
        ("live", [], "no JSON object"),
        ("draw", {"run": 0, "shots": 999, "seed": 0, "types": 4}, "0 to 64 shots"),
        ("draw", {"run": 0, "shots": 2, "seed": 0, "types": 4, "pairs": 3}, "Pairs are usual, or"),
    ],
)
def test_what_cannot_be_done_is_said(path: str, given: Any, says: str, server: flask.Flask) -> None:
    answer = server.test_client().post(f"/viewer/{path}", json=given, **LOCAL)
    assert answer.status_code == 200 and says in answer.json["error"]


@pytest.mark.parametrize(
    ("path", "status"),
    [("stored/0/7/header", 400), ("stored/9/0/header", 400), ("stored/0/0/map/99/0", 400), ("x/header", 404), ("stored/-1/0/header", 404)],
)  # fmt: skip
def test_what_is_not_there(path: str, status: int, server: flask.Flask) -> None:
    assert server.test_client().get(f"/viewer/{path}", **LOCAL).status_code == status


def test_only_this_page_may_ask(server: flask.Flask) -> None:
    """Other names that point here (DNS rebinding), other origins, forms of other pages, bodies without end."""
    client = server.test_client()
    given = {"run": 0, "text": "x"}

    def status(path: str = "live", **more: Any) -> int:
        return client.post(f"/viewer/{path}", **LOCAL | {"json": given} | more).status_code

    assert client.get("/viewer/runs", base_url="http://evil.example:8050").status_code == 403
    assert client.get("/viewer/runs", base_url="http://[::1]:8050").status_code == 200
    assert status(base_url="http://evil.example") == 403
    assert status(headers={"Origin": "http://evil.example"}) == 403
    assert status(headers={"Origin": "http://127.0.0.1:9"}) == 403
    assert status(headers={"Origin": "null"}) == 403
    assert status(headers={"Sec-Fetch-Site": "cross-site"}) == 403
    assert (
        status(headers={"Origin": "http://127.0.0.1:8050", "Sec-Fetch-Site": "same-origin"}) == 200
    )
    assert status(json=None, data="run=0") == 415
    assert status(json=None, data=json.dumps(given), content_type="text/plain") == 415
    assert status(json=given | {"text": "x" * 2**18}) == 413
    assert client.get("/viewer/live").status_code in (403, 404, 405)


def test_prompts_have_the_layout_of_the_run(run: xr.DataTree, checkpoint: Checkpoint) -> None:
    """What is drawn in the run's layout runs, words of another one are refused."""
    assert viewer.template_of(run) == dyck.Template(name="short")
    assert viewer.template_of(xr.DataTree()) == dyck.TEMPLATES["bigbench"]
    own = dyck.Template(name="own", shot="In {input} so {answer}")
    other = run.copy()
    other.attrs["template"] = json.dumps(asdict(own))
    server = flask.Flask(__name__)
    viewer.add_viewer_routes(server, [run, other], lambda _: checkpoint)

    def post(path: str, **given: Any) -> dict[str, Any]:
        found: dict[str, Any] = server.test_client().post(f"/viewer/{path}", json=given).json
        return found

    texts = [post("draw", run=i, shots=1, seed=0, types=2, pairs="usual")["text"] for i in (0, 1)]
    assert [text.count("Output:") for text in texts] == [2, 0]
    assert [text.count(" so") for text in texts] == [0, 2]
    for i, text in enumerate(texts):
        assert "error" not in post("live", run=i, text=text)
        assert "does not end in" in post("live", run=1 - i, text=text)["error"]


def test_without_a_checkpoint(run: xr.DataTree) -> None:
    server = flask.Flask(__name__)
    viewer.add_viewer_routes(server, [run])
    client = server.test_client()
    assert client.get("/viewer/runs", **LOCAL).json["live"] is False
    answer = client.post("/viewer/live", json={"run": 0, "text": "x"}, **LOCAL)
    assert "No checkpoint" in answer.json["error"]


# ---------------------------------------------------------------- the page


@pytest.fixture(scope="module")
def address(server: flask.Flask) -> Iterator[str]:
    serving = make_server("127.0.0.1", 0, server, threaded=True)
    thread = threading.Thread(target=serving.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{serving.port}/"
    serving.shutdown()
    thread.join()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open an address with the viewer in it; at the end nothing was logged and nobody else was asked."""
    page = browser.new_page()
    page.set_viewport_size({"width": 1440, "height": 900})
    seen = SimpleNamespace(log=[], requests=[])
    page.on(
        "console", lambda m: seen.log.append(m.text) if m.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: seen.log.append(str(error)))
    page.on("request", lambda request: seen.requests.append(request.url))

    def go(address: str) -> Any:
        page.goto(address)
        shown(page)
        return page

    yield go
    allowed = ("http://127.0.0.1:", "data:", "blob:", "file:")
    assert seen.log == []
    assert [url for url in seen.requests if not url.startswith(allowed)] == []
    page.close()


def shown(page: Any, head: str | None = None) -> None:
    """Wait until the viewer shows a head."""
    which = "[data-shown]" if head is None else f'[data-shown="{head}"]'
    page.wait_for_selector(f'.sv{which}[aria-busy="false"]', timeout=15_000)


def query(page: Any) -> dict[str, str]:
    page.wait_for_timeout(200)  # the address follows a little later
    found: dict[str, str] = page.evaluate(
        "Object.fromEntries(new URLSearchParams(location.search))"
    )
    return found


def masses(page: Any) -> list[str]:
    found: list[str] = page.locator(".sv-table tbody td").all_inner_texts()
    return found


def test_it_opens_on_the_dyck_head(visit: Callable, address: str, run: xr.DataTree) -> None:
    page = visit(address)
    ablation = viewer.ablation_of(run)
    assert ablation is not None
    head = f"{ablation['layer']}.{ablation['head']}"
    assert page.locator(".sv").get_attribute("data-shown") == head
    assert "Dyck head" in page.locator(".sv-head").inner_text()
    assert page.title() == "viewer"
    assert page.locator('[data-token="3"]').inner_text() == EVIL
    mass = header_of(stored_example(run, 0), "")["mass"]
    executions = [i for i, layer in enumerate(run["layer"].values) if layer == ablation["layer"]]
    first = page.locator(".sv-table tbody tr").first
    assert first.locator("th").inner_text() == "BOS"
    numbers = [mass[e][ablation["head"]][0] for e in executions]
    for cell, value in zip(first.locator("td").all_inner_texts(), numbers, strict=False):
        assert float(cell) == pytest.approx(value, abs=6e-4)
    assert page.locator("svg, .plotly").count() == 0


def test_heads_by_keyboard(visit: Callable, address: str) -> None:
    page = visit(address + "?sort=position")
    page.keyboard.press("g")
    for key in ("Home", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    shown(page, "1.1")
    assert page.locator('.sv-cell[tabindex="0"]').count() == 1
    assert page.locator('.sv-cell[aria-selected="true"]').first.get_attribute("data-head") == "1"
    assert "L1 visit 1 head 1, BOS mass" in page.evaluate("document.activeElement.ariaLabel")
    page.keyboard.press("o")  # by the change of mass on the start token
    page.keyboard.press("g")
    page.keyboard.press("Home")
    page.wait_for_timeout(100)
    cell = page.evaluate(
        "document.activeElement.dataset.layer + '.' + document.activeElement.dataset.head"
    )
    shown(page, cell)
    page.keyboard.press("h")
    page.wait_for_selector(".sv-title .sv-badge")
    assert "sort" not in query(page)


def test_tokens_are_locked_and_released(visit: Callable, address: str, run: xr.DataTree) -> None:
    page = visit(address + "?layer=3&head=2&visit=2")
    overall = masses(page)
    token = page.locator('[data-token="30"]')
    token.focus()
    page.keyboard.press("Enter")
    assert token.get_attribute("aria-pressed") == "true"
    assert query(page)["q"] == "30"
    region = run["dyck_patterns"]["key_region"].values[0]
    pattern = run["dyck_patterns"]["pattern"].values[0]
    executions = [e for e, layer in enumerate(run["layer"].values) if layer == 3]
    row = page.locator(".sv-table tr", has=page.locator("th", has_text="separator"))
    expected = [pattern[e, 2, 30][region == 4].sum() for e in executions]
    for cell, value in zip(row.locator("td").all_inner_texts(), expected, strict=False):
        assert float(cell) == pytest.approx(value, abs=6e-4)
    assert "Token 30" in page.locator('[role="status"]').inner_text()
    key = page.locator(".sv-strongest ol").nth(1).locator("li").first
    best = int(np.nanargmax(pattern[executions[1], 2, 30]))
    assert f"{best} " in key.locator("span").inner_text()
    page.keyboard.press(".")
    assert query(page)["q"] == "31"
    page.keyboard.press("d")
    assert query(page)["dir"] == "to"
    assert "who looks at" in page.locator(".sv-focus").inner_text()
    column = pattern[executions[1], 2, :, 31]
    key = page.locator(".sv-strongest ol").nth(1).locator("li").first
    assert float(key.locator("b").inner_text()) == pytest.approx(np.nanmax(column), abs=6e-4)
    page.keyboard.press("d")
    page.keyboard.press("Escape")
    assert masses(page) == overall
    assert "q" not in query(page)
    page.keyboard.press("2")  # the row of target 2
    target = run["dyck_patterns"]["target"].values[0, 1]
    assert query(page)["q"] == str(target - 1)


def test_tokens_by_keyboard(visit: Callable, address: str) -> None:
    page = visit(address)
    note = page.locator(".sv-focus")
    page.keyboard.press("x")
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "ArrowLeft"):
        page.keyboard.press(key)
    page.wait_for_function("document.querySelector('.sv-focus').textContent.includes('(2)')")
    assert "locked" not in note.inner_text() and "q" not in query(page)
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelector('.sv-focus').textContent.includes('locked')")
    assert query(page)["q"] == "2"
    page.keyboard.press("Escape")
    page.keyboard.press("Home")
    page.wait_for_function("document.querySelector('.sv-focus').textContent.includes('(0)')")
    page.keyboard.press("g")  # leaves the prompt
    page.wait_for_function(
        "document.querySelector('.sv-focus').textContent.startsWith('where the')"
    )
    page.locator("select").first.focus()
    page.keyboard.press("?")
    assert page.locator("dialog").get_attribute("open") is not None


def test_hovering_lights_and_leaves(visit: Callable, address: str) -> None:
    page = visit(address)
    before = page.locator(".sv-focus").inner_text()
    page.locator('[data-token="40"]').hover()
    page.wait_for_function("document.querySelector('.sv-focus').textContent.includes('(40)')")
    page.locator(".sv-title").hover()
    page.wait_for_function("!document.querySelector('.sv-focus').textContent.includes('(40)')")
    assert page.locator(".sv-focus").inner_text() == before


def test_views_scales_and_masks(visit: Callable, address: str) -> None:
    page = visit(address + "?layer=2&head=0")

    def picture() -> str:
        found: str = page.evaluate("document.querySelector('.sv-map').toDataURL()")
        return found

    pictures = [picture()]
    for key in ("s", "b", "[", "]", "]"):
        page.keyboard.press(key)
        pictures.append(picture())
    assert len(set(pictures)) == 5 and pictures[2] == pictures[4]  # there and back
    found = query(page)
    assert (found["scale"], found["mask"], found["visit"]) == ("log", "1", "2-1")


def test_a_link_reopens_the_view(visit: Callable, address: str) -> None:
    page = visit(
        address
        + "?other=kept&ex=1&layer=4&head=3&visit=1&q=12&dir=to&scale=linear&mask=1&sort=ablation"
    )
    found = query(page)
    assert found["other"] == "kept"
    assert page.locator(".sv").get_attribute("data-shown") == "4.3"
    assert page.locator('[data-token="12"]').get_attribute("aria-pressed") == "true"
    for label, value in (
        ("Direction", "to"),
        ("Colour scale", "linear"),
        ("Order of heads", "ablation"),
        ("Visit shown in text and map", "1"),
    ):
        pressed = page.get_by_role("group", name=label, exact=True).locator('[aria-pressed="true"]')
        assert pressed.get_attribute("data-value") == value
    assert EVIL in page.locator('select[aria-label="Example"]').inner_text()
    again = page.evaluate("location.href")
    page.goto(again)
    shown(page, "4.3")


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (
            "?layer=99&head=99&q=99999&run=9&ex=9",
            "no run 9, no example 9, no layer 99, no token 99999 here",
        ),
        (
            "?visit=7&dir=up&scale=x&sort=y&zero=z&layer=-1",
            "no zero z, no layer -1, no dir up, no scale x, no sort y, no visit 7 here",
        ),
        ("?visit=1&dir=to", ""),
    ],
)
def test_links_to_what_is_not_there(bad: str, says: str, visit: Callable, address: str) -> None:
    page = visit(address + bad)
    assert page.locator(".sv-title .sv-badge").count() == 1
    alert = page.locator(".sv-alert").inner_text()
    assert says in alert and (alert == "") == (says == "")


def test_a_prompt_is_run(visit: Callable, address: str) -> None:
    page = visit(address)
    page.keyboard.press("e")
    page.get_by_label("Shots").fill("1")
    page.get_by_label("Seed").fill("5")
    page.get_by_label("Bracket types").fill("2")
    page.get_by_role("button", name="Draw a prompt").click()
    page.wait_for_selector(".sv-chip .sv-p")
    text = page.get_by_label("Prompt to run")
    assert text.input_value().count("Input:") == 2
    text.fill(f"{EVIL}\nInput: ( [ <\nOutput:")
    text.press("Control+Enter")
    page.wait_for_function("document.querySelectorAll('.sv-chip').length === 3")
    shown(page)
    assert [c for c in "".join(page.locator("[data-token]").all_inner_texts()) if c == ">"]
    assert page.title() == "viewer"
    assert query(page)["prompt"].endswith("Input: ( [ <\nOutput:")
    page.goto(page.evaluate("location.href"))
    shown(page)
    assert page.locator(".sv-chip").count() == 3
    page.keyboard.press("e")
    text.fill("Input: ( )\nOutput:")
    text.press("Control+Enter")
    page.wait_for_function(
        "document.querySelector('.sv-alert').textContent.includes('No bracket is left open')"
    )
    page.wait_for_timeout(200)
    assert query(page).get("prompt") != "Input: ( )\nOutput:"  # the address says what is shown


def test_a_prompt_with_new_pairs_is_drawn_and_run(visit: Callable, address: str) -> None:
    page = visit(address)
    page.keyboard.press("e")
    page.get_by_label("Shots").fill("2")
    page.get_by_label("Pairs").select_option("new, shown in answers")
    page.get_by_role("button", name="Draw a prompt").click()
    page.wait_for_selector(".sv-chip .sv-p")
    [drawn] = dyck.generate_sets(1, 2, 0, pairing="in-context", reveal="answers")
    symbols = " ".join(drawn.query.input_symbols)
    assert f"Input: {symbols}\nOutput:" in page.get_by_label("Prompt to run").input_value()
    assert page.locator(".sv-chip").count() == len(drawn.query.answer)
    for opener, closer in zip(
        drawn.query.pairing.openers, drawn.query.pairing.closers, strict=True
    ):
        if ~drawn.query.pairing.openers.index(opener) in drawn.query.answer:
            assert f"{opener} by {closer}" in page.locator(".sv-head").inner_text()
    text = page.get_by_label("Prompt to run")
    text.fill("Input: ( ! [\nOutput:")
    text.press("Control+Enter")
    page.wait_for_function(
        "document.querySelector('.sv-alert').textContent.includes('the prompt never shows')"
    )


def test_heads_and_visits_are_zeroed(visit: Callable, address: str, server: flask.Flask) -> None:
    page = visit(address + "?ex=1&layer=2&head=1")
    overall, order = masses(page), page.locator(".sv-name").all_inner_texts()
    page.keyboard.press("z")
    page.wait_for_selector(".sv-off")
    shown(page, "2.1")
    assert page.locator(".sv-name").all_inner_texts() == order  # heads stay where they are
    assert query(page)["zero"] == "2.1.*"
    given = {"run": 0, "example": 1, "zeroed": [{"layer": 2, "head": 1}]}
    view = server.test_client().post("/viewer/live", json=given, **LOCAL).json["view"]
    said = page.locator(".sv-chip .sv-p").first.inner_text()
    assert float("0" + said.split("→ ")[1]) == pytest.approx(
        view["targets"][0]["probability"], abs=6e-4
    )
    assert page.locator(".sv-ghost").count() == 2
    page.get_by_label("What to zero").select_option("span")
    page.get_by_label("At which visit").select_option("2")
    page.get_by_role("button", name="Zero", exact=True).click()
    page.wait_for_function("document.querySelectorAll('.sv-off').length === 2")
    assert query(page)["zero"] == "2.1.*,*.*.2"
    page.get_by_role("button", name="Put all back").click()
    page.wait_for_function("document.querySelectorAll('.sv-off').length === 0")
    shown(page)
    assert masses(page) == overall


def test_taking_away(visit: Callable, address: str, run: xr.DataTree, tmp_path: Path) -> None:
    page = visit(address + "?layer=2&head=1&ex=1")
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text }")
    page.keyboard.press("t")
    page.wait_for_function("window.copied")
    lines = [line.split("\t") for line in page.evaluate("window.copied").splitlines()]
    assert lines[0] == ["position", "token", "region", "visit_1", "visit_2", "change"]
    rows = run["dyck_patterns"]["row"].values[1]
    executions = [e for e, layer in enumerate(run["layer"].values) if layer == 2]
    for column, execution in zip((3, 4), executions, strict=True):
        numbers = [float(line[column]) for line in lines[1:]]
        np.testing.assert_allclose(numbers, rows[execution, 1].mean(0), atol=1e-6)
    page.keyboard.press("l")
    page.wait_for_function("window.copied.startsWith('http')")
    assert "layer=2" in page.evaluate("window.copied")
    for key, start in (("p", b"\x89PNG"), ("P", b"<svg")):
        with page.expect_download() as download:
            page.keyboard.press(key)
        file = tmp_path / download.value.suggested_filename
        download.value.save_as(file)
        assert file.read_bytes().startswith(start) and file.stat().st_size > 10_000
        assert file.stem == "layer-2-head-1"
    assert "visit 2" in file.read_text() and "<script" not in file.read_text()


@pytest.mark.parametrize("by", ["button", "key"])
def test_what_is_on_its_way_is_taken_away_not_what_was_there(
    visit: Callable, address: str, run: xr.DataTree, by: str
) -> None:
    page = visit(address + "?layer=2&head=1&ex=1")
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text }")
    held: list[Any] = []
    late = [held.append]
    page.route("**/map/**", lambda route: late[0](route))
    page.get_by_label("Example").select_option("0")
    page.wait_for_function("document.querySelector('.sv').ariaBusy === 'true'")
    page.wait_for_timeout(300)
    with page.expect_download() as download:
        if by == "button":
            page.get_by_role("button", name="Copy TSV").click()
            page.get_by_role("button", name="SVG").click()
        else:
            page.locator("body").press("t")
            page.locator("body").press("P")
        page.wait_for_timeout(100)
        assert held and not page.evaluate("window.copied")
        late[0] = lambda route: route.continue_()
        for route in held:
            route.continue_()
    assert download.value.suggested_filename == "layer-2-head-1.svg"
    page.wait_for_function("window.copied")
    copied = [line.split("\t")[3] for line in page.evaluate("window.copied").splitlines()[1:]]
    execution = run["layer"].values.tolist().index(2)
    rows = run["dyck_patterns"]["row"].values[0, execution, 1].mean(0)
    np.testing.assert_allclose([float(value) for value in copied], rows[: len(copied)], atol=1e-6)


def test_a_run_without_examples_shows_nothing_of_another(visit: Callable, address: str) -> None:
    page = visit(address + "?layer=2&head=1")
    runs = page.get_by_label("Run", exact=True)
    runs.select_option("2")
    page.get_by_text("This run holds no examples").wait_for()
    assert page.locator(".sv-answer").is_hidden() and page.locator(".sv-body").is_hidden()
    page.set_viewport_size({"width": 900, "height": 900})
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text }")
    for name in ("Copy TSV", "SVG", "PNG"):
        page.get_by_role("button", name=name).click()
    page.locator("body").press("t")
    page.wait_for_timeout(300)
    assert not page.evaluate("window.copied") and "layer" not in query(page)
    runs.select_option("0")
    shown(page)
    assert page.locator(".sv-answer").is_visible()


def test_links_to_what_cannot_be_run_are_no_dead_ends(browser: Any, address: str) -> None:
    page = browser.new_page()
    page.goto(address + "?prompt=Input:+(+[+x%0AOutput:")
    page.get_by_text("is 'x', no bracket of").wait_for()
    page.get_by_role("button", name="Prompt\u2026").click()
    text = page.get_by_label("Prompt to run")
    assert text.input_value() == "Input: ( [ x\nOutput:"
    text.fill("Input: ( [\nOutput:")
    text.press("Control+Enter")
    shown(page)
    page.goto(address + "?zero=9.9.9&ex=1")
    shown(page)
    assert "9" in page.locator(".sv-alert").inner_text() and "zero" not in query(page)
    page.goto(address + "?scale=cubic&visit=7&head=first")
    shown(page)
    said = page.locator(".sv-alert").inner_text()
    assert all(what in said for what in ("scale cubic", "visit 7", "head first"))
    page.close()


def test_help_and_roles(visit: Callable, address: str) -> None:
    page = visit(address)
    page.keyboard.press("?")
    assert page.get_by_role("dialog", name="Keys").is_visible()
    keys = page.locator(".sv-help dt").all_inner_texts()
    assert {"Esc", "d", "?"} <= set(keys)
    assert len(keys) == page.locator(".sv-help dd").count()
    page.keyboard.press("Escape")
    assert not page.get_by_role("dialog", name="Keys").is_visible()
    for role, name in (
        ("grid", "Heads"),
        ("region", "Dyck attention viewer"),
        ("toolbar", "View"),
        ("group", "Prompt, token by token"),
    ):
        assert page.get_by_role(role, name=name, exact=True).count() == 1
    unnamed = page.evaluate("""[...document.querySelectorAll("button, select, input, textarea, [role=gridcell]")]
        .filter((e) => !(e.ariaLabel || e.innerText.trim() || e.labels?.length) && e.dataset.token === undefined).length""")
    assert unnamed == 0
    assert page.locator('[data-token][tabindex="0"]').count() == 1


def test_the_map_by_keyboard(visit: Callable, address: str) -> None:
    page = visit(address)
    page.locator(".sv-map").focus()
    page.keyboard.press("ArrowUp")
    readout = page.locator(".sv-readout").inner_text()
    assert readout.startswith("query ") and "visit 1" in readout
    page.keyboard.press("Enter")
    assert query(page)["q"] == re.match(r"query (\d+)", readout)[1]


@pytest.mark.parametrize("width", [1440, 800])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_cut(width: int, scheme: str, visit: Callable, address: str) -> None:
    page = visit(address)
    page.set_viewport_size({"width": width, "height": 900})
    page.evaluate(f"document.documentElement.dataset.mantineColorScheme = '{scheme}'")
    page.wait_for_timeout(200)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert (
        page.evaluate(
            "document.querySelector('.sv-strip canvas[role=img]').getBoundingClientRect().right"
        )
        <= width
    )
    ground = page.evaluate("getComputedStyle(document.querySelector('.sv')).backgroundColor")
    assert ground == ("rgb(36, 36, 36)" if scheme == "dark" else "rgb(255, 255, 255)")


def test_destroy_leaves_nothing(visit: Callable, address: str) -> None:
    page = visit(address)
    page.evaluate("viewer.destroy()")
    assert page.locator("#viewer *").count() == 0
    page.keyboard.press("s")
    page.keyboard.press("?")


def test_inside_a_file(visit: Callable, run: xr.DataTree, tmp_path: Path) -> None:
    """The same in the report: no server; what does not fit is said."""
    fragment = viewer.viewer_fragment([run], budget=120_000)
    file = tmp_path / "report.html"
    start = '<!doctype html><html lang="en"><meta charset="utf-8"><title>report</title><link rel="icon" href="data:,">'
    file.write_text(f"{start}{fragment}</html>", encoding="utf-8")
    page = visit(file.as_uri())
    assert page.title() == "report"
    assert page.locator('[data-token="3"]').inner_text() == EVIL
    assert not page.get_by_role("button", name="Prompt…").is_visible()
    assert not page.get_by_label("What to zero").is_visible()
    page.locator('[data-token="20"]').click()
    page.keyboard.press("g")
    page.keyboard.press("End")
    page.wait_for_timeout(300)
    assert "leaves the head's numbers out" in page.locator(".sv").inner_text()
