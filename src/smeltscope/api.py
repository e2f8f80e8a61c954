"""`smeltscope.probe`, `smeltscope.summarize`, `smeltscope.plot`: the command line's work, for Python and notebooks."""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xarray as xr

from smeltscope.activations import check_out, open_run
from smeltscope.commands import terminal
from smeltscope.commands.options import load_data
from smeltscope.errors import SmeltscopeError
from smeltscope.model import Checkpoint, checkpoint_of, load_checkpoint
from smeltscope.probes import Probe, RunOptions, run_probes
from smeltscope.probes import summarize as summarize_probe
from smeltscope.probes.compare import check_comparable
from smeltscope.probes.grouping import groups_of, summarize_groups
from smeltscope.probes.statistics import DRAWS
from smeltscope.registry import check_for_text, make_probe, recorded_probe
from smeltscope.tasks import HeldOut

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from rich.console import Console
    from transformers import PreTrainedModel


# Files and folders; documents by category, {"prose": ["...", "..."]}; or what load_heldout made.
Data = str | Path | Sequence[str | Path] | Mapping[str, Sequence[str]] | HeldOut


def probe(
    model: "str | Path | Checkpoint | PreTrainedModel",
    data: Data | None = None,
    probes: str | Probe | Sequence[str | Probe] = ("attention-sink",),
    *,
    tokens: int | None = None,
    max_length: int | None = None,
    batch_tokens: int = 8192,
    sampled_queries: int = 64,
    sampled_tokens: int = 64,
    seed: int = 0,
    bos: bool = True,
    tokenizer: Any = None,
    out: str | Path | None = None,
    force: bool = False,
    quiet: bool = False,
    **loading: Any,
) -> xr.DataTree:
    """Run probes over text and return the run: an xarray DataTree with a row for each segment.

    `model` is what `--ckpt` takes, or a model in memory, whose `tokenizer` text needs. `data` is a path or several,
    documents as {category: [text, ...]}, or a `HeldOut`; by default the shipped text. `probes` are names (`probe
    list`) or probes of your own. The run file is written to `out`, by default to a temporary file that is gone afterwards.
    All else is as on the command line; `loading` goes to `load_checkpoint` (`visits`, `device`, `dtype`, ...).

    Raises `SmeltscopeError` where the command would end with its sentence.

        run = smeltscope.probe("smelt-tiny", probes=("router-overlap", "loss"), tokens=20_000)
        smeltscope.summarize(run, "router-overlap")["overlap"]
    """
    chosen = [probes] if isinstance(probes, str | Probe) else list(probes)
    if not isinstance(data, HeldOut):
        check_for_text([p for p in chosen if isinstance(p, str)])
    instances = [make_probe(p) if isinstance(p, str) else p for p in chosen]
    if out is not None:
        check_out(Path(out), force=force)
    elif "WORLD_SIZE" in os.environ:
        raise SmeltscopeError("The processes of torchrun share one run file; name it with out=...")
    checkpoint = _checkpoint(model, tokenizer, loading)
    log = terminal.make_log(quiet=quiet)
    with tempfile.TemporaryDirectory() as folder:
        heldout, longest = _heldout(checkpoint, data, tokens, max_length, bos, Path(folder))
        terminal.data(log, heldout)
        with terminal.progress(log) as on_progress:
            file = run_probes(
                checkpoint,
                heldout,
                instances,
                Path(folder) / "run.h5" if out is None else out,
                RunOptions(
                    max_length=longest,
                    batch_tokens=batch_tokens,
                    seed=seed,
                    sampled_queries=sampled_queries,
                    sampled_tokens=sampled_tokens,
                ),
                force=force,
                on_progress=on_progress,
            )
        return open_run(file)


