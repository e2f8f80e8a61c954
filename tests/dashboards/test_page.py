"""The page opens by itself in a real browser, asks no server for anything, and shows what it is given as text."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xarray as xr

import smeltscope
from smeltscope.dashboards import (
    render_page,
    sink_by_position,
    sink_depth_profile,
    sink_heatmaps,
    write_sink_page,
)

EVIL = "<script>document.title = 'broken'</script>"


@pytest.fixture(scope="session")
def run(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> xr.DataTree:
    """A run over text whose category and id are code, and a checkpoint whose name is."""
    import json

    from smeltscope.cli import probe
    from smeltscope.cli import run as run_command

    folder = tmp_path_factory.mktemp("page")
    rows = [
        {"text": f"{i} is a number. " * 9, "category": EVIL, "id": EVIL + str(i), "source": EVIL}
        for i in range(4)
    ]
    text = folder / "text.jsonl"
    text.write_text("\n".join(map(json.dumps, rows)))
    args = ["--ckpt", tiny_checkpoint, "--data", text, "--out", folder / "x.h5", "-q", "--json"]
    assert run_command(probe, ["attention-sink", *map(str, args)]) == 0
    tree = smeltscope.open(folder / "x.h5")
    tree.attrs["checkpoint"] = EVIL
    tree.attrs["data_notes"] = json.dumps([EVIL])
    return tree


@pytest.fixture(scope="session")
def page(run: xr.DataTree, tmp_path_factory: pytest.TempPathFactory) -> Path:
    summary = smeltscope.summarize(run, "attention-sink", draws=20)
    return write_sink_page(run, summary, tmp_path_factory.mktemp("p") / "x.html")


def of_size(summary: xr.Dataset) -> str:
    return render_page(
        title="A page",
        lead="A sentence.",
        figures=[sink_heatmaps(summary), sink_depth_profile(summary), sink_by_position(summary)],
        definition="A definition.",
        facts={"checkpoint": "a path that is long " * 9},
    )


def test_what_a_user_named_is_text(page: Path) -> None:
    text = page.read_text()
    assert EVIL not in text
    assert text.count("&lt;script&gt;document.title") >= 2  # the title and the notes


def test_the_page_says_what_was_measured(page: Path, run: xr.DataTree) -> None:
    text = page.read_text()
    assert "Later visits minus visit 1" in text
    assert "How it was measured" in text and "arXiv 2609.01343" in text
    identity = smeltscope.activations.attributes_of(run)["identity"]
    assert identity["checkpoint_digest"][:16] in text and identity["data_digest"][:16] in text
    assert "not the training seed" in text and "residual scale 0.5" in text


def test_nothing_is_fetched_and_plotly_is_there_once(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)\s*=\s*[\"']?(https?:)?//", text)
    assert text.count("plotly.js v") == 1
    assert text.count("Plotly.newPlot(") >= 3
    assert len(text) < 6_000_000


def test_a_page_that_cannot_be_written(run: xr.DataTree, tmp_path: Path) -> None:
    summary = smeltscope.summarize(run, "attention-sink", draws=2)
    path = tmp_path / "no" / "x.html"
    with pytest.raises(smeltscope.SmeltscopeError, match=re.escape(str(path))):
        write_sink_page(run, summary, path)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="session")
def visit(browser: Any) -> Callable[..., Any]:
    """Open a file in the browser and check what holds for every page."""

    def call(path: Path, width: int) -> Any:
        tab = browser.new_page()
        tab.set_viewport_size({"width": width, "height": 900})
        said: list[str] = []
        asked: list[str] = []
        tab.on("console", lambda m: said.append(m.text) if m.type in ("error", "warning") else None)
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto(path.as_uri())
        tab.wait_for_selector("#figure-2 .main-svg")
        tab.wait_for_timeout(300)
        assert said == []
        assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
        return tab

    return call


OVERLAPS = """() => {
  // pairs of texts of one figure that lie on each other, among titles, legends, labels of axes and colour bars
  const found = [];
  for (const figure of document.querySelectorAll('figure')) {
    const texts = [...figure.querySelectorAll('svg text')].filter(t => t.textContent.trim());
    const boxes = texts.map(t => t.getBoundingClientRect());
    for (let i = 0; i < boxes.length; i++) for (let j = i + 1; j < boxes.length; j++) {
      const a = boxes[i], b = boxes[j];
      const x = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (x > 1 && y > 3) found.push([texts[i].textContent, texts[j].textContent]);
    }
  }
  return found;
}"""
CUT = """() => [...document.querySelectorAll('figure')].flatMap(figure => {
  const frame = figure.querySelector('.main-svg').getBoundingClientRect();
  return [...figure.querySelectorAll('svg text')].filter(t => t.textContent.trim()).filter(t => {
    const box = t.getBoundingClientRect();
    return box.left < frame.left - 1 || box.right > frame.right + 1
      || box.top < frame.top - 1 || box.bottom > frame.bottom + 1;
  }).map(t => t.textContent);
})"""


def check_drawing(tab: Any) -> None:
    figures = tab.locator("figure")
    assert figures.count() == 3
    assert tab.locator("#figure-0 .heatmaplayer image").count() >= 1
    assert tab.locator("#figure-1 .scatterlayer .point").count() >= 9
    assert tab.locator("#figure-2 .scatterlayer .js-line").count() >= 2
    buttons = " ".join(
        tab.eval_on_selector_all(".modebar-btn", "all => all.map(b => b.dataset.title)")
    )
    assert "Download" in buttons
    for word in ("hare", "Chart Studio", "cloud", "Plotly"):
        assert word not in buttons
    assert "Edit in Chart Studio" not in tab.inner_text("body")
    width = tab.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert width[0] <= width[1], "the page is wider than the window"
    assert tab.evaluate(OVERLAPS) == []
    assert tab.evaluate(CUT) == []


@pytest.fixture(scope="session", params=[1440, 800])
def width(request: pytest.FixtureRequest) -> Iterator[int]:
    yield request.param


@pytest.mark.slow
def test_the_page_in_a_browser(page: Path, visit: Callable[..., Any], width: int) -> None:
    tab = visit(page, width)
    check_drawing(tab)
    assert tab.title() == f"Attention on the first token: {EVIL}"  # as text; the code did not run
    tab.locator("#figure-0").scroll_into_view_if_needed()
    box = tab.locator("#figure-0 .heatmaplayer image").first.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    tab.mouse.move(x - 20, y - 5)
    tab.mouse.move(x, y, steps=5)
    hover = tab.locator("#figure-0 .hovertext")
    hover.wait_for(timeout=10_000)
    assert re.search(r"layer \d, head \d.*4 documents", hover.text_content())
    tab.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "heads", "visits"), [(6, 4, 1), (6, 4, 3), (32, 32, 2), (48, 64, 1)]
)
def test_every_size_stays_legible(
    layers: int,
    heads: int,
    visits: int,
    width: int,
    make_summary: Callable[..., xr.Dataset],
    visit: Callable[..., Any],
    tmp_path: Path,
) -> None:
    path = tmp_path / "x.html"
    path.write_text(of_size(make_summary(layers, heads, visits)))
    tab = visit(path, width)
    check_drawing(tab)
    tab.close()
