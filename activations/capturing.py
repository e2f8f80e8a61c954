"""`capture`: watch a causal language model of transformers while it runs, by execution.

    with capture(model) as run:
        model(input_ids)
    run[3, "attention"].mass_on(keys)

Nothing about the model changes but where its attention function points, and that only inside the `with`.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from smeltscope.activations.attention import attend
from smeltscope.activations.gather import HEADS_SPLIT, gather, gather_attention, head_group
from smeltscope.activations.sites import (
    SITES,
    Tap,
    attach,
    is_layer_attention,
    module_value,
    taps_of,
)
from smeltscope.errors import SmeltscopeError
from smeltscope.model import Execution, executions_of
from smeltscope.model.stack import decoder_stack

# What a site's value is handed to: (execution, site, value), called while the forward is running.
OnSite = Callable[[Execution, str, Any], None]

_NAME = "smeltscope"
_NO_PROJECTION = ": no module of its attention gives them alone"
_WHY_ABSENT = {
    "attention": ": it makes no causal attention through transformers' attention interface",
    "pv": ": it makes no causal attention through transformers' attention interface",
    "q": _NO_PROJECTION,
    "k": _NO_PROJECTION,
    "v": _NO_PROJECTION,
    "router": ": it has no router of experts that returns logits, weights and indices",
    "q_norm": ": its queries have no norm of their own",
    "k_norm": ": its keys have no norm of their own",
    "attn_out": ": what its modules give does not add up to what they write",
    "resid_mid": ": what its modules give does not add up to what they write",
    "mlp_out": ": what its modules give does not add up to what they write",
}
_BARE = ("sdpa", "eager")  # what a model may run on for its capture to be faithful
_captures: dict[nn.Module, "Capture"] = {}


@contextmanager
def capture(
    model: PreTrainedModel, sites: Sequence[str] = ("attention",), on_site: OnSite | None = None
) -> Iterator["Capture"]:
    """Watch `model` at `sites` (see `smeltscope.activations.sites`) for as long as the context lasts.

    With `on_site`, each value is handed over during the forward and let go: it is the model's own tensor. Without it,
    the values of the latest forward are copied, kept, and read as `run[execution, site]`.

    Logits stay bit-equal for a model that runs on SDPA, and for any when neither `attention` nor `pv` is watched; one
    that has eager attention only gives the same within rounding. Everything is put back at the end, also after an exception.

    Raises `SmeltscopeError` for a model that cannot be watched faithfully, with the reason, for a site that no layer
    has, and when the layers run in another order than the configuration implies.
    """
    run = Capture(model, sites, on_site)
    run._attach()
    try:
        yield run
    finally:
        run._detach()


def sites_of(model: PreTrainedModel) -> dict[str, list[int]]:
    """Which executions have each site: {site: their indices}."""
    run = Capture(model, SITES, None)
    run._find_sites()
    of_execution = [run.sites_of(run.module_of(e)) for e in run.executions]
    return {site: [i for i, sites in enumerate(of_execution) if site in sites] for site in SITES}


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
        self._taps: Mapping[nn.Module, Mapping[str, Tap]] = {}
        self._stack, self._modules = decoder_stack(model)  # a module for each execution
        self._layers = list(dict.fromkeys(self._modules))
        self._position = 0  # executions begun in this forward
        self._current: Execution | None = None
        self._seen: set[str] = set()  # sites that the current execution has given
        self._shape: Sequence[int] = ()  # rows and tokens of the current execution
        self._before: Tensor | None = None  # its residual stream, while `resid_mid` is watched
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
        # Only for these: a model that looks at the name of its attention implementation then runs as it is.
        configs = _configs(self.model) if {"attention", "pv"} & set(self.sites) else []
        for config in configs:
            self._check_implementation(config._attn_implementation)
        self._find_sites()
        self._check_sites()
        self._hooks.append(self._stack.register_forward_pre_hook(self._begin_forward))
        self._hooks.append(self._stack.register_forward_hook(self._end_forward))
        for layer in self._layers:
            self._hooks.append(layer.register_forward_pre_hook(self._begin_layer, with_kwargs=True))
            taps = self._taps.get(layer, {})
            group = next((head_group(m) for m in layer.modules() if is_layer_attention(m)), None)
            wanted = self.sites_of(layer)
            needed = ("resid_pre", "attn_out") if "resid_mid" in wanted else ()
            for site in taps:
                if site in wanted + needed:
                    hook = self._hook(site, taps[site], group)
                    self._hooks.append(attach(taps[site], hook))
            self._hooks.append(layer.register_forward_hook(self._end_layer))
        for module in self.model.modules() if configs else ():
            _captures[module] = self
        for config in configs:
            self._implementations.append((config, config._attn_implementation))
            config._attn_implementation_internal = _NAME

    def _detach(self) -> None:
        for config, implementation in self._implementations:
            config._attn_implementation_internal = implementation
        for hook in self._hooks:
            hook.remove()
        for module in self.model.modules() if self._implementations else ():
            _captures.pop(module, None)
        self._current = None

    def sites_of(self, layer: nn.Module) -> tuple[str, ...]:
        """Which of the watched sites a layer has."""
        has = set(self._taps.get(layer, ()))
        if "attn_out" in has:
            has.add("resid_mid")
        if any(is_layer_attention(module) for module in layer.modules()):
            has |= {"attention", "pv"}
        return tuple(site for site in self.sites if site in has)

    def _find_sites(self) -> None:
        if set(self.sites) - {"attention", "pv"}:
            self._taps = taps_of(self.model, self._layers)

    def _check_sites(self) -> None:
        found = {site for layer in self._layers for site in self.sites_of(layer)}
        for site in self.sites:
            if site not in found:
                raise SmeltscopeError(
                    f"No layer of {type(self.model).__name__} has the site {site!r}"
                    f"{_WHY_ABSENT.get(site, '')}; leave it out."
                )

    def _hook(self, site: str, tap: Tap, group: Any) -> Callable[..., None]:
        def hook(module: nn.Module, *inputs_and_output: Any) -> None:
            if self._current is None:
                return
            value = tap.read(module_value(tap, inputs_and_output), self._shape)
            if isinstance(value, Tensor):
                value = value.detach()
                value = value.clone() if tap.clone else value
                value = gather(value, 2, group) if site in HEADS_SPLIT else value
            if site in self.sites:
                self._give(site, value)
            if "resid_mid" in self.sites and site == "resid_pre":
                self._before = value
            if "resid_mid" in self.sites and site == "attn_out":
                assert self._before is not None
                self._give("resid_mid", self._before + value)

        return hook

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
        """The layer that runs at an execution."""
        return self._modules[execution.index]

    def _begin_forward(self, *_: Any) -> None:
        self._position, self._current = 0, None
        self._values.clear()

    def _end_forward(self, *_: Any) -> None:
        if self._position != len(self.executions):
            raise SmeltscopeError(
                f"{self._position} layers ran in this forward, but the configuration of "
                f"{type(self.model).__name__} implies {len(self.executions)} executions."
            )

    def _begin_layer(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
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
        self._seen, self._before = set(), None
        self._shape = (args[0] if args else kwargs["hidden_states"]).shape[:2]

    def _end_layer(self, module: nn.Module, *_: Any) -> None:
        assert self._current is not None
        missing = [site for site in self.sites_of(module) if site not in self._seen]
        if missing:
            reason = (
                "it makes no causal attention through transformers' attention interface"
                if missing[0] in ("attention", "pv")
                else "the module that gives it never ran"
            )
            raise SmeltscopeError(
                f"Execution {self._current.index} ({type(module).__name__}) has no {', '.join(missing)} "
                f"to watch: {reason}."
            )
        self._current, self._before = None, None

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
            # A copy: some models go on to change a tensor in place. Attention's own are made for the kernel.
            kept = value.clone() if isinstance(value, Tensor) else value
            self._values[self._current.index, site] = kept

    def _attention(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if self._current is None or not is_layer_attention(module):
            return self._bare_attention(module, q, k, v, mask, **kwargs)
        output, attention = attend(module, q, k, v, mask, **kwargs)
        group = head_group(module)
        if "attention" in self.sites:
            self._give("attention", gather_attention(attention, group))
        if "pv" in self.sites:
            self._give("pv", gather(output.detach(), 2, group))
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


def _configs(model: PreTrainedModel) -> list[Any]:
    """Every configuration object that a module of the model may read its attention function from."""
    configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
    return list(configs.values())


def _dispatch(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,  # some models give it by this name
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    return _captures[module]._attention(module, q, k, v, attention_mask, **kwargs)


AttentionInterface.register(_NAME, _dispatch)
AttentionMaskInterface.register(_NAME, sdpa_mask)
