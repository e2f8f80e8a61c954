"""Several workers, each with a file of its own, leave the run that one would have left."""

import os
import random
import signal
import time
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest

from smeltscope.activations import RunWriter, Schema, Variable, attributes_of, join_ranks, open_run
from smeltscope.errors import SmeltscopeError

ROWS, STEP, WIDTH = 24, 2, 20_000  # rows of 80 kB: three make a chunk
IDENTITY = {"checkpoint_digest": "c0ffee", "batch_tokens": 64}


def a_schema(**identity) -> Schema:
    return Schema(
        dimensions={
            "segment": np.arange(ROWS),
            "key": np.arange(WIDTH),
            "expert": np.arange(7),
        },
        coordinates={"of_segment": ("segment", np.arange(ROWS) % 5)},
        segments={"category": np.array([f"Ünï{i % 3}" for i in range(ROWS)])},
        groups={
            "a": {
                "wide": Variable(dims=("segment", "key"), description="wide"),
                "narrow": Variable(dims=("segment",), description="narrow", dtype="int32"),
            }
        },
        tables={"a": {"chosen": Variable(dims=("expert",), description="chosen")}},
        identity=IDENTITY | identity,
        attributes={"device": "cpu"},
    )


def ranges_at(*edges: int) -> list[tuple[int, int]]:
    return list(pairwise((0, *edges, ROWS)))


def write(writer: RunWriter, start: int, stop: int) -> None:
    """Every batch up to `stop` that is not done: what each row holds depends on it alone."""
    done = writer.done()
    for first in range(start, stop, STEP):
        last = min(first + STEP, stop)
        if done[first:last].all():
            continue
        wide = [np.random.default_rng(row).standard_normal(WIDTH) for row in range(first, last)]
        chosen = np.array([[2**60 + row] * 7 for row in range(first, last)]) % 1_000_003
        writer.write(
            first,
            last,
            {"a": {"wide": np.array(wide, dtype="f4"), "narrow": np.arange(first, last)}},
            {"a": {"chosen": chosen.sum(0)}},
        )


def rank_file(out: Path, rank: int, ranks: int) -> Path:
    return out.with_name(f"{out.name}.rank{rank}of{ranks}.partial")


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """The run of one process."""
    writer = RunWriter(tmp_path_factory.mktemp("alone") / "run.h5", a_schema())
    write(writer, 0, ROWS)
    return writer.finish({"seconds": 2})


def assert_same(one: Path, other: Path) -> None:
    names = []
    with h5py.File(one) as a, h5py.File(other) as b:
        a.visit(names.append)
        assert "a/wide" in names and len(names) > 8
        for name in names:
            assert dict(a[name].attrs).keys() == dict(b[name].attrs).keys()
            if isinstance(a[name], h5py.Dataset):
                assert a[name].dtype == b[name].dtype and a[name].chunks == b[name].chunks
                if a[name].dtype.kind == "O":
                    assert np.array_equal(a[name][:], b[name][:])
                else:
                    assert a[name][...].tobytes() == b[name][...].tobytes(), name
        assert dict(a.attrs) == dict(b.attrs)
    assert one.read_bytes() == other.read_bytes()


# Borders inside chunks, workers without rows, more workers than batches.
@pytest.mark.parametrize("edges", [(), (8,), (7, 7), (0, 3, 10, 11), (24,), range(1, 24)])
def test_joined_it_is_the_run_of_one(tmp_path, alone, edges):
    out, ranges = tmp_path / "run.h5", ranges_at(*edges)
    for rank, (start, stop) in reversed(list(enumerate(ranges))):
        write(RunWriter(out, a_schema(), ranges=ranges, rank=rank), start, stop)
    assert join_ranks(out, a_schema(), ranges, {"seconds": 2}) == out
    assert list(tmp_path.iterdir()) == [out]
    assert_same(out, alone)
    assert attributes_of(open_run(out))["identity"] == IDENTITY


def test_a_rank_file_is_a_run_of_its_rows(tmp_path):
    out, ranges = tmp_path / "run.h5", ranges_at(10)
    writer = RunWriter(out, a_schema(), ranges=ranges, rank=1)
    assert [p.name for p in tmp_path.iterdir()] == ["run.h5.rank1of2.partial"]
    write(writer, 10, 14)
    assert writer.done().tolist() == [False] * 10 + [True] * 4 + [False] * 10
    run = open_run(rank_file(out, 1, 2))
    assert run["segment"].values.tolist() == list(range(10, 24))
    assert run["a/narrow"].values[:4].tolist() == [10, 11, 12, 13]
    assert run["a"]["of_segment"].values[:3].tolist() == [0, 1, 2]
    assert run["segments/category"].values[0] == "Ünï1"
    assert attributes_of(run)["identity"] == IDENTITY | {"rows": [10, 24]}
    for start, stop in ((9, 11), (0, 2), (22, 25)):
        with pytest.raises(SmeltscopeError, match="not among those"):
            writer.write(start, stop, {})


