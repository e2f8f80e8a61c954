"""`probe dyck`: prompts of brackets to close: how many are answered, which head the answers need, where it looks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from smeltscope.commands import running, tables, terminal
from smeltscope.commands.options import (
    Decorator,
    batch_tokens_option,
    load_model,
    model_options,
    output_options,
    together,
)
from smeltscope.errors import SmeltscopeError
from smeltscope.registry import make_probe

if TYPE_CHECKING:
    from rich.console import Console

    from smeltscope.model import Checkpoint
    from smeltscope.probes import Probe, RunOptions
    from smeltscope.tasks import HeldOut
    from smeltscope.tasks.dyck.items import ItemSet
    from smeltscope.tasks.dyck.prompts import Kind

NESTED_SHOTS = (1, 2, 4, 8)
FEWEST_NESTED = 4  # two in each half, of which one stands in for the other
MANY = 1_000  # prompts that take long to make
_OF_RUNS = (  # options that --prompt has no use for
    "data", "items", "shots", "seeds", "pairing", "reveal", "baseline", "nested", "ablation", "examples", "batch_tokens",
    "seed", "force",
)  # fmt: skip


class Numbers(click.ParamType):
    """Whole numbers with commas between: 0,1,2,4."""

    name = "numbers"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            found = tuple(sorted({int(part) for part in str(value).split(",")}))
        except ValueError:
            found = (-1,)
        if found[0] < 0:
            self.fail(f"{value!r} is no list of shots; write 0,1,2,4.", param, ctx)
        return found


class Examples(click.ParamType):
    """A number of prompts, or names of items with commas between."""

    name = "examples"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | tuple[str, ...]:
        if isinstance(value, int | tuple):
            return value
        names = tuple(name.strip() for name in str(value).split(",") if name.strip())
        return int(names[0]) if len(names) == 1 and names[0].isdecimal() else names


def make_prompt_options(*, items: str, shots: str, seeds: int) -> Decorator:
    """Which prompts, with these defaults."""
    return together(
        click.option(
            "--data", type=click.Path(path_type=Path), metavar="FILE",
            help="Items to ask: .jsonl, .json or a datasets folder with inputs and answers, as BIG-bench has them. "
            "[default: generated]",
        ),
        click.option(
            "--items", type=click.IntRange(1), metavar="N",
            help=f"How many items are asked. [default: {items} generated ones, all of a file]",
        ),
        click.option(
            "--shots", type=Numbers(), default=shots, show_default=True, metavar="K,K",
            help="Numbers of demonstrations in a prompt.",
        ),
        click.option(
            "--seeds", type=click.IntRange(1), default=seeds, show_default=True, metavar="N",
            help="How often the demonstrations are drawn anew.",
        ),
        click.option(
            "--pairing", type=click.Choice(["usual", "in-context"]), default="usual", show_default=True,
            help="Brackets close as usual, or as a map drawn for each prompt that its demonstrations show.",
        ),
        click.option(
            "--reveal", type=click.Choice(["answers", "inputs", "both"]),
            help="Where the demonstrations show what the answer needs. [default: answers if in-context, else both]",
        ),
        click.option(
            "--template", default="bigbench", show_default=True, metavar="NAME|FILE",
            help="The layout of prompts: bigbench, dclm, or a small TOML file.",
        ),
    )  # fmt: skip


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@model_options
@make_prompt_options(items="100", shots="0,1,2,4,8,16,32", seeds=10)
@click.option(
    "--baseline", metavar="NAME",
    help="A checkpoint with the same tokenizer, asked the same prompts: paired differences.",
)  # fmt: skip
@click.option(
    "--nested", type=click.IntRange(0), default=32, show_default=True, metavar="N",
    help="Queries of the head search, each with 1, 2, 4 and 8 shots; 0 leaves search and map out.",
)  # fmt: skip
@click.option(
    "--ablation", type=click.Choice(["resample", "zero", "mean"]), default="resample",
    show_default=True, help="What takes the place of a head's output in the search: that of another prompt, nothing, or the mean over "
    "prompts and positions.",
)  # fmt: skip
@click.option(
    "--examples", type=Examples(), default=3, show_default=True, metavar="N|ITEM,ITEM",
    help="Prompts whose attention is kept whole, for looking at: so many nested ones, or those of items by name.",
)  # fmt: skip
@click.option("--prompt", metavar="TEXT", help='Show one prompt instead: "Input: ( [ \\nOutput:".')
@click.option(
    "--head", metavar="LAYER.HEAD", help="The head that --prompt shows. [default: see above]"
)
@batch_tokens_option
@output_options
def dyck(*, prompt: str | None, head: str | None, **given: Any) -> None:
    """Brackets to close, after demonstrations: accuracy, the head that matters, and where it looks at each visit.

    Scores by the number of shots, beside what chance and a perfect reader would reach; the looped head whose ablation
    costs most (the Dyck head), chosen on one half of the nested prompts and reported on the other; its attention by
    region of the prompt at each visit. Interrupted, the same command goes on.

    With --prompt: the prompt's regions, the answer, and where a head looks at each visit. The head is --head, else the Dyck head of --out, a
    run file, else the looped head whose attention changes most between visits.
    """
    if prompt is not None:
        from smeltscope.commands.dyck_prompt import show_prompt

        unused = [f"--{name.replace('_', '-')}" for name in _OF_RUNS if _is_given(name)]
        if unused:
            raise SmeltscopeError(
                f"--prompt shows one prompt and has no use for {', '.join(unused)}: leave that out."
            )
        show_prompt(prompt, head, **given)
        return
    if head is not None:
        raise SmeltscopeError("--head goes with --prompt; a run keeps all heads.")
    _run(given)


def _is_given(name: str) -> bool:
    """Whether an option of the command was typed."""
    source = click.get_current_context().get_parameter_source(name)
    return source is not click.core.ParameterSource.DEFAULT


def _run(given: dict[str, Any]) -> None:
    from smeltscope.activations import check_out

    out, force = running.out_file("dyck", **given), given["force"]
    beside = out.with_name(f"{out.stem}-baseline.h5")
    # Interrupted in the Baseline's run, the command finds its own finished.
    reuse = given["baseline"] is not None and not beside.exists() and not force
    if not reuse:
        check_out(out, force=force)
    log = terminal.make_log(quiet=given["quiet"])
    checkpoint, other = load_model(**given), None
    if given["baseline"] is not None:
        check_out(beside, force=force)
        as_trained = {"visits": None, "residual_scale": None, "untrained": False}
        other = load_model(**given | as_trained | {"ckpt": given["baseline"]})
    sets, heldout = make_prompts(checkpoint, log, **given)
    probes = probes_of_dyck(heldout, **given)
    if other and make_heldout(other, sets, given["template"]).digest != heldout.digest:
        raise SmeltscopeError(
            f"{other.name} does not see the same tokens in these prompts as {checkpoint.name}: a comparison "
            "needs a checkpoint with the same tokenizer and context."
        )
    given = given | {"log": log}
    measure_dyck(checkpoint, heldout, probes, **given | {"out": out, "reuse": reuse})
    if other is not None:
        log.print(f"Baseline: {given['baseline']}")
        shared = [probe for probe in probes if probe.name != "dyck-heads"]
        measure_dyck(other, heldout, shared, **given | {"out": beside})
    if not terminal.is_first_worker():
        return
    _report(probes, out, beside, given)
    log.print(f"Run file: {out}", soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Item sets that are asked alike: of one kind, with one seed, with each of these numbers of shots."""

    sets: list["ItemSet"]
    shots: Sequence[int]
    seed: int
    kind: "Kind"


