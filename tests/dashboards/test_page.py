"""Figures as a browser draws them: at every size of model and window no text lies on another or is cut."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import plotly.io
import pytest
import xarray as xr

from smeltscope.dashboards import (
    PLOTLY_CONFIG,
    sink_by_position,
    sink_depth_profile,
    sink_heatmaps,
)


def of_size(summary: xr.Dataset) -> str:
    figures = [sink_heatmaps(summary), sink_depth_profile(summary), sink_by_position(summary)]
    parts = [
        plotly.io.to_html(
            figure,
            full_html=False,
            include_plotlyjs=i == 0,
            config=PLOTLY_CONFIG,
            div_id=f"figure-{i}",
        )
        for i, figure in enumerate(figures)
    ]
    body = "".join(f"<figure style='margin: 0; min-width: 720px'>{part}</figure>" for part in parts)
    return f"<!doctype html><html><head><meta charset='utf-8'><link rel='icon' href='data:,'></head><body>{body}</body></html>"


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
