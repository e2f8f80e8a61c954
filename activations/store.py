"""The run file: labelled arrays of one run in HDF5, written batch by batch, readable at any moment.

docs/run-file.md describes the layout; a test holds that page against a real file.

Writing: `OUT.partial` gets all rows at the start (NaN), uncompressed and at their final place. Each batch opens it,
overwrites its rows, sets `segments/done` last and closes; at the end it is packed (compressed) into OUT. So a killed run
leaves a file that opens, and the same command goes on at the first row not done. Compressed rows would not do: they move
when they are rewritten, and a process killed before HDF5 has noted where to leaves done rows that cannot be read.
"""

import errno
import io
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import h5py
import numpy as np
import xarray as xr

from smeltscope.errors import SmeltscopeError

SCHEMA_VERSION = 1
_CHUNK_BYTES = 256 * 1024
_PATIENCE = 10.0  # seconds that a locked file is waited for
_one_at_a_time = threading.RLock()  # HDF5 locks files between processes, not between threads
_File = TypeVar("_File")


@dataclass(frozen=True, kw_only=True)
class Variable:
    """An array of the run file: dimensions by name (`segment` first: filled row by row), and what it is."""

    dims: tuple[str, ...]
    description: str
    dtype: str = "float32"
    units: str = "1"


@dataclass(frozen=True, kw_only=True)
class Schema:
    """All that a run file holds besides its numbers.

    `dimensions` maps each dimension to its coordinate values; `coordinates` are further labels,
    {name: (dimension, values)}; `groups` maps a probe's group to its arrays; `identity` is what a resumed run must
    share (checkpoint, data, options), as JSON values; `attributes` is the rest.
    """

    dimensions: Mapping[str, np.ndarray]
    coordinates: Mapping[str, tuple[str, np.ndarray]]
    segments: Mapping[str, np.ndarray]  # one value for each segment
    groups: Mapping[str, Mapping[str, Variable]]
    group_attributes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    identity: Mapping[str, Any] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)


