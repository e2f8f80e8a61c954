"""From text to token ids: which token begins a segment, and long texts in pieces."""

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PIECE = 1 << 17  # characters tokenized in one call: a fast tokenizer needs 150 bytes for each
OVERLAP = 1 << 12  # characters that neighbouring pieces share
AGREE = 8  # tokens that must be the same on both sides of a seam


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """Start and end token of a model without a tokenizer, which can be run on token arrays only."""

    bos_token_id: int | None
    eos_token_id: int | None


def start_token(
    tokenizer: "PreTrainedTokenizerBase | SpecialTokens", bos: bool
) -> tuple[int | None, list[str]]:
    """The id that begins each segment, None for no start token, and what to tell the user.

    It is the tokenizer's start token, or its end token where it has no start token.
    """
    if not bos:
        return None, ["No start token, as asked: a segment begins with its first real token."]
    first, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    start = end if first is None else first
    if isinstance(tokenizer, SpecialTokens):
        if start is None:
            return None, [
                "The model names neither a start nor an end token: segments have neither."
            ]
        return start, [
            f"No tokenizer: id {start} of the model's configuration begins each segment."
        ]
    if start is None:
        return None, ["The tokenizer has neither a start nor an end token: segments have neither."]
    name = f"{tokenizer.convert_ids_to_tokens(start)} (id {start})"
    notes = []
    if first is None:
        notes.append(f"The tokenizer has no start token: its end token {name} begins each segment.")
    elif first == end:
        notes.append(f"The start token {name} is the tokenizer's end token too.")
    if list(tokenizer("a")["input_ids"][:1]) == [start]:
        notes.append(
            f"The tokenizer puts {name} in front by itself: that is turned off, "
            "and each segment gets one."
        )
    if tokenizer.pad_token_id == start:
        notes.append(
            f"The start token {name} is the padding token too: this is harmless, "
            "padding is known by its place and not by its token."
        )
    return start, notes


def delimiter_tokens(tokenizer: "PreTrainedTokenizerBase | None") -> np.ndarray:
    """Which ids stand for punctuation or line breaks alone, spaces aside: (vocabulary,) bool.

    None of them without a tokenizer: an array of length 1 that holds False.
    """
    if tokenizer is None:
        return np.zeros(1, dtype=bool)
    ids = range(len(tokenizer))
    texts = tokenizer.batch_decode([[i] for i in ids], clean_up_tokenization_spaces=False)
    special = set(tokenizer.all_special_ids)
    return np.array(
        [i not in special and _is_delimiter(text) for i, text in zip(ids, texts, strict=True)]
    )


def _is_delimiter(text: str) -> bool:
    marks = text.strip(" \t")
    return bool(marks) and all(
        c in "\n\r" or unicodedata.category(c).startswith("P") for c in marks
    )


def tokenize(
    tokenizer: "PreTrainedTokenizerBase", text: str, *, piece: int = PIECE, overlap: int = OVERLAP
) -> Iterator[np.ndarray]:
    """Token ids of `text`, without special tokens, in arrays (n,) of int32, one after another.

    Joined they are what one call for the whole text gives. A long text is tokenized in
    overlapping pieces of `piece` characters as they are asked for, so time is linear, memory
    bounded, and what is not asked for costs nothing. Two pieces are joined in the middle of their
    overlap, where both have a token boundary and the same tokens around it; where there is no
    such place the piece grows. A tokenizer without offsets gets the whole text.
    """
    if len(text) <= piece or not tokenizer.is_fast:
        yield np.asarray(_encode(tokenizer, text)["input_ids"], dtype=np.int32)
        return
    done, start, size = 0, 0, piece  # characters
    ids, begins = _encode_piece(tokenizer, text, start, size)
    while start + size < len(text):
        following = start + size - overlap
        next_ids, next_begins = _encode_piece(tokenizer, text, following, piece)
        middle = following + overlap // 2
        seam = _seam(ids, begins, next_ids, next_begins, middle, overlap // 4)
        if seam is None:
            size *= 2
            ids, begins = _encode_piece(tokenizer, text, start, size)
            continue
        yield ids[np.searchsorted(begins, done) : np.searchsorted(begins, seam)]
        done, start, size = seam, following, piece
        ids, begins = next_ids, next_begins
    yield ids[np.searchsorted(begins, done) :]


def _encode(tokenizer: "PreTrainedTokenizerBase", text: str, **options: Any) -> Any:
    # verbose=False: no warning that the text is longer than the model's context
    return tokenizer(
        text,
        add_special_tokens=False,
        verbose=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        **options,
    )


def _encode_piece(
    tokenizer: "PreTrainedTokenizerBase", text: str, start: int, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Ids of text[start : start + size] and the character of `text` at which each begins."""
    encoded = _encode(tokenizer, text[start : start + size], return_offsets_mapping=True)
    begins = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)[:, 0]
    return np.asarray(encoded["input_ids"], dtype=np.int32), begins + start


def _seam(
    ids: np.ndarray,
    begins: np.ndarray,
    next_ids: np.ndarray,
    next_begins: np.ndarray,
    middle: int,
    reach: int,
) -> int | None:
    """The character nearest to `middle`, at most `reach` away, where two pieces can be joined."""
    shared = np.intersect1d(begins, next_begins)
    shared = shared[np.abs(shared - middle) <= reach]
    for seam in shared[np.argsort(np.abs(shared - middle), kind="stable")]:
        i, j = np.searchsorted(begins, seam), np.searchsorted(next_begins, seam)
        if min(i, j) < AGREE:  # a piece's first tokens lack what stands before them
            continue
        if np.array_equal(ids[i - AGREE : i + AGREE], next_ids[j - AGREE : j + AGREE]):
            return int(seam)
    return None
