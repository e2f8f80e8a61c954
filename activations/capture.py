"""`capture`: watch a causal language model of transformers while it runs, by execution.

    with capture(model) as run:
        model(input_ids)
    run[3, "attention"].mass_on(keys)

Nothing about the model changes but where its attention function points, and that only inside the `with`.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from smeltscope.activations.attention import attend
from smeltscope.errors import SmeltscopeError
from smeltscope.model import Execution, executions_of

SITES = ("attention",)

# What a site's value is handed to: (execution, site, value), called while the forward is running.
OnSite = Callable[[Execution, str, Any], None]

_NAME = "smeltscope"
_BARE = ("sdpa", "eager")  # what a model may run on for its capture to be faithful
_captures: dict[nn.Module, "Capture"] = {}


@contextmanager
def capture(
    model: PreTrainedModel, sites: Sequence[str] = SITES, on_site: OnSite | None = None
) -> Iterator["Capture"]:
    """Watch `model` at `sites` for as long as the context lasts.

    With `on_site`, each value is handed over during the forward and let go; without it, the values of the latest
    forward are kept and read as `run[execution, site]`.

    Logits stay bit-equal for a model that runs on SDPA; one that has eager attention only gives
    the same within rounding. Everything is put back at the end, also after an exception.

    Raises `SmeltscopeError` for a model that cannot be watched faithfully, with the reason, and
    when the layers run in another order than the configuration implies.
    """
    run = Capture(model, sites, on_site)
    run._attach()
    try:
        yield run
    finally:
        run._detach()


class Capture:
    """A watched model. `executions` lists what runs in one forward, in order."""

    def __init__(
        self, model: PreTrainedModel, sites: Sequence[str], on_site: OnSite | None
    ) -> None:
        unknown = set(sites) - set(SITES)
        if unknown:
            raise SmeltscopeError(
                f"No site is called {', '.join(sorted(unknown))}; there are {', '.join(SITES)}."
            )
        if not isinstance(model, PreTrainedModel):
            raise SmeltscopeError(
                f"capture needs a model of transformers as it was loaded, not a {type(model).__name__}; "
                "a compiled or wrapped model holds the original inside."
            )
        self.model = model
        self.sites = tuple(sites)
        self.executions = executions_of(model.config)
        self._on_site = on_site
        self._values: dict[tuple[int, str], Any] = {}
        self._stack, self._layers = decoder_layers(model)
        self._position = 0  # executions begun in this forward
        self._current: Execution | None = None
        self._seen: set[str] = set()  # sites that the current execution has given
        self._hooks: list[Any] = []
        self._implementations: list[tuple[Any, str | None]] = []

    def __getitem__(self, where: tuple[int, str]) -> Any:
        """The value of a site in the latest forward: `run[execution, site]`."""
        if where not in self._values:
            execution, site = where
            reason = "it was handed to on_site" if self._on_site else "no forward has reached it"
            raise SmeltscopeError(f"Execution {execution} holds no site {site!r}: {reason}.")
        return self._values[where]

    def _attach(self) -> None:
        configs = _configs(self.model)
        for config in configs:
            self._check_implementation(config._attn_implementation)
        modules_per_execution = [self.module_of(e) for e in self.executions]
        if set(modules_per_execution) != set(self._layers):
            raise SmeltscopeError(
                f"{type(self.model).__name__} has {len(self._layers)} layers, but its configuration "
                f"implies that {len(set(modules_per_execution))} run; it cannot be labelled rightly."
            )
        self._hooks.append(self._stack.register_forward_pre_hook(self._begin_forward))
        self._hooks.append(self._stack.register_forward_hook(self._end_forward))
        for layer in self._layers:
            self._hooks.append(layer.register_forward_pre_hook(self._begin_layer))
            self._hooks.append(layer.register_forward_hook(self._end_layer))
        for module in self.model.modules():
            _captures[module] = self
        for config in configs:
            self._implementations.append((config, config._attn_implementation))
            config._attn_implementation_internal = _NAME

    def _detach(self) -> None:
        for config, implementation in self._implementations:
            config._attn_implementation_internal = implementation
        for hook in self._hooks:
            hook.remove()
        for module in self.model.modules():
            _captures.pop(module, None)
        self._current = None

    def _check_implementation(self, implementation: str | None) -> None:
        if implementation == _NAME:
            raise SmeltscopeError(
                "This model is being captured already; use one capture with all sites."
            )
        if implementation not in _BARE:
            raise SmeltscopeError(
                f"The model runs on attention implementation {implementation!r}; capture it on one of "
                f"{', '.join(_BARE)}: model.set_attn_implementation('sdpa')."
            )
        if getattr(self.model.config, "reorder_and_upcast_attn", False):
            raise SmeltscopeError(
                "reorder_and_upcast_attn computes attention outside transformers' attention "
                "interface; set it to False in the configuration to capture the model."
            )

    def module_of(self, execution: Execution) -> nn.Module:
        """The layer that runs: a looped model lists one module for each execution (SMELT) or for each layer."""
        one_each = len(self._layers) == len(self.executions)
        index = execution.index if one_each else execution.layer
        if index >= len(self._layers):
            raise SmeltscopeError(
                f"{type(self.model).__name__} has {len(self._layers)} layers, but its configuration "
                f"implies a layer {index}; it cannot be labelled rightly."
            )
        return self._layers[index]

    def _begin_forward(self, *_: Any) -> None:
        self._position, self._current = 0, None
        self._values.clear()

    def _end_forward(self, *_: Any) -> None:
        if self._position != len(self.executions):
            raise SmeltscopeError(
                f"{self._position} layers ran in this forward, but the configuration of "
                f"{type(self.model).__name__} implies {len(self.executions)} executions."
            )

    def _begin_layer(self, module: nn.Module, *_: Any) -> None:
        if (
            self._position >= len(self.executions)
            or self.module_of(self.executions[self._position]) is not module
        ):
            raise SmeltscopeError(
                f"The layers of {type(self.model).__name__} ran in another order than its "
                f"configuration implies, at execution {self._position}; they cannot be labelled rightly."
            )
        self._current = self.executions[self._position]
        self._position += 1
        self._seen = set()

    def _end_layer(self, module: nn.Module, *_: Any) -> None:
        assert self._current is not None
        missing = set(self.sites) - self._seen
        if missing:
            raise SmeltscopeError(
                f"Execution {self._current.index} ({type(module).__name__}) has no {', '.join(sorted(missing))} "
                "to watch: it makes no causal attention through transformers' attention interface."
            )
        self._current = None

    def _give(self, site: str, value: Any) -> None:
        assert self._current is not None
        if site in self._seen:
            raise SmeltscopeError(
                f"Execution {self._current.index} gave the site {site!r} twice; a layer with two "
                "attentions cannot be labelled rightly."
            )
        self._seen.add(site)
        if self._on_site is not None:
            self._on_site(self._current, site, value)
        else:
            self._values[self._current.index, site] = value

    def _attention(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if self._current is None or not _is_layer_attention(module):
            return self._bare_attention(module, q, k, v, mask, **kwargs)
        output, attention = attend(module, q, k, v, mask, **kwargs)
        self._give("attention", attention)
        return output, None

    def _bare_attention(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """What the model would have called, for attention that is no layer's (Inkling's messages between visits)."""
        bare = {id(config): name for config, name in self._implementations}
        if bare.get(id(getattr(module, "config", None))) == "eager":
            eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
            if eager is not None:
                if mask is not None and mask.dtype == torch.bool:
                    mask = torch.where(mask, 0.0, torch.finfo(q.dtype).min).to(q.dtype)
                return eager(module, q, k, v, mask, **kwargs)
        return sdpa_attention_forward(module, q, k, v, mask, **kwargs)


def decoder_layers(model: PreTrainedModel) -> tuple[nn.Module, list[nn.Module]]:
    """The decoder stack of a causal language model and its list of layers.

    Raises `SmeltscopeError` when there is no list of transformers' layers to be found.
    """
    lists = [
        (parent, list(child))
        for parent in model.modules()
        for child in parent.children()
        if isinstance(child, nn.ModuleList)
        and len(child) > 0
        and all(isinstance(layer, GradientCheckpointingLayer) for layer in child)
    ]
    if not lists:
        raise SmeltscopeError(
            f"{type(model).__name__} has no list of decoder layers that smeltscope knows how to watch."
        )
    if len(lists) > 1:
        raise SmeltscopeError(
            f"{type(model).__name__} has {len(lists)} stacks of layers; smeltscope watches decoder-only "
            "language models, which have one. A multimodal model holds its language model inside."
        )
    return lists[0]


def _is_layer_attention(module: nn.Module) -> bool:
    """A decoder layer's own attention is causal and knows its slot in the cache."""
    return getattr(module, "is_causal", False) and hasattr(module, "layer_idx")


def _configs(model: PreTrainedModel) -> list[Any]:
    """Every configuration object that a module of the model may read its attention function from."""
    configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
    return list(configs.values())


def _dispatch(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    return _captures[module]._attention(module, q, k, v, mask, **kwargs)


AttentionInterface.register(_NAME, _dispatch)
AttentionMaskInterface.register(_NAME, sdpa_mask)
