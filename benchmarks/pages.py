"""How fast pages are: `probe view` and `probe report` in a Chromium, through the real command.

    python benchmarks/pages.py                    a table on stdout, for docs/benchmarks.md
    python benchmarks/pages.py --runs A.h5 B.h5   over runs that are there, the last one with prompts kept whole

Without runs it makes two with smelt-tiny. The run of 1M tokens is the first one with its rows repeated: as many rows as a run
over that much text has. Each page is opened in a fresh browser once, then three times; the median of these is shown.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlencode

import h5py
import numpy as np

import smeltscope
from smeltscope.dashboards.browser import FLAGS, find_browser
from smeltscope.model import load_checkpoint

TOKENS = 50_000
LONG = 512  # tokens of the longest prompt
LARGE = 1_000_000
REPEATS = 3
PROBE = [sys.executable, "-m", "smeltscope", "probe"]
DRAWN = {"run": 1, "shots": 32, "types": 4, "seed": 0}
# Draws a prompt, and gives the milliseconds that running it takes.
LIVE = """async drawn => {
    const ask = async (path, body) => {
        const options = {method: 'POST', body: JSON.stringify(body), headers: {'Content-Type': 'application/json'}};
        const answer = await fetch(`/viewer/${path}`, options);
        if (!answer.ok) throw new Error(await answer.text());
        return answer.json();
    };
    const {text} = await ask('draw', drawn);
    const began = performance.now();
    await ask('live', {run: drawn.run, text});
    return performance.now() - began;
}"""
# Chooses a head, waits until its numbers are shown and painted, and gives the milliseconds.
SWITCH = """async cell => {
    const shown = document.querySelector('.sv').dataset, wanted = `${cell.dataset.layer}.${cell.dataset.head}`;
    const frame = () => new Promise(requestAnimationFrame);
    const began = performance.now();
    cell.click();
    while (shown.shown !== wanted) await frame();
    await frame();
    return performance.now() - began;
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", nargs=2, type=Path, metavar=("TEXT.h5", "DYCK.h5"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text, dyck = given.runs or make_runs(Path(folder))
        large = Path(folder) / "large.h5"
        tokens = repeat_rows(text, large, LARGE)
        with serving(large) as address, browser() as page:
            for name, path, first in (
                ("overview", "", "main section table"),
                ("attention-sink", "attention-sink", "#shown .main-svg"),
            ):
                show(f"{name} of {tokens:,} tokens, page there", opened(page, address + path, "h1"))
                began = time.perf_counter()
                page.wait_for_selector(first)
                show("its first numbers or figure after that", time.perf_counter() - began)
        with serving(text, dyck) as address, browser() as page:
            show_all(page_rows(page, address))
            show_all(viewer_rows(page, address))
        show_all(report_rows(Path(folder), text, dyck))
        show_all(large_viewer_rows(Path(folder)))


def show_all(rows: Iterable[tuple[str, str]]) -> None:
    for what, figure in rows:
        print(f"| {what} | {figure} |", flush=True)


def show(what: str, seconds: float) -> None:
    show_all([(what, f"{seconds:.2f} s")])


def make_runs(folder: Path) -> tuple[Path, Path]:
    """A run of every diagnostic of text, and one of prompts."""
    text, dyck = folder / "text.h5", folder / "dyck.h5"
    command = [*PROBE, "batch", "--tokens", str(TOKENS), "--out", str(text), "-q"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    checkpoint = load_checkpoint("smelt-tiny")
    checkpoint.model.config.max_position_embeddings = (
        LONG  # where it was trained on less, no matter
    )
    for part in (checkpoint.model, checkpoint.tokenizer):
        part.save_pretrained(folder / "long")
    asked = {"items": 10, "shots": (0, 1, 2), "seeds": 1, "nested": 8}
    smeltscope.dyck(folder / "long", **asked, out=dyck, quiet=True)
    return text, dyck


def repeat_rows(source: Path, target: Path, tokens: int) -> int:
    """A run file with the rows of another repeated, each time as other documents; how many tokens it has."""
    with h5py.File(source) as old, h5py.File(target, "w") as new:
        times = -(-tokens // int(old["segments/tokens"][...].sum()))
        new.attrs.update(old.attrs)
        dims: dict[str, list[str]] = {}

        def copy(name: str, node: Any) -> None:
            if isinstance(node, h5py.Group):
                new.require_group(name).attrs.update(node.attrs)
                return
            names = [name] if node.is_scale else [dim.keys()[0] for dim in node.dims]
            values = node[...]
            if names[:1] == ["segment"]:
                rows = len(values)
                values = np.concatenate([values] * times)
                if name == "segment":
                    values = np.arange(len(values), dtype=values.dtype)
                if name == "segments/document":
                    documents = int(values.max()) + 1
                    values = values + documents * np.repeat(np.arange(times), rows)
            packing = {"shuffle": True, "compression": "gzip", "compression_opts": 1}
            made = new.create_dataset(
                name, data=values, dtype=node.dtype, **(packing if values.ndim else {})
            )
            made.attrs.update(
                {k: v for k, v in node.attrs.items() if k in ("description", "units")}
            )
            if node.is_scale:
                made.make_scale(name)
            else:
                dims[name] = names

        old.visititems(copy)
        for name, names in dims.items():
            for axis, dim in enumerate(names):
                new[name].dims[axis].attach_scale(new[dim])
        return int(new["segments/tokens"][...].sum())


@contextmanager
def serving(*runs: Path) -> Iterator[str]:
    """The address of `probe view`."""
    command = [*PROBE, "view", *map(str, runs), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


@contextmanager
def browser() -> Iterator[Any]:
    """A page of a fresh browser."""
    from playwright.sync_api import sync_playwright

    flags = list(FLAGS)
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as profile:
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path=find_browser(), headless=True, args=[*flags, "--no-sandbox"]
        )
        page = context.new_page()
        page.set_default_timeout(120_000)
        page.set_viewport_size({"width": 1440, "height": 900})
        yield page
        context.close()


def opened(page: Any, address: str, there: str) -> float:
    """Seconds until something of a page is there."""
    page.goto("about:blank")
    began = time.perf_counter()
    page.goto(address)
    page.wait_for_selector(there)
    return time.perf_counter() - began


def timed(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def page_rows(page: Any, address: str) -> Iterator[tuple[str, str]]:
    """Pages of a run over text: when they are there, and when their first figure is drawn."""
    for name, there in (
        ("", "main section table"),
        ("attention-sink", "#shown .main-svg"),
        ("residual-updates", "#shown .main-svg"),
    ):
        cold = opened(page, address + name, there)
        warm = median(opened(page, address + name, there) for _ in range(REPEATS))
        yield f"{name or 'overview'}: first time, again", f"{cold:.2f} s, {warm:.2f} s"


def viewer_rows(page: Any, address: str) -> Iterator[tuple[str, str]]:
    """The viewer: opening, another head, a prompt run live."""
    drawn = page.request.post(f"{address}viewer/draw", data=DRAWN)
    asked = urlencode({"run": 1, "prompt": drawn.json()["text"]})
    seconds = opened(page, f"{address}viewer?{asked}", "#viewer .sv[data-shown]")
    tokens = page.locator("#viewer [data-token]").count()
    yield f"viewer runs and shows a prompt of {tokens} tokens", f"{seconds:.2f} s"
    page.wait_for_timeout(2000)
    heads = page.locator("#viewer .sv-cell").all()
    times = [cell.evaluate(SWITCH) for cell in heads[1:9]]
    yield "viewer: another head, median and longest", f"{median(times):.0f} ms, {max(times):.0f} ms"
    for shots in (4, 32):
        found = [
            page.evaluate(LIVE, {"run": 1, "shots": shots, "types": 4, "seed": i}) for i in range(5)
        ]
        yield f"live prompt of {shots} shots, round trip", f"{median(found):.0f} ms"


def large_viewer_rows(folder: Path) -> Iterator[tuple[str, str]]:
    """The viewer with a prompt of some 2,000 tokens and 18 executions of 16 heads, of a model that learned nothing."""
    context, tokenizer = 2304, load_checkpoint("smelt-tiny").tokenizer
    model = smeltscope.tiny(
        "smelt",
        num_physical_layers=12,
        loop_start=3,
        loop_stop=9,
        hidden_size=128,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=len(tokenizer),
        max_position_embeddings=context,
    )
    for part in (model, tokenizer):
        part.save_pretrained(folder / "large")
    run = folder / "large-dyck.h5"
    asked = {"items": 2, "shots": (0,), "seeds": 1, "nested": 0}
    smeltscope.dyck(folder / "large", **asked, out=run, quiet=True)
    with serving(run) as address, browser() as page:
        drawn = page.request.post(f"{address}viewer/draw", data={**DRAWN, "run": 0}).json()["text"]
        head, *demonstrations, query = drawn.split("\n\n")
        text = drawn
        while len(tokenizer(text)["input_ids"]) < 2000:
            head = f"{head}\n\n{demonstrations[0]}"
            text = "\n\n".join([head, *demonstrations, query])
        page.goto(f"{address}viewer?run=0")
        page.wait_for_selector(".sv[data-shown]")
        page.keyboard.press("e")
        page.get_by_label("Prompt to run").fill(text)
        began = time.perf_counter()
        page.get_by_label("Prompt to run").press("Control+Enter")
        page.wait_for_function("document.querySelectorAll('[data-token]').length > 1000")
        seconds, tokens = time.perf_counter() - began, page.locator("[data-token]").count()
        what = f"viewer runs and shows a prompt of {tokens:,} tokens, 18 executions of 16 heads"
        yield what, f"{seconds:.1f} s"
        page.wait_for_timeout(3000)
        times = [cell.evaluate(SWITCH) for cell in page.locator(".sv-cell").all()[1:9]]
        yield (
            "of that prompt another head, median and longest",
            f"{median(times):.0f} ms, {max(times):.0f} ms",
        )


def report_rows(folder: Path, *runs: Path) -> Iterator[tuple[str, str]]:
    """The report: making it, its size, when a browser shows it and its first figure."""
    out = folder / "report.html"
    command = [*PROBE, "report", *map(str, runs), "--out", str(out), "-q"]
    yield "report made", f"{timed(lambda: subprocess.run(command, check=True)):.1f} s"
    yield "report's size", f"{out.stat().st_size / 1e6:.2f} MB"
    figures = len(re.findall("data-figure=", out.read_text()))
    with browser() as page:
        text = opened(page, out.as_uri(), "h1")
        drawn = opened(page, out.as_uri(), "[data-drawn] .main-svg")
        yield f"report opens: text, first of {figures} figures", f"{text:.2f} s, {drawn:.2f} s"


if __name__ == "__main__":
    main()
