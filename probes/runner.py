"""The runner: one forward per batch over a held-out set, fed to every probe, into one run file."""

from __future__ import annotations

import platform
import warnings
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from smeltscope import __version__, activations
from smeltscope.activations import (
    Fixed,
    RunWriter,
    Schema,
    Variable,
    attributes_of,
    flattened,
    is_finished,
    open_run,
)
from smeltscope.errors import SmeltscopeError
from smeltscope.probes.probe import Batch, ModelShape, Output, Probe, group_name
from smeltscope.probes.prompts import prompt_batch, prompt_regions, rows_of_targets
from smeltscope.probes.regions import TEXT_REGIONS, Regions, TextRegions
from smeltscope.probes.rows import rows_of
from smeltscope.probes.sampling import Sample, sample_queries, sample_tokens, segment_seed
from smeltscope.probes.workers import Workers, split_batches
from smeltscope.tasks import HeldOut, Prompts, delimiter_tokens, pad_batch, plan_batches

if TYPE_CHECKING:
    from smeltscope.activations import Attention
    from smeltscope.model import Checkpoint, Execution

FOLDS = 8  # parts of the documents that tables are kept by
_RECORDED_PACKAGES = ("torch", "transformers", "numpy", "h5py")

Arrays = dict[str, dict[str, np.ndarray]]  # {group: {name: values}}

# Called before the first batch and after every batch: (tokens so far, tokens in all, headline numbers so far), of this process.
OnProgress = Callable[[int, int, Mapping[str, float]], None]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a run goes over its data; all of it is recorded in the run file."""

    max_length: int
    batch_tokens: int
    seed: int = 0  # of the samples and of the bootstrap
    sampled_queries: int = 64  # of each segment, whose whole attention rows are looked at
    sampled_tokens: int = 64  # of each segment, between whose vectors cosines are taken


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A group of a run file that no probe fills: arrays made before the run."""

    group: str
    dimensions: Mapping[str, np.ndarray]  # those of its own, with their coordinate values
    arrays: Mapping[str, Fixed]


def run_probes(
    checkpoint: Checkpoint,
    heldout: HeldOut,
    probes: Sequence[Probe],
    out: str | Path,
    options: RunOptions,
    *,
    force: bool = False,
    reuse: bool = False,
    beside: Beside | None = None,
    on_progress: OnProgress | None = None,
    on_note: Callable[[str], object] = warnings.warn,
) -> Path:
    """Run every batch once, let all probes see it, and leave a finished run file at `out`.

    Interrupted, the same call goes on at the first batch not done. Under torchrun each process takes a contiguous run of
    the batches, and the first one joins what they wrote. A batch that does not fit into the memory of a GPU is run in
    halves. With `reuse` a finished run of the same checkpoint, data and options at `out` is left as it is. `beside` is written
    into the file with what the probes find. A run that goes on with other threads, attention or packages than it was
    begun with says so through `on_note`. Raises `SmeltscopeError` when the model cannot be captured, the data does not fit
    it, or `out` belongs to another run.
    """
    longest = int(heldout.lengths.max())
    if longest > options.max_length:
        raise SmeltscopeError(
            f"The data has a segment of {longest} tokens, more than max_length {options.max_length}; "
            "cut it with load_heldout(max_length=...)."
        )
    sampled = max(options.sampled_queries, options.sampled_tokens) if heldout.prompts is None else 0
    plan = plan_batches(heldout.lengths, options.batch_tokens, sampled)
    shape = model_shape(checkpoint, heldout, options.max_length)
    stops = np.cumsum([0, *map(len, plan)])  # rows of the run file are in the order of the plan
    for probe in probes:
        probe.check(checkpoint.model)
        if {"attention", "rows"} & set(probe.sites) and not shape.sites["attention"]:
            raise SmeltscopeError(
                f"{probe.name} cannot be measured: {type(checkpoint.model).__name__} makes no causal attention through "
                "transformers' attention interface."
            )
    schema = schema_of(checkpoint, heldout, probes, options, shape, np.concatenate(plan))
    if beside is not None:
        schema = replace(
            schema,
            dimensions={**schema.dimensions, **beside.dimensions},
            fixed={beside.group: beside.arrays},
        )
    if reuse and is_finished(out, schema):
        return Path(out)
    workers = Workers.of_environment(checkpoint.model)
    tokens = [int(heldout.lengths[rows].sum()) for rows in plan]
    shares = split_batches(tokens, workers.ranks)
    writer = None
    if workers.writes:
        writer = RunWriter(
            out,
            schema,
            force=force,
            ranges=[(int(stops[share.start]), int(stops[share.stop])) for share in shares],
            rank=workers.rank,
        )
    done = workers.agreed(writer.done() if writer else None)
    measure = Measurement(checkpoint, heldout, probes, options, shape)
    mine = shares[workers.rank]
    left = [b for b in mine if not done[stops[b] : stops[b + 1]].all()]
    total = sum(tokens[b] for b in mine)
    progress = _Progress(total, total - sum(tokens[b] for b in left), shape, on_progress)
    if writer and done.any():
        changed = _changed(attributes_of(open_run(writer.path, groups=[])), schema.attributes)
        if changed and workers.rank == 0:
            on_note(
                f"{writer.path} was begun under other conditions ({changed}): its numbers may differ in their last bits from "
                "those of a run that was never interrupted."
            )
        for probe in probes if on_progress else ():
            progress.add(probe, _rows_done(writer.path, group_name(probe.name)))
    progress.tell()
    for b in left:
        arrays, tables = measure(plan[b])
        if writer:
            writer.write(int(stops[b]), int(stops[b + 1]), arrays, tables)
        for probe in probes if on_progress else ():
            progress.add(probe, arrays[group_name(probe.name)])
        progress.seen += tokens[b]
        progress.tell()
    workers.wait()
    if writer and workers.rank == 0:
        writer.finish()
    workers.wait()
    return Path(out)


