"""The report: one file that a browser opens without a server, whole or not at all, and what it is given is text."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smeltscope.activations import attributes_of, open_run
from smeltscope.commands.pages import run_files_of
from smeltscope.dashboards import browser as browsers
from smeltscope.dashboards.report import MOST_BYTES, render_report, write_report
from smeltscope.errors import SmeltscopeError

EVIL = "<script>document.title = 'broken'</script>"


@pytest.fixture(scope="module")
def page(looped_run: Path, unlooped_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = run_files_of([looped_run, unlooped_run])
    # The name of a checkpoint is whatever its folder is called.
    runs[0].attributes()["checkpoint"] = EVIL
    return write_report(runs, tmp_path_factory.mktemp("report") / "x.html")


def test_what_a_user_named_is_text(page: Path) -> None:
    text = page.read_text()
    assert EVIL not in text and "<script>document" not in text
    assert text.count("&lt;script&gt;document.title") >= 2


def test_it_says_what_was_found_and_how_it_was_measured(page: Path, looped_run: Path) -> None:
    text = page.read_text()
    identity = attributes_of(open_run(looped_run))["identity"]
    for words in (
        identity["checkpoint_digest"][:16],
        identity["data_digest"][:16],
        "experts shared by two visits",
        "2 to 3 of 8 at S",
        "not the training seed",
        "How it was measured",
        "residual scale 0.5",
        "Mean loss of",
    ):
        assert words in text
    assert re.search(r"loss, nats per token \d\.\d+ \[\d\.\d+, \d\.\d+\]", text)


def test_nothing_is_fetched_and_it_is_small(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)\s*=\s*[\"']?(https?:)?//", text)
    assert text.startswith("<!doctype html>") and text.rstrip().endswith("</html>")
    assert page.stat().st_size < MOST_BYTES / 2  # plotly.js whole is 4.8 MB


def test_only_what_is_asked_for(looped_run: Path) -> None:
    text = render_report(run_files_of([looped_run]), probes=["loss"])
    assert 'id="loss"' in text and 'id="router-overlap"' not in text


def test_whole_or_not_at_all(looped_run: Path, tmp_path: Path, monkeypatch: Any) -> None:
    runs = run_files_of([looped_run])
    with pytest.raises(SmeltscopeError, match=re.escape(str(tmp_path / "no" / "x.html"))):
        write_report(runs, tmp_path / "no" / "x.html", probes=["loss"])

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        write_report(runs, tmp_path / "x.html", probes=["loss"])
    assert list(tmp_path.iterdir()) == []


def test_the_command_refuses_before_any_work(
    probe: Callable[..., Any], looped_run: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    old = tmp_path / "x.html"
    old.write_text("old")
    done = probe("report", looped_run, "--out", old)
    assert done.code == 2 and "--force" in done.err and old.read_text() == "old"
    done = probe("report", looped_run, "--out", old, "--pdf", old, "--force")
    assert done.code == 2 and "a file each" in done.err
    done = probe("report", tmp_path / "none.h5", "--out", tmp_path / "y.html")
    assert done.code == 2 and "There is no run file" in done.err
    monkeypatch.setattr(browsers, "find_browser", lambda: None)
    done = probe("report", looped_run, "--out", tmp_path / "y.html", "--pdf", tmp_path / "y.pdf")
    assert done.code == 2 and "none is installed" in done.err
    assert sorted(file.name for file in tmp_path.iterdir()) == ["x.html"]


@pytest.mark.slow
@pytest.mark.parametrize("width", [1440, 800])
def test_in_a_browser(page: Path, browser: Any, width: int) -> None:
    tab = browser.new_page()
    tab.context.set_offline(True)
    tab.set_viewport_size({"width": width, "height": 900})
    wrong: list[str] = []
    tab.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on(
        "request",
        lambda r: None if r.url.startswith(("file:", "data:", "blob:")) else wrong.append(r.url),
    )
    tab.goto(page.as_uri())
    tab.wait_for_selector("[data-drawn] .main-svg")
    assert EVIL in tab.title()  # as text; the code did not run
    figures = tab.locator("[data-figure]")
    for i in range(figures.count()):
        figures.nth(i).scroll_into_view_if_needed()
    tab.wait_for_function(
        "[...document.querySelectorAll('[data-figure]')].every(f => f.querySelector('.main-svg'))"
    )
    titles = " ".join(
        tab.eval_on_selector_all(".modebar-btn", "all => all.map(b => b.dataset.title)")
    )
    assert "Download" in titles and not re.search("hare|Chart Studio|loud", titles)
    wide = tab.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide[0] <= wide[1]
    tab.get_by_role("button", name="Dark").click()
    last = "[...document.querySelectorAll('[data-figure]')].at(-1)"
    tab.wait_for_function(f"{last}.dataset.drawn === 'dark'")
    assert (
        tab.evaluate(f"getComputedStyle({last}.querySelector('.main-svg')).backgroundColor")
        != "rgb(255, 255, 255)"
    )
    tab.context.set_offline(False)
    tab.close()
    assert wrong == []


@pytest.mark.slow
@pytest.mark.skipif(browsers.find_browser() is None, reason="needs Chromium")
def test_on_paper_and_as_a_picture(looped_run: Path, tmp_path: Path) -> None:
    page = write_report(run_files_of([looped_run]), tmp_path / "x.html", probes=["loss"])
    assert browsers.write_pdf(page, tmp_path / "x.pdf").read_bytes().startswith(b"%PDF")
    assert browsers.write_png(page, tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["x.html", "x.pdf", "x.png"]
    assert (tmp_path / "x.png").stat().st_size > 30_000  # not an empty page
