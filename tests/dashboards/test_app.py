"""`probe view` as a user has it: the command in a process of its own, its pages in a real browser."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flask
import h5py
import numpy as np
import pytest
import torch

import smeltscope
from smeltscope.activations import open_run
from smeltscope.commands.pages import checkpoint_of_run, distinct_names, run_files_of
from smeltscope.dashboards.app import NO_RUN, Place, address_of, make_app, place_of, unmet_of
from smeltscope.dashboards.figures.common import on_one_scale
from smeltscope.dashboards.numbers import quantities_in, table_of
from smeltscope.dashboards.overview import Found, headline_rows, headlines, number, with_interval
from smeltscope.dashboards.report import write_report
from smeltscope.dashboards.runs import RunFile, baseline_of
from smeltscope.dashboards.server import bind, guard, is_local
from smeltscope.errors import SmeltscopeError
from smeltscope.model import load_checkpoint
from smeltscope.probes import summarize
from smeltscope.probes.grouping import groups_of, restricted
from smeltscope.registry import recorded_probe

EVIL = "<script>document.title = 'broken'</script>"
READY = "document.querySelectorAll('#shown .js-plotly-plot .main-svg').length > 3"


def only_first_done(file: Path, done: int) -> None:
    """As if no more segments had been run."""
    with h5py.File(file, "r+") as run:
        run["segments/done"][...] = np.arange(len(run["segments/done"])) < done


@dataclass(frozen=True, kw_only=True)
class Served:
    address: str
    folder: Path
    process: subprocess.Popen[str]


@pytest.fixture(scope="module")
def served(
    looped_run: Path, unlooped_run: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A looped run, its Baseline, a run being written and a damaged file, by the real command."""
    folder = tmp_path_factory.mktemp("served")
    shutil.copy(looped_run, folder / "loop.h5")
    shutil.copy(unlooped_run, folder / "base.h5")
    shutil.copy(looped_run, folder / "growing.h5.partial")
    only_first_done(folder / "growing.h5.partial", 0)
    (folder / "damaged.h5").write_bytes(looped_run.read_bytes()[:5000])
    files = ["loop.h5", "base.h5", "growing.h5", "damaged.h5"]
    command = [sys.executable, "-m", "smeltscope", "probe", "view", *files, "--port", "0"]
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address), process.communicate()
    yield Served(address=address, folder=folder, process=process)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 0
    assert said.strip() == "Ctrl+C ends."


@pytest.fixture(scope="module")
def tab(browser: Any, served: Served) -> Iterator[Any]:
    """A page of the browser in which nothing may go wrong."""
    page = browser.new_page()
    page.set_viewport_size({"width": 1200, "height": 900})
    wrong: list[str] = []
    page.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "request",
        lambda r: (
            None if r.url.startswith((served.address, "data:", "blob:")) else wrong.append(r.url)
        ),
    )
    page.set_default_timeout(60_000)
    yield page
    assert wrong == []
    page.close()


def text_of(tab: Any) -> str:
    return str(tab.inner_text("body"))


def pick(tab: Any, label: str, option: str) -> None:
    tab.get_by_role("textbox", name=label, exact=True).click()
    tab.get_by_role("option", name=option, exact=True).click()


@pytest.mark.slow
def test_the_overview(tab: Any, served: Served) -> None:
    tab.goto(served.address)
    # every section comes when its summary is made
    for words in (
        "sink mass at visit 2",
        "experts shared by two visits",
        "nats per token",
        "no segment yet",
    ):
        tab.wait_for_selector(f"text={words}")
    text = text_of(tab)
    for words in ("2 to 3 of 8 at S", "not reported", "below 0 in nearly all", "smeltscope"):
        assert words in text  # the paper's range beside the number
    assert "damaged.h5 is no HDF5 file, or a damaged one" in text
    assert "no segment yet; look again" in text  # growing.h5
    assert tab.title() == "Overview - smeltscope"
    header = tab.locator("section", has_text="Router overlap").locator("thead").first.inner_text()
    assert (
        re.sub(r"\s+", " ", header).strip() == "loop.h5 base.h5 growing.h5 the paper"
        or "loop.h5" in header
    )


