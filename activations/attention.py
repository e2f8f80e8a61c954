"""One layer's attention as seen by the kernel: Q, K, V and the log-sum-exp, never the T x T matrix.

With lse[q] = log sum_k exp(score[q, k]), which fused kernels return anyway, the attention mass of a query on any key is
exp(score[q, k] - lse[q]): what a probe asks for costs O(T), not O(T^2).

Letters in shapes: B rows, H query heads, G key/value heads, Q queries, K keys, D head size, N chosen positions.
"""

from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.sdpa_attention import (
    create_position_bias_mask,
    sdpa_attention_forward,
)

from smeltscope.errors import SmeltscopeError


@dataclass(frozen=True, kw_only=True)
class Attention:
    """The site `attention` of one execution; tensors are the model's own, so reduce or clone before it goes on.

    `score[q, k] = scale * query[q] . key[k] + bias[q, k]`, with keys after the query hidden when `causal`. A model with
    learned sinks adds one more logit to each row: `lse` includes it, and `learned_sink` is the mass it takes, so
    that a row over keys sums to 1 - learned_sink.
    """

    query: Tensor  # (B, H, Q, D), after QK-norm and rotary embedding
    key: Tensor  # (B, G, K, D), query head h reads key head h // (H / G)
    value: Tensor  # (B, G, K, D)
    lse: Tensor  # (B, H, Q), float32, natural logarithm
    scale: float
    bias: Tensor | None  # (B or 1, H or 1, Q, K): True where seen, or a float added to scores
    causal: bool
    learned_sink: Tensor | None  # (B, H, Q), float32

    def mass_on(self, keys: Tensor) -> Tensor:
        """Attention mass of every query on chosen keys.

        `keys` holds positions, (B, N) for all heads alike or (B, H, N); the result (B, H, Q, N) is float32, 0 where
        the key is hidden and NaN for queries that see no key at all (padding on the left).
        """
        rows, heads, queries, size = self.query.shape
        if keys.ndim == 2:
            keys = keys[:, None].expand(-1, heads, -1)
        by_group = rearrange(keys, "b (g r) n -> b g (r n)", g=self.key.shape[1])
        chosen = self.key.gather(2, by_group[..., None].expand(-1, -1, -1, size))
        chosen = rearrange(chosen, "b g (r n) d -> b (g r) n d", n=keys.shape[2])
        # In float32: a product in bfloat16 would be off by more than what is measured here. Queries come last in
        # memory, which is twice as fast for few keys; the kernel's, which are not contiguous, are copied in less time than
        # their product would lose.
        scores = chosen.float() @ self.query.float().contiguous().mT  # (B, H, N, Q)
        scores.mul_(self.scale)
        if self.bias is not None:
            bias = self.bias.expand(rows, heads, -1, -1)
            index = keys[:, :, None].expand(-1, -1, queries, -1)
            scores = _add_bias(scores, bias.gather(3, index).transpose(2, 3))
        if self.causal:
            positions = torch.arange(queries, device=keys.device)
            scores.masked_fill_(keys[..., None] > positions, -torch.inf)
        return scores.sub_(self.lse[:, :, None]).exp_().transpose(2, 3)

    def rows(self, queries: Tensor) -> Tensor:
        """Whole attention rows of chosen queries: `queries` (B, N) -> (B, H, N, K), float32."""
        chosen = self.query.gather(
            2, queries[:, None, :, None].expand(-1, self.query.shape[1], -1, self.query.shape[3])
        )
        scores = _grouped_scores(chosen, self.key, self.scale)  # (B, H, N, K)
        if self.bias is not None:
            scores = _add_bias(scores, _take_queries(self.bias, queries))
        if self.causal:
            keys = torch.arange(self.key.shape[2], device=queries.device)
            hidden = keys[None, None, :] > queries[:, :, None]  # (B, N, K)
            scores = scores.masked_fill_(hidden[:, None], -torch.inf)
        lse = self.lse.gather(2, queries[:, None].expand(-1, self.lse.shape[1], -1))
        return scores.sub_(lse[..., None]).exp_()

    def sees(self, keys: Tensor) -> Tensor:
        """Which queries can see chosen keys: `keys` (B, N) -> (B, Q, N), bool."""
        queries = torch.arange(self.query.shape[2], device=keys.device)
        seen = torch.ones(1, dtype=torch.bool, device=keys.device).expand(
            keys.shape[0], len(queries), keys.shape[1]
        )
        if self.causal:
            seen = keys[:, None, :] <= queries[None, :, None]
        if self.bias is not None:
            bias = self.bias[:, 0].expand(len(keys), -1, -1)  # visibility is the same for all heads
            seen = seen & _seen(bias.gather(2, keys[:, None].expand(-1, len(queries), -1)))
        return seen

    def keys_seen(self) -> Tensor:
        """How many keys each query can see: (B, Q), int64."""
        rows, _, queries, _ = self.query.shape
        if self.bias is not None:
            seen = _seen(self.bias[:, 0])  # (B or 1, Q, K); visibility is the same for all heads
            if self.causal:
                seen = seen.tril()
            return seen.sum(-1).expand(rows, -1)
        keys = self.key.shape[2]
        counts = torch.arange(1, queries + 1, device=self.query.device).clamp_(max=keys)
        return (counts if self.causal else torch.full_like(counts, keys)).expand(rows, -1)


