"""Which characters of a text each token stands for, with any fast tokenizer."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from smeltscope.errors import SmeltscopeError
from smeltscope.tasks.tokens import SpecialTokens, start_token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True, eq=False)
class Spans:
    """The tokens of a prompt and its answer, without a start token."""

    ids: np.ndarray  # (n,) int32
    starts: np.ndarray  # (n,) int64: token i stands for text[starts[i]:ends[i]]
    ends: np.ndarray  # (n,) int64
    prompt: int  # how many of them are the prompt's; the others are the answer's


@dataclass(frozen=True, kw_only=True, eq=False)
class Reader:
    """A tokenizer, and what it is used with."""

    tokenizer: "PreTrainedTokenizerBase"
    vocabulary: list[str]  # the text of each id
    start: int | None  # the id that begins each segment
    notes: list[str]  # sentences about it
    vocab_size: int | None  # the model's

    def read(self, text: str, asked: int) -> Spans:
        """The tokens of `text`, none of them across character `asked`: a model goes on from there."""
        ids, starts, ends = self._encode(text)
        if ((starts < asked) & (asked < ends)).any():
            prompt, answer = self._encode(text[:asked]), self._encode(text[asked:])
            ids = np.concatenate([prompt[0], answer[0]])
            starts = np.concatenate([prompt[1], answer[1] + asked])
            ends = np.concatenate([prompt[2], answer[2] + asked])
        if self.vocab_size is not None and ids.max(initial=0) >= self.vocab_size:
            raise SmeltscopeError(
                f"The tokenizer's ids reach {ids.max()} but the model's vocabulary has {self.vocab_size} entries: "
                "use the tokenizer that the model was trained with."
            )
        return Spans(ids=ids, starts=starts, ends=ends, prompt=int((ends <= asked).sum()))

    def bearers(self, spans: Spans, text: str, characters: np.ndarray) -> np.ndarray:
        """The token that stands for each of these characters, (characters,) int64."""
        tokens = np.searchsorted(spans.ends, characters, side="right")
        lacking = tokens >= len(spans.ids)
        tokens[lacking] = 0
        if len(spans.ids):
            lacking |= spans.starts[tokens] > characters
            lacking |= spans.ids[tokens] == self.tokenizer.unk_token_id
        if lacking.any():
            raise _lacks([text[i] for i in characters[lacking]])
        return tokens

    def check(self, symbols: Iterable[str]) -> None:
        """Refuse a tokenizer that leaves symbols out or cannot tell them apart."""
        written = {}
        for symbol in symbols:
            text = f" {symbol}"
            spans = self.read(text, 0)
            self.bearers(spans, text, np.array([1]))
            written[symbol] = tuple(spans.ids.tolist())
        alike = Counter(written.values())
        lost = [symbol for symbol, ids in written.items() if alike[ids] > 1]
        if lost:
            raise _lacks(lost)

    def _encode(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids, and where they start and end."""
        encoded = self.tokenizer(
            text,
            add_special_tokens=False,
            padding=False,
            truncation=False,
            verbose=False,
            return_offsets_mapping=True,
        )
        ids = np.asarray(encoded["input_ids"], dtype=np.int32)
        offsets = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        starts, ends = offsets[:, 0], offsets[:, 1]
        if (np.append(starts, len(text)) > np.append(0, ends)).any():
            starts, ends = self._untrimmed(text, ids, offsets)
        return ids, starts, ends

    def _untrimmed(
        self, text: str, ids: np.ndarray, offsets: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Offsets with the white space that some tokenizers leave out: a token whose text goes on here is here."""
        spans = []
        end = 0
        for token, (start, stop) in zip(ids, offsets.tolist(), strict=True):
            own = self.vocabulary[token]
            if own and text.startswith(own, end):
                start, stop = end, end + len(own)
            spans.append((start, stop))
            end = stop
        whole = np.array(spans, dtype=np.int64).reshape(-1, 2)
        return whole[:, 0], whole[:, 1]


def reader_of(
    tokenizer: "PreTrainedTokenizerBase | SpecialTokens", *, bos: bool, vocab_size: int | None
) -> Reader:
    """Refuses a model without a tokenizer, and one whose tokenizer does not tell characters."""
    if isinstance(tokenizer, SpecialTokens):
        raise SmeltscopeError(
            "Prompts need a tokenizer, but the checkpoint holds none: save one beside the model with "
            "save_pretrained."
        )
    if not tokenizer.is_fast:
        raise SmeltscopeError(
            f"{type(tokenizer).__name__} is a slow tokenizer: it does not tell which characters a token stands "
            "for, so regions cannot be found; save the fast one (tokenizer.json) beside the model."
        )
    start, notes = start_token(tokenizer, bos)
    size = max(tokenizer.get_vocab().values()) + 1
    return Reader(
        tokenizer=tokenizer,
        vocabulary=_vocabulary(tokenizer, size),
        start=start,
        notes=notes,
        vocab_size=vocab_size,
    )


@lru_cache(maxsize=2)
def _vocabulary(tokenizer: "PreTrainedTokenizerBase", size: int) -> list[str]:
    """The text of each id as it stands behind a letter: some tokenizers drop a text's first space."""
    letter = tokenizer("a", add_special_tokens=False)["input_ids"]
    options: dict[str, Any] = {"clean_up_tokenization_spaces": False}
    skip = len(tokenizer.decode(letter, **options))
    texts = tokenizer.batch_decode([[*letter, i] for i in range(size)], **options)
    return [text[skip:] for text in texts]


def _lacks(symbols: Iterable[str]) -> SmeltscopeError:
    return SmeltscopeError(
        f"The tokenizer has no tokens of their own for {' '.join(dict.fromkeys(symbols))}: use a checkpoint whose "
        "tokenizer knows them."
    )
