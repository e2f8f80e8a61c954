"""Loading any causal language model and its tokenizer, from a folder, a hub name or a shipped name."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from smeltscope.errors import SmeltscopeError
from smeltscope.model.smelt import SmeltForCausalLM, with_visits

SHIPPED_FOLDER = Path(__file__).parent / "checkpoints"
_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model ready to be probed, and what a result has to say about where it came from."""

    model: PreTrainedModel
    tokenizer: Any
    name: str  # as the user gave it
    folder: Path
    digest: str  # sha256 of configuration and weights
    context: int  # the longest segment that the model takes


def shipped_checkpoints() -> list[str]:
    """Names of the checkpoints that come with the package."""
    if not SHIPPED_FOLDER.is_dir():
        return []
    return sorted(p.parent.name for p in SHIPPED_FOLDER.glob("*/config.json"))


def load_checkpoint(
    name: str | Path,
    *,
    visits: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> Checkpoint:
    """Load a checkpoint and its tokenizer.

    `name` is a folder, the name of a shipped checkpoint, or a name on the Hugging Face hub. `visits` runs a SMELT
    checkpoint, or its Baseline, with another number of visits. `device` auto takes CUDA where there is a GPU;
    `dtype` auto is float32 on the CPU and the checkpoint's own type elsewhere.

    Weights are read from safetensors only, unless `allow_pickle`; code from a checkpoint runs only with
    `trust_remote_code`. Raises `SmeltscopeError` for a checkpoint that is missing, empty,
    truncated, incomplete or contradicts itself, and for a device that is not there.
    """
    folder = find_checkpoint(name)
    device = choose_device(device)
    model = load_model(
        folder,
        visits=visits,
        device=device,
        dtype=dtype,
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
    )
    return Checkpoint(
        model=model,
        tokenizer=load_tokenizer(folder, trust_remote_code=trust_remote_code),
        name=str(name),
        folder=folder,
        digest=digest_of(folder),
        context=_context_of(model.config),
    )


def find_checkpoint(name: str | Path) -> Path:
    """The folder behind a path, a shipped name or a hub name (downloaded or from the local cache)."""
    path = Path(name)
    if path.is_file():
        raise SmeltscopeError(
            f"The checkpoint {name} is a file; give the folder that holds config.json and *.safetensors."
        )
    if path.is_dir():
        return path
    if str(name) in shipped_checkpoints():
        return SHIPPED_FOLDER / str(name)
    looks_like_a_path = path.is_absolute() or str(name).startswith(".") or len(path.parts) != 2
    if looks_like_a_path:
        shipped = ", ".join(shipped_checkpoints()) or "none"
        raise SmeltscopeError(
            f"There is no checkpoint folder {name}, and no shipped checkpoint of that name (there are: {shipped})."
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                str(name), allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt"]
            )
        )
    except Exception as error:
        raise SmeltscopeError(
            f"{name} is no folder and no shipped checkpoint, and the Hugging Face hub did not give it "
            f"({_first_line(error)}); check the name, or the network."
        ) from error


def choose_device(device: str) -> str:
    """auto, cpu, cuda or cuda:N as a device that is there."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise SmeltscopeError(
            "CUDA was asked for with --device, but PyTorch finds no CUDA device; use --device cpu, or "
            "install a CUDA build of PyTorch."
        )
    return device


def load_model(
    folder: Path,
    *,
    visits: int | None = None,
    device: str = "cpu",
    dtype: str = "auto",
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load the model of a checkpoint folder in eval mode; see `load_checkpoint`."""
    _check_files(folder, allow_pickle)
    wanted = "float32" if dtype == "auto" and device == "cpu" else dtype
    try:
        with _quiet():
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
            model, info = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=wanted if wanted == "auto" else getattr(torch, wanted),
                use_safetensors=None if allow_pickle else True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
    except SmeltscopeError as error:
        raise SmeltscopeError(f"{folder / 'config.json'}: {error}") from error
    except (
        Exception
    ) as error:  # transformers raises many kinds; each ends as one sentence, the cause kept
        raise SmeltscopeError(
            f"The checkpoint {folder} could not be loaded: {_first_line(error)}"
        ) from error
    missing = sorted(set(info["missing_keys"]) - set(model.all_tied_weights_keys))
    if missing or info["mismatched_keys"]:
        wrong = missing or sorted(str(key) for key in info["mismatched_keys"])
        raise SmeltscopeError(
            f"The checkpoint {folder} lacks or misshapes {len(wrong)} weights of its configuration "
            f"(the first: {wrong[0]}); they would have been random. Is config.json that of these weights?"
        )
    if visits is not None:
        if not isinstance(model, SmeltForCausalLM):
            raise SmeltscopeError(
                f"--visits changes the loop of a SMELT checkpoint or its Baseline; {folder} is a "
                f"{type(model).__name__}."
            )
        model = with_visits(model, visits)
    return model.to(device).eval()


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a checkpoint folder, or None where there is none (token arrays need none)."""
    if not any(
        (folder / f).exists()
        for f in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    ):
        return None
    try:
        with _quiet():
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise SmeltscopeError(
            f"The tokenizer in {folder} could not be loaded: {_first_line(error)}"
        ) from error


def digest_of(folder: Path) -> str:
    """sha256 over config.json and all weight files of a folder, in the order of their names."""
    digest = hashlib.sha256()
    weights = sorted(p for pattern in ("*.safetensors", *_PICKLES) for p in folder.glob(pattern))
    for path in [folder / "config.json", *weights]:
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _check_files(folder: Path, allow_pickle: bool) -> None:
    """Say what is wrong with a folder before transformers says it less clearly."""
    config = folder / "config.json"
    if not config.is_file():
        raise SmeltscopeError(
            f"The checkpoint folder {folder} holds no config.json; give a folder saved by save_pretrained."
        )
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SmeltscopeError(
            f"{config} is not valid JSON: {error}; save the checkpoint again."
        ) from error
    if not isinstance(content, dict) or "model_type" not in content:
        raise SmeltscopeError(f"{config} names no model_type; it is no transformers configuration.")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        pickles = [p.name for pattern in _PICKLES for p in folder.glob(pattern)]
        if not pickles:
            raise SmeltscopeError(f"The checkpoint folder {folder} holds no *.safetensors weights.")
        if not allow_pickle:
            raise SmeltscopeError(
                f"{folder / pickles[0]} is pickled, and a pickle can run code when it is loaded; convert it "
                "to safetensors, or pass --allow-pickle if you trust its origin."
            )
    for path in weights:
        try:
            with safe_open(path, framework="pt") as file:
                file.keys()
        except (SafetensorError, OSError) as error:
            raise SmeltscopeError(
                f"{path} is no complete safetensors file ({_first_line(error)}); copy or save it again."
            ) from error


def _context_of(config: Any) -> int:
    config = config.get_text_config(decoder=True)
    context = getattr(config, "max_position_embeddings", None) or getattr(
        config, "n_positions", None
    )
    return int(context) if context else 4096


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars or load reports: what matters of them is checked and said in a sentence."""
    log = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()
