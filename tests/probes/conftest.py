"""Held-out sets made of random tokens, and tiny checkpoints that hold a model in memory."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from smeltscope.model import Checkpoint, tiny
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
