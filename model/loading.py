"""Loading any causal language model and its tokenizer, from a folder, a hub name or a shipped name."""

import difflib
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
)

from smeltscope.errors import SmeltscopeError
from smeltscope.model.checkpoint import (
    PICKLES,
    Checkpoint,
    check_model,
    context_of,
    digest_of,
    digest_of_model,
)
from smeltscope.model.controls import CONTROL_TOKENIZER, CONTROLS, build_control
from smeltscope.model.smelt import SmeltForCausalLM, with_visits
from smeltscope.model.spread import check_after_spread, check_before_spread, spread_arguments

SHIPPED_FOLDER = Path(__file__).parent / "checkpoints"
UNTRAINED = " (untrained)"  # after the name of a checkpoint whose weights were drawn anew
_LAYER = re.compile(r"(.*?)\.(\d+)\.")  # model.layers, 3


def shipped_checkpoints() -> list[str]:
    """Names of the trained checkpoints that come with the package; `CONTROLS` names those built by hand."""
    if not SHIPPED_FOLDER.is_dir():
        return []
    return sorted(p.parent.name for p in SHIPPED_FOLDER.glob("*/config.json"))


def load_checkpoint(
    name: str | Path,
    *,
    visits: int | None = None,
    residual_scale: float | None = None,
    untrained: bool = False,
    device: str = "auto",
    device_map: str | None = None,
    tensor_parallel: bool = False,
    dtype: str = "auto",
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> Checkpoint:
    """Load a checkpoint and its tokenizer.

    `name` is a folder, the name of a shipped checkpoint or a control, or a name on the Hugging Face hub. `visits` runs
    a SMELT checkpoint, or its Baseline, with another number of visits (0 leaves the span out),
    `residual_scale` with another factor on what the span writes. `untrained` keeps the configuration and
    draws the weights anew, by the model's own initialisation with seed 0.

    `device` auto takes CUDA where there is a GPU; `dtype` auto is float32 on the CPU and the checkpoint's own type
    elsewhere. For a model that is too big for one device, `device_map` (auto, or another of
    accelerate's) spreads its layers over the devices, `tensor_parallel` every layer over the processes
    that torchrun started.

    Weights are read from safetensors only, unless `allow_pickle`; code from a checkpoint runs only with
    `trust_remote_code`. Raises `SmeltscopeError` for a checkpoint that is missing, empty,
    truncated, incomplete or contradicts itself, and for a device that is not there.
    """
    spread = spread_arguments(device, device_map, tensor_parallel)
    control = str(name) in CONTROLS and not Path(name).is_dir()
    if control and (spread or untrained):
        raise SmeltscopeError(
            f"{name} is a small model built by hand: it runs on one device, and there is no untrained one of it."
        )
    if spread and (untrained or visits is not None or residual_scale is not None):
        raise SmeltscopeError(
            "--visits, --residual-scale and --untrained need the whole model on one device; leave --device-map "
            "and --tensor-parallel out."
        )
    device = choose_device(device)
    if control:
        folder, tokenizer_folder = None, SHIPPED_FOLDER / CONTROL_TOKENIZER
        model: Any = build_control(str(name))
        digest = digest_of_model(model)
        model.to(device=device, dtype=None if dtype == "auto" else getattr(torch, dtype))
    else:
        folder = tokenizer_folder = find_checkpoint(
            name,
            weights=not untrained,
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
        )
        model = load_model(
            folder,
            untrained=untrained,
            device=device,
            dtype=dtype,
            spread=spread,
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
        )
        digest = digest_of(folder, weights=not untrained)
    if visits is not None or residual_scale is not None:
        if not isinstance(model, SmeltForCausalLM):
            raise SmeltscopeError(
                "--visits and --residual-scale change the loop of a SMELT checkpoint or its Baseline; "
                f"{name} is a {type(model).__name__}."
            )
        model = with_visits(
            model, model.config.num_visits if visits is None else visits, residual_scale
        )
    return Checkpoint(
        model=model,
        tokenizer=load_tokenizer(tokenizer_folder, trust_remote_code=trust_remote_code),
        name=f"{name}{UNTRAINED}" if untrained else str(name),
        folder=folder,
        digest=digest,
        context=context_of(model.config),
    )


def find_checkpoint(
    name: str | Path,
    *,
    weights: bool = True,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> Path:
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
        shipped = [*shipped_checkpoints(), *CONTROLS]
        close = difflib.get_close_matches(str(name), shipped, n=1)
        hint = f"did you mean {close[0]}?" if close else f"shipped are: {', '.join(shipped)}."
        raise SmeltscopeError(
            f"There is no checkpoint folder {name}, and no shipped checkpoint of that name; {hint} "
            "A name on the Hugging Face hub is OWNER/NAME."
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    wanted = ["*.json", "*.model", "*.txt"]
    wanted += ["*.safetensors"] if weights else []
    wanted += PICKLES if weights and allow_pickle else ()
    wanted += ["*.py"] if trust_remote_code else []
    try:
        return Path(snapshot_download(str(name), allow_patterns=wanted))
    except Exception as error:
        if isinstance(error, LocalEntryNotFoundError):
            reason = "it is not in the local cache, and the hub was not reached"
        elif isinstance(error, RepositoryNotFoundError):
            reason = "there is none of that name, or it needs a login"
        else:
            reason = _reason(error)
        raise SmeltscopeError(
            f"{name} is no folder and no shipped checkpoint, and could not be had from the Hugging Face hub "
            f"({reason}); check the name and the network."
        ) from error


def choose_device(device: str) -> str:
    """auto, cpu, cuda or cuda:N as a device that is there; of several processes each gets its own GPU."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    match = re.fullmatch(r"cpu|cuda(?::(\d+))?", device)
    if match is None:
        raise SmeltscopeError(f"--device {device} is no device: use auto, cpu, cuda or cuda:N.")
    if device != "cpu" and not torch.cuda.is_available():
        raise SmeltscopeError(
            "CUDA was asked for with --device, but PyTorch finds no CUDA device; use --device cpu, or "
            "install a CUDA build of PyTorch."
        )
    if int(match[1] or 0) >= max(torch.cuda.device_count(), 1):
        raise SmeltscopeError(
            f"--device {device} is not there: PyTorch finds {torch.cuda.device_count()} CUDA "
            "devices, counted from 0."
        )
    if device == "cuda" and "LOCAL_RANK" in os.environ:  # torchrun's
        return f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"
    return device


def load_model(
    folder: Path,
    *,
    untrained: bool = False,
    device: str = "cpu",
    dtype: str = "auto",
    spread: dict[str, Any] | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load the model of a checkpoint folder in eval mode; see `load_checkpoint`."""
    check_config_file(folder, trust_remote_code=trust_remote_code)
    if not untrained:
        _check_weight_files(folder, allow_pickle=allow_pickle)
    config = read_config(folder, trust_remote_code=trust_remote_code)
    if spread:
        check_before_spread(config, spread)
    if dtype == "auto" and device == "cpu":
        dtype = "float32"
    wanted: Any = dtype if dtype == "auto" else getattr(torch, dtype)
    try:
        if untrained:
            wanted = config.dtype if wanted == "auto" else wanted
            model: Any = _initialised(config, trust_remote_code=trust_remote_code)
            return model.to(device=device, dtype=wanted).eval()
        with _quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=wanted,
                use_safetensors=None if allow_pickle else True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # told below, by name
                **(spread or {}),
            )
    except SmeltscopeError as error:
        raise SmeltscopeError(f"{folder / 'config.json'}: {error}") from error
    except UnpicklingError as error:
        raise SmeltscopeError(
            f"The pickled weights in {folder} are damaged, or hold more than tensors, which is never "
            "loaded; copy them again, or convert them to safetensors."
        ) from error
    except Exception as error:
        # transformers raises many kinds; each ends as one sentence, the cause kept
        raise SmeltscopeError(
            f"The checkpoint {folder} could not be loaded: {_reason(error)}."
        ) from error
    model, info = loaded
    _check_loaded(model, info, folder)
    if spread:
        check_after_spread(model, spread)
        return model.eval()
    return _aligned(model.to(device)).eval()


def _initialised(config: Any, *, trust_remote_code: bool) -> PreTrainedModel:
    """A model before its first training step. Drawn on the CPU in float32: the same on every device."""
    with torch.random.fork_rng(devices=[]), _quiet():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=trust_remote_code
        )


def _aligned(model: PreTrainedModel) -> PreTrainedModel:
    """Weights as in a model that was never saved: safetensors maps a file as it lies, and on addresses that are no
    multiple of 64 the CPU's kernels add up in another order."""
    for parameter in model.parameters():
        if parameter.device.type == "cpu" and parameter.data_ptr() % 64:
            parameter.data = parameter.data.clone()
    return model


def read_config(folder: Path, *, trust_remote_code: bool) -> Any:
    file = folder / "config.json"
    try:
        with _quiet():
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except SmeltscopeError as error:
        raise SmeltscopeError(f"{file}: {error}") from error
    except Exception as error:
        raise SmeltscopeError(
            f"{file} is no valid configuration ({_reason(error)}); mend it, or save the checkpoint again."
        ) from error
    with_code = trust_remote_code and hasattr(config, "auto_map")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not with_code:
        raise SmeltscopeError(
            f"{folder} holds a {config.model_type} model, for which transformers has no causal language model; "
            "give a decoder-only one."
        )
    return config


def _check_loaded(model: PreTrainedModel, info: dict[str, Any], folder: Path) -> None:
    """Every weight of the model came from the checkpoint, every layer of the checkpoint is in the model."""
    missing = sorted(set(info["missing_keys"]) - set(model.all_tied_weights_keys))
    if missing or info["mismatched_keys"]:
        wrong = missing or sorted(key[0] for key in info["mismatched_keys"])
        raise SmeltscopeError(
            f"The checkpoint {folder} lacks or misshapes {len(wrong)} weights of its configuration "
            f"(the first: {wrong[0]}); they would have been random. Is config.json that of these weights?"
        )
    unused = _unused(model, info["unexpected_keys"])
    if unused:
        raise SmeltscopeError(
            f"The checkpoint {folder} holds {len(unused)} weights that its configuration has no place for "
            f"(the first: {unused[0]}). Is config.json that of these weights?"
        )
    check_model(model, f"The checkpoint {folder}")


def _unused(model: PreTrainedModel, unexpected: Iterable[str]) -> list[str]:
    """Weights that were left out: of SMELT any, of other models those of whole layers."""
    if isinstance(model, SmeltForCausalLM):
        return sorted(unexpected)
    # {list of layers: its numbers}; some checkpoints carry harmless extras inside or beside layers
    layers: dict[str, set[str]] = {}
    for name, _ in model.named_parameters():
        if match := _LAYER.match(name):
            layers.setdefault(match[1], set()).add(match[2])
    matches = ((name, _LAYER.match(name)) for name in sorted(unexpected))
    return [n for n, m in matches if m and m[1] in layers and m[2] not in layers[m[1]]]


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
            f"The tokenizer in {folder} could not be loaded ({_reason(error)}); save it there again."
        ) from error


