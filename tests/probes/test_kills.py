"""All probes in runs that are killed again and again, wherever they are: nothing is lost, nothing counted twice."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from smeltscope.activations import open_run

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


_DYING = """
import os, signal, sys
from smeltscope.activations import RunWriter
from smeltscope.cli import main

write, calls = RunWriter.write, []

def write_and_die(self, *given):
    calls.append(write(self, *given))
    if os.environ["RANK"] == "1" and len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)

RunWriter.write = write_and_die
sys.exit(main())
"""


@pytest.mark.slow
def test_workers_killed_and_run_again(tmp_path, assert_same_bits, tiny_checkpoint, text_folder):
    """Of two processes one is killed, and torchrun ends the other one wherever it is."""
    script, out = tmp_path / "script.py", tmp_path / "run.h5"
    script.write_text(_DYING)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    batch = ["probe", "batch", "--ckpt", tiny_checkpoint, "--data", text_folder, "--device", "cpu"]
    batch += ["--tokens", "4k", "--batch-tokens", 512, "-q", "--out"]

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *map(str, arguments)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    killed = run(*torchrun, script, *batch, out)
    assert killed.returncode != 0 and "SIGKILL" in killed.stderr, killed.stderr
    first, second = (tmp_path / f"run.h5.rank{rank}of2.partial" for rank in (0, 1))
    done = [open_run(part)["segments/done"].values for part in (first, second)]
    assert 0 < done[1].sum() < len(done[1]) and not out.exists()
    goes_on = run(*torchrun, "-m", "smeltscope", *batch, out)
    assert goes_on.returncode == 0, goes_on.stderr
    alone = run("-m", "smeltscope", *batch, tmp_path / "whole.h5")
    assert alone.returncode == 0, alone.stderr
    assert_same_bits(tmp_path / "whole.h5", out)
    assert sorted(p.name for p in tmp_path.glob("*.h5*")) == ["run.h5", "whole.h5"]
