"""The run file: labelled arrays of one run in HDF5, written batch by batch, readable at any moment.

docs/run-file.md describes the layout; a test holds that page against a real file.

Writing: `OUT.partial` gets all rows at the start (NaN), uncompressed and at their final place. Each batch opens it,
overwrites its rows and closes; at the end it is packed (compressed) into OUT. What is done and the tables, which are
added to, have two slots: a batch writes the slot that is not valid, and then one byte, `valid_slot`, makes it so. So
a killed run leaves a file that opens, and the same command goes on at the first row not done, adding nothing twice.
Compressed rows would not do: they move when they are rewritten, and a process killed before HDF5 has noted where to
leaves done rows that cannot be read.

Several workers write a file each, with the rows of each; `join_ranks` packs them into OUT.
"""

import json
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from glob import escape
from pathlib import Path
from typing import Any, TypeVar

import h5py
import numpy as np
import xarray as xr
from xarray.backends import BackendArray
from xarray.core.indexing import (
    ExplicitIndexer,
    IndexingSupport,
    LazilyIndexedArray,
    explicit_indexing_adapter,
)

from smeltscope.activations.hdf5 import errors_named, opened, replacing
from smeltscope.errors import SmeltscopeError

SCHEMA_VERSION = 1
_CHUNK_BYTES = 256 * 1024
_PACKING: dict[str, Any] = {"shuffle": True, "compression": "gzip", "compression_opts": 1}
_Value = TypeVar("_Value")


@dataclass(frozen=True, kw_only=True)
class Variable:
    """An array of the run file: dimensions by name, and what it is.

    With `segment` as its first dimension it is written row by row; without, it is a table: integers that every
    batch adds to.
    """

    dims: tuple[str, ...]
    description: str
    dtype: str = ""  # unless given, float32; of a table int64
    units: str = "1"

    def __post_init__(self) -> None:
        if not self.dtype:
            kind = "float32" if "segment" in self.dims else "int64"
            object.__setattr__(self, "dtype", kind)


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """An array that is known before the run begins, whole."""

    dims: tuple[str, ...]
    values: np.ndarray
    description: str
    units: str = "1"


@dataclass(frozen=True, kw_only=True)
class Schema:
    """All that a run file holds besides its numbers.

    `dimensions` maps each dimension to its coordinate values; `coordinates` are further labels,
    {name: (dimension, values)}; `groups` maps a probe's group to its arrays, `tables` to its tables, `fixed` a group to
    what is known beforehand; `identity` is what a resumed run must share (checkpoint, data, options), as JSON
    values; `attributes` is the rest.
    """

    dimensions: Mapping[str, np.ndarray]
    coordinates: Mapping[str, tuple[str, np.ndarray]]
    segments: Mapping[str, np.ndarray]  # one value for each segment
    groups: Mapping[str, Mapping[str, Variable]]
    tables: Mapping[str, Mapping[str, Variable]] = field(default_factory=dict)
    fixed: Mapping[str, Mapping[str, Fixed]] = field(default_factory=dict)
    group_attributes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    identity: Mapping[str, Any] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path, variable in _by_path(self.tables):
            if "segment" in variable.dims or np.dtype(variable.dtype).kind not in "iu":
                raise SmeltscopeError(
                    f"{path} is no table: it has {variable.dims} of {variable.dtype}; tables are integers "
                    "without the dimension segment."
                )