@pytest.mark.slow
@pytest.mark.parametrize("probe", ["attention-sink", "router-overlap", "loss"])
def test_each_diagnostic(tab: Any, served: Served, probe: str) -> None:
    tab.goto(f"{served.address}{probe}?run=0")
    tab.wait_for_selector("#shown .js-plotly-plot .main-svg")
    tab.wait_for_selector("#numbers td, #numbers th")
    assert "How it was measured" in text_of(tab)
    titles = " ".join(
        tab.eval_on_selector_all(".modebar-btn", "all => all.map(b => b.dataset.title)")
    )
    assert "Download" in titles
    for word in ("hare", "Chart Studio", "loud"):
        assert word not in titles
    wide = tab.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide[0] <= wide[1]


@pytest.mark.slow
def test_selectors_change_the_page_and_a_link_opens_it_again(tab: Any, served: Served) -> None:
    tab.goto(f"{served.address}attention-sink")
    tab.wait_for_function(READY)
    assert "In <script>" not in text_of(tab)
    pick(tab, "Category", EVIL)
    tab.wait_for_selector("text=In <script>document.title")
    pick(tab, "Layer", "layer 2")
    tab.wait_for_function("location.search.includes('layer=2')")
    tab.wait_for_function(
        "[...document.querySelectorAll('#numbers tbody th')].every(c => c.textContent === '2')"
    )
    rows = tab.locator("#numbers tbody tr").count()
    assert rows == 4  # heads of layer 2 at visit 2
    assert tab.title() == "Attention sink - smeltscope"  # the category is text
    address = tab.url
    tab.goto("about:blank")
    tab.goto(address)
    tab.wait_for_selector("text=In <script>document.title")
    assert tab.get_by_role("textbox", name="Layer", exact=True).input_value() == "layer 2"
    tab.wait_for_selector("#numbers tbody tr")
    assert tab.locator("#numbers tbody tr").count() == rows


@pytest.mark.slow
def test_two_runs_beside_one_another(tab: Any, served: Served) -> None:
    tab.goto(f"{served.address}router-overlap?run=0&against=none")
    tab.wait_for_selector("#numbers td")
    assert "difference" not in tab.inner_text("#numbers")
    tab.goto(f"{served.address}loss")  # the Baseline is found by itself
    tab.wait_for_selector("#numbers th:has-text('difference')")
    tab.get_by_role("textbox", name="Beside", exact=True).press("Backspace")
    tab.wait_for_function("location.search.includes('against=none')")
    tab.wait_for_selector("#numbers th:has-text('value')")
    tab.go_back()
    tab.wait_for_selector("#numbers th:has-text('difference')")


@pytest.mark.slow
def test_three_runs_beside_one_another(tab: Any, served: Served) -> None:
    """Each has its figure; the run stands with each of the others where a figure holds two, and in the numbers."""
    partial = served.folder / "growing.h5.partial"
    only_first_done(partial, 10_000)
    tab.goto(f"{served.address}attention-sink?run=0&against=1")
    tab.wait_for_function(READY)
    tab.get_by_role("textbox", name="Beside", exact=True).click(
        force=True
    )  # chosen runs lie over it
    tab.get_by_role("option", name=re.compile("growing")).click()
    tab.wait_for_function("new URLSearchParams(location.search).get('against') === '1,2'")
    tab.wait_for_selector("#shown figcaption:has-text('beside it growing.h5')")
    captions = tab.locator("#shown figcaption").all_inner_texts()
    named = [re.sub(r" \([^)]*\)", "", caption) for caption in captions]
    assert named[:3] == ["loop.h5", "base.h5", "growing.h5"]  # heads
    assert "loop.h5, beside it base.h5" in named and "loop.h5, beside it growing.h5" in named
    header = tab.locator("#shown .headlines thead").inner_text()
    assert header.split() == ["loop.h5", "base.h5", "growing.h5", "the", "paper"]
    tab.wait_for_selector("#numbers h3 >> nth=1")
    assert tab.locator("#numbers h3").all_inner_texts() == [
        "loop.h5 and base.h5",
        "loop.h5 and growing.h5",
    ]
    wide = tab.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide[0] <= wide[1]
    only_first_done(partial, 0)  # as it was
    tab.wait_for_selector("#shown .trouble:has-text('growing.h5.partial has no segment yet')")
    assert tab.locator("#shown figcaption").count() > 2  # the others are still shown


