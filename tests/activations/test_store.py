"""The run file: its protocol under kills, full disks, other processes and other people's files."""

import dataclasses
import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
import xarray as xr

from smeltscope.activations import RunWriter, Schema, Variable, attributes_of, hdf5, open_run, store
from smeltscope.errors import SmeltscopeError

ROWS, EXECUTIONS, HEADS = 60, 5, 4
NAMES = [f"array_{i}" for i in range(6)]
IDENTITY = {"checkpoint_digest": "c0ffee", "data_digest": "da7a", "visits": 2, "seed": 0}


def a_schema(rows: int = ROWS, heads: int = HEADS, **identity) -> Schema:
    by_head = ("segment", "execution", "head")
    arrays = {n: Variable(dims=by_head, description=f"about {n}", units="nats") for n in NAMES}
    return Schema(
        dimensions={
            "segment": np.arange(rows),
            "execution": np.arange(EXECUTIONS),
            "head": np.arange(heads),
        },
        coordinates={
            "layer": ("execution", np.array([0, 1, 2, 1, 2])),
            "visit": ("execution", np.array([1, 1, 1, 2, 2])),
            "module": ("execution", np.array([f"layers[{i}]" for i in range(EXECUTIONS)])),
        },
        segments={
            "document": np.arange(rows) // 2,
            "category": np.array(["Ünïcode, code" if i % 2 else "prose" for i in range(rows)]),
            "tokens": np.arange(rows) + 2,
        },
        groups={"a_probe": arrays},
        group_attributes={
            "a_probe": {"definition": "A[q, 0]", "options": {"include_first": False}}
        },
        identity=IDENTITY | identity,
        attributes={"model_config": {"vocab_size": 256}, "checkpoint": "tiny"},
    )


def numbers(rows: int = ROWS, heads: int = HEADS) -> dict[str, np.ndarray]:
    """What a whole run measures; random, so that it does not compress away."""
    rng = np.random.default_rng(0)
    return {n: rng.standard_normal((rows, EXECUTIONS, heads)).astype("f4") for n in NAMES}


def write(writer: RunWriter, start: int, stop: int, truth: dict[str, np.ndarray]) -> None:
    writer.write(start, stop, {"a_probe": {n: a[start:stop] for n, a in truth.items()}})


