"""loss against transformers' own losses, loops in float64, and models run with other numbers of visits."""

import gc
import weakref

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from smeltscope.errors import SmeltscopeError
from smeltscope.model import TINY_MODELS, tiny, with_visits
from smeltscope.probes import RunOptions, run_probes, summarize
from smeltscope.probes import loss as loss_module
from smeltscope.probes.loss import Loss, measure_loss
from smeltscope.probes.positions import position_edges
from smeltscope.tasks import HeldOut

LENGTHS = [40, 33, 9, 2, 1]  # the longest come first in a run, as here


def tokens_of(heldout, row: int) -> torch.Tensor:
    return torch.from_numpy(heldout.segment(row)).long()[None]


def logits_of(model, tokens: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        return model(tokens, use_cache=False).logits[0].double().numpy()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize("name", TINY_MODELS)
def test_like_the_loss_of_transformers(make_run, make_heldout, name):
    """The mean over tokens 1 .. n - 1 that a model returns when it is given labels."""
    data = make_run([Loss()], LENGTHS, name)["loss"].dataset
    heldout, model = make_heldout(LENGTHS), tiny(name)
    for row, length in enumerate(LENGTHS):
        assert data["tokens"][row] == length - 1
        if length == 1:
            assert data["loss_sum"][row] == data["uniform_sum"][row] == 0
            continue
        tokens = tokens_of(heldout, row)
        with torch.no_grad():
            own = model(tokens, labels=tokens, use_cache=False).loss.item()
        np.testing.assert_allclose(data["loss_sum"][row], own * (length - 1), rtol=1e-5)


def assert_positions_like(run: xr.DataTree, model: torch.nn.Module, heldout: HeldOut) -> None:
    """Everything but the sweep, token by token."""
    data = run["loss"].dataset
    starts = data["position"].values.tolist()
    lengths = heldout.lengths.tolist()
    for row, length in enumerate(run["segments"]["tokens"].values):
        tokens = tokens_of(heldout, lengths.index(length))
        log_p = log_softmax(logits_of(model, tokens))
        losses, counts = np.zeros((2, len(starts)))
        for q in range(length - 1):
            place = max(i for i, start in enumerate(starts) if start <= q)
            losses[place] -= log_p[q, tokens[0, q + 1]]
            counts[place] += 1
        np.testing.assert_allclose(data["loss_by_position_sum"][row], losses, rtol=1e-5)
        assert data["tokens_by_position"][row].values.tolist() == counts.tolist()
        np.testing.assert_allclose(data["loss_sum"][row], losses.sum(), rtol=1e-5)
        np.testing.assert_allclose(data["uniform_sum"][row], (length - 1) * np.log(256), rtol=1e-6)


def assert_sweep_like(run: xr.DataTree, model: torch.nn.Module, heldout: HeldOut) -> None:
    """Whole logits of each model on each segment alone, in float64."""
    data = run["loss"].dataset
    trained, swept = model.config.num_visits, data["num_visits"].values.tolist()
    lengths = heldout.lengths.tolist()
    for row, length in enumerate(run["segments"]["tokens"].values):
        tokens = tokens_of(heldout, lengths.index(length))
        own = log_softmax(logits_of(model, tokens))
        for i, visits in enumerate(swept):
            other = with_visits(model, visits)
            assert other.config.residual_scale == 1 / trained
            log_p = log_softmax(logits_of(other, tokens))
            loss = -sum(log_p[q, tokens[0, q + 1]] for q in range(length - 1))
            kl = sum((np.exp(own[q]) * (own[q] - log_p[q])).sum() for q in range(length - 1))
            np.testing.assert_allclose(data["swept_loss_sum"][row, i], loss, rtol=1e-5)
            np.testing.assert_allclose(data["swept_kl_sum"][row, i], kl, rtol=1e-4, atol=1e-5)
            if visits == trained:
                assert data["swept_kl_sum"][row, i] == 0
                assert data["swept_loss_sum"][row, i] == data["loss_sum"][row]


def test_positions_and_chance_like_slow_loops(make_run, make_heldout):
    run = make_run([Loss()], LENGTHS)
    edges = position_edges(40)
    assert run["loss"]["position"].values.tolist() == edges[:-1].tolist() == [0, 1, 2, 4, 8, 16, 32]
    assert_positions_like(run, tiny("smelt"), make_heldout(LENGTHS))


@pytest.mark.parametrize("trained", [1, 2, 3])
def test_sweep_like_slow_loops(make_run, make_heldout, trained):
    swept = (0, 1, 2, 3)
    run = make_run([Loss(visits=swept)], LENGTHS, "smelt", num_visits=trained)
    assert run["loss"]["num_visits"].values.tolist() == list(swept)
    assert_sweep_like(run, tiny("smelt", num_visits=trained), make_heldout(LENGTHS))


@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # every run has a file of its own
)
@given(
    data=st.data(),
    lengths=st.lists(st.integers(1, 80), min_size=1, max_size=4, unique=True),
    visits=st.lists(st.integers(0, 3), min_size=1, unique=True),
)
def test_any_smelt_like_slow_loops(make_run, make_heldout, any_smelt, data, lengths, visits):
    smelt = data.draw(any_smelt)
    whole_stack = smelt["loop_stop"] - smelt["loop_start"] == smelt["num_physical_layers"]
    assume(not (whole_stack and 0 in visits))  # no layer would be left
    options = RunOptions(max_length=80, batch_tokens=600)
    run = make_run([Loss(visits=tuple(visits))], lengths, options=options, **smelt)
    model, heldout = tiny("smelt", **smelt), make_heldout(lengths)
    assert_positions_like(run, model, heldout)
    assert_sweep_like(run, model, heldout)


