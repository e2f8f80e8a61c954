"""SMELT: Qwen3-MoE layers, of which a span runs several times with the same weights.

The model lists one decoder layer per execution. The visits of a layer are modules of their own, tied to the same
parameters, so every visit has a name to hook, the KV cache gets a slot for each, and a checkpoint holds a layer
once. Module outputs are the writes: in the span the output projection and the experts multiply theirs by the
residual scale.

Source: "SMELT: Scaling Laws for Compute-Matched MoE Looped Transformers", arXiv 2609.01343.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.generation import GenerationMixin
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeAttention,
    Qwen3MoeDecoderLayer,
    Qwen3MoeForCausalLM,
    Qwen3MoeModel,
    Qwen3MoePreTrainedModel,
    Qwen3MoeRMSNorm,
    Qwen3MoeRotaryEmbedding,
    Qwen3MoeSparseMoeBlock,
    Qwen3MoeTopKRouter,
)
from transformers.utils.output_capturing import OutputRecorder

from smeltscope.errors import SmeltscopeError
from smeltscope.model.configuration import SmeltConfig
from smeltscope.model.executions import Execution
from smeltscope.model.lens_registration import register_with_transformer_lens


class ScaledLinear(nn.Linear):
    """A projection like another one, whose output is multiplied by a constant."""

    def __init__(self, like: nn.Linear, scale: float) -> None:
        super().__init__(like.in_features, like.out_features, bias=like.bias is not None)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale  # (batch, position, width)


class ScaledSparseMoeBlock(Qwen3MoeSparseMoeBlock):
    """Experts whose output is multiplied by a constant."""

    def __init__(self, config: SmeltConfig, scale: float) -> None:
        super().__init__(config)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale  # (batch, position, width)


class SmeltDecoderLayer(Qwen3MoeDecoderLayer):
    """One execution of a layer; `layer_idx` of its attention, its slot in the cache, is the execution."""

    def __init__(self, config: SmeltConfig, execution: Execution) -> None:
        super().__init__(config, layer_idx=execution.index)
        self.execution = execution
        attention: Any = self.self_attn
        if not config.qk_norm:
            attention.q_norm, attention.k_norm = nn.Identity(), nn.Identity()
        if execution.layer in config.span:
            scale = config.write_scale(execution.layer)
            attention.o_proj = ScaledLinear(attention.o_proj, scale)
            self.mlp = ScaledSparseMoeBlock(config, scale)


# What decides which stored configuration belongs to a checkpoint.
_HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


class SmeltPreTrainedModel(Qwen3MoePreTrainedModel):
    config_class = SmeltConfig
    config: SmeltConfig
    _no_split_modules = ["SmeltDecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {  # noqa: RUF012
        "router_logits": OutputRecorder(Qwen3MoeTopKRouter, index=0),
        "hidden_states": SmeltDecoderLayer,
        "attentions": Qwen3MoeAttention,
    }

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # transformers looks for a decorator in this file's source, finds none and would fall back to the slow
        # eager experts; the experts are Qwen3-MoE's own, which have every implementation.
        return True

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *args: Any, config: Any = None, **kwargs: Any
    ) -> Any:
        if isinstance(config, SmeltConfig):
            hub = {name: kwargs[name] for name in _HUB_OPTIONS if name in kwargs}
            stored = SmeltConfig.from_pretrained(pretrained_model_name_or_path, **hub)
            if config.executions != stored.executions:
                # A checkpoint names its layers by execution: they would load into the wrong places.
                raise SmeltscopeError(
                    "The given configuration runs other executions than the checkpoint was saved with; "
                    "use SmeltForCausalLM.from_pretrained(folder, num_visits=...) instead."
                )
        return super().from_pretrained(
            pretrained_model_name_or_path, *args, config=config, **kwargs
        )

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        if self.config.num_visits == 0:
            raise SmeltscopeError(
                "A model that runs with 0 visits does not hold the layers of its span, and a checkpoint "
                "without them could not be looped again; save the model it was made from."
            )
        super().save_pretrained(save_directory, *args, **kwargs)

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        # The stock version drops the mapping unless the embeddings are tied.
        return dict(self._tied_weights_keys or {})


def tied_visits(model: "SmeltModel", prefix: str = "") -> dict[str, str]:
    """{parameter of a later visit: the same parameter of the first visit}, by name."""
    first = {e.layer: e.index for e in model.config.executions if e.visit == 1}
    return {
        f"{prefix}layers.{e.index}.{name}": f"{prefix}layers.{first[e.layer]}.{name}"
        for e in model.config.executions
        if e.visit > 1
        for name, _ in model.layers[e.index].named_parameters()
    }


class SmeltModel(SmeltPreTrainedModel, Qwen3MoeModel):
    """The stack without the language-model head; the forward is Qwen3-MoE's, over executions."""

    def __init__(self, config: SmeltConfig) -> None:
        # Qwen3MoeModel's own __init__ would build its layers first, at the price of a second model.
        SmeltPreTrainedModel.__init__(self, config)
        if config.num_hidden_layers != len(config.executions):
            raise SmeltscopeError(
                f"The configuration was changed after it was made: {config.num_hidden_layers} executions "
                f"became {len(config.executions)}; use config.with_visits(...) instead."
            )
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(SmeltDecoderLayer(config, e) for e in config.executions)
        self.norm = Qwen3MoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3MoeRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self._tied_weights_keys = tied_visits(self)
        self.post_init()


