"""Items: brackets to close, from a file, with demonstrations, and what can be known from those."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from smeltscope.errors import SmeltscopeError
from smeltscope.tasks.dyck.grammar import Word, completion
from smeltscope.tasks.dyck.pairing import USUAL, Pairing
from smeltscope.tasks.files import quiet_datasets

# Names of columns: BIG-bench as DCLM has it, BIG-Bench Hard, and plain rows.
INPUT_KEYS = ("context", "input")
ANSWER_KEYS = ("continuation", "target", "answer")


@dataclass(frozen=True, kw_only=True)
class Item:
    """An unfinished word; the answer is the shortest word that finishes it."""

    name: str
    prefix: Word
    pairing: Pairing

    @cached_property
    def answer(self) -> Word:
        return completion(self.prefix)

    @cached_property
    def input_symbols(self) -> tuple[str, ...]:
        return self.pairing.write(self.prefix)

    @cached_property
    def answer_symbols(self) -> tuple[str, ...]:
        return self.pairing.write(self.answer)


@dataclass(frozen=True, kw_only=True)
class ItemSet:
    """A query and its demonstrations, all of one pairing; a prompt of k shots takes the first k."""

    query: Item
    demonstrations: tuple[Item, ...]

    def __post_init__(self) -> None:
        for item in self.demonstrations:
            if item.pairing != self.query.pairing:
                raise SmeltscopeError(
                    f"{item.name} can't demonstrate {self.query.name}: their brackets pair "
                    "differently, choose items of one pairing."
                )


def parse_item(text: str, name: str) -> Item:
    """The item whose usual brackets, spaces or none between them, are `text`.

    Where the words stand there: what follows the last "Input:", up to "Output:".
    """
    brackets = text.rpartition("Input:")[2].partition("Output:")[0]
    item = Item(name=name, prefix=USUAL.read("".join(brackets.split())), pairing=USUAL)
    if not item.answer:
        raise SmeltscopeError("No bracket is left open: there is nothing to complete.")
    return item


def read_items(path: str | Path) -> list[Item]:
    """The items of a .jsonl or .json file, or of a folder that `datasets` wrote, in order.

    A row has its brackets under `context` or `input`, as `parse_item` takes them, and their
    completion under `continuation`, `target` or `answer`. A .json file is a list of rows, under
    `examples` if it is an object. Each answer is checked against the stack. Raises SmeltscopeError
    that names the row.
    """
    path = Path(path)
    items = [_parse_row(row, f"{path.name}:{place}", path, place) for place, row in _rows(path)]
    if not items:
        raise SmeltscopeError(f"{path} is empty: it holds no items.")
    return items


def sets_of_items(items: Sequence[Item], shots: int, seed: int) -> list[ItemSet]:
    """Each item as a query, with `shots` other items in an order drawn by `seed`.

    None of them has the query's input, so none is the query. Fewer shots take the first of them.
    """
    sets = []
    for i, query in enumerate(items):
        order = np.random.default_rng([seed, i]).permutation(len(items))
        others = (items[j] for j in order if items[j].prefix != query.prefix)
        shown = tuple(islice(others, shots))
        if len(shown) < shots:
            raise SmeltscopeError(
                f"{shots} shots need {shots} items with another input than {query.name}, but there "
                f"are {len(shown)}: give more items or fewer shots."
            )
        sets.append(ItemSet(query=query, demonstrations=shown))
    return sets


def candidates(item_set: ItemSet, k: int) -> dict[str, tuple[int, ...]]:
    """How many closers are equally likely for each symbol of the query's answer, at `k` shots, by evidence.

    For one who knows grammar, stack and the answer's symbols before, but holds all injective maps of the openers into
    the pairing's `choices` for equally likely: 1 where the closer of the symbol's type is known, else the choices that
    no known type has. What is known: "nothing"; "query", the pairs that the query's input closes; "inputs", also those of
    the demonstrations' inputs; "answers", also those of the demonstrations' answers.
    """
    query, shown = item_set.query, item_set.demonstrations[:k]
    by_query = closed_types(query.prefix)
    by_inputs = by_query.union(*(closed_types(item.prefix) for item in shown))
    by_answers = by_inputs.union(*(closed_types(item.answer) for item in shown))
    evidence = {
        "nothing": frozenset[int](),
        "query": by_query,
        "inputs": by_inputs,
        "answers": by_answers,
    }
    return {name: _candidates(query, known) for name, known in evidence.items()}


def _candidates(query: Item, known: frozenset[int]) -> tuple[int, ...]:
    numbers = []
    for symbol in query.answer:
        numbers.append(1 if ~symbol in known else len(query.pairing.choices) - len(known))
        known |= {~symbol}
    return tuple(numbers)


def bayes(item_set: ItemSet, k: int) -> dict[str, float]:
    """Chance that the best guess of the query's whole answer is right, at `k` shots, by evidence as in `candidates`.

    With r types of known closer and u types that the answer needs beyond them, it is
    1 / ((c - r) (c - r - 1) ... (c - r - u + 1)) for c choices. - ln of it is the least expected loss of the answer, in nats.
    """
    return {name: 1 / math.prod(numbers) for name, numbers in candidates(item_set, k).items()}


def right_tokens(numbers: Sequence[int], bears: Sequence[int]) -> float:
    """How many of the answer's tokens the best guess of each has right on average, given those before it.

    `numbers`: how many closers are equally likely for each symbol; `bears`: how many symbols each token bears. A token
    is right if all of its symbols are.
    """
    left = iter(numbers)
    return sum(1 / math.prod(islice(left, count)) for count in bears)


def closed_types(word: Word) -> frozenset[int]:
    """The bracket types that `word` closes: their closing symbols stand in it."""
    return frozenset(~symbol for symbol in word if symbol < 0)


def readable(item: Item) -> bool:
    """Whether every symbol of the answer already stands in the item's own input."""
    return closed_types(item.answer) <= closed_types(item.prefix)


