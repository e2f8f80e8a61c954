"""Groups of documents: which segments they hold, and that a group's summary is that of its rows."""

from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from smeltscope.activations import Variable, open_run
from smeltscope.errors import SmeltscopeError
from smeltscope.probes import AttentionSink, Probe, RunOptions, quantities, run_probes, summarize
from smeltscope.probes.grouping import QUARTILES, groups_of, restricted, summarize_groups
from smeltscope.probes.loss import Loss


def made_run(tokens, document, category=None, loss=None, digest="d") -> xr.DataTree:
    """A run of the probe loss, with losses per token as given for each segment."""
    tokens = np.array(tokens)
    rows = len(tokens)
    loss = np.zeros(rows) if loss is None else np.array(loss, dtype=float)
    segments = {
        "tokens": ("segment", tokens),
        "document": ("segment", np.array(document)),
        "document_id": ("segment", np.array([f"doc{d}" for d in document])),
        "category": ("segment", np.array(category or ["a"] * rows)),
        "done": ("segment", np.ones(rows, dtype=np.uint8)),
    }
    losses = {
        "tokens": ("segment", tokens - 1.0),
        "loss_sum": ("segment", loss * (tokens - 1)),
    }
    tree = xr.DataTree.from_dict(
        {
            "/": xr.Dataset(coords={"segment": np.arange(rows)}),
            "segments": xr.Dataset(segments),
            "loss": xr.Dataset(losses),
        }
    )
    tree.attrs["identity"] = f'{{"data_digest": "{digest}", "max_length": 9}}'
    tree.attrs["tokenizer"] = "t"
    return tree


def members(groups) -> dict[str, list[int]]:
    return {label: np.flatnonzero(mask).tolist() for label, mask in groups.items()}


def test_by_category():
    run = made_run([5, 5, 5, 5], [3, 1, 2, 3], ["web", "code", "web", "web"])
    assert members(groups_of(run, "category")) == {"code": [1], "web": [0, 2, 3]}


def test_by_length_of_the_whole_document():
    """Bounds are inclusive; the segments of a document go together; empty buckets stay."""
    run = made_run([32, 33, 20, 13, 4000, 97, 64, 2], [0, 1, 2, 2, 3, 3, 4, 5])
    groups = members(groups_of(run, "length"))
    assert groups == {
        "1-32": [0, 7],
        "33-64": [1, 2, 3, 6],
        "65-128": [],
        "129-256": [],
        "257-512": [],
        "513-1024": [],
        "1025-2048": [],
        "2049-4096": [],
        "over 4096": [4, 5],
    }
    # Without a longer document there are the paper's eight.
    assert len(groups_of(made_run([4096, 4097 - 1], [0, 1]), "length")) == 8
    assert members(groups_of(made_run([2049, 2048], [0, 1]), "length"))["2049-4096"] == [0]


def test_by_baseline_loss():
    """Quartiles of documents, a document's loss weighted by its tokens, in whatever order the Baseline ran."""
    document, tokens = [0, 0, 1, 2, 3, 4, 5, 6, 7], [11, 31, 9, 9, 9, 9, 9, 9, 9]
    loss = [4.0, 1.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]  # document 0: (40 + 30) / 40 = 1.75
    run = made_run(tokens, document)
    order = np.random.default_rng(0).permutation(9)
    baseline = made_run(
        *(np.array(x)[order] for x in (tokens, document)), loss=np.array(loss)[order]
    )
    groups = members(groups_of(run, "baseline-loss", baseline))
    assert groups == dict(zip(QUARTILES, [[0, 1, 2], [3, 4], [5, 6], [7, 8]], strict=True))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ([1, 1, 1, 1], [[0, 1, 2, 3], [], [], []]),  # all alike
        ([1, 2, 2, 2, 2, 3, 4, 5], [[0, 1, 2, 3, 4], [], [5], [6, 7]]),  # a tie over an edge
        ([1, 2, 3, 4, 4, 4, 4, 4], [[0, 1], [2, 3, 4, 5, 6, 7], [], []]),
        ([2.0], [[0], [], [], []]),
    ],
)
def test_equal_losses_stay_together(loss, expected):
    run = made_run([5] * len(loss), range(len(loss)), loss=loss)
    groups = members(groups_of(run, "baseline-loss", run))
    assert groups == dict(zip(QUARTILES, expected, strict=True))
    values = [{loss[i] for i in group} for group in groups.values()]
    assert sum(map(len, values)) == len(set(loss))


def test_documents_without_a_predicted_token_are_in_no_quartile():
    run = made_run([5, 1, 5, 5, 5], range(5), loss=[1, 0, 2, 3, 4])
    groups = members(groups_of(run, "baseline-loss", run))
    assert list(groups.values()) == [[0], [2], [3], [4]]