class RunWriter:
    """Writes one run file, or one worker's part of it; see the module's text for the protocol."""

    def __init__(
        self,
        out: str | Path,
        schema: Schema,
        *,
        force: bool = False,
        ranges: Sequence[tuple[int, int]] = (),
        rank: int = 0,
    ) -> None:
        """Start the file, or find the rows that an interrupted run of the same command has done.

        When several workers share a run, `ranges` holds the rows (start, stop) of each, in order, and `rank` says
        which of them this one is.

        Raises `SmeltscopeError` when OUT exists (without `force`), when OUT.partial belongs to a run over another
        checkpoint, data or options or by another number of workers (naming what differs), and when the folder
        cannot be written.
        """
        self.out = Path(out)
        self.schema = schema
        self.ranges = ranges
        parts = _parts(self.out, schema, ranges)
        self._part = parts[rank]
        check_out(self.out, force=force)
        _check_no_others(self.out, parts, force=force)
        if not _can_go_on(self._part, force=force):
            _begin(self.out, self._part)

    @property
    def path(self) -> Path:
        """The file that this worker writes its rows to."""
        return self._part.path

    def done(self) -> np.ndarray:
        """Which rows this worker has written: bool (segment,)."""
        done = np.zeros(len(self.schema.dimensions["segment"]), dtype=bool)
        with opened(self._part.path, "r") as file:
            done[self._part.start : self._part.stop] = _current(file, "segments/done")
        return done

    def write(
        self,
        start: int,
        stop: int,
        arrays: Mapping[str, Mapping[str, np.ndarray]],
        tables: Mapping[str, Mapping[str, np.ndarray]] | None = None,
    ) -> None:
        """Write rows `start:stop` of every array, {group: {name: (rows, ...)}}, and mark them done.

        `tables` holds what these rows add to the tables, {group: {name: integers}}.
        """
        rows = slice(start - self._part.start, stop - self._part.start)
        with errors_named(self.out), opened(self._part.path, "r+") as file:
            valid = int(file["valid_slot"][()])
            done = file["segments/done"][valid]
            if not 0 <= rows.start <= rows.stop <= len(done) or done[rows].any():
                raise SmeltscopeError(
                    f"Rows {start}:{stop} are not among those that {self._part.path} still lacks; pass "
                    "--force to start anew."
                )
            for path, values in _by_path(arrays):
                file[path][rows] = values
            done[rows] = 1
            file["segments/done"][1 - valid] = done
            totals = {path: file[path][valid, ...] for path, _ in _by_path(self.schema.tables)}
            for path, values in _by_path(tables or {}):
                if values.shape != totals[path].shape:
                    raise SmeltscopeError(
                        f"{path} has the shape {totals[path].shape}; {values.shape} cannot be added."
                    )
                totals[path] += values  # numpy refuses what are no integers
            for path, total in totals.items():
                file[path][1 - valid] = total
            file.flush()
            file["valid_slot"][...] = 1 - valid

    def finish(self, attributes: Mapping[str, Any] | None = None) -> Path:
        """Pack the complete run, the parts of all workers, into OUT."""
        return join_ranks(self.out, self.schema, self.ranges, attributes)


def join_ranks(
    out: str | Path,
    schema: Schema,
    ranges: Sequence[tuple[int, int]],
    attributes: Mapping[str, Any] | None = None,
) -> Path:
    """Pack the files of all workers into OUT, bit by bit what one worker had written, and remove them.

    Raises `SmeltscopeError` for the first file that is missing, unfinished or of another run.
    """
    out = Path(out)
    parts = _parts(out, schema, ranges)
    with ExitStack() as stack:
        files = []
        for part in parts:
            if not part.path.exists():
                raise SmeltscopeError(f"{part.path} is missing; run the command again.")
            _check_same_run(part)
            files.append(stack.enter_context(opened(part.path, "r")))
            missing = int((_current(files[-1], "segments/done") == 0).sum())
            if missing:
                raise SmeltscopeError(
                    f"{part.path} still lacks {missing} rows; run the command again."
                )
        stack.enter_context(errors_named(out))
        file, check = stack.enter_context(replacing(out))
        _allocate(file, schema, packed=True)
        _copy(list(zip(parts, files, strict=True)), file, schema, check)
        for key, value in (attributes or {}).items():
            file.attrs[key] = _encoded(value)
    for part in parts:
        part.path.unlink()
    return out


def is_finished(out: str | Path, schema: Schema) -> bool:
    """Whether `out` is the finished file of the same run."""
    if not Path(out).is_file():
        return False
    try:
        with opened(Path(out), "r") as file:
            return bool(file.attrs.get("identity") == _encoded(schema.identity))
    except OSError:  # no HDF5 file
        return False


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


