"""Dyck prompts as held-out segments, with known regions."""

import hashlib
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from smeltscope.errors import SmeltscopeError
from smeltscope.tasks.dyck.items import (
    Item,
    ItemSet,
    bayes,
    candidates,
    guess,
    most_common_answer,
    readable,
    right_tokens,
)
from smeltscope.tasks.dyck.segments import (
    DEMO_ANSWER,
    DEMO_INPUT,
    INSTRUCTION,
    MARKS,
    QUERY_ANSWER,
    QUERY_INPUT,
    REGIONS,
    SEPARATOR,
    STATES,
    Pieces,
    Segment,
    make_segment,
)
from smeltscope.tasks.dyck.spans import Reader, reader_of
from smeltscope.tasks.dyck.templates import STOP, Template
from smeltscope.tasks.dyck.typed import read_typed
from smeltscope.tasks.prompts import Prompts
from smeltscope.tasks.text import DocumentInfo, HeldOut
from smeltscope.tasks.tokens import SpecialTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Kind = Literal["scored", "nested"]


def make_prompts(
    sets: Sequence[ItemSet],
    tokenizer: "PreTrainedTokenizerBase | SpecialTokens",
    *,
    shots: Sequence[int],
    template: Template,
    context: int,
    seed: int,
    kind: Kind = "scored",
    bos: bool = True,
    vocab_size: int | None = None,
) -> HeldOut:
    """Prompts of the queries of `sets` with each of these numbers of shots, and their gold answers.

    Segments stand in the order of `shots` and, within, of `sets`. A prompt longer than `context`
    tokens, the answer included, loses whole demonstrations, the last ones first: the first reveal what
    the answer needs. A number of shots that no prompt keeps is left out, unless it is the smallest. Nested prompts lose
    none: a number of shots with which one of them is too long is left out. `seed`, a label, is what demonstrations were
    drawn with. `vocab_size` is the model's. Raises SmeltscopeError with a sentence.
    """
    shots = sorted(set(shots))
    if not sets or not shots:
        raise SmeltscopeError("There is no prompt to make: give one item and one number of shots.")
    most = min(len(item_set.demonstrations) for item_set in sets)
    if shots[0] < 0 or shots[-1] > most:
        raise SmeltscopeError(
            f"Numbers of shots {', '.join(map(str, shots))} are not all from 0 to {most}, the demonstrations that "
            "each query has: give other --shots or more items."
        )
    reader = reader_of(tokenizer, bos=bos, vocab_size=vocab_size)
    pairings = {item.pairing for item_set in sets for item in _items(item_set)}
    reader.check({symbol for p in pairings for symbol in p.openers + p.closers})
    common = most_common_answer(item_set.query for item_set in sets)
    made: list[tuple[Segment, dict[str, Any]]] = []
    notes = list(reader.notes)
    fitted: dict[int, tuple[Segment, ItemSet]] = {}  # where k do not fit, more keep the same
    for k in shots:
        shown = [replace(item_set, demonstrations=item_set.demonstrations[:k]) for item_set in sets]
        segments = [
            fitted[i][0] if i in fitted else _segment(reader, item_set, template)
            for i, item_set in enumerate(shown)
        ]
        too_long = [i in fitted or len(s.ids) > context for i, s in enumerate(segments)]
        if kind == "nested" and any(too_long) and k == shots[0]:
            raise SmeltscopeError(
                f"A nested prompt with {k} shot{'s' * (k != 1)} has {max(len(s.ids) for s in segments)} tokens with its "
                f"answer but {context} fit: leave nested prompts out (--nested 0) or take a model with a longer context."
            )
        if any(too_long) if kind == "nested" else k > shots[0] and all(too_long):
            without = ", ".join(str(n) for n in shots if n >= k)  # more fit even less
            which = "not every nested" if kind == "nested" else "no"
            notes.append(
                f"Left out: {without} shots, for {which} prompt with them fits into {context} tokens."
            )
            break
        for i, (segment, item_set) in enumerate(zip(segments, shown, strict=True)):
            if too_long[i]:
                if i not in fitted:
                    short = _shortened(reader, item_set, template, context)
                    fitted[i] = _segment(reader, short, template), short
                segment, item_set = fitted[i]
            labels = {
                "kind": kind,
                "prompt_seed": seed,
                "half": i % 2,
                "most_common": int(item_set.query.answer_symbols == common),
                **_labels(item_set, segment),
                "shots": k,
            }
            made.append((segment, labels))
    return _gather(made, template, reader, notes)


