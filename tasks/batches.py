"""Which segments run together, and the padded arrays that a model is given."""

from collections.abc import Sequence

import numpy as np

from smeltscope.errors import SmeltscopeError
from smeltscope.tasks.text import HeldOut

SAMPLE_COST = 4  # tokens that take as much memory as a sampled token, about


def plan_batches(lengths: np.ndarray, batch_tokens: int, sampled: int = 0) -> list[np.ndarray]:
    """Batches of segments of similar length: arrays of segment indices, (rows,) int64.

    Every segment is in exactly one batch, and rows x longest row <= batch_tokens, padding
    included. Where `sampled` tokens of each segment are looked at closely, these cost memory too: rows x the tokens
    sampled in a row <= batch_tokens / 4, so that short segments, all of whose tokens are sampled, need no more of it
    than long ones. The longest come first, so a batch that doesn't fit into memory fails at once. The
    plan depends on what is given here alone.
    Raises SmeltscopeError when one segment is longer than `batch_tokens`.
    """
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    batches = []
    first = 0
    while first < len(order):
        longest = int(lengths[order[first]])
        if longest > batch_tokens:
            raise SmeltscopeError(
                f"A segment of {longest} tokens does not fit into a batch of {batch_tokens}: "
                f"raise --batch-tokens to {longest}, or lower --max-length to {batch_tokens}."
            )
        cost = max(longest, SAMPLE_COST * min(longest, sampled))
        rows = max(batch_tokens // cost, 1)
        batches.append(order[first : first + rows])
        first += rows
    return batches


def pad_batch(
    heldout: HeldOut, rows: Sequence[int] | np.ndarray, pad_token: int
) -> tuple[np.ndarray, np.ndarray]:
    """The segments `rows`, padded on the right: input_ids (B, T) and lengths (B,), both int64.

    Under a causal mask no real token sees the padding, so `pad_token` is any id of the model.
    """
    lengths = heldout.lengths[rows]
    input_ids = np.full((len(rows), lengths.max()), pad_token, dtype=np.int64)
    for row, i in zip(input_ids, rows, strict=True):
        segment = heldout.segment(i)
        row[: len(segment)] = segment
    return input_ids, lengths