def check_config_file(folder: Path, *, trust_remote_code: bool) -> None:
    """Say what is wrong with config.json before transformers says it less clearly."""
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
    if content["model_type"] not in CONFIG_MAPPING and not trust_remote_code:
        if "auto_map" in content:
            raise SmeltscopeError(
                f"{folder} comes with code of its own, which is not run unless asked for; read it, and "
                "pass --trust-remote-code if you trust it."
            )
        raise SmeltscopeError(
            f"{config}: transformers {transformers.__version__} knows no model_type "
            f"{content['model_type']!r}; check the file, or use a newer transformers."
        )


def _check_weight_files(folder: Path, *, allow_pickle: bool) -> None:
    """Say what is wrong with the weights before transformers says it less clearly."""
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        pickles = [p.name for pattern in PICKLES for p in folder.glob(pattern)]
        if not pickles:
            raise SmeltscopeError(
                f"The checkpoint folder {folder} holds no *.safetensors weights; copy them there, or save the "
                "model again with save_pretrained."
            )
        if not allow_pickle:
            raise SmeltscopeError(
                f"{folder / pickles[0]} is pickled, and a pickle can run code when it is loaded; convert it "
                "to safetensors, or pass --allow-pickle if you trust its origin."
            )
    if weights and not (folder / "model.safetensors").is_file():
        _check_shards(folder)
    for path in weights:
        try:
            with safe_open(path, framework="pt") as file:
                file.keys()
        except (SafetensorError, OSError) as error:
            raise SmeltscopeError(
                f"{path} is no complete safetensors file ({_reason(error)}); copy or save it again."
            ) from error


def _check_shards(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise SmeltscopeError(
            f"{index}, which says what is in which *.safetensors file, is missing or damaged; copy or save "
            "the checkpoint again."
        ) from error
    for name in sorted(shards):
        if not (folder / name).is_file():
            raise SmeltscopeError(
                f"{folder / name} is missing, though {index.name} names it; copy it there, or save the "
                "checkpoint again."
            )


def _reason(error: BaseException) -> str:
    """The first line of an error; with the next where it only announces that."""
    if isinstance(error, KeyError):
        return f"transformers does not know {error}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2] if lines[0].endswith(":") else lines[:1]).rstrip(".")


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
