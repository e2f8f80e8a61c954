"""Tables of any summary: which rows, which columns, how wide; and the same numbers as CSV."""

import csv
import io
from collections.abc import Sequence

import numpy as np
import pytest
import xarray as xr
from rich.console import Console

from smeltscope.commands import tables

LAYERS = [0, 1, 2, 1, 2, 3]
VISITS = [1, 1, 1, 2, 2, 1]


def summary_of(probe: str = "nobody's", **arrays: tuple[Sequence[str], np.ndarray]) -> xr.Dataset:
    """Quantities with intervals of -+ .01, labelled as in a run."""
    values = {}
    for name, (dims, numbers) in arrays.items():
        numbers = np.asarray(numbers, dtype=float)
        values |= {name: (dims, numbers), f"{name}_low": (dims, numbers - 0.01)}
        values[f"{name}_high"] = (dims, numbers + 0.01)
    used = {dim for dims, _ in arrays.values() for dim in dims}
    labels = {
        "execution": np.arange(6),
        "layer": ("execution", LAYERS),
        "visit": ("execution", VISITS),
        "looped_layer": [1, 2],
        "visit_pair": ["1-2"],
        "visit_a": ("visit_pair", [1]),
        "stage": ["X", "Q", "K"],
        "head": [0, 1],
    }
    coords = {n: c for n, c in labels.items() if (c[0] if isinstance(c, tuple) else n) in used}
    return xr.Dataset(
        values,
        coords=coords,
        attrs={"probe": probe, "documents": 3, "resampled": "documents", "fewest": 3},
    )


def printed(summary: xr.Dataset, brief: bool = False) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, width=80)
    result = tables.Result(summary=summary, averaged=summary, sentence="The finding.")
    tables.print_result(console, result, "title", brief=brief)
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "title"
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("fewest", [3, 30])
def test_intervals_from_few_are_said_to_be_too_narrow(fewest: int) -> None:
    summary = summary_of(sink_mass=(("execution",), np.full(6, 0.1))).assign_attrs(fewest=fewest)
    told = "Intervals are too narrow: drawn from as few as 3 documents of one kind."
    assert (told in printed(summary)) == (fewest == 3)


def test_a_row_for_each_execution() -> None:
    mass = np.array([0.1, 0.2, 0.3, 0.25, np.nan, 0.15])
    lines = printed(summary_of(sink_mass=(("execution",), mass)))
    assert lines[1:4] == [
        "                        sink",
        "layer visit             mass",
        "    0     1 .100 [.090,.110]",
    ]
    rows = [line.split()[:3] for line in lines[3:9]]
    places = list(zip(map(str, LAYERS), map(str, VISITS), strict=True))
    places.remove(("2", "2"))  # has no value in any column
    assert [tuple(row[:2]) for row in rows if row[0].isdigit()] == places
    assert "The finding." in lines


def test_a_row_for_each_pair_of_visits_and_a_column_for_each_stage() -> None:
    cosine = np.arange(6).reshape(3, 2, 1) / 10
    lines = printed(summary_of(cosine=(("stage", "looped_layer", "visit_pair"), cosine)))
    assert lines[2].split() == ["layer", "visits", "X", "Q", "K"]
    assert [line.split() for line in lines[3:5]] == [
        ["1", "1-2", ".000", "[-.010,.010]", ".200", "[.190,.210]", ".400", "[.390,.410]"],
        ["2", "1-2", ".100", "[.090,.110]", ".300", "[.290,.310]", ".500", "[.490,.510]"],
    ]


def test_as_many_columns_as_have_room_then_intervals() -> None:
    numbers = np.arange(6) / 10
    names = [f"quantity_{i}" for i in range(4)]
    lines = printed(summary_of(**{name: (("execution",), numbers) for name in names}))
    first = lines[3].split()
    assert sum(not cell.startswith("[") for cell in first) == 2 + 4
    assert 2 <= sum(cell.startswith("[") for cell in first) < 4


