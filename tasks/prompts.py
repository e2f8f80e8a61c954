"""Segments that are prompts: what is known of their tokens, and the answer that each is to get."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompts:
    """What is known of segments that are prompts with an answer: one entry for each segment, in order.

    A segment holds the prompt and, at its end, the gold answer. A token of the answer is predicted at the position
    before it: that position is the token's row of attention.
    """

    region_names: tuple[str, ...]  # the first is the start token's
    regions: list[np.ndarray]  # (length,) int8, index into region_names
    answers: list[np.ndarray]  # positions of the answer's tokens, ascending, to the segment's end
    targets: list[np.ndarray]  # those of them that bear a symbol
    marks: dict[str, list[np.ndarray]]  # (targets, length) bool: what a target's row may look at
    states: dict[str, list[np.ndarray]]  # (length,) int32, of symbols; -1 where there is none
    labels: dict[str, np.ndarray]  # (segments,), kept in the run file
    vocabulary: list[str]  # the text of each token id
    stop: str  # what ends an answer
    template: Mapping[str, str | bool] = field(default_factory=dict)  # the text around them