def item_sets(
    *,
    data: Path | None,
    items: int | None,
    shots: Sequence[int],
    seeds: int,
    pairing: str,
    reveal: str | None,
    seed: int,
    nested: int = 0,
    generated: int = 100,
    **_: Any,
) -> list[Asked]:
    """What the options ask for: queries to score for each seed, then the nested ones."""
    from smeltscope.tasks import dyck

    if data is not None and (pairing != "usual" or reveal is not None):
        raise SmeltscopeError("--pairing and --reveal are for generated items; --data has its own.")
    if not shots:
        raise SmeltscopeError("There is no number of shots to ask for: give one, such as 0.")
    for name, value, least in (("items", items, 1), ("seeds", seeds, 1), ("nested", nested, 0)):
        if value is not None and value < least:
            raise SmeltscopeError(f"{name} must be {least} or more, not {value}.")
    if 0 < nested < FEWEST_NESTED:
        raise SmeltscopeError(
            f"nested must be {FEWEST_NESTED} or more, not {nested}: each half needs a prompt that stands in for another; 0 leaves "
            "search and map out."
        )
    found = None if data is None else dyck.read_items(data)
    reveal = reveal or ("answers" if pairing == "in-context" else "both")
    most, asked = max(shots), []
    for number in range(seeds):
        if found is None:
            sets = dyck.generate_sets(
                generated if items is None else items,
                most,
                seed + number,
                pairing=pairing,
                reveal=reveal,
            )
        else:
            sets = dyck.sets_of_items(found, most, seed + number)[:items]
        asked.append(Asked(sets=sets, shots=shots, seed=number, kind="scored"))
    if nested:
        sets = dyck.nested_sets(nested, max(NESTED_SHOTS), seed, pairing=pairing, reveal=reveal)
        asked.append(Asked(sets=sets, shots=NESTED_SHOTS, seed=0, kind="nested"))
    return asked


