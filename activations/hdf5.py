"""HDF5 files beside processes that read them and on disks that fill up."""

import errno
import io
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import h5py

from smeltscope.errors import SmeltscopeError

PATIENCE = 10.0  # seconds that a locked file is waited for
_one_at_a_time = threading.RLock()  # HDF5 locks files between processes, not between threads
_File = TypeVar("_File", bound=Any)


@contextmanager
def waiting(open_file: Callable[[], _File]) -> Iterator[_File]:
    """Open for a moment, alone in this process; wait while another process holds the file."""
    with _one_at_a_time:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                file = open_file()
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
        with file:
            yield file


@contextmanager
def opened(path: Path, mode: str) -> Iterator[h5py.File]:
    """A file in place, opened for a moment."""
    with waiting(lambda: h5py.File(path, mode)) as file:
        yield file


@contextmanager
def replacing(path: Path) -> Iterator[tuple[h5py.File, Callable[[], None]]]:
    """A new file that takes the place of `path` when it is complete, and leaves nothing when it fails.

    Comes with a function to call now and then: it raises the error that stopped the file, if there was one.
    """
    new = path.with_name(path.name + ".new")
    try:
        with new.open("w+b", buffering=0) as raw:
            disk = _NewFile(raw)
            with disk.deferring_interrupts(), h5py.File(disk, "w") as file:
                yield file, disk.check
            disk.check()
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


@contextmanager
def errors_named(out: Path) -> Iterator[None]:
    """What the operating system has against writing `out`, in a sentence."""
    try:
        yield
    except OSError as error:
        # HDF5 hides the number in its text.
        if error.errno == errno.ENOSPC or f"errno = {errno.ENOSPC}" in str(error):
            raise SmeltscopeError(
                f"The disk is full: {out} could not be written; free some space and run the "
                "command again, or choose another --out."
            ) from error
        raise SmeltscopeError(f"{out} could not be written: {error}.") from error


class _NewFile(io.RawIOBase):
    """A new file on disk that never fails under HDF5, which ends the process when it cannot close a file.

    The first error is kept for `check`. What is written from then on stays in memory, so that HDF5 reads back
    what it wrote until the file is closed and thrown away.
    """

    def __init__(self, disk: io.FileIO) -> None:
        self._disk = disk
        self._position = self._size = 0
        self._error: BaseException | None = None
        self._kept: list[tuple[int, bytes]] = []  # (position, data)

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    @contextmanager
    def deferring_interrupts(self) -> Iterator[None]:
        """Ctrl-C becomes the file's error: raised inside a method that HDF5 calls, it would end the process too."""
        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(before):
            yield  # nothing interrupts other threads, nor where it is ignored
            return
        signal.signal(signal.SIGINT, lambda *_: self._keep(KeyboardInterrupt()))
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _keep(self, error: BaseException) -> None:
        self._error = self._error or error

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (self._size if whence == io.SEEK_END else 0)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        """All of the buffer: zeros where nothing was written."""
        start, stop = self._position, self._position + len(buffer)
        view, read = memoryview(buffer).cast("B"), 0
        try:
            self._disk.seek(start)
            while count := self._disk.readinto(view[read:]):
                read += count
        except OSError as error:
            self._keep(error)
        view[read:] = bytes(len(view) - read)
        for position, data in self._kept:
            first, last = max(start, position), min(stop, position + len(data))
            if first < last:
                view[first - start : last - start] = data[first - position : last - position]
        self._position = stop
        return len(view)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._error is None:
            try:
                self._disk.seek(self._position)
                written = 0
                while written < len(view):
                    written += self._disk.write(view[written:])
            except OSError as error:
                self._keep(error)
        if self._error is not None:
            self._kept.append((self._position, bytes(view)))
        self._position += len(view)
        self._size = max(self._size, self._position)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        self._size = self._position if size is None else size
        try:
            self._disk.truncate(self._size)
        except OSError as error:
            self._keep(error)
        return self._size