def test_baselines_that_do_not_fit():
    run = made_run([5, 5], [0, 1])
    with pytest.raises(SmeltscopeError, match="make one with probe loss"):
        groups_of(run, "baseline-loss")
    with pytest.raises(SmeltscopeError, match="make one with probe loss"):
        groups_of(
            run, "baseline-loss", xr.DataTree.from_dict({"segments": run["segments"].dataset})
        )
    with pytest.raises(SmeltscopeError, match="over different data"):
        groups_of(run, "baseline-loss", made_run([5, 6], [0, 1], digest="e"))


LENGTHS = [40, 33, 12, 9, 70, 64, 5, 2, 1]


@pytest.fixture
def run(make_run) -> xr.DataTree:
    return make_run([AttentionSink(), Loss(visits=(1, 2))], LENGTHS)


@pytest.mark.parametrize("probe", [AttentionSink(), Loss()], ids=lambda p: p.name)
def test_a_group_is_summarised_like_a_run_over_it_alone(
    run, make_checkpoint, make_heldout, tmp_path, probe
):
    """The same documents run by themselves: same values, same intervals."""
    mask = groups_of(run, "category")["b"]
    part = restricted(run, mask)
    assert part["segments"]["category"].values.tolist() == ["b"] * 4
    assert run.sizes["segment"] == 9  # left as it was
    heldout = make_heldout(LENGTHS)
    segments = [i for i in range(9) if heldout.categories[i] == "b"]
    pieces = [heldout.segment(i) for i in segments]
    alone = replace(
        heldout,
        tokens=np.concatenate(pieces),
        offsets=np.cumsum([0, *map(len, pieces)]),
        document=heldout.document[segments],
    )
    options = RunOptions(max_length=70, batch_tokens=1200)
    out = run_probes(
        make_checkpoint("smelt"),
        alone,
        [Loss(visits=(1, 2)), AttentionSink()],
        tmp_path / "b.h5",
        options,
    )
    one, other = summarize(part, probe, draws=50), summarize(open_run(out), probe, draws=50)
    assert one.attrs["documents"] == other.attrs["documents"] == 2
    assert one.attrs["tokens"] == other.attrs["tokens"]
    xr.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_groups_side_by_side(run):
    groups = groups_of(run, "length")
    summary = summarize_groups(run, Loss(), groups, draws=50)
    assert summary["group"].values.tolist() == list(groups)
    # Documents of 40 + 33, 12 + 9, 70 + 64, 5 + 2 and 1 tokens.
    assert summary["documents"].values.tolist() == [3, 0, 1, 1, 0, 0, 0, 0]
    assert summary["segments"].values.tolist() == [5, 0, 2, 2, 0, 0, 0, 0]
    predicted = [24, np.nan, 71, 132, np.nan, np.nan, np.nan, np.nan]
    np.testing.assert_array_equal(summary["tokens"], predicted)
    empty = summary["documents"].values == 0
    assert np.isnan(summary["loss"].values[empty]).all()
    assert np.isfinite(summary["loss"].values[~empty]).all()
    alone = summarize(restricted(run, groups["1-32"]), Loss(), draws=50)
    for name in alone.data_vars:
        assert np.array_equal(summary[name].sel(group="1-32"), alone[name], equal_nan=True), name
    by_head = summarize_groups(run, AttentionSink(), groups_of(run, "category"), draws=20)
    assert by_head["sink_mass"].dims == ("group", "execution", "head")
    assert by_head["layer"].dims == ("execution",)


class Counting(Probe):
    """Counts segments in a table, by category and fold."""

    name = "counting"
    sites = ("resid_pre",)

    def variables(self, shape):
        return {"ones": Variable(dims=("segment",), description="1")}

    def options(self):
        return {}

    def tables(self, shape):
        return {"rows": Variable(dims=("table_category", "fold"), description="segments")}

    def observe(self, arrays, batch, execution, sites, earlier):
        arrays["ones"][:] = 1
        if execution.index == 0:
            np.add.at(arrays["rows"], (batch.category, batch.fold), 1)

    def estimates(self, run, resampling):
        ones = run["counting"]["ones"].values
        return quantities((), {"one": resampling.ratio(ones, ones)})


def test_tables_are_kept_by_whole_categories(make_run):
    run = make_run([Counting()], LENGTHS)
    table = run["counting"]["rows"].sum("fold").values
    assert table.tolist() == [5, 4]
    groups = groups_of(run, "category")
    assert restricted(run, groups["a"])["counting"]["rows"].sum("fold").values.tolist() == [5, 0]
    both = np.ones(9, dtype=bool)
    assert restricted(run, both)["counting"]["rows"].sum("fold").values.tolist() == [5, 4]
    cut = both.copy()
    cut[np.flatnonzero(groups["a"])[0]] = False
    part = restricted(run, cut)
    assert part["counting"]["rows"].dtype == np.int64
    assert (part["counting"]["rows"] == 0).all() and part["counting"].sizes["segment"] == 8
    assert run["counting"]["rows"].sum("fold").values.tolist() == [5, 4]
