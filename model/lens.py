"""The TransformerLens view: `TransformerBridge.boot_transformers(folder)` for SMELT checkpoints.

`blocks.N` is execution N, so every visit of a layer has hook points of its own. Module outputs are
the writes: `hook_resid_post - hook_resid_pre == hook_attn_out + hook_mlp_out` in every block.

This module imports TransformerLens, which takes seconds; nothing else in smeltscope imports it.
TransformerLens loads it through an entry point, `lens_registration` when TransformerLens is imported.
"""

from importlib.metadata import entry_points
from typing import Any

from torch import Tensor, nn
from transformer_lens.factories.architecture_adapter_factory import (
    SUPPORTED_ARCHITECTURES,
    ArchitectureAdapterFactory,
)
from transformer_lens.model_bridge.generalized_components import PositionEmbeddingsAttentionBridge
from transformer_lens.model_bridge.supported_architectures.qwen3_moe import (
    Qwen3MoeArchitectureAdapter,
)

ARCHITECTURE = "SmeltForCausalLM"


class SmeltAttentionBridge(PositionEmbeddingsAttentionBridge):
    """Attention that keeps to the residual scale and finds its KV cache.

    With `use_attn_result` TransformerLens multiplies by W_O itself and bypasses the output
    projection's forward, where a layer of the span has its residual scale.
    """

    def set_original_component(self, component: nn.Module) -> None:
        super().set_original_component(component)
        # Read by TransformerLens where it fires hook_result and where it stacks head results.
        self._result_contribution_scale = getattr(component.o_proj, "scale", 1.0)

    def _compute_per_head_result(self, z_4d: Tensor, n_heads: int, d_head: int) -> Tensor:
        # TransformerLens shows the scaled result to hooks and returns it unscaled, for models that
        # scale outside of their attention.
        unscaled = super()._compute_per_head_result(z_4d, n_heads, d_head)
        return unscaled * self._result_contribution_scale

    def _update_kv_cache(self, k: Tensor, v: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        # transformers 5.24 calls the cache `cache`; TransformerLens 4.3 looks for the former name,
        # finds none, and would generate as if there had been no prompt.
        return super()._update_kv_cache(k, v, **{"past_key_values": kwargs.get("cache"), **kwargs})


class SmeltArchitectureAdapter(Qwen3MoeArchitectureAdapter):
    """Qwen3-MoE's adapter over executions.

    Not mapped: the loop itself (blocks know their execution, not their layer and visit: read
    `bridge.original_model.config.executions`), and what lies inside the experts (transformers keeps
    them in one tensor). Without QK-norm `hook_q_normed` and `hook_k_normed` fire on q and k as they
    are.
    """

    # A norm of the span feeds several visits through the same weights; folding its gain into them
    # for one visit would change them for all.
    supports_fold_ln = False

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        blocks = self.components["blocks"]
        attention = blocks.submodules["attn"]
        blocks.submodules["attn"] = SmeltAttentionBridge(
            name=str(attention.name), config=self.cfg, submodules=attention.submodules
        )


def register() -> None:
    """Make TransformerLens accept SMELT checkpoints; harmless when repeated.

    Its loader looks an architecture up in one table before it reads entry points into another.
    """
    SUPPORTED_ARCHITECTURES[ARCHITECTURE] = SmeltArchitectureAdapter
    group = "transformer_lens.architectures"
    if not entry_points(group=group, name=ARCHITECTURE):  # a checkout that was never installed
        ArchitectureAdapterFactory.register_adapter(ARCHITECTURE, SmeltArchitectureAdapter)


register()
