"""`editing`: change what the heads of a model read while it runs, before their output projection.

    with editing(model, edit):
        model(input_ids)

`edit(execution, pv)` gets what every head of an execution read, (B, T, head, size), and returns what the output projection is
to be given in its place.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from smeltscope.activations.capturing import Capture
from smeltscope.activations.gather import gather, head_group, share
from smeltscope.activations.sites import is_layer_attention
from smeltscope.errors import SmeltscopeError
from smeltscope.model import Execution

Edit = Callable[[Execution, Tensor], Tensor]


@contextmanager
def editing(model: PreTrainedModel, edit: Edit) -> Iterator[None]:
    """Let `edit` change the site `pv` of every execution that has it, for as long as the context lasts.

    The tensor is the model's own, made for this execution: it may be changed in place and returned. If it is returned as it came,
    logits are what they are under `capture`: bit-equal for a model that runs on SDPA. Everything is put back at the end, also after an
    exception. Raises `SmeltscopeError` for a model that `capture` cannot watch, while another capture lasts, and for an
    edit that gives another shape or type.
    """
    run = _Editor(model, edit)
    run._attach()
    try:
        yield
    finally:
        run._detach()


class _Editor(Capture):
    """A capture of `pv` that keeps nothing and hands back what the edit makes of it."""

    def __init__(self, model: PreTrainedModel, edit: Edit) -> None:
        super().__init__(model, ("pv",), on_site=lambda *_: None)
        self._edit = edit

    def _attention(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        output, weights = super()._attention(module, q, k, v, mask, **kwargs)
        if self._current is None or not is_layer_attention(module):
            return output, weights
        group = head_group(module)
        pv = gather(output, 2, group)
        edited = self._edit(self._current, pv)
        if edited.shape != pv.shape or edited.dtype != pv.dtype:
            raise SmeltscopeError(
                f"The edit of execution {self._current.index} gave {tuple(edited.shape)} of {edited.dtype} in the place of "
                f"{tuple(pv.shape)} of {pv.dtype}; return a tensor like the one it was given."
            )
        return share(edited, 2, group), weights