class _Progress:
    """How far this process is, and its headline numbers."""

    def __init__(
        self, total: int, seen: int, shape: ModelShape, on_progress: OnProgress | None
    ) -> None:
        self.total, self.seen = total, seen  # tokens
        self.shape, self.on_progress = shape, on_progress
        self.sums: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))

    def add(self, probe: Probe, arrays: Mapping[str, np.ndarray]) -> None:
        """What a probe measured of some rows."""
        for label, sum_and_count in probe.progress(arrays, self.shape).items():
            self.sums[label] += sum_and_count

    def tell(self) -> None:
        if self.on_progress is not None:
            headlines = {label: float(s / n) for label, (s, n) in self.sums.items() if n}
            self.on_progress(self.seen, self.total, headlines)


def _rows_done(begun: Path, group: str) -> dict[str, np.ndarray]:
    """What is measured already."""
    run = open_run(begun, groups=[group])
    done = run["segments"]["done"].values == 1
    arrays = run[group].data_vars.items()
    return {str(n): a.values[done] for n, a in arrays if a.dims[:1] == ("segment",)}


def _changed(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What may change the last bits of numbers and does not stand in the way of going on."""
    names = ("threads", "attention", "packages", "python")
    was, found = (flattened({n: of[n] for n in names if n in of}) for of in (then, now))
    # Files of before do not say all of it.
    return "; ".join(
        f"{n}: was {was[n]}, is {found[n]}" for n in found if n in was and was[n] != found[n]
    )


class Measurement:
    """Rows of the held-out set -> what all probes measure of them. Holds what every batch needs."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        heldout: HeldOut,
        probes: Sequence[Probe],
        options: RunOptions,
        shape: ModelShape,
    ) -> None:
        self.model, self.heldout, self.probes = checkpoint.model, heldout, probes
        self.options, self.shape = options, shape
        self.device = next(self.model.parameters()).device
        wanted = dict.fromkeys(site for probe in probes for site in probe.sites)
        self.with_rows = "rows" in wanted
        if self.with_rows:
            wanted["attention"] = None
        self.sites = tuple(site for site in wanted if shape.sites.get(site) and site != "rows")
        infos = [heldout.documents[d] for d in heldout.document]
        self.category = np.array([shape.categories.index(info.category) for info in infos])
        self.fold = np.array([fold_of(info.id) for info in infos])
        self.document_ids = [info.id for info in infos]
        delimiters = delimiter_tokens(checkpoint.tokenizer if self.with_rows else None)
        self.delimiters = torch.from_numpy(delimiters).to(self.device)
        self.fitting = (
            options.batch_tokens
        )  # tokens of a forward, padding included; less once memory ran out

    def __call__(self, rows: np.ndarray) -> tuple[Arrays, Arrays]:
        size = len(rows) * int(self.heldout.lengths[rows].max())
        if size > self.fitting and len(rows) > 1:
            return self._halved(rows)
        try:
            return self._measure(rows)
        except torch.OutOfMemoryError as error:
            if len(rows) == 1:
                raise SmeltscopeError(
                    f"A segment of {int(self.heldout.lengths[rows[0]])} tokens does not fit into the GPU's "
                    "memory; lower --max-length, or spread the model with --device-map auto."
                ) from error
        # Not before the traceback is gone: it holds the batch's tensors.
        torch.cuda.empty_cache()
        self.fitting = size // 2
        return self._halved(rows)

    def _halved(self, rows: np.ndarray) -> tuple[Arrays, Arrays]:
        middle = (len(rows) + 1) // 2
        (arrays, tables), (more, added) = self(rows[:middle]), self(rows[middle:])
        joined = {
            group: {name: np.concatenate([part, more[group][name]]) for name, part in parts.items()}
            for group, parts in arrays.items()
        }
        summed = {
            group: {name: part + added[group][name] for name, part in parts.items()}
            for group, parts in tables.items()
        }
        return joined, summed

    def _measure(self, rows: np.ndarray) -> tuple[Arrays, Arrays]:
        batch = self._batch(rows)
        arrays = {group_name(p.name): empty_arrays(p, self.shape, len(rows)) for p in self.probes}
        tables = {group_name(p.name): empty_tables(p, self.shape) for p in self.probes}
        earlier: dict[str, dict[int, Any]] = {probe.name: {} for probe in self.probes}
        values: dict[str, Any] = {}
        current: Execution | None = None

        def end_execution() -> None:
            if current is None:
                return
            if self.with_rows and "attention" in values:
                attention: Attention = values["attention"]
                # Copied once here, not in the products of several probes.
                key, value = attention.key.contiguous(), attention.value.contiguous()
                values["attention"] = attention = replace(attention, key=key, value=value)
                values["rows"] = rows_of(attention, batch.queries)
            for probe in self.probes:
                found = {site: values[site] for site in probe.sites if site in values}
                if found:
                    group = group_name(probe.name)
                    kept = probe.observe(
                        arrays[group] | tables[group], batch, current, found, earlier[probe.name]
                    )
                    if kept is not None:
                        earlier[probe.name][current.index] = kept
            values.clear()

        def on_site(execution: Execution, site: str, value: Any) -> None:
            nonlocal current
            if execution != current:
                end_execution()
                current = execution
            values[site] = _moved(value, self.device)

        with torch.no_grad():
            if self.sites:
                with activations.capture(self.model, self.sites, on_site):
                    decoded = activations.decode(self.model, batch.input_ids)
                end_execution()
            else:
                decoded = activations.decode(self.model, batch.input_ids)
            earlier.clear()
            output = Output(
                model=self.model,
                hidden=decoded.last_hidden_state,
                logits=activations.head_of(self.model, decoded),
            )
            for probe in self.probes:
                if probe.reads_output:
                    probe.observe_output(arrays[group_name(probe.name)], batch, output)
        return arrays, tables

    def _batch(self, rows: np.ndarray) -> Batch:
        ids, lengths = pad_batch(self.heldout, rows, pad_token=0)
        seeds = [
            segment_seed(self.document_ids[row], self.heldout.segment(row), self.options.seed)
            for row in rows
        ]
        input_ids = torch.from_numpy(ids).to(self.device)
        regions: Regions
        if self.heldout.prompts is None:
            prompts = None
            queries = self._sample(sample_queries(lengths, seeds, self.options.sampled_queries))
            known = input_ids < len(self.delimiters)  # the model may know more ids
            regions = TextRegions(delimiter=self.delimiters[input_ids * known] & known)
        else:
            prompts = prompt_batch(self.heldout.prompts, rows, self.device)
            queries = rows_of_targets(prompts.targets)
            regions = prompt_regions(self.heldout.prompts, rows, self.device)
        return Batch(
            shape=self.shape,
            input_ids=input_ids,
            lengths=torch.from_numpy(np.asarray(lengths)).to(self.device),
            queries=queries,
            tokens=self._sample(sample_tokens(lengths, seeds, self.options.sampled_tokens)),
            regions=regions,
            category=self.category[rows],
            fold=self.fold[rows],
            prompts=prompts,
        )

    def _sample(self, drawn: tuple[np.ndarray, np.ndarray]) -> Sample:
        positions, valid = (torch.from_numpy(array).to(self.device) for array in drawn)
        return Sample(positions=positions, valid=valid)


