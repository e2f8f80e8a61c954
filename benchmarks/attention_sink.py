"""What `probe attention-sink` costs beside a bare forward of the same batch.

    python benchmarks/attention_sink.py [--ckpt NAME] [--lengths 512 2048] [--batch-tokens 8192] [--repeats 9]

For each length, in one process, taking turns: a bare forward of the decoder (SDPA, no cache), the same with the probe
watching and reducing, and a forward with eager attention and `output_attentions=True`. Printed: medians of the
paired time ratios with their quartiles (processor seconds on the CPU, wall seconds on CUDA), and the peak memory that each needs on top of the model, each measured in a process of its own.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from smeltscope.activations import capture
from smeltscope.model import Checkpoint, load_checkpoint
from smeltscope.probes import AttentionSink, Batch, ModelShape, empty_arrays

CASES = ("bare", "attention-sink", "output_attentions")


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    checkpoint = load_checkpoint(options.ckpt, device=options.device)
    if options.peak_of:
        case, length = options.peak_of.split(":")
        print(peak_bytes(checkpoint, case, int(length), options.batch_tokens))
        return
    device = next(checkpoint.model.parameters()).device
    print(
        f"{options.ckpt} on {device}, {torch.get_num_threads()} threads, {options.batch_tokens} tokens a batch"
    )
    print(
        f"{'tokens':>7} {'case':<18} {'seconds':>8} {'time ratio':>22} {'peak MB':>8} {'peak ratio':>10}"
    )
    for length in options.lengths:
        seconds = timed(checkpoint, length, options.batch_tokens, options.repeats)
        peaks = {case: measured_peak(options, case, length) for case in CASES}
        for case in CASES:
            ratios = sorted(a / b for a, b in zip(seconds[case], seconds["bare"], strict=True))
            low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
            ratio = f"{statistics.median(ratios):.2f} [{low:.2f}, {high:.2f}]"
            print(
                f"{length:>7} {case:<18} {statistics.median(seconds[case]):>8.3f} {ratio:>22} "
                f"{peaks[case] / 2**20:>8.0f} {peaks[case] / peaks['bare']:>10.2f}"
            )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ckpt", default="smelt-tiny")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)  # CASE:LENGTH, in a process of its own
    return parser.parse_args()


def forwards(
    checkpoint: Checkpoint, length: int, batch_tokens: int
) -> dict[str, Callable[[], None]]:
    """The three cases on one batch."""
    model = checkpoint.model
    device = next(model.parameters()).device
    rows = max(1, batch_tokens // length)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    input_ids = torch.randint(vocabulary, (rows, length), device=device)
    batch = Batch(
        input_ids=input_ids, lengths=torch.full((rows,), length, dtype=torch.long, device=device)
    )
    decoder, probe = model.get_decoder(), AttentionSink()
    heads = model.config.get_text_config(decoder=True).num_attention_heads

    def bare() -> None:
        decoder(input_ids=input_ids, use_cache=False)

    def watched() -> None:
        with capture(model, probe.sites, observe) as run:
            shape = ModelShape(
                executions=run.executions, modules=[], heads=heads, max_length=length
            )
            arrays.update(empty_arrays(probe, shape, rows))
            decoder(input_ids=input_ids, use_cache=False)

    arrays: dict[str, np.ndarray] = {}

    def observe(execution, site, value) -> None:
        probe.observe(arrays, batch, execution, site, value)

    def materialised() -> None:
        implementation = model.config._attn_implementation
        model.set_attn_implementation("eager")
        try:
            decoder(input_ids=input_ids, use_cache=False, output_attentions=True)
        finally:
            model.set_attn_implementation(implementation)

    return {"bare": bare, "attention-sink": watched, "output_attentions": materialised}


def timed(
    checkpoint: Checkpoint, length: int, batch_tokens: int, repeats: int
) -> dict[str, list[float]]:
    """Seconds of each case, taking turns so that a drifting machine hits all alike."""
    cases = forwards(checkpoint, length, batch_tokens)
    seconds: dict[str, list[float]] = {case: [] for case in CASES}
    with torch.inference_mode():
        for turn in range(repeats + 1):
            for case in CASES:
                synchronize()
                start = clock()
                cases[case]()
                synchronize()
                if turn > 0:  # the first turn warms up
                    seconds[case].append(clock() - start)
    return seconds


def peak_bytes(checkpoint: Checkpoint, case: str, length: int, batch_tokens: int) -> int:
    """The most memory that one case needs on top of the loaded model."""
    run = forwards(checkpoint, length, batch_tokens)[case]
    with torch.inference_mode():
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run()
            return torch.cuda.max_memory_allocated() - before
        # A short row first, so that code loaded on first use is not counted.
        forwards(checkpoint, 64, 64)[case]()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew (Linux)
        before = resident("VmRSS")
        run()
        return resident("VmHWM") - before


def resident(field: str) -> int:
    """Bytes of memory in use (VmRSS), or at most in use so far (VmHWM)."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)[1]) * 1024


def measured_peak(options: argparse.Namespace, case: str, length: int) -> int:
    command = [sys.executable, __file__, "--ckpt", options.ckpt, "--device", options.device]
    command += ["--batch-tokens", str(options.batch_tokens), "--peak-of", f"{case}:{length}"]
    # Freed tensors go back to the system at once, so that the peak is that of live memory.
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
    }
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return int(done.stdout)


def clock() -> float:
    """Processor seconds of all threads on the CPU, which other programs disturb less; wall time on CUDA."""
    return time.perf_counter() if torch.cuda.is_available() else time.process_time()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
