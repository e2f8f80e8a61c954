"""`head_of` against the logits that the models give themselves."""

import pytest
import torch
import transformers

from smeltscope.activations import decode, head_of
from smeltscope.model import TINY_MODELS, tiny

# Models that do more to logits than a product; tiny models do not.
SCALED = {
    "Cohere": {"logit_scale": 0.3},
    "Gemma2": {"final_logit_softcapping": 0.5, "head_dim": 8},
    "Granite": {"logits_scaling": 3.0},
}


def some_tokens(rows: int = 3, length: int = 24) -> torch.Tensor:
    return torch.randint(3, 256, (rows, length), generator=torch.Generator().manual_seed(0))


def scaled(name: str) -> transformers.PreTrainedModel:
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "eos_token_id": 0}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = getattr(transformers, f"{name}Config")(**sizes, **SCALED[name])
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def by_stretches(logits, hidden: torch.Tensor, size: int) -> torch.Tensor:
    return torch.cat([logits(part) for part in hidden.split(size, dim=1)], dim=1)


@pytest.mark.parametrize("name", [*TINY_MODELS, *SCALED])
def test_the_models_own_logits(name):
    model = tiny(name) if name in TINY_MODELS else scaled(name)
    tokens = some_tokens()
    with torch.no_grad():
        expected = model(tokens).logits
        decoded = decode(model, tokens)
        logits = head_of(model, decoded)
        assert torch.equal(logits(decoded.last_hidden_state), expected)
        for size in (1, 7):  # a product over fewer rows may add up in another order
            parts = by_stretches(logits, decoded.last_hidden_state, size)
            assert (parts - expected).abs().max() <= 2e-6 * expected.abs().max()


@pytest.mark.parametrize("name", ["smelt", "llama", "gpt2"])
def test_in_bfloat16(name):
    model, tokens = tiny(name).bfloat16(), some_tokens()
    with torch.no_grad():
        expected = model(tokens).logits
        decoded = decode(model, tokens)
        logits = head_of(model, decoded)
        assert torch.equal(logits(decoded.last_hidden_state), expected)
        parts = by_stretches(logits, decoded.last_hidden_state, 5)
    assert parts.dtype == torch.bfloat16
    torch.testing.assert_close(parts, expected)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_padding_on_the_right_needs_no_mask(name):
    model, tokens = tiny(name), some_tokens()
    padded = tokens.clone()
    padded[1, 10:] = 0
    with torch.no_grad():
        decoded = decode(model, padded)
        found = head_of(model, decoded)(decoded.last_hidden_state[1:2, :10])
        alone = model(tokens[1:2, :10]).logits
    assert (found - alone).abs().max() < 1e-5


def test_some_rows_and_any_positions():
    """Where a probe looks: a stretch that is no prefix, of fewer rows than ran."""
    model, tokens = tiny("smelt"), some_tokens()
    with torch.no_grad():
        expected = model(tokens).logits
        decoded = decode(model, tokens)
        found = head_of(model, decoded)(decoded.last_hidden_state[2:, 13:17])
    torch.testing.assert_close(found, expected[2:, 13:17], rtol=0, atol=1e-6)


def test_nothing_is_changed():
    model, tokens = tiny("smelt"), some_tokens()
    with torch.no_grad():
        expected = model(tokens).logits
        decoded = decode(model, tokens)
        before = decoded.last_hidden_state.clone()
        logits = head_of(model, decoded)
        logits(decoded.last_hidden_state[:, :3])
        with pytest.raises(RuntimeError):
            logits(torch.zeros(1, 2, 5))  # of the wrong width
        assert torch.equal(decoded.last_hidden_state, before)
        assert "forward" not in vars(model.get_decoder())
        assert torch.equal(model(tokens).logits, expected)


def test_a_forward_that_accelerate_put_on_the_decoder_stays():
    from accelerate.hooks import ModelHook, add_hook_to_module

    calls = []

    class Counting(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            calls.append(1)
            return args, kwargs

    model, tokens = tiny("llama"), some_tokens()
    add_hook_to_module(model.get_decoder(), Counting())
    with torch.no_grad():
        decoded = decode(model, tokens)
        head_of(model, decoded)(decoded.last_hidden_state)
        assert len(calls) == 1
        model(tokens)
    assert len(calls) == 2


def test_router_losses_that_the_configuration_asks_for():
    model, tokens = tiny("olmoe", output_router_logits=True), some_tokens()
    with torch.no_grad():
        decoded = decode(model, tokens)
        found = head_of(model, decoded)(decoded.last_hidden_state[:, :5])
        assert (found - model(tokens).logits[:, :5]).abs().max() < 1e-5