class SmeltForCausalLM(SmeltPreTrainedModel, Qwen3MoeForCausalLM, GenerationMixin):
    """A causal language model; with one visit it is the Baseline, and Qwen3-MoE exactly."""

    def __init__(self, config: SmeltConfig) -> None:
        SmeltPreTrainedModel.__init__(self, config)
        self.model = SmeltModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.router_aux_loss_coef = config.router_aux_loss_coef
        self.num_experts = config.num_experts
        self.num_experts_per_tok = config.num_experts_per_tok
        self._tied_weights_keys = tied_visits(self.model, "model.")
        if config.tie_word_embeddings:
            self._tied_weights_keys["lm_head.weight"] = "model.embed_tokens.weight"
        self.post_init()

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        *args: Any,
        num_visits: int | None = None,
        **kwargs: Any,
    ) -> "SmeltForCausalLM":
        """Load a checkpoint, to run with `num_visits` visits (by default as it was trained)."""
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model, info = loaded if isinstance(loaded, tuple) else (loaded, None)
        if num_visits is not None:
            model = with_visits(model, num_visits)
        return model if info is None else (model, info)  # type: ignore[return-value]


def with_visits(
    model: SmeltForCausalLM, num_visits: int, residual_scale: float | None = None
) -> SmeltForCausalLM:
    """The same weights, not copied, run with another number of visits; saves again as what it now is.

    A Baseline may be looped this way too, and with 0 visits the span is left out. The residual scale
    stays what the checkpoint was trained with unless another is given.
    """
    config = model.config.with_visits(num_visits, residual_scale)
    first = {e.layer: e.index for e in model.config.executions if e.visit == 1}
    if any(e.layer not in first for e in config.executions):
        raise SmeltscopeError(
            "This model runs with 0 visits and does not hold the layers of its span; change the number of "
            "visits of the model it was made from."
        )
    if any(p.device.type == "meta" for p in model.parameters()):
        raise SmeltscopeError(
            "Another number of visits needs all weights in memory; load the checkpoint without offloading."
        )
    with torch.device("meta"):
        revisited = SmeltForCausalLM(config)
    for name in ("embed_tokens", "norm", "rotary_emb"):
        setattr(revisited.model, name, getattr(model.model, name))
    revisited.lm_head = model.lm_head
    for execution in config.executions:
        weights = model.model.layers[first[execution.layer]].state_dict(keep_vars=True)
        revisited.model.layers[execution.index].load_state_dict(weights, assign=True)
    revisited.generation_config = model.generation_config
    return revisited.train(model.training)


AutoConfig.register(SmeltConfig.model_type, SmeltConfig)
AutoModel.register(SmeltConfig, SmeltModel)
AutoModelForCausalLM.register(SmeltConfig, SmeltForCausalLM)
register_with_transformer_lens()
