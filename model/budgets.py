"""Budgets: what a configuration costs in parameters, FLOPs and cache, by formula; and how sparse it is.

Per token and layer, with H the width, Q query heads and G K/V heads of size d, E experts of width W of which k are
active, and documents of T tokens:

| | parameters | FLOPs of a forward |
|---|---|---|
| projections of attention | H Q d + 2 H G d + Q d H | twice that |
| their biases, if any | Q d + 2 G d + H | not counted |
| attention itself | | 4 Q d (T + 1) / 2, causal; 4 Q d T, the full square |
| router | H E | twice that |
| experts | 3 H W E, of which 3 H W k active | 6 H W k |
| norms | 2 H, and 2 d with QK-norm | not counted |

A multiply-add is two FLOPs. Parameters count each layer once, FLOPs and cache each execution; to the parameters comes
the last norm, H. Embeddings and the language-model head are apart. A backward pass costs twice a forward, so that
training costs three forwards. Where documents differ in length, T is the mean over tokens of the length of their
document, sum T^2 / sum T.
Source: arXiv 2609.01343 matches these three budgets; Kaplan et al., arXiv 2001.08361, count FLOPs so.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from smeltscope.model.configuration import SmeltConfig

Number: TypeAlias = Any  # a number, or an array of them: one for each of many configurations


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What budgets depend on. Arrays broadcast: a grid of configurations is counted at once."""

    layers: int
    executions: int
    width: Number
    heads: Number
    kv_heads: Number
    head_size: Number
    experts: Number
    active_experts: int
    expert_width: Number
    vocabulary: int
    tied_embeddings: bool = False
    qk_norm: bool = False
    attention_bias: bool = False


def has_sizes(config: Any) -> bool:
    """Whether `sizes_of` takes it: a SMELT, a Baseline, or a Qwen3-MoE whose layers are all like theirs; without a window."""
    if config.model_type not in ("smelt", "qwen3_moe") or config.sliding_window is not None:
        return False
    return not config.mlp_only_layers and config.decoder_sparse_step == 1


def sizes_of(config: Qwen3MoeConfig) -> Sizes:
    """The sizes of a SMELT or a Baseline, also of one that runs with another number of visits, or of a Qwen3-MoE."""
    if isinstance(config, SmeltConfig):
        layers, qk_norm = len({e.layer for e in config.executions}), config.qk_norm
        executions = len(config.executions)
    else:
        layers, qk_norm = config.num_hidden_layers, True
        executions = layers
    return Sizes(
        layers=layers,
        executions=executions,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_size=getattr(config, "head_dim", config.hidden_size // config.num_attention_heads),
        experts=config.num_experts,
        active_experts=config.num_experts_per_tok,
        expert_width=config.moe_intermediate_size,
        vocabulary=config.vocab_size,
        tied_embeddings=config.tie_word_embeddings,
        qk_norm=qk_norm,
        attention_bias=config.attention_bias,
    )


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a configuration costs. FLOPs and bytes are for each token; FLOPs are without the head."""

    parameters: Number  # without embeddings and head
    active_parameters: Number  # of one physical traversal: k experts in place of E
    embedding_parameters: Number  # embeddings, and the head where it is not tied to them
    inference_flops: Number  # of a forward
    full_square_flops: Number  # the same if attention computed the whole square
    head_flops: Number  # of the language-model head, in a forward
    cache_bytes: Number  # of the KV cache

    @property
    def training_flops(self) -> Number:
        """Forward and backward."""
        return 3 * self.inference_flops


def budget_of(sizes: Sizes, *, document_length: float, cache_bits: int = 16) -> Budget:
    """The budget on documents of `document_length` tokens, with a cache of numbers of `cache_bits`."""
    queries, keys = sizes.heads * sizes.head_size, sizes.kv_heads * sizes.head_size
    attention = sizes.width * (2 * queries + 2 * keys)
    biases = sizes.attention_bias * (queries + 2 * keys + sizes.width)
    norms = 2 * sizes.width + sizes.qk_norm * 2 * sizes.head_size
    router = sizes.width * sizes.experts
    expert = 3 * sizes.width * sizes.expert_width
    shared = attention + biases + norms + router
    multiplied = 2 * (attention + router + expert * sizes.active_experts)
    vocabulary = sizes.vocabulary * sizes.width
    return Budget(
        parameters=sizes.layers * (shared + expert * sizes.experts) + sizes.width,
        active_parameters=sizes.layers * (shared + expert * sizes.active_experts) + sizes.width,
        embedding_parameters=vocabulary * (1 if sizes.tied_embeddings else 2),
        inference_flops=sizes.executions * (multiplied + 2 * queries * (document_length + 1)),
        full_square_flops=sizes.executions * (multiplied + 4 * queries * document_length),
        head_flops=2 * vocabulary,
        cache_bytes=sizes.executions * 2 * keys * cache_bits // 8,
    )


def dense_counterpart(sizes: Sizes) -> Sizes:
    """The same layers run once, with the active experts for all there are: S = 0 where nothing else is named."""
    return dataclasses.replace(sizes, executions=sizes.layers, experts=sizes.active_experts)


def sparsity(budget: Budget, dense: Budget) -> Number:
    """The paper's compute-equivalent sparsity: S = 1 - N_act / N with N_act = (F / F0) N0.

    F are training FLOPs, N parameters; F0 and N0 those of `dense`, which defines S = 0. The paper takes a model of the
    same scale and architecture; for its SMELTs, whose S = 0 is a configuration of its own, `dense_counterpart`
    gives S up to .010 lower where experts are sparse.
    """
    active = budget.training_flops / dense.training_flops * dense.parameters
    return 1 - active / budget.parameters


def count_parameters(config: Any) -> tuple[int, int]:
    """Parameters of any causal language model of transformers, counted on one without memory.

    Returns (without embeddings and head, of embeddings and head); tied ones count once.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    ends = {
        id(m.weight) for m in (model.get_input_embeddings(), model.get_output_embeddings()) if m
    }
    sizes = {id(p): p.numel() for p in model.parameters()}
    at_ends = sum(size for key, size in sizes.items() if key in ends)
    return sum(sizes.values()) - at_ends, at_ends
