"""A prompt as typed: its inputs and answers are found by the words around them."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from smeltscope.errors import SmeltscopeError
from smeltscope.tasks.dyck.items import Item, ItemSet
from smeltscope.tasks.dyck.pairing import CLOSERS, OPENERS, USUAL, Pairing
from smeltscope.tasks.dyck.segments import (
    DEMO_ANSWER,
    DEMO_INPUT,
    INSTRUCTION,
    QUERY_ANSWER,
    QUERY_INPUT,
    SEPARATOR,
    Pieces,
)
from smeltscope.tasks.dyck.templates import Template


def read_typed(text: str, template: Template) -> tuple[Pieces, ItemSet]:
    """The pieces of a typed prompt, the answer added, and its items.

    Brackets close as the prompt itself shows; as usual where it shows nothing else.
    """
    text = text.replace("\\n", "\n").rstrip()
    before, between = (literal.strip() for literal in template.literals)
    words = f'"{before}" and "{between}"' if before else f'"{between}"'
    # An input ends at the words behind it, an answer at the end of its line or the next shot's words.
    shot = re.compile(
        rf"{re.escape(before)}(?P<input>[^\n]*?)\s*{re.escape(between)}"
        rf"(?P<answer>[^\n]*?)\s*?(?=\n|$|{re.escape(before) or '$'})"
    )
    found = list(shot.finditer(text))
    if not found or found[-1].end() < len(text) or found[-1]["answer"].strip():
        example = template.shot.format(input="( [", answer="").strip()
        raise SmeltscopeError(
            f'The prompt does not end in "{between}" after an input in one line: write it as in {example!r}.'
        )
    ends = [0, *(match.end("answer") for match in found)]
    others = [text[end : match.start()] for end, match in zip(ends, found, strict=False)]
    for number, other in enumerate(others, 1):
        if between in other or (before and before in other):
            raise SmeltscopeError(
                f"Before input {number} the prompt has a shot that is not whole: write {words} around each input, "
                "which stands in one line."
            )
    pairing = _pairing_of([(match["input"], match["answer"]) for match in found])
    pieces: list[tuple[int, str]] = []
    items = []
    for number, (other, match) in enumerate(zip(others, found, strict=True), 1):
        query = number == len(found)
        item = _item(match["input"], number, pairing)
        pieces += [
            (INSTRUCTION, other),
            (SEPARATOR, text[match.start() : match.start("input")]),
            (QUERY_INPUT if query else DEMO_INPUT, match["input"]),
            (SEPARATOR, text[match.end("input") : match.start("answer")]),
        ]
        if query:
            pieces += [(SEPARATOR, " "), (QUERY_ANSWER, " ".join(item.answer_symbols))]
        else:
            pieces.append((DEMO_ANSWER, match["answer"]))
            if "".join(match["answer"].split()) != "".join(item.answer_symbols):
                raise SmeltscopeError(
                    f"The prompt's answer {number}, {match['answer'].strip()!r}, does not close input {number}: write "
                    f"{' '.join(item.answer_symbols)!r}."
                )
        items.append(item)
    return pieces, ItemSet(query=items[-1], demonstrations=tuple(items[:-1]))


def _item(text: str, number: int, pairing: Pairing) -> Item:
    name = "prompt"
    if pairing != USUAL:  # who looks at it should see that it was taken so, and for no slip
        name += "".join(
            f", {a} by {b}" for a, b in zip(pairing.openers, pairing.closers, strict=True)
        )
    with _said_of("input", number, text):
        item = Item(name=name, prefix=pairing.read("".join(text.split())), pairing=pairing)
        if not item.answer:
            raise SmeltscopeError("No bracket is left open: give one that is to be completed.")
    return item


@contextmanager
def _said_of(what: str, number: int, text: str) -> Iterator[None]:
    """Errors name the input or answer that they are of."""
    try:
        yield
    except SmeltscopeError as error:
        raise SmeltscopeError(f"The prompt's {what} {number}, {text.strip()!r}: {error}") from None


def _pairing_of(shots: Sequence[tuple[str, str]]) -> Pairing:
    """The pairs that inputs and answers show, the query's last; the usual ones where all of them are usual.

    And where only the query's own input pairs usual closers otherwise: that is a slip, which reading it then names.
    """
    shown = _pairs_shown(shots)
    usual = dict(zip(USUAL.openers, USUAL.closers, strict=True))
    unusual = [opener for opener, (closer, _) in shown.items() if closer != usual[opener]]
    query = f"input {len(shots)}"
    if all(shown[o][1] == query and shown[o][0] in USUAL.closers for o in unusual):
        return USUAL
    for number, (text, answer) in enumerate(shots, 1):
        lacking = " ".join(dict.fromkeys(s for s in text if s in OPENERS and s not in shown))
        if lacking and number < len(shots):
            raise SmeltscopeError(
                f"The prompt's answer {number}, {answer.strip()!r}, does not close input {number}: it leaves {lacking} "
                "open."
            )
        if lacking:
            closer, place = shown[unusual[0]]
            raise SmeltscopeError(
                f"The answer needs what closes {lacking}, which the prompt never shows, and its pairs are not the "
                f"usual ones: {unusual[0]} is closed by {closer} in {place}. Close {lacking} in a demonstration or in "
                "an input."
            )
    openers = "".join(opener for opener in OPENERS if opener in shown)
    return Pairing(openers=openers, closers="".join(shown[opener][0] for opener in openers))


def _pairs_shown(shots: Sequence[tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """Which symbol closes each opener that is closed in some input or answer, and where first: {opener: (closer, place)}."""
    shown: dict[str, tuple[str, str]] = {}
    opener_of: dict[str, str] = {}
    for number, shot in enumerate(shots, 1):
        open_ones: list[str] = []
        for what, text in zip(("input", "answer"), shot, strict=True):
            for i, symbol in enumerate("".join(text.split()), 1):
                with _said_of(what, number, text):
                    opener = _closed(symbol, i, open_ones)
                if opener is None:
                    continue
                place = f"{what} {number}"
                closer, first = shown.setdefault(opener, (symbol, place))
                if closer != symbol:
                    raise SmeltscopeError(
                        f"The prompt closes {opener} by {closer} in {first} and by {symbol} in {place}: in one prompt "
                        "a bracket has one closer."
                    )
                other = opener_of.setdefault(symbol, opener)
                if other != opener:
                    raise SmeltscopeError(
                        f"The prompt closes {other} by {symbol} in {shown[other][1]} and {opener} too in {place}: each "
                        "bracket needs a closer of its own."
                    )
    return shown


def _closed(symbol: str, i: int, open_ones: list[str]) -> str | None:
    """The opener that a symbol closes, None for an opener; `open_ones` are those that are open, and change."""
    if symbol in OPENERS:
        open_ones.append(symbol)
        return None
    if symbol not in CLOSERS:
        raise SmeltscopeError(
            f"Symbol {i} is {symbol!r}, no bracket of {OPENERS} and none of the closers {CLOSERS}: remove it."
        )
    if not open_ones:
        raise SmeltscopeError(
            f"Symbol {i} closes a bracket but none is open: remove it or open one before."
        )
    return open_ones.pop()
