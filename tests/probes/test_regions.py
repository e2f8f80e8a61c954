"""Regions of text, by hand."""

import torch

from smeltscope.probes.regions import TEXT_REGIONS, TextRegions, masses_by_region

F, S, P, L, D, R = range(6)


def test_each_key_falls_into_the_first_region_that_applies():
    delimiter = torch.tensor(
        [[True, False, True, False, False, True, True, False, False, True, True, False]]
    )
    regions = TextRegions(delimiter=delimiter)
    found = regions.of(torch.tensor([[11, 1, 0]]), keys=12)
    assert found[0, 0].tolist() == [F, R, D, R, L, L, L, L, L, L, P, S]
    assert found[0, 1, :2].tolist() == [F, S]
    assert found[0, 2, 0] == F
    assert (
        regions.names == TEXT_REGIONS == ("first", "self", "previous", "local", "delimiter", "rest")
    )


def test_masses_of_regions_add_up_to_the_row():
    mass = torch.rand(2, 3, 4, 12, generator=torch.Generator().manual_seed(0))
    region = torch.randint(6, (2, 4, 12), generator=torch.Generator().manual_seed(1))
    sums = masses_by_region(mass, region, 6)
    for r in range(6):
        expected = (mass * (region == r)[:, None]).sum(-1)
        torch.testing.assert_close(sums[..., r], expected)
    torch.testing.assert_close(sums.sum(-1), mass.sum(-1))