def parse_prompt(
    text: str,
    tokenizer: "PreTrainedTokenizerBase | SpecialTokens",
    *,
    template: Template,
    context: int,
    bos: bool = True,
    vocab_size: int | None = None,
) -> HeldOut:
    """One prompt as typed, with the answer that closes its last input, by the pairs that the prompt itself shows.

    Inputs and answers are found by the words of `template` around them; all other text is
    instruction. A backslash and an n are a line break, white space at the end is dropped.
    """
    pieces, item_set = read_typed(text, template)
    reader = reader_of(tokenizer, bos=bos, vocab_size=vocab_size)
    reader.check(item_set.query.pairing.openers + item_set.query.pairing.closers)
    segment = make_segment(reader, pieces, _items(item_set))
    if len(segment.ids) > context:
        raise _too_long("The prompt", len(segment.ids), context)
    labels = {
        "kind": "typed",
        "prompt_seed": 0,
        "half": 0,
        "most_common": 1,
        **_labels(item_set, segment),
    }
    return _gather([(segment, labels)], template, reader, list(reader.notes))


def join(parts: Sequence[HeldOut]) -> HeldOut:
    """The prompts of several kinds or seeds, made with one tokenizer; documents they share stay one."""
    found = [part.prompts for part in parts if part.prompts is not None]

    def listed(lists: Sequence[list[np.ndarray]]) -> list[np.ndarray]:
        return list(chain.from_iterable(lists))

    prompts = replace(
        found[0],
        regions=listed([of.regions for of in found]),
        answers=listed([of.answers for of in found]),
        targets=listed([of.targets for of in found]),
        marks={name: listed([of.marks[name] for of in found]) for name in MARKS},
        states={name: listed([of.states[name] for of in found]) for name in STATES},
        labels={
            name: np.concatenate([of.labels[name] for of in found]) for name in found[0].labels
        },
    )
    notes = [
        note
        for part, of in zip(parts, found, strict=True)
        for note in part.notes
        if note not in _counts(of.labels)  # they are counted anew
    ]
    return _heldout(
        [part.segment(i) for part in parts for i in range(len(part))],
        [part.documents[d] for part in parts for d in part.document],
        prompts,
        parts[0].start_token,
        list(dict.fromkeys(notes)),
    )


def _segment(reader: Reader, item_set: ItemSet, template: Template) -> Segment:
    return make_segment(reader, _pieces(item_set, template), _items(item_set))


def _shortened(reader: Reader, item_set: ItemSet, template: Template, context: int) -> ItemSet:
    """`item_set` without the last demonstrations, as few as must go for the prompt to fit."""

    def first(kept: int) -> ItemSet:
        return replace(item_set, demonstrations=item_set.demonstrations[:kept])

    def length(kept: int) -> int:
        return len(_segment(reader, first(kept), template).ids)

    fitting = bisect_right(range(len(item_set.demonstrations)), context, key=length)
    if not fitting:
        what = f"The prompt of item {item_set.query.name}, without demonstrations,"
        raise _too_long(what, length(0), context)
    return first(fitting - 1)


def _items(item_set: ItemSet) -> tuple[Item, ...]:
    """In the order of the prompt."""
    return (*item_set.demonstrations, item_set.query)


def _pieces(item_set: ItemSet, template: Template) -> Pieces:
    before, between = template.literals
    pieces: list[tuple[int, str]] = []
    for left, item in zip(
        range(len(item_set.demonstrations), -1, -1), _items(item_set), strict=True
    ):
        if pieces:
            pieces.append((SEPARATOR, template.join))
        if template.repeat or not pieces:
            pieces.append((INSTRUCTION, template.instruction))
        pieces += [
            (SEPARATOR, before),
            (DEMO_INPUT if left else QUERY_INPUT, " ".join(item.input_symbols)),
            (SEPARATOR, between),
            (DEMO_ANSWER if left else QUERY_ANSWER, " ".join(item.answer_symbols)),
        ]
    return pieces


def _labels(item_set: ItemSet, segment: Segment) -> dict[str, Any]:
    """How many demonstrations a query kept, and what its scores are held against."""
    query, shots = item_set.query, len(item_set.demonstrations)
    numbers = candidates(item_set, shots)
    alike = [len(query.pairing.choices)] * len(query.answer)
    bears = segment.bears.tolist()
    return {
        "shots": shots,
        "kept_shots": shots,
        "item": query.name,
        "symbols": len(query.answer),
        "readable": int(readable(query)),
        **{f"bayes_{given}": chance for given, chance in bayes(item_set, shots).items()},
        "guess": guess(query),
        **{f"right_symbols_bayes_{given}": right_tokens(n, bears) for given, n in numbers.items()},
        "right_symbols_guess": right_tokens(alike, bears),
    }