def open_run(
    path: str | Path, groups: Collection[str] | None = None, *, lazy: bool = False
) -> xr.DataTree:
    """A run file, finished or still being written, as an xarray DataTree in memory.

    `groups` names the probes' groups to load; without it, all are. With `lazy`, an array of a finished run is read from
    the file each time it is used, and not kept: for runs that do not fit into memory. Raises `SmeltscopeError` for a
    file that is missing, damaged or not a run file of this schema, and for a group that it lacks.
    """
    path = Path(path)
    if not path.is_file():
        raise SmeltscopeError(f"There is no run file {path}.")
    try:
        with opened(path, "r") as file:
            version = file.attrs.get("smeltscope_schema")
            datasets = _read(file, path, groups, lazy) if version == SCHEMA_VERSION else {}
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
    return xr.DataTree.from_dict(datasets)


def attributes_of(run: xr.DataTree) -> dict[str, Any]:
    """The root attributes of a run with their JSON decoded."""
    return {str(key): _decoded(value) for key, value in run.attrs.items()}


def _read(
    file: h5py.File, path: Path, groups: Collection[str] | None, lazy: bool
) -> dict[str, xr.Dataset]:
    """{"/": root, "/group": arrays}, each with the labels of its dimensions.

    xarray's own reader looks every dimension up anew for every array: a second and more for each run.
    """
    # Lists: h5py's own iteration over a file holds its lock, and would go on holding it for as long as somebody keeps the
    # error of an array that cannot be read.
    nodes = list(file.items())
    has = [name for name, node in nodes if isinstance(node, h5py.Group)]
    lacking = sorted(set(groups or ()) - set(has))
    if lacking:
        raise SmeltscopeError(
            f"{path} has no group {', '.join(lacking)}; it has {', '.join(sorted(has))}."
        )
    slot = int(file["valid_slot"][()]) if "valid_slot" in file else None  # of a run being written
    coords = {
        name: _variable(node, slot)
        for name, node in nodes
        if isinstance(node, h5py.Dataset) and name not in ("slot", "valid_slot")
    }
    datasets = {"/": xr.Dataset(coords=coords, attrs=dict(file.attrs))}
    for group in has:
        if groups is not None and group not in {"segments", *groups}:
            continue
        on_disk = path if lazy and slot is None and group != "segments" else None
        arrays = {name: _variable(node, slot, on_disk) for name, node in list(file[group].items())}
        dims = {dim for array in arrays.values() for dim in array.dims}
        labels = {n: c for n, c in coords.items() if n not in c.dims and set(c.dims) <= dims}
        datasets[f"/{group}"] = xr.Dataset(arrays, labels, attrs=dict(file[group].attrs))
    return datasets


def _variable(dataset: h5py.Dataset, slot: int | None, on_disk: Path | None = None) -> xr.Variable:
    """An array with the names of its dimensions; of two slots the one that is valid.

    In memory, or left where it is: in the file `on_disk`.
    """
    if dataset.is_scale:
        dims = [dataset.name.removeprefix("/")]
    else:
        dims = [dim.keys()[0] for dim in dataset.dims]
    values: Any
    if h5py.check_string_dtype(dataset.dtype):
        values = dataset.asstr()[...]
    elif on_disk is None:
        values = dataset[...]
    else:
        values = LazilyIndexedArray(_OnDisk(on_disk, dataset))
    if "slot" in dims:
        axis = dims.index("slot")
        values = values.take(slot, axis)
        del dims[axis]
    attributes = {k: dataset.attrs[k] for k in ("description", "units") if k in dataset.attrs}
    return xr.Variable(dims, values, attributes)


class _OnDisk(BackendArray):
    """An array that xarray reads from its file when it is used."""

    def __init__(self, path: Path, dataset: h5py.Dataset) -> None:
        self.path, self.name = path, dataset.name
        self.shape, self.dtype = dataset.shape, dataset.dtype

    def __getitem__(self, key: ExplicitIndexer) -> np.ndarray:
        support = IndexingSupport.OUTER_1VECTOR  # what h5py can do itself
        return explicit_indexing_adapter(key, self.shape, support, self._part)

    def _part(self, key: tuple[Any, ...]) -> np.ndarray:
        with opened(self.path, "r") as file:
            return np.asarray(file[self.name][key])


@dataclass(frozen=True, kw_only=True)
class _Part:
    """What one worker writes: rows `start:stop` of the run, into a file of their own."""

    path: Path
    start: int
    stop: int
    schema: Schema  # of that file


