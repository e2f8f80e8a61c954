"""Attention of a few prompts, whole: for looking at, beside the sums that are kept of all prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from smeltscope import activations
from smeltscope.activations import Fixed
from smeltscope.probes.prompts import prompt_batch, rows_of_targets
from smeltscope.probes.runner import Beside
from smeltscope.probes.sampling import Sample
from smeltscope.tasks import HeldOut, pad_batch

if TYPE_CHECKING:
    from smeltscope.activations import Attention
    from smeltscope.model import Checkpoint, Execution

GROUP = "dyck_patterns"
MOST_BYTES = 64 * 2**20  # of complete patterns; beyond it only the targets' rows are kept


def patterns_of(checkpoint: Checkpoint, heldout: HeldOut, chosen: Sequence[int]) -> Beside:
    """The attention of every head in prompts `chosen` (segments of `heldout`), with what each token is.

    `row` (example, execution, head, target, key): the attention of the position that predicts a target. `pattern` (example,
    execution, head, query, key): all of them, where they fit into 64 MB together. NaN beyond a prompt's end, and where a
    layer has fewer heads. `token` is the text of each token, `key_region` the number of its region (-1 beyond the end),
    `target` the target's position, `gold` its text and `predicted` what the model says in its place, `marked` what a target's row
    may look at.
    """
    prompts = heldout.prompts
    assert prompts is not None, "only prompts have targets"
    device = next(checkpoint.model.parameters()).device
    ids, lengths = pad_batch(heldout, np.asarray(chosen), pad_token=0)
    batch = prompt_batch(prompts, chosen, device)
    rows_at, valid = rows_of_targets(batch.targets), batch.targets.valid.cpu().numpy()
    row, predicted = _run(checkpoint, ids, rows_at.positions, rows_at)
    fits = row[:, :, :, 0].nbytes * ids.shape[1] <= MOST_BYTES
    positions = batch.targets.positions.cpu().numpy()
    inside = np.arange(ids.shape[1]) < lengths[:, None]  # (B, T)
    row = np.where(inside[:, None, None, None] & valid[:, None, None, :, None], row, np.nan)
    text = np.array(prompts.vocabulary, dtype=object)
    known = np.minimum(ids, len(text) - 1)
    region = np.full(ids.shape, -1, dtype=np.int64)
    for i, segment in enumerate(chosen):
        region[i, : lengths[i]] = prompts.regions[segment]
    marks = np.stack([mark.cpu().numpy() for mark in batch.marks.values()], axis=1)
    gold = np.take_along_axis(known, positions, axis=1)
    example, targets = ("example",), ("example", "target_number")
    arrays = {
        "example_id": Fixed(
            dims=example,
            values=np.array([heldout.documents[heldout.document[i]].id for i in chosen]),
            description="the prompt, as `document_id` names it",
        ),
        "token": Fixed(
            dims=(*example, "key"),
            values=np.where(inside, text[known], ""),
            description="text of each token",
        ),
        "key_region": Fixed(
            dims=(*example, "key"),
            values=region,
            description="region of each token: its number among `region_name`, -1 beyond the end",
        ),
        "target": Fixed(
            dims=targets,
            values=np.where(valid, positions, -1),
            description="position of each target, -1 for none",
            units="tokens",
        ),
        "gold": Fixed(
            dims=targets, values=np.where(valid, text[gold], ""), description="text of each target"
        ),
        "predicted": Fixed(
            dims=targets,
            values=np.where(valid, text[np.minimum(predicted, len(text) - 1)], ""),
            description="text of the token that the model holds for likeliest there",
        ),
        "marked": Fixed(
            dims=(*targets, "mark_name", "key"),
            values=marks.swapaxes(1, 2).astype(np.uint8),
            description="1 for tokens that carry the mark for this target",
        ),
        "row": Fixed(
            dims=(*example, "execution", "head", "target_number", "key"),
            values=row,
            description="attention of the position before each target",
        ),
    }
    if fits:
        every = torch.arange(ids.shape[1], device=device).expand(len(ids), -1)
        pattern, _ = _run(checkpoint, ids, every, rows_at)
        seen = inside[:, None, None, :, None] & inside[:, None, None, None, :]
        arrays["pattern"] = Fixed(
            dims=(*example, "execution", "head", "query", "key"),
            values=np.where(seen, pattern, np.nan),
            description="attention of each position on each",
        )
    dimensions: dict[str, Any] = {
        "example": np.arange(len(chosen)),
        "target_number": np.arange(positions.shape[1]),
        "key": np.arange(ids.shape[1]),
        "head": np.arange(row.shape[2]),
        "mark_name": np.array(list(batch.marks)),
        "region_name": np.array(prompts.region_names),
    }
    if "pattern" in arrays:
        dimensions["query"] = np.arange(ids.shape[1])
    return Beside(group=GROUP, dimensions=dimensions, arrays=arrays)


def _run(
    checkpoint: Checkpoint, ids: np.ndarray, queries: Tensor, targets: Sample
) -> tuple[np.ndarray, np.ndarray]:
    """Attention rows of `queries` (B, N), (B, execution, head, N, T), and the likeliest token after each of `targets`."""
    from smeltscope.model import executions_of

    model = checkpoint.model
    found: dict[int, np.ndarray] = {}

    def on_attention(execution: Execution, site: str, attention: Attention) -> None:
        here = queries.to(attention.query.device)
        found[execution.index] = attention.rows(here).cpu().numpy()

    with torch.no_grad():
        with activations.capture(model, ["attention"], on_attention):
            decoded = activations.decode(model, torch.from_numpy(ids).to(queries.device))
        hidden = targets.take(decoded.last_hidden_state)
        logits = activations.head_of(model, decoded)(hidden)
        predicted = logits.argmax(-1).cpu().numpy()  # (B, target)
    heads = max(rows.shape[1] for rows in found.values())
    executions = len(executions_of(model.config))
    filled = np.full((len(ids), executions, heads, queries.shape[1], ids.shape[1]), np.nan)
    for index, rows in found.items():  # a layer may have fewer heads than others, or no attention
        filled[:, index, : rows.shape[1]] = rows
    return filled.astype(np.float32), predicted
