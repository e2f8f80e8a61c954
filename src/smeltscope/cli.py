"""The command line: `probe` looks into a model, `smelt` makes one.

Commands are imported when they are run: torch takes seconds to load, and `--help` must answer at once.
"""

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence

import click

from smeltscope.errors import SmeltscopeError
from smeltscope.registry import PROBES

# name: (where the click command is, or what makes it from its name; its line in --help)
PROBE_COMMANDS = {
    **{
        name: ("smeltscope.commands.diagnostic:diagnostic", line)
        for name, (_, line) in PROBES.items()
    },
    "batch": (
        "smeltscope.commands.batch:batch",
        "Every diagnostic in one pass over the text; resumes.",
    ),
    "dyck": (
        "smeltscope.commands.dyck:dyck",
        "Brackets to close: accuracy by shots, the head that matters, where it looks.",
    ),
    "dyck-state": (
        "smeltscope.commands.dyck_state:dyck_state",
        "What of the brackets' state the residual stream holds at each execution.",
    ),
    "show": (
        "smeltscope.commands.show:show",
        "The tables of a run file again, or its numbers as CSV.",
    ),
    "compare": (
        "smeltscope.commands.compare:compare",
        "Two runs over the same text: paired differences.",
    ),
    "view": (
        "smeltscope.commands.view:view",
        "Runs as pages in a browser: figures, numbers, prompts.",
    ),
    "report": (
        "smeltscope.commands.report:report",
        "Runs as one HTML file that needs no server.",
    ),
    "trajectory": (
        "smeltscope.commands.trajectory:trajectory",
        "The diagnostics of many checkpoints of one training.",
    ),
    "dump": ("smeltscope.commands.dump:dump", "Write activations of chosen sites to HDF5."),
    "list": (
        "smeltscope.commands.list:list_all",
        "The shipped checkpoints, the controls and the probes.",
    ),
}
SMELT_COMMANDS = {
    "train": ("smeltscope.commands.train:train", "Train a model as a recipe file says; resumes."),
    "info": (
        "smeltscope.commands.info:info",
        "What a configuration costs: parameters, FLOPs, KV cache; how sparse it is.",
    ),
    "match": (
        "smeltscope.commands.match:match",
        "Looped configurations on the three budgets of a Baseline.",
    ),
}


class LazyGroup(click.Group):
    """A group that knows its commands by name and imports one when it is needed."""

    def __init__(self, *, lazy: dict[str, tuple[str, str]], **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        self.lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lazy:
            return None
        module, attribute = self.lazy[cmd_name][0].split(":")
        found = getattr(importlib.import_module(module), attribute)
        command = found if isinstance(found, click.Command) else found(cmd_name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in self.lazy:
            close = difflib.get_close_matches(args[0], self.lazy, n=1)
            hint = (
                f" Did you mean {close[0]!r}?" if close else f" There is: {', '.join(self.lazy)}."
            )
            raise click.UsageError(f"No command is called {args[0]!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help) for name, (_, help) in self.lazy.items()])


def _group(name: str, help: str, lazy: dict[str, tuple[str, str]]) -> LazyGroup:
    debug = click.Option(
        ["--debug"], is_flag=True, expose_value=False, help="Show the traceback of an error."
    )
    group = LazyGroup(
        name=name,
        help=help,
        lazy=lazy,
        params=[debug],
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    return click.version_option(package_name="smeltscope", prog_name=name)(group)


probe = _group("probe", "See what the second visit of a looped transformer does.", PROBE_COMMANDS)
smelt = _group("smelt", "Make the models that probe looks into.", SMELT_COMMANDS)


def probe_main() -> int:
    """The `probe` script."""
    return run(probe, sys.argv[1:])


def smelt_main() -> int:
    """The `smelt` script."""
    return run(smelt, sys.argv[1:])


def main() -> int:
    """`python -m smeltscope probe ...` and `python -m smeltscope smelt ...`."""
    groups = {"probe": probe, "smelt": smelt}
    usage = "Usage: python -m smeltscope {probe|smelt} ..."
    if sys.argv[1:2] in (["-h"], ["--help"]):
        click.echo(usage)
        return 0
    if len(sys.argv) < 2 or sys.argv[1] not in groups:
        click.echo(usage, err=True)
        return 2
    return run(groups[sys.argv[1]], sys.argv[2:])


def run(group: click.Group, args: Sequence[str]) -> int:
    """Run a command; 0, or 2 for a named error, 1 for an unexpected one, 130 when interrupted."""
    debug = "--debug" in args
    args = [arg for arg in args if arg != "--debug"]
    try:
        result = group.main(args, prog_name=group.name, standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except click.ClickException as error:
        error.show()
        return 2
    except SmeltscopeError as error:
        _say(str(error), debug)
        return 2
    except (KeyboardInterrupt, click.Abort):
        click.echo("Interrupted; the same command goes on where this one stopped.", err=True)
        return 130
    except SystemExit:  # how click and rich end when a pipe is closed, `probe ... | head`
        return 0
    except BrokenPipeError:  # the same, with what was not written yet
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at its exit
        return 0
    except Exception as error:  # noqa: BLE001  # the last resort: a sentence all the same
        _say(f"Unexpected {type(error).__name__}: {error} (--debug shows where)", debug)
        return 1


def _say(message: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    click.echo(f"Error: {message}", err=True)
