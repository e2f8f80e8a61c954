"""Prompts: how they are made for a checkpoint, and what is known of those of a batch as tensors, padded on the right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from smeltscope.errors import SmeltscopeError
from smeltscope.probes.probe import PromptBatch
from smeltscope.probes.regions import PromptRegions
from smeltscope.probes.sampling import Sample
from smeltscope.probes.statistics import (
    Documents,
    Estimate,
    Resampling,
    bootstrap_weights,
    exact,
)
from smeltscope.tasks import Prompts
from smeltscope.tasks.dyck import Template, read_template

if TYPE_CHECKING:
    from smeltscope.model import Checkpoint


def layout_of(checkpoint: Checkpoint, template: str | Path | Template) -> dict[str, Any]:
    """What prompts need to know of a checkpoint and a template, as `make_prompts` and `parse_prompt` take it.

    Raises `SmeltscopeError` for a checkpoint without a tokenizer.
    """
    if checkpoint.tokenizer is None:
        raise SmeltscopeError(
            f"{checkpoint.name} has no tokenizer, and Dyck prompts are text; give a checkpoint with one."
        )
    embeddings: Any = checkpoint.model.get_input_embeddings()
    return {
        "tokenizer": checkpoint.tokenizer,
        "template": read_template(template),
        "context": checkpoint.context,
        "vocab_size": embeddings.weight.shape[0],
    }


def prompt_batch(
    prompts: Prompts, rows: Sequence[int] | np.ndarray, device: torch.device
) -> PromptBatch:
    """The prompts `rows`, in this order."""
    longest = max(len(prompts.regions[row]) for row in rows)
    most = max(len(prompts.targets[row]) for row in rows)
    return PromptBatch(
        answer=_sample([prompts.answers[row] for row in rows], device),
        targets=_sample([prompts.targets[row] for row in rows], device),
        marks={
            name: _padded([of_segment[row] for row in rows], (most, longest), device, False)
            for name, of_segment in prompts.marks.items()
        },
        labels={name: values[rows] for name, values in prompts.labels.items()},
        vocabulary=prompts.vocabulary,
        stop=prompts.stop,
    )


def prompt_regions(
    prompts: Prompts, rows: Sequence[int] | np.ndarray, device: torch.device
) -> PromptRegions:
    """The regions of the prompts `rows`; padding counts as the first region, and no query sees it."""
    longest = max(len(prompts.regions[row]) for row in rows)
    region = _padded([prompts.regions[row] for row in rows], (longest,), device, 0)
    return PromptRegions(region=region.long(), names=prompts.region_names)


def by_item(run: xr.DataTree, resampling: Resampling) -> Resampling:
    """As many draws, of items within each kind and half of the prompts.

    A document is an item with one number of shots; all prompts of an item vary together.
    """
    labels = run["segments"].dataset
    kind, half, item = (labels[f"label_{name}"].values for name in ("kind", "half", "item"))
    names = np.array([f"{k} {i}" for k, i in zip(kind, item, strict=True)])
    strata = np.array([f"{k} {h}" for k, h in zip(kind, half, strict=True)])
    documents = Documents.from_labels(names, strata)
    weights = bootstrap_weights(documents, draws=len(resampling.weights), seed=resampling.seed)
    return Resampling(documents=documents, weights=weights, seed=resampling.seed)


def count_items(labels: xr.Dataset, groups: np.ndarray) -> Estimate:
    """How many different items there are in groups of segments: (segment, ...) -> (...)."""
    _, item = np.unique(labels["label_item"].values, return_inverse=True)
    present = np.zeros((item.max(initial=-1) + 1, *groups.shape[1:]), dtype=bool)
    np.logical_or.at(present, item, groups)
    return exact(present.sum(0))


def rows_of_targets(targets: Sample) -> Sample:
    """The positions that predict the targets."""
    return Sample(positions=(targets.positions - 1).clamp(min=0), valid=targets.valid)


def _sample(positions: Sequence[np.ndarray], device: torch.device) -> Sample:
    """Rows of different length; short ones repeat their last position."""
    size = max(max(map(len, positions)), 1)
    padded = np.zeros((len(positions), size), dtype=np.int64)
    for row, values in zip(padded, positions, strict=True):
        if len(values):
            row[:] = np.pad(values, (0, size - len(values)), mode="edge")
    number = np.array([len(values) for values in positions])
    return Sample(
        positions=torch.from_numpy(padded).to(device),
        valid=torch.from_numpy(np.arange(size) < number[:, None]).to(device),
    )


def _padded(
    arrays: Sequence[np.ndarray], shape: tuple[int, ...], device: torch.device, fill: int | bool
) -> Tensor:
    padded = np.full((len(arrays), *shape), fill, dtype=arrays[0].dtype)
    for row, values in zip(padded, arrays, strict=True):
        row[tuple(map(slice, values.shape))] = values
    return torch.from_numpy(padded).to(device)