def _too_long(what: str, length: int, context: int) -> SmeltscopeError:
    return SmeltscopeError(
        f"{what} has {length} tokens with its answer but {context} fit: leave it out or take a "
        "model with a longer context."
    )


def _gather(
    made: Sequence[tuple[Segment, dict[str, Any]]],
    template: Template,
    reader: Reader,
    notes: list[str],
) -> HeldOut:
    segments = [segment for segment, _ in made]
    rows = [{**labels, "straddling": len(segment.straddling)} for segment, labels in made]
    straddling = Counter(chain.from_iterable(s.straddling.tolist() for s in segments))
    if straddling:
        examples = ", ".join(repr(reader.vocabulary[i]) for i, _ in straddling.most_common(3))
        notes.append(
            f"Tokens such as {examples} lie over two regions: each counts to the one that has most of its "
            "characters other than white space, the later one on a tie."
        )
    infos = []
    for labels in rows:
        category = f"{labels['shots']} shots"
        if labels["kind"] != "scored":
            category = f"{labels['kind']} {category}"
        id = f"{labels['item']}, {category}"
        infos.append(DocumentInfo(id=id, category=category, source=template.name, file=""))
    prompts = Prompts(
        region_names=REGIONS,
        regions=[s.regions for s in segments],
        answers=[s.answers for s in segments],
        targets=[s.targets for s in segments],
        marks={name: [s.marks[name] for s in segments] for name in MARKS},
        states={name: [s.states[name] for s in segments] for name in STATES},
        labels={name: np.array([labels[name] for labels in rows]) for name in rows[0]},
        vocabulary=reader.vocabulary,
        stop=STOP,
        template=asdict(template),
    )
    return _heldout([s.ids for s in segments], infos, prompts, reader.start, notes)


def _heldout(
    ids: Sequence[np.ndarray],
    infos: Sequence[DocumentInfo],
    prompts: Prompts,
    start: int | None,
    notes: list[str],
) -> HeldOut:
    tokens = np.concatenate(ids)
    offsets = np.zeros(len(ids) + 1, dtype=np.int64)
    np.cumsum([len(of_segment) for of_segment in ids], out=offsets[1:])
    index = {info: i for i, info in enumerate(dict.fromkeys(infos))}
    document = np.array([index[info] for info in infos], dtype=np.int32)
    lost = int((prompts.labels["shots"] - prompts.labels["kept_shots"]).sum())
    return HeldOut(
        tokens=tokens,
        offsets=offsets,
        document=document,
        documents=list(index),
        start_token=start,
        dropped={"demonstrations": lost} if lost else {},
        notes=notes + _counts(prompts.labels),
        digest=_digest([tokens, offsets, document], list(index), prompts),
        prompts=prompts,
    )


def _counts(labels: Mapping[str, np.ndarray]) -> list[str]:
    """Sentences on demonstrations that did not fit and tokens that lie over two regions."""
    notes = []
    shots, kept, over = labels["shots"], labels["kept_shots"], labels["straddling"]
    for k in np.unique(shots[kept < shots]):
        of_k = kept[shots == k]
        notes.append(
            f"{k} shots: {(of_k < k).sum():,} of {len(of_k):,} prompts lost their last demonstrations to fit and "
            f"keep {of_k[of_k < k].mean():.1f} on average."
        )
    if over.any():
        notes.append(
            f"Tokens over two regions: {over.sum():,}, in {(over > 0).sum():,} of {len(over):,} prompts."
        )
    return notes


def _digest(
    arrays: Sequence[np.ndarray], documents: Sequence[DocumentInfo], prompts: Prompts
) -> str:
    """sha256 of all that a run over these prompts depends on."""
    of_segments = [prompts.regions, prompts.answers, prompts.targets]
    of_segments += [*prompts.marks.values(), *prompts.states.values()]
    digest = hashlib.sha256()
    for array in chain(arrays, *of_segments):
        digest.update(array.tobytes())
    labels = {name: values.tolist() for name, values in prompts.labels.items()}
    infos = [(info.id, info.category, info.source) for info in documents]
    digest.update(json.dumps([infos, labels, prompts.vocabulary, prompts.stop]).encode())
    return digest.hexdigest()
