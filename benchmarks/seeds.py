"""How much pairs differ that were trained alike but for the seed: tables of docs/reference-pair.md.

    python benchmarks/seeds.py FOLDER FOLDER ...

Each FOLDER holds the runs of one pair, as `benchmarks/reference_pair.py --out FOLDER` makes them. Prints Markdown: a column for
each folder, with the intervals that each run has by itself, over documents or items; they do not cover the seed.
"""

import argparse
from pathlib import Path

import xarray as xr
from reference_pair import diagnostic, file_of, heading, shown, table

import smeltscope
from smeltscope.activations import open_run
from smeltscope.dashboards.overview import TITLES
from smeltscope.probes.compare import compare
from smeltscope.registry import make_probe, probes_of


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folders", metavar="FOLDER", nargs="+", type=Path)
    folders = parser.parse_args().folders
    smelts, baselines = (runs_of(folders, name) for name in ("smelt", "baseline"))
    heading("Loss")
    losses(smelts, baselines)
    for probe in probes_of(next(iter(smelts.values()))):
        if probe != "loss":
            heading(TITLES[probe])
            diagnostic(probe, smelts)
    for pairing in ("usual", "in-context"):
        smelts, baselines = (runs_of(folders, f"dyck {pairing}{end}") for end in ("", "-baseline"))
        heading(f"Brackets, {pairing} pairs")
        brackets(smelts, baselines)
        for probe in ("dyck-heads", "dyck-map"):
            print()
            diagnostic(probe, smelts)


def runs_of(folders: list[Path], name: str) -> dict[str, xr.DataTree]:
    return {folder.name: open_run(file_of(folder, name)) for folder in folders}


def losses(smelts: dict[str, xr.DataTree], baselines: dict[str, xr.DataTree]) -> None:
    """Both losses of each pair over the same text, and their paired difference."""
    probe, rows = make_probe("loss"), []
    for pair, smelt in smelts.items():
        found = [smeltscope.summarize(run, probe) for run in (smelt, baselines[pair])]
        difference = compare(baselines[pair], smelt, probe, probe)
        rows.append(
            [
                pair,
                *(shown(part, "loss") for part in found),
                shown(difference, "loss", signed=True),
            ]
        )
    table(["pair", "smelt", "baseline", "smelt minus baseline"], rows)


def brackets(smelts: dict[str, xr.DataTree], baselines: dict[str, xr.DataTree]) -> None:
    """Exact answers and the loss of their tokens at each number of shots, of each pair."""
    probe = make_probe("dyck-scores")
    found = {
        f"{pair}, {model}": smeltscope.summarize(run, probe)
        for pair in smelts
        for model, run in (("smelt", smelts[pair]), ("baseline", baselines[pair]))
    }
    shots_of = [set(s["shots"].values[s["prompts"].values > 0].tolist()) for s in found.values()]
    for score in ("exact", "token_loss"):
        rows = [
            [str(shots), *(shown(summary.sel(shots=shots), score) for summary in found.values())]
            for shots in sorted(set.intersection(*shots_of))
        ]
        table([f"{score.replace('_', ' ')}, shots", *found], rows)
        print()


if __name__ == "__main__":
    main()
