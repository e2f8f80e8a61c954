"""Sets of items drawn from the grammar: by what reveals the pairs, or all of one shape."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import TypeVar

import numpy as np

from smeltscope.errors import SmeltscopeError
from smeltscope.tasks.dyck.grammar import count_prefixes, paint, sample_shape
from smeltscope.tasks.dyck.items import Item, ItemSet, closed_types
from smeltscope.tasks.dyck.pairing import OPENERS, Pairing, draw_pairing, usual_pairing

PAIRINGS = ("usual", "in-context")
REVEALS = ("answers", "inputs", "both")
ANSWER_LENGTHS = {1: 359, 2: 348, 3: 293}  # how often, in BIG-bench's 1,000 items
NESTED_SYMBOLS, NESTED_ANSWER = 7, 3  # in every input and every answer of a nested prompt
TRIES = 2_000  # draws before a request counts as impossible; the defaults take tens
Drawn = TypeVar("Drawn")


def generate_sets(
    number: int,
    shots: int,
    seed: int,
    *,
    pairing: str = "usual",
    reveal: str = "both",
    types: int = len(OPENERS),
    lengths: tuple[int, int] = (4, 16),
    max_depth: int | None = None,
    heldout_maps: bool = True,
) -> list[ItemSet]:
    """Sets whose demonstrations reveal what closes the query's open brackets, as `reveal` says.

    answers: a type that the query's answer needs is closed in no input, neither the query's nor a
        demonstration's; the answers of the first two demonstrations show all of them.
    inputs: it is closed neither in the query's input nor in a demonstration's answer; the inputs of
        the first two demonstrations show all of them.
    both: types are drawn freely, wherever they show.

    A query's answer has 1, 2 or 3 symbols, as often as in BIG-bench where `lengths` has room; its
    input has `lengths[0]` to `lengths[1]` symbols, all lengths that fit alike, and is uniform over
    the inputs that keep to `reveal`, length and answer given. Demonstrations are drawn alike, anew
    until they show what they must and differ from the query. Set i depends on `seed` and i alone,
    and from two shots on more of them only add to the fewer. `heldout_maps`: in-context maps are
    those that training leaves alone.
    """
    _check_reveal(reveal)
    if not 1 <= types <= len(OPENERS):
        raise SmeltscopeError(f"There are 1 to {len(OPENERS)} bracket types, not {types}.")
    kinds = range(types)
    rooms = _input_lengths(lengths, max_depth)
    complaint = (
        f"Found no prompts of {shots} shots, {types} bracket types and inputs of {lengths[0]} to "
        f"{lengths[1]} symbols where {reveal} reveal the pairs: ask for more types or longer "
        "inputs."
    )
    sets = []
    for i in range(number):
        source = _source([seed, i], pairing, types, rooms, max_depth, heldout_maps)
        stack = _draw_until(
            partial(source.stack, kinds),
            lambda stack: reveal == "both" or len(set(stack)) < types,
            complaint,
        )
        spared = kinds if reveal == "both" else sorted(set(kinds) - set(stack))
        query = source.item(f"{pairing}:{seed}:{i}", stack, spared)
        demonstrations = source.demonstrations(
            query,
            shots,
            closed=spared if reveal == "answers" else kinds,
            unclosed=spared if reveal == "inputs" else kinds,
            leading=2,
            holds=partial(_reveal, reveal, query),
            complaint=complaint,
        )
        sets.append(ItemSet(query=query, demonstrations=demonstrations))
    return sets


def nested_sets(
    number: int, shots: int, seed: int, *, pairing: str = "usual", reveal: str = "both"
) -> list[ItemSet]:
    """Sets of one shape, for targets that stand still at the end while shots are added before.

    Every input has 7 symbols and every answer 3. `reveal` is as in `generate_sets`, but that the
    first demonstration alone shows all that the query's answer needs: its answer has the same
    symbols, in any order; with `inputs` its input closes them, and they are of two types at most,
    for it has room for two pairs. In-context maps are those that training leaves alone. Set i
    depends on `seed` and i alone, and more shots only add to the fewer.
    """
    _check_reveal(reveal)
    kinds = range(len(OPENERS))
    rooms = {NESTED_ANSWER: [NESTED_SYMBOLS]}
    most = (NESTED_SYMBOLS - NESTED_ANSWER) // 2 if reveal == "inputs" else NESTED_ANSWER
    holds = partial(_reveal, reveal) if reveal == "inputs" else _has_symbols
    complaint = "Found no nested prompts."
    sets = []
    for i in range(number):
        source = _source([seed, i], pairing, len(OPENERS), rooms, None, heldout_maps=True)
        stack = _draw_until(
            partial(source.stack, kinds), lambda stack: len(set(stack)) <= most, complaint
        )
        spared = kinds if reveal == "both" else sorted(set(kinds) - set(stack))
        query = source.item(f"nested:{pairing}:{seed}:{i}", stack, spared)
        demonstrations = source.demonstrations(
            query,
            shots,
            closed=spared if reveal == "answers" else kinds,
            unclosed=spared if reveal == "inputs" else kinds,
            leading=1,
            holds=partial(holds, query),
            complaint=complaint,
        )
        sets.append(ItemSet(query=query, demonstrations=demonstrations))
    return sets


@dataclass(frozen=True, kw_only=True)
class _Source:
    """What the items of one set are drawn from."""

    rng: np.random.Generator
    pairing: Pairing
    rooms: dict[int, list[int]]  # lengths of inputs, by length of the answer
    max_depth: int | None

    @cached_property
    def sizes(self) -> list[int]:
        """Lengths of answers, each as often as it weighs."""
        return [size for size in self.rooms for _ in range(ANSWER_LENGTHS[size])]

    def stack(self, types: Sequence[int]) -> list[int]:
        """Types of the brackets left open, outermost first."""
        size = self.sizes[self.rng.integers(len(self.sizes))]
        return [types[i] for i in self.rng.integers(len(types), size=size)]

    def item(self, name: str, stack: list[int], closed: Sequence[int]) -> Item:
        """One that leaves `stack` open; its pairs have types of `closed`."""
        room = self.rooms[len(stack)]
        symbols = room[self.rng.integers(len(room))]
        shape = sample_shape(self.rng, symbols, len(stack), self.max_depth)
        prefix = paint(self.rng, shape, closed, stack)
        return Item(name=name, prefix=prefix, pairing=self.pairing)

    def demonstrations(
        self,
        query: Item,
        shots: int,
        *,
        closed: Sequence[int],
        unclosed: Sequence[int],
        leading: int,
        holds: Callable[[list[Item]], bool],
        complaint: str,
    ) -> tuple[Item, ...]:
        """`shots` items unlike the query; the `leading` ones are drawn together until `holds`."""

        def draw(numbers: range) -> list[Item]:
            names = [f"{query.name}.{number}" for number in numbers]
            return [self.item(name, self.stack(unclosed), closed) for name in names]

        def differ(items: list[Item]) -> bool:
            return all(item.prefix != query.prefix for item in items)

        if not shots:
            return ()
        leading = min(leading, shots)
        first = _draw_until(
            lambda: draw(range(leading)), lambda items: differ(items) and holds(items), complaint
        )
        others = [
            _draw_until(partial(draw, range(number, number + 1)), differ, complaint)
            for number in range(leading, shots)
        ]
        return tuple(chain(first, *others))


def _source(
    seed: list[int],
    pairing: str,
    types: int,
    rooms: dict[int, list[int]],
    max_depth: int | None,
    heldout_maps: bool,
) -> _Source:
    if pairing not in PAIRINGS:
        raise SmeltscopeError(f"A pairing is {' or '.join(PAIRINGS)}, not {pairing!r}.")
    rng = np.random.default_rng(seed)
    if pairing == "usual":
        pairs = usual_pairing(types)
    else:
        pairs = draw_pairing(rng, heldout=heldout_maps, types=types)
    return _Source(rng=rng, pairing=pairs, rooms=rooms, max_depth=max_depth)


def _check_reveal(reveal: str) -> None:
    if reveal not in REVEALS:
        raise SmeltscopeError(f"Pairs are revealed by {', '.join(REVEALS)}, not by {reveal!r}.")


def _reveal(reveal: str, query: Item, items: list[Item]) -> bool:
    """Whether `items` close all types that the query's answer needs, in their answers or inputs."""
    if reveal == "both":
        return True
    words = [item.answer if reveal == "answers" else item.prefix for item in items]
    return closed_types(query.answer) <= frozenset().union(*map(closed_types, words))


def _has_symbols(query: Item, items: list[Item]) -> bool:
    """Whether the first of `items` has the query's answer in some order."""
    return sorted(items[0].answer) == sorted(query.answer)


def _input_lengths(lengths: tuple[int, int], max_depth: int | None) -> dict[int, list[int]]:
    """The lengths of inputs that leave 1, 2 or 3 brackets open, where there are any."""
    rooms = {
        answer: [
            symbols
            for symbols in range(max(lengths[0], 1), lengths[1] + 1)
            if count_prefixes(symbols, answer, 1, max_depth)
        ]
        for answer in ANSWER_LENGTHS
    }
    rooms = {answer: room for answer, room in rooms.items() if room}
    if not rooms:
        bound = "" if max_depth is None else f" and depth {max_depth}"
        raise SmeltscopeError(
            f"No input of {lengths[0]} to {lengths[1]} symbols{bound} leaves 1 to 3 brackets open: "
            "widen the bounds."
        )
    return rooms


def _draw_until(draw: Callable[[], Drawn], holds: Callable[[Drawn], bool], complaint: str) -> Drawn:
    for _ in range(TRIES):
        drawn = draw()
        if holds(drawn):
            return drawn
    raise SmeltscopeError(complaint)