def _moved(value: Any, device: torch.device) -> Any:
    """A site's value on another device: layers of a model that is spread over several lie on theirs."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    tensors = {k: v for k, v in vars(value).items() if isinstance(v, torch.Tensor)}
    if all(tensor.device == device for tensor in tensors.values()):
        return value
    return replace(value, **{name: tensor.to(device) for name, tensor in tensors.items()})


def fold_of(document_id: str) -> int:
    """The fold of a document: by its name, so that it is the same in every run."""
    return zlib.crc32(document_id.encode()) % FOLDS


def empty_arrays(probe: Probe, shape: ModelShape, rows: int) -> dict[str, np.ndarray]:
    """NaN for everything that a probe measures of `rows` segments: what its `observe` fills."""
    sizes = {name: len(values) for name, values in dimensions_of([probe], shape).items()}
    return {
        name: np.full((rows, *(sizes[d] for d in variable.dims[1:])), np.nan, variable.dtype)
        for name, variable in probe.variables(shape).items()
    }


def empty_tables(probe: Probe, shape: ModelShape) -> dict[str, np.ndarray]:
    """0 for every table of a probe."""
    sizes = {name: len(values) for name, values in dimensions_of([probe], shape).items()}
    return {
        name: np.zeros([sizes[d] for d in variable.dims], variable.dtype)
        for name, variable in probe.tables(shape).items()
    }


def dimensions_of(probes: Sequence[Probe], shape: ModelShape) -> dict[str, np.ndarray]:
    """The dimensions that the arrays of these probes have, `segment` apart, with their coordinate values."""
    dimensions = {
        "execution": np.arange(len(shape.executions)),
        "head": np.arange(shape.heads),
        "kv_head": np.arange(shape.kv_heads),
        "looped_layer": np.array(shape.looped_layers, dtype=np.int64),
        "visit_pair": np.array([f"{a}-{b}" for a, b in shape.visit_pairs]),
        "region": np.array(shape.regions),
        "expert": np.arange(shape.experts),
        "table_category": np.array(shape.categories),
        "fold": np.arange(FOLDS),
        "shots": np.array(shape.shots, dtype=np.int64),
        "prompt_seed": np.array(shape.prompt_seeds, dtype=np.int64),
    }
    variables: list[Variable] = []
    for probe in probes:
        dimensions |= probe.dimensions(shape)
        variables += [*probe.variables(shape).values(), *probe.tables(shape).values()]
    used = {dim for variable in variables for dim in variable.dims} | {"execution"}
    if shape.visit_pairs:  # what is found by execution is compared between visits too
        used |= {"looped_layer", "visit_pair"}
    return {name: values for name, values in dimensions.items() if name in used}


def model_shape(checkpoint: Checkpoint, heldout: HeldOut, max_length: int) -> ModelShape:
    """A forward over two tokens tells the sizes of every layer, and whether the model can be captured at all."""
    model = checkpoint.model
    available = activations.sites_of(model)
    sizes = {"heads": 0, "kv_heads": 0, "experts": 0, "experts_per_token": 0}

    def on_site(_: Execution, site: str, value: Any) -> None:
        if site == "attention":
            found = {"heads": value.query.shape[1], "kv_heads": value.key.shape[1]}
        else:
            found = {
                "experts": value.logits.shape[-1],
                "experts_per_token": value.experts.shape[-1],
            }
        sizes.update({name: max(sizes[name], size) for name, size in found.items()})

    watched = [site for site in ("attention", "router") if available[site]]
    with activations.capture(model, watched, on_site) as run, torch.no_grad():
        device = next(model.parameters()).device
        activations.decode(model, torch.zeros(1, 2, dtype=torch.long, device=device))
    names = {module: name for name, module in model.named_modules()}
    prompts = heldout.prompts
    layers = [run.module_of(execution) for execution in run.executions]
    return ModelShape(
        executions=run.executions,
        layers=layers,
        modules=[names[layer] for layer in layers],
        sites=available,
        max_length=max_length,
        categories=sorted({info.category for info in heldout.documents}),
        regions=TEXT_REGIONS if prompts is None else prompts.region_names,
        shots=_levels(prompts, "shots"),
        prompt_seeds=_levels(prompts, "prompt_seed"),
        **sizes,
    )


def _levels(prompts: Prompts | None, label: str) -> list[int]:
    """The values that a label of prompts has in the run."""
    return [] if prompts is None else np.unique(prompts.labels[label]).tolist()


def schema_of(
    checkpoint: Checkpoint,
    heldout: HeldOut,
    probes: Sequence[Probe],
    options: RunOptions,
    shape: ModelShape,
    order: np.ndarray,
) -> Schema:
    executions = shape.executions
    dimensions = {"segment": np.arange(len(heldout)), **dimensions_of(probes, shape)}
    coordinates = {
        "layer": ("execution", np.array([e.layer for e in executions])),
        "visit": ("execution", np.array([e.visit for e in executions])),
        "module": ("execution", np.array(shape.modules)),
    }
    if "visit_pair" in dimensions:
        coordinates |= {
            "visit_a": ("visit_pair", np.array([a for a, _ in shape.visit_pairs], dtype=np.int64)),
            "visit_b": ("visit_pair", np.array([b for _, b in shape.visit_pairs], dtype=np.int64)),
        }
    infos = [heldout.documents[d] for d in heldout.document]
    parameters = next(checkpoint.model.parameters())
    config = checkpoint.model.config.get_text_config(decoder=True)
    labels = heldout.prompts.labels if heldout.prompts else {}
    return Schema(
        dimensions=dimensions,
        coordinates=coordinates,
        segments={
            "document": np.asarray(heldout.document)[order],
            "document_id": np.array([i.id for i in infos])[order],
            "category": np.array([i.category for i in infos])[order],
            "source": np.array([i.source for i in infos])[order],
            "tokens": heldout.lengths[order],
            # Some dimensions have the names of labels.
            **{f"label_{name}": values[order] for name, values in labels.items()},
        },
        groups={group_name(p.name): p.variables(shape) for p in probes},
        tables={group_name(p.name): p.tables(shape) for p in probes},
        group_attributes={
            group_name(p.name): {"options": p.options(), "definition": type(p).__doc__ or ""}
            for p in probes
        },
        identity={
            "checkpoint_digest": checkpoint.digest,
            "data_digest": heldout.digest,
            "visits": getattr(config, "num_visits", max(e.visit for e in executions)),
            "residual_scale": getattr(config, "residual_scale", None),
            "device": parameters.device.type,
            "tensor_parallel": checkpoint.model.tp_size or 1,
            "dtype": str(parameters.dtype).removeprefix("torch."),
            **asdict(options),
            "probes": {probe.name: probe.options() for probe in probes},
        },
        attributes={
            "checkpoint": checkpoint.name,
            "model_type": checkpoint.model.config.model_type,
            "model_config": checkpoint.model.config.to_dict(),
            "tokenizer": _tokenizer_name(checkpoint),
            "sites": {site: list(found) for site, found in shape.sites.items()},
            "heads": {"query": shape.heads, "key_value": shape.kv_heads},
            "experts": {"all": shape.experts, "per_token": shape.experts_per_token},
            "data_notes": list(heldout.notes),
            "template": dict(heldout.prompts.template) if heldout.prompts else {},
            "data_dropped": dict(heldout.dropped),
            "packages": {"smeltscope": __version__} | {n: version(n) for n in _RECORDED_PACKAGES},
            "python": platform.python_version(),
            "threads": torch.get_num_threads(),
            "attention": config._attn_implementation,
        },
    )


def _tokenizer_name(checkpoint: Checkpoint) -> str:
    if checkpoint.tokenizer is None:
        return "none (token arrays)"
    return f"{type(checkpoint.tokenizer).__name__}, {len(checkpoint.tokenizer)} tokens"