def test_visits_that_write_nothing_change_nothing(make_run):
    data = make_run([Loss(visits=(0, 1, 2, 3))], LENGTHS, residual_scale=0.0)["loss"].dataset
    np.testing.assert_allclose(data["swept_kl_sum"], 0, atol=1e-5)
    for i in range(4):
        np.testing.assert_allclose(data["swept_loss_sum"][:, i], data["loss_sum"], rtol=1e-6)


def test_a_head_that_knows_nothing_has_the_loss_of_chance():
    def head(hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*hidden.shape[:2], 100)

    predicts = torch.tensor([[True] * 8 + [False], [True] * 3 + [False] * 6])
    runs = [(torch.randn(2, 9, 4), head), (torch.randn(2, 9, 4), head)]
    loss, divergence, vocabulary = measure_loss(runs, torch.randint(100, (2, 9)), predicts)
    assert vocabulary == 100 and loss.shape == divergence.shape == (2, 2, 9)
    torch.testing.assert_close(loss[:, predicts], torch.full((2, 11), np.log(100.0)).float())
    assert (loss[:, ~predicts] == 0).all() and (divergence == 0).all()


@pytest.mark.parametrize("chunk", [1, 256 * 7])
def test_logits_are_made_in_chunks(make_run, monkeypatch, chunk):
    """Never more than so many at a time, with the same result."""
    probe = Loss(visits=(1, 3))
    together = make_run([probe], LENGTHS)["loss"].dataset
    largest = 0

    def watched(logits, **kwargs):
        nonlocal largest
        largest = max(largest, logits.numel())
        return torch.log_softmax(logits, **kwargs)

    monkeypatch.setitem(loss_module.CHUNK, "cpu", chunk)
    monkeypatch.setattr(loss_module, "log_softmax", watched)
    apart = make_run([probe], LENGTHS)["loss"].dataset
    assert largest == max(chunk, 256)
    for name, array in together.data_vars.items():
        np.testing.assert_allclose(apart[name], array, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("name", ["smelt", "gpt_oss", "inkling2_loop"])
def test_segments_alone_and_beside_others(make_run, name):
    probe = Loss(visits=(1, 2) if name == "smelt" else ())
    apart, together = (
        make_run([probe], LENGTHS, name, options=RunOptions(max_length=100, batch_tokens=n))
        for n in (40, 400)
    )
    for variable, array in together["loss"].data_vars.items():
        np.testing.assert_allclose(
            apart["loss"][variable], array, rtol=1e-5, atol=1e-5, err_msg=variable
        )
    # The last bin is beyond every segment: empty, not missing.
    counts = together["loss"]["tokens_by_position"].values
    assert counts[:, 6:].tolist() == [[7, 0], [0, 0], [0, 0], [0, 0], [0, 0]]


def test_bfloat16(make_checkpoint, make_heldout, tmp_path):
    """Softmax and sums are float32: the loss is that of the model's own 16-bit logits."""
    from smeltscope.activations import open_run

    checkpoint, heldout = make_checkpoint("smelt", dtype=torch.bfloat16), make_heldout([40])
    options = RunOptions(max_length=40, batch_tokens=40)
    out = run_probes(checkpoint, heldout, [Loss()], tmp_path / "run.h5", options)
    found = open_run(out)["loss"]["loss_sum"].item()
    tokens = tokens_of(heldout, 0)
    with torch.no_grad():
        logits = checkpoint.model(tokens, use_cache=False).logits[0, :-1]
        exact = tiny("smelt")(tokens, labels=tokens).loss.item()
    assert logits.dtype == torch.bfloat16
    own = cross_entropy(logits.float(), tokens[0, 1:], reduction="sum").item()
    assert found == pytest.approx(own, rel=1e-5)
    assert found / 39 == pytest.approx(exact, abs=0.02)


def test_summary_like_slow_averages(make_run):
    probe = Loss(visits=(0, 1, 2, 3))
    run = make_run([probe], [40, 33, 12, 9, 5, 2, 1])
    summary, data = summarize(run, probe, draws=200), run["loss"].dataset
    tokens = data["tokens"].values.sum()
    assert summary["tokens"] == tokens == 40 + 33 + 12 + 9 + 5 + 2 + 1 - 7
    np.testing.assert_allclose(summary["loss"], data["loss_sum"].values.sum() / tokens, rtol=1e-6)
    np.testing.assert_allclose(summary["uniform"], np.log(256), rtol=1e-6)
    np.testing.assert_allclose(
        summary["swept_kl"], data["swept_kl_sum"].values.sum(0) / tokens, rtol=1e-6
    )
    np.testing.assert_allclose(
        summary["swept_change"], summary["swept_loss"] - summary["loss"], atol=1e-6
    )
    by_position = data["loss_by_position_sum"].values.sum(0) / data[
        "tokens_by_position"
    ].values.sum(0)
    np.testing.assert_allclose(summary["loss_by_position"], by_position, rtol=1e-6)
    # Paired by document, so that the change at its own number of visits is 0 with certainty.
    own = summary.sel(num_visits=2)
    for end in ("", "_low", "_high"):
        assert own[f"swept_change{end}"] == own[f"swept_kl{end}"] == 0
    assert summary["swept_kl_low"].sel(num_visits=1) > 0
    text = probe.sentence(summary)
    assert "own 2 visits" in text and "0: " in text and "3: " in text and "2: +" not in text
    # The same rows, summarised without naming what was swept.
    assert "swept_loss" in summarize(run, Loss(), draws=0)


def test_one_token_segments_are_no_evidence(make_run):
    probe = Loss(visits=(1, 2))
    run = make_run([probe], [1, 1, 1])
    assert (run["loss"]["loss_sum"] == 0).all() and (run["loss"]["tokens"] == 0).all()
    summary = summarize(run, probe, draws=20)
    for name in ("loss", "uniform", "loss_by_position", "swept_loss", "swept_kl", "swept_change"):
        assert np.isnan(summary[name]).all()
    probe.sentence(summary)


def test_without_a_sweep(make_run):
    run = make_run([Loss()], LENGTHS, "llama")
    assert "num_visits" not in run["loss"].dims and "swept_loss_sum" not in run["loss"]
    summary = summarize(run, Loss(), draws=20)
    text = Loss().sentence(summary)
    assert "a uniform guess: 5.5452" in text and "visits" not in text


def test_progress():
    arrays = {"loss_sum": np.array([4.0, 2.0]), "tokens": np.array([2.0, 1.0])}
    assert Loss().progress(arrays, None) == {"loss": (6.0, 3.0)}


@pytest.mark.parametrize("name", ["llama", "inkling2_loop"])
def test_other_models_cannot_be_swept(make_run, name):
    with pytest.raises(SmeltscopeError, match="SMELT or its Baseline, so leave --visits out"):
        make_run([Loss(visits=(1, 2))], LENGTHS, name)


def test_swept_models_are_made_once_and_let_go(
    make_checkpoint, make_heldout, tmp_path, monkeypatch
):
    made = []

    def counting(model, visits):
        made.append(visits)
        return with_visits(model, visits)

    monkeypatch.setattr("smeltscope.model.with_visits", counting)
    checkpoint, heldout = make_checkpoint("smelt"), make_heldout([40] * 4)
    options = RunOptions(max_length=40, batch_tokens=40)
    run_probes(checkpoint, heldout, [Loss(visits=(0, 1, 2, 3))], tmp_path / "run.h5", options)
    assert made == [0, 1, 3]  # four batches; its own two visits are the run itself
    gone = weakref.ref(checkpoint.model)
    assert gone() in loss_module._swept
    del checkpoint
    gc.collect()
    assert gone() is None
