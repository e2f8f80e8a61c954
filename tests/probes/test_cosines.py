"""Cosines against loops in float64, and what they do where there is none."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smeltscope.probes.cosines import SHORTEST, Vectors, sums
from smeltscope.probes.cosines import cosines as cosines_of
from smeltscope.probes.sampling import Sample


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    a, b = np.asarray(a, np.float64).ravel(), np.asarray(b, np.float64).ravel()
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def cosines(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    by_head, together = cosines_of([(Vectors.of(first), Vectors.of(second))])
    return by_head, together[..., 0]


def matrix(vectors: torch.Tensor) -> torch.Tensor:
    return Vectors.of(vectors).matrix()


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.integers(2, 40), st.data())
def test_like_loops(rows, tokens, heads, size, data):
    seed = data.draw(st.integers(0, 10**6))
    scale = 10.0 ** data.draw(st.integers(-9, 9))
    first, second = (normal(rows, tokens, heads, size, seed=seed + i) * scale + i for i in range(2))
    by_head, together = cosines(first, second)
    assert by_head.shape == (rows, tokens, heads) and together.shape == (rows, tokens)
    both = matrix(torch.stack([first, second], 3).flatten(2, 3))  # two for each head
    for b in range(rows):
        for t in range(tokens):
            one, other = first[b, t].numpy(), second[b, t].numpy()
            assert together[b, t].item() == pytest.approx(cosine(one, other), abs=1e-5)
            for h in range(heads):
                expected = cosine(one[h], other[h])
                assert by_head[b, t, h].item() == pytest.approx(expected, abs=1e-5)
                assert both[b, t, 2 * h, 2 * h + 1].item() == pytest.approx(expected, abs=1e-5)
                assert both[b, t, 2 * h, 2 * h].item() == pytest.approx(1, abs=1e-6)


def test_centred_like_loops():
    vectors = normal(3, 6, 2, 5) + 3
    valid = torch.tensor([[True] * 6, [True] * 4 + [False] * 2, [True] + [False] * 5])
    found = Vectors.of(vectors).centred(valid)
    for b, n in enumerate((6, 4, 1)):
        mean = vectors[b, :n].double().mean(0)
        torch.testing.assert_close(
            found.values[b, :n].double(), vectors[b, :n] - mean, atol=1e-6, rtol=0
        )
        norms = (vectors[b, :n].double() - mean).norm(dim=-1)
        torch.testing.assert_close(found.norms[b, :n].double(), norms, atol=1e-6, rtol=1e-6)
    assert (found.values[2, 0] == 0).all()  # all there is
    assert all(v[2, 0].isnan().all() for v in cosines_of([(found, found)]))


@pytest.mark.parametrize("number", [1, 2, 3, 7, 63, 64])
def test_tokens_that_are_all_alike_have_no_centred_direction(number):
    """Rounding of the mean leaves vectors of noise, whose cosine would be a number like any other."""
    vectors = normal(1, 1, 3, 128).expand(1, number, 3, 128).contiguous()
    found = Vectors.of(vectors).centred(torch.ones(1, number, dtype=torch.bool))
    assert all(values.isnan().all() for values in (*cosines_of([(found, found)]), found.matrix()))


def test_a_vector_of_length_0_has_no_cosine():
    zero, some = torch.zeros(1, 1, 2, 8), normal(1, 1, 2, 8)
    assert torch.nn.functional.cosine_similarity(zero, some, dim=-1).eq(0).all()  # not a cosine
    for pair in ((zero, some), (some, zero), (zero, zero)):
        assert all(values.isnan().all() for values in cosines(*pair))
    half = torch.cat([zero[:, :, :1], some[:, :, 1:]], 2)  # one head of two
    by_head, together = cosines(half, some)
    assert by_head[0, 0].isnan().tolist() == [True, False] and together.isfinite().all()
    assert matrix(half)[0, 0].isnan().tolist() == [[True, True], [True, False]]


def test_short_vectors_have_one():
    """torch's cosine_similarity gives .08 for parallel vectors of length 1e-9: its eps."""
    vectors = normal(50, 1, 1, 8)
    short = 1e-9 * vectors / vectors.norm(dim=-1, keepdim=True)
    assert torch.nn.functional.cosine_similarity(short, short, dim=-1).max() < 0.1
    for values in (*cosines(short, short), *cosines(short, vectors), matrix(short)):
        assert (values - 1).abs().max() < 1e-5
    shortest = torch.full((1, 1, 1, 1), SHORTEST)
    assert cosines(shortest, vectors[:1, ..., :1])[0].isnan()
    assert cosines(2 * shortest, vectors[:1, ..., :1])[0].isfinite()


