"""Models built by hand, so that what a probe has to find in them is known.

`control-moved-sink` (positive): in both looped layers every head puts .60 of its attention on the first token at
visit 1 and .02 at visit 2, at every position and for any text that begins with the start token (within .02, in
bfloat16 within .03).
`control-same-visits` (negative): the second visit of a layer repeats the first, bit for bit.

Both are SMELTs of 4 layers, of which 1 and 2 run twice, over smelt-tiny's vocabulary. The residual stream, 64 wide,
holds what the construction reads and writes apart from the tokens' codes (`CONSTANT` to `FILL`). Before
the span every position has the same norm, 8, or with baselines sqrt(192), so that an RMSNorm multiplies by
a known factor.
"""

import math
from typing import Any

import torch
from torch.nn.functional import silu

from smeltscope.errors import SmeltscopeError
from smeltscope.model.configuration import SmeltConfig
from smeltscope.model.smelt import SmeltForCausalLM

CONTROLS = ("control-moved-sink", "control-same-visits")
CONTROL_TOKENIZER = "smelt-tiny"  # the shipped checkpoint whose tokenizer they use
SINK_MASS = (0.60, 0.02)  # of control-moved-sink, at visit 1 and 2

# Channels of the residual stream: 4 at every position; 4 at the start token; what visit 1 leaves for visit 2; two that
# are not empty before they are written; 48 signs, other ones for each token; 4 at the start token, which has no signs.
CONSTANT, START, WRITTEN, BASELINES, CODE, FILL = 0, 1, 2, (3, 4), slice(16, 64), (5, 6)
_START_TOKEN, _HEAD_DIM = 0, 32


def build_control(name: str) -> SmeltForCausalLM:
    """The control of that name, in float32 on the CPU; the same weights each time.

    Raises `SmeltscopeError` for an unknown name.
    """
    if name not in CONTROLS:
        raise SmeltscopeError(f"No control is called {name}; there are {', '.join(CONTROLS)}.")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = SmeltForCausalLM(_config())
        _code_tokens(model)
        (_move_the_sink if name == "control-moved-sink" else _repeat_visits)(model)
    return model.eval()


def _config() -> SmeltConfig:
    return SmeltConfig(
        vocab_size=4096,
        hidden_size=64,
        num_physical_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=_HEAD_DIM,
        qk_norm=False,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        max_position_embeddings=256,
        # Rotary planes turn by 1 to 2.4e-6 radians a token: over a context the last one stands still.
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        bos_token_id=_START_TOKEN,
        eos_token_id=1,
        pad_token_id=2,
    )


def _code_tokens(model: SmeltForCausalLM) -> None:
    """Embeddings, and layers that write into the tokens' codes only, too little to change the norm."""
    embedding = model.model.embed_tokens.weight
    embedding.zero_()
    embedding[:, CODE] = torch.randint(0, 2, embedding[:, CODE].shape) * 2.0 - 1
    embedding[_START_TOKEN, CODE], embedding[_START_TOKEN, [START, *FILL]] = 0, 4
    embedding[:, CONSTANT] = 4
    model.model.norm.weight.fill_(1 / 64)  # logits of the order of 1
    layers: Any = model.model.layers
    for layer in (layer for layer in layers if layer.execution.visit == 1):
        for weight in (layer.self_attn.o_proj.weight, layer.mlp.experts.down_proj):
            weight.mul_(0.1)[..., : CODE.start, :] = 0


