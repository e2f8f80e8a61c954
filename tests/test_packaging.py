"""What is installed is what stands in the repository, under the name smeltscope and no other."""

import importlib
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import smeltscope

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
FOLDERS = ("activations", "dashboards", "model", "probes", "tasks")

pytestmark = pytest.mark.skipif(
    not (ROOT / "src" / "smeltscope").is_dir(), reason="needs the repository"
)


def folder_of(package: str) -> Path:
    """Where the code of a package stands, by package-dir."""
    mapped = SETUPTOOLS["package-dir"]
    parent, rest = package, []
    while parent not in mapped:
        parent, _, last = parent.rpartition(".")
        rest.insert(0, last)
    return ROOT.joinpath(mapped[parent], *rest)


def packages_on_disk() -> Iterator[str]:
    for file in (ROOT / "src").rglob("__init__.py"):
        yield ".".join(file.parent.relative_to(ROOT / "src").parts)
    for folder in FOLDERS:
        for file in (ROOT / folder).rglob("__init__.py"):
            yield ".".join(["smeltscope", *file.parent.relative_to(ROOT).parts])


def tracked() -> list[Path]:
    done = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip("needs a git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_every_package_is_listed() -> None:
    assert sorted(SETUPTOOLS["packages"]) == sorted(packages_on_disk())
    for package in SETUPTOOLS["packages"]:
        assert (folder_of(package) / "__init__.py").is_file()
    for package, folder in SETUPTOOLS["package-dir"].items():
        assert package in SETUPTOOLS["packages"] and (ROOT / folder).is_dir()


def test_the_view_for_static_tools_is_complete() -> None:
    view = ROOT / ".typing" / "smeltscope"
    wanted = {folder: ROOT / folder for folder in FOLDERS}
    for path in (ROOT / "src" / "smeltscope").iterdir():
        if path.name != "__pycache__":
            wanted[path.name] = path
    links = {path.name: path for path in view.iterdir()}
    assert set(links) == set(wanted)
    for name, link in links.items():
        assert link.is_symlink() and not Path(os.readlink(link)).is_absolute()
        assert link.resolve() == wanted[name].resolve()


@pytest.mark.parametrize(
    "package", [p for p in SETUPTOOLS["packages"] if p != "smeltscope.commands"]
)
def test_all_names_what_can_be_imported(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__doc__
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        member = getattr(module, name)
        if name[0].isupper() and isinstance(member, type):
            assert member.__module__.startswith("smeltscope")
    if package == "smeltscope":
        assert set(dir(module)) == set(module.__all__)
        with pytest.raises(AttributeError, match="no attribute 'nonesuch'"):
            module.nonesuch  # noqa: B018


def test_entry_points() -> None:
    # TransformerLens reads the second kind, when it is imported
    importlib.import_module("transformer_lens.factories.architecture_adapter_factory")
    for target in (
        *PROJECT["project"]["scripts"].values(),
        *PROJECT["project"]["entry-points"]["transformer_lens.architectures"].values(),
    ):
        module, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_constraints_pin_every_dependency() -> None:
    file = ROOT / "constraints.txt"
    pins = dict(
        re.split("==", line.split(";")[0].strip())
        for line in file.read_text().splitlines()
        if line.strip() and not line.startswith(("#", "--"))
    )
    pinned = {re.sub(r"[-_.]+", "-", name).lower() for name in pins}
    project = PROJECT["project"]
    groups = project["optional-dependencies"]
    wanted = [*project["dependencies"], *groups["test"], *groups["dev"]]
    names = {re.split(r"[\s<>=!~\[;]", requirement)[0].lower() for requirement in wanted}
    assert names - {"smeltscope"} <= pinned


def test_the_version_is_the_newest_of_the_changelog() -> None:
    file = ROOT / "CHANGELOG.md"
    newest = re.search(r"^## (\S+)", file.read_text(), re.MULTILINE)
    assert newest and newest[1] == PROJECT["project"]["version"] == smeltscope.__version__


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    here = [re.escape(str(path)) for path in (ROOT, ROOT.parent / "shared", Path(sys.prefix))]
    home = re.compile("|".join([r"(?<![\w.~])/(?:root|home/\w+|Users/\w+)/", *here]))
    found = []
    for path in tracked():
        if path.suffix in (".safetensors", ".gz", ".png", ".h5") or path == Path(__file__):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {m[0]}" for m in home.finditer(text)]
    assert found == []


# ---- the wheel


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the tracked files, as a clean clone would build it."""
    import shutil

    pytest.importorskip("setuptools", minversion="77.0.3")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for path in tracked():
        target = source / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target, follow_symlinks=False)
    command = [
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        str(out),
        str(source),
    ]
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.whl"))


@pytest.mark.slow
def test_what_a_wheel_holds(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = next(n for n in names if n.endswith(".dist-info/entry_points.txt"))
        scripts = archive.read(entry_points).decode()
    version = PROJECT["project"]["version"]
    assert {name.split("/")[0] for name in names} == {
        "smeltscope",
        f"smeltscope-{version}.dist-info",
    }
    assert "probe = smeltscope.cli:probe_main" in scripts
    assert "SmeltForCausalLM = smeltscope.model.lens:SmeltArchitectureAdapter" in scripts
    assert "smeltscope/py.typed" in names
    for package in SETUPTOOLS["packages"]:
        for file in folder_of(package).glob("*.py"):
            assert f"{package.replace('.', '/')}/{file.name}" in names
    data = [*(ROOT / "tasks" / "heldout").iterdir()]
    data += [p for p in (ROOT / "model" / "checkpoints").rglob("*") if p.is_file()]
    tracked_files = set(tracked())
    for file in data:
        if file in tracked_files:
            assert f"smeltscope/{file.relative_to(ROOT)}" in names
    assert any(name.endswith(".safetensors") for name in names)
    assert not [name for name in names if "__pycache__" in name or "/tests/" in name]


@pytest.mark.slow
def test_an_installed_wheel_works_anywhere(
    wheel: Path, tmp_path: Path, text_folder: Path, tiny_checkpoint: Path
) -> None:
    """In an environment of its own, beside files whose names could be taken for ours."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    site = next(venv.glob("lib/python*/site-packages"))
    # the dependencies of this environment, but not the smeltscope that is installed in it
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = ["pip", "--python", venv / "bin" / "python", "install", "--no-deps", "-q", wheel]
    subprocess.run([sys.executable, "-m", *install, "--ignore-installed", "--no-index"], check=True)
    work = tmp_path / "work"
    work.mkdir()
    for name in ("model.py", "tasks.py", "probes.py", "smelt.py"):
        (work / name).write_text("raise SystemExit('a file of the user was imported')\n")
    (work / "activations").mkdir()

    def run(*args: object) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            list(map(str, args)), cwd=work, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done

    assert "attention-sink" in run(venv / "bin" / "probe", "--help").stdout
    given = ["--ckpt", tiny_checkpoint, "--data", text_folder, "--tokens", 300, "--out", "x.h5"]
    python = [venv / "bin" / "python", "-m", "smeltscope"]
    run(*python, "probe", "attention-sink", *given)
    assert (work / "x.h5").is_file()
    code = "import smeltscope.model as m; print(m.__file__, m.shipped_checkpoints())"
    where = run(venv / "bin" / "python", "-c", code).stdout
    assert where.startswith(str(site)) and "smelt-tiny" in where


def test_folders_import_only_what_they_may() -> None:
    """The table of CONTRIBUTING.md: who knows of whom."""
    allowed = {
        "model": set(),
        "tasks": set(),
        "activations": {"model"},
        "probes": {"activations", "tasks", "model"},
        "dashboards": {"probes", "activations", "tasks", "model"},
    }
    for folder, known in allowed.items():
        for file in (ROOT / folder).rglob("*.py"):
            imported = re.findall(
                r"^\s*(?:from|import) smeltscope\.(\w+)", file.read_text(), re.MULTILINE
            )
            assert set(imported) <= known | {folder, "errors", "lazy"}, file
