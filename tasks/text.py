"""Held-out text: documents cut into segments, within a budget that the categories share."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from smeltscope.errors import SmeltscopeError
from smeltscope.tasks.arrays import BLOCK
from smeltscope.tasks.files import (
    DataFile,
    Document,
    categories,
    documents,
    find_files,
    quiet_datasets,
)
from smeltscope.tasks.prompts import Prompts
from smeltscope.tasks.tokens import SpecialTokens, start_token, tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class DocumentInfo:
    """Where a document comes from."""

    id: str
    category: str
    source: str  # "" where the file names none
    file: str


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldOut:
    """Segments of held-out documents, in the order of the files and of the rows in them.

    A document of which no segment is left is not listed.
    """

    tokens: np.ndarray  # (tokens,) int32, all segments one after another, start tokens included
    offsets: np.ndarray  # (segments + 1,) int64: segment i is tokens[offsets[i]:offsets[i + 1]]
    document: np.ndarray  # (segments,) int32, index into documents
    documents: list[DocumentInfo]
    start_token: int | None  # the id that begins each segment
    dropped: dict[str, int]  # what was left out, by reason
    notes: list[str]  # sentences for the user
    digest: str  # sha256 of tokens, offsets, document ids, categories, sources: the data of a run
    prompts: Prompts | None = None  # where the segments are prompts

    def __len__(self) -> int:
        return len(self.document)

    def segment(self, i: int) -> np.ndarray:
        """The tokens of segment `i`, (length,) int32."""
        return self.tokens[self.offsets[i] : self.offsets[i + 1]]

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens in each segment, (segments,) int64."""
        return np.diff(self.offsets)

    @property
    def categories(self) -> list[str]:
        """The category of each segment."""
        return [self.documents[d].category for d in self.document]

    @property
    def sources(self) -> list[str]:
        """The source of each segment."""
        return [self.documents[d].source for d in self.document]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A stretch of a document, without its start token."""

    place: tuple[int, int]  # file and row: the order of the result
    info: DocumentInfo
    ids: np.ndarray  # (n,) int32


def load_heldout(
    paths: Sequence[str | Path],
    tokenizer: "PreTrainedTokenizerBase | SpecialTokens",
    *,
    max_length: int,
    tokens: int | None = None,
    bos: bool = True,
    vocab_size: int | None = None,
    token_dtype: str | None = None,
    split_token: int | None = None,
) -> HeldOut:
    """Read documents from files and folders and cut them into segments.

    A segment has at most `max_length` tokens and begins with the start token, unless `bos` is
    False. A segment of one real token is dropped. `tokens` is a budget, start tokens included: the
    next segment always comes from the category that has the fewest tokens so far (the first on a
    tie), categories that are used up leave their share to the others, and the segment that crosses
    the budget is cut there. The result depends on data and options alone.

    A model without a tokenizer has `SpecialTokens`, for token arrays alone.
    `vocab_size` is the model's: an id that it lacks is an error. `token_dtype` is the type of .bin
    files. `split_token` parts the documents of token arrays, by default the tokenizer's start and
    end token. Raises SmeltscopeError with a sentence that names the file and the mend.
    """
    start, notes = start_token(tokenizer, bos)
    extra = int(start is not None)
    if max_length < 2 + extra:
        raise SmeltscopeError(f"--max-length {max_length} is too short: give {2 + extra} or more.")
    if tokens is not None and tokens < 2 + extra:
        raise SmeltscopeError(f"--tokens {tokens} is too few: give {2 + extra} or more.")
    files, folder_notes = find_files(paths)
    special = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    split_ids = frozenset(i for i in special if i is not None)
    if split_token is not None:
        split_ids = frozenset({split_token})
    dropped: Counter[str] = Counter()

    def segments(numbered: Sequence[tuple[int, DataFile]], category: str | None) -> Iterator:
        for number, file in numbered:
            for document in documents(file, token_dtype=token_dtype, split_ids=split_ids):
                if category in (None, document.category):
                    ids = _token_ids(document, tokenizer, start, vocab_size, dropped)
                    info = DocumentInfo(
                        id=document.id,
                        category=document.category,
                        source=document.source,
                        file=document.file,
                    )
                    for cut in _cut(ids, max_length - extra, dropped):
                        yield Segment(place=(number, document.row), info=info, ids=cut)

    with quiet_datasets():
        if tokens is None:
            chosen = list(segments(list(enumerate(files)), None))
        else:
            homes: dict[str, list[tuple[int, DataFile]]] = {}
            for number, file in enumerate(files):
                for category in categories(file):
                    homes.setdefault(category, []).append((number, file))
            streams = {category: segments(home, category) for category, home in homes.items()}
            chosen = list(_balance(streams, tokens, extra))
            taken = sum(len(segment.ids) + extra for segment in chosen)
            if taken < tokens - 1 - extra:
                notes.append(f"All data is used: {taken:,} tokens of the {tokens:,} asked for.")
    if not chosen:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(dropped.items()))
        raise SmeltscopeError(
            f"Nothing is left of {', '.join(map(str, paths))} ({reasons}): a segment needs two real "
            "tokens, give longer documents."
        )
    return _assemble(chosen, start, dict(sorted(dropped.items())), notes + folder_notes)


def shipped_heldout() -> list[Path]:
    """The held-out text that comes with smeltscope: one file a category (see SOURCES.md there)."""
    return sorted((Path(__file__).parent / "heldout").glob("*.jsonl.gz"))


def _token_ids(
    document: Document,
    tokenizer: "PreTrainedTokenizerBase | SpecialTokens",
    start: int | None,
    vocab_size: int | None,
    dropped: Counter[str],
) -> Iterator[np.ndarray]:
    """The document's real tokens, piece by piece, (n,) int32, checked against the vocabulary."""
    content = document.content
    if isinstance(content, str):
        if isinstance(tokenizer, SpecialTokens):
            raise SmeltscopeError(
                f"{document.file} is text, but the checkpoint holds no tokenizer: save one beside the "
                "model with save_pretrained, or give token arrays (.npy, .bin)."
            )
        pieces, whose = tokenize(tokenizer, content), "the tokenizer's ids"
    else:
        pieces = (content[i : i + BLOCK] for i in range(0, len(content), BLOCK))
        whose = "its token ids"
    first = True
    for piece in pieces:
        if first and len(piece) and piece[0] == start:
            dropped["doubled_start_token"] += 1
            piece = piece[1:]
        first = False
        if len(piece) and (piece.min() < 0 or piece.max() >= (vocab_size or 2**31)):
            worst = int(piece.min() if piece.min() < 0 else piece.max())
            raise SmeltscopeError(
                f"{document.file}: {whose} reach {worst} but the model's vocabulary has "
                f"{vocab_size or 2**31} entries: use the tokenizer that the model was trained with."
            )
        yield piece.astype(np.int32)


