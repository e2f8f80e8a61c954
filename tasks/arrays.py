"""Token arrays on disk (.npy, .bin): memory-mapped, and split into documents at given tokens."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from smeltscope.errors import SmeltscopeError

BLOCK = 1 << 20  # tokens looked at in one go


def open_tokens(path: Path, dtype: str | None) -> np.ndarray:
    """The token ids in `path`, (tokens,) of an integer type, memory-mapped.

    A .npy file knows its type; a .bin file holds nothing but the numbers, so `dtype` names it.
    Raises SmeltscopeError for anything else than a row of integers.
    """
    if path.suffix.lower() == ".npy":
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise SmeltscopeError(f"{path} is not a readable .npy file: {error}") from error
    else:
        array = _open_bin(path, dtype)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise SmeltscopeError(
            f"{path} holds {array.dtype} numbers of shape {array.shape}: token arrays are integers "
            "in one row, one document after another."
        )
    if not len(array):
        raise SmeltscopeError(f"{path} is empty: it holds no tokens.")
    return array


def split_documents(tokens: np.ndarray, split_ids: frozenset[int]) -> Iterator[np.ndarray]:
    """The stretches of `tokens` between tokens in `split_ids`, which belong to no document.

    It doesn't matter whether they end documents or begin them: a run of them parts two documents,
    one at either end of the array parts nothing. Without `split_ids` all is one document.
    """
    begin, wanted = 0, sorted(split_ids)
    for offset in range(0, len(tokens), BLOCK):
        for cut in np.flatnonzero(np.isin(tokens[offset : offset + BLOCK], wanted)) + offset:
            if cut > begin:
                yield tokens[begin:cut]
            begin = int(cut) + 1
    if begin < len(tokens):
        yield tokens[begin:]


def _open_bin(path: Path, name: str | None) -> np.ndarray:
    if name is None:
        raise SmeltscopeError(
            f"{path} holds bare numbers: name their type with --token-dtype, e.g. uint16."
        )
    try:
        dtype = np.dtype(name)
    except TypeError as error:
        raise SmeltscopeError(f"--token-dtype {name} is no type of numpy: try uint16.") from error
    if dtype.kind not in "iu":
        raise SmeltscopeError(f"--token-dtype {name} is no integer type: try uint16 or uint32.")
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise SmeltscopeError(
            f"{path} has {size} bytes, no multiple of the {dtype.itemsize} of {name}: "
            "give its own type with --token-dtype."
        )
    return np.memmap(path, dtype=dtype, mode="r") if size else np.empty(0, dtype=dtype)
