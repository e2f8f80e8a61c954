"""The docs keep up with the code: options, links."""

import re
from pathlib import Path

import click
import pytest

from smeltscope.cli import PROBE_COMMANDS, SMELT_COMMANDS, probe, smelt

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize(
    ("group", "name"),
    [(probe, n) for n in PROBE_COMMANDS] + [(smelt, n) for n in SMELT_COMMANDS],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_option_is_in_the_docs(group: click.Group, name: str) -> None:
    command = group.get_command(click.Context(group), name)
    assert command is not None
    text = "\n".join(page.read_text() for page in PAGES)
    options = [o for p in command.params if isinstance(p, click.Option) for o in p.opts]
    missing = [o for o in options if o.startswith("--") and o not in text and o != "--help"]
    assert missing == []
