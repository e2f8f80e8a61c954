"""What docs/budgets.md shows of `smelt info` and `smelt match` is what they print."""

import re
import shlex
from pathlib import Path

import pytest

from smeltscope.cli import run, smelt

PAGE = Path(__file__).parents[2] / "docs" / "budgets.md"
SHOWN = re.findall(r"^```\n\$ smelt (.+)\n((?:.+\n)+)```$", PAGE.read_text(), flags=re.MULTILINE)


def test_both_commands_are_shown() -> None:
    assert {command.split()[0] for command, _ in SHOWN} == {"info", "match"}


@pytest.mark.parametrize(("command", "shown"), SHOWN, ids=[command for command, _ in SHOWN])
def test_a_command_prints_what_the_page_shows(
    command: str,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where a shipped checkpoint has changed, run the command again and put what it prints on the page."""
    monkeypatch.setenv("COLUMNS", "80")
    assert run(smelt, shlex.split(command)) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert printed == [line.rstrip() for line in shown.splitlines()]
