"""The example probe of CONTRIBUTING.md, run as it stands there."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import numpy as np
import pytest
import torch

from smeltscope.activations import open_run
from smeltscope.model import tiny
from smeltscope.probes import RunOptions, run_probes, summarize

CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"


def example() -> dict[str, Any]:
    """The names that the example defines."""
    (code,) = re.findall(r"```python\n(.*?)```", CONTRIBUTING.read_text(), re.DOTALL)
    assert len(code.splitlines()) < 50
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102
    return names


def test_the_example_measures_what_it_says(tmp_path, make_checkpoint, make_heldout):
    probe = example()["WriteAlignment"]()
    heldout = make_heldout([30, 12, 1, 2])
    options = RunOptions(max_length=30, batch_tokens=400)
    run = open_run(run_probes(make_checkpoint(), heldout, [probe], tmp_path / "run.h5", options))
    summary = summarize(run, probe)

    model, written = tiny(), []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda *a: written.append(a[2][0]))
        layer.mlp.register_forward_hook(lambda *a: written.append(a[2]))
    cosines: list[list[float]] = [[] for _ in model.model.layers]
    for i in range(len(heldout)):
        written.clear()
        with torch.no_grad():
            model(torch.from_numpy(heldout.segment(i)).long()[None])
        for e in range(len(cosines)):
            attention, mlp = (w[0, 1:].double().numpy() for w in written[2 * e : 2 * e + 2])
            for a, m in zip(attention, mlp, strict=True):
                cosines[e].append(a @ m / np.linalg.norm(a) / np.linalg.norm(m))
    expected = [np.mean(c) for c in cosines]
    np.testing.assert_allclose(summary["cosine"], expected, atol=1e-6)
    assert probe.sentence(summary).startswith("Mean cosine")


@pytest.fixture
def registered(monkeypatch):
    """Register a probe class, as a file in `probes/` with a line in the registry would be; gives its command's arguments."""
    from smeltscope.commands.diagnostic import diagnostic
    from smeltscope.registry import ALL_PROBES, PROBES

    def register(made: type) -> click.Command:
        module = ModuleType("write_alignment")
        module.WriteAlignment = made
        monkeypatch.setitem(sys.modules, "write_alignment", module)
        line = "write_alignment:WriteAlignment", "Whether MLP and attention write alike."
        for registry in (PROBES, ALL_PROBES):
            monkeypatch.setitem(registry, made.name, line)
        return diagnostic(made.name)

    return register


def test_the_example_is_a_command_once_it_is_registered(
    tmp_path, registered, capsys, tiny_checkpoint, text_folder
):
    """By itself, in `probe batch`, in `probe show` and in `probe compare`."""
    from smeltscope.cli import probe, run

    command, out = registered(example()["WriteAlignment"]), tmp_path / "x.h5"
    given = ["--ckpt", tiny_checkpoint, "--data", text_folder, "--tokens", "600", "-q"]
    command.main([*map(str, given), "--out", str(out)], standalone_mode=False)
    alone = capsys.readouterr().out
    assert "Mean cosine of the two writes" in alone and "layer visit" in alone
    assert run(probe, ["show", str(out)]) == 0
    assert capsys.readouterr().out == alone
    both = tmp_path / "both.h5"
    names = ["--probes", "write-alignment,loss", "--out", str(both)]
    assert run(probe, ["batch", *map(str, given), *names]) == 0
    assert "Mean cosine of the two writes" in capsys.readouterr().out
    assert run(probe, ["compare", str(out), str(both)]) == 0
    assert "write-alignment, B - A" in capsys.readouterr().out


def test_an_option_is_a_field_and_a_click_option(
    tmp_path, registered, monkeypatch, capsys, tiny_checkpoint, text_folder
):
    from smeltscope.commands.diagnostic import OWN_OPTIONS
    from smeltscope.registry import recorded_probe

    @dataclass(frozen=True, kw_only=True)
    class Scaled(example()["WriteAlignment"]):
        """The example with an option."""

        factor: float = 1.0

    option = click.option("--factor", type=float, default=1.0, help="Times this.")
    monkeypatch.setitem(OWN_OPTIONS, Scaled.name, option)
    out = tmp_path / "x.h5"
    given = ["--ckpt", tiny_checkpoint, "--data", text_folder, "--tokens", 300, "--out", out]
    registered(Scaled).main([*map(str, given), "--factor", "2.5", "-q"], standalone_mode=False)
    capsys.readouterr()
    assert recorded_probe(open_run(out), Scaled.name).options() == {"factor": 2.5}
