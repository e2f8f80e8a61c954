"""Sites: the places of a decoder layer where tensors are read, found in any model of transformers.

| site | value |
|---|---|
| `resid_pre`, `resid_post` | what the layer gets and gives, (B, T, width) |
| `attn_in`, `mlp_in` | what attention and MLP read, after the norm, (B, T, width) |
| `attn_out`, `mlp_out` | what they write into the residual stream, already scaled, (B, T, width) |
| `resid_mid` | the stream between the two writes, (B, T, width) |
| `q`, `k`, `v` | projections by head, before QK-norm and rotary embedding, (B, T, head, size) |
| `q_norm`, `k_norm` | after QK-norm, before rotary embedding, (B, T, head, size) |
| `attention` | what the kernel computes with, an `Attention` |
| `pv` | what each head read, before the output projection, (B, T, head, size) |
| `router` | a `Routing` |

A layer has the sites that its modules show: no `router` without experts, no `q_norm` without QK-norm. The writes are
looked for at the outputs of modules, and a short forward checks that they add up to the layer's update; a layer where they do
not (it rescales the stream, as nGPT does) has no `attn_out`, `mlp_out` and `resid_mid`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

SITES = (
    "resid_pre",
    "attn_in",
    "q",
    "k",
    "v",
    "q_norm",
    "k_norm",
    "attention",
    "pv",
    "attn_out",
    "resid_mid",
    "mlp_in",
    "router",
    "mlp_out",
    "resid_post",
)


@dataclass(frozen=True, kw_only=True)
class Routing:
    """What a router decided. Expert sets are its own indices: biases and groups make them differ from the top logits."""

    logits: Tensor  # (B, T, expert), float32
    experts: Tensor  # (B, T, k), int64, the chosen experts in no order
    weights: Tensor  # (B, T, k), float32, what their outputs are multiplied by
    rounding: float = torch.finfo(torch.float32).eps  # of the number type that the logits came in


@dataclass(frozen=True, kw_only=True)
class Tap:
    """Where a site is read: before or after a module runs."""

    module: nn.Module
    at: Literal["input", "output"]
    read: Callable[[Any, Sequence[int]], Any]  # (the module's input or output, (B, T)) -> value
    clone: bool = False  # the model changes the tensor in place later


Taps = Mapping[str, Tap]
_known: WeakKeyDictionary[nn.Module, dict[nn.Module, Taps]] = WeakKeyDictionary()

_TOKENS = 11  # of the forward that checks; no number of heads, so that axes can be told apart
_MLP_NAMES = ("mlp", "block_sparse_moe", "feed_forward", "ffn", "moe")
# What a layer applies to a sublayer's output before adding it, outermost first.
_AFTER_ATTENTION = ("post_attention_convolution", "post_self_attn_layernorm")
_AFTER_MLP = ("post_mlp_convolution", "post_feedforward_layernorm", "post_mlp_layernorm")


def is_layer_attention(module: nn.Module) -> bool:
    """A decoder layer's own attention is causal and knows its slot in the cache."""
    return getattr(module, "is_causal", False) and hasattr(module, "layer_idx")


def taps_of(model: PreTrainedModel, layers: Sequence[nn.Module]) -> dict[nn.Module, Taps]:
    """Where each layer's sites are read (all but `attention`, `pv` and `resid_mid`, which capture makes itself).

    Runs a forward over a few tokens when a model is seen for the first time, to check what was found.
    """
    if set(_known.get(model, ())) != set(layers):  # never seen, or its layers were exchanged
        found = {layer: _find(layer) for layer in dict.fromkeys(layers)}
        _known[model] = _checked(model, found)
    return _known[model]


def _find(layer: nn.Module) -> dict[str, Tap]:
    taps = {
        "resid_pre": Tap(module=layer, at="input", read=_tensor),
        "resid_post": Tap(module=layer, at="output", read=_tensor),
    }
    attention = next((m for m in layer.modules() if is_layer_attention(m)), None)
    if attention is not None:
        taps["attn_in"] = Tap(module=attention, at="input", read=_tensor)
        write = _first(layer, _AFTER_ATTENTION) or attention
        if hasattr(layer, "post_feedforward_layernorm"):  # normed after both: Gemma, OLMo 2
            write = _first(layer, ("post_attention_layernorm",)) or write
        taps["attn_out"] = Tap(module=write, at="output", read=_tensor)
        taps |= _projections(attention)
    mlp = _first(layer, _MLP_NAMES)
    if mlp is not None:
        taps["mlp_in"] = Tap(module=mlp, at="input", read=_tensor)
        write = _first(layer, _AFTER_MLP) or mlp
        taps["mlp_out"] = Tap(module=write, at="output", read=_tensor)
        routers = [m for m in mlp.modules() if type(m).__name__.lower().endswith("router")]
        if len(routers) == 1:
            taps["router"] = Tap(module=routers[0], at="output", read=_routing)
    return taps


def _projections(attention: nn.Module) -> dict[str, Tap]:
    size = getattr(attention, "head_dim", None)
    if size is None:
        return {}
    taps = {}
    for letter in "qkv":
        module = _first(attention, (f"{letter}_proj",))
        if isinstance(module, nn.Linear) and not (letter == "q" and _is_gated(attention, module)):
            taps[letter] = Tap(module=module, at="output", read=_ByHead(size=size))
    for letter in "qk":
        norm = _first(attention, (f"{letter}_norm",))
        if norm is not None and not isinstance(norm, nn.Identity):
            taps[f"{letter}_norm"] = Tap(module=norm, at="output", read=_ByHead(size=size))
    fused = _first(attention, ("c_attn",))
    if isinstance(fused, Conv1D):  # GPT-2: queries, keys and values side by side
        for part, letter in enumerate("qkv"):
            taps[letter] = Tap(module=fused, at="output", read=_ByHead(size=size, part=part))
    return taps