@pytest.mark.slow
def test_dark_and_light(tab: Any, served: Served) -> None:
    tab.goto(f"{served.address}loss?run=0&against=none")
    tab.wait_for_selector("#shown .js-plotly-plot .main-svg")
    back = "getComputedStyle(document.querySelector('.js-plotly-plot .main-svg')).background"
    light = tab.evaluate(back)
    tab.get_by_role("button", name="Dark").click()
    tab.wait_for_function(f"!{back}.startsWith('rgb(255, 255, 255)')")
    assert tab.evaluate("document.documentElement.dataset.mantineColorScheme") == "dark"
    tab.reload()
    tab.wait_for_selector("#shown .js-plotly-plot .main-svg")
    tab.wait_for_function(f"!{back}.startsWith('rgb(255, 255, 255)')")
    tab.get_by_role("button", name="Light").click()
    tab.wait_for_function(f"{back} === {light!r}")


@pytest.mark.slow
def test_a_run_being_written_is_followed(tab: Any, served: Served) -> None:
    partial, finished = (served.folder / f"growing.h5{end}" for end in (".partial", ""))
    tab.goto(f"{served.address}loss?run=2&against=none")
    tab.wait_for_selector("text=growing.h5.partial has no segment yet")
    only_first_done(partial, 5)
    tab.wait_for_selector("text=Not finished: 5 of")
    first = tab.inner_text("#shown .sentence")
    only_first_done(partial, 10_000)
    partial.rename(finished)
    tab.wait_for_selector(".unfinished", state="detached")
    assert tab.inner_text("#shown .sentence") != first


@pytest.mark.slow
def test_what_is_not_there(tab: Any, served: Served) -> None:
    tab.goto(f"{served.address}no-such-probe?run=99")
    tab.wait_for_selector("text=No run here holds 'no-such-probe'")
    tab.goto(f"{served.address}attention-sink?run=3&layer=77")  # damaged: another run is shown
    tab.wait_for_selector("#shown .js-plotly-plot")
    assert tab.title() == "Attention sink - smeltscope"
    text = text_of(tab)
    assert "damaged.h5 is no HDF5 file, or a damaged one" in text and "loop.h5 is shown" in text
    assert "loop.h5 offers no choice of layer 77" in text
    assert tab.get_by_role("textbox", name="Run", exact=True).input_value().startswith("loop.h5")


@pytest.mark.slow
def test_the_viewer_mounts(tab: Any, served: Served) -> None:
    tab.goto(f"{served.address}viewer")
    tab.wait_for_selector("#viewer *")
    assert "Dyck viewer" in text_of(tab)
    options = "[...document.querySelectorAll('select[aria-label=Run] option')].map(o => [o.textContent, o.disabled])"
    tab.wait_for_function(f"{options}.length === 4")
    offered = tab.evaluate(options)
    assert offered[0] == ["0: loop.h5", False]
    assert offered[3] == ["3: damaged.h5, cannot be read", True]
    tab.goto(f"{served.address}viewer?run=3")
    tab.wait_for_selector("text=damaged.h5 is no HDF5 file, or a damaged one")


# ---- without a browser


@pytest.fixture(scope="module")
def runs(looped_run: Path, unlooped_run: Path) -> list[RunFile]:
    return run_files_of([looped_run, unlooped_run])


def test_a_run_file_gives_what_summarize_gives(runs: list[RunFile], looped_run: Path) -> None:
    whole = open_run(looped_run)
    for name in runs[0].probes():
        expected = summarize(whole, recorded_probe(whole, name))
        np.testing.assert_equal(
            runs[0].summary(name).to_dict(encoding=False), expected.to_dict(encoding=False)
        )
        part = restricted(whole, groups_of(whole, "category")[EVIL])
        expected = summarize(part, recorded_probe(whole, name))
        np.testing.assert_equal(runs[0].summary(name, EVIL).to_dict(), expected.to_dict())
    assert runs[0].categories() == sorted([EVIL, "prose"])
    assert runs[0].patterns() is None


