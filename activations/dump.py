"""The dump: the values of sites themselves, of every token, in HDF5. docs/dump.md describes the file.

    dump_sites(model, heldout.tokens, heldout.offsets, ["resid_post"], "dump.h5")
    dump = open_dump("dump.h5")
    dump[6, "resid_post"][dump.segment(0)]  # (token, width), read from disk now

One array for each site and execution, with the tokens of all segments one after another and no padding. Segments run
in their own order, so that arrays grow at their end, and what a site gives is written before the next one comes.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Self

import h5py
import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from smeltscope.activations.capturing import Capture, capture
from smeltscope.activations.hdf5 import errors_named, replacing
from smeltscope.activations.head import decode
from smeltscope.activations.sites import Routing
from smeltscope.activations.store import check_out
from smeltscope.errors import SmeltscopeError
from smeltscope.model import Execution

DUMP_VERSION = 1
_CHUNK_BYTES = 256 * 1024
_PACKED: dict[str, Any] = {"compression": "gzip", "compression_opts": 1, "shuffle": True}
_NO_LABELS = "This is a netCDF dimension but not a netCDF variable."
# Stored as their bits, uint16: HDF5 has no bfloat16, and readers in browsers misread float16.
_BITS = (torch.bfloat16, torch.float16)
_DIMS = {
    **dict.fromkeys(("q", "q_norm", "pv"), ("head", "size")),
    **dict.fromkeys(("k", "k_norm", "v"), ("kv_head", "size")),
    "router_logits": ("expert",),
    "router_experts": ("chosen",),
    "router_weights": ("chosen",),
}


@dataclass(frozen=True, kw_only=True)
class SiteArray:
    """An array that a dump holds: one site at one execution; the site `router` makes three."""

    execution: Execution
    name: str
    shape: tuple[int, ...]  # of one token
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def dump_sites(
    model: PreTrainedModel,
    tokens: np.ndarray,
    offsets: np.ndarray,
    sites: Sequence[str],
    out: str | Path,
    *,
    executions: Sequence[int] | None = None,
    segments: Mapping[str, np.ndarray] | None = None,
    attributes: Mapping[str, Any] | None = None,
    batch_tokens: int = 8192,
    force: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write the values of `sites` at `executions` (all by default) for every token to `out`.

    Segment i is `tokens[offsets[i]:offsets[i + 1]]`; `segments` holds further labels, one for each. Memory is bounded
    by a forward over `batch_tokens` tokens, padding included. `out` appears when it is complete, and nothing is left
    when it fails. `on_progress` is called after each batch: (tokens so far, tokens in all).

    Raises `SmeltscopeError` for sites and executions that the model lacks, and when `out` cannot be written.
    """
    out, offsets = Path(out), np.asarray(offsets)
    check_out(out, force=force)
    batches = list(_batches(np.diff(offsets), batch_tokens))
    arrays = arrays_of(model, sites, executions)
    with errors_named(out), replacing(out) as (file, check):
        _describe(file, tokens, offsets, segments or {}, attributes or {})
        targets = {(a.execution, a.name): _create(file, a, len(tokens)) for a in arrays}

        def write(place: slice, execution: Execution, name: str, values: Tensor) -> None:
            if (execution, name) in targets:
                targets[execution, name][place] = _stored(values)
                check()

        for first, last in batches:
            rows = [tokens[offsets[i] : offsets[i + 1]] for i in range(first, last)]
            _watch(model, sites, rows, partial(write, slice(offsets[first], offsets[last])))
            if on_progress is not None:
                on_progress(int(offsets[last]), len(tokens))
    return out


def arrays_of(
    model: PreTrainedModel, sites: Sequence[str], executions: Sequence[int] | None = None
) -> list[SiteArray]:
    """What a dump of `sites` at `executions` holds, found by a forward over two tokens.

    Raises `SmeltscopeError` for an execution that there is not, and for a site that none of these has.
    """
    if "attention" in sites:
        raise SmeltscopeError(
            "The site 'attention' has no value for each token alone; dump q, k and v (with QK-norm q_norm and "
            "k_norm) or pv, or read it with smeltscope.capture."
        )
    arrays: list[SiteArray] = []

    def note(execution: Execution, name: str, values: Tensor) -> None:
        shape = tuple(values.shape[1:])
        arrays.append(SiteArray(execution=execution, name=name, shape=shape, dtype=values.dtype))

    count = len(_watch(model, sites, [np.zeros(2, dtype=np.int64)], note).executions)
    wanted = range(count) if executions is None else sorted(set(executions))
    for index in wanted:
        if not 0 <= index < count:
            raise SmeltscopeError(f"There is no execution {index}; the model has 0 to {count - 1}.")
    for site in sites:
        having = [a.execution.index for a in arrays if a.name in (site, f"{site}_logits")]
        if not set(having) & set(wanted):
            raise SmeltscopeError(
                f"None of the executions asked for has the site {site!r}; these have it: "
                f"{', '.join(map(str, having))}."
            )
    return [array for array in arrays if array.execution.index in wanted]