def make_prompts(
    checkpoint: "Checkpoint",
    log: "Console",
    *,
    template: str,
    examples: int | Sequence[str] = 0,
    **asked: Any,
) -> tuple[list[Asked], "HeldOut"]:
    """The item sets that the options ask for, and their prompts; the log says what is going on, and what they are."""
    from smeltscope.tasks import dyck

    dyck.read_template(template)  # what is wrong with it is told before the long part
    most = max(asked["shots"], default=0)
    if most > checkpoint.context:
        raise SmeltscopeError(
            f"A prompt of {most:,} shots does not fit into the {checkpoint.context} tokens of {checkpoint.name}: ask for "
            "fewer --shots."
        )
    with log.status("Drawing items"):
        sets = item_sets(**asked)
    if not isinstance(examples, int):
        _check_examples(examples, [s.query.name for part in sets for s in part.sets])
    number = sum(len(part.sets) * len(part.shots) for part in sets)
    if number >= MANY and not log.is_terminal:
        log.print(f"Making {number:,} prompts.")
    with log.status(f"Making {number:,} prompts"):
        heldout = make_heldout(checkpoint, sets, template)
    terminal.data(log, heldout)
    return sets, heldout


def _check_examples(asked: Sequence[str], items: Sequence[str]) -> None:
    unknown = sorted(set(asked) - set(items))
    if unknown:
        some = ", ".join(dict.fromkeys(items[:3]))
        raise SmeltscopeError(
            f"--examples {','.join(unknown)}: no prompt is of this item; items are called {some}, and so on."
        )


def make_heldout(checkpoint: "Checkpoint", asked: Sequence[Asked], template: str) -> "HeldOut":
    """The prompts of some item sets, for one checkpoint."""
    from smeltscope.probes.prompts import layout_of
    from smeltscope.tasks import dyck

    layout = layout_of(checkpoint, template)
    return dyck.join(
        [
            dyck.make_prompts(part.sets, shots=part.shots, seed=part.seed, kind=part.kind, **layout)
            for part in asked
        ]
    )


