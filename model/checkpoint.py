"""A checkpoint: a model ready to be probed, with the tokenizer, the name and the digest that go with it."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from smeltscope.errors import SmeltscopeError

PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
_CHECKED = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# Where and by what a configuration was saved, and the type, which weights say themselves.
_NOT_OF_THE_MODEL = ("_name_or_path", "architectures", "dtype", "transformers_version")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model ready to be probed, and what a result has to say about where it came from."""

    model: PreTrainedModel
    tokenizer: Any
    name: str  # as the user gave it
    folder: Path | None  # None for a model that was made in memory
    digest: str  # sha256 of configuration and weights, before they run with other visits or types
    context: int  # the longest segment that the model takes


def checkpoint_of(model: PreTrainedModel, tokenizer: Any = None, name: str = "model") -> Checkpoint:
    """A model that is in memory already as a checkpoint; the model is neither copied nor changed.

    Raises `SmeltscopeError` for one that is in training mode, not decoder-only, or has weights that are
    NaN, infinite or not in memory.
    """
    if not isinstance(model, PreTrainedModel):
        raise SmeltscopeError(
            f"A {type(model).__name__} is no model of transformers; give one that was made or loaded by "
            "transformers or smeltscope, without a wrapper."
        )
    if model.training:
        raise SmeltscopeError(
            f"The model {name} is in training mode, in which dropout makes numbers random; call model.eval() first."
        )
    check_model(model, f"The model {name}")
    return Checkpoint(
        model=model,
        tokenizer=tokenizer,
        name=name,
        folder=None,
        digest=digest_of_model(model),
        context=context_of(model.config),
    )


def check_model(model: PreTrainedModel, what: str) -> None:
    """Tokens see earlier tokens only, and every weight is a number."""
    causal = [module.is_causal for module in model.modules() if hasattr(module, "is_causal")]
    if causal and not any(causal):
        raise SmeltscopeError(
            f"{what} is a {type(model).__name__}, in which tokens see later tokens; give a decoder-only "
            "model."
        )
    for name, parameter in model.named_parameters():
        if parameter.dtype in _CHECKED and not _finite(parameter):
            raise SmeltscopeError(
                f"{what} holds NaN or infinite weights (the first: {name}); every number "
                "from it would be meaningless. Give an earlier or unbroken checkpoint."
            )


def _finite(parameter: torch.Tensor) -> bool:
    if parameter.device.type == "meta":  # offloaded: not worth reading the disk for
        return True
    if hasattr(parameter, "to_local"):  # of a layer spread over processes: this one's share
        parameter = parameter.to_local()
    return bool(parameter.isfinite().all())


def digest_of(folder: Path, *, weights: bool = True) -> str:
    """sha256 over config.json and the weight files of a folder, in the order of their names.

    Without the weight files: what an untrained model is determined by.
    """
    digest = hashlib.sha256()
    files = sorted(folder.glob("*.safetensors")) if weights else []
    if weights and not files:  # beside safetensors, pickles are an optimiser's state or the like
        files = sorted(p for pattern in PICKLES for p in folder.glob(pattern))
    for path in [folder / "config.json", *files]:
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def digest_of_model(model: PreTrainedModel) -> str:
    """sha256 over the configuration and the weights of a model in memory, each once, in the order of their names."""
    config = model.config.to_dict()
    config = {name: value for name, value in config.items() if name not in _NOT_OF_THE_MODEL}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in sorted(model.state_dict().items()):
        if name in model.all_tied_weights_keys:
            continue
        if weight.device.type == "meta":
            raise SmeltscopeError(
                f"The weight {name} of the model is not in memory; load the model without offloading."
            )
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def context_of(config: Any) -> int:
    """The longest segment that a model takes; where its configuration does not say, 4096."""
    config = config.get_text_config(decoder=True)
    context = getattr(config, "max_position_embeddings", None) or getattr(
        config, "n_positions", None
    )
    return int(context) if context else 4096
