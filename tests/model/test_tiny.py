"""Tiny models: the same for the same seed, and random enough that attention is far from uniform."""

import pytest
import torch

import smeltscope
from smeltscope.model import TINY_MODELS, executions_of, tiny


@pytest.mark.parametrize("name", TINY_MODELS)
def test_every_tiny_model_runs(name: str) -> None:
    model = tiny(name)
    assert not model.training
    assert sum(p.numel() for p in model.parameters()) < 300_000
    with torch.inference_mode():
        logits = model(torch.arange(1, 17)[None]).logits
    assert logits.shape[:2] == (1, 16) and bool(logits.isfinite().all())
    assert len(executions_of(model.config)) >= 3


def test_a_seed_gives_a_model() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    a, b, other = tiny(), tiny(), tiny(seed=1)
    assert torch.equal(torch.get_rng_state(), state)  # the caller's numbers are left alone
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(next(a.parameters()), next(other.parameters()))


def test_overrides() -> None:
    assert tiny("smelt", num_visits=3).config.num_hidden_layers == 12
    assert tiny("baseline").config.num_visits == 1
    assert tiny("llama", vocab_size=300).config.vocab_size == 300


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(smeltscope.SmeltscopeError, match=r"'lama'; there are smelt, .*llama"):
        tiny("lama")


def test_tiny_is_at_the_front() -> None:
    assert smeltscope.tiny is tiny