def _watch(
    model: PreTrainedModel,
    sites: Sequence[str],
    rows: Sequence[np.ndarray],
    on_array: Callable[[Execution, str, Tensor], None],
) -> Capture:
    """Run segments and hand over what each array gets of them: (their tokens, ...), without padding."""
    ids = pad_sequence([torch.from_numpy(row.astype(np.int64)) for row in rows], batch_first=True)
    real = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]

    def on_site(execution: Execution, site: str, value: Any) -> None:
        for name, part in _parts(site, value).items():
            on_array(execution, name, part[real.to(part.device)])

    try:
        with torch.no_grad(), capture(model, sites, on_site) as run:
            decode(model, ids.to(next(model.parameters()).device))
    except torch.OutOfMemoryError as error:
        raise SmeltscopeError(
            f"A batch of {ids.numel()} tokens does not fit into the GPU's memory; lower --batch-tokens."
        ) from error
    return run


def _parts(site: str, value: Tensor | Routing) -> dict[str, Tensor]:
    if isinstance(value, Routing):
        return {
            f"{site}_logits": value.logits,
            f"{site}_experts": value.experts.int(),
            f"{site}_weights": value.weights,
        }
    return {site: value}


def _batches(lengths: np.ndarray, batch_tokens: int) -> Iterator[tuple[int, int]]:
    """Neighbouring segments that run together, [first, last): as many as rows x longest <= batch_tokens allows."""
    first = longest = 0
    for i, length in enumerate(lengths.tolist()):
        if length > batch_tokens:
            raise SmeltscopeError(
                f"A segment of {length} tokens does not fit into a batch of {batch_tokens}: "
                f"raise --batch-tokens to {length}, or lower --max-length to {batch_tokens}."
            )
        longest = max(longest, length)
        if (i + 1 - first) * longest > batch_tokens:
            yield first, i
            first, longest = i, length
    yield first, len(lengths)


def _describe(
    file: h5py.File,
    tokens: np.ndarray,
    offsets: np.ndarray,
    segments: Mapping[str, np.ndarray],
    attributes: Mapping[str, Any],
) -> None:
    """All but the sites: what the tokens are, and what made them."""
    file.attrs["smeltscope_dump"] = DUMP_VERSION
    for key, value in attributes.items():
        file.attrs[key] = value if isinstance(value, str) else json.dumps(value, default=str)
    input_ids = file.create_dataset("input_ids", data=tokens, chunks=True, **_PACKED)
    input_ids.dims[0].attach_scale(_dimension(file, "token", len(tokens)))
    group = file.create_group("segments")
    places = {"start": offsets[:-1], "tokens": np.diff(offsets)}
    for name, values in {**places, **segments}.items():
        values = np.asarray(values)
        if values.dtype.kind in "UO":
            values = values.astype(h5py.string_dtype("utf-8"))
        dataset = group.create_dataset(name, data=values)
        dataset.dims[0].attach_scale(_dimension(file, "segment", len(offsets) - 1))