def test_a_run_without_training_is_run_live_as_it_was(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a word and another word")
    out = tmp_path / "fresh.h5"
    smeltscope.probe(tiny_checkpoint, text, "loss", untrained=True, out=out, quiet=True)
    [run] = run_files_of([out])
    live, fresh = checkpoint_of_run(run), load_checkpoint(tiny_checkpoint, untrained=True)
    assert live.name == fresh.name and live.name.endswith(" (untrained)")
    for one, other in zip(live.model.parameters(), fresh.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_what_a_link_asks_for_and_does_not_get_is_said(runs: list[RunFile], tmp_path: Path) -> None:
    (tmp_path / "damaged.h5").write_bytes(b"no")
    three = [*runs, *run_files_of([runs[0].given, tmp_path / "damaged.h5"])[1:]]

    def said(path: str, search: str) -> str:
        return " ".join(unmet_of(place_of(path, search, three), search, three))

    assert said("/attention-sink", "?run=0&against=1") == ""
    assert said("/attention-sink", "?run=1&against=none") == ""
    assert said("/", "?run=99") == ""
    assert said("/viewer", "?run=99").startswith("There is no run 99 here (they go from 0 to 2)")
    assert "loop.h5 is shown" in said("/attention-sink", "?run=99")
    assert "damaged.h5" in said("/attention-sink", "?run=2")
    assert "it is not shown beside" in said("/attention-sink", "?run=0&against=7")
    assert said("/attention-sink", "?run=0&against=1,9,x").count("There is no run") == 2
    assert said("/attention-sink", "?run=1&against=1") == "base.h5 is not compared with itself."


def test_numbers_are_worked_out_once_and_anew_when_the_file_changes(
    looped_run: Path, tmp_path: Path
) -> None:
    file = tmp_path / "x.h5.partial"
    shutil.copy(looped_run, file)
    run = RunFile(tmp_path / "x.h5", recorded_probe)
    first = run.summary("loss")
    assert run.summary("loss") is first
    only_first_done(file, 3)
    assert run.progress()[0] == 3 and not run.is_finished()
    part = open_run(file).isel(segment=slice(3))
    assert float(run.summary("loss")["loss"]) == float(
        summarize(part, recorded_probe(part, "loss"))["loss"]
    )
    assert run.path == file
    only_first_done(file, 10_000)
    file.rename(tmp_path / "x.h5")
    assert run.is_finished() and run.path == tmp_path / "x.h5"
    assert float(run.summary("loss")["loss"]) == float(first["loss"])
    (tmp_path / "x.h5").write_text("no HDF5")
    assert "no HDF5 file, or a damaged one" in str(run.trouble())


@pytest.mark.parametrize("seed", range(12))
def test_damaged_bytes_are_said_with_the_files_name(
    seed: int, looped_run: Path, tmp_path: Path
) -> None:
    """Wherever they stand: whatever h5py raises is a sentence, and a report is not written."""
    rng = np.random.default_rng(seed)
    content = bytearray(looped_run.read_bytes())
    for start in rng.integers(0, len(content), 6):
        content[start : start + 64] = rng.bytes(64)
    file = tmp_path / "broken.h5"
    file.write_bytes(content)
    run = RunFile(file, recorded_probe)
    asked: list[Callable[[], Any]] = [run.root, run.attributes, run.facts]
    asked += [
        lambda name=name: run.tree(name) for name in ("attention-sink", "router-overlap", "loss")
    ]
    troubles = []
    for ask in asked:
        try:
            ask()
        except SmeltscopeError as error:
            troubles.append(str(error))
    assert all("broken.h5" in text for text in troubles), troubles
    if troubles:
        with pytest.raises(SmeltscopeError, match=r"broken\.h5"):
            write_report([RunFile(file, recorded_probe)], tmp_path / "x.html")
        assert not (tmp_path / "x.html").exists()


def test_the_baseline_is_found(runs: list[RunFile]) -> None:
    assert baseline_of(runs[0], runs, "loss") is runs[1]
    assert baseline_of(runs[1], runs, "loss") is None
    assert baseline_of(runs[0], runs[:1], "loss") is None


@pytest.mark.parametrize(
    "place",
    [
        Place(),
        Place(probe="loss", run=1),
        Place(probe="attention-sink", run=0, against=(1,), picked={"category": EVIL, "layer": "3"}),
    ],
)
def test_an_address_says_all_of_a_place(place: Place, runs: list[RunFile]) -> None:
    path, _, search = address_of(place).partition("?")
    assert place_of(path, f"?{search}", runs) == place


@pytest.mark.parametrize(
    "search", ["?run=x", "?run=-1", "?run=7", "?layer=<b>", "?run=0&run=1", "??"]
)
def test_an_address_that_nobody_wrote(search: str, runs: list[RunFile]) -> None:
    place = place_of("/attention-sink", search, runs)
    assert place.run in (0, 1) and place.against in ((), (1,))
    assert place_of("/loss", f"?run=0&against={NO_RUN}", runs).against == ()


def test_a_run_stands_beside_itself_and_twice_nowhere(runs: list[RunFile]) -> None:
    three = [*runs, *run_files_of([runs[0].given])]
    assert place_of("/loss", "?run=1&against=2,0,1,2,,7", three).against == (2, 0)
    assert place_of("/router-overlap", "?run=0&against=2", three).against == (2,)
    assert address_of(Place(probe="loss", run=1, against=(2, 0))) == "/loss?run=1&against=2,0"


def test_numbers_of_what_is_picked(runs: list[RunFile]) -> None:
    summary = runs[0].summary("attention-sink")
    assert "sink_mass" in quantities_in(summary) and "sink_mass_low" not in quantities_in(summary)
    table = table_of(summary, "sink_mass", {"layer": 2, "visit": 2, "head": 1}, most=9)
    execution = int(np.flatnonzero((summary["layer"] == 2) & (summary["visit"] == 2))[0])
    assert table.columns == ["layer", "visit", "head", "value [95 %]"]
    assert [row[:3] for row in table.rows] == [["2", "2", "1"]] and table.more == 0
    shown = float(re.split(r"[ \[]", table.rows[0][3])[0])
    assert shown == pytest.approx(float(summary["sink_mass"][execution, 1]), abs=1e-3)
    assert table_of(summary, "sink_mass", {}, most=5).more == summary["sink_mass"].size - 5


def test_numbers_of_two_runs(runs: list[RunFile]) -> None:
    compared = runs[0].compared(runs[1], "loss")
    a, b = (float(run.summary("loss")["loss"]) for run in runs)
    assert float(compared["loss"]) == pytest.approx(a - b, abs=1e-6)
    row = table_of(compared, "loss", {}, most=5).rows[0]
    assert [float(cell) for cell in row[:2]] == [
        pytest.approx(a, abs=0.01),
        pytest.approx(b, abs=0.01),
    ]


def test_means_over_executions_have_an_interval(runs: list[RunFile]) -> None:
    summary = runs[0].summary("attention-sink")
    mass = [
        found
        for found in headlines(summary, "attention-sink")
        if found.what.startswith("sink mass, mean")
    ]
    assert len(mass) == 1 and mass[0].here.count("[") == 1
    shown = float(mass[0].here.split(" [")[0])
    assert shown == pytest.approx(float(summary["sink_mass_mean"].mean()), abs=5e-4)
    assert mass[0].beside.startswith("uniform ") and "[" in mass[0].beside


def test_headlines_stand_beside_the_paper(runs: list[RunFile]) -> None:
    found = headlines(runs[0].summary("router-overlap"), "router-overlap")
    columns, rows = headline_rows(["x.h5"], [found])
    assert columns == ["", "here", "the paper"]
    assert "2 to 3 of 8" in rows[0][-1] and "chance" in rows[0][1]
    assert headlines(runs[1].summary("router-overlap"), "router-overlap") == []


def test_a_run_of_three_visits_has_its_first_pair_in_the_row_of_other_runs() -> None:
    def found(*what: str) -> list[Found]:
        return [Found(what=w, here=w) for w in what]

    three = found("shared, visits 1-2", "shared, visits 1-3", "loss")
    _, rows = headline_rows(["two", "three"], [found("shared", "loss"), three])
    assert rows == [
        ["shared, visits 1-2", "shared", "shared, visits 1-2", "not reported"],
        ["loss", "loss", "loss", "not reported"],
        ["shared, visits 1-3", "-", "shared, visits 1-3", "not reported"],
    ]


def test_runs_are_compared_within_a_category(runs: list[RunFile]) -> None:
    found = runs[0].compared(runs[1], "loss", "prose")
    for side, run in (("b", runs[0]), ("a", runs[1])):
        own = float(run.summary("loss", "prose")["loss"])
        assert float(found[f"loss_{side}"]) == pytest.approx(own, rel=1e-9)


def test_figures_beside_one_another_have_one_scale() -> None:
    figures = [
        {"layout": {"coloraxis": {"cmin": 0, "cmax": top}, "coloraxis2": changes, "height": top}}
        for top, changes in ((1, {"cmin": -1, "cmax": 1}), (3, {"cmin": -9, "cmax": 9, "showscale": False}))
    ]  # fmt: skip
    alike = [figure["layout"] for figure in on_one_scale(figures)]
    assert [layout["coloraxis"]["cmax"] for layout in alike] == [3, 3]
    assert [layout["coloraxis2"]["cmax"] for layout in alike] == [1, 1]
    assert [layout["height"] for layout in alike] == [1, 3]
    assert figures[0]["layout"]["coloraxis"]["cmax"] == 1  # they are copies


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ((0.12345, 0.12, 0.13), "0.123 [0.120, 0.130]"),
        ((0.00402, 0.00381, 0.00424), "0.00402 [0.00381, 0.00424]"),
        ((3.0, -5.0, 12.0), "3 [-5, 12]"),
        ((8.3178, 8.3178, 8.3178), "8.32"),
        ((0.5, np.nan, np.nan), "0.500"),
        ((np.nan, np.nan, np.nan), "-"),
        ((0.0, 0.0, 0.0), "0.000"),
        ((1234.5, 1200.0, 1300.0), "1,234 [1,200, 1,300]"),
    ],
)
def test_numbers_have_the_digits_that_their_interval_has(
    given: tuple[float, float, float], shown: str
) -> None:
    assert with_interval(*given) == shown