def values_of(mass: Tensor, value: Tensor) -> Tensor:
    """What attention rows (B, H, N, K) read from values (B, G, >= K, D): (B, H, N, D), float32."""
    grouped = rearrange(mass, "b (g r) n k -> b g (r n) k", g=value.shape[1])
    read = grouped @ value[:, :, : mass.shape[3]].float()
    return rearrange(read, "b g (r n) d -> b (g r) n d", n=mass.shape[2])


def _grouped_scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """scale * query . key in float32, without repeating the key heads: (B, H, Q, D), (B, G, K, D) -> (B, H, Q, K)."""
    grouped = rearrange(query.float(), "b (g r) q d -> b g (r q) d", g=key.shape[1])
    scores = (grouped @ key.float().transpose(2, 3)).mul_(scale)  # (B, G, r * Q, K)
    return rearrange(scores, "b g (r q) k -> b (g r) q k", q=query.shape[2])


def _take_queries(bias: Tensor, queries: Tensor) -> Tensor:
    """bias (B or 1, H or 1, Q, K) at queries (B, N) -> (B, H or 1, N, K)."""
    bias = bias.expand(queries.shape[0], -1, -1, -1)
    return bias.gather(2, queries[:, None, :, None].expand(-1, bias.shape[1], -1, bias.shape[3]))


def _add_bias(scores: Tensor, bias: Tensor) -> Tensor:
    if bias.dtype == torch.bool:
        return scores.masked_fill_(~bias, -torch.inf)
    return scores.add_(bias)


def _seen(bias: Tensor) -> Tensor:
    """transformers hides a key with False, with -inf or with the lowest number of the type."""
    return bias if bias.dtype == torch.bool else bias > torch.finfo(bias.dtype).min / 2


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Attention]:
    """transformers' SDPA attention, and the `Attention` that it computed.

    Takes what transformers hands to an attention function; the output (B, Q, H, D) is bit-equal to
    `sdpa_attention_forward` (with a position bias equal within rounding), whose own kernel call is what gives the
    log-sum-exp. Learned sinks, which SDPA lacks,
    are applied through it: a logit s turns lse into log(exp(lse) + exp(s)) and scales the output by exp of the difference.

    Raises `SmeltscopeError` for anything else that a model adds to attention.
    """
    _refuse_unknown(module, kwargs)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    causal = bool(causal) and attention_mask is None and query.shape[2] > 1
    bias = attention_mask
    if position_bias is not None:
        bias = create_position_bias_mask(position_bias, attention_mask, causal, query, key)
        causal = False
    with _KernelLogSumExp() as kernel:
        output, _ = sdpa_attention_forward(
            module, query, key, value, bias, dropout=dropout, scaling=scaling, is_causal=causal
        )
    sink_logit = _sink_logit(s_aux, sinks, query)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rows, heads, queries, _ = query.shape
    if kernel.lse is None or (sink_logit is not None and output.requires_grad):
        # A kernel's log-sum-exp carries no gradient, but the share that a learned sink takes depends on it.
        lse = _plain_lse(query, key, scale, bias, causal)
    else:
        # Kernels may pad the queries; one that packs grouped heads for a single query keeps their order.
        lse = kernel.lse[..., :queries] if kernel.lse.shape[1] == heads else kernel.lse
        lse = lse.reshape(rows, heads, queries).float()
    learned_sink = None
    # A query that sees nothing has no attention; what a kernel returns for it is arbitrary.
    blind = None if bias is None else ~_seen(bias[:, :1]).any(-1)  # (B or 1, 1, Q)
    if sink_logit is not None:
        if blind is not None:
            lse = lse.masked_fill(blind, -torch.inf)
        with_sink = torch.logaddexp(lse, sink_logit)
        keep = (lse - with_sink).exp()  # (B, H, Q): the share that keys keep
        output = (output * keep.transpose(1, 2)[..., None]).to(output.dtype)
        learned_sink, lse = (sink_logit - with_sink).exp(), with_sink
    if blind is not None:
        lse = lse.masked_fill(blind, torch.nan)
        learned_sink = None if learned_sink is None else learned_sink.masked_fill(blind, torch.nan)
    # Detached: mass made from a kernel's log-sum-exp would have a wrong gradient, so it has none.
    return output, Attention(
        query=query.detach(),
        key=key.detach(),
        value=value.detach(),
        lse=lse.detach(),
        scale=scale,
        bias=None if bias is None else bias.detach(),
        causal=causal,
        learned_sink=None if learned_sink is None else learned_sink.detach(),
    )


