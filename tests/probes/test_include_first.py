"""Whether a segment's first token counts: in samples, in batches, in router-overlap."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smeltscope.model import executions_of, tiny
from smeltscope.probes import summarize
from smeltscope.probes.router_overlap import RouterOverlap, half_further_on
from smeltscope.probes.sampling import Sample, sample_tokens, segment_seed

LENGTHS = (90, 33, 20, 3, 2, 1)


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 200), min_size=1, max_size=5), size=st.integers(1, 80))
def test_the_first_token_stands_in_front_of_its_sample(lengths: list[int], size: int) -> None:
    seeds = [segment_seed(f"d{i}", np.arange(i), 3) for i in range(len(lengths))]
    sample = Sample(
        **dict(
            zip(
                ("positions", "valid"),
                map(torch.from_numpy, sample_tokens(np.array(lengths), seeds, size)),
                strict=True,
            )
        )
    )
    whole = sample.with_first
    assert whole.positions.dtype == sample.positions.dtype
    for row, length in enumerate(lengths):
        chosen = whole.positions[row][whole.valid[row]].tolist()
        assert chosen == [0, *sample.positions[row][sample.valid[row]].tolist()]
        assert len(chosen) == min(size, length - 1) + 1
        partners = whole.partners.positions[row][whole.valid[row]].tolist()
        n = len(chosen)
        assert partners == [(i + n // 2) % n for i in range(n)]


@pytest.mark.parametrize("first", [0, 1])
def test_half_of_the_counted_tokens_further_on(first: int) -> None:
    lengths = range(1, 12)
    counted = torch.tensor([[first <= t < n for t in range(max(lengths))] for n in lengths])
    found = half_further_on(counted)
    for row, length in enumerate(lengths):
        tokens = list(range(first, length))
        for i, t in enumerate(tokens):
            assert found[row, t] == tokens[(i + len(tokens) // 2) % len(tokens)]


def chosen_experts(model: torch.nn.Module, ids: np.ndarray) -> list[list[set[int]]]:
    """The experts of each token at each execution, in one forward over one segment."""
    seen: list[list[set[int]]] = []
    hooks = [
        module.register_forward_pre_hook(
            lambda m, args, kwargs: seen.append([set(row) for row in args[1].tolist()]),
            with_kwargs=True,
        )
        for module in model.modules()
        if type(module).__name__.endswith("Experts")
    ]
    with torch.no_grad():
        model(torch.from_numpy(ids.astype(np.int64))[None])
    for hook in hooks:
        hook.remove()
    return seen


def test_router_overlap_like_slow_sets(make_run, make_heldout) -> None:
    probe = RouterOverlap(include_first=True)
    run = make_run([probe], LENGTHS, num_visits=3)
    data, heldout, model = run["router_overlap"].dataset, make_heldout(LENGTHS), tiny(num_visits=3)
    assert run["router_overlap"].attrs["options"] == '{"include_first": true}'
    executions = executions_of(model.config)
    looped, pairs = data["looped_layer"].values.tolist(), data["visit_pair"].values.tolist()
    load = np.zeros((len(executions), data.sizes["expert"]))
    repeated = 0
    for row, length in enumerate(run["segments"]["tokens"].values):
        ids = heldout.segment(LENGTHS.index(length))
        sets, n = chosen_experts(model, ids), len(ids)
        previous = {
            t: max(u for u in range(t) if ids[u] == ids[t]) for t in range(n) if ids[t] in ids[:t]
        }
        repeated += len(previous)
        assert data["repeated_tokens"][row] == len(previous)
        np.testing.assert_array_equal(data["tokens"][row], n)
        for e in executions:
            for experts in sets[e.index]:
                for expert in experts:
                    load[e.index, expert] += 1
            for other in executions:
                if other.layer != e.layer or other.visit >= e.visit:
                    continue
                place = looped.index(e.layer), pairs.index(f"{other.visit}-{e.visit}")
                a, b = sets[other.index], sets[e.index]
                own = [len(a[t] & b[t]) for t in range(n)]
                counts = np.bincount(own, minlength=data.sizes["shared_experts"])
                np.testing.assert_array_equal(data["overlap_count"].values[row][place], counts)
                others = [len(a[t] & b[(t + n // 2) % n]) for t in range(n)]
                found = data["other_token_sum"].values[row][place]
                np.testing.assert_array_equal(found, sum(others) if n > 1 else np.nan)
                last = sum(len(a[u] & b[t]) for t, u in previous.items())
                assert data["previous_sum"].values[row][place] == last
    assert repeated > 0
    np.testing.assert_array_equal(data["load"].sum(("table_category", "fold")), load)
    summary = summarize(run, probe, draws=5)
    assert "Mean over" in probe.sentence(summary)
    left_out = make_run([RouterOverlap()], LENGTHS, num_visits=3)["router_overlap"]
    assert left_out["overlap_count"].sum() < data["overlap_count"].sum()
