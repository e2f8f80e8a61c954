"""Tiny random models, for tests and for a first look at the interface: no trained weights, no download."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from smeltscope.errors import SmeltscopeError
from smeltscope.model.configuration import SmeltConfig
from smeltscope.model.smelt import SmeltForCausalLM

_SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def _smelt(**overrides: Any) -> PreTrainedModel:
    values = {**_SIZES, **_EXPERTS, "num_physical_layers": 6, "tie_word_embeddings": True}
    return SmeltForCausalLM(SmeltConfig(**{**values, **overrides}))


def _baseline(**overrides: Any) -> PreTrainedModel:
    return _smelt(**{"num_visits": 1, **overrides})


def _gpt2(**overrides: Any) -> PreTrainedModel:
    values = {"vocab_size": 256, "n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 512}
    values |= {"bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**values, **overrides}))


def _from_transformers(name: str, defaults: dict[str, Any]) -> Callable[..., PreTrainedModel]:
    def build(**overrides: Any) -> PreTrainedModel:
        config = getattr(transformers, f"{name}Config")
        return getattr(transformers, f"{name}ForCausalLM")(config(**{**defaults, **overrides}))

    return build


def _inkling2_loop(**overrides: Any) -> PreTrainedModel:
    from transformers.models.inkling2_loop.configuration_inkling2_loop import (
        Inkling2LoopTextConfig,
    )
    from transformers.models.inkling2_loop.modeling_inkling2_loop import Inkling2LoopForCausalLM

    values = {
        **_SIZES,
        "unpadded_vocab_size": 256,
        "num_hidden_layers": 6,
        "n_layers_per_attn_res_block": 2,
        "loop_layer_index_start": 2,
        "loop_layer_index_end": 4,
        "loop_num_passes": 3,
        "layer_types": ["hybrid_sliding", "hybrid"] * 3,
        "head_dim": 8,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "sliding_window_size": 16,
        "d_rel": 4,
        "rel_extent": 32,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "loop_gate_rank": 4,
        "eos_token_id": 0,
    }
    return Inkling2LoopForCausalLM(Inkling2LoopTextConfig(**{**values, **overrides}))


_DENSE = {**_SIZES, "num_hidden_layers": 3, "intermediate_size": 64}
_BUILDERS: dict[str, Callable[..., PreTrainedModel]] = {
    "smelt": _smelt,
    "baseline": _baseline,
    "llama": _from_transformers("Llama", _DENSE),
    "gpt2": _gpt2,
    "olmoe": _from_transformers(
        "Olmoe", {**_DENSE, "num_experts": 8, "num_experts_per_tok": 2, "pad_token_id": 0}
    ),
    "qwen3_moe": _from_transformers("Qwen3Moe", {**_DENSE, **_EXPERTS, "head_dim": 8}),
    "mixtral": _from_transformers(
        "Mixtral", {**_DENSE, "num_local_experts": 8, "sliding_window": None}
    ),
    "gpt_oss": _from_transformers(
        "GptOss",
        {
            **_DENSE,
            "num_hidden_layers": 4,
            "head_dim": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "pad_token_id": 0,
            "eos_token_id": 0,
        },
    ),
    "inkling2_loop": _inkling2_loop,
    "dory": _from_transformers(
        "Dory",
        {
            **_DENSE,
            "num_hidden_layers": 4,
            "n_input_layers": 1,
            "n_recurrent_layers": 2,
            "n_output_layers": 1,
            "head_dim": 8,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            # Every scale of nGPT is stored as a multiple of this: at the default, noise would drown them.
            "initializer_range": 0.5,
            "ngpt_alpha_init": 0.3,
        },
    ),
    "hrm_text": _from_transformers(
        "HrmText",
        {
            **_SIZES,
            "num_hidden_layers": 2,
            "intermediate_size": 64,
            "head_dim": 8,
            "L_cycles": 2,
            # Attention would be nearly uniform: no norm here has a gain to add noise to.
            "initializer_range": 0.15,
        },
    ),
}

TINY_MODELS = tuple(_BUILDERS)


def tiny(name: str = "smelt", *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model of some thousand parameters, in eval mode; the same seed gives the same weights.

    `name` is one of `TINY_MODELS`; `overrides` change its configuration. Noise on every parameter, norms
    and learned sinks included, makes attention far from uniform, so that a test sees every term; with
    twice as much, Inkling's visits amplify rounding to more than what is to be compared.

    Raises `SmeltscopeError` for an unknown name.
    """
    if name not in _BUILDERS:
        raise SmeltscopeError(
            f"No tiny model is called {name!r}; there are {', '.join(TINY_MODELS)}."
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _BUILDERS[name](**overrides)
        with torch.no_grad():
            for parameter in dict.fromkeys(model.parameters()):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()
