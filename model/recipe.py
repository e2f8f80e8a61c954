"""Recipes: what `smelt train` is told, read from TOML and checked before anything is computed."""

import dataclasses
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smeltscope.errors import SmeltscopeError


@dataclass(frozen=True, kw_only=True)
class TokenizerRecipe:
    """A tokenizer's folder, or the size of one that is learned from the training text."""

    path: Path | None = None
    vocab_size: int | None = None
    characters: int = 20_000_000  # of training text, the same from each category, to learn from

    def __post_init__(self) -> None:
        if (self.path is None) == (self.vocab_size is None):
            raise SmeltscopeError("[tokenizer] needs either path or vocab_size.")
        _positive("tokenizer", characters=self.characters)


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """The text. A category is what a document says, or its file's name up to the first dot."""

    train: tuple[Path, ...]
    heldout: tuple[Path, ...]
    context: int  # tokens in a row, start token included
    heldout_tokens: int = 100_000  # at least one row of each category

    def __post_init__(self) -> None:
        _positive("data", heldout_tokens=self.heldout_tokens)
        if self.context < 2:
            raise SmeltscopeError(f"[data] context is {self.context}: it must be 2 or more.")
        for name in ("train", "heldout"):
            if not getattr(self, name):
                raise SmeltscopeError(f"[data] {name} names no file.")
        for path in self.train + self.heldout:
            if not path.exists():
                raise SmeltscopeError(
                    f"{path}, named in [data], does not exist: paths are relative to the recipe, "
                    "or to --data DIR."
                )


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe:
    """The optimisation: AdamW, warm-up, a stable stretch, and a decay to zero at the end.

    Give `steps`, or `tokens` (padding included); the schedule's `decay_share` is of all steps.
    """

    output: Path
    batch_tokens: int  # per step, padding included
    learning_rate: float  # of the stable stretch
    steps: int | None = None
    tokens: int | None = None
    warmup_steps: int = 100
    decay_share: float = 0.25
    weight_decay: float = 0.1
    save_every: int = 500  # steps, as the next two
    log_every: int = 20
    eval_every: int = 500

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.tokens is None):
            raise SmeltscopeError("[training] needs either steps or tokens.")
        _positive(
            "training",
            length=self.steps or self.tokens or 0,
            batch_tokens=self.batch_tokens,
            learning_rate=self.learning_rate,
            save_every=self.save_every,
            log_every=self.log_every,
            eval_every=self.eval_every,
        )
        if not 0 <= self.decay_share <= 1:
            raise SmeltscopeError(
                f"[training] decay_share is {self.decay_share}: it is a share, from 0 to 1."
            )
        if self.weight_decay < 0:
            raise SmeltscopeError(f"[training] weight_decay is {self.weight_decay}: at least 0.")
        if not 0 <= self.warmup_steps <= self.total_steps - self.decay_steps:
            raise SmeltscopeError(
                f"[training] has {self.total_steps} steps: {self.warmup_steps} of warm-up and "
                f"{self.decay_steps} of decay do not fit."
            )

    @property
    def total_steps(self) -> int:
        """Optimiser steps; with `tokens`, as many as reach it."""
        return self.steps or -(-(self.tokens or 0) // self.batch_tokens)

    @property
    def decay_steps(self) -> int:
        return round(self.decay_share * self.total_steps)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides what a training run computes."""

    text: str  # the file as it was read
    seed: int
    model: dict[str, Any]  # fields of SmeltConfig; the tokenizer decides those of the vocabulary
    tokenizer: TokenizerRecipe
    data: DataRecipe
    training: TrainingRecipe

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise SmeltscopeError(f"seed is {self.seed}: it must be 0 or more.")
        if self.training.batch_tokens % self.data.context:
            raise SmeltscopeError(
                f"batch_tokens {self.training.batch_tokens} is no multiple of context "
                f"{self.data.context}: a batch holds whole rows."
            )

    @property
    def batch_rows(self) -> int:
        return self.training.batch_tokens // self.data.context


def load_recipe(path: Path, *, data: Path | None = None, output: Path | None = None) -> Recipe:
    """Read a recipe. Paths of text are relative to its folder, or to `data`; `output` replaces its own.

    Raises SmeltscopeError, which names the key, for anything missing, unknown or contradictory.
    """
    try:
        text = path.read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except OSError as error:
        raise SmeltscopeError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:  # UnicodeDecodeError and TOMLDecodeError
        raise SmeltscopeError(f"{path} is no TOML file: {error}.") from error
    parts = {"model": dict, "tokenizer": dict, "data": dict, "training": dict}
    _check_keys("recipe", table, known={"seed": int, **parts}, required={"seed", *parts})
    base = path.parent if data is None else data
    words = dict(table["data"])
    for name in ("train", "heldout"):
        if name in words:
            words[name] = _paths(name, words[name], base)
    tokenizer = dict(table["tokenizer"])
    if isinstance(tokenizer.get("path"), str):
        tokenizer["path"] = path.parent / tokenizer["path"]
    training = dict(table["training"])
    if output is not None:
        training["output"] = output
    if isinstance(training.get("output"), str):
        training["output"] = Path(training["output"])
    return Recipe(
        text=text,
        seed=table["seed"],
        model=table["model"],
        tokenizer=_build("tokenizer", TokenizerRecipe, tokenizer),
        data=_build("data", DataRecipe, words),
        training=_build("training", TrainingRecipe, training),
    )


def same_recipe(text: str, other: str) -> bool:
    """Whether two recipes compute the same, wherever they put it and whatever their comments say."""
    tables = [tomllib.loads(text), tomllib.loads(other)]
    for table in tables:
        table.get("training", {}).pop("output", None)
    return tables[0] == tables[1]


def _paths(name: str, value: Any, base: Path) -> tuple[Path, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise SmeltscopeError(f"[data] {name} must be a list of paths.")
    return tuple(base / item for item in value)


def _build(section: str, kind: type, table: dict[str, Any]) -> Any:
    fields = dataclasses.fields(kind)
    known = {field.name: field.type for field in fields}
    required = {field.name for field in fields if field.default is dataclasses.MISSING}
    _check_keys(f"[{section}]", table, known=known, required=required)
    return kind(**table)


def _check_keys(
    where: str, table: dict[str, Any], *, known: dict[str, Any], required: set[str]
) -> None:
    for key, value in table.items():
        if key not in known:
            raise SmeltscopeError(
                f"{where} has an unknown key {key!r}: known are {', '.join(known)}."
            )
        kind = known[key] if known[key] is not float else float | int
        if kind in (int, float | int, int | None) and isinstance(value, bool):
            raise SmeltscopeError(f"{where} {key} is {value!r}: expected a number.")
        if kind not in (tuple[Path, ...],) and not isinstance(value, kind):
            name = getattr(kind, "__name__", str(kind))
            raise SmeltscopeError(f"{where} {key} is {value!r}: expected {name}.")
    missing = sorted(required - table.keys())
    if missing:
        raise SmeltscopeError(f"{where} lacks {', '.join(missing)}.")


def _positive(section: str, **values: float) -> None:
    for name, value in values.items():
        if value <= 0:
            raise SmeltscopeError(f"[{section}] {name} is {value}: it must be above 0.")
