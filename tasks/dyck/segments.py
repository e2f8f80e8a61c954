"""One prompt as a segment: the region of each token, what a target's row may look at, what the stack holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from smeltscope.errors import SmeltscopeError
from smeltscope.tasks.dyck.grammar import Word, depths, matches, stack_tops, top_positions
from smeltscope.tasks.dyck.items import Item
from smeltscope.tasks.dyck.pairing import CLOSERS
from smeltscope.tasks.dyck.spans import Reader, Spans

REGIONS = (
    "bos",
    "instruction",
    "demo_input",
    "demo_answer",
    "separator",
    "query_input",
    "query_answer",
)
BOS, INSTRUCTION, DEMO_INPUT, DEMO_ANSWER, SEPARATOR, QUERY_INPUT, QUERY_ANSWER = range(7)
MARKS = ("stack_top_opener", "right_demo_answer", "local")
STATES = ("depth", "stack_top", "match", "closer", "shown")
LOCAL_KEYS = 8  # the row's own place and the seven before it

Pieces = Sequence[tuple[int, str]]  # regions and their text, white space not yet set apart


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """The tokens of a prompt and its answer; the arrays are those of `smeltscope.tasks.Prompts`."""

    ids: np.ndarray  # (length,) int32
    regions: np.ndarray  # (length,) int8
    answers: np.ndarray  # (answer tokens,) int64
    targets: np.ndarray  # (targets,) int64
    bears: np.ndarray  # (targets,) int64: symbols that each target bears
    marks: dict[str, np.ndarray]  # (targets, length) bool
    states: dict[str, np.ndarray]  # (length,) int32
    straddling: np.ndarray  # ids of the tokens that lie over two regions


def make_segment(reader: Reader, pieces: Pieces, items: Sequence[Item]) -> Segment:
    """A prompt of `pieces`, which show the inputs and answers of `items` in this order, the query's last."""
    query = items[-1]
    if not query.answer:
        raise SmeltscopeError(
            f"Item {query.name} leaves no bracket open, so its prompt has no targets: give an input that is to be "
            "completed."
        )
    text = "".join(piece for _, piece in pieces)
    space = np.array([character.isspace() for character in text])
    region = np.empty(len(text), dtype=np.int8)
    shown: dict[str, list[np.ndarray]] = {"inputs": [], "answers": []}  # characters of symbols
    end = 0
    for number, piece in pieces:
        begin, end = end, end + len(piece)
        inked = begin + np.flatnonzero(~space[begin:end])
        region[begin:end] = SEPARATOR
        if number == INSTRUCTION:  # with the white space between its words
            region[inked.min(initial=end) : inked.max(initial=begin - 1) + 1] = number
        else:
            region[inked] = number
        if number in (DEMO_INPUT, QUERY_INPUT):
            shown["inputs"].append(inked)
        elif number in (DEMO_ANSWER, QUERY_ANSWER):
            shown["answers"].append(inked)
    asked = len(text[: shown["answers"][-1][0]].rstrip())  # the answer begins with its space
    spans = reader.read(text, asked)
    regions, straddles = regions_of(spans, region, space)
    ids, first = spans.ids, 0
    if reader.start is not None:
        ids, regions, first = np.append(reader.start, ids), np.append(BOS, regions), 1
    characters = shown["inputs"] + shown["answers"]
    tokens = first + reader.bearers(spans, text, np.concatenate(characters))
    of_pieces = np.split(tokens, np.cumsum([len(of_piece) for of_piece in characters[:-1]]))
    inputs, answers = of_pieces[: len(items)], of_pieces[len(items) :]
    targets, bears = np.unique(answers[-1], return_counts=True)
    return Segment(
        ids=ids.astype(np.int32),
        regions=regions.astype(np.int8),
        answers=np.arange(first + spans.prompt, len(ids)),
        targets=targets,
        bears=bears,
        marks=_marks(items, inputs, answers, targets, len(ids)),
        states=_states(items, inputs, len(ids)),
        straddling=spans.ids[straddles],
    )


