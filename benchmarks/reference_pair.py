"""What the diagnostics say of a SMELT and its Baseline: the tables of docs/reference-pair.md.

    python benchmarks/reference_pair.py --out FOLDER [--ckpt smelt-tiny] [--baseline baseline-tiny] [--tokens 60k]
        [--items 100] [--seeds 3] [--nested 32] [--parts text dyck]

Makes every run by the command that its name stands beside, in FOLDER (one that is there already is kept), then prints Markdown:
loss by category and length, what each diagnostic says with its controls, and prompts of brackets by shots.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

import smeltscope
from smeltscope.activations import open_run
from smeltscope.dashboards.overview import (
    TITLES,
    headline_rows,
    headlines,
    number,
    with_interval,
)
from smeltscope.probes.compare import compare
from smeltscope.probes.grouping import By, groups_of, restricted
from smeltscope.registry import make_probe, probes_of

PROBE = [sys.executable, "-m", "smeltscope", "probe"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ckpt", default="smelt-tiny")
    parser.add_argument("--baseline", default="baseline-tiny")
    parser.add_argument("--tokens", default="60k")
    parser.add_argument("--items", default="100")
    parser.add_argument("--seeds", default="3")
    parser.add_argument("--nested", default="32")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=["text", "dyck"], default=["text", "dyck"])
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if "text" in given.parts:
        text_tables(given)
    if "dyck" in given.parts:
        dyck_tables(given)


def text_tables(given: argparse.Namespace) -> None:
    own, other = ["--ckpt", given.ckpt], ["--ckpt", given.baseline]
    commands = {
        "smelt": ["batch", *own],
        "baseline": ["batch", *other],
        "baseline, 2 visits, scale 1": ["batch", *other, "--visits", "2", "--residual-scale", "1"],
        "scale 1/2": ["batch", *other, "--visits", "2", "--residual-scale", "0.5"],
        "smelt, untrained": ["batch", *own, "--untrained"],
        "visits": ["loss", *own, "--visits", "0..4"],
    }
    runs = {
        name: made(given.out, name, [*command, "--tokens", given.tokens])
        for name, command in commands.items()
    }
    visits = runs.pop("visits")
    smelt, baseline = runs["smelt"], runs["baseline"]
    for by in ("category", "length"):
        heading(f"Loss by {by}")
        loss_by(baseline, smelt, by)
    heading("Loss by number of visits")
    swept = smeltscope.summarize(visits, make_probe("loss"))
    rows = [
        [str(n), shown(swept.sel(num_visits=n), "swept_loss"), shown(swept.sel(num_visits=n), "swept_kl")]
        for n in swept["num_visits"].values
    ]  # fmt: skip
    table(["visits", "loss", "divergence from its own number"], rows)
    for probe in probes_of(smelt):
        heading(TITLES[probe])
        diagnostic(probe, runs)
    heading("Sink mass over depth")
    depth(smelt, baseline)


def loss_by(baseline: xr.DataTree, smelt: xr.DataTree, by: By) -> None:
    """Both losses of each group of documents, and their paired difference."""
    probe, rows = make_probe("loss"), []
    masks = {"all": np.ones(smelt.sizes["segment"], dtype=bool), **groups_of(smelt, by)}
    for label, mask in masks.items():
        documents = len(np.unique(smelt["segments"]["document"].values[mask]))
        if not documents:
            rows.append([label, "0", "-", "-", "-"])
            continue
        parts = [restricted(run, mask) for run in (baseline, smelt)]
        found = compare(*parts, probe, probe)
        values = (number(float(found[f"loss_{which}"]), decimals=3) for which in "ba")
        rows.append([label, str(documents), *values, shown(found, "loss", signed=True)])
    table([by, "documents", "smelt", "baseline", "smelt minus baseline"], rows)


def diagnostic(name: str, runs: dict[str, xr.DataTree]) -> None:
    """The headline numbers of every run."""
    probe = make_probe(name)
    found = [headlines(smeltscope.summarize(run, probe), name) for run in runs.values()]
    header, rows = headline_rows(list(runs), found)
    table(header, [[cell.replace("\n", "<br>") for cell in row] for row in rows])


def depth(smelt: xr.DataTree, baseline: xr.DataTree) -> None:
    """Mass on the first token at each execution, mean over heads; the Baseline's at the same layer."""
    probe = make_probe("attention-sink")
    of_smelt, of_baseline = (smeltscope.summarize(run, probe) for run in (smelt, baseline))
    rows = []
    for execution in of_smelt["execution"].values:
        here = of_smelt.sel(execution=execution)
        layer, visit = int(here["layer"]), int(here["visit"])
        there = of_baseline.isel(execution=(of_baseline["layer"] == layer).values).squeeze()
        rates = [number(float(part["sink_rate"].mean()), decimals=3) for part in (here, there)]
        greatest = number(float(here["sink_mass"].max()), decimals=3)
        rows.append(
            [
                str(layer),
                str(visit),
                shown(here, "sink_mass_mean"),
                greatest,
                rates[0],
                shown(there, "sink_mass_mean"),
                rates[1],
            ]
        )
    header = ["layer", "visit", "smelt", "greatest head", "rate", "baseline, same layer", "rate"]
    table(header, rows)


