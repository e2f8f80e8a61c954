"""Tables of the run file: integers that every batch adds to, exact under kills at any moment."""

import os
import random
import signal
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import h5py
import numpy as np
import pytest
import xarray as xr

from smeltscope.activations import RunWriter, Schema, Variable, open_run
from smeltscope.errors import SmeltscopeError

CATEGORIES, FOLDS, EXECUTIONS, EXPERTS = 3, 2, 5, 8
DIMS = ("table_category", "fold", "execution", "expert")
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")


def a_schema(rows: int, experts: int = EXPERTS, heads: int = 4) -> Schema:
    row = Variable(dims=("segment", "execution", "head"), description="a row")
    chosen = Variable(dims=DIMS, description="how often an expert was chosen", units="tokens")
    both = Variable(dims=("execution", "expert"), description="chosen twice", dtype="int32")
    return Schema(
        dimensions={
            "segment": np.arange(rows),
            "execution": np.arange(EXECUTIONS),
            "head": np.arange(heads),
            "table_category": np.array(["code", "prose", "Ünïcode"]),
            "fold": np.arange(FOLDS),
            "expert": np.arange(experts),
        },
        coordinates={"visit": ("execution", np.array([1, 1, 1, 2, 2]))},
        segments={"document": np.arange(rows)},
        groups={"overlap": {"row": row}, "rows_only": {"row": row}},
        tables={"overlap": {"chosen": chosen}, "tables_only": {"both": both}},
    )


class Truth:
    """What each row holds and adds."""

    def __init__(self, rows: int, experts: int = EXPERTS, heads: int = 4) -> None:
        rng = np.random.default_rng(0)
        self.row = rng.standard_normal((rows, EXECUTIONS, heads)).astype("f4")
        shape = (rows, CATEGORIES, FOLDS, EXECUTIONS, experts)
        self.chosen = rng.integers(0, 100, shape)
        self.both = rng.integers(0, 100, (rows, EXECUTIONS, experts))

    def write(self, writer: RunWriter, start: int, stop: int) -> None:
        rows = slice(start, stop)
        writer.write(
            start,
            stop,
            {"overlap": {"row": self.row[rows]}, "rows_only": {"row": self.row[rows]}},
            {
                "overlap": {"chosen": self.chosen[rows].sum(0)},
                "tables_only": {"both": self.both[rows].sum(0)},
            },
        )

    def assert_right(self, path: Path) -> np.ndarray:
        """Rows are right where they are done, and the tables hold these and no others."""
        run = open_run(path)
        done = run["segments/done"].values.astype(bool)
        for group in ("overlap", "rows_only"):
            assert np.array_equal(run[group]["row"].values[done], self.row[done])
        assert np.array_equal(run["overlap/chosen"], self.chosen[done].sum(0))
        assert np.array_equal(run["tables_only/both"], self.both[done].sum(0))
        return done


