"""Whether time per token and memory stay the same however long a run is.

    python benchmarks/scaling.py [--ckpt NAME] [--tokens 10k 50k 200k 500k] [--repeats 3]

Runs `probe batch` over the shipped held-out text, repeated as often as needed: as many segments of the same lengths for each
thousand tokens at every size, in batches of 5,120 tokens, which every size fills: a smaller batch costs more per token. Each run has
a process of its own, which first runs one such batch, so that what is loaded and made once for a model is not counted. Processor seconds are taken apart from within:

- before: text is read, the model's sites are found, the run file is laid out.
- pass: all batches, each with its forward, all probes and its rows written. Time per token is this one.
- after: the run file is packed, and the tables are made, with their intervals from resampling.

Sizes take turns, so that a drifting machine hits all alike; medians over the turns, of the time with their range. Memory is the peak of
resident memory, up to the end of the pass and up to that of the run.
"""

import argparse
import gzip
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from smeltscope.tasks import shipped_heldout

# `probe batch` as it is, twice, with a look at the clock around each batch and each write of the second.
SCRIPT = """
import json, resource, sys, time
from smeltscope.cli import probe, run
from smeltscope.probes import runner

marks, peaks = [], []

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def marked(function):
    def call(*args, **kwargs):
        marks.append(time.process_time())
        try:
            return function(*args, **kwargs)
        finally:
            marks.append(time.process_time())
            peaks.append(peak())
    return call

runner.Measurement.__call__ = marked(runner.Measurement.__call__)
runner.RunWriter.write = marked(runner.RunWriter.write)
arguments = sys.argv[1:]
for tokens in ("5k", arguments.pop(0)):
    marks.clear()
    begun = time.process_time()
    code = run(probe, [*arguments, "--tokens", tokens])
    ended = time.process_time()
seconds = [marks[0] - begun, marks[-1] - marks[0], ended - marks[-1]]
print(json.dumps([*seconds, peaks[-1], peak()]), file=sys.stderr)
sys.exit(code)
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ckpt", default="smelt-tiny")
    parser.add_argument("--tokens", nargs="+", default=["10k", "50k", "200k", "500k"])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, list[list[float]]] = {tokens: [] for tokens in options.tokens}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        repeat_text(folder / "text", times=3)
        for _ in range(options.repeats):
            for tokens, runs in found.items():
                runs.append(run(options.ckpt, folder, tokens))
    print("| tokens | before | pass | after | pass per 1,000 tokens | peak MB, pass | run |")
    print("|---|---|---|---|---|---|---|")
    for tokens, runs in found.items():
        before, whole, after, of_pass, of_run = map(statistics.median, zip(*runs, strict=True))
        each = sorted(run[1] / float(tokens.removesuffix("k")) for run in runs)
        print(
            f"| {tokens} | {before:.1f} | {whole:.1f} | {after:.1f} "
            f"| {statistics.median(each):.4f} [{each[0]:.4f}, {each[-1]:.4f}] "
            f"| {of_pass / 2**20:,.0f} | {of_run / 2**20:,.0f} |"
        )


def repeat_text(folder: Path, times: int) -> None:
    """The shipped text several times over, each copy under names of its own."""
    folder.mkdir()
    for path in map(Path, shipped_heldout()):
        with gzip.open(path, "rt", encoding="utf-8") as packed:
            rows = [json.loads(line) for line in packed]
        with (folder / path.name.removesuffix(".gz")).open("w", encoding="utf-8") as file:
            for copy in range(times):
                for row in rows:
                    # another first word, so that no two documents are the same
                    file.write(json.dumps({**row, "text": f"{copy} {row['text']}"}) + "\n")


def run(ckpt: str, folder: Path, tokens: str) -> list[float]:
    """Processor seconds before, in and after the pass of one `probe batch`, and peaks of its memory in bytes."""
    command = [sys.executable, "-c", SCRIPT, tokens, "batch", "--ckpt", ckpt]
    command += ["--data", str(folder / "text"), "--out", str(folder / "run.h5"), "--force", "-q"]
    command += ["--batch-tokens", "5120"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stderr.splitlines()[-1])


if __name__ == "__main__":
    main()