class RunWriter:
    """Writes one run file; see the module's text for the protocol."""

    def __init__(self, out: str | Path, schema: Schema, *, force: bool = False) -> None:
        """Start the file, or find the rows that an interrupted run of the same command has done.

        Raises `SmeltscopeError` when OUT exists (without `force`), when OUT.partial belongs to a run over another
        checkpoint, data or options (naming what differs), and when the folder cannot be written.
        """
        self.out = Path(out)
        self.partial = self.out.with_name(self.out.name + ".partial")
        self.schema = schema
        check_out(self.out, force=force)
        if not (self.partial.exists() and self._is_same_run(force)):
            with self._replacing(self.partial) as file:
                _allocate(file, schema)

    def done(self) -> np.ndarray:
        """Which rows are written: bool (segment,)."""
        with _opened(self.partial, "r") as file:
            return file["segments/done"][:].astype(bool)

    def write(self, start: int, stop: int, arrays: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """Write rows `start:stop` of every array, {group: {name: (rows, ...)}}, and mark them done."""
        with self._wrapped(), _opened(self.partial, "r+") as file:
            for group, variables in arrays.items():
                for name, values in variables.items():
                    file[group][name][start:stop] = values
            file.flush()
            file["segments/done"][start:stop] = 1

    def finish(self, attributes: Mapping[str, Any] | None = None) -> Path:
        """Pack the complete file into OUT."""
        with _opened(self.partial, "r") as partial:
            missing = int((partial["segments/done"][:] == 0).sum())
            if missing:
                raise SmeltscopeError(
                    f"{self.partial} still lacks {missing} rows; run the command again."
                )
            with self._replacing(self.out) as file:
                _allocate(file, self.schema, packed=True)
                _copy(partial, file)
                for key, value in (attributes or {}).items():
                    file.attrs[key] = _encoded(value)
        self.partial.unlink()
        return self.out

    def _is_same_run(self, force: bool) -> bool:
        """Whether OUT.partial can go on; with `force` one that cannot is replaced, else it is refused."""
        try:
            with _opened(self.partial, "r") as file:
                found = json.loads(file.attrs["identity"])
        except (OSError, KeyError, ValueError) as error:
            if force:
                return False
            raise SmeltscopeError(
                f"{self.partial} is no run that can be resumed; delete it, or pass --force to start anew."
            ) from error
        found, wanted = _flat(found), _flat(json.loads(_encoded(self.schema.identity)))
        changed = [key for key in sorted({*found, *wanted}) if found.get(key) != wanted.get(key)]
        if changed and not force:
            details = "; ".join(f"{k}: was {found.get(k)!r}, is {wanted.get(k)!r}" for k in changed)
            raise SmeltscopeError(
                f"{self.partial} was begun by another run ({details}); repeat that one, choose another "
                "--out, or pass --force to start anew."
            )
        return not changed

    @contextmanager
    def _replacing(self, path: Path) -> Iterator[h5py.File]:
        """A new file that takes the place of `path` when it is complete, and leaves nothing when it fails.

        It is made in memory: HDF5 ends the process when it cannot close a file because the disk is full.
        """
        new = self.out.with_name(self.out.name + ".new")
        with self._wrapped():
            memory = io.BytesIO()
            with h5py.File(memory, "w") as file:
                yield file
            try:
                new.write_bytes(memory.getbuffer())
                new.replace(path)
            except BaseException:
                new.unlink(missing_ok=True)
                raise

    @contextmanager
    def _wrapped(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # HDF5 hides the number in its text.
            if error.errno == errno.ENOSPC or f"errno = {errno.ENOSPC}" in str(error):
                raise SmeltscopeError(
                    f"The disk is full: {self.out} could not be written; free some space and run the "
                    "command again, or choose another --out."
                ) from error
            raise SmeltscopeError(f"{self.out} could not be written: {error}.") from error


def check_out(out: Path, *, force: bool = False, option: str = "--out") -> None:
    """Refuse an output that exists or whose folder cannot be written, before any work is done."""
    if out.is_dir():
        raise SmeltscopeError(f"{option} {out} is a folder; name a file in it.")
    if out.exists() and not out.is_file():
        raise SmeltscopeError(f"{option} {out} is no regular file; name a file to be made.")
    if out.exists() and not force:
        raise SmeltscopeError(
            f"{out} exists already; choose another {option}, or pass --force to replace it."
        )
    folder = out.resolve().parent
    if not folder.is_dir():
        raise SmeltscopeError(f"The folder {folder} of {option} does not exist; make it first.")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise SmeltscopeError(
            f"{option} {out} cannot be written ({error.strerror}); choose another folder."
        ) from error


def open_run(path: str | Path) -> xr.DataTree:
    """A run file, finished or still being written, as an xarray DataTree in memory.

    Raises `SmeltscopeError` for a file that is missing, damaged or not a run file of this schema.
    """
    path = Path(path)
    if not path.is_file():
        raise SmeltscopeError(f"There is no run file {path}.")
    try:
        with _opened(path, "r") as file:
            version = file.attrs.get("smeltscope_schema")
        if version == SCHEMA_VERSION:
            with (
                _one_at_a_time,
                _patiently(lambda: xr.open_datatree(path, engine="h5netcdf")) as tree,
            ):
                tree.load()
    except OSError as error:
        raise SmeltscopeError(
            f"{path} is no HDF5 file, or a damaged one ({error}); make the run again."
        ) from error
    if version is None:
        raise SmeltscopeError(f"{path} is an HDF5 file, but no run file of smeltscope.")
    if version != SCHEMA_VERSION:
        raise SmeltscopeError(
            f"{path} has schema {version}; this smeltscope reads schema {SCHEMA_VERSION}."
        )
    return _labelled(tree)  # once it is closed: a tree whose dataset was replaced closes nothing


def attributes_of(run: xr.DataTree) -> dict[str, Any]:
    """The root attributes of a run with their JSON decoded."""
    return {str(key): _decoded(value) for key, value in run.attrs.items()}


def _labelled(tree: xr.DataTree) -> xr.DataTree:
    """Give every group the labels of its executions: which layer, which visit, which module."""
    labels = {str(name): array.variable for name, array in tree.dataset.data_vars.items()}
    tree.dataset = tree.to_dataset().set_coords(list(labels))
    for node in tree.children.values():
        own = {n: v for n, v in labels.items() if set(v.dims) <= set(node.dataset.dims)}
        node.dataset = node.to_dataset(inherit=False).assign_coords(own)
    return tree


def _allocate(file: h5py.File, schema: Schema, *, packed: bool = False) -> None:
    """Everything but the numbers. Unless `packed`, each array has its place in the file from now on."""
    file.attrs["smeltscope_schema"] = SCHEMA_VERSION
    file.attrs["identity"] = _encoded(schema.identity)
    for key, value in schema.attributes.items():
        file.attrs[key] = _encoded(value)
    for name, values in schema.dimensions.items():
        _dataset(file, name, values).make_scale(name)
    for name, (dimension, values) in schema.coordinates.items():
        _dataset(file, name, values).dims[0].attach_scale(file[dimension])
    segments = file.create_group("segments")
    for name, values in schema.segments.items():
        _dataset(segments, name, values).dims[0].attach_scale(file["segment"])
    rows = len(schema.dimensions["segment"])
    segments.create_dataset("done", data=np.zeros(rows, dtype="uint8"))
    segments["done"].dims[0].attach_scale(file["segment"])
    segments["done"].attrs["description"] = "1 where the row has been written"
    for group_name, variables in schema.groups.items():
        group = file.create_group(group_name)
        for key, value in schema.group_attributes.get(group_name, {}).items():
            group.attrs[key] = _encoded(value)
        for name, variable in variables.items():
            shape = tuple(len(schema.dimensions[d]) for d in variable.dims)
            kind = np.dtype(variable.dtype)
            fill = np.nan if kind.kind == "f" else 0
            storage: dict[str, Any] = {}
            if packed:
                storage = {"chunks": _chunks(shape, kind.itemsize), "shuffle": True}
                storage |= {"compression": "gzip", "compression_opts": 1}
            dataset = group.create_dataset(name, shape=shape, dtype=kind, fillvalue=fill, **storage)
            if not packed:
                dataset[...] = fill  # HDF5 allocates at the first write
            for axis, dimension in enumerate(variable.dims):
                dataset.dims[axis].attach_scale(file[dimension])
            dataset.attrs["description"] = variable.description
            dataset.attrs["units"] = variable.units


def _copy(partial: h5py.File, file: h5py.File) -> None:
    """The numbers and the attributes of a complete run, by chunks of rows."""
    for key, value in partial.attrs.items():
        file.attrs[key] = value
    file["segments/done"][...] = 1
    for group in partial.values():
        for name in group if isinstance(group, h5py.Group) else ():
            target = file[group.name][name]
            if target.chunks is not None:
                for start in range(0, target.shape[0], target.chunks[0]):
                    rows = slice(start, start + target.chunks[0])
                    target[rows] = group[name][rows]


def _dataset(group: h5py.Group, name: str, values: np.ndarray) -> h5py.Dataset:
    values = np.asarray(values)
    if values.dtype.kind in "UO":
        text = h5py.string_dtype("utf-8")
        return group.create_dataset(name, data=values.astype(object), dtype=text)
    return group.create_dataset(name, data=values)


def _chunks(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Whole rows, as many as make a chunk of about a quarter of a megabyte."""
    row = int(np.prod(shape[1:])) * itemsize
    return (max(1, min(shape[0], _CHUNK_BYTES // max(row, 1))), *(max(n, 1) for n in shape[1:]))


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _encoded(value: Any) -> Any:
    """Plain strings and numbers as they are; everything else as JSON text."""
    if isinstance(value, str | int | float | np.integer | np.floating):
        return value
    return json.dumps(value, default=str, sort_keys=True)


def _decoded(value: Any) -> Any:
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


@contextmanager
def _opened(path: Path, mode: str) -> Iterator[h5py.File]:
    """Open for a moment; wait while another process holds the file."""
    with _one_at_a_time, _patiently(lambda: h5py.File(path, mode)) as file:
        yield file


def _patiently(open_file: Callable[[], _File]) -> _File:
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return open_file()
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
