"""How long `probe dyck` takes: scoring prompts in DCLM's form, and the search for the head.

    python benchmarks/dyck.py [--ckpt NAME] [--data FILE] [--items 1000] [--shots 10] [--prompts 64]

- prompts made: items drawn or read, written in DCLM's form with `--shots` demonstrations, one seed, and tokenized.
- scored: `dyck-scores` over them, teacher forcing and generation, in batches by length.
- head search: `dyck-heads` over `--prompts` nested prompts or a few more, every query head and K/V group of the looped layers ablated at all
  visits and at each, with what it resamples from.

Processor seconds, which other programs disturb less, and seconds by the clock. What is loaded and made once for a model is not counted:
each case first runs over two items.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from smeltscope.commands.dyck import item_sets, make_heldout, options_of_run
from smeltscope.model import Checkpoint, load_checkpoint
from smeltscope.probes import Probe, run_probes
from smeltscope.probes.dyck_heads import DyckHeads
from smeltscope.probes.dyck_scores import DyckScores
from smeltscope.tasks import HeldOut

BATCH_TOKENS = 8192
USUAL: dict[str, Any] = {"seeds": 1, "pairing": "usual", "reveal": None, "seed": 0}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ckpt", default="smelt-tiny")
    parser.add_argument("--data", type=Path, help="items; generated ones by default")
    parser.add_argument("--items", type=int, default=1000)
    parser.add_argument("--shots", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=64)
    options = parser.parse_args()
    checkpoint = load_checkpoint(options.ckpt)

    def scored(items: int) -> HeldOut:
        asked = item_sets(data=options.data, items=items, shots=(options.shots,), **USUAL)
        return make_heldout(checkpoint, asked, "dclm")

    def nested(queries: int) -> HeldOut:
        asked = item_sets(data=None, items=1, shots=(0,), nested=queries, **USUAL)
        return make_heldout(checkpoint, asked[1:], "bigbench")

    few, least = scored(2), nested(4)  # two for each half
    queries = math.ceil(options.prompts / (len(least) // 4))
    prompts, making = timed(lambda: scored(options.items))
    searched = nested(queries)
    rows = [("prompts made", prompts, making)]
    for name, warm, heldout, probe in (
        ("scored", few, prompts, lambda _: DyckScores()),
        ("head search", least, searched, lambda over: DyckHeads(donors=over)),
    ):
        measure(checkpoint, warm, probe(warm))
        rows.append((name, heldout, measure(checkpoint, heldout, probe(heldout))))
    print(f"{checkpoint.name}, context {checkpoint.context}.")
    for name, heldout, _ in rows[1:]:
        assert heldout.prompts is not None
        labels = heldout.prompts.labels
        shots = ", ".join(map(str, np.unique(labels["shots"])))
        kept = f"{labels['kept_shots'].mean():.1f} on average"
        print(f"{name}: prompts of {shots} shots, {kept} kept within the context.")
    print()
    print("| case | prompts | tokens | processor seconds | by the clock | prompts/s | tokens/s |")
    print("|---|---|---|---|---|---|---|")
    for name, heldout, (seconds, clock) in rows:
        number, tokens = len(heldout), int(heldout.lengths.sum())
        print(
            f"| {name} | {number:,} | {tokens:,} | {seconds:.1f} | {clock:.1f} | {number / seconds:,.1f} "
            f"| {tokens / seconds:,.0f} |"
        )


def timed(make: Callable[[], Any]) -> tuple[Any, tuple[float, float]]:
    """What is made, and the processor seconds and the seconds by the clock that it took."""
    begun = time.process_time(), time.perf_counter()
    made = make()
    return made, (time.process_time() - begun[0], time.perf_counter() - begun[1])


def measure(checkpoint: Checkpoint, heldout: HeldOut, probe: Probe) -> tuple[float, float]:
    """How long a run over prompts takes, as `timed`."""
    options = options_of_run(heldout, batch_tokens=BATCH_TOKENS, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.h5"
        return timed(lambda: run_probes(checkpoint, heldout, [probe], out, options))[1]


if __name__ == "__main__":
    main()
