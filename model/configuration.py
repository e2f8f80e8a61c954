"""SmeltConfig: what a SMELT model, or its unlooped Baseline, is made of."""

import copy
import math
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import Qwen3MoeConfig

from smeltscope.errors import SmeltscopeError
from smeltscope.model.executions import Execution, unroll


def default_span(num_physical_layers: int) -> tuple[int, int]:
    """The paper's looped span, the middle half: m = L // 2 layers from floor((L - m) / 2), half-open."""
    span = num_physical_layers // 2
    start = (num_physical_layers - span) // 2
    return start, start + span


@strict
class SmeltConfig(Qwen3MoeConfig):
    """Qwen3-MoE's configuration and the loop.

    `num_physical_layers` layers are stored once; `loop_start:loop_stop` (half-open, the paper's
    middle half by default) run `num_visits` times as a block. One visit is the Baseline.
    `residual_scale` multiplies what attention and experts of the span write into the residual stream; by
    default 1 / num_visits, and it stays as trained when a checkpoint runs with another number of
    visits. `qk_norm` puts an RMSNorm on every head's Q and K.

    `num_hidden_layers` is derived: the number of executions (the KV cache and TransformerLens read it).

    Raises `SmeltscopeError` when the values contradict each other.
    """

    model_type = "smelt"

    num_hidden_layers: int | None = None  # type: ignore[assignment]  # executions, derived
    num_physical_layers: int = 12
    loop_start: int | None = None
    loop_stop: int | None = None
    num_visits: int = 2
    residual_scale: float | None = None
    qk_norm: bool = True
    head_dim: int | None = None
    norm_topk_prob: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        default_start, default_stop = default_span(self.num_physical_layers)
        self.loop_start = default_start if self.loop_start is None else self.loop_start
        self.loop_stop = default_stop if self.loop_stop is None else self.loop_stop
        self._check_loop()
        if self.num_visits == 0:
            raise SmeltscopeError(
                "num_visits is 0: a model that is made or stored has its span visited at least once; "
                "with_visits(0) runs one without its span."
            )
        if self.residual_scale is None:
            self.residual_scale = 1.0 / self.num_visits
        if self.head_dim is None:
            self.head_dim = self._default_head_dim()
        executions = len(self.executions)
        if self.num_hidden_layers not in (None, executions):
            raise SmeltscopeError(
                f"The configuration contradicts itself: num_hidden_layers is {self.num_hidden_layers}, but "
                f"{self.num_physical_layers} layers with {self.loop_start}:{self.loop_stop} run "
                f"{self.num_visits} times make {executions} executions; leave num_hidden_layers out."
            )
        self.num_hidden_layers = executions
        super().__post_init__(**kwargs)
        self._check_sizes()

    @property
    def span(self) -> range:
        """The looped layers."""
        assert self.loop_start is not None and self.loop_stop is not None
        return range(self.loop_start, self.loop_stop)

    @property
    def executions(self) -> list[Execution]:
        """Executions in order, each a (layer, visit) pair."""
        span = self.span
        return unroll(self.num_physical_layers, span.start, span.stop, self.num_visits)

    def write_scale(self, layer: int) -> float:
        """What a layer's writes are multiplied by: the residual scale in the span, 1 outside."""
        assert self.residual_scale is not None
        return self.residual_scale if layer in self.span else 1.0

    def with_visits(self, num_visits: int, residual_scale: float | None = None) -> "SmeltConfig":
        """The same model run with another number of visits; 0 leaves the span out.

        The residual scale stays what the model was trained with unless another is given.
        """
        config = copy.deepcopy(self)
        config.num_visits = num_visits
        if residual_scale is not None:
            config.residual_scale = float(residual_scale)
        config._check_loop()
        config.num_hidden_layers = len(config.executions)
        return config

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> "SmeltConfig":
        if "num_visits" in kwargs:
            # transformers would set the attribute and leave the layers of the checkpoint misnamed.
            raise SmeltscopeError(
                "To run a checkpoint with another number of visits use "
                "SmeltForCausalLM.from_pretrained(folder, num_visits=...) or "
                "smeltscope.load_checkpoint(folder, visits=...); the Auto classes cannot."
            )
        return super().from_dict(config_dict, **kwargs)

    def _default_head_dim(self) -> int:
        if self.num_attention_heads < 1 or self.hidden_size % self.num_attention_heads:
            raise SmeltscopeError(
                f"hidden_size {self.hidden_size} is not divisible by num_attention_heads "
                f"{self.num_attention_heads}; choose divisible sizes or give head_dim."
            )
        return self.hidden_size // self.num_attention_heads

    def _check_loop(self) -> None:
        if self.num_physical_layers < 1:
            raise SmeltscopeError(
                f"num_physical_layers is {self.num_physical_layers}; a model needs at least one layer."
            )
        assert self.loop_start is not None and self.loop_stop is not None
        if not 0 <= self.loop_start <= self.loop_stop <= self.num_physical_layers:
            raise SmeltscopeError(
                f"The looped span {self.loop_start}:{self.loop_stop} does not lie inside the stack of "
                f"{self.num_physical_layers} layers; need 0 <= loop_start <= loop_stop <= "
                f"{self.num_physical_layers}."
            )
        if self.num_visits < 0:
            raise SmeltscopeError(
                f"num_visits is {self.num_visits}; give 1 or more, or 0 to leave the span out."
            )
        if not self.executions:
            raise SmeltscopeError(
                "num_visits is 0 and the span is the whole stack: no layer would run; give 1 or more."
            )
        if self.residual_scale is not None and not math.isfinite(self.residual_scale):
            raise SmeltscopeError(
                f"residual_scale is {self.residual_scale}; it must be a finite number."
            )

    def _check_sizes(self) -> None:
        for name in ("vocab_size", "hidden_size", "moe_intermediate_size"):
            if getattr(self, name) < 1:
                raise SmeltscopeError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.num_key_value_heads < 1 or self.num_attention_heads % self.num_key_value_heads:
            raise SmeltscopeError(
                f"num_attention_heads {self.num_attention_heads} is not divisible by num_key_value_heads "
                f"{self.num_key_value_heads}; each K/V head serves the same number of query heads."
            )
        assert self.head_dim is not None
        if self.head_dim < 2 or self.head_dim % 2:
            raise SmeltscopeError(
                f"head_dim is {self.head_dim}; rotary embeddings need an even head size."
            )
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise SmeltscopeError(
                f"num_experts_per_tok {self.num_experts_per_tok} must lie between 1 and num_experts "
                f"{self.num_experts}."
            )
        if self.mlp_only_layers or self.decoder_sparse_step != 1:
            raise SmeltscopeError(
                "A SMELT layer always has experts: leave mlp_only_layers empty and decoder_sparse_step 1."
            )
