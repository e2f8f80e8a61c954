"""docs/run-file.md against a real run file: nothing undocumented, nothing documented that is not there."""

import re
from pathlib import Path

import h5py
import pytest

from smeltscope.probes import group_name
from smeltscope.registry import ALL_PROBES

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


@pytest.fixture(scope="module")
def dyck_files(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path, short_template: Path
) -> list[Path]:
    """What `probe dyck` and `probe dyck-state` leave."""
    from smeltscope.cli import probe, run

    folder = tmp_path_factory.mktemp("dyck")
    given = [
        "--ckpt",
        str(tiny_checkpoint),
        "--device",
        "cpu",
        "--items",
        "4",
        "--seeds",
        "1",
        "--shots",
        "1",
        "-q",
    ]
    assert run(probe, ["dyck", *given, "--nested", "4", "--out", str(folder / "dyck.h5")]) == 0
    assert run(probe, ["dyck-state", *given, "--out", str(folder / "state.h5")]) == 0
    return [folder / "dyck.h5", folder / "state.h5"]


def groups_of(paths: list[Path]) -> dict[str, dict[str, str]]:
    """{group: {array: its dimensions}} of several files."""
    found: dict[str, dict[str, str]] = {}
    for path in paths:
        with h5py.File(path) as file:
            for group in (name for name in file if isinstance(file[name], h5py.Group)):
                arrays = found.setdefault(group, {})
                for name, array in file[group].items():
                    arrays[name] = ", ".join(dim.keys()[0] for dim in array.dims)
    return found


def test_the_page_names_what_lies_at_the_root(run_file: Path, dyck_files: list[Path]) -> None:
    arrays: set[str] = set()
    attributes: set[str] = set()
    for path in (run_file, *dyck_files):
        with h5py.File(path) as file:
            arrays |= {name for name in file if isinstance(file[name], h5py.Dataset)}
            attributes |= set(file.attrs)
    labels = {"layer", "visit", "module", "visit_a", "visit_b"}
    named = set(first_cells(sections()["Root"])) - {"num_visits"}  # of a sweep
    assert arrays - labels | attributes == named
    with h5py.File(run_file) as file:
        for name in labels:
            assert f"`{name}`" in sections()["Root"]
            on = "visit_pair" if name in ("visit_a", "visit_b") else "execution"
            assert file[name].dims[0].keys() == [on]


@pytest.mark.parametrize("group", ["segments", *map(group_name, ALL_PROBES), "dyck_patterns"])
def test_the_page_names_the_arrays_of_a_group(
    run_file: Path, dyck_files: list[Path], group: str
) -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| ([\w, ]+?) \|", sections()[f"Group `{group}`"], flags=re.MULTILINE
    )
    real = groups_of([run_file, *dyck_files])[group]
    documented = {name: dims for name, dims in rows if not name.startswith("swept")}
    labels = {name for name in real if name.startswith("label_")}  # docs/dyck-prompts.md has them
    assert documented == {name: dims for name, dims in real.items() if name not in labels}


def test_every_label_of_prompts_has_a_row(dyck_files: list[Path]) -> None:
    labels = {n for n in groups_of(dyck_files)["segments"] if n.startswith("label_")}
    page = (PAGE.parent / "dyck-prompts.md").read_text().partition("## Labels")[2]
    assert labels == {f"label_{name}" for name in first_cells(page)}


def test_every_group_has_a_section(run_file: Path, dyck_files: list[Path]) -> None:
    groups = set(groups_of([run_file, *dyck_files]))
    assert groups == set(re.findall(r"Group `(\w+)`", "\n".join(sections())))
