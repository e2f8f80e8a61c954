"""Regions of keys, and masses summed over them."""

import torch

from smeltscope.probes.regions import PromptRegions, TextRegions
from smeltscope.probes.sampling import Sample


def slow_sums(regions, mass: torch.Tensor, queries: Sample) -> torch.Tensor:
    """(B, H, N, K) -> (B, H, region), one number at a time."""
    region = regions.of(queries.positions, mass.shape[3])
    sums = torch.zeros(*mass.shape[:2], len(regions.names))
    for b, h, n, k in torch.cartesian_prod(*map(torch.arange, mass.shape)).tolist():
        if queries.valid[b, n]:
            sums[b, h, region[b, n, k]] += mass[b, h, n, k]
    return sums


def test_other_queries_of_the_same_batch():
    """What is kept for a batch is of the queries that it was made for."""
    torch.manual_seed(0)
    mass = torch.rand(2, 3, 2, 12)
    text = TextRegions(delimiter=torch.rand(2, 12) < 0.3)
    prompts = PromptRegions(region=torch.randint(0, 3, (2, 12)), names=("bos", "input", "answer"))
    valid = torch.tensor([[True, True], [True, False]])
    for regions in (text, prompts):
        for positions in ([[3, 11], [0, 5]], [[4, 9], [2, 2]], [[3, 11], [0, 5]]):
            queries = Sample(positions=torch.tensor(positions), valid=valid)
            for keys in (12, 9):
                found = regions.sums(mass[..., :keys].contiguous(), queries)
                expected = slow_sums(regions, mass[..., :keys], queries)
                torch.testing.assert_close(found, expected)


def test_other_validity_of_the_same_positions():
    regions = TextRegions(delimiter=torch.zeros(1, 6, dtype=torch.bool))
    mass, positions = torch.rand(1, 1, 2, 6), torch.tensor([[2, 5]])
    for valid in ([[True, True]], [[True, False]]):
        queries = Sample(positions=positions, valid=torch.tensor(valid))
        torch.testing.assert_close(regions.sums(mass, queries), slow_sums(regions, mass, queries))
