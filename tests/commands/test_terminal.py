"""Numbers in words of a few characters, and progress on a terminal, in a notebook and in a log file."""

import io

import pytest
from rich.console import Console

from smeltscope.commands import terminal


@pytest.mark.parametrize(
    ("value", "shown", "signed"),
    [
        (0.0424, ".042", "+.042"),
        (-0.5, "-.500", "-.500"),
        (0, ".000", ".000"),
        (1e-9, ".000", ".000"),  # rounding, not a result
        (-1e-9, ".000", ".000"),
        (0.0004, "4e-4", "+4e-4"),
        (-0.00002, "-2e-5", "-2e-5"),
        (0.0005, ".001", "+.001"),
        (3.14159, "3.142", "+3.142"),
        (31.4159, "31.4", "+31.4"),
        (314.159, "314", "+314"),
        (31415.9, "31416", "+31416"),
        (float("nan"), "-", "-"),
        (float("inf"), "inf", "+inf"),
    ],
)
def test_numbers(value: float, shown: str, signed: str) -> None:
    assert terminal.number(value) == shown
    assert terminal.number(value, signed=True) == signed


def test_intervals() -> None:
    assert terminal.with_interval(0.2, 0.1, 0.3) == ".200 [.100,.300]"
    assert terminal.with_interval(-0.2, -0.3, 0.1, signed=True) == "-.200 [-.300,+.100]"
    nan = float("nan")
    assert terminal.with_interval(0.2, nan, nan) == ".200"
    assert terminal.counted(1, "document") == "1 document"
    assert terminal.counted(1200, "document") == "1,200 documents"


def test_a_bar_with_headline_numbers() -> None:
    screen = io.StringIO()
    log = Console(file=screen, force_terminal=True, width=100, markup=False)
    with terminal.progress(log) as update:
        for done in (400, 800):
            update(done, 1000, {"sink at visit 1": 0.0424, "overlap [of 8]": 3.2})
    text = screen.getvalue()
    assert "80 %" in text and "800 tokens" in text
    assert "sink at visit 1 .042, overlap [of 8] 3.200" in text


def test_lines_in_a_log_file(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 10.0, 20.0, 41.0, 50.0])
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(now))
    file = io.StringIO()
    with terminal.progress(Console(file=file, width=60)) as update:
        update(1000, 9000, {})  # was done before this process
        update(2000, 9000, {"loss": 3.0})
        update(5100, 9000, {"loss": 2.5})
        update(6000, 9000, {"loss": 2.5})
    assert file.getvalue() == "57%, 5,100 tokens, 100 tokens/s, 39 s left; loss 2.500\n"


def test_a_bar_in_a_notebook(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = Console()
    monkeypatch.setattr(log, "is_jupyter", True)
    with terminal.progress(log) as update:
        update(500, 1000, {"loss": 2.5})
        update(1000, 1000, {"loss": 2.25})
    shown = capsys.readouterr().err
    assert "100%" in shown and "loss 2.250" in shown


@pytest.mark.parametrize(("rank", "says"), [("0", True), ("1", False)])
def test_one_worker_speaks(monkeypatch: pytest.MonkeyPatch, rank: str, says: bool) -> None:
    monkeypatch.setenv("RANK", rank)
    assert terminal.is_first_worker() == says
    assert terminal.make_log(quiet=False).quiet != says


def test_nothing_when_quiet() -> None:
    file = io.StringIO()
    log = Console(file=file, force_terminal=True, quiet=True)
    with terminal.progress(log) as update:
        update(5, 10, {"loss": 1.0})
    assert file.getvalue() == ""


def test_nan_is_null() -> None:
    import xarray as xr

    summary = xr.Dataset({"x": ("layer", [1.0, float("nan")])}, coords={"layer": [0, 3]})
    assert terminal.as_json(summary.assign_attrs(probe="p")) == {
        "attributes": {"probe": "p"},
        "coordinates": {"layer": [0, 3]},
        "values": {"x": {"dims": ["layer"], "data": [1.0, None]}},
    }
