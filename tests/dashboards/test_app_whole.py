"""`probe view` of every diagnostic: each page, and the Dyck viewer inside the app, in a real browser."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import smeltscope
from smeltscope.commands.pages import run_files_of
from smeltscope.dashboards.overview import TITLES
from smeltscope.dashboards.report import MOST_BYTES, write_report
from smeltscope.registry import PROBES, PROMPT_PROBES

RUNS = ("text.h5", "dyck.h5", "state.h5")


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of every diagnostic of text and one of each of prompts."""
    folder = tmp_path_factory.mktemp("whole")
    text = folder / "text.jsonl"
    rows = [{"text": f"{i} is a number. " * 9} for i in range(6)]
    text.write_text("\n".join(map(json.dumps, rows)))
    smeltscope.probe(tiny_checkpoint, text, list(PROBES), out=folder / "text.h5", quiet=True)
    asked: dict[str, Any] = {"items": 2, "seeds": 1, "quiet": True}
    smeltscope.dyck(tiny_checkpoint, **asked, shots=(0, 1), nested=4, out=folder / "dyck.h5")
    state = asked | {"items": 6, "shots": (1,)}
    smeltscope.dyck_state(tiny_checkpoint, **state, out=folder / "state.h5")
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """The app over them."""
    process = subprocess.Popen(
        [sys.executable, "-m", "smeltscope", "probe", "view", *RUNS, "--port", "0"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.terminate()
    process.communicate(timeout=20)


@pytest.fixture
def tab(browser: Any, address: str) -> Iterator[Any]:
    page = browser.new_page()
    page.set_viewport_size({"width": 1440, "height": 900})
    page.set_default_timeout(60_000)
    wrong: list[str] = []
    page.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    own = (address, "data:", "blob:", "file:")
    page.on("request", lambda r: None if r.url.startswith(own) else wrong.append(r.url))
    yield page
    assert wrong == []
    page.close()


@pytest.mark.slow
def test_every_page_and_the_viewer_in_it(tab: Any, address: str) -> None:
    """One test: what it needs takes longer to make than to look at."""
    for probe, title in TITLES.items():
        run = 0 if probe not in PROMPT_PROBES else 2 if probe == "dyck-state" else 1
        tab.goto(f"{address}{probe}?run={run}")
        tab.wait_for_selector("#shown .js-plotly-plot .main-svg")
        tab.wait_for_selector("#numbers td, #numbers th")
        assert title in tab.title() and "How it was measured" in tab.inner_text("body")
    use_the_viewer(tab, address)


def use_the_viewer(tab: Any, address: str) -> None:
    tab.goto(f"{address}viewer?run=1")
    tab.wait_for_selector('.sv[data-shown][aria-busy="false"]')
    tab.locator("[data-token]").nth(3).click()  # look from here
    tab.wait_for_function("new URLSearchParams(location.search).has('q')")
    tab.keyboard.press("Escape")
    tab.keyboard.press("z")
    tab.wait_for_selector(".sv-off")
    tab.get_by_role("button", name="Put all back").click()
    tab.wait_for_function("document.querySelectorAll('.sv-off').length === 0")
    tab.wait_for_selector('.sv[aria-busy="false"]')
    tab.keyboard.press("e")
    text = tab.get_by_label("Prompt to run")
    text.fill("Input: ( [ <\nOutput:")
    text.press("Control+Enter")
    tab.wait_for_function("document.querySelectorAll('.sv-chip').length === 3")
    with tab.expect_download() as download:
        tab.get_by_role("button", name="SVG").click()
    assert Path(download.value.path()).read_text().startswith("<svg")
    tab.wait_for_function("new URLSearchParams(location.search).has('prompt')")
    deep = tab.evaluate("location.href")
    tab.goto("about:blank")
    tab.goto(deep)
    tab.wait_for_function("document.querySelectorAll('.sv-chip').length === 3")


@pytest.mark.slow
def test_the_report_of_all_of_it(tab: Any, folder: Path) -> None:
    """Every figure and the viewer in one file: small, drawn, and nobody is asked."""
    out = folder / "report.html"
    write_report(run_files_of([folder / name for name in RUNS]), out)
    assert out.stat().st_size < MOST_BYTES
    tab.goto(out.as_uri())
    tab.wait_for_selector("[data-drawn] .main-svg")
    titles = tab.locator("h2").all_inner_texts()
    assert {*TITLES.values(), "Dyck viewer"} <= set(titles)
    tab.locator("#viewer").scroll_into_view_if_needed()
    tab.wait_for_selector('.sv[data-shown][aria-busy="false"]')
    tab.locator("[data-token]").nth(3).click()
    tab.wait_for_function("document.querySelector('.sv-focus').textContent.includes('locked')")