def _sink_logit(s_aux: Tensor | None, sinks: Tensor | None, query: Tensor) -> Tensor | None:
    """The learned sink's logit as (B, H, Q): one for each head (gpt-oss) or each token and head (Inkling)."""
    rows, heads, queries, _ = query.shape
    if s_aux is not None:
        return s_aux.float()[None, :, None].expand(rows, heads, queries)
    if sinks is not None:
        return sinks.float().reshape(rows, heads, queries)
    return None


# Passed along by transformers, without influence on attention once the mask is made.
_HARMLESS = frozenset(
    {
        "cache",
        "cache_offset",
        "cache_position",
        "conv_mask",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "deterministic",
        "inputs_embeds",
        "labels",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_ids",
        "relative_distance",
        "seq_idx",
        "sliding_window",
        "token_type_ids",
        "use_cache",
    }
)


def _refuse_unknown(module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    for name, value in kwargs.items():
        if value is not None and name not in _HARMLESS:
            raise SmeltscopeError(
                f"{type(module).__name__} passes {name!r} to attention, which smeltscope does not "
                "know; its attention would be measured wrongly, so the model is refused."
            )


class _KernelLogSumExp(TorchDispatchMode):
    """Keeps the log-sum-exp that a fused attention kernel returns beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.lse: Tensor | None = None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.scaled_dot_product_attention.default:
            # Under inference_mode the composite arrives whole; its parts must come by here too.
            with self:
                return func.decompose(*args, **kwargs)
        if func in _NO_LSE_UNLESS_ASKED:
            # Without gradients these two leave the log-sum-exp out: the argument after the bias asks for it.
            args = (*args[:4], True, *args[5:])
        result = func(*args, **kwargs)
        if func in _FUSED:
            self.lse = result[1]
        return result


_NO_LSE_UNLESS_ASKED = (
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)
_FUSED = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    *_NO_LSE_UNLESS_ASKED,
)


def _plain_lse(
    query: Tensor, key: Tensor, scale: float, bias: Tensor | None, causal: bool, block: int = 256
) -> Tensor:
    """The log-sum-exp by blocks of queries, for when PyTorch chose no fused kernel: (B, H, Q)."""
    blocks = []
    for start in range(0, query.shape[2], block):
        part = query[:, :, start : start + block]
        scores = _grouped_scores(part, key, scale)
        if bias is not None:
            scores = _add_bias(scores, bias[:, :, start : start + block])
        if causal:
            positions = torch.arange(start, start + part.shape[2], device=key.device)
            keys = torch.arange(key.shape[2], device=key.device)
            scores = scores.masked_fill(keys[None] > positions[:, None], -torch.inf)
        blocks.append(scores.logsumexp(-1))
    return torch.cat(blocks, dim=2)