def _parts(out: Path, schema: Schema, ranges: Sequence[tuple[int, int]]) -> list[_Part]:
    rows = len(schema.dimensions["segment"])
    ranges = list(ranges) or [(0, rows)]
    if [start for start, _ in ranges] + [rows] != [0] + [stop for _, stop in ranges]:
        raise SmeltscopeError(f"The rows {ranges} do not follow one another from 0 to {rows}.")
    if len(ranges) == 1:
        return [_Part(path=_whole(out), start=0, stop=rows, schema=schema)]
    return [
        _Part(
            path=out.with_name(f"{out.name}.rank{rank}of{len(ranges)}.partial"),
            start=start,
            stop=stop,
            schema=_rows_of(schema, start, stop),
        )
        for rank, (start, stop) in enumerate(ranges)
    ]


def _whole(out: Path) -> Path:
    return out.with_name(f"{out.name}.partial")


def _rows_of(schema: Schema, start: int, stop: int) -> Schema:
    """The schema of a file with these rows alone; its identity says which they are."""

    def cut(dimension: str, values: np.ndarray) -> np.ndarray:
        return values[start:stop] if dimension == "segment" else values

    return replace(
        schema,
        dimensions={d: cut(d, values) for d, values in schema.dimensions.items()},
        coordinates={n: (d, cut(d, values)) for n, (d, values) in schema.coordinates.items()},
        segments={n: cut("segment", values) for n, values in schema.segments.items()},
        identity={**schema.identity, "rows": [start, stop]},
    )


def _check_no_others(out: Path, parts: Sequence[_Part], *, force: bool) -> None:
    """Refuse a run that another number of workers has begun; with `force`, remove what they wrote."""
    begun = {_whole(out), *out.parent.glob(f"{escape(out.name)}.rank*of*.partial")}
    for path in sorted(begun - {part.path for part in parts}):
        if force:
            path.unlink(missing_ok=True)
        elif path.exists():
            raise SmeltscopeError(
                f"{path} was begun by another number of workers than {len(parts)}; take as many as then, "
                "choose another --out, or pass --force to start anew."
            )


def _can_go_on(part: _Part, *, force: bool) -> bool:
    """Whether the part's file can go on; with `force` one that cannot is replaced, else it is refused."""
    if not part.path.exists():
        return False
    try:
        _check_same_run(part)
    except SmeltscopeError:
        if not force:
            raise
        return False
    return True


def _check_same_run(part: _Part) -> None:
    try:
        with opened(part.path, "r") as file:
            _current(file, "segments/done")
            identity = json.loads(file.attrs["identity"])
    except (OSError, KeyError, ValueError) as error:
        raise SmeltscopeError(
            f"{part.path} is no run that can be resumed; delete it, or pass --force to start anew."
        ) from error
    found, wanted = flattened(identity), flattened(json.loads(_encoded(part.schema.identity)))
    changed = [key for key in sorted({*found, *wanted}) if found.get(key) != wanted.get(key)]
    if changed:
        details = "; ".join(f"{k}: was {found.get(k)!r}, is {wanted.get(k)!r}" for k in changed)
        raise SmeltscopeError(
            f"{part.path} was begun by another run ({details}); repeat that one, choose another "
            "--out, or pass --force to start anew."
        )


def _begin(out: Path, part: _Part) -> None:
    """Give every number its place on the disk, so that a disk that fills up later does no harm."""
    with errors_named(out), replacing(part.path) as (file, check):
        _allocate(file, part.schema)
        for path, _ in _written(part.schema):
            dataset = file[path]
            for block in _blocks(dataset):
                shape = (block.stop - block.start, *dataset.shape[1:])
                dataset[block] = np.full(shape, dataset.fillvalue)  # h5py is slow with one number
                check()


def _written(schema: Schema) -> Iterator[tuple[str, Variable]]:
    """All that batches write, as it lies in OUT.partial: in two slots what changes together."""
    yield from _by_path(schema.groups)
    done = Variable(
        dims=("segment",), dtype="uint8", description="1 where the row has been written"
    )
    for path, variable in [("segments/done", done), *_by_path(schema.tables)]:
        yield path, replace(variable, dims=("slot", *variable.dims))


def _current(file: h5py.File, path: str) -> np.ndarray:
    return file[path][file["valid_slot"][()]]


