"""The example probe of CONTRIBUTING.md, run as it stands there."""

import re
from pathlib import Path

import numpy as np
import torch

from smeltscope.activations import open_run
from smeltscope.model import tiny
from smeltscope.probes import RunOptions, run_probes, summarize

CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"


def test_the_example_measures_what_it_says(tmp_path, make_checkpoint, make_heldout):
    (code,) = re.findall(r"```python\n(.*?)```", CONTRIBUTING.read_text(), re.DOTALL)
    assert len(code.splitlines()) < 50
    names: dict = {}
    exec(code, names)  # noqa: S102
    probe = names["WriteAlignment"]()
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