def partial_of(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


def assert_done_rows_are_right(path: Path, truth: dict[str, np.ndarray]) -> np.ndarray:
    run = open_run(path)
    done = run["segments/done"].values.astype(bool)
    for name, values in truth.items():
        assert np.array_equal(run["a_probe"][name].values[done], values[done])
    return done


def test_rows_are_there_from_the_start(tmp_path):
    out = tmp_path / "run.h5"
    writer = RunWriter(out, a_schema())
    assert not out.exists()
    run = open_run(partial_of(out))
    for name in NAMES:
        assert run["a_probe"][name].shape == (ROWS, EXECUTIONS, HEADS)
        assert run["a_probe"][name].isnull().all()
        assert run["a_probe"][name].dtype == np.float32
    assert not writer.done().any()


def test_it_opens_at_any_moment(tmp_path):
    out, truth = tmp_path / "run.h5", numbers()
    writer = RunWriter(out, a_schema())
    for start in range(0, ROWS, 10):
        write(writer, start, start + 10, truth)
        run = open_run(partial_of(out))
        assert run["segments/done"].values.tolist() == [1] * (start + 10) + [0] * (50 - start)
        for name in NAMES:
            assert np.array_equal(
                run["a_probe"][name].values[: start + 10], truth[name][: start + 10]
            )
            assert np.isnan(run["a_probe"][name].values[start + 10 :]).all()
    assert writer.finish({"seconds": 3.5}) == out
    assert list(tmp_path.iterdir()) == [out]
    assert assert_done_rows_are_right(out, truth).all()
    attributes = attributes_of(open_run(out))
    assert attributes["seconds"] == 3.5
    assert attributes["identity"] == IDENTITY
    assert attributes["model_config"] == {"vocab_size": 256}


def test_some_groups_alone(tmp_path):
    """Of a run with many probes a page may hold one at a time; labels and segments always come along."""
    out, schema, truth = tmp_path / "run.h5", a_schema(), numbers()
    groups = {name: schema.groups["a_probe"] for name in ("first", "second", "third")}
    writer = RunWriter(out, dataclasses.replace(schema, groups=groups))
    writer.write(0, ROWS, {name: truth for name in groups})
    for path in (partial_of(out), out):
        assert set(open_run(path).children) == {"segments", "first", "second", "third"}
        run = open_run(path, groups=["second"])
        assert set(run.children) == {"segments", "second"}
        assert np.array_equal(run["second/array_0"], truth["array_0"])
        assert run["second"]["visit"].values.tolist() == [1, 1, 1, 2, 2]
        assert run["segments/done"].all()
        assert attributes_of(run)["identity"] == IDENTITY
        assert set(open_run(path, groups=[]).children) == {"segments"}
        with pytest.raises(SmeltscopeError, match="no group fourth; it has first, second"):
            open_run(path, groups=["first", "fourth"])
        if path != out:
            writer.finish()


def test_left_in_the_file(tmp_path):
    out, truth = tmp_path / "run.h5", numbers()
    writer = RunWriter(out, a_schema())
    write(writer, 0, ROWS, truth)
    unfinished = open_run(writer.path, lazy=True)  # it is about to go: in memory
    writer.finish()
    assert unfinished.equals(open_run(out))
    run = open_run(out, lazy=True)
    array = run["a_probe"][NAMES[0]]
    keep = np.array([5, 3, 40])
    assert np.array_equal(array.values, truth[NAMES[0]])
    assert np.array_equal(run.isel(segment=keep)["a_probe"][NAMES[0]], truth[NAMES[0]][keep])
    assert np.array_equal(
        array.isel(head=[2, 0], execution=1)[::7], truth[NAMES[0]][::7, 1, [2, 0]]
    )
    assert run.identical(open_run(out))
    with h5py.File(out, "r+") as file:  # nothing of it was kept
        file["a_probe"][NAMES[0]][...] = 7
    assert (array.values == 7).all()


def test_unfinished_runs_do_not_get_their_name(tmp_path):
    out = tmp_path / "run.h5"
    writer = RunWriter(out, a_schema())
    write(writer, 0, 59, numbers())
    with pytest.raises(SmeltscopeError, match="lacks 1 rows"):
        writer.finish()
    assert [p.name for p in tmp_path.iterdir()] == ["run.h5.partial"]


def test_batches_may_come_in_any_order(tmp_path):
    out, truth = tmp_path / "run.h5", numbers()
    writer = RunWriter(out, a_schema())
    for start in (40, 0, 20):
        write(writer, start, start + 20, truth)
    writer.finish()
    assert assert_done_rows_are_right(out, truth).all()


def forked(work) -> int:
    """Run `work` in another process, without its clean-up; its process id."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:  # noqa: BLE001
            os.write(2, f"in the forked process: {error!r}\n".encode())
            os._exit(1)
        os._exit(0)
    return pid


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_killed_at_random_moments(tmp_path):
    """Always a file that opens, with rows that are right where it says so; the next run goes on."""
    out, rows = tmp_path / "run.h5", 400
    truth, schema = numbers(rows), a_schema(rows)

    def work() -> None:
        writer = RunWriter(out, schema)
        done = writer.done()
        for start in range(0, rows, 4):
            if not done[start : start + 4].all():
                write(writer, start, start + 4, truth)
        writer.finish()

    rng, before, kills = random.Random(0), 0, 0
    for _ in range(10):
        pid = forked(work)
        time.sleep(0.02 + rng.random() * 0.1)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
        kills += status != 0
        if partial_of(out).exists():
            done = assert_done_rows_are_right(partial_of(out), truth)
            assert done.sum() >= before
            before = done.sum()
        elif out.exists():
            assert assert_done_rows_are_right(out, truth).all()
            out.unlink()
            before = 0
    assert kills > 0
    out.unlink(missing_ok=True)
    work()
    assert assert_done_rows_are_right(out, truth).all()
    assert not partial_of(out).exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_killed_while_it_is_packed(tmp_path):
    out, truth = tmp_path / "run.h5", numbers()
    writer = RunWriter(out, a_schema())
    write(writer, 0, ROWS, truth)

    def work() -> None:
        copy = store._copy

        def slowly(*files) -> None:
            copy(*files)
            os.kill(os.getpid(), signal.SIGKILL)

        store._copy = slowly
        writer.finish()

    os.waitpid(forked(work), 0)
    assert not out.exists()
    again = RunWriter(out, a_schema())
    assert again.done().all()
    again.finish()
    assert assert_done_rows_are_right(out, truth).all()
    assert list(tmp_path.iterdir()) == [out]


def test_resuming_goes_on_at_the_first_row_not_done(tmp_path):
    out, truth = tmp_path / "run.h5", numbers()
    write(RunWriter(out, a_schema()), 0, 20, truth)
    again = RunWriter(out, a_schema())
    assert again.done().tolist() == [True] * 20 + [False] * 40
    write(again, 20, ROWS, truth)
    again.finish()
    assert assert_done_rows_are_right(out, truth).all()


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"checkpoint_digest": "bad"}, "checkpoint_digest: was 'c0ffee', is 'bad'"),
        ({"data_digest": "other"}, "data_digest: was 'da7a', is 'other'"),
        ({"visits": 3}, "visits: was 2, is 3"),
        (
            {"probes": {"attention-sink": {"include_first": True}}},
            "probes.attention-sink.include_first: was None, is True",
        ),
    ],
)
def test_another_run_is_refused_and_what_changed_is_named(tmp_path, changed, named):
    out = tmp_path / "run.h5"
    write(RunWriter(out, a_schema()), 0, 20, numbers())
    content = partial_of(out).read_bytes()
    with pytest.raises(SmeltscopeError) as refusal:
        RunWriter(out, a_schema(**changed))
    assert named in str(refusal.value)
    assert "--force" in str(refusal.value)
    assert partial_of(out).read_bytes() == content
    assert not RunWriter(out, a_schema(**changed), force=True).done().any()


def test_identity_survives_json(tmp_path):
    """Tuples, numbers of numpy and Path objects are the same run when they come back."""
    identity = {"paths": (Path("a"), "b"), "n": np.int64(3), "x": 0.1, "none": None}
    out = tmp_path / "run.h5"
    RunWriter(out, a_schema(**identity))
    RunWriter(out, a_schema(**identity))


def test_a_finished_run_is_not_overwritten(tmp_path):
    out, truth = tmp_path / "run.h5", numbers()
    writer = RunWriter(out, a_schema())
    write(writer, 0, ROWS, truth)
    writer.finish()
    content = out.read_bytes()
    with pytest.raises(SmeltscopeError, match=r"exists already.*--force"):
        RunWriter(out, a_schema())
    assert out.read_bytes() == content
    again = RunWriter(out, a_schema(), force=True)
    assert out.read_bytes() == content  # it stays until the new one is complete
    write(again, 0, ROWS, {n: a + 1 for n, a in truth.items()})
    again.finish()
    assert assert_done_rows_are_right(out, {n: a + 1 for n, a in truth.items()}).all()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 240 kB, filled by what a test writes."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=240k", "tmpfs", str(folder)]
    try:
        made = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        made = False
    if not made:
        pytest.skip("a small tmpfs can only be mounted by root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_at_the_start(small_disk):
    with pytest.raises(SmeltscopeError, match="The disk is full"):
        RunWriter(small_disk / "run.h5", a_schema(rows=800))
    assert list(small_disk.iterdir()) == []


def test_a_full_disk_at_the_end(small_disk):
    """The measured rows are kept: with space, the same command finishes."""
    out, truth = small_disk / "run.h5", numbers(160)
    writer = RunWriter(out, a_schema(160))
    hog = small_disk / "hog"
    with hog.open("wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(4096))
    write(writer, 0, 160, truth)  # its place was taken at the start
    with pytest.raises(SmeltscopeError, match="The disk is full") as refusal:
        writer.finish()
    assert "\n" not in str(refusal.value)
    assert {p.name for p in small_disk.iterdir()} == {"hog", "run.h5.partial"}
    assert assert_done_rows_are_right(partial_of(out), truth).all()
    hog.unlink()
    again = RunWriter(out, a_schema(160))
    assert again.done().all()
    again.finish()
    assert list(small_disk.iterdir()) == [out]
    assert assert_done_rows_are_right(out, truth).all()


def test_a_full_disk_anywhere(tmp_path, monkeypatch):
    """For machines on which no small disk can be made."""

    def full(*_, **__) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store, "_allocate", full)
    with pytest.raises(SmeltscopeError, match="The disk is full"):
        RunWriter(tmp_path / "run.h5", a_schema())
    assert list(tmp_path.iterdir()) == []


def test_folders_that_cannot_be_written(tmp_path):
    with pytest.raises(SmeltscopeError, match="does not exist; make it first"):
        RunWriter(tmp_path / "missing" / "run.h5", a_schema())
    with pytest.raises(SmeltscopeError, match="is a folder; name a file in it"):
        RunWriter(tmp_path, a_schema())
    if Path("/proc/sys").is_dir():  # not even root can make a file there
        with pytest.raises(SmeltscopeError, match=r"cannot be written.*choose another folder"):
            RunWriter("/proc/sys/run.h5", a_schema())
    folder = tmp_path / "closed"
    folder.mkdir()
    folder.chmod(0o500)
    if os.geteuid() != 0:
        with pytest.raises(SmeltscopeError, match="cannot be written"):
            RunWriter(folder / "run.h5", a_schema())
    folder.chmod(0o700)


def test_reading_leaves_nothing_open(tmp_path):
    """A page that looks at a run must not stop the run."""
    out, truth = tmp_path / "run.h5", numbers()
    writer = RunWriter(out, a_schema())
    run = open_run(partial_of(out))
    write(writer, 0, ROWS, truth)
    writer.finish()
    assert run["a_probe/array_0"].isnull().all()  # what it was then


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_reader_and_a_writer_at_once(tmp_path):
    out, rows = tmp_path / "run.h5", 400
    truth, schema = numbers(rows), a_schema(rows)
    writer = RunWriter(out, schema)

    def work() -> None:
        for start in range(0, rows, 4):
            write(writer, start, start + 4, truth)

    pid, reads = forked(work), 0
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        assert_done_rows_are_right(partial_of(out), truth)
        reads += 1
    assert reads > 0
    assert writer.done().all()


def test_a_reader_and_a_writer_in_one_process(tmp_path):
    out, truth = tmp_path / "run.h5", numbers()
    writer, failures = RunWriter(out, a_schema()), []

    def read() -> None:
        try:
            for _ in range(10):
                assert_done_rows_are_right(partial_of(out), truth)
        except Exception as error:  # noqa: BLE001
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for start in range(0, ROWS, 2):
        write(writer, start, start + 2, truth)
    reader.join()
    assert failures == []


_HOLD = "import h5py, sys, time; f = h5py.File(sys.argv[1], 'r+'); print('held', flush=True); time.sleep(.4)"


def test_a_locked_file_is_waited_for(tmp_path):
    out = tmp_path / "run.h5"
    writer = RunWriter(out, a_schema())
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(partial_of(out))], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    assert open_run(partial_of(out))["segments/done"].sum() == 0
    write(writer, 0, ROWS, numbers())
    process.communicate()


def test_a_lock_that_stays_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(hdf5, "PATIENCE", 0.1)
    out = tmp_path / "run.h5"
    writer = RunWriter(out, a_schema())
    with h5py.File(partial_of(out), "r"), pytest.raises(SmeltscopeError, match="be written"):
        write(writer, 0, 4, numbers())


def test_files_that_are_no_runs(tmp_path):
    with pytest.raises(SmeltscopeError, match="There is no run file"):
        open_run(tmp_path / "missing.h5")
    with pytest.raises(SmeltscopeError, match="There is no run file"):
        open_run(tmp_path)
    text = tmp_path / "text.h5"
    text.write_text("not a run\n" * 100)
    with pytest.raises(SmeltscopeError, match="no HDF5 file, or a damaged one"):
        open_run(text)
    (tmp_path / "empty.h5").touch()
    with pytest.raises(SmeltscopeError, match="no HDF5 file, or a damaged one"):
        open_run(tmp_path / "empty.h5")
    foreign = tmp_path / "foreign.h5"
    with h5py.File(foreign, "w") as file:
        file["x"] = np.arange(3)
    with pytest.raises(SmeltscopeError, match="no run file of smeltscope"):
        open_run(foreign)
    with h5py.File(foreign, "r+") as file:
        file.attrs["smeltscope_schema"] = 99
    with pytest.raises(SmeltscopeError, match="schema 99; this smeltscope reads schema 1"):
        open_run(foreign)


def test_damaged_runs(tmp_path):
    out = tmp_path / "run.h5"
    writer = RunWriter(out, a_schema())
    write(writer, 0, ROWS, numbers())
    content = writer.finish().read_bytes()
    cut = tmp_path / "cut.h5"
    cut.write_bytes(content[: len(content) // 2])
    with pytest.raises(SmeltscopeError, match="damaged"):
        open_run(cut)
    cut.write_bytes(content[:-20_000] + bytes(20_000))  # whole, but its last numbers are gone
    with pytest.raises(SmeltscopeError, match="damaged"):
        open_run(cut)


@pytest.mark.parametrize("content", [b"", b"not a run", None])
def test_a_partial_file_of_someone_else(tmp_path, content):
    out = tmp_path / "run.h5"
    if content is None:
        with h5py.File(partial_of(out), "w") as file:
            file["x"] = np.arange(3)
    else:
        partial_of(out).write_bytes(content)
    with pytest.raises(
        SmeltscopeError, match="no run that can be resumed; delete it, or pass --force"
    ):
        RunWriter(out, a_schema())
    RunWriter(out, a_schema(), force=True)


def test_names_for_other_readers(tmp_path):
    """Plain h5py and xarray find the dimensions; their scales stand at the root alone."""
    out, truth = tmp_path / "run.h5", numbers()
    writer = RunWriter(out, a_schema())
    write(writer, 0, ROWS, truth)
    writer.finish()
    with h5py.File(out) as file:
        scales = []
        file.visititems(
            lambda name, node: (
                scales.append(name) if isinstance(node, h5py.Dataset) and node.is_scale else None
            )
        )
        assert sorted(scales) == ["execution", "head", "segment"]
        array = file["a_probe/array_0"]
        named = [dimension[0].name for dimension in array.dims]
        assert named == ["/segment", "/execution", "/head"]
        assert dict(array.attrs.items())["units"] == "nats"
        assert array.attrs["description"] == "about array_0"
        assert file["segments/category"].asstr()[1] == "Ünïcode, code"
        assert file["segments/done"].dims[0][0].name == "/segment"
        assert file["a_probe"].attrs["definition"] == "A[q, 0]"
        assert array.compression == "gzip" and array.compression_opts == 1 and array.shuffle
        assert np.array_equal(array[:], truth["array_0"])
    with xr.open_datatree(out, engine="h5netcdf") as tree:
        assert tree["a_probe/array_0"].dims == ("segment", "execution", "head")
        assert tree["visit"].dims == ("execution",)
    with xr.open_dataset(out, engine="h5netcdf", group="a_probe") as group:
        assert group["array_0"].dims == ("segment", "execution", "head")
    run = open_run(out)
    looped = run["a_probe"].dataset.isel(execution=run["a_probe"]["visit"] == 2)
    assert looped["layer"].values.tolist() == [1, 2]
    assert looped["module"].values.tolist() == ["layers[3]", "layers[4]"]


def test_an_unreadable_array_stops_no_other_thread(tmp_path):
    """Its error, kept by whoever caught it, must not keep h5py's lock."""
    path = tmp_path / "run.h5"
    writer = RunWriter(path, a_schema())
    write(writer, 0, ROWS, numbers())
    writer.finish()
    with h5py.File(path) as file:
        dataset = file["a_probe"][NAMES[2]]
        place = dataset.id.get_chunk_info(0).byte_offset
    with path.open("r+b") as raw:
        raw.seek(place)
        raw.write(b"\xff" * 64)
    with pytest.raises(SmeltscopeError) as caught:
        open_run(path)
    read = threading.Thread(target=lambda: h5py.File(path).close(), daemon=True)
    read.start()
    read.join(timeout=10)
    assert not read.is_alive(), caught.value