def partial_of(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


def killed(work: Callable[[Callable[[], None]], None], steps: int, delay: float = 0) -> bool:
    """Run `work` in another process and kill it `delay` seconds after it told of so many steps; whether it was."""
    heard, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            work(lambda: os.write(told, b"."))
        except BaseException as error:  # noqa: BLE001
            os.write(2, f"in the forked process: {error!r}\n".encode())
            os._exit(1)
        os._exit(0)
    os.close(told)
    while steps and os.read(heard, 1):
        steps -= 1
    if not steps:
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(heard)
    assert status in (0, -signal.SIGKILL)
    return status != 0


def test_batches_add_up(tmp_path):
    out, truth = tmp_path / "run.h5", Truth(20)
    writer = RunWriter(out, a_schema(20))
    assert not truth.assert_right(partial_of(out)).any()
    for start, stop in ((8, 12), (0, 1), (12, 20), (1, 8)):
        truth.write(writer, start, stop)
        truth.assert_right(partial_of(out))
    writer.finish()
    assert truth.assert_right(out).all()
    assert list(tmp_path.iterdir()) == [out]


def test_names_for_other_readers(tmp_path):
    """Plain datasets beside the arrays of the probe: nothing is left of the slots."""
    out, truth = tmp_path / "run.h5", Truth(3)
    writer = RunWriter(out, a_schema(3))
    truth.write(writer, 0, 3)
    with open_run(partial_of(out)) as run:
        assert run["overlap/chosen"].dims == DIMS
        assert "slot" not in run.coords and "valid_slot" not in run
    writer.finish()
    with h5py.File(out) as file:
        assert set(file) == {*a_schema(3).dimensions, "visit", "segments"} | {
            "overlap",
            "rows_only",
            "tables_only",
        }
        chosen = file["overlap/chosen"]
        assert chosen.dtype == np.int64 and file["tables_only/both"].dtype == np.int32
        assert [dimension[0].name for dimension in chosen.dims] == [f"/{d}" for d in DIMS]
        assert chosen.attrs["units"] == "tokens"
        assert chosen.attrs["description"] == "how often an expert was chosen"
        assert file["segments/done"].shape == (3,)
    with xr.open_datatree(out, engine="h5netcdf") as tree:
        assert tree["overlap/chosen"].dims == DIMS
        prose = tree["overlap/chosen"].sel(table_category="prose")
        assert np.array_equal(prose, truth.chosen[:, 1].sum(0))
    run = open_run(out)
    assert run["overlap/chosen"].isel(execution=run["overlap"]["visit"] == 2).shape[2] == 2


def test_a_batch_may_add_nothing(tmp_path):
    out, truth = tmp_path / "run.h5", Truth(9)
    writer = RunWriter(out, a_schema(9))
    truth.write(writer, 0, 3)
    rows = {"overlap": {"row": truth.row[3:9]}, "rows_only": {"row": truth.row[3:9]}}
    writer.write(3, 6, {group: {"row": r["row"][:3]} for group, r in rows.items()})
    added = {"tables_only": {"both": np.ones((EXECUTIONS, EXPERTS), dtype="u1")}}
    writer.write(6, 9, {group: {"row": r["row"][3:]} for group, r in rows.items()}, added)
    run = open_run(writer.finish())
    assert np.array_equal(run["overlap/chosen"], truth.chosen[:3].sum(0))
    assert np.array_equal(run["tables_only/both"], truth.both[:3].sum(0) + 1)


def test_sums_are_exact_where_floats_are_not(tmp_path):
    schema = Schema(
        dimensions={"segment": np.arange(3), "kind": np.arange(1)},
        coordinates={},
        segments={},
        groups={},
        tables={"a": {"n": Variable(dims=("kind",), description="")}},
    )
    writer = RunWriter(tmp_path / "run.h5", schema)
    for row in range(3):
        writer.write(row, row + 1, {}, {"a": {"n": np.array([2**53 + 1])}})
    assert open_run(writer.finish())["a/n"].item() == 3 * 2**53 + 3


def test_a_single_number_and_dimensions_of_length_zero(tmp_path):
    truth = Truth(4, experts=0, heads=0)
    schema = a_schema(4, experts=0, heads=0)
    total = {"total": Variable(dims=(), description="of all")}
    schema = Schema(**vars(schema) | {"tables": {**schema.tables, "one": total}})
    out = tmp_path / "run.h5"
    writer = RunWriter(out, schema)
    truth.write(writer, 0, 3)
    again = RunWriter(out, schema)
    assert again.done().tolist() == [True, True, True, False]
    rows = {"overlap": {"row": truth.row[3:]}, "rows_only": {"row": truth.row[3:]}}
    again.write(3, 4, rows, {"one": {"total": np.array(7)}})
    truth.assert_right(again.finish())
    assert open_run(out)["overlap/row"].shape == (4, EXECUTIONS, 0)
    assert open_run(out)["one/total"].item() == 7
    with xr.open_datatree(out, engine="h5netcdf") as tree:
        assert tree["overlap/chosen"].dims == DIMS


def test_no_rows_at_all(tmp_path):
    writer = RunWriter(tmp_path / "run.h5", a_schema(0))
    assert writer.done().shape == (0,)
    Truth(0).assert_right(writer.finish())


@pytest.mark.parametrize(
    "bad",
    [
        {"chosen": np.zeros((CATEGORIES, FOLDS, EXECUTIONS, EXPERTS))},  # floats
        {"chosen": np.zeros((EXECUTIONS, EXPERTS), dtype=int)},  # would broadcast
        {"other": np.zeros((EXECUTIONS, EXPERTS), dtype=int)},
    ],
)
def test_what_cannot_be_added_changes_nothing(tmp_path, bad):
    out, truth = tmp_path / "run.h5", Truth(10)
    writer = RunWriter(out, a_schema(10))
    truth.write(writer, 0, 4)
    with pytest.raises((TypeError, KeyError, SmeltscopeError)):
        writer.write(4, 10, {"overlap": {"row": truth.row[4:]}}, {"overlap": bad})
    assert truth.assert_right(partial_of(out)).sum() == 4
    truth.write(RunWriter(out, a_schema(10)), 4, 10)
    assert truth.assert_right(partial_of(out)).all()


@pytest.mark.parametrize(("start", "stop"), [(0, 4), (3, 6), (5, 12), (-2, 0)])
def test_rows_are_added_once(tmp_path, start, stop):
    out, truth = tmp_path / "run.h5", Truth(10)
    writer = RunWriter(out, a_schema(10))
    truth.write(writer, 0, 4)
    with pytest.raises(SmeltscopeError, match=r"not among those that .* still lacks"):
        writer.write(start, stop, {})
    assert truth.assert_right(partial_of(out)).sum() == 4


@pytest.mark.parametrize("wrong", [{"dtype": "float64"}, {"dims": ("segment", "expert")}])
def test_tables_are_integers_without_segments(wrong):
    variable = Variable(**{"dims": ("expert",), "description": ""} | wrong)
    with pytest.raises(SmeltscopeError, match="a/n is no table"):
        Schema(dimensions={}, coordinates={}, segments={}, groups={}, tables={"a": {"n": variable}})


@forks
def test_killed_at_random_moments(tmp_path):
    """Rows and tables go together. What is done spans pages of memory: writing it is not one step for the system."""
    out, rows, step, experts = tmp_path / "run.h5", 30_000, 300, 600
    schema, truth = a_schema(rows, experts, heads=1), Truth(1, experts)
    chosen, both = truth.chosen[0], truth.both[0]

    def work(tell: Callable[[], None]) -> None:
        writer = RunWriter(out, schema)
        done = writer.done()
        for start in range(0, rows, step):
            if not done[start : start + step].all():
                row = {"row": np.full((step, EXECUTIONS, 1), start, dtype="f4")}
                added = {"overlap": {"chosen": chosen + start}, "tables_only": {"both": both * 2}}
                tell()
                writer.write(start, start + step, {"overlap": row, "rows_only": row}, added)

    def batches_done() -> int:
        run = open_run(partial_of(out))
        done = run["segments/done"].values.reshape(-1, step)
        assert (done == done[:, :1]).all()  # whole batches
        starts = np.arange(0, rows, step)[done[:, 0] == 1]
        assert np.array_equal(run["overlap/chosen"], chosen * len(starts) + starts.sum())
        assert np.array_equal(run["tables_only/both"], both * 2 * len(starts))
        row = run["overlap/row"].values.reshape(-1, step * EXECUTIONS)
        assert (row[done[:, 0] == 1] == starts[:, None]).all()
        return len(starts)

    rng, kills, seen = random.Random(0), 0, set()
    while kills < 12:
        kills += killed(work, steps=rng.randint(1, 4), delay=rng.random() * 0.01)
        seen.add(batches_done())
    assert len(seen) > 5
    assert not killed(work, steps=rows)
    assert batches_done() == rows // step


@forks
def test_killed_at_each_step_of_a_batch(tmp_path, monkeypatch):
    """The same, before every single write to the file, with all earlier ones on the disk."""
    out, truth, ended = tmp_path / "run.h5", Truth(10), []
    truth.write(RunWriter(out, a_schema(10)), 0, 4)
    before, set_item = partial_of(out).read_bytes(), h5py.Dataset.__setitem__

    def work(tell: Callable[[], None]) -> None:
        def counting(dataset, *arguments) -> None:
            if next(steps) == len(ended):
                tell()
                signal.pause()
            set_item(dataset, *arguments)
            dataset.file.flush()

        monkeypatch.setattr(h5py.Dataset, "__setitem__", counting)
        truth.write(RunWriter(out, a_schema(10)), 4, 10)

    survived = False
    while not survived:
        steps = count()
        partial_of(out).write_bytes(before)
        survived = not killed(work, steps=1)
        ended.append(int(truth.assert_right(partial_of(out)).sum()))
        again = RunWriter(out, a_schema(10))
        if not survived:
            truth.write(again, 4, 10)
        assert truth.assert_right(partial_of(out)).all()
    assert ended == [4] * 6 + [10]  # two arrays, what is done, two tables, and the slot
