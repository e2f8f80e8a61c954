"""The runner: one forward per batch over a held-out set, fed to every probe, into one run file."""

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from smeltscope import __version__
from smeltscope.activations import RunWriter, Schema, capture
from smeltscope.errors import SmeltscopeError
from smeltscope.model import Checkpoint, Execution
from smeltscope.probes.probe import Batch, ModelShape, Probe, empty_arrays, group_name
from smeltscope.tasks import HeldOut, pad_batch, plan_batches

_RECORDED_PACKAGES = ("torch", "transformers", "numpy", "h5py")

# Called after every batch: (tokens so far, tokens in all).
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a run goes over its data; all of it is recorded in the run file."""

    max_length: int
    batch_tokens: int
    seed: int = 0


def run_probes(
    checkpoint: Checkpoint,
    heldout: HeldOut,
    probes: Sequence[Probe],
    out: str | Path,
    options: RunOptions,
    *,
    force: bool = False,
    on_progress: OnProgress | None = None,
) -> Path:
    """Run every batch once, let all probes see it, and leave a finished run file at `out`.

    Interrupted, the same call goes on at the first batch not done. Raises `SmeltscopeError` when the
    model cannot be captured, the data does not fit it, or `out` belongs to another run.
    """
    longest = int(heldout.lengths.max())
    if longest > options.max_length:
        raise SmeltscopeError(
            f"The data has a segment of {longest} tokens, more than max_length {options.max_length}; "
            "cut it with load_heldout(max_length=...)."
        )
    model = checkpoint.model
    device = next(model.parameters()).device
    plan = plan_batches(heldout.lengths, options.batch_tokens)
    shape = _model_shape(checkpoint, options.max_length, device)
    order = np.concatenate(plan)  # rows of the run file are in the order of the plan
    writer = RunWriter(
        out, _schema(checkpoint, heldout, probes, options, shape, order), force=force
    )
    done = writer.done()
    sites = tuple(dict.fromkeys(site for probe in probes for site in probe.sites))
    total, seen, stop = int(heldout.lengths.sum()), 0, 0
    arrays: dict[str, dict[str, np.ndarray]] = {}
    batch: Batch

    def on_site(execution: Execution, site: str, value: Any) -> None:
        for probe in probes:
            if site in probe.sites:
                probe.observe(arrays[group_name(probe.name)], batch, execution, site, value)

    with capture(model, sites, on_site), torch.inference_mode():
        for rows in plan:
            start, stop = stop, stop + len(rows)
            seen += int(heldout.lengths[rows].sum())
            if done[start:stop].all():
                continue
            input_ids, lengths = pad_batch(heldout, rows, pad_token=0)
            batch = Batch(
                input_ids=torch.from_numpy(input_ids).to(device),
                lengths=torch.from_numpy(np.asarray(lengths)).to(device),
            )
            arrays = {group_name(p.name): empty_arrays(p, shape, len(rows)) for p in probes}
            # Padding on the right is invisible under a causal mask, so no mask is needed. Only the decoder
            # runs: no probe needs logits.
            model.get_decoder()(input_ids=batch.input_ids, use_cache=False)
            writer.write(start, stop, arrays)
            if on_progress is not None:
                on_progress(seen, total)
    return writer.finish()


def _model_shape(checkpoint: Checkpoint, max_length: int, device: torch.device) -> ModelShape:
    """A forward over two tokens tells the heads of every layer, and whether the model can be captured at all."""
    heads = []
    with (
        capture(
            checkpoint.model, ("attention",), lambda e, s, a: heads.append(a.query.shape[1])
        ) as run,
        torch.inference_mode(),
    ):
        tokens = torch.zeros(1, 2, dtype=torch.long, device=device)
        checkpoint.model.get_decoder()(input_ids=tokens, use_cache=False)
    names = {module: name for name, module in checkpoint.model.named_modules()}
    return ModelShape(
        executions=run.executions,
        modules=[names[run.module_of(execution)] for execution in run.executions],
        heads=max(heads),
        max_length=max_length,
    )


def _schema(
    checkpoint: Checkpoint,
    heldout: HeldOut,
    probes: Sequence[Probe],
    options: RunOptions,
    shape: ModelShape,
    order: np.ndarray,
) -> Schema:
    executions = shape.executions
    dimensions: dict[str, np.ndarray] = {
        "segment": np.arange(len(heldout)),
        "execution": np.arange(len(executions)),
        "head": np.arange(shape.heads),
    }
    for probe in probes:
        dimensions |= probe.dimensions(shape)
    infos = [heldout.documents[d] for d in heldout.document]
    parameters = next(checkpoint.model.parameters())
    probe_options = {probe.name: probe.options() for probe in probes}
    return Schema(
        dimensions=dimensions,
        coordinates={
            "layer": ("execution", np.array([e.layer for e in executions])),
            "visit": ("execution", np.array([e.visit for e in executions])),
            "module": ("execution", np.array(shape.modules)),
        },
        segments={
            "document": np.asarray(heldout.document)[order],
            "document_id": np.array([i.id for i in infos])[order],
            "category": np.array([i.category for i in infos])[order],
            "source": np.array([i.source for i in infos])[order],
            "tokens": heldout.lengths[order],
        },
        groups={group_name(p.name): p.variables(shape) for p in probes},
        group_attributes={
            group_name(p.name): {"options": p.options(), "definition": type(p).__doc__ or ""}
            for p in probes
        },
        identity={
            "checkpoint_digest": checkpoint.digest,
            "data_digest": heldout.digest,
            "visits": max(e.visit for e in executions),
            "dtype": str(parameters.dtype).removeprefix("torch."),
            "max_length": options.max_length,
            "batch_tokens": options.batch_tokens,
            "seed": options.seed,
            "probes": probe_options,
        },
        attributes={
            "checkpoint": checkpoint.name,
            "model_type": checkpoint.model.config.model_type,
            "model_config": checkpoint.model.config.to_dict(),
            "tokenizer": _tokenizer_name(checkpoint),
            "device": parameters.device.type,
            "data_notes": list(heldout.notes),
            "data_dropped": dict(heldout.dropped),
            "packages": {"smeltscope": __version__} | {n: version(n) for n in _RECORDED_PACKAGES},
            "python": platform.python_version(),
        },
    )


def _tokenizer_name(checkpoint: Checkpoint) -> str:
    if checkpoint.tokenizer is None:
        return "none (token arrays)"
    return f"{type(checkpoint.tokenizer).__name__}, {len(checkpoint.tokenizer)} tokens"
