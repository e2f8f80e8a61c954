"""All probes in runs that are killed again and again, wherever they are: nothing is lost, nothing counted twice."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROUNDS = 2

_SCRIPT = """
import importlib.util, os, random, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
spec = importlib.util.spec_from_file_location("made", sys.argv[1])
made = importlib.util.module_from_spec(spec)
spec.loader.exec_module(made)
from smeltscope.probes import RunOptions, run_probes
from smeltscope.registry import PROBES, make_probe
from smeltscope.tasks import plan_batches

folder, rounds = Path(sys.argv[2]), int(sys.argv[3])
checkpoint = made._checkpoint("smelt", num_physical_layers=3)
probes = [make_probe(name) for name in PROBES]
heldout = made._heldout([9, 70, 2, 33, 64, 1, 17, 3, 70, 5, 128, 12, 90, 41, 77, 100, 26, 50, 8, 66, 96])
options = RunOptions(max_length=128, batch_tokens=480)
assert len(plan_batches(heldout.lengths, options.batch_tokens, options.sampled_queries)) == 12

def run(name, delay=None):
    # A process of its own, killed after `delay` seconds; forked from one that has imported everything.
    pid = os.fork()
    if pid == 0:
        run_probes(checkpoint, heldout, probes, folder / name, options)
        os._exit(0)
    if delay is not None:
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

start = time.perf_counter()
run_probes(checkpoint, heldout, probes, folder / "whole.h5", options)
duration = time.perf_counter() - start
drawn = random.Random(0)
for number in range(rounds):
    # The first kills are spread over the whole duration; those after them come early in what is left.
    delays = [(number + drawn.random()) / rounds * duration]
    delays += [drawn.random() * duration / 3 for _ in range(3)]
    name, codes = f"{number}.h5", []
    for delay in [*delays, None]:
        if not (folder / name).exists():
            codes.append(run(name, delay))
    print(name, *codes, flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kill -9")
def test_killed_at_random_moments(tmp_path, assert_same_bits):
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    made = Path(__file__).with_name("conftest.py")
    command = [sys.executable, str(script), str(made), str(tmp_path), str(ROUNDS)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    runs = {name: codes for name, *codes in map(str.split, told.splitlines())}
    assert len(runs) == ROUNDS
    codes = [code for each in runs.values() for code in each]
    # How many of the kills find their process alive depends on how busy the machine is.
    assert set(codes) <= {"-9", "0"} and codes.count("-9") >= 2, told
    for name in runs:
        assert_same_bits(tmp_path / "whole.h5", tmp_path / name)