def test_a_rank_goes_on_where_it_stopped(tmp_path, alone):
    out, ranges = tmp_path / "run.h5", ranges_at(10)
    write(RunWriter(out, a_schema(), ranges=ranges, rank=0), 0, 10)
    write(RunWriter(out, a_schema(), ranges=ranges, rank=1), 10, 14)
    write(RunWriter(out, a_schema(), ranges=ranges, rank=1), 10, 24)
    join_ranks(out, a_schema(), ranges, {"seconds": 2})
    assert_same(out, alone)


@pytest.mark.parametrize(
    ("identity", "edges", "named"),
    [
        ({"batch_tokens": 32}, (10,), "batch_tokens: was 64, is 32"),
        ({}, (12,), r"rows: was \[10, 24\], is \[12, 24\]"),
    ],
)
def test_another_run_is_refused_by_each_rank(tmp_path, identity, edges, named):
    out = tmp_path / "run.h5"
    write(RunWriter(out, a_schema(), ranges=ranges_at(10), rank=1), 10, 14)
    schema, ranges = a_schema(**identity), ranges_at(*edges)
    with pytest.raises(SmeltscopeError, match=named):
        RunWriter(out, schema, ranges=ranges, rank=1)
    assert not RunWriter(out, schema, ranges=ranges, rank=1, force=True).done().any()


@pytest.mark.parametrize(("before", "after"), [((10,), ()), ((), (10,)), ((10,), (8, 16))])
def test_another_number_of_workers_is_refused(tmp_path, before, after):
    out = tmp_path / "a [1] run.h5"  # no pattern
    (tmp_path / "a 1 run.h5.rank0of9.partial").touch()
    write(RunWriter(out, a_schema(), ranges=ranges_at(*before)), 0, 4)
    content = {path: path.read_bytes() for path in tmp_path.iterdir()}
    ranges = ranges_at(*after)
    for rank in range(len(ranges)):
        with pytest.raises(SmeltscopeError, match=r"another number of workers.*--force"):
            RunWriter(out, a_schema(), ranges=ranges, rank=rank)
    assert content == {path: path.read_bytes() for path in tmp_path.iterdir()}
    for rank, (start, stop) in enumerate(ranges):
        writer = RunWriter(out, a_schema(), ranges=ranges, rank=rank, force=True)
        assert not writer.done().any()
        write(writer, start, stop)
    writer.finish()
    assert {p.name for p in tmp_path.iterdir()} == {out.name, "a 1 run.h5.rank0of9.partial"}


def test_files_that_cannot_be_joined_are_named(tmp_path):
    out, ranges = tmp_path / "run.h5", ranges_at(8, 16)
    for rank, (start, stop) in enumerate(ranges):
        write(RunWriter(out, a_schema(), ranges=ranges, rank=rank), start, stop)
    last = rank_file(out, 2, 3)
    content = last.read_bytes()

    def refusal() -> str:
        with pytest.raises(SmeltscopeError) as error:
            join_ranks(out, a_schema(), ranges)
        assert str(last) in str(error.value) and "\n" not in str(error.value)
        assert not out.exists() and rank_file(out, 0, 3).exists()
        assert not (tmp_path / "run.h5.new").exists()
        return str(error.value)

    last.unlink()
    assert "is missing; run the command again" in refusal()
    last.write_bytes(content[:5000])
    assert "no run that can be resumed" in refusal()
    last.unlink()
    write(RunWriter(out, a_schema(), ranges=ranges, rank=2), 16, 20)
    assert "still lacks 4 rows; run the command again" in refusal()
    last.unlink()
    write(RunWriter(out, a_schema(visits=3), ranges=ranges, rank=2), 16, 24)
    assert "visits: was 3, is None" in refusal()
    last.write_bytes(content)
    join_ranks(out, a_schema(), ranges)


@pytest.mark.parametrize(
    "ranges", [[(0, 10)], [(0, 10), (11, 24)], [(0, 12), (10, 24)], [(4, 24)], [(0, 30)]]
)
def test_rows_must_follow_one_another(tmp_path, ranges):
    with pytest.raises(SmeltscopeError, match="do not follow one another from 0 to 24"):
        RunWriter(tmp_path / "run.h5", a_schema(), ranges=ranges)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_workers_at_once_killed_and_run_again(tmp_path, alone):
    out, ranges, rng = tmp_path / "run.h5", ranges_at(7, 15), random.Random(1)

    def worker(rank: int) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                write(RunWriter(out, a_schema(), ranges=ranges, rank=rank), *ranges[rank])
            except BaseException as error:  # noqa: BLE001
                os.write(2, f"in the forked process: {error!r}\n".encode())
                os._exit(1)
            os._exit(0)
        return pid

    killed = 0
    while killed < 4:
        workers = [worker(rank) for rank in range(3)]
        time.sleep(rng.random() * 0.1)
        os.kill(rng.choice(workers), signal.SIGKILL)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in workers]
        assert set(statuses) <= {0, -signal.SIGKILL}
        killed += -signal.SIGKILL in statuses
        if killed < 4 and -signal.SIGKILL not in statuses:
            for rank in range(3):
                rank_file(out, rank, 3).unlink()
    for pid in [worker(rank) for rank in range(3)]:
        assert os.waitpid(pid, 0)[1] == 0
    join_ranks(out, a_schema(), ranges, {"seconds": 2})
    assert_same(out, alone)
    assert list(tmp_path.iterdir()) == [out]
