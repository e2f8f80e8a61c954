"""Whether time per token and memory stay the same however long a run is.

    python benchmarks/scaling.py [--ckpt NAME] [--seconds-at 10k 200k] [--peak-at 50k 500k]

Runs `probe batch` over the shipped held-out text, repeated as often as needed, each time in a process of its own, and
prints processor seconds per token, start-up and bootstrap excluded (a run over 2,000 tokens), and the peak of resident memory.
"""

import argparse
import gzip
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from smeltscope.tasks import shipped_heldout


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ckpt", default="smelt-tiny")
    parser.add_argument("--seconds-at", nargs="+", default=["10k", "200k"])
    parser.add_argument("--peak-at", nargs="+", default=["50k", "500k"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        repeat_text(folder / "text", times=3)
        start, _ = run(options.ckpt, folder, "2k")
        print("| tokens | processor seconds, start-up aside | per 1,000 tokens | peak MB |")
        print("|---|---|---|---|")
        for tokens in dict.fromkeys([*options.seconds_at, *options.peak_at]):
            seconds, peak = run(options.ckpt, folder, tokens)
            number = float(tokens.removesuffix("k")) - 2
            spent = seconds - start
            print(
                f"| {tokens} | {spent:.1f} | {spent / number:.4f} | {peak / 2**20:,.0f} |",
                flush=True,
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


def run(ckpt: str, folder: Path, tokens: str) -> tuple[float, int]:
    """Processor seconds and peak bytes of one `probe batch`."""
    script = (
        "import sys; from smeltscope.cli import probe, run; import resource; "
        "code = run(probe, sys.argv[1:]); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr); sys.exit(code)"
    )
    command = [
        sys.executable,
        "-c",
        script,
        "batch",
        "--ckpt",
        ckpt,
        "--data",
        str(folder / "text"),
    ]
    command += ["--tokens", tokens, "--out", str(folder / "run.h5"), "--force", "-q"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, int(done.stderr.split()[-1]) * 1024


if __name__ == "__main__":
    main()
