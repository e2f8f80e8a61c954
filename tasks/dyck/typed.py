"""A prompt as typed: its inputs and answers are found by the words around them."""

import re

from smeltscope.errors import SmeltscopeError
from smeltscope.tasks.dyck.items import Item, ItemSet
from smeltscope.tasks.dyck.pairing import USUAL
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
    """The pieces of a typed prompt, the answer added, and its items."""
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
    pieces: list[tuple[int, str]] = []
    items = []
    done = 0
    for number, match in enumerate(found, 1):
        query = number == len(found)
        other = text[done : match.start()]
        if between in other or (before and before in other):
            raise SmeltscopeError(
                f"Before input {number} the prompt has a shot that is not whole: write {words} around each input, "
                "which stands in one line."
            )
        item = _item(match["input"], number)
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
        done = match.end("answer")
    return pieces, ItemSet(query=items[-1], demonstrations=tuple(items[:-1]))


def _item(text: str, number: int) -> Item:
    try:
        item = Item(name="prompt", prefix=USUAL.read("".join(text.split())), pairing=USUAL)
        if not item.answer:
            raise SmeltscopeError("No bracket is left open: give one that is to be completed.")
    except SmeltscopeError as error:
        raise SmeltscopeError(f"The prompt's input {number}, {text.strip()!r}: {error}") from None
    return item
