"""docs/run-file.md against a real run file: nothing undocumented, nothing documented that is not there."""

import re
from pathlib import Path

import h5py
import pytest

from smeltscope.probes import group_name
from smeltscope.registry import PROBES

PAGE = Path(__file__).parents[2] / "docs" / "run-file.md"


def sections() -> dict[str, str]:
    """The page's text under each heading."""
    parts = re.split(r"^## (.*)$", PAGE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def first_cells(text: str) -> list[str]:
    """Every `name` in the first column of the tables."""
    rows = re.findall(r"^\| (`.*?`) \|", text, flags=re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`(\w+)`", row)]


@pytest.fixture(scope="module")
def run_file(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path, text_folder: Path
) -> Path:
    from smeltscope.cli import probe, run

    out = tmp_path_factory.mktemp("run") / "run.h5"
    arguments = ["batch", "--ckpt", str(tiny_checkpoint), "--data", str(text_folder)]
    assert run(probe, [*arguments, "--tokens", "2k", "--out", str(out), "-q"]) == 0
    return out


def test_the_page_names_what_lies_at_the_root(run_file: Path) -> None:
    with h5py.File(run_file) as file:
        arrays = {name for name in file if isinstance(file[name], h5py.Dataset)}
        labels = {"layer", "visit", "module", "visit_a", "visit_b"}
        named = set(first_cells(sections()["Root"])) - {"num_visits"}  # of a sweep
        assert arrays - labels | set(file.attrs) == named
        for name in labels:
            assert f"`{name}`" in sections()["Root"]
            on = "visit_pair" if name in ("visit_a", "visit_b") else "execution"
            assert file[name].dims[0].keys() == [on]


@pytest.mark.parametrize("group", ["segments", *map(group_name, PROBES)])
def test_the_page_names_the_arrays_of_a_group(run_file: Path, group: str) -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| ([\w, ]+?) \|", sections()[f"Group `{group}`"], flags=re.MULTILINE
    )
    with h5py.File(run_file) as file:
        real = {
            name: ", ".join(dim.keys()[0] for dim in array.dims)
            for name, array in file[group].items()
        }
    documented = {name: dims for name, dims in rows if not name.startswith("swept")}
    assert documented == real


def test_every_group_has_a_section(run_file: Path) -> None:
    with h5py.File(run_file) as file:
        groups = {name for name in file if isinstance(file[name], h5py.Group)}
    assert groups == set(re.findall(r"Group `(\w+)`", "\n".join(sections())))