def _create(file: h5py.File, array: SiteArray, tokens: int) -> h5py.Dataset:
    rows = max(1, min(tokens, _CHUNK_BYTES // array.bytes_per_token))
    dtype = str(array.dtype).removeprefix("torch.")
    dataset = file.create_dataset(
        f"{array.name}/{array.execution.index}",
        shape=(tokens, *array.shape),
        dtype="uint16" if array.dtype in _BITS else dtype,
        chunks=(rows, *array.shape),
        rdcc_nbytes=rows
        * array.bytes_per_token,  # a batch ends inside a chunk; the next one fills it
        **_PACKED,
    )
    dataset.attrs["layer"], dataset.attrs["visit"] = array.execution.layer, array.execution.visit
    dataset.attrs["smeltscope_dtype"] = dtype
    dims = ("token", *_DIMS.get(array.name, ("width",)))
    for axis, (name, size) in enumerate(zip(dims, dataset.shape, strict=True)):
        dataset.dims[axis].attach_scale(_dimension(file, name, size))
    return dataset


def _dimension(file: h5py.File, name: str, size: int) -> h5py.Dataset:
    """A named dimension, without labels along it; a second size gets a name of its own (`head_8`)."""
    if name in file and len(file[name]) != size:
        name = f"{name}_{size}"
    if name not in file:
        # Never written, so it takes no space.
        file.create_dataset(name, shape=(size,), dtype="int8").make_scale(_NO_LABELS)
    return file[name]


def _stored(values: Tensor) -> np.ndarray:
    values = values.cpu()
    return (values.view(torch.uint16) if values.dtype in _BITS else values).numpy()


class StoredArray:
    """An array on disk; `array[index]` reads a part, as a tensor of the type that the model computed with.

    `index` is what h5py takes: integers, slices, masks, lists of integers that go up.
    """

    def __init__(self, dataset: h5py.Dataset) -> None:
        self._dataset = dataset
        self.shape: tuple[int, ...] = dataset.shape
        self.dtype: torch.dtype = getattr(torch, dataset.attrs["smeltscope_dtype"])

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Tensor:
        return torch.from_numpy(np.asarray(self._dataset[index])).view(self.dtype)


class Dump:
    """A dump, open for reading: `dump[execution, site]` is a `StoredArray`, (token, ...). A context manager.

    `executions` are those that it covers, `sites` says which of them each array has, {name: their indices}; `segments`
    holds the labels of each segment, of which `start` and `tokens` say where it lies along `token`.
    """

    def __init__(self, file: h5py.File) -> None:
        self._file = file
        self.attributes = dict(file.attrs)
        self.segments: dict[str, np.ndarray] = {}
        for name, dataset in file["segments"].items():
            text = h5py.check_string_dtype(dataset.dtype) is not None
            self.segments[name] = dataset.asstr()[:] if text else dataset[:]
        self.sites: dict[str, list[int]] = {}
        found: set[Execution] = set()
        for name, group in file.items():
            if isinstance(group, h5py.Group) and name != "segments":
                self.sites[name] = sorted(int(index) for index in group)
                found |= {_execution(dataset) for dataset in group.values()}
        self.executions = sorted(found, key=lambda execution: execution.index)

    def __getitem__(self, where: tuple[int, str]) -> StoredArray:
        execution, name = where
        if execution not in self.sites.get(name, ()):
            holds = "; ".join(f"{n} of {', '.join(map(str, e))}" for n, e in self.sites.items())
            raise SmeltscopeError(
                f"The dump holds no {name!r} of execution {execution}; it holds {holds}."
            )
        return StoredArray(self._file[f"{name}/{execution}"])

    @property
    def input_ids(self) -> Tensor:
        """All tokens, (token,)."""
        return torch.from_numpy(self._file["input_ids"][:])

    def segment(self, i: int) -> slice:
        """Where segment `i` lies along `token`."""
        start = int(self.segments["start"][i])
        return slice(start, start + int(self.segments["tokens"][i]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def open_dump(path: str | Path) -> Dump:
    """Open a dump; its arrays stay on disk until parts of them are read.

    Raises `SmeltscopeError` for a file that is missing, damaged or no dump of this version.
    """
    path = Path(path)
    if not path.is_file():
        raise SmeltscopeError(f"There is no dump {path}.")
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise SmeltscopeError(
            f"{path} is no HDF5 file, or a damaged one ({error}); make the dump again."
        ) from error
    version = file.attrs.get("smeltscope_dump")
    if version == DUMP_VERSION:
        return Dump(file)
    file.close()
    if version is None:
        raise SmeltscopeError(f"{path} is an HDF5 file, but no dump of smeltscope.")
    raise SmeltscopeError(
        f"{path} is a dump of version {version}; this smeltscope reads version {DUMP_VERSION}."
    )


def _execution(dataset: h5py.Dataset) -> Execution:
    return Execution(
        index=int(dataset.name.rsplit("/", 1)[1]),
        layer=int(dataset.attrs["layer"]),
        visit=int(dataset.attrs["visit"]),
    )
