"""Reading held-out text: which files there are, and their documents one after another."""

import codecs
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
import numpy as np
from zstandard import ZstdDecompressor

from smeltscope.errors import SmeltscopeError
from smeltscope.tasks.arrays import open_tokens, split_documents
from smeltscope.tasks.zst import is_whole_zst

ENDINGS = (".txt", ".jsonl", ".parquet", ".npy", ".bin")
COMPRESSIONS = (".gz", ".xz", ".zst", ".bz2")  # of .txt and .jsonl
COLUMNS = ("text", "category", "source", "id")


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """A file, or a folder written by `datasets`, that holds documents."""

    path: Path
    kind: str  # its ending without the compression, or "dataset"

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def category(self) -> str:
        """What documents get that name no category: the file name up to its first dot."""
        return self.name.lstrip(".").split(".")[0]


@dataclass(frozen=True, kw_only=True)
class Document:
    """One document as it was in its file; `content` is text, or token ids (n,)."""

    id: str
    category: str
    source: str
    file: str
    row: int  # from 1; of .jsonl the line
    content: str | np.ndarray


def find_files(paths: Sequence[str | Path]) -> tuple[list[DataFile], list[str]]:
    """The files behind `paths` in the given order, and what to tell the user about them.

    A folder stands for its files with a known ending, by name, without its subfolders; one that
    `datasets` wrote counts as a file, and one with several splits as one file for each.
    Raises SmeltscopeError for a path that is missing, of another ending or given twice, and for
    a folder without readable files.
    """
    files: list[DataFile] = []
    notes: list[str] = []
    for path in map(Path, paths):
        if not path.exists():
            raise SmeltscopeError(f"{path} does not exist: check --data.")
        if path.is_dir():
            found, note = _find_in_folder(path)
            notes += note
        else:
            kind = _kind(path)
            if kind is None:
                raise SmeltscopeError(
                    f"{path} has an unknown ending: --data takes {', '.join(ENDINGS)}, the first "
                    f"two also with {', '.join(COMPRESSIONS)}, and folders of `datasets`."
                )
            found = [DataFile(path=path, kind=kind)]
        files += found
    seen: set[Path] = set()
    for file in files:
        if file.path.resolve() in seen:
            raise SmeltscopeError(f"{file.path} is given twice: name it once in --data.")
        seen.add(file.path.resolve())
    return files, notes


def categories(file: DataFile) -> list[str]:
    """The categories of its documents, each once, in the order in which they first occur.

    Reads what names them: nothing of text files and token arrays, one column of a table, and
    all of a .jsonl file.
    """
    if file.kind in ("txt", "npy", "bin"):
        return [file.category]
    if file.kind != "jsonl":
        with _reading(file) as link:
            if "category" not in _open_table(file, link, COLUMNS).column_names:
                return [file.category]
    rows = _rows(file, ("category",))
    return list(dict.fromkeys(_named(row, "category", file.category) for _, row in rows))


def documents(
    file: DataFile,
    *,
    token_dtype: str | None = None,
    split_ids: frozenset[int] = frozenset(),
    broken: list[str] | None = None,
) -> Iterator[Document]:
    """The documents of `file`, one at a time.

    Raises SmeltscopeError for a broken line and a row without text; where `broken` is given, it gets the
    sentence instead and the row is passed over.
    """
    if file.kind in ("npy", "bin"):
        stretches = split_documents(open_tokens(file.path, token_dtype), split_ids)
        rows: Iterator[tuple[int, dict]] = enumerate(({"text": s} for s in stretches), 1)
    else:
        rows = _rows(file, COLUMNS, broken)
    row, noted = 0, len(broken or ())
    for row, fields in rows:
        content = fields.get("text")
        if not isinstance(content, str | np.ndarray):
            fault = "no `text`" if content is None else f"a `text` of type {type(content).__name__}"
            error = SmeltscopeError(
                f"{file.path}, row {row} has {fault}: every row needs a `text` that is a string."
            )
            _raise_or_note(error, broken)
            continue
        if file.kind == "txt" and "\0" in content:
            raise SmeltscopeError(f"{file.path} is a binary file: it holds NUL bytes, not text.")
        yield Document(
            id=_named(fields, "id", f"{file.name}:{row}"),
            category=_named(fields, "category", file.category),
            source=_named(fields, "source", ""),
            file=file.name,
            row=row,
            content=content,
        )
    if broken is not None and not row and len(broken) > noted:
        raise SmeltscopeError(
            f"{file.path} has no whole line: all {len(broken) - noted} are broken, the first: {broken[noted]}"
        )
    if not row:
        raise SmeltscopeError(f"{file.path} is empty: it holds no documents.")


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """No progress bars and log lines of `datasets` inside the block: its errors become ours."""
    import datasets

    level = datasets.logging.get_verbosity()
    bars = datasets.is_progress_bar_enabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if bars:
            datasets.enable_progress_bars()


def _kind(path: Path) -> str | None:
    """The ending without the dot and the compression; None where it cannot be read."""
    *before, last = ["", *(suffix.lower() for suffix in path.suffixes)]
    if last in COMPRESSIONS:
        # A table and a token array are read from the middle, which a compressed file has not.
        return before[-1][1:] if before[-1] in (".txt", ".jsonl") else None
    return last[1:] if last in ENDINGS else None


