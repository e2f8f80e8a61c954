"""The how-tos run as they stand, from top to bottom, and name what they should."""

import importlib.util
import re
from pathlib import Path

import pytest
from transformer_lens.model_bridge.sources import build_bridge_from_module

import smeltscope

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
HOWTOS = ("transformer-lens.md", "nnsight.md")
EXAMPLES = (*HOWTOS, "capture.md", "dump.md")


def python_of(page: Path) -> str:
    """All python blocks of a page; other lines are kept blank, so that line numbers agree."""
    lines, inside = [], False
    for line in page.read_text().splitlines():
        fence = line.startswith("```")
        lines.append(line if inside and not fence else "")
        inside = line == "```python" if fence else inside
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", EXAMPLES)
def test_howto_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = python_of(DOCS / name)
    assert "import smeltscope" in code
    file = tmp_path / f"howto_{name.removesuffix('.md').replace('-', '_')}.py"
    file.write_text(code)  # nnsight reads the source of a trace, so it has to lie in a file
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_every_block_of_the_howtos_is_closed_and_labelled() -> None:
    for name in HOWTOS:
        fences = re.findall(r"^```.*$", (DOCS / name).read_text(), flags=re.MULTILINE)
        assert fences == ["```python", "```"] * (len(fences) // 2), name
        assert len(fences) >= 10, name


def test_hook_names_of_the_howto_exist() -> None:
    model = smeltscope.tiny("smelt")
    bridge = build_bridge_from_module(model, "SmeltForCausalLM", hf_config=model.config)
    known = set(bridge.hook_dict) | {f"blocks.0.{alias}" for alias in bridge.blocks[0].hook_aliases}
    page = (DOCS / "transformer-lens.md").read_text()
    named = set(re.findall(r"`((?:attn\.|mlp\.|gate\.|ln[12]\.)*hook_\w+)`", page))
    assert len(named) > 25
    named -= {"hook_result"}  # attn.hook_result for short
    assert {name for name in named if f"blocks.0.{name}" not in known} == set()


def test_readme_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from smeltscope.cli import probe, run

    monkeypatch.chdir(tmp_path)
    assert run(probe, ["attention-sink", "--tokens", "2k", "-q"]) == 0
    exec(compile(python_of(ROOT / "README.md"), "README.md", "exec"), {})  # noqa: S102
