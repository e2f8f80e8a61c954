"""What training logs of the sink, against attention weights written out."""

import numpy as np
import pytest
import torch

from smeltscope.commands.sinks import watch_sinks
from smeltscope.model import tiny
from smeltscope.model.rows import Rows


@pytest.mark.parametrize("visits", [1, 3])
def test_sinks_by_visit_and_category_are_those_of_eager_attention(visits: int) -> None:
    model = tiny("smelt", num_visits=visits)
    rng = np.random.default_rng(0)
    tokens = rng.integers(5, 60, (4, 80)).astype(np.int32)
    tokens[:, 0] = 1
    firsts = [80, 70, 80, 30]  # tokens of the first segment; the last row has another behind it
    positions = np.stack([np.r_[np.arange(n), np.arange(80 - n)] for n in firsts])
    rows = Rows(
        tokens=tokens,
        positions=positions.astype(np.int32),
        predicted=np.ones((4, 80), dtype=bool),
        lengths=np.array([80, 70, 80, 80]),
        category=np.array([0, 0, 1, 1]),
        categories=("code", "math", "none"),
    )
    model.train()
    found = watch_sinks(rows)(model)
    model.eval()
    model.set_attn_implementation("eager")
    expected: dict[str, float] = {}
    for c, name in enumerate(("code", "math")):
        masses: dict[str, dict[int, list[torch.Tensor]]] = {}
        alphas: dict[str, list[float]] = {}
        for row in np.flatnonzero(rows.category == c):
            ids = torch.from_numpy(tokens[row : row + 1, : firsts[row]].astype(np.int64))
            with torch.no_grad():
                attentions = model(ids, output_attentions=True).attentions
            for execution, weights in zip(model.config.executions, attentions, strict=True):
                looped = execution.layer in model.config.span
                where = f"{name}/visit {execution.visit}" if looped else f"{name}/other layers"
                of_execution = masses.setdefault(where, {}).setdefault(execution.index, [])
                of_execution.append(weights[0, :, 1:, 0])  # (head, query)
                if firsts[row] >= 64:
                    alphas.setdefault(where, []).extend(weights[0, :, :64, 0].mean(1).tolist())
        for where, by_execution in masses.items():
            means = [torch.cat(m, dim=1).mean(1).max().item() for m in by_execution.values()]
            expected[f"max_head_sink/{where}"] = max(means)
            expected[f"sink_rate/{where}"] = float(np.mean(np.array(alphas[where]) > 0.3))
    assert found == pytest.approx(expected, abs=1e-5)
    assert f"max_head_sink/code/visit {visits}" in found and len(found) == 4 * (visits + 1)
