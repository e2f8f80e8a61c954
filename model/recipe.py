"""Recipes: what `smelt train` is told, read from TOML and checked before anything is computed."""

import dataclasses
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smeltscope.errors import SmeltscopeError

NUMBERS, WORDS = tuple[int, ...], tuple[str, ...]  # types of fields that are lists in TOML


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
    packed: bool = False  # a row holds as many segments as fit; else one, and padding
    heldout_tokens: int = 100_000  # at least one row of each category
    broken_lines: str = "refuse"  # or skip

    def __post_init__(self) -> None:
        _positive("data", heldout_tokens=self.heldout_tokens)
        _one_of("[data]", "broken_lines", self.broken_lines, ("refuse", "skip"))
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
class TextSource:
    """The text of [data], or some categories of it, which take turns."""

    weight: float  # this source's rows are to all rows as its weight is to the sum of weights
    name: str = "text"  # in messages; its rows have the categories of their documents
    categories: tuple[str, ...] = ()  # none named: all


@dataclass(frozen=True, kw_only=True)
class BackcopySource:
    """Stretches of tokens, each followed by its copy, to the row's end."""

    weight: float
    name: str = "backcopy"  # the category of its rows
    stretches: str = "text"  # of the text, or of random tokens
    lengths: tuple[int, ...] = (8, 64)  # shortest and longest stretch
    loss: str = "all"  # or copies: of their tokens alone

    def __post_init__(self) -> None:
        _one_of(f"[[mixture]] {self.name}", "stretches", self.stretches, ("text", "random"))
        _one_of(f"[[mixture]] {self.name}", "loss", self.loss, ("all", "copies"))
        if len(self.lengths) != 2 or not 2 <= self.lengths[0] <= self.lengths[1]:
            raise SmeltscopeError(
                f"[[mixture]] {self.name} lengths is {list(self.lengths)}: it is the shortest length, "
                "2 or more, and the longest."
            )


@dataclass(frozen=True, kw_only=True)
class DyckSource:
    """Prompts of smeltscope.tasks.dyck, as `probe dyck` makes them, on maps that it leaves alone."""

    weight: float
    name: str = "dyck"  # the category of its rows
    pairing: str = "in-context"
    reveal: str = "answers"
    shots: tuple[int, ...] = tuple(range(9))  # each as often
    lengths: tuple[int, ...] = (4, 16)  # shortest and longest input, in symbols
    template: str | Path = "bigbench"  # or a .toml file, relative to the recipe
    loss: str = "all"  # or answers: of theirs alone, demonstrations included

    def __post_init__(self) -> None:
        _one_of(f"[[mixture]] {self.name}", "loss", self.loss, ("all", "answers"))
        if not self.shots or min(self.shots) < 0:
            raise SmeltscopeError(
                f"[[mixture]] {self.name} shots is {list(self.shots)}: it lists numbers from 0 on."
            )
        if len(self.lengths) != 2:
            raise SmeltscopeError(
                f"[[mixture]] {self.name} lengths is {list(self.lengths)}: it is the shortest and the "
                "longest input."
            )