def dyck_tables(given: argparse.Namespace) -> None:
    asked = ["--items", given.items, "--seeds", given.seeds, "--nested", given.nested]
    for pairing in ("usual", "in-context"):
        name = f"dyck {pairing}"
        command = ["dyck", "--ckpt", given.ckpt, "--baseline", given.baseline]
        run = made(given.out, name, [*command, "--pairing", pairing, *asked])
        other = open_run(file_of(given.out, f"{name}-baseline"))
        heading(f"Brackets, {pairing} pairs")
        by_shots(run, other)
        for probe in ("dyck-heads", "dyck-map"):
            print(make_probe(probe).sentence(smeltscope.summarize(run, make_probe(probe))), "\n")


def by_shots(run: xr.DataTree, other: xr.DataTree) -> None:
    """Scores of both models at each number of shots, what can be had without the model, and the paired difference."""
    probe = make_probe("dyck-scores")
    of_run, of_other = (smeltscope.summarize(r, probe) for r in (run, other))
    difference = compare(other, run, probe, probe)
    rows = []
    for shots in of_run["shots"].values[of_run["prompts"].values > 0]:
        here, there, change = (part.sel(shots=shots) for part in (of_run, of_other, difference))
        rows.append(
            [str(shots), number(float(here["kept_shots"]), decimals=1)]
            + [number(float(here[f"bayes_{what}"]), decimals=3) for what in ("query", "answers")]
            + [shown(part, "exact") for part in (here, there)]
            + [shown(change, "exact", signed=True)]
            + [shown(part, "token_loss") for part in (here, there)]
            + [shown(change, "token_loss", signed=True)]
        )
    header = ["shots", "kept", "best from the query", "best from all", "exact: smelt", "baseline"]
    table([*header, "difference", "token loss: smelt", "baseline", "difference"], rows)


def made(folder: Path, name: str, command: Sequence[str]) -> xr.DataTree:
    """The run of a command, which is shown."""
    out = file_of(folder, name)
    if not out.exists():
        print(f"probe {' '.join(command)}", file=sys.stderr)
        subprocess.run(
            [*PROBE, *command, "--out", str(out), "-q"], check=True, stdout=subprocess.DEVNULL
        )
    return open_run(out)


def file_of(folder: Path, name: str) -> Path:
    return folder / f"{name.replace(' ', '-').replace(',', '').replace('/', '-')}.h5"


def shown(summary: xr.Dataset, name: str, *, signed: bool = False) -> str:
    ends: Iterator[Any] = (summary.get(f"{name}_{end}", np.nan) for end in ("low", "high"))
    return with_interval(float(summary[name]), *map(float, ends), signed=signed)


def heading(text: str) -> None:
    print(f"\n### {text}\n")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
