"""Configurations by name: of a checkpoint, a config.json or a recipe; and as the [model] table of a recipe."""

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from smeltscope.errors import SmeltscopeError
from smeltscope.model.configuration import SmeltConfig
from smeltscope.model.controls import CONTROLS, build_control
from smeltscope.model.loading import (
    check_config_file,
    find_checkpoint,
    load_tokenizer,
    read_config,
)
from smeltscope.model.training import NOT_IN_RECIPE

# Fields that a written table names in any case.
SIZES = (
    *("num_physical_layers", "loop_start", "loop_stop", "num_visits", "hidden_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "qk_norm", "num_experts"),
    *("num_experts_per_tok", "moe_intermediate_size", "vocab_size"),
)


def load_config(name: str | Path) -> Any:
    """The configuration of a shipped checkpoint, a folder, a hub name, a config.json, or a recipe.

    Of a recipe the [model] table is read; the vocabulary is that of the table, or of its tokenizer.
    Raises SmeltscopeError for what is missing or contradicts itself.
    """
    path = Path(name)
    if path.suffix == ".toml":
        return _config_of_recipe(path)
    if str(name) in CONTROLS and not path.is_dir():
        return build_control(str(name)).config
    if path.is_file():
        if path.name != "config.json":
            raise SmeltscopeError(
                f"{path} is neither a config.json nor a recipe in TOML; give one of these, a checkpoint "
                "folder or a name."
            )
        path = path.parent
    folder = path if path.is_dir() else find_checkpoint(name, weights=False)
    check_config_file(folder, trust_remote_code=False)
    return read_config(folder, trust_remote_code=False)


def model_table(config: SmeltConfig) -> dict[str, Any]:
    """The [model] table that makes this configuration: its sizes, and where else it differs from the defaults."""
    plain = SmeltConfig(num_visits=config.num_visits)
    names = [field.name for field in dataclasses.fields(SmeltConfig)]
    others = [n for n in names if getattr(config, n) != getattr(plain, n)]
    wanted = dict.fromkeys([*SIZES, *others])
    return {name: getattr(config, name) for name in wanted if name not in NOT_IN_RECIPE}


def write_table(table: dict[str, Any]) -> str:
    """A [model] table as TOML."""
    return "\n".join(["[model]", *(f"{key} = {_toml(value)}" for key, value in table.items()), ""])


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    return json.dumps(value)  # numbers, booleans, strings and lists are written alike


def _config_of_recipe(path: Path) -> SmeltConfig:
    try:
        recipe = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SmeltscopeError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:  # UnicodeDecodeError and TOMLDecodeError
        raise SmeltscopeError(f"{path} is no TOML file: {error}.") from error
    table = recipe.get("model")
    if not isinstance(table, dict):
        raise SmeltscopeError(f"{path} has no [model] table, which says what the model is.")
    known = {field.name for field in dataclasses.fields(SmeltConfig)} - NOT_IN_RECIPE
    for key in table:
        if key not in known:
            raise SmeltscopeError(
                f"{path}: [model] has an unknown key {key!r}; it takes the fields of SmeltConfig."
            )
    try:
        return SmeltConfig(**{"vocab_size": _vocabulary(path, recipe), **table})
    except (SmeltscopeError, StrictDataclassError) as error:
        raise SmeltscopeError(f"{path}: [model] {' '.join(str(error).split())}") from error


def _vocabulary(path: Path, recipe: dict[str, Any]) -> int:
    """The size of the vocabulary, which in a recipe the tokenizer decides."""
    tokenizer = recipe.get("tokenizer", {})
    if "vocab_size" in recipe["model"] or "vocab_size" in tokenizer:
        return {**tokenizer, **recipe["model"]}["vocab_size"]
    if "path" not in tokenizer:
        raise SmeltscopeError(
            f"{path} does not say how large the vocabulary is: give vocab_size in [model] or [tokenizer]."
        )
    folder = path.parent / str(tokenizer["path"])
    found = load_tokenizer(folder)
    if found is None:
        raise SmeltscopeError(f"{path}: [tokenizer] path {folder} holds no tokenizer.")
    return len(found)
