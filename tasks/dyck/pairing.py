"""Which symbol closes which bracket: the usual pairs, or a map drawn for each prompt."""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from smeltscope.errors import SmeltscopeError
from smeltscope.tasks.dyck.grammar import Word

OPENERS = "([{<"
CLOSERS = ")]}>!#$%&*+/;=?@"  # the usual four first; single symbols in every tokenizer of bytes
HELD_OUT = 8  # one map in so many is for evaluation alone


@dataclass(frozen=True, kw_only=True)
class Pairing:
    """A map from bracket types to symbols: `openers[t]` is closed by `closers[t]`."""

    openers: str
    closers: str
    choices: str = CLOSERS  # what closers are drawn from, for one who does not know the map

    def __post_init__(self) -> None:
        symbols = self.openers + self.closers
        if len(self.openers) != len(self.closers) or len(set(symbols)) < len(symbols):
            raise SmeltscopeError(
                f"The brackets {self.openers} and {self.closers} do not pair: give as many closers "
                "as openers, all symbols different."
            )
        if not set(self.closers) <= set(self.choices):
            raise SmeltscopeError(
                f"The closers {self.closers} are not all among {self.choices}: add the others "
                "there."
            )

    def read(self, symbols: Iterable[str]) -> Word:
        """The word that these symbols stand for."""
        ids = {opener: t for t, opener in enumerate(self.openers)}
        ids |= {closer: ~t for t, closer in enumerate(self.closers)}
        symbols = list(symbols)
        for i, symbol in enumerate(symbols, 1):
            if symbol not in ids:
                raise SmeltscopeError(
                    f"Symbol {i} is {symbol!r}, no bracket of {self.openers} {self.closers}: "
                    "remove it."
                )
        return tuple(ids[symbol] for symbol in symbols)

    def write(self, word: Word) -> tuple[str, ...]:
        """The symbols of `word`."""
        return tuple(self.openers[t] if t >= 0 else self.closers[~t] for t in word)


def usual_pairing(types: int) -> Pairing:
    """The first `types` of ( ), [ ], { } and < >, known to be no other symbols."""
    closers = CLOSERS[:types]
    return Pairing(openers=OPENERS[:types], closers=closers, choices=closers)


USUAL = usual_pairing(len(OPENERS))


def draw_pairing(rng: np.random.Generator, *, heldout: bool, types: int = len(OPENERS)) -> Pairing:
    """An injective map of openers into CLOSERS, uniform over the evaluation or the other maps."""
    while True:
        closers = "".join(rng.permutation(list(CLOSERS))[:types])
        if is_heldout(closers) == heldout:
            return Pairing(openers=OPENERS[:types], closers=closers)


def is_heldout(closers: str) -> bool:
    """Whether the map to `closers` is for evaluation alone: one in 8, by crc32."""
    return zlib.crc32(closers.encode()) % HELD_OUT == 0
