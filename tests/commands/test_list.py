"""`probe list`: everything there is to run, with its size."""

from collections.abc import Callable
from typing import Any

from smeltscope.commands.list import CONTROL_LINES
from smeltscope.model import CONTROLS, load_checkpoint, shipped_checkpoints
from smeltscope.registry import ALL_PROBES


def test_list(probe: Callable[..., Any]) -> None:
    done = probe("list")
    assert done.code == 0 and done.err == ""
    lines = done.out.splitlines()
    assert max(map(len, lines)) <= 80
    names = [line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "]
    assert names == [*shipped_checkpoints(), *CONTROLS, *ALL_PROBES]
    assert set(CONTROL_LINES) == set(CONTROLS)
    model = load_checkpoint("smelt-tiny").model
    size = sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
    text = " ".join(done.out.split())
    assert f"8 layers, layers 2 to 5 run 2 times; 32 experts, 4 active; {size / 1e6:.1f}M" in text