def dyck(
    model: "str | Path | Checkpoint | PreTrainedModel",
    data: str | Path | None = None,
    *,
    items: int | None = None,
    shots: Sequence[int] = (0, 1, 2, 4, 8, 16, 32),
    seeds: int = 10,
    pairing: str = "usual",
    reveal: str | None = None,
    template: str | Path = "bigbench",
    nested: int = 32,
    ablation: str = "resample",
    examples: int | Sequence[str] = 3,
    batch_tokens: int = 8192,
    seed: int = 0,
    tokenizer: Any = None,
    out: str | Path | None = None,
    force: bool = False,
    quiet: bool = False,
    **loading: Any,
) -> xr.DataTree:
    """What `probe dyck` does, for Python: a run with the groups dyck_scores, dyck_heads, dyck_map and dyck_patterns.

    `model` is as in `probe`; everything else is as on the command line. A Baseline is a run of its own, with the same
    arguments: `smeltscope.probes.compare.compare` pairs the two. Raises `SmeltscopeError` where the command would end with
    its sentence.

        run = smeltscope.dyck("smelt-tiny", items=10, shots=(0, 1, 2), seeds=1, nested=8)
        smeltscope.summarize(run, "dyck-heads")["dyck_head_rise"]
    """
    from smeltscope.commands.dyck import measure_dyck, probes_of_dyck

    if out is not None:
        check_out(Path(out), force=force)
    checkpoint, log = _checkpoint(model, tokenizer, loading), terminal.make_log(quiet=quiet)
    heldout = _prompts(
        checkpoint,
        data,
        template,
        log,
        items=items,
        shots=tuple(shots),
        seeds=seeds,
        pairing=pairing,
        reveal=reveal,
        seed=seed,
        nested=nested,
        examples=examples,
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.h5" if out is None else Path(out)
        probes = probes_of_dyck(heldout, nested=nested, ablation=ablation)
        measure_dyck(
            checkpoint,
            heldout,
            probes,
            out=file,
            log=log,
            examples=examples,
            force=force,
            batch_tokens=batch_tokens,
            seed=seed,
        )
        return open_run(file)


def dyck_prompt(
    model: "str | Path | Checkpoint | PreTrainedModel",
    prompt: str,
    *,
    template: str | Path = "bigbench",
    tokenizer: Any = None,
    **loading: Any,
) -> xr.Dataset:
    """What `probe dyck --prompt` shows, for Python: one prompt as typed, its answer, and where every head looks.

    Laid out like the group `dyck_patterns` of a run, without `example`: `row` (execution, head, target_number, key), the
    attention of the position that predicts each target; `pattern` (execution, head, query, key), all of them; `token`,
    `key_region` (an index into `region_name`), `gold` and `predicted`; `layer` and `visit` of each execution. Raises
    `SmeltscopeError` where the command would end with its sentence.

        found = smeltscope.dyck_prompt("smelt-tiny", "Input: ( [\nOutput:")
        found["row"].sel(head=3).isel(execution=2)
    """
    from smeltscope.model import executions_of
    from smeltscope.probes.patterns import patterns_of
    from smeltscope.probes.prompts import layout_of
    from smeltscope.tasks.dyck import parse_prompt

    checkpoint = _checkpoint(model, tokenizer, loading)
    found = patterns_of(checkpoint, parse_prompt(prompt, **layout_of(checkpoint, template)), [0])
    executions = executions_of(checkpoint.model.config)
    places = {
        name: ("execution", [getattr(e, name) for e in executions]) for name in ("layer", "visit")
    }
    arrays = {name: (array.dims, array.values) for name, array in found.arrays.items()}
    return xr.Dataset(arrays, coords={**found.dimensions, **places}).isel(example=0, drop=True)


def dyck_state(
    model: "str | Path | Checkpoint | PreTrainedModel",
    data: str | Path | None = None,
    *,
    items: int | None = None,
    shots: Sequence[int] = (4,),
    seeds: int = 1,
    pairing: str = "usual",
    reveal: str | None = None,
    template: str | Path = "bigbench",
    most_tokens: int = 8192,
    batch_tokens: int = 8192,
    seed: int = 0,
    tokenizer: Any = None,
    out: str | Path | None = None,
    force: bool = False,
    quiet: bool = False,
    **loading: Any,
) -> xr.DataTree:
    """What `probe dyck-state` does, for Python: a run with the group dyck_state.

    `most_tokens` of the prompts are read; everything else is as in `dyck`. Raises `SmeltscopeError` where the command
    would end with its sentence.

        run = smeltscope.dyck_state("smelt-tiny", items=20, shots=(1,))
        smeltscope.summarize(run, "dyck-state")["accuracy"]
    """
    from smeltscope.commands.dyck import options_of_run
    from smeltscope.commands.dyck_state import ITEMS
    from smeltscope.probes.dyck_state import DyckState, measure_state

    if out is not None:
        check_out(Path(out), force=force)
    checkpoint, log = _checkpoint(model, tokenizer, loading), terminal.make_log(quiet=quiet)
    heldout = _prompts(
        checkpoint,
        data,
        template,
        log,
        items=items,
        shots=tuple(shots),
        seeds=seeds,
        pairing=pairing,
        reveal=reveal,
        seed=seed,
        generated=ITEMS,
    )
    with tempfile.TemporaryDirectory() as folder, terminal.progress(log) as on_progress:
        file = measure_state(
            checkpoint,
            heldout,
            Path(folder) / "run.h5" if out is None else out,
            options_of_run(heldout, batch_tokens=batch_tokens, seed=seed),
            DyckState(most_tokens=most_tokens),
            force=force,
            on_progress=on_progress,
        )
        return open_run(file)


def summarize(
    run: xr.DataTree, probe: str | Probe, *, draws: int = DRAWS, seed: int | None = None
) -> xr.Dataset:
    """What a probe, by name or as it is, found in a run, with 95 % intervals: see `smeltscope.probes.summarize`.

    A probe given by name has the options that the run was made with; the seed is the run's unless given.
    """
    if isinstance(probe, str):
        probe = recorded_probe(run, probe)
    if seed is None:
        seed = int(json.loads(run.attrs["identity"])["seed"])
    return summarize_probe(run, probe, draws=draws, seed=seed)


def plot(
    run: xr.DataTree,
    probe: str,
    figure: str | None = None,
    *,
    baseline: xr.DataTree | None = None,
    draws: int = DRAWS,
    seed: int | None = None,
    **choices: Any,
) -> "go.Figure":
    """A figure of what a probe found in a run: the first that has something to show, unless named.

    `baseline` is a run of the same probe over the same data. `choices` are what the figure can be told: `layer`, `head`,
    `pair` ("1-2"), ... docs/figures.md lists figures and choices.

    Raises `SmeltscopeError` for a figure that is not there, that has nothing to show for this run, or that does not take a
    choice.

        smeltscope.plot(run, "attention-sink", "positions", layer=3)
    """
    from smeltscope.dashboards.figures import FIGURES, context_of
    from smeltscope.dashboards.runs import GROUPED_BY

    kinds = {kind.name: kind for kind in FIGURES.get(probe, ())}
    if figure is not None and figure not in kinds:
        raise SmeltscopeError(
            f"{probe} has no figure {figure!r}; "
            + (f"there is: {', '.join(kinds)}." if kinds else "none is drawn of it.")
        )
    wanted = list(kinds.values()) if figure is None else [kinds[figure]]
    summary = summarize(run, probe, draws=draws, seed=seed)
    takes = {name for kind in wanted for name in kind.takes}

    def groups(of_run: xr.DataTree, prefix: str) -> dict[str, xr.Dataset]:
        return {
            by: summarize_groups(
                of_run,
                recorded_probe(of_run, probe),
                groups_of(of_run, by),
                draws=draws,
                seed=summary.attrs["bootstrap_seed"],
            )
            for by in GROUPED_BY
            if f"{prefix}by_{by}" in takes
        }

    context = context_of(groups=groups(run, ""))
    if baseline is not None:
        check_comparable(run, baseline)
        of_baseline = summarize(baseline, probe, draws=draws, seed=seed)
        context |= context_of(of_baseline, baseline_groups=groups(baseline, "baseline_"))
    if "dyck_patterns" in run.children:
        context["patterns"] = run["dyck_patterns"].to_dataset()
    for kind in wanted:
        if not kind.applies(summary, **context):
            continue
        unknown = sorted(set(choices) - set(kind.takes))
        if unknown:
            raise SmeltscopeError(
                f"The figure {kind.name} of {probe} does not take {', '.join(unknown)}; it takes "
                f"{', '.join(kind.takes) or 'nothing'}."
            )
        return kind.draw(summary, **context, **choices)
    lacking = [name for kind in wanted for name in kind.given if context.get(name) is None]
    raise SmeltscopeError(
        f"This run has nothing to show in {figure or 'any figure'} of {probe}"
        + (f"; it needs {', '.join(dict.fromkeys(lacking))}." if lacking else ".")
    )


def _checkpoint(model: Any, tokenizer: Any, loading: Mapping[str, Any]) -> Checkpoint:
    if isinstance(model, str | Path):
        return load_checkpoint(model, **loading)
    if loading:
        raise SmeltscopeError(
            f"{', '.join(loading)} would change how a checkpoint is loaded, and this model is loaded already; leave "
            "it out, or give the checkpoint by name."
        )
    if isinstance(model, Checkpoint):
        return model
    return checkpoint_of(model, tokenizer=tokenizer)


def _prompts(
    checkpoint: Checkpoint,
    data: str | Path | None,
    template: str | Path,
    log: "Console",
    **asked: Any,  # of `item_sets`
) -> HeldOut:
    """Dyck prompts as a checkpoint reads them; the log says what they are."""
    from smeltscope.commands.dyck import make_prompts

    path = None if data is None else Path(data)
    return make_prompts(checkpoint, log, data=path, template=str(template), **asked)[1]


def _heldout(
    checkpoint: Checkpoint,
    data: Data | None,
    tokens: int | None,
    max_length: int | None,
    bos: bool,
    folder: Path,
) -> tuple[HeldOut, int]:
    if isinstance(data, HeldOut):
        return data, max_length or int(data.lengths.max())
    if data is None:
        paths: list[str | Path] = []
    elif isinstance(data, Mapping):
        rows = [{"text": text, "category": c} for c, texts in data.items() for text in texts]
        file = folder / "given.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        paths = [file]
    else:
        paths = [data] if isinstance(data, str | Path) else list(data)
    return load_data(
        checkpoint,
        data=tuple(map(str, paths)),
        tokens=tokens,
        max_length=max_length,
        no_bos=not bos,
    )