def _move_the_sink(model: SmeltForCausalLM) -> None:
    """Every query sees two keys: its own, by relative position, and the start token's.

    The score of a key at distance d is S sum_i r_i^2 cos(d f_i) over the six fastest rotary planes, with
    S = CONSTANT^2 / sqrt(head size): K = 43 at d = 0, smaller by .24 K or more elsewhere. The start token's key has nothing
    in these planes, but lies in the two that nearly stand still, where its score is the same from everywhere:
    in one K too, in the other the logit of the mass it is to have, which is small, so that 16-bit
    numbers hold it well. (All others they hold exactly; as one number, K and the logit would be rounded by .1.) There
    a query reads a CONSTANT + b WRITTEN. The attention of the span's last layer writes 4 into
    WRITTEN, wherever it looks, for all its values are alike. So both layers find 0 there at visit 1 and 4 at visit 2.
    """
    layers: Any = model.model.layers
    unit = 16 / math.sqrt(_HEAD_DIM)  # S; that of CONSTANT and WRITTEN with START, too
    at_first, later = (torch.tensor(SINK_MASS).logit() / unit).tolist()
    # WRITTEN takes its share of the norm: all scores of visit 2 are 64 / (64 + 4^2) of what they were.
    a, b = at_first, later * (64 + 16) / 64 - at_first
    fast = slice(6)
    r = torch.tensor([2.75, 1.25, 1.25, 1.25, 1.25, 1.25])
    stiller, still = _HEAD_DIM // 2 - 1, _HEAD_DIM // 2 - 2
    for layer in model.config.span:
        attention = layers[layer].self_attn
        q = attention.q_proj.weight.zero_().view(-1, _HEAD_DIM, model.config.hidden_size)  # by head
        k = attention.k_proj.weight.zero_().view(-1, _HEAD_DIM, model.config.hidden_size)
        q[:, fast, CONSTANT], k[:, fast, CONSTANT], k[:, fast, START] = r, r, -r
        q[:, stiller, CONSTANT], k[:, stiller, START] = r @ r, 1.0
        q[:, still, CONSTANT], q[:, still, WRITTEN], k[:, still, START] = a, b, 1.0
    _write_by_attention(layers[model.config.span[-1]], WRITTEN, 4.0, norm=8.0)


def _repeat_visits(model: SmeltForCausalLM) -> None:
    """What the span's first layer adds, its second takes away: visit 2 begins where visit 1 began.

    Attention and experts write 1/2, then -1/2 into BASELINES, which hold 8: numbers are so coarse there
    (steps of 1e-6 in float32, of 1/16 in bfloat16) that rounding errors of the writes are rounded
    away. Attention and routing are those of random weights. The layer before the span writes nothing,
    so that all norms are exact.
    """
    layers: Any = model.model.layers
    span = model.config.span
    model.model.embed_tokens.weight[:, BASELINES] = 8
    for layer in layers[: span.stop]:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.experts.down_proj.zero_()
    squared_norm = 64 + 2 * 8.0**2
    for layer, write in zip(span, (0.5, -0.5), strict=True):
        attention = layers[layer].self_attn
        attention.q_proj.weight.normal_(std=0.15)  # attention is uneven
        attention.k_proj.weight.normal_(std=0.15)
        layers[layer].mlp.gate.weight[:, [CONSTANT, *BASELINES]] = (
            0  # which would outvote the tokens
        )
        before = 8.0 if write > 0 else 8.5
        _write_by_attention(layers[layer], BASELINES[0], write, norm=math.sqrt(squared_norm))
        squared_norm += (before + write) ** 2 - before**2
        _write_by_experts(layers[layer], BASELINES[1], write, norm=math.sqrt(squared_norm))
        squared_norm += (before + write) ** 2 - before**2


def _write_by_attention(layer: Any, channel: int, write: float, *, norm: float) -> None:
    """Let a looped layer's attention write the same at every position whose input has that norm."""
    attention = layer.self_attn
    constant = 4 * 8 / norm  # CONSTANT after the RMSNorm
    v = attention.v_proj.weight.view(-1, _HEAD_DIM, attention.v_proj.in_features)
    v[:, 0], v[:, 0, CONSTANT] = 0, 1
    heads = attention.o_proj.weight[channel].view(-1, _HEAD_DIM)
    heads[:, 0] = write / (len(heads) * constant * attention.o_proj.scale)


def _write_by_experts(layer: Any, channel: int, write: float, *, norm: float) -> None:
    """Let every expert of a looped layer write the same at every position whose input has that norm."""
    experts = layer.mlp.experts
    constant = torch.tensor(4 * 8 / norm)
    neuron = torch.tensor([0, experts.intermediate_dim])  # its gate and its up projection
    experts.gate_up_proj[:, neuron] = 0
    experts.gate_up_proj[:, neuron, CONSTANT] = 1
    experts.down_proj[:, channel, 0] = write / (silu(constant) * constant * layer.mlp.scale)
