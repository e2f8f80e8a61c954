"""A page on paper or as a picture, through a Chromium that is there."""

import math
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from smeltscope.errors import SmeltscopeError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PRINTING = (
    "--headless",
    "--hide-scrollbars",
    "--virtual-time-budget=30000",  # until all figures are drawn
)
MOST_PIXELS = 16_000  # of a picture's height; a browser draws no more
PATIENCE = 300  # seconds


def find_browser() -> str | None:
    """A Chromium or Chrome of this machine."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def check_browser() -> str:
    """A Chromium or Chrome of this machine; refused in a sentence where there is none."""
    found = find_browser()
    if found is None:
        raise SmeltscopeError(
            "PDF and PNG are made by Chromium or Chrome, and none is installed (Debian: apt-get install chromium); "
            "without one print the report from any browser."
        )
    return found


def write_pdf(page: Path, out: Path) -> Path:
    """A report as PDF."""
    return _made(page, out, "--no-pdf-header-footer", "--print-to-pdf={}")


def write_png(page: Path, out: Path) -> Path:
    """A report as one picture; a long one in several columns."""
    columns = math.ceil(_height(page, 1) / MOST_PIXELS)
    height = _height(page, columns)
    scale = min(1, MOST_PIXELS / height)  # columns are not all of one length
    size = (f"--window-size={_width(columns)},{height}", f"--force-device-scale-factor={scale:.4f}")
    return _made(page, out, *size, "--screenshot={}", columns=columns)


def _height(page: Path, columns: int) -> int:
    """Pixels that a report needs in so many columns."""
    said = _run(page, f"--window-size={_width(columns)},1000", "--dump-dom", columns=columns)
    found = re.search(r'data-height="(\d+)"', said)
    if found is None:
        raise SmeltscopeError(f"The browser did not draw {page}; open it to see why.")
    return int(found[1]) + 40


def _width(columns: int) -> int:
    return 740 * columns + 40


def _made(page: Path, out: Path, *flags: str, columns: int = 1) -> Path:
    """What the browser writes, in its place when it is whole."""
    with tempfile.TemporaryDirectory(dir=out.resolve().parent) as folder:
        new = Path(folder) / out.name
        said = _run(page, *(flag.format(new) for flag in flags), columns=columns)
        if not new.is_file():
            raise SmeltscopeError(
                f"The browser wrote no {out}: {said.strip()[-300:] or 'no reason'}."
            )
        os.replace(new, out)
    return out


def _run(page: Path, *flags: str, columns: int = 1) -> str:
    root = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has no sandbox for root
    with tempfile.TemporaryDirectory() as profile:
        command = [check_browser(), *FLAGS, *PRINTING, *root, f"--user-data-dir={profile}", *flags]
        try:
            done = subprocess.run(
                [*command, f"{page.resolve().as_uri()}#print-{columns}"],
                capture_output=True,
                text=True,
                timeout=PATIENCE,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise SmeltscopeError(
                f"The browser took more than {PATIENCE} s for {page}: make the report of fewer runs, or print that page."
            ) from error
    return done.stdout or done.stderr