def _is_gated(attention: nn.Module, projection: nn.Linear) -> bool:
    """Whether a head's queries come with a gate beside them, as in Qwen3-Next: more than the heads will give."""
    output = _first(attention, ("o_proj",))
    return isinstance(output, nn.Linear) and output.in_features != projection.out_features


def _first(parent: nn.Module, names: Sequence[str]) -> nn.Module | None:
    children = dict(parent.named_children())
    return next((children[name] for name in names if name in children), None)


def _tensor(value: Any, _: Sequence[int]) -> Tensor:
    while isinstance(value, tuple | list):
        value = value[0]
    return value


@dataclass(frozen=True, kw_only=True)
class _ByHead:
    """Reads (B, T, head, size) from what a projection or its norm gives."""

    size: int
    part: int | None = None  # of three that are fused
    heads_first: bool = False  # normed after the heads were moved in front of the tokens

    def __call__(self, value: Tensor, rows_and_tokens: Sequence[int]) -> Tensor:
        if self.part is not None:
            value = value.chunk(3, dim=-1)[self.part]
        if self.heads_first:
            value = value.transpose(1, 2)
        return value.reshape(*rows_and_tokens, -1, self.size)


def _routing(value: Any, rows_and_tokens: Sequence[int]) -> Routing:
    logits, weights, experts = value
    if weights.shape != experts.shape:  # weights spread over all experts
        weights = weights.gather(-1, experts)
    shape = (*rows_and_tokens, -1)
    return Routing(
        logits=logits.detach().float().reshape(shape),
        experts=experts.detach().reshape(shape),
        weights=weights.detach().float().reshape(shape),
        rounding=torch.finfo(logits.dtype).eps,
    )


def _checked(
    model: PreTrainedModel, found: dict[nn.Module, dict[str, Tap]]
) -> dict[nn.Module, Taps]:
    """Run a few tokens: drop what is not what it seemed, note what the model changes in place."""
    seen: dict[tuple[nn.Module, str], Any] = {}
    unchanged: dict[tuple[nn.Module, str], tuple[Tensor, int]] = {}  # with its version
    changed: set[tuple[nn.Module, str]] = set()
    heads_first: set[tuple[nn.Module, str]] = set()
    hooks = []

    def note(layer: nn.Module, site: str, tap: Tap) -> Callable[..., None]:
        def hook(module: nn.Module, *inputs_and_output: Any) -> None:
            raw = module_value(tap, inputs_and_output)
            try:
                value = tap.read(raw, (1, _TOKENS))
            except (TypeError, ValueError, AttributeError, RuntimeError, IndexError):
                value = None
            if isinstance(value, Tensor):
                unchanged[layer, site] = value, value._version
                if isinstance(tap.read, _ByHead) and raw.ndim == 4 and raw.shape[1] != _TOKENS:
                    heads_first.add((layer, site))
                value = value.clone()
            seen[layer, site] = value

        return hook

    def end(layer: nn.Module) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            for (other, site), (value, version) in unchanged.items():
                if other is layer and value._version != version:
                    changed.add((layer, site))

        return hook

    training = {m: m.training for m in model.modules()}
    model.eval()
    try:
        for layer, taps in found.items():
            for site, tap in taps.items():
                hooks.append(attach(tap, note(layer, site, tap)))
            hooks.append(layer.register_forward_hook(end(layer)))
        device = next(model.parameters()).device
        with torch.inference_mode(False), torch.no_grad():  # inference tensors have no version
            ids = torch.arange(_TOKENS, device=device)[None] % _vocabulary(model)
            model.get_decoder()(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in training.items():
            module.training = mode

    def checked(tap: Tap, place: tuple[nn.Module, str]) -> Tap:
        read = tap.read
        if isinstance(read, _ByHead) and place in heads_first:
            read = replace(read, heads_first=True)
        return replace(tap, clone=place in changed, read=read)

    return {
        layer: {
            site: checked(tap, (layer, site))
            for site, tap in taps.items()
            if seen.get((layer, site)) is not None
            and (site not in ("attn_out", "mlp_out") or _adds_up(layer, seen))
        }
        for layer, taps in found.items()
    }


def _vocabulary(model: PreTrainedModel) -> int:
    embeddings: Any = model.get_input_embeddings()
    return int(embeddings.weight.shape[0])


def _adds_up(layer: nn.Module, seen: Mapping[tuple[nn.Module, str], Any]) -> bool:
    """Whether the layer's output is its input plus the two writes, up to rounding."""
    names = ("resid_pre", "attn_out", "mlp_out", "resid_post")
    parts = [seen[layer, name] for name in names if seen.get((layer, name)) is not None]
    if len(parts) < len(names) or len({part.shape for part in parts}) > 1:
        return False
    before, attn, mlp, after = parts
    size = max(part.abs().max().item() for part in parts)
    error = (before.float() + attn.float() + mlp.float() - after.float()).abs().max().item()
    return error <= 8 * torch.finfo(after.dtype).eps * size


def module_value(tap: Tap, inputs_and_output: Sequence[Any]) -> Any:
    """What a hook got: the first input (hidden states may come by name), or the output."""
    if tap.at == "output":
        return inputs_and_output[-1]
    args, kwargs = inputs_and_output
    return args[0] if args else kwargs["hidden_states"]


def attach(tap: Tap, hook: Callable[..., None]) -> Any:
    """Register a hook that returns nothing, so that the model computes as before."""
    if tap.at == "input":
        return tap.module.register_forward_pre_hook(hook, with_kwargs=True)
    return tap.module.register_forward_hook(hook)
