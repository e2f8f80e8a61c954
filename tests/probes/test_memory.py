"""A run over ten times the tokens takes no more memory: in a process of its own, for a peak never falls."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

_SCRIPT = """
import importlib.util, resource, sys
from smeltscope.commands.running import open_result
from smeltscope.probes import RunOptions, run_probes, summarize
from smeltscope.registry import PROBES, make_probe

spec = importlib.util.spec_from_file_location("made", sys.argv[1])
made = importlib.util.module_from_spec(spec)
spec.loader.exec_module(made)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

# Four executions, and segments so short that what is kept of each weighs more than its tokens.
sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 16, "num_experts": 4}
checkpoint = made._checkpoint("smelt", num_physical_layers=3, **sizes)
heldout = made._heldout([50] * (int(sys.argv[3]) // 50))
options = RunOptions(max_length=50, batch_tokens=16384, sampled_queries=8, sampled_tokens=8)
probes = [make_probe(name) for name in PROBES]
file = run_probes(checkpoint, heldout, probes, sys.argv[2], options)
print(peak())
for probe in probes:  # as the command ends
    summarize(open_result(file, probe), probe)
print(peak())
"""


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """In MB, of a whole process."""

    run: float
    end: float  # with the summaries


def peaks(folder: Path, tokens: int) -> Peaks:
    made = Path(__file__).with_name("conftest.py")
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(made), str(folder / f"{tokens}.h5"), str(tokens)],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run, end = map(float, done.stdout.split())
    return Peaks(run=run, end=end)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="units of ru_maxrss")
def test_memory_does_not_grow_with_the_tokens(tmp_path):
    """The pass over 250k tokens takes what that over 25k does, and so does the whole run with its summaries."""
    few, many = peaks(tmp_path, 25_000), peaks(tmp_path, 250_000)
    print(few, many)
    assert many.run < 1.05 * few.run
    assert many.end < 1.05 * few.end