def regions_of(
    spans: Spans, region: np.ndarray, space: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The region of each token, (n,), and whether the token lies over several, (n,) bool.

    `region` and `space` say of each character which region it is in and whether it is white space.
    A token belongs to the region that most of its characters other than white space are in, the
    later one on a tie; a token of white space alone is a separator. A token lies over several regions
    if its characters do, white space in front of the others aside.
    """
    starts, ends = spans.starts, spans.ends
    of_char = region[:, None] == np.arange(len(REGIONS))  # (chars, region)
    held = _sums(of_char & ~space[:, None], starts, ends)  # (n, region)
    most = held.max(axis=1, keepdims=True)
    found = np.where(most[:, 0] > 0, held.argmax(axis=1), SEPARATOR)
    for i in np.flatnonzero(((held == most) & (most > 0)).sum(axis=1) > 1):
        characters = np.arange(starts[i], ends[i])[~space[starts[i] : ends[i]]]
        tied = (held[i] == most[i])[region[characters]]
        found[i] = region[characters[tied][-1]]
    chars = len(region)
    inked = np.append(np.where(space, chars, np.arange(chars)), chars)
    inked = np.minimum.accumulate(inked[::-1])[::-1]  # the next character that is no white space
    touched = _sums(of_char, np.minimum(inked[starts], ends), ends) > 0
    return found, touched.sum(axis=1) > 1


def _sums(values: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Sums over values[start:end]: (chars, region) -> (n, region)."""
    total = np.zeros((len(values) + 1, values.shape[1]), dtype=np.int32)
    np.cumsum(values, axis=0, out=total[1:])
    return total[ends] - total[starts]


def _marks(
    items: Sequence[Item],
    inputs: Sequence[np.ndarray],
    answers: Sequence[np.ndarray],
    targets: np.ndarray,
    length: int,
) -> dict[str, np.ndarray]:
    """`inputs` and `answers` are the tokens that bear the symbols of each item."""
    query = items[-1]
    closed = matches(query.prefix + query.answer)[len(query.prefix) :]
    tokens = np.array([token for of_item in answers[:-1] for token in of_item], dtype=np.int64)
    symbols = np.array([symbol for item in items[:-1] for symbol in item.answer_symbols], dtype=str)
    marks = {name: np.zeros((len(targets), length), dtype=bool) for name in MARKS}
    for opener, symbol, token in zip(closed, query.answer_symbols, answers[-1], strict=True):
        row = np.searchsorted(targets, token)  # one token may bear several symbols
        marks["stack_top_opener"][row, inputs[-1][opener]] = True
        marks["right_demo_answer"][row, tokens[symbols == symbol]] = True
    back = targets[:, None] - 1 - np.arange(length)
    marks["local"] = (back >= 0) & (back < LOCAL_KEYS)
    return marks


def _states(
    items: Sequence[Item], inputs: Sequence[np.ndarray], length: int
) -> dict[str, np.ndarray]:
    """What the stack holds after a token's last symbol."""
    states = {name: np.full(length, -1, dtype=np.int32) for name in STATES}
    closed = np.zeros(
        max(len(item.pairing.openers) for item in items), dtype=bool
    )  # by type, so far
    for item, tokens in zip(items, inputs, strict=True):
        depth, kind, top = _stack(item.prefix)
        closer = np.array([CLOSERS.find(symbol) for symbol in item.pairing.closers])
        # Where a token bears several symbols the last assignment stays.
        states["depth"][tokens] = depth
        states["stack_top"][tokens] = kind
        states["match"][tokens] = np.where(top >= 0, tokens[top], -1)
        states["closer"][tokens] = np.where(kind >= 0, closer[kind], -1)
        symbols = np.array(item.prefix)
        closes = symbols[:, None] == ~np.arange(len(closed))  # (symbol, type)
        known = closed | np.logical_or.accumulate(closes)
        states["shown"][tokens] = np.where(kind >= 0, known[np.arange(len(kind)), kind], -1)
        closed = known[-1] | np.isin(~np.arange(len(closed)), item.answer)
    return states


@lru_cache(maxsize=4096)
def _stack(prefix: Word) -> tuple[np.ndarray, ...]:
    """Depth, type on top and index of the opener on top after each symbol; an item is shown many times."""
    return tuple(np.array(of(prefix)) for of in (depths, stack_tops, top_positions))