def test_signs_and_percent() -> None:
    assert number(0.25, signed=True) == "+0.250"
    assert number(-0.0001, decimals=2) == number(0.0001, decimals=2, signed=True) == "0.00"
    assert with_interval(0.25, 0.2, 0.31, percent=True) == "25 % [20, 31]"


def test_only_this_machine_and_only_with_the_token(runs: list[RunFile]) -> None:
    assert is_local("127.0.0.1") and is_local("localhost") and is_local("::1")
    assert not is_local("0.0.0.0") and not is_local("example.org")
    app = make_app(runs)
    guard(app.server, port=1, token=None)
    client = app.server.test_client()
    assert client.get("/", headers={"Host": "127.0.0.1:1"}).status_code == 200
    assert client.get("/", headers={"Host": "[::1]:1"}).status_code == 200
    assert client.get("/", headers={"Host": "evil.example"}).status_code == 403
    app = make_app(runs)
    guard(app.server, port=1, token="secret")
    for path in (
        "/",
        "/loss",
        "/_dash-layout",
        "/_dash-dependencies",
        "/viewer/runs",
        "/assets/app.css",
    ):
        assert app.server.test_client().get(path).status_code == 403
        assert app.server.test_client().get(f"{path}?token=wrong").status_code == 403
    assert app.server.test_client().post("/_dash-update-component", json={}).status_code == 403
    client = app.server.test_client()
    answer = client.get("/loss?run=1&token=secret")
    assert (answer.status_code, answer.headers["Location"]) == (302, "/loss?run=1")
    assert (
        "HttpOnly" in answer.headers["Set-Cookie"]
        and "SameSite=Strict" in answer.headers["Set-Cookie"]
    )
    assert client.get("/loss").status_code == client.get("/_dash-layout").status_code == 200


