"""What the probes cost beside a bare forward, and what other ways to the same activations cost.

    python benchmarks/probes.py [--ckpt NAME] [--lengths 512 2048 4096] [--batch-tokens 8192] [--repeats 9]

For each length, in one process, taking turns: the model's bare forward (SDPA, no cache, with logits), the same with all
probes (64 sampled queries and tokens a segment), with the sink probe alone, TransformerLens' `run_with_cache`, nnsight
tracing the probes' sites, and eager attention with `output_attentions=True`. Printed: medians of the paired time
ratios with their quartiles (processor seconds on the CPU, wall seconds on CUDA), the peak memory that each needs
on top of the model, each in a process of its own, and the bytes that are still held when it is done.
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
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from smeltscope.model import Checkpoint, load_checkpoint
from smeltscope.probes import Measurement, Probe, RunOptions, model_shape
from smeltscope.registry import PROBES, make_probe
from smeltscope.tasks import DocumentInfo, HeldOut

CASES = (
    "bare forward",
    "all probes",
    "attention-sink alone",
    "TransformerLens run_with_cache",
    "nnsight, same sites",
    "output_attentions",
)
EACH = tuple(f"{name} alone" for name in PROBES)
Case = Callable[[], Any]  # gives what is held in the end


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    checkpoint = load_checkpoint(options.ckpt, device=options.device)
    if options.peak_of:
        case, length = options.peak_of.rsplit(":", 1)
        print(*peak_and_held(checkpoint, case, int(length), options.batch_tokens))
        return
    device = next(checkpoint.model.parameters()).device
    print(f"{options.ckpt} on {device}, {torch.get_num_threads()} threads")
    print("| tokens | case | seconds | time ratio | peak MB | peak ratio | held MB |")
    print("|---|---|---|---|---|---|---|")
    cases = (CASES[0], CASES[1], *EACH) if options.each else CASES
    for length in options.lengths:
        batch_tokens = max(length, options.batch_tokens)
        seconds = timed(checkpoint, cases, length, batch_tokens, options.repeats)
        memory = {case: measured_memory(options, case, length) for case in cases}
        bare = memory["bare forward"][0]
        for case in cases:
            ratios = sorted(
                a / b for a, b in zip(seconds[case], seconds["bare forward"], strict=True)
            )
            low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
            peak, held = memory[case]
            print(
                f"| {length} | {case} | {statistics.median(seconds[case]):.2f} "
                f"| {statistics.median(ratios):.2f} [{low:.2f}, {high:.2f}] "
                f"| {peak / 2**20:,.0f} | {peak / bare:.2f} | {held / 2**20:,.1f} |",
                flush=True,
            )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ckpt", default="smelt-tiny")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 4096])
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--each", action="store_true", help="each probe alone, no other tools")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)  # CASE:LENGTH, in a process of its own
    return parser.parse_args()


def made_case(checkpoint: Checkpoint, case: str, length: int, batch_tokens: int) -> Case:
    """One way of running a batch of random tokens."""
    model = checkpoint.model
    rows = max(1, batch_tokens // length)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    device = next(model.parameters()).device
    ids = torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(0))
    input_ids = ids.to(device)
    if case == "bare forward":
        return lambda: model(input_ids=input_ids, use_cache=False).logits
    if case.startswith("TransformerLens"):
        return with_transformer_lens(checkpoint, input_ids)
    if case.startswith("nnsight"):
        return with_nnsight(model, input_ids)
    if case == "output_attentions":
        return lambda: with_attentions(model, input_ids)
    names = list(PROBES) if case == "all probes" else [case.removesuffix(" alone")]
    return with_probes(checkpoint, [make_probe(name) for name in names], ids)


def with_probes(checkpoint: Checkpoint, probes: list[Probe], ids: Tensor) -> Case:
    rows, length = ids.shape
    infos = [DocumentInfo(id=f"{i}", category="made", source="", file="") for i in range(rows)]
    heldout = HeldOut(
        tokens=ids.numpy().astype(np.int32).ravel(),
        offsets=np.arange(rows + 1) * length,
        document=np.arange(rows, dtype=np.int32),
        documents=infos,
        start_token=None,
        dropped={},
        notes=[],
        digest="made",
    )
    shape = model_shape(checkpoint, heldout, length)
    options = RunOptions(max_length=length, batch_tokens=rows * length)
    measure = Measurement(checkpoint, heldout, probes, options, shape)
    return lambda: measure(np.arange(rows))


def with_attentions(model: Any, input_ids: Tensor) -> Any:
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        return model(input_ids=input_ids, use_cache=False, output_attentions=True)
    finally:
        model.set_attn_implementation(implementation)


def with_transformer_lens(checkpoint: Checkpoint, input_ids: Tensor) -> Case:
    from transformer_lens.model_bridge import TransformerBridge

    bridge = TransformerBridge.boot_transformers(
        str(checkpoint.folder), device=str(input_ids.device)
    )
    return lambda: bridge.run_with_cache(input_ids)


def with_nnsight(model: Any, input_ids: Tensor) -> Case:
    from nnsight import NNsight

    traced = NNsight(model)

    def run() -> Any:
        with traced.trace(input_ids=input_ids, use_cache=False) as tracer:
            held = tracer.cache(
                modules=[m for layer in traced.model.layers for m in _read_by_probes(layer)],
                include_inputs=True,
            )
        return [(held[name].output, held[name].inputs) for name in held.keys()]  # noqa: SIM118  # a view, no dict

    return run


def _read_by_probes(layer: Any) -> list[Any]:
    attention = layer.self_attn
    inside = ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "o_proj")
    there = [part for name in inside if (part := getattr(attention, name, None)) is not None]
    return [layer, attention, *there, layer.mlp, layer.mlp.gate]


def timed(
    checkpoint: Checkpoint, cases: tuple[str, ...], length: int, batch_tokens: int, repeats: int
) -> dict[str, list[float]]:
    """Seconds of each case, taking turns so that a drifting machine hits all alike.

    Each runs twice and is timed the second time: in a run of many batches every batch comes after one of its kind, and
    finds the caches and the allocator as that left them.
    """
    runs = {case: made_case(checkpoint, case, length, batch_tokens) for case in cases}
    seconds: dict[str, list[float]] = {case: [] for case in cases}
    with torch.no_grad():
        for _ in range(repeats):
            for case, run in runs.items():
                run()
                synchronize()
                start = clock()
                held = run()
                synchronize()
                seconds[case].append(clock() - start)
                del held
    return seconds


def peak_and_held(
    checkpoint: Checkpoint, case: str, length: int, batch_tokens: int
) -> tuple[int, int]:
    """The most memory that one case needs on top of the loaded model, and the bytes held in the end."""
    run = made_case(checkpoint, case, length, batch_tokens)
    with torch.no_grad():
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            held = run()
            return torch.cuda.max_memory_allocated() - before, bytes_of(held)
        # A short row first, so that code loaded on first use is not counted.
        made_case(checkpoint, case, 128, 128)()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew (Linux)
        before = resident("VmRSS")
        held = run()
        return resident("VmHWM") - before, bytes_of(held)


def bytes_of(held: Any, known: set[int] | None = None) -> int:
    """Bytes of all different tensors and arrays in a nest of containers."""
    known = set() if known is None else known
    if isinstance(held, Tensor):
        storage = held.untyped_storage()
        new = storage.data_ptr() not in known
        known.add(storage.data_ptr())
        return storage.nbytes() * new
    if isinstance(held, np.ndarray):
        return held.nbytes
    if hasattr(held, "cache_dict"):
        held = held.cache_dict
    if isinstance(held, nn.Module | str | type(None)):
        return 0
    if hasattr(held, "values"):
        held = list(held.values())
    return sum(bytes_of(part, known) for part in held) if isinstance(held, list | tuple) else 0


def resident(field: str) -> int:
    """Bytes of memory in use (VmRSS), or at most in use so far (VmHWM)."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)[1]) * 1024


def measured_memory(options: argparse.Namespace, case: str, length: int) -> tuple[int, int]:
    command = [sys.executable, __file__, "--ckpt", options.ckpt, "--device", options.device]
    command += ["--batch-tokens", str(options.batch_tokens), "--peak-of", f"{case}:{length}"]
    # Freed tensors go back to the system at once, so that the peak is that of live memory.
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
    }
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    peak, held = done.stdout.split()[-2:]
    return int(peak), int(held)


def clock() -> float:
    """Processor seconds of all threads on the CPU, which other programs disturb less; wall time on CUDA."""
    return time.perf_counter() if torch.cuda.is_available() else time.process_time()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
