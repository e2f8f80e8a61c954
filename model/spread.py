"""A model that is too big for one device: layers on several devices, or every layer on several processes."""

import os
from typing import Any

from transformers import PreTrainedModel

from smeltscope.errors import SmeltscopeError
from smeltscope.model.configuration import SmeltConfig

_PROCESSES = "distributed_config"  # from_pretrained's argument for a model on several processes


def spread_arguments(device: str, device_map: str | None, tensor_parallel: bool) -> dict[str, Any]:
    """What from_pretrained has to be given; nothing for a model on one device."""
    if (device != "auto") + (device_map is not None) + tensor_parallel > 1:
        raise SmeltscopeError(
            "--device, --device-map and --tensor-parallel each say where the model goes; give one of them."
        )
    if device_map is not None:
        return {"device_map": device_map}
    if not tensor_parallel:
        return {}
    processes = int(os.environ.get("WORLD_SIZE", "0"))
    if processes == 0:
        raise SmeltscopeError(
            "--tensor-parallel spreads layers over processes: start them with torchrun --nproc-per-node N -m "
            "smeltscope probe ..."
        )
    if processes == 1:
        return {}
    from transformers.distributed import DistributedConfig

    return {_PROCESSES: DistributedConfig(tp_plan="auto")}


def check_before_spread(config: Any, spread: dict[str, Any]) -> None:
    """Refuse what several processes would compute wrongly."""
    if _PROCESSES not in spread:
        return
    processes = spread[_PROCESSES].tp_size
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if heads % processes:
        raise SmeltscopeError(
            f"The model has {heads} key/value heads, which {processes} processes cannot share evenly; start a "
            "number of processes that divides them."
        )
    if isinstance(config, SmeltConfig) and config.attention_bias:
        # transformers adds the bias of a projection that is split outside of its forward: unscaled.
        raise SmeltscopeError(
            "A SMELT with attention_bias cannot be split over processes; use --device-map auto instead."
        )


def check_after_spread(model: PreTrainedModel, spread: dict[str, Any]) -> None:
    """Refuse what several processes hold wrongly.

    transformers 5.24 cuts a stored tensor into the processes' shares before it takes it apart into the
    weights of a layer (`hrm_text` stores gate, Q, K and V as one): each gets parts of the wrong ones.
    """
    if _PROCESSES not in spread:
        return
    conversions = getattr(model, "_weight_conversions", None) or []
    if any(len(conversion.target_patterns) > 1 for conversion in conversions):
        raise SmeltscopeError(
            f"Checkpoints of {type(model).__name__} store several weights of a layer in one tensor, which "
            "transformers splits wrongly over processes; use --device-map auto instead."
        )
