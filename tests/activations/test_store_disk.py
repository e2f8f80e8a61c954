"""New files: memory that does not grow with them, disks that fill up at any moment, Ctrl-C."""

import errno
import io
import os
import random
import resource
import signal
import sys
import time

import numpy as np
import pytest

from smeltscope.activations import RunWriter, Schema, Variable, hdf5, open_run
from smeltscope.activations.hdf5 import _NewFile
from smeltscope.errors import SmeltscopeError

ROWS = 40
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")


def a_schema(rows: int = ROWS, width: int = 5000) -> Schema:
    row = Variable(dims=("segment", "key"), description="a row")
    return Schema(
        dimensions={"segment": np.arange(rows), "key": np.arange(width)},
        coordinates={"label": ("key", np.array([f"key {i}" for i in range(width)]))},
        segments={"document": np.arange(rows)},
        groups={"a": {"x": row, "y": row}, "b": {"x": row}},
        tables={"a": {"n": Variable(dims=("key",), description="a table")}},
    )


def fill(writer: RunWriter, rows: int = ROWS, width: int = 5000) -> None:
    values = np.random.default_rng(0).standard_normal((rows, width)).astype("f4")
    writer.write(0, rows, {"a": {"x": values, "y": values + 1}, "b": {"x": values + 2}})


class Failing(io.RawIOBase):
    """A disk that takes so many bytes, and then none, nor anything else."""

    def __init__(self, disk: io.FileIO, room: int) -> None:
        self.disk, self.room = disk, room

    def write(self, data) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self.disk.write(data[: self.room])  # a system writes what fits
        self.room -= written
        return written

    def truncate(self, size) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.disk.truncate(size)

    def seek(self, *arguments) -> int:
        return self.disk.seek(*arguments)

    def readinto(self, buffer) -> int:
        return self.disk.readinto(buffer[:1000])  # a system may read less than was asked for


@pytest.mark.parametrize("room", [0, 1, 5000, 10**9])
def test_a_new_file_reads_back_what_was_written(tmp_path, room):
    """Against BytesIO, whether the disk takes it or not; errors are kept for `check`."""
    rng, model = random.Random(room), io.BytesIO()
    with (tmp_path / "new").open("w+b", buffering=0) as raw:
        file = _NewFile(Failing(raw, room))
        for _ in range(500):
            data = rng.randbytes(rng.choice((1, 7, 100, 2000)))
            at = rng.randrange(20_000)
            if rng.random() < 0.5:
                assert file.seek(at) == model.seek(at)
                assert file.write(data) == model.write(data)
            else:
                assert file.seek(0, io.SEEK_END) == len(model.getvalue())
                got = bytearray(b"x" * 3000)
                file.seek(at)
                assert file.readinto(got) == 3000
                assert got == model.getvalue()[at : at + 3000].ljust(3000, b"\0")
        size = len(model.getvalue())
        assert file.truncate(size + 10) == size + 10 == file.seek(0, io.SEEK_END)
        if room < 10**9:
            with pytest.raises(OSError, match="No space left"):
                file.check()
        else:
            file.check()
            assert (tmp_path / "new").read_bytes() == model.getvalue() + bytes(10)


def in_another_process(work) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except SmeltscopeError as error:
            os._exit(2 if "The disk is full" in str(error) else 1)
        except KeyboardInterrupt:
            os._exit(3)
        except BaseException as error:  # noqa: BLE001
            os.write(2, f"in the forked process: {error!r}\n".encode())
            os._exit(1)
        os._exit(0)
    return pid


@forks
@pytest.mark.parametrize("stage", ["start", "finish"])
def test_a_disk_that_fills_up_at_any_moment(tmp_path, monkeypatch, stage):
    """Always the sentence, never a process that HDF5 ends; nothing is left of the new file."""
    out, schema = tmp_path / "run.h5", a_schema()
    partial = tmp_path / "run.h5.partial"
    if stage == "start":
        full = 3 * ROWS * 5000 * 4
        kept: list = []
    else:
        fill(RunWriter(out, schema))
        full, kept = 2_000_000, [partial]

    def work() -> None:
        monkeypatch.setattr(hdf5, "_NewFile", lambda raw: _NewFile(Failing(raw, room)))
        writer = RunWriter(out, schema)
        if stage == "finish":
            writer.finish()

    rng = random.Random(0)
    for room in [0, 1, 100, 2000, 4097, *(rng.randrange(full) for _ in range(10))]:
        status = os.waitpid(in_another_process(work), 0)[1]
        assert os.waitstatus_to_exitcode(status) == 2, room
        assert list(tmp_path.iterdir()) == kept
    if stage == "start":
        fill(RunWriter(out, schema))
    RunWriter(out, schema).finish()
    assert open_run(out)["a/x"].notnull().all()


@forks
def test_a_limit_of_the_system(tmp_path):
    """Another error than a full disk, raised by the system itself."""
    out = tmp_path / "run.h5"

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
        with pytest.raises(SmeltscopeError, match=r"could not be written: .*File too large"):
            RunWriter(out, a_schema())

    assert os.waitpid(in_another_process(work), 0)[1] == 0
    assert list(tmp_path.iterdir()) == []


@forks
def test_interrupted_at_any_moment(tmp_path):
    """Ctrl-C while a file is made is an interrupt as any other: never a crash, nothing is left."""
    out, schema, rng = tmp_path / "run.h5", a_schema(), random.Random(0)
    fill(RunWriter(out, schema))
    begun, begin = os.pipe()

    def work() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        writer = RunWriter(out, schema)
        os.write(begin, b".")
        writer.finish()

    interrupted = 0
    while interrupted < 8:
        pid = in_another_process(work)
        os.read(begun, 1)
        time.sleep(rng.random() * 0.2)
        os.kill(pid, signal.SIGINT)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status in (0, 3)
        interrupted += status == 3
        assert [p.name for p in tmp_path.iterdir()] == ["run.h5" + (".partial" if status else "")]
        if status == 0:
            out.unlink()
            fill(RunWriter(out, schema))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    RunWriter(out, schema).finish()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_a_kill_left_of_a_new_file_is_replaced(tmp_path):
    out = tmp_path / "run.h5"
    for name in ("run.h5.new", "run.h5.partial.new"):
        (tmp_path / name).write_bytes(b"half a file" * 1000)
    writer = RunWriter(out, a_schema())
    fill(writer)
    writer.finish()
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.skipif(sys.platform != "linux", reason="units of ru_maxrss")
def test_memory_does_not_grow_with_the_file(tmp_path):
    """Made, written and packed, 200 MB of rows take less than 20 MB."""
    rows, width, step = 2000, 25_000, 10
    row = Variable(dims=("segment", "key"), description="200 MB")
    sizes = {"segment": np.arange(rows), "key": np.arange(width)}
    schema = Schema(dimensions=sizes, coordinates={}, segments={}, groups={"a": {"row": row}})

    def peak() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # MB

    def work() -> None:
        before = peak()
        writer = RunWriter(tmp_path / "run.h5", schema)
        values = np.zeros((step, width), dtype="f4")
        for start in range(0, rows, step):
            writer.write(start, start + step, {"a": {"row": values}})
        assert (tmp_path / "run.h5.partial").stat().st_size > 200e6
        writer.finish()
        assert peak() - before < 20, peak() - before

    assert os.waitpid(in_another_process(work), 0)[1] == 0
