"""Streams of rows: several sources that take turns by weight, and one that copies its own tokens.

Whatever is drawn depends on a seed and a place alone: a longer stream begins with a shorter one.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from smeltscope.errors import SmeltscopeError
from smeltscope.model.rows import Rows, Segment, join_rows

Draw = Callable[[np.random.Generator, int], np.ndarray]  # (generator, length) -> token ids


def take_turns(weights: Sequence[float], count: int) -> np.ndarray:
    """Which source gives each of `count` rows, (count,) int64: the one that lags most behind its share.

    A source's share is its weight divided by their sum. The first of those that lag alike gives.
    """
    shares = np.asarray(weights, dtype=np.float64) / np.sum(weights)
    given = np.zeros(len(shares))
    turns = np.empty(count, dtype=np.int64)
    for i in range(count):
        turns[i] = np.argmax(shares * (i + 1) - given)
        given[turns[i]] += 1
    return turns


def interleave(parts: Sequence[Rows], turns: np.ndarray) -> Rows:
    """The first rows of all parts, each in its own order; `turns` says which part gives the next."""
    order = np.empty(len(turns), dtype=np.int64)
    first = 0
    for i, part in enumerate(parts):
        order[turns == i] = first + np.arange((turns == i).sum())
        first += len(part)
    return join_rows(parts).take(order)


def backcopy(
    draw: Draw,
    *,
    count: int,
    context: int,
    start: int,
    lengths: tuple[int, int],
    copies_only: bool,
    seed: int,
) -> Iterator[Segment]:
    """Segments of `context` tokens: stretches, each at once followed by its copy.

    A stretch comes from `draw`; its length is uniform over `lengths`, ends included. The last copy,
    or stretch, is cut at the segment's end. With `copies_only` the loss counts the tokens of copies
    from the second on: where a copy begins cannot be known. Such streams make induction heads, and
    attention sinks, in small models (compare Guo et al., arXiv 2410.13835).
    """
    for i in range(count):
        rng = np.random.default_rng([seed, i])
        tokens, copied = [np.array([start])], [np.array([False])]
        room = context - 1
        while room > 0:
            stretch = draw(rng, int(rng.integers(lengths[0], lengths[1] + 1)))
            tokens += [stretch, stretch]
            copied += [np.zeros(len(stretch), dtype=bool), np.arange(len(stretch)) > 0]
            room -= 2 * len(stretch)
        predicted = np.concatenate(copied)[:context] if copies_only else np.arange(context) > 0
        yield Segment(tokens=np.concatenate(tokens)[:context].astype(np.int32), predicted=predicted)


def random_tokens(ids: np.ndarray) -> Draw:
    """Tokens drawn uniformly from `ids`, each alone."""
    return lambda rng, length: ids[rng.integers(len(ids), size=length)]


def stretches_of(segments: dict[str, list[Segment]], *, end: int, shortest: int) -> Draw:
    """Stretches of text: every category as often, then every segment, then every place in it.

    Neither start nor end tokens are in them; a segment that is too short gives what it has.
    Raises SmeltscopeError when no segment has `shortest` tokens.
    """
    pools = []
    for members in segments.values():
        bodies = [s.tokens[1:-1] if s.tokens[-1] == end else s.tokens[1:] for s in members]
        pools.append([body for body in bodies if len(body) >= shortest])
    pools = [pool for pool in pools if pool]
    if not pools:
        raise SmeltscopeError(
            f"No document has {shortest} tokens to copy: give more text or shorter lengths."
        )

    def draw(rng: np.random.Generator, length: int) -> np.ndarray:
        pool = pools[rng.integers(len(pools))]
        body = pool[rng.integers(len(pool))]
        begin = rng.integers(max(len(body) - length, 0) + 1)
        return body[begin : begin + length]

    return draw


def seed_of(seed: int, *labels: str | int) -> int:
    """A seed for what these labels name, unlike that of any other labels."""
    words = [zlib.crc32(label.encode()) if isinstance(label, str) else label for label in labels]
    return int(np.random.SeedSequence([seed, *words]).generate_state(1, np.uint64)[0])
