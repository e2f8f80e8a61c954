"""A trained model: stories260K, from the development data folder."""

import contextlib
import importlib.util
import io
from pathlib import Path

import pytest
import torch

from smeltscope.activations import capture
from smeltscope.model import load_checkpoint

FOLDER = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "models" / "stories260K"
pytestmark = [
    pytest.mark.shared_data,
    pytest.mark.skipif(
        not (FOLDER / "load_stories260k.py").exists(), reason="stories260K is not at hand"
    ),
]


@pytest.fixture(scope="module")
def stories():
    """The loader's module, by path."""
    spec = importlib.util.spec_from_file_location("stories", FOLDER / "load_stories260k.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def checkpoint(stories, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stories260K")
    with contextlib.redirect_stdout(io.StringIO()):
        stories.load_model().save_pretrained(folder)
    return load_checkpoint(folder, device="cpu")


@pytest.fixture(scope="module")
def sample(stories) -> list[torch.Tensor]:
    text = (FOLDER / "tinystories_sample_5stories.txt").read_text(encoding="utf-8")
    tokenizer = stories.Tok()
    parts = [part.strip() for part in text.split("<|endoftext|>")]
    return [torch.tensor([tokenizer.encode(part)[:512]]) for part in parts if part]


def test_attention_logits_and_loss(checkpoint, sample):
    model, worst, losses, counts = checkpoint.model, 0.0, [], []
    assert len(sample) == 5
    for tokens in sample:
        keys = torch.arange(tokens.shape[1])[None]
        with torch.no_grad():
            bare = model(tokens, labels=tokens)
            with capture(model) as run:
                watched = model(tokens).logits
                mass = [run[e.index, "attention"].mass_on(keys) for e in run.executions]
            assert torch.equal(watched, bare.logits)
            model.set_attn_implementation("eager")
            eager = model(tokens, output_attentions=True).attentions
            model.set_attn_implementation("sdpa")
        assert len(mass) == len(eager) == 5
        worst = max(worst, *((a - b).abs().max().item() for a, b in zip(mass, eager, strict=True)))
        losses.append(bare.loss.item() * (tokens.shape[1] - 1))
        counts.append(tokens.shape[1] - 1)
    assert worst < 1e-5
    assert sum(losses) / sum(counts) == pytest.approx(1.266, abs=6e-4)