def test_16_bits_are_upcast_first():
    first = (normal(64, 8, 1, 256) + 0.5).bfloat16()
    second = (normal(64, 8, 1, 256, seed=1) + 0.5).bfloat16()
    exact = cosines(first.double().float(), second.double().float())[0]
    plain = torch.nn.functional.cosine_similarity(first, second, dim=-1)
    assert (plain.float() - exact).abs().max() > 1e-3  # what is avoided; up to .009
    assert torch.nn.functional.cosine_similarity(first, first, dim=-1).max() > 1.003
    assert (cosines(first, second)[0] - exact).abs().max() < 1e-5
    assert (cosines(first, first)[0] - 1).abs().max() < 1e-5
    both = torch.cat([first, second], 2)
    assert (matrix(both)[..., 0, 1] - exact[..., 0]).abs().max() < 1e-5


def test_the_mean_over_heads_is_not_the_cosine_of_the_concatenation():
    """Four heads with norms from .1 to 10, for which the two are .613 and .970."""
    norms = torch.logspace(-1, 1, 4, dtype=torch.float64)
    weight = norms**2 / (norms**2).sum()
    slope = (0.970 - 0.613) / ((weight**2).sum() - 1 / 4)
    cosine_of_head = 0.613 + slope * (weight - 1 / 4)
    first = torch.stack([norms, torch.zeros(4)], -1)[None, None]
    direction = torch.stack([cosine_of_head, (1 - cosine_of_head**2).sqrt()], -1)
    second = (norms[:, None] * direction)[None, None]
    by_head, together = cosines(first, second)
    assert by_head.mean().item() == pytest.approx(0.613, abs=1e-6)
    assert together.item() == pytest.approx(0.970, abs=1e-6)


def test_parts_and_pairs_are_as_each_alone():
    """Heads 0, 1 to 3 and 4 as three parts, and two pairs at once."""
    first, second = normal(2, 3, 5, 4), normal(2, 3, 5, 4, seed=1)
    a, b = Vectors.of(first), Vectors.of(second)
    by_head, together = cosines_of([(a, b), (b, b)], [1, 3, 1])
    for number, one in enumerate((first, second)):
        rows = slice(2 * number, 2 * number + 2)
        torch.testing.assert_close(by_head[rows], cosines(one, second)[0])
        for part, heads in enumerate((slice(0, 1), slice(1, 4), slice(4, 5))):
            alone = cosines(one[:, :, heads], second[:, :, heads])[1]
            torch.testing.assert_close(together[rows, :, part], alone)


def test_sums_leave_out_what_has_no_value():
    values = torch.tensor([[[1.0], [torch.nan], [3.0], [10.0]], [[torch.nan]] * 4])
    counted = torch.tensor([[True, True, True, False], [True] * 4])
    total, count = sums(values, counted)
    assert total.tolist() == [[4.0], [0.0]] and count.tolist() == [[2.0], [0.0]]
    total, count = sums(values[..., 0], counted)
    assert total.tolist() == [4.0, 0.0] and count.tolist() == [2.0, 0.0]


def test_at_takes_another_token():
    vectors = normal(2, 3, 2, 4)
    index = torch.tensor([[1, 2, 0], [0, 0, 1]])
    found = Vectors.of(vectors).at(Sample(positions=index, valid=index >= 0))
    for b in range(2):
        for t in range(3):
            assert torch.equal(found.values[b, t], vectors[b, index[b, t]])
    torch.testing.assert_close(found.norms, found.values.norm(dim=-1))
