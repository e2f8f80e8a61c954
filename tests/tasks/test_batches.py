import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smeltscope.errors import SmeltscopeError
from smeltscope.tasks import DocumentInfo, HeldOut, pad_batch, plan_batches


def heldout_of(*segments: list[int]) -> HeldOut:
    return HeldOut(
        tokens=np.concatenate([np.array(s, dtype=np.int32) for s in segments]),
        offsets=np.cumsum([0, *map(len, segments)]),
        document=np.zeros(len(segments), dtype=np.int32),
        documents=[DocumentInfo(id="a", category="a", source="", file="a.txt")],
        start_token=None,
        dropped={},
        notes=[],
        digest="",
    )


def test_by_hand():
    batches = plan_batches(np.array([3, 8, 4, 8, 2]), 16)
    assert [b.tolist() for b in batches] == [[1, 3], [2, 0, 4]]  # 2 x 8, then 3 x 4


@given(st.lists(st.integers(1, 64), max_size=80), st.integers(64, 300))
def test_every_segment_once_within_the_budget(lengths, batch_tokens):
    batches = plan_batches(np.array(lengths, dtype=np.int64), batch_tokens)
    rows = [i for batch in batches for i in batch]
    assert sorted(rows) == list(range(len(lengths)))
    longest = [max(lengths[i] for i in batch) for batch in batches]
    assert all(len(b) * n <= batch_tokens for b, n in zip(batches, longest, strict=True))
    # Filled: the next segment would not have fitted.
    assert all(
        (len(b) + 1) * n > batch_tokens for b, n in zip(batches[:-1], longest[:-1], strict=True)
    )
    assert longest == sorted(longest, reverse=True)
    again = plan_batches(np.array(lengths, dtype=np.int64), batch_tokens)
    assert [b.tolist() for b in batches] == [b.tolist() for b in again]


@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=80), st.integers(64, 300), st.integers(1, 80)
)
def test_sampled_tokens_are_bounded(lengths, batch_tokens, sampled):
    lengths = np.array(lengths)
    batches = plan_batches(lengths, batch_tokens, sampled)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        looked_at = len(batch) * min(lengths[batch].max(), sampled)
        assert len(batch) == 1 or 4 * looked_at <= batch_tokens


def test_equal_lengths_keep_their_order():
    assert [b.tolist() for b in plan_batches(np.full(5, 4), 8)] == [[0, 1], [2, 3], [4]]


def test_a_segment_that_does_not_fit():
    with pytest.raises(SmeltscopeError, match=r"--batch-tokens to 9, or lower --max-length to 8"):
        plan_batches(np.array([3, 9]), 8)


def test_padding_is_on_the_right():
    heldout = heldout_of([1, 2, 3], [4, 5], [6, 7, 8, 9])
    input_ids, lengths = pad_batch(heldout, np.array([1, 0]), pad_token=0)
    assert input_ids.tolist() == [[4, 5, 0], [1, 2, 3]]
    assert lengths.tolist() == [2, 3]
    assert input_ids.dtype == lengths.dtype == np.int64
