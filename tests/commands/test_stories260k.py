"""`probe attention-sink --ckpt` on a Llama that nobody here trained, from token arrays, against its eager attention."""

import contextlib
import importlib.util
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "models" / "stories260K"
pytestmark = [
    pytest.mark.shared_data,
    pytest.mark.skipif(
        not FOLDER.exists(), reason="needs the development data beside the checkout"
    ),
]
LENGTH = 200


@pytest.fixture(scope="module")
def loader() -> Any:
    spec = importlib.util.spec_from_file_location("stories", FOLDER / "load_stories260k.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_command_agrees_with_eager_attention(
    loader: Any, tmp_path: Path, probe: Callable[..., Any]
) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        model = loader.load_model()
    model.save_pretrained(tmp_path / "stories260K")  # without a tokenizer: it has no standard form
    text = (FOLDER / "tinystories_sample_5stories.txt").read_text(encoding="utf-8")
    stories = [part.strip() for part in text.split("<|endoftext|>") if part.strip()]
    tokens = [
        loader.Tok().encode(story) for story in stories
    ]  # each begins with the start token, 1
    np.save(tmp_path / "stories.npy", np.concatenate(tokens).astype(np.uint16))

    done = probe(
        "attention-sink", "--ckpt", tmp_path / "stories260K", "--data", tmp_path / "stories.npy",
        "--max-length", LENGTH, "--out", tmp_path / "run.h5", "--json", "-q",
    )  # fmt: skip
    assert done.code == 0, done.err
    summary = json.loads(done.out)

    model.set_attn_implementation("eager")
    sums, queries = 0.0, 0
    for story in tokens:
        body = story[1:]
        for start in range(0, len(body), LENGTH - 1):
            segment = [1, *body[start : start + LENGTH - 1]]
            if len(segment) < 3:
                continue
            with torch.no_grad():
                attentions = model(torch.tensor([segment]), output_attentions=True).attentions
            sums = sums + torch.stack(attentions)[:, 0, :, 1:, 0].double().sum(2)  # (layer, head)
            queries += len(segment) - 1
    assert summary["values"]["queries"]["data"] == [queries] * 5
    measured = torch.tensor(summary["values"]["sink_mass"]["data"])
    assert torch.allclose(measured, (sums / queries).float(), atol=1e-5)
