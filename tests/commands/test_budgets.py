"""`smelt info` and `smelt match` as commands."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smeltscope.model import load_checkpoint, tiny
from smeltscope.model.budgets import budget_of, sizes_of
from smeltscope.model.config_files import load_config
from smeltscope.model.loading import SHIPPED_FOLDER

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def smelt(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `smelt ...` in this process; gives exit code, stdout and stderr."""
    from smeltscope.cli import run
    from smeltscope.cli import smelt as group

    def call(*args: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run(group, [str(arg) for arg in args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_info_shows_a_pair(smelt: Run) -> None:
    code, out, err = smelt("info", "baseline-tiny", "smelt-tiny")
    assert code == 0 and err == ""
    budget = budget_of(sizes_of(load_config("smelt-tiny")), document_length=512)
    for value in (budget.training_flops, 3 * budget.full_square_flops):
        assert f"{value:,.0f} (+" in out
    assert f"{budget.parameters:,} (-0.02 %)" in out
    assert "layers, each run once" in out and "2 to 5 run 2 times (12 executions)" in out
    assert f"{budget.cache_bytes:,} (+0.00 %)" in out
    assert "Documents of 512 tokens" in out


def test_info_counts_a_checkpoint_by_any_name(smelt: Run, tmp_path: Path) -> None:
    folder = SHIPPED_FOLDER / "smelt-tiny"
    names = ["smelt-tiny", folder, folder / "config.json", folder / "recipe.toml"]
    code, out, _ = smelt("info", *names, "--json")
    assert code == 0
    counts = list(json.loads(out).values())
    assert all(count == counts[0] for count in counts) and len(counts) == 4
    model = load_checkpoint("smelt-tiny").model
    total = sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
    assert counts[0]["parameters"] + counts[0]["embedding_parameters"] == total
    code, out, _ = smelt("info", SHIPPED_FOLDER / "baseline-tiny" / "recipe.toml", "--json")
    assert code == 0
    (count,) = json.loads(out).values()
    assert count["embedding_parameters"] == 4096 * 152


def test_info_at_a_document_length_and_against_a_dense_model(smelt: Run) -> None:
    _, out, _ = smelt("info", "smelt-tiny", "--document-length", 64, "--json")
    count = json.loads(out)["smelt-tiny"]
    assert count["document_length"] == 64
    budget = budget_of(sizes_of(load_config("smelt-tiny")), document_length=64)
    assert count["inference_flops"] == budget.inference_flops
    _, out, _ = smelt("info", "smelt-tiny", "--dense", "smelt-tiny", "--json")
    assert json.loads(out)["smelt-tiny"]["sparsity"] == 0


def test_info_of_other_models(smelt: Run, tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "llama")
    code, out, _ = smelt("info", "smelt-tiny", tmp_path / "llama")
    assert code == 0
    assert "llama, 3 executions" in out and "not for" in out
    code, out, _ = smelt("info", tmp_path / "llama", "control-moved-sink", "--json")
    counts = json.loads(out)
    assert set(counts[str(tmp_path / "llama")]) == {"parameters", "embedding_parameters"}
    assert counts["control-moved-sink"]["sparsity"] > 0


def test_info_of_a_qwen3_moe(smelt: Run, tmp_path: Path) -> None:
    model = tiny("qwen3_moe")
    model.save_pretrained(tmp_path / "qwen")
    code, out, _ = smelt("info", "smelt-tiny", tmp_path / "qwen")
    assert code == 0 and "not for" not in out
    assert "qwen3_moe, 3 layers, each run once; width 32" in out
    code, out, _ = smelt("info", tmp_path / "qwen", "--document-length", 32, "--json")
    count = json.loads(out)[str(tmp_path / "qwen")]
    budget = budget_of(sizes_of(model.config), document_length=32)
    assert count["training_flops"] == budget.training_flops
    assert count["cache_bytes"] == budget.cache_bytes and count["sparsity"] > 0
    code, out, _ = smelt("info", tmp_path / "qwen", "--dense", tmp_path / "qwen", "--json")
    assert json.loads(out)[str(tmp_path / "qwen")]["sparsity"] == 0


MODEL = "[model]\nnum_physical_layers = 4\nhidden_size = 32\nnum_attention_heads = 4\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("seed = 1\n", "has no [model] table"),
        ("[model\n", "is no TOML file"),
        (MODEL, "does not say how large the vocabulary is"),
        (MODEL + "vocab_size = 64\ndepth = 3\n", "unknown key 'depth'"),
        (MODEL + "vocab_size = 64\nnum_experts = 'many'\n", "num_experts"),
        (MODEL + "vocab_size = 64\nnum_visits = -1\n", "num_visits is -1"),
        (MODEL + "[tokenizer]\npath = 'nowhere'\n", "holds no tokenizer"),
    ],
)
def test_a_broken_recipe_is_a_sentence(smelt: Run, tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(text)
    code, out, err = smelt("info", file)
    assert code == 2 and out == ""
    assert err.startswith(f"Error: {file}") and says in err and len(err.splitlines()) == 1


def test_wrong_names_are_sentences(smelt: Run, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "empty").mkdir()
    for name, says in {
        "smelt-tinny": "did you mean smelt-tiny?",
        tmp_path / "notes.txt": "neither a config.json nor a recipe",
        tmp_path / "empty": "holds no config.json",
        tmp_path / "missing.toml": "cannot be read",
    }.items():
        for command in ("info", "match"):
            code, _, err = smelt(command, name)
            assert code == 2 and says in err
    code, _, err = smelt("info", "smelt-tiny", "--document-length", 513)
    assert code == 2 and "exceeds the context of the model; give 512 or less" in err
    tiny("llama").save_pretrained(tmp_path / "llama")
    code, _, err = smelt("match", tmp_path / "llama")
    assert code == 2 and "a match begins with a Baseline" in err
    code, _, err = smelt("info", "smelt-tiny", "--dense", tmp_path / "llama")
    assert code == 2 and "relative to a SMELT, a Baseline or a Qwen3-MoE" in err


def test_match_lists_and_writes(smelt: Run, tmp_path: Path) -> None:
    file = tmp_path / "smelt.toml"
    args = ("match", "baseline-tiny", "--head-size", 32, "--most", 3, "--out", file)
    code, out, err = smelt(*args)
    assert code == 0 and str(file) in err
    rows = [
        line.split() for line in out.splitlines() if line.split()[:1] and line.split()[0].isdigit()
    ]
    assert len(rows) == 3 and all(row[3] == "32" for row in rows)
    config = load_config(file)
    assert config.hidden_size == int(rows[0][0]) and config.num_experts == int(rows[0][4])
    code, _, err = smelt(*args)
    assert code == 2 and "--force" in err
    code, out, _ = smelt(*args, "--force", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["document_length"] == 512 and len(found["matches"]) == 3
    assert found["matches"][0]["model"]["hidden_size"] == config.hidden_size
    budgets: list[Any] = []
    for model in ("baseline-tiny", file):
        budgets.append(budget_of(sizes_of(load_config(model)), document_length=512))
    share = budgets[1].parameters / budgets[0].parameters - 1
    assert found["matches"][0]["excess"]["parameters"] == pytest.approx(share)


def test_match_says_when_nothing_is_near(smelt: Run, tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    sizes = {"hidden_size": 152, "head_dim": 32, "num_attention_heads": 6, "num_key_value_heads": 3}
    sizes |= {"num_experts": 24, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
    sizes |= {"num_physical_layers": 8, "num_visits": 1, "vocab_size": 64}
    lines = [f"{name} = {size}" for name, size in sizes.items()]
    file.write_text("\n".join(["[model]", *lines, "max_position_embeddings = 256", ""]))
    args = ("match", file, "--head-size", 32, "--width", 112)
    code, out, _ = smelt(*args)  # 136 experts of width 8
    assert code == 0 and ".758" in out and "None lies within these" not in out
    code, out, _ = smelt(*args, "--experts", 48)
    assert code == 0 and "2.208" in out and "None lies within these" in out
    code, out, err = smelt(*args, "--experts", 4, "--out", tmp_path / "smelt.toml")
    assert code == 2 and out == "" and "within 10 times what is tolerated" in err
    assert not (tmp_path / "smelt.toml").exists()


@pytest.mark.parametrize("span", ["6:2", "2-6", "x"])
def test_match_wants_a_span(smelt: Run, span: str) -> None:
    code, _, err = smelt("match", "baseline-tiny", "--span", span)
    assert code == 2 and "is no span of layers" in err


def test_match_does_not_write_where_it_cannot(smelt: Run, tmp_path: Path) -> None:
    code, _, err = smelt("match", "baseline-tiny", "--out", tmp_path / "no" / "folder.toml")
    assert code == 2 and "cannot be written" in err