def _cut(pieces: Iterator[np.ndarray], room: int, dropped: Counter[str]) -> Iterator[np.ndarray]:
    """Stretches of `room` tokens and the rest; a rest of one token is dropped and counted."""
    rest = np.empty(0, dtype=np.int32)
    whole = True
    for piece in pieces:
        rest = np.concatenate([rest, piece])
        while len(rest) >= room:
            yield rest[:room]
            rest, whole = rest[room:], False
    if len(rest) >= 2:
        yield rest
    elif len(rest) == 1:
        dropped["one_token_document" if whole else "one_token_tail"] += 1
    elif whole:
        dropped["empty_document"] += 1


def _balance(streams: dict[str, Iterator[Segment]], tokens: int, extra: int) -> Iterator[Segment]:
    """Segments from the streams, always from the one with the fewest tokens, up to `tokens`."""
    taken = dict.fromkeys(streams, 0)
    left = tokens
    while taken and left >= 2 + extra:
        category = min(taken, key=taken.__getitem__)
        segment = next(streams[category], None)
        if segment is None:
            del taken[category]
            continue
        ids = segment.ids[: left - extra]
        taken[category] += len(ids) + extra
        left -= len(ids) + extra
        yield replace(segment, ids=ids)


def _assemble(
    chosen: list[Segment], start: int | None, dropped: dict[str, int], notes: list[str]
) -> HeldOut:
    chosen = sorted(chosen, key=lambda segment: segment.place)  # stable: keeps a document's order
    begin = [] if start is None else [np.array([start], dtype=np.int32)]
    tokens = np.concatenate(list(chain.from_iterable((*begin, s.ids) for s in chosen)))
    offsets = np.zeros(len(chosen) + 1, dtype=np.int64)
    np.cumsum([len(s.ids) + len(begin) for s in chosen], out=offsets[1:])
    infos = {segment.place: segment.info for segment in chosen}
    index = {place: i for i, place in enumerate(infos)}
    document = np.array([index[segment.place] for segment in chosen], dtype=np.int32)
    digest = hashlib.sha256(tokens.tobytes() + offsets.tobytes() + document.tobytes())
    digest.update(json.dumps([(d.id, d.category, d.source) for d in infos.values()]).encode())
    return HeldOut(
        tokens=tokens,
        offsets=offsets,
        document=document,
        documents=list(infos.values()),
        start_token=start,
        dropped=dropped,
        notes=notes,
        digest=digest.hexdigest(),
    )
