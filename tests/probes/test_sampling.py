"""Samples of positions: by the segment alone, ascending, different, spread as they say."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smeltscope.probes.sampling import Sample, sample_queries, sample_tokens, segment_seed


def seeds_of(segments: int) -> list[list[int]]:
    return [segment_seed(f"d{i}", np.arange(i), 3) for i in range(segments)]


SAMPLERS = [sample_queries, sample_tokens]


@pytest.mark.parametrize("sampler", SAMPLERS)
@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 700), min_size=1, max_size=5), size=st.integers(1, 80))
def test_positions_are_different_ascending_and_inside(sampler, lengths, size):
    seeds = seeds_of(len(lengths))
    positions, valid = sampler(np.array(lengths), seeds, size)
    assert positions.shape == valid.shape == (len(lengths), min(size, max(max(lengths) - 1, 1)))
    for row, length in enumerate(lengths):
        chosen = positions[row][valid[row]]
        assert len(chosen) == min(size, length - 1)
        assert (np.diff(chosen) > 0).all()
        assert ((chosen >= 1) & (chosen < length)).all()
        assert positions[row].max() < length, "what is invalid points into the segment all the same"


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_segment_is_sampled_alike_in_any_batch(sampler):
    lengths, seeds = np.array([300, 500, 40]), seeds_of(3)
    together, valid = sampler(lengths, seeds, 64)
    for row in range(3):
        alone, _ = sampler(lengths[[row]], [seeds[row]], 64)
        np.testing.assert_array_equal(together[row][valid[row]], alone[0])


def test_other_segments_and_seeds_are_sampled_differently():
    one, other = np.arange(9), np.arange(1, 10)
    seeds = [
        segment_seed(*a) for a in (("a", one, 0), ("a", other, 0), ("b", one, 0), ("a", one, 1))
    ]
    positions, _ = sample_tokens(np.array([500] * 4), seeds, 64)
    assert len({tuple(row) for row in positions}) == 4


def test_queries_are_even_in_log_position():
    seeds = seeds_of(400)
    positions, _ = sample_queries(np.array([4096] * 400), seeds, 16)
    octaves = np.histogram(np.log2(positions), bins=np.arange(13))[0] / positions.size
    # 16 strips over 12 octaves; collisions among the first few positions move some up.
    np.testing.assert_allclose(octaves[4:], 1 / 12, atol=0.01)


def test_tokens_are_uniform():
    seeds = seeds_of(2000)
    positions, _ = sample_tokens(np.array([101] * 2000), seeds, 10)
    share = np.bincount(positions.ravel(), minlength=101)[1:] / positions.size
    np.testing.assert_allclose(share, 0.01, atol=5 * np.sqrt(0.01 / positions.size))


def test_partners_are_others_of_the_same_segment():
    positions = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 2, 2, 2], [1, 1, 1, 1, 1]])
    valid = torch.tensor([[True] * 5, [True, True, False, False, False], [True] + [False] * 4])
    sample = Sample(positions=positions, valid=valid)
    partners = sample.partners.positions
    assert sorted(partners[0].tolist()) == [0, 1, 2, 3, 4]
    assert (partners[0] != torch.arange(5)).all()
    assert partners[1, :2].tolist() == [1, 0]
    assert partners[2, 0] == 0
    assert sample.partners.valid.sum(1).tolist() == [5, 2, 0]


def test_take_reads_positions_of_each_row():
    values = torch.arange(24.0).reshape(2, 4, 3)
    sample = Sample(positions=torch.tensor([[1, 3], [0, 2]]), valid=torch.ones(2, 2).bool())
    expected = torch.stack([values[0, [1, 3]], values[1, [0, 2]]])
    assert torch.equal(sample.take(values), expected)