Source = TextSource | BackcopySource | DyckSource
SOURCES: dict[str, type[Source]] = {
    "text": TextSource,
    "backcopy": BackcopySource,
    "dyck": DyckSource,
}


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe:
    """The optimisation: AdamW, warm-up, a stable stretch, and a decay to zero at the end.

    Give `steps`, or `tokens` (padding included); the schedule's `decay_share` is of all steps. A branch
    goes on from the run's state after a step of the stable stretch, on the same rows, and decays at once.
    """

    output: Path
    batch_tokens: int  # per step, padding included
    learning_rate: float  # of the stable stretch
    steps: int | None = None
    tokens: int | None = None
    warmup_steps: int = 100
    decay_share: float = 0.25
    branches: tuple[int, ...] = ()  # steps after which a decay of its own starts, beside the run
    branch_steps: int = 0  # the length of each
    weight_decay: float = 0.1
    router_z_loss: float = 0.0  # coefficient; that of balance is the model's router_aux_loss_coef
    accumulate: int = 1  # a step's rows are computed in so many batches
    checkpoint_activations: bool = False  # compute them again in the backward: less memory
    compile: bool = False  # torch.compile
    shard: bool = False  # weights, gradients and optimiser are spread over torchrun's processes
    save_every: int = 500  # steps, as the next three
    keep_every: int = 0  # of these checkpoints none is removed
    log_every: int = 20
    eval_every: int = 500

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.tokens is None):
            raise SmeltscopeError("[training] needs either steps or tokens.")
        _positive(
            "training",
            **({"steps": self.steps} if self.tokens is None else {"tokens": self.tokens}),
            batch_tokens=self.batch_tokens,
            learning_rate=self.learning_rate,
            accumulate=self.accumulate,
            save_every=self.save_every,
            log_every=self.log_every,
            eval_every=self.eval_every,
        )
        if not 0 <= self.decay_share <= 1:
            raise SmeltscopeError(
                f"[training] decay_share is {self.decay_share}: it is a share, from 0 to 1."
            )
        for name in ("weight_decay", "router_z_loss", "keep_every"):
            if getattr(self, name) < 0:
                raise SmeltscopeError(f"[training] {name} is {getattr(self, name)}: at least 0.")
        if not 0 <= self.warmup_steps <= self.total_steps - self.decay_steps:
            raise SmeltscopeError(
                f"[training] has {self.total_steps} steps: {self.warmup_steps} of warm-up and "
                f"{self.decay_steps} of decay do not fit."
            )
        self._check_branches()

    def _check_branches(self) -> None:
        if bool(self.branches) != (self.branch_steps > 0):
            raise SmeltscopeError(
                "[training] branches, a list of steps, goes with branch_steps, how long each is."
            )
        stable = self.total_steps - self.decay_steps
        for step in self.branches:
            if not max(self.warmup_steps, 1) <= step <= stable:
                raise SmeltscopeError(
                    f"[training] branches has {step}: a branch starts at a step of the stable "
                    f"stretch, {max(self.warmup_steps, 1)} to {stable}."
                )
            if step + self.branch_steps > self.total_steps:
                raise SmeltscopeError(
                    f"[training] the branch from step {step} would end at {step + self.branch_steps}, "
                    f"but there are rows for {self.total_steps} steps: lower branch_steps."
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
    mixture: tuple[Source, ...] = (TextSource(weight=1.0),)

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32:
            raise SmeltscopeError(f"seed is {self.seed}: it must be 0 or more, and below 2**32.")
        self._check_mixture()
        if self.training.batch_tokens % self.data.context:
            raise SmeltscopeError(
                f"batch_tokens {self.training.batch_tokens} is no multiple of context "
                f"{self.data.context}: a batch holds whole rows."
            )
        if self.batch_rows % self.training.accumulate:
            raise SmeltscopeError(
                f"[training] accumulate is {self.training.accumulate}, but a step has {self.batch_rows} "
                "rows: it must divide them."
            )

    def _check_mixture(self) -> None:
        texts = [source for source in self.mixture if isinstance(source, TextSource)]
        names = [source.name for source in self.mixture if source not in texts]
        chosen = [category for source in texts for category in source.categories]
        for source in self.mixture:
            if source.weight <= 0:
                raise SmeltscopeError(
                    f"[[mixture]] {source.name} weight is {source.weight}: it must be above 0."
                )
            if names.count(source.name) > 1:
                raise SmeltscopeError(
                    f"[[mixture]] has {source.name} twice: give one of them another name."
                )
            if isinstance(source, BackcopySource) and 2 * source.lengths[1] >= self.data.context:
                raise SmeltscopeError(
                    f"[[mixture]] {source.name} has stretches of {source.lengths[1]} tokens: with their "
                    f"copies they do not fit into context {self.data.context}."
                )
        if len(texts) > 1 and not all(source.categories for source in texts):
            raise SmeltscopeError(
                "[[mixture]] has several sources text: each must name its categories, as without them one has "
                "all text of [data]."
            )
        for category in chosen:
            if chosen.count(category) > 1:
                raise SmeltscopeError(
                    f"[[mixture]] names the category {category!r} of the text twice."
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
    known = {"seed": int, **parts, "mixture": list}
    _check_keys("recipe", table, known=known, required={"seed", *parts})
    for name in (*parts, "mixture"):
        _check_finite("[[mixture]]" if name == "mixture" else f"[{name}]", table.get(name))
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
        tokenizer=_build("[tokenizer]", TokenizerRecipe, tokenizer),
        data=_build("[data]", DataRecipe, words),
        training=_build("[training]", TrainingRecipe, training),
        **({"mixture": _mixture(table["mixture"], path.parent)} if "mixture" in table else {}),
    )


def _mixture(tables: list[Any], base: Path) -> tuple[Source, ...]:
    sources = []
    for table in tables:
        kind = table.get("source") if isinstance(table, dict) else None
        if kind not in SOURCES:
            raise SmeltscopeError(
                f"[[mixture]] has the source {kind!r}: each of its tables names one of "
                f"{', '.join(SOURCES)}."
            )
        words = {key: value for key, value in table.items() if key != "source"}
        if str(words.get("template", "")).endswith(".toml"):
            words["template"] = base / words["template"]
        sources.append(_build(f"[[mixture]] {kind}", SOURCES[kind], words))
    if not sources:
        raise SmeltscopeError("[[mixture]] is empty: leave it out for the text alone.")
    return tuple(sources)


def _paths(name: str, value: Any, base: Path) -> tuple[Path, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise SmeltscopeError(f"[data] {name} must be a list of paths.")
    return tuple(base / item for item in value)


def _build(where: str, kind: type, table: dict[str, Any]) -> Any:
    fields = dataclasses.fields(kind)
    known = {field.name: field.type for field in fields}
    required = {field.name for field in fields if field.default is dataclasses.MISSING}
    _check_keys(where, table, known=known, required=required)
    return kind(**{k: tuple(v) if known[k] in (NUMBERS, WORDS) else v for k, v in table.items()})


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
        if kind in (NUMBERS, WORDS):
            item, said = (int, "whole numbers") if kind == NUMBERS else (str, "names")
            if not isinstance(value, list) or not all(type(n) is item for n in value):
                raise SmeltscopeError(f"{where} {key} is {value!r}: expected a list of {said}.")
        elif kind not in (tuple[Path, ...],) and not isinstance(value, kind):
            name = getattr(kind, "__name__", str(kind))
            raise SmeltscopeError(f"{where} {key} is {value!r}: expected {name}.")
    missing = sorted(required - table.keys())
    if missing:
        raise SmeltscopeError(f"{where} lacks {', '.join(missing)}.")


def _check_finite(where: str, value: Any) -> None:
    """Refuse the nan and inf of TOML, which no comparison would catch; tables and lists are gone through."""
    if isinstance(value, float) and not math.isfinite(value):
        raise SmeltscopeError(f"{where} is {value}: it must be a finite number.")
    items = value.items() if isinstance(value, dict) else ()
    for key, inner in enumerate(value, 1) if isinstance(value, list) else items:
        _check_finite(f"{where} {key}", inner)


def _one_of(where: str, key: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise SmeltscopeError(f"{where} {key} is {value!r}: it is {' or '.join(known)}.")


def _positive(section: str, **values: float) -> None:
    for name, value in values.items():
        if value <= 0:
            raise SmeltscopeError(f"[{section}] {name} is {value}: it must be above 0.")
