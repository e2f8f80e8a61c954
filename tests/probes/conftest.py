"""Held-out sets made of random tokens, and tiny checkpoints that hold a model in memory."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import strategies as st

from smeltscope.activations import open_run
from smeltscope.model import Checkpoint, tiny
from smeltscope.probes import RunOptions, run_probes
from smeltscope.tasks import DocumentInfo, HeldOut


def _heldout(lengths: Sequence[int], per_document: int = 2, seed: int = 0) -> HeldOut:
    """Segments of these lengths; each begins with token 0 and depends on its index and length alone."""
    segments = [
        np.concatenate([[0], np.random.default_rng([seed, i]).integers(1, 256, n - 1)])
        for i, n in enumerate(lengths)
    ]
    document = np.arange(len(lengths), dtype=np.int32) // per_document
    return HeldOut(
        tokens=np.concatenate(segments).astype(np.int32),
        offsets=np.cumsum([0, *lengths]).astype(np.int64),
        document=document,
        documents=[
            DocumentInfo(id=f"doc{d}", category="ab"[d % 2], source="made", file="made.jsonl")
            for d in range(document[-1] + 1)
        ],
        start_token=0,
        dropped={},
        notes=[],
        digest=f"{list(lengths)} {seed}",
    )


def _checkpoint(name: str = "smelt", *, dtype=None, **overrides) -> Checkpoint:
    model = tiny(name, **overrides)
    if dtype is not None:
        model = model.to(dtype)
    return Checkpoint(
        model=model,
        tokenizer=None,
        name=name,
        folder=Path("."),
        digest=f"{name} {sorted(overrides.items())}",
        context=512,
    )


@pytest.fixture(scope="session")
def make_heldout() -> Callable[..., HeldOut]:
    return _heldout


@pytest.fixture(scope="session")
def make_checkpoint() -> Callable[..., Checkpoint]:
    return _checkpoint


@pytest.fixture
def make_run(tmp_path) -> Callable[..., xr.DataTree]:
    """Run probes on segments of some lengths of a tiny model: the run, opened."""

    def run(probes, lengths=(40, 33, 70, 2, 1), name="smelt", *, options=None, **overrides):
        checkpoint, heldout = _checkpoint(name, **overrides), _heldout(lengths)
        chosen = options or RunOptions(max_length=max(lengths), batch_tokens=1200)
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}.h5"
        return open_run(run_probes(checkpoint, heldout, probes, out, chosen))

    return run


@pytest.fixture
def run_checkpoint(tmp_path) -> Callable[..., xr.DataTree]:
    """Run a probe of a checkpoint on segments of some lengths: the run, opened."""

    def run(probe, checkpoint, lengths, **options):
        options = {"max_length": max(lengths), "batch_tokens": 1600} | options
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}.h5"
        return open_run(
            run_probes(checkpoint, _heldout(lengths), [probe], out, RunOptions(**options))
        )

    return run


@pytest.fixture(scope="session")
def silenced() -> Callable[[Checkpoint], Checkpoint]:
    """Let a SMELT write nothing in its looped span, so that its visits are alike."""

    def silence(checkpoint: Checkpoint) -> Checkpoint:
        config = checkpoint.model.config
        for layer in checkpoint.model.model.layers[config.loop_start : config.loop_stop]:
            layer.self_attn.o_proj.weight.data.zero_()
            layer.mlp.experts.down_proj.data.zero_()
        return checkpoint

    return silence


def _assert_same_bits(one: str | Path, other: str | Path) -> None:
    with h5py.File(one) as a, h5py.File(other) as b:
        names: list[str] = []
        a.visit(names.append)
        others: list[str] = []
        b.visit(others.append)
        assert names == others and names
        for name in names:
            if isinstance(a[name], h5py.Dataset):
                assert a[name].dtype == b[name].dtype and a[name].shape == b[name].shape
                if a[name].dtype.kind == "f":
                    assert a[name][...].tobytes() == b[name][...].tobytes(), name
                else:
                    assert np.array_equal(a[name][...], b[name][...]), name
        assert a.attrs["identity"] == b.attrs["identity"]


@pytest.fixture(scope="session")
def assert_same_bits() -> Callable[..., None]:
    """Holds for two run files with the same numbers to the last bit."""
    return _assert_same_bits


@st.composite
def _any_smelt(draw: st.DrawFn) -> dict[str, Any]:
    layers, heads = draw(st.integers(3, 5)), draw(st.sampled_from([1, 2, 4]))
    start = draw(st.integers(0, layers - 1))
    return {
        "num_physical_layers": layers,
        "loop_start": start,
        "loop_stop": draw(st.integers(start + 1, layers)),
        "num_visits": draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": draw(st.sampled_from([n for n in (1, 2, 4) if n <= heads])),
        "qk_norm": draw(st.booleans()),
        "seed": draw(st.integers(0, 1000)),
    }


@pytest.fixture(scope="session")
def any_smelt() -> st.SearchStrategy[dict[str, Any]]:
    """Sizes of a tiny SMELT: heads, key heads that divide them, a span anywhere, up to three visits."""
    return _any_smelt()


def _run_eagerly(model: Any, ids: torch.Tensor, record: Callable[..., None]) -> None:
    modules = {sys.modules[type(m).__module__] for m in model.modules() if hasattr(m, "is_causal")}
    originals = {module: module.eager_attention_forward for module in modules}

    def recording(original: Any) -> Any:
        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            output, weights = original(module, *args, **kwargs)
            if module.is_causal and hasattr(module, "layer_idx"):
                record(weights.detach(), *args, **kwargs)
            return output, weights

        return forward

    implementation = model.config._attn_implementation
    try:
        for module, original in originals.items():
            module.eager_attention_forward = recording(original)
        model.set_attn_implementation("eager")
        with torch.no_grad():
            model(ids)
    finally:
        for module, original in originals.items():
            module.eager_attention_forward = original
        model.set_attn_implementation(implementation)


@pytest.fixture(scope="session")
def run_eagerly() -> Callable[..., None]:
    """`run_eagerly(model, ids, record)`: one forward in which record(weights, query, key, value, ...) is called for each
    execution, in order, with what the model's own eager function was given and made."""
    return _run_eagerly