def test_a_busy_port_is_a_sentence(probe: Callable[..., Any], looped_run: Path) -> None:
    with bind("127.0.0.1", 0) as taken:
        done = probe("view", looped_run, "--port", taken.getsockname()[1])
    assert done.code == 2 and done.err.count("\n") == 1
    assert "cannot be listened on (Address already in use); choose another --port" in done.err


def test_runs_of_one_file_name_are_told_apart(
    looped_run: Path, unlooped_run: Path, tmp_path: Path
) -> None:
    given = ["seed1/run.h5", "seed2/run.h5", "other.h5", "deep/seed2/run.h5"]
    names = ["seed1/run.h5", f"{tmp_path.name}/seed2/run.h5", "other.h5", "deep/seed2/run.h5"]
    assert distinct_names([tmp_path / path for path in given]) == names
    assert distinct_names([Path("run.h5"), Path("run.h5")]) == ["run.h5"] * 2
    for folder, file in (("seed1", looped_run), ("seed2", unlooped_run)):
        (tmp_path / folder).mkdir()
        shutil.copy(file, tmp_path / folder / "run.h5")
    runs = run_files_of([tmp_path / "seed1/run.h5", tmp_path / "seed2/run.h5"])
    assert [run.label.partition(" ")[0] for run in runs] == ["seed1/run.h5", "seed2/run.h5"]


@pytest.mark.parametrize("content", [b"", b"no HDF5", None])
def test_files_that_are_no_runs(
    content: bytes | None, probe: Callable[..., Any], tmp_path: Path
) -> None:
    file = tmp_path / "x.h5"
    if content is not None:
        file.write_bytes(content)
    for command in ("view", "report"):
        done = probe(command, file)
        assert done.code == 2 and str(file) in done.err and done.err.count("\n") == 1


def test_hosts_that_are_not_there() -> None:
    with pytest.raises(SmeltscopeError, match="cannot be listened on"):
        bind("192.0.2.1", 0)
    assert isinstance(flask.Flask("x"), flask.Flask)