def guess(item: Item) -> float:
    """Chance of one who knows the answer's length and draws each symbol from the choices."""
    return len(item.pairing.choices) ** -len(item.answer)


def most_common_answer(items: Iterable[Item]) -> tuple[str, ...]:
    """The answer that most items have, of several the one that comes first."""
    return Counter(item.answer_symbols for item in items).most_common(1)[0][0]


def _parse_row(row: Any, name: str, path: Path, place: str) -> Item:
    fields = row if isinstance(row, dict) else {}
    texts = []
    for keys in (INPUT_KEYS, ANSWER_KEYS):
        found = [fields[key] for key in keys if isinstance(fields.get(key), str)]
        if not found:
            raise SmeltscopeError(
                f"{path}, row {place} has no text under {' or '.join(keys)}: every row needs "
                f"brackets under one of {', '.join(INPUT_KEYS)} and their completion under one of "
                f"{', '.join(ANSWER_KEYS)}."
            )
        texts.append(found[0])
    try:
        item = parse_item(texts[0], name)
    except SmeltscopeError as error:
        raise SmeltscopeError(f"{path}, row {place} is broken: {error}") from error
    answer = " ".join(item.answer_symbols)
    if "".join(texts[1].split()) != answer.replace(" ", ""):
        raise SmeltscopeError(
            f"{path}, row {place} has the answer {texts[1].strip()!r} but the shortest completion "
            f"is {answer!r}: correct it."
        )
    return item


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(row from 1, fields); where a folder has splits, a row is named after its split."""
    if not path.exists():
        raise SmeltscopeError(f"{path} does not exist: check --data.")
    if path.is_dir():
        yield from _rows_of_dataset(path)
        return
    if path.suffix not in (".jsonl", ".json"):
        raise SmeltscopeError(
            f"{path} has an unknown ending: Dyck items come as .jsonl, .json or a folder of "
            "`datasets`."
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SmeltscopeError(f"{path} cannot be read: {error}.") from error
    if path.suffix == ".json":
        content = _load_json(text, f"{path}")
        rows = content.get("examples") if isinstance(content, dict) else content
        if not isinstance(rows, list):
            raise SmeltscopeError(
                f"{path} has no list of rows: give one, under `examples` or bare."
            )
        yield from ((str(number), row) for number, row in enumerate(rows, 1))
    else:
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield str(number), _load_json(line, f"{path}, row {number}")


def _load_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SmeltscopeError(f"{where} is broken JSON ({error}): mend or remove it.") from error


def _rows_of_dataset(folder: Path) -> Iterator[tuple[str, Any]]:
    from datasets import DatasetDict, load_from_disk

    with quiet_datasets():
        try:
            data = load_from_disk(str(folder))
        except Exception as error:  # whatever Arrow and datasets raise
            raise SmeltscopeError(
                f"{folder} cannot be read as a dataset: give a folder that `save_to_disk` wrote "
                f"({type(error).__name__}: {error})."
            ) from error
        splits = data if isinstance(data, DatasetDict) else {"": data}
        for split, table in splits.items():
            for number, row in enumerate(table.with_format(None), 1):
                yield f"{split}:{number}".removeprefix(":"), row
