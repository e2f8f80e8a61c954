"""From hidden states to logits, a stretch of tokens at a time, exactly as the model does it."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


def decode(model: PreTrainedModel, input_ids: Tensor) -> Any:
    """Run the decoder without the language-model head, on rows padded on the right.

    A causal mask hides that padding from all real tokens, so no mask is given.
    """
    return model.get_decoder()(input_ids=input_ids, use_cache=False)


def head_of(model: PreTrainedModel, decoded: Any) -> Callable[[Tensor], Tensor]:
    """The function from hidden states (B, t, width), cut from what `decode` gave, to logits (B, t, vocabulary).

    Models scale, cap or cut their logits after the head's product. So the model's own forward runs, its decoder
    giving the hidden states that it is handed.
    """
    decoder: Any = model.get_decoder()

    def logits(hidden: Tensor) -> Tensor:
        given = copy.copy(decoded)
        given["last_hidden_state"] = hidden
        ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        own = decoder.__dict__.get("forward")  # accelerate puts one on a model spread over devices
        decoder.forward = lambda *_, **__: given
        try:
            return model(input_ids=ids, use_cache=False).logits
        finally:
            del decoder.forward
            if own is not None:
                decoder.forward = own

    return logits