def _allocate(file: h5py.File, schema: Schema, *, packed: bool = False) -> None:
    """Everything but the numbers; `packed` for OUT, which has no slots."""
    file.attrs["smeltscope_schema"] = SCHEMA_VERSION
    file.attrs["identity"] = _encoded(schema.identity)
    for key, value in schema.attributes.items():
        file.attrs[key] = _encoded(value)
    for name, values in schema.dimensions.items():
        _dataset(file, name, values).make_scale(name)
    if not packed:
        _dataset(file, "slot", np.arange(2)).make_scale("slot")
        file["valid_slot"] = np.uint8(0)
    for name, (dimension, values) in schema.coordinates.items():
        _dataset(file, name, values).dims[0].attach_scale(file[dimension])
    segments = file.create_group("segments")
    for name, values in schema.segments.items():
        _dataset(segments, name, values).dims[0].attach_scale(file["segment"])
    for name in {**schema.groups, **schema.tables, **schema.fixed}:
        group = file.create_group(name)
        for key, value in schema.group_attributes.get(name, {}).items():
            group.attrs[key] = _encoded(value)
    for path, known in _by_path(schema.fixed):
        dataset = _dataset(file, path, known.values, **_PACKING)
        for axis, dim in enumerate(known.dims):
            dataset.dims[axis].attach_scale(file[dim])
        _describe(dataset, known)
    for path, variable in _written(schema):
        scales = [file[d] for d in variable.dims if not (packed and d == "slot")]
        shape, kind = tuple(len(scale) for scale in scales), np.dtype(variable.dtype)
        storage: dict[str, Any] = {}
        if not packed:
            storage = {"fill_time": "never"}  # HDF5 would fill what is about to be filled
        elif all(shape) and shape:
            storage = {"chunks": _chunks(shape, kind.itemsize), **_PACKING}
        fill = np.nan if kind.kind == "f" else 0
        dataset = file.create_dataset(path, shape, kind, fillvalue=fill, **storage)
        for axis, scale in enumerate(scales):
            dataset.dims[axis].attach_scale(scale)
        _describe(dataset, variable)


def _describe(dataset: h5py.Dataset, array: Variable | Fixed) -> None:
    dataset.attrs["description"] = array.description
    dataset.attrs["units"] = array.units


def _copy(
    parts: Sequence[tuple[_Part, h5py.File]],
    file: h5py.File,
    schema: Schema,
    check: Callable[[], None],
) -> None:
    """Rows in order, tables added; the attributes are those of the first part."""
    for key, value in parts[0][1].attrs.items():
        if key != "identity":
            file.attrs[key] = value
    file["segments/done"][...] = 1
    for path, _ in _by_path(schema.tables):
        file[path][...] = sum(_current(source, path) for _, source in parts)
        check()
    for path, _ in _by_path(schema.groups):
        dataset = file[path]
        for block in _blocks(dataset):
            dataset[block] = np.concatenate(
                [
                    source[path][max(block.start - part.start, 0) : max(block.stop - part.start, 0)]
                    for part, source in parts
                ]
            )
            check()


def _dataset(group: h5py.Group, name: str, values: np.ndarray, **storage: Any) -> h5py.Dataset:
    values = np.asarray(values)
    if values.dtype.kind in "UO":
        text = h5py.string_dtype("utf-8")
        return group.create_dataset(name, data=values.astype(object), dtype=text)
    return group.create_dataset(name, data=values, **(storage if values.size else {}))


def _chunks(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Whole rows, as many as make a chunk of about a quarter of a megabyte."""
    row = int(np.prod(shape[1:])) * itemsize
    return (max(1, min(shape[0], _CHUNK_BYTES // max(row, 1))), *shape[1:])


def _blocks(dataset: h5py.Dataset) -> Iterator[slice]:
    """Its rows, a chunk at a time."""
    step = _chunks(dataset.shape, dataset.dtype.itemsize)[0]
    for start in range(0, len(dataset) if dataset.size else 0, step):
        yield slice(start, min(start + step, len(dataset)))


def _by_path(groups: Mapping[str, Mapping[str, _Value]]) -> Iterator[tuple[str, _Value]]:
    """{"group": {"name": value}} as ("group/name", value)."""
    for group, members in groups.items():
        for name, value in members.items():
            yield f"{group}/{name}", value


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= flattened(value, f"{prefix}{key}.")
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