def test_other_rows_get_tables_of_their_own() -> None:
    summary = summary_of(
        ratio=(("looped_layer", "visit_pair"), np.ones((2, 1))),
        norm=(("execution",), np.ones(6)),
        overall=((), np.ones(())),
        matrix=(("execution", "head", "stage"), np.ones((6, 2, 3))),
    )
    lines = printed(summary)
    heads = [line.split() for line in lines if "layer" in line]
    assert heads == [
        ["layer", "visits", "ratio"],
        ["layer", "visit", "norm", "X", "Q", "K", "X", "Q", "K"],  # 2 x 3 entries side by side
    ]
    assert sum("layer" in line for line in printed(summary, brief=True)) == 1


def test_no_value_no_table() -> None:
    summary = summary_of(norm=(("execution",), np.full(6, np.nan)))
    assert printed(summary) == ["title", "The finding.", ""]


def test_the_paper_stands_beside() -> None:
    overlap = np.array([[3.0], [3.5]])
    summary = summary_of("router-overlap", overlap=(("looped_layer", "visit_pair"), overlap))
    text = " ".join(" ".join(printed(summary)).split())
    assert "not a target" in text
    assert "2 to 3 of 8 at S ~ 97 %, about 8 at S = 0; here 3.000 to 3.500" in text


def test_the_paper_trained_a_model_for_each_number_of_visits() -> None:
    """Beside a sweep, for the numbers that were swept; nothing where there is none."""
    loss = summary_of("loss", loss=((), np.array(2.0)))
    assert "The paper" not in " ".join(printed(loss))
    swept = summary_of("loss", swept_loss=(("num_visits",), np.array([2.5, 2.0, 2.25])))
    text = " ".join(" ".join(printed(swept.assign_coords(num_visits=[0, 2, 3]))).split())
    assert "loss, 2 visits: 1.9257 (200M at S ~ 85 %" in text and "here 2.000" in text
    assert "loss, 3 visits: 1.9385" in text and "here 2.250" in text
    assert "1.9445" not in text and "1.9360" not in text


def test_csv(capsys: pytest.CaptureFixture[str]) -> None:
    mass = np.array([[0.1, np.nan]] * 6)
    one = summary_of(mass=(("execution", "head"), mass), total=((), np.array(2.0)))
    one["mass_low_all"], one["mass_high_all"] = one["mass"] - 0.02, one["mass"] + 0.02
    two = summary_of(cosine=(("stage",), np.array([1.0, 0.5, 0.25])))
    tables.print_csv({"one": one, "two": two})
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 12 + 1 + 3
    ends = ["value", "low", "high", "low_all", "high_all"]
    assert list(rows[0])[:2] == ["probe", "quantity"] and list(rows[0])[-5:] == ends
    assert set(rows[0]) == {
        *("probe", "quantity", "execution", "layer", "visit", "head", "stage"),
        *ends,
    }
    seventh = rows[6]
    assert (seventh["execution"], seventh["layer"], seventh["visit"], seventh["head"]) == (
        *("3", "1", "2", "0"),
    )
    assert float(seventh["value"]) == mass[3, 0] and float(seventh["low"]) == mass[3, 0] - 0.01
    assert float(seventh["low_all"]) == mass[3, 0] - 0.02
    assert float(seventh["high_all"]) == mass[3, 0] + 0.02
    assert rows[7]["value"] == rows[7]["low"] == rows[7]["low_all"] == ""
    assert rows[12]["low"] and rows[12]["low_all"] == ""  # not judged together with others
    assert rows[12]["quantity"] == "total" and rows[12]["layer"] == "" == rows[12]["stage"]
    assert [(r["stage"], float(r["value"])) for r in rows[13:]] == [
        ("X", 1),
        ("Q", 0.5),
        ("K", 0.25),
    ]
