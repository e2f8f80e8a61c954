"""`--help` answers at once and says everything; a misspelt word gets a hint."""

import subprocess
import sys
from collections.abc import Iterator

import click
import pytest

from smeltscope import __version__, cli

GROUPS = {"probe": cli.probe, "smelt": cli.smelt}
HEAVY = ("torch", "numpy", "h5py", "transformers", "xarray", "plotly", "rich", "datasets")


def commands() -> Iterator[tuple[str, str]]:
    for name, group in GROUPS.items():
        for command in group.list_commands(click.Context(group)):
            yield name, command


def test_help_imports_nothing_heavy() -> None:
    """Also not for the help of a command, whose module is imported for it."""
    code = f"""
import sys
from smeltscope import cli
for group, command in {list(commands())}:
    cli.run(getattr(cli, group), ["--help"])
    cli.run(getattr(cli, group), [command, "--help"])
loaded = [name for name in {HEAVY} if name in sys.modules]
sys.exit(f"loaded: {{loaded}}" if loaded else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "attention-sink" in done.stdout


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_lists_its_commands(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(GROUPS[name], ["--help"]) == 0
    shown = capsys.readouterr().out
    group = GROUPS[name]
    for command in group.list_commands(click.Context(group)):
        assert command in shown
    assert cli.run(group, []) == 2  # nothing was asked for; the help is shown all the same
    assert "Commands" in capsys.readouterr().err


@pytest.mark.parametrize(("group", "name"), commands())
def test_every_option_is_explained(
    group: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = GROUPS[group].get_command(click.Context(GROUPS[group]), name)
    assert command is not None and command.help
    assert cli.run(GROUPS[group], [name, "--help"]) == 0
    shown = capsys.readouterr().out
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{name} {parameter.opts[0]} has no help text"
            for spelling in parameter.opts:
                assert spelling in shown
    assert cli.run(GROUPS[group], [name, "-h"]) == 0


@pytest.mark.parametrize(
    ("group", "args", "hint"),
    [
        ("probe", ["atention-sink"], "Did you mean 'attention-sink'?"),
        ("probe", ["xyz"], "There is: attention-sink"),
        ("probe", ["attention-sink", "--toknes", "5"], "--tokens"),
        ("smelt", ["trian"], "Did you mean 'train'?"),
    ],
)
def test_a_misspelt_word_gets_a_hint(
    group: str, args: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(GROUPS[group], args) == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize("name", GROUPS)
def test_version(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(GROUPS[name], ["--version"]) == 0
    assert capsys.readouterr().out == f"{name}, version {__version__}\n"


def test_python_m(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for args in ([], ["nonesuch"], ["--help"]):
        monkeypatch.setattr(sys, "argv", ["smeltscope", *args])
        assert cli.main() == (0 if args == ["--help"] else 2)
        captured = capsys.readouterr()
        assert "python -m smeltscope {probe|smelt}" in captured.out + captured.err
    monkeypatch.setattr(sys, "argv", ["smeltscope", "probe", "--version"])
    assert cli.main() == 0


def test_who_looks_at_finished_runs_does_not_wait_for_transformers() -> None:
    """Their numbers, tables, figures and pages need no model: loading what runs one takes longer than all of them."""
    modules = (
        "smeltscope.commands.show",
        "smeltscope.commands.compare",
        "smeltscope.dashboards.app",
    )
    loads = "; ".join(f"import {module}" for module in (*modules, "smeltscope.probes.compare"))
    probes = "from smeltscope.registry import ALL_PROBES, make_probe; [make_probe(p) for p in ALL_PROBES]"
    tells = "import sys; print([m for m in ('transformers', 'sklearn', 'scipy.stats') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", f"{loads}; {probes}; {tells}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_an_unexpected_error_is_a_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @click.command()
    def fails() -> None:
        raise ValueError("first line\nsecond line")

    monkeypatch.setattr(cli.LazyGroup, "get_command", lambda *_: fails)
    assert cli.run(cli.probe, ["attention-sink"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("Error: Unexpected ValueError: first line")
    assert "Traceback" not in shown
    assert cli.run(cli.probe, ["attention-sink", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err
