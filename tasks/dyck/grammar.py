"""Dyck words over several bracket types: counted, drawn, and their stack after each symbol."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from smeltscope.errors import SmeltscopeError

Word = tuple[int, ...]  # t >= 0 opens a bracket of type t, ~t closes one


def count_prefixes(symbols: int, depth: int, types: int, max_depth: int | None = None) -> int:
    """How many words of `symbols` symbols leave `depth` brackets open.

    Exact; never more than `max_depth` are open at once. A word of depth 0 is a Dyck word.
    """
    openers = (symbols + depth) // 2
    return _ways(symbols, depth, max_depth)[symbols][0] * types**openers


def count_words(pairs: int, types: int, max_depth: int | None = None) -> int:
    """How many Dyck words have `pairs` pairs: Catalan(pairs) * types**pairs if unbounded."""
    return count_prefixes(2 * pairs, 0, types, max_depth)


def sample_shape(
    rng: np.random.Generator, symbols: int, depth: int, max_depth: int | None = None
) -> Word:
    """A prefix of type 0 alone, uniform over those that leave `depth` brackets open.

    Each symbol opens with the share of prefixes that go on so; the share is exact to 2**-53.
    """
    if not _ways(symbols, depth, max_depth)[symbols][0]:
        bound = "" if max_depth is None else f" and never more than {max_depth}"
        raise SmeltscopeError(
            f"No word of {symbols} symbols leaves {depth} brackets open{bound}: give another "
            "length (even where the depth is, odd where it is) or a higher bound."
        )
    chances = _chances(symbols, depth, max_depth)
    word: list[int] = []
    now = 0
    for left, draw in zip(range(symbols, 0, -1), rng.random(symbols), strict=True):
        opens = draw < chances[left][now]
        now += 1 if opens else -1
        word.append(0 if opens else ~0)
    return tuple(word)


def paint(
    rng: np.random.Generator, shape: Word, closed: Sequence[int], unclosed: Sequence[int]
) -> Word:
    """`shape` with types: each pair's is drawn from `closed`, all alike.

    `unclosed` are the types of the brackets left open, the outermost first.
    """
    pairs = [(opener, i) for i, opener in enumerate(matches(shape)) if opener >= 0]
    word = list(shape)
    for (opener, i), draw in zip(pairs, rng.integers(len(closed), size=len(pairs)), strict=True):
        word[opener] = closed[draw]
        word[i] = ~word[opener]
    for opener, kind in zip(_left_open(shape), unclosed, strict=True):
        word[opener] = kind
    return tuple(word)


def sample_prefix(
    rng: np.random.Generator, symbols: int, depth: int, types: int, max_depth: int | None = None
) -> Word:
    """A prefix, uniform over those that `count_prefixes` counts."""
    shape = sample_shape(rng, symbols, depth, max_depth)
    return paint(rng, shape, range(types), rng.integers(types, size=depth).tolist())


def sample_word(
    rng: np.random.Generator, pairs: int, types: int, max_depth: int | None = None
) -> Word:
    """A Dyck word, uniform over those that `count_words` counts."""
    return sample_prefix(rng, 2 * pairs, 0, types, max_depth)


def branching_word(
    rng: np.random.Generator,
    types: int,
    *,
    max_pairs: int,
    max_depth: int | None = None,
    children: float = 1.0,
) -> Word:
    """A Dyck word, not empty, by a branching process: a pair holds a geometric number of pairs.

    `children` is the mean of that number, for the outermost level too. With q = children /
    (1 + children), a word of n pairs within the bounds has the chance q**(n - 1) (1 - q)**(n + 1) /
    types**n; at `max_pairs` or `max_depth` nothing opens any more and what is open closes.
    """
    opens = children / (1 + children)
    deepest = max_pairs if max_depth is None else max_depth
    if min(max_pairs, deepest) < 1:
        raise SmeltscopeError("A word that is not empty needs a pair: give bounds of 1 or more.")
    word = [0]
    pairs = depth = 1
    while True:
        if pairs < max_pairs and depth < deepest and rng.random() < opens:
            word.append(0)
            pairs, depth = pairs + 1, depth + 1
        elif depth:
            word.append(~0)
            depth -= 1
        else:
            return paint(rng, tuple(word), range(types), ())


def completion(prefix: Word) -> Word:
    """The shortest word that closes what `prefix` leaves open: there is one."""
    return tuple(~prefix[opener] for opener in reversed(_left_open(prefix)))


def depths(word: Word) -> list[int]:
    """How many brackets are open after each symbol."""
    return [len(stack) for stack in _stacks(word)]


def top_positions(word: Word) -> list[int]:
    """The index of the opener on top of the stack after each symbol, -1 where nothing is open."""
    return [stack[-1] if stack else -1 for stack in _stacks(word)]


def stack_tops(word: Word) -> list[int]:
    """The type on top of the stack after each symbol, -1 where nothing is open."""
    return [word[top] if top >= 0 else -1 for top in top_positions(word)]


def matches(word: Word) -> list[int]:
    """The index of the opener that each closer closes, -1 for openers."""
    before = [-1, *top_positions(word)]
    return [before[i] if symbol < 0 else -1 for i, symbol in enumerate(word)]


def _stacks(word: Word) -> Iterator[list[int]]:
    """Indices of the open openers after each symbol: one list that changes."""
    stack: list[int] = []
    for i, symbol in enumerate(word):
        if symbol >= 0:
            stack.append(i)
        elif not stack:
            raise SmeltscopeError(
                f"Symbol {i + 1} closes a bracket but none is open: remove it or open one before."
            )
        elif word[stack[-1]] != ~symbol:
            raise SmeltscopeError(
                f"Symbol {i + 1} closes another type of bracket than symbol {stack[-1] + 1} "
                "opened: brackets close in the reverse order of opening."
            )
        else:
            stack.pop()
        yield stack


def _left_open(word: Word) -> list[int]:
    """Indices of the openers that nothing closes."""
    *_, stack = [], *_stacks(word)  # one list: its last state
    return stack


@lru_cache(maxsize=256)
def _ways(symbols: int, depth: int, max_depth: int | None) -> list[list[int]]:
    """ways[left][now]: paths of `left` symbols from `now` open brackets to `depth`."""
    top = symbols if max_depth is None else min(max_depth, symbols)
    ways = [[int(now == depth) for now in range(top + 1)]]
    for _ in range(symbols):
        last = [0, *ways[-1], 0]
        ways.append([last[now] + last[now + 2] for now in range(top + 1)])
    return ways


@lru_cache(maxsize=256)
def _chances(symbols: int, depth: int, max_depth: int | None) -> list[list[float]]:
    """chances[left][now]: share of those paths that begin with an opener."""
    ways = _ways(symbols, depth, max_depth)
    chances: list[list[float]] = [[]]
    for after, here in pairwise(ways):
        up = [*after[1:], 0]
        chances.append(
            [opening / all_ if all_ else 0.0 for opening, all_ in zip(up, here, strict=True)]
        )
    return chances
