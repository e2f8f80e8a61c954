"""Summaries made of chosen numbers, so that figures are tested without a model, and a browser for pages."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

import smeltscope
from smeltscope.dashboards.browser import FLAGS, find_browser

EVIL = "<script>document.title = 'broken'</script>"


def summary_of(
    layers: int, heads: int, visits: int, *, intervals: bool = True, value: float | None = None
) -> xr.Dataset:
    """A summary as `summarize` gives it: the middle half of the layers is looped, `value` for all masses."""
    start, stop = (layers - layers // 2) // 2, (layers - layers // 2) // 2 + layers // 2
    order = [(layer, 1) for layer in range(start)]
    order += [(layer, visit) for visit in range(1, visits + 1) for layer in range(start, stop)]
    order += [(layer, 1) for layer in range(stop, layers)]
    layer, visit = np.array(order).T
    rng = np.random.default_rng(0)
    mass = rng.uniform(0.1, 0.6, (len(order), heads)) / visit[:, None]
    mass = mass if value is None else np.full_like(mass, value)
    first = {layer: e for e, (layer, number) in enumerate(order) if number == 1}
    change = np.where((visit > 1)[:, None], mass - mass[[first[i] for i in layer]], np.nan)
    position = np.array([0, 1, 2, 4, 8, 16, 32, 64, 128])
    uniform = np.array([np.nan, *1.0 / (position[1:] * 1.5)])  # query 0 is not counted
    uniform = uniform + np.zeros((len(order), 1))
    values = {
        "sink_mass": (("execution", "head"), mass),
        "change": (("execution", "head"), change),
        "sink_mass_mean": (("execution",), mass.mean(1)),
        "uniform": (("execution",), np.full(len(order), 0.05)),
        "sink_mass_by_position": (("execution", "position"), uniform * 2),
        "uniform_by_position": (("execution", "position"), uniform),
    }
    looped = np.isin(layer, layer[visit > 1]) | (visits == 1)
    for number in range(1, visits + 1):
        of_visit = uniform[looped & (visit == number)] * 2
        values[f"sink_mass_by_position_visit_{number}"] = (("position",), of_visit.mean(0))
    margin = 0.01 if intervals else np.nan
    arrays = {}
    for name, (dims, numbers) in values.items():
        arrays |= {name: (dims, numbers), f"{name}_low": (dims, numbers - margin)}
        arrays[f"{name}_high"] = (dims, numbers + margin)
    coords = {
        "execution": np.arange(len(order)),
        "layer": ("execution", layer),
        "visit": ("execution", visit),
        "position": position,
    }
    return xr.Dataset(arrays, coords=coords, attrs={"documents": 12})


@pytest.fixture(scope="session")
def make_summary() -> Callable[..., xr.Dataset]:
    return summary_of


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A real browser without a window. Nothing is downloaded: one has to be installed."""
    found = find_browser()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        found = None
    if found is None:
        message = "page tests need playwright and Chromium: pip install playwright, apt-get install chromium"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(message)
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("browser"),
            executable_path=found,
            headless=True,
            args=["--no-sandbox", *FLAGS],
        )
        yield context
        context.close()


@pytest.fixture(scope="session")
def looped_run(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a looped model over text of two categories, one of which is code. Don't write into it."""
    return _run(tiny_checkpoint, tmp_path_factory.mktemp("runs") / "loop.h5")


@pytest.fixture(scope="session")
def unlooped_run(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model without its loop over the same text. Don't write into it."""
    return _run(tiny_checkpoint, tmp_path_factory.mktemp("runs") / "base.h5", visits=1)


def _run(checkpoint: Path, out: Path, **loading: Any) -> Path:
    rows = [
        {
            "text": f"{i} is a number. " * (4 + i % 3),
            "category": EVIL if i % 2 else "prose",
            "id": EVIL + str(i),
        }
        for i in range(8)
    ]
    text = out.with_name("text.jsonl")
    text.write_text("\n".join(map(json.dumps, rows)))
    smeltscope.probe(
        checkpoint,
        text,
        ["attention-sink", "router-overlap", "loss"],
        out=out,
        quiet=True,
        **loading,
    )
    return out