def probes_of_dyck(heldout: "HeldOut", *, nested: int, ablation: str, **_: Any) -> list["Probe"]:
    """Scores, and where there are nested prompts the search for heads and the map."""
    probes = [make_probe("dyck-scores")]
    if nested:
        probes.append(make_probe("dyck-heads", ablation=ablation, donors=heldout))
        probes.append(make_probe("dyck-map"))
    return probes


def measure_dyck(
    checkpoint: "Checkpoint",
    heldout: "HeldOut",
    probes: Sequence["Probe"],
    *,
    out: Path,
    log: "Console",
    examples: int | Sequence[str],
    force: bool,
    reuse: bool = False,
    **given: Any,
) -> None:
    """Run the probes over the prompts into `out`, with the whole attention of some beside."""
    from smeltscope.probes import run_probes
    from smeltscope.probes.patterns import patterns_of

    chosen = _examples(heldout, examples)
    beside = patterns_of(checkpoint, heldout, chosen) if chosen else None
    with terminal.progress(log) as on_progress:
        run_probes(
            checkpoint,
            heldout,
            probes,
            out,
            options_of_run(heldout, **given),
            force=force,
            reuse=reuse,
            beside=beside,
            on_progress=on_progress,
            on_note=lambda note: log.print(note, soft_wrap=True),
        )


def options_of_run(heldout: "HeldOut", *, batch_tokens: int, seed: int, **_: Any) -> "RunOptions":
    """How a run goes over prompts; the longest one always fits into a batch."""
    from smeltscope.probes import RunOptions

    longest = int(heldout.lengths.max())
    return RunOptions(max_length=longest, batch_tokens=max(batch_tokens, longest), seed=seed)


def _examples(heldout: "HeldOut", asked: int | Sequence[str]) -> list[int]:
    """Nested prompts of the half that the head is not chosen on, or those of the items that are asked for: with 4 shots, or as
    many as fit, the first of these."""
    import numpy as np

    assert heldout.prompts is not None
    labels = heldout.prompts.labels
    if not isinstance(asked, int):
        return [_example_of(labels, name) for name in asked]
    other_half = (labels["kind"] == "nested") & (labels["half"] == 1)
    candidates = other_half if other_half.any() else np.ones(len(heldout), dtype=bool)
    shots = labels["shots"][candidates]
    wanted = 4 if 4 in shots else shots.max()
    chosen: list[int] = np.flatnonzero(candidates & (labels["shots"] == wanted)).tolist()
    return chosen[:asked]


def _example_of(labels: Mapping[str, Any], name: str) -> int:
    import numpy as np

    places = np.flatnonzero(labels["item"].astype(str) == name)
    shots = labels["shots"][places]
    return int(places[(shots == (4 if 4 in shots else shots.max())).argmax()])


def _report(probes: Sequence["Probe"], out: Path, beside: Path, given: Mapping[str, Any]) -> None:
    from smeltscope.activations import open_run
    from smeltscope.probes import group_name
    from smeltscope.probes.compare import compare

    run = open_run(out, groups=[group_name(probe.name) for probe in probes])
    results = {probe.name: tables.result_of(run, probe, seed=given["seed"]) for probe in probes}
    differences = None
    if given["baseline"] is not None:
        scores = probes[0]
        other = running.open_result(beside, scores)
        differences = compare(other, run, scores, scores, seed=given["seed"])
    if given["as_json"]:
        found = {name: terminal.as_json(result.summary) for name, result in results.items()}
        if differences is not None:
            found["minus_baseline"] = terminal.as_json(differences)
        terminal.print_json(found)
        return
    console = terminal.make_output()
    for name, result in results.items():
        tables.print_result(console, result, f"{name}: {given['ckpt']}")
    if differences is not None:
        console.print(f"Minus {given['baseline']}, the same prompts", style="bold")
        columns = [
            column
            for name in ("exact", "all_right", "token_loss")
            for column in tables.columns_of(
                differences, name, name.replace("_", " "), is_difference=True
            )
        ]
        tables.print_table(console, differences, columns)