def _find_in_folder(folder: Path) -> tuple[list[DataFile], list[str]]:
    if (folder / "dataset_dict.json").exists():
        try:
            splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
        except (ValueError, KeyError) as error:
            raise SmeltscopeError(
                f"{folder / 'dataset_dict.json'} is damaged: save the dataset again."
            ) from error
        note = (
            f"{folder} has the splits {', '.join(splits)}: all are read, name one to read it only."
        )
        return [DataFile(path=folder / s, kind="dataset") for s in splits], [note]
    if (folder / "state.json").exists():
        return [DataFile(path=folder, kind="dataset")], []
    kinds = {p: _kind(p) for p in sorted(folder.iterdir()) if not p.name.startswith(".")}
    found = [DataFile(path=p, kind=k) for p, k in kinds.items() if k and p.is_file()]
    if not found:
        raise SmeltscopeError(
            f"{folder} holds no file to read: --data takes {', '.join(ENDINGS)} "
            "and what `datasets` saved to disk."
        )
    passed = [p.name for p in kinds if p not in {f.path for f in found}]
    return found, [f"{folder}: passed over {', '.join(passed)}."] if passed else []


def _named(fields: dict[str, Any], key: str, default: str) -> str:
    value = fields.get(key)
    return default if value is None or value == "" else str(value)


def _raise_or_note(error: SmeltscopeError, broken: list[str] | None) -> None:
    if broken is None:
        raise error
    broken.append(str(error))


def _rows(
    file: DataFile, columns: Sequence[str], broken: list[str] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row from 1, fields) of a text file, a .jsonl file or a table."""
    with _reading(file) as link:
        if file.kind == "jsonl":
            for number, line in _read_lines(file, link):
                if line.strip():
                    try:
                        fields = _parse(file, number, line)
                    except SmeltscopeError as error:
                        _raise_or_note(error, broken)
                    else:
                        yield number, fields
        elif file.kind == "txt":
            yield 1, {"text": _read_text(file, link)}
        else:
            yield from enumerate(_open_table(file, link, columns), 1)


@contextmanager
def _reading(file: DataFile) -> Iterator[Path]:
    """A link to the file, in a folder of its own; inside, errors become ours.

    `datasets` takes paths for patterns and addresses ("[1]", "::") and leaves a lock file in its
    cache folder even when it streams, so it is given a plain name in a folder that goes away.
    """
    compression = file.path.suffix.lower()
    ending = f".{file.kind}{compression if compression in COMPRESSIONS else ''}"
    try:
        with tempfile.TemporaryDirectory() as folder:
            link = Path(folder) / f"data{ending}"
            link.symlink_to(file.path.resolve())
            yield link
    except SmeltscopeError:
        raise
    except UnicodeDecodeError as error:
        raise SmeltscopeError(f"{file.path} is not UTF-8 text: {error}.") from error
    except Exception as error:  # whatever the decompressors, Arrow and datasets raise
        raise SmeltscopeError(
            f"{file.path} cannot be read as {file.kind}, it may be damaged or misnamed: "
            f"{type(error).__name__}: {error}"
        ) from error


def _read_lines(file: DataFile, link: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a text file, decompressed, numbered from 1."""
    if not file.path.stat().st_size:
        raise SmeltscopeError(f"{file.path} is empty.")
    if link.suffix == ".zst" and not is_whole_zst(file.path):
        raise SmeltscopeError(
            f"{file.path} is damaged, it is not a whole .zst file: fetch it anew."
        )
    with _decompressed(link) as lines:
        for number, line in enumerate(lines, 1):
            yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line


@contextmanager
def _decompressed(link: Path) -> Iterator[BinaryIO]:
    if link.suffix == ".zst":  # of which fsspec reads the first frame alone
        with link.open("rb") as raw:
            whole = ZstdDecompressor().stream_reader(raw, read_across_frames=True)
            yield BufferedReader(whole)
        return
    with fsspec.open(str(link), "rb", compression="infer") as lines:
        yield lines


def _read_text(file: DataFile, link: Path) -> str:
    text = b"".join(line for _, line in _read_lines(file, link)).decode()
    return text.replace("\r\n", "\n").replace("\r", "\n")


# from_parquet and not load_dataset, which tells a server about each load.
def _open_table(file: DataFile, link: Path, columns: Sequence[str]) -> Any:
    """A streaming `datasets` view of those of `columns` that a .parquet file or dataset has."""
    from datasets import IterableDataset, load_from_disk

    where = {"cache_dir": str(link.parent)}
    if file.kind == "dataset":
        table = load_from_disk(str(link)).with_format(None).to_iterable_dataset()
    else:
        table = IterableDataset.from_parquet(str(link), **where)
    if "text" not in table.column_names:
        raise SmeltscopeError(
            f"{file.path} has no column `text`, its columns are {', '.join(table.column_names)}."
        )
    kept = [name for name in columns if name in table.column_names]
    if file.kind == "dataset":
        return table.select_columns(kept)
    return IterableDataset.from_parquet(str(link), columns=kept, **where)


def _parse(file: DataFile, number: int, line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line.decode())
        str(fields.get("text")).encode()  # half a surrogate pair is no text
    except (ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, UnicodeDecodeError):
            what = f"is not UTF-8 text ({error.reason} at its byte {error.start + 1})"
        elif isinstance(error, ValueError):
            what = f"is broken JSON ({error})"
        else:
            what = "is broken JSON (no object with a `text`)"
        raise SmeltscopeError(
            f"{file.path}, line {number} {what}: mend or remove the line."
        ) from error
    return fields
