"""`find_matches` on the paper's cells, on a tiny Baseline against all of its grid, and what it writes."""

import dataclasses
import runpy
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from smeltscope.errors import SmeltscopeError
from smeltscope.model import SmeltConfig
from smeltscope.model.budgets import Budget, Sizes, budget_of, sizes_of
from smeltscope.model.config_files import load_config, model_table, write_table
from smeltscope.model.loading import SHIPPED_FOLDER, load_tokenizer
from smeltscope.model.matching import (
    FARTHEST,
    GQA_RATIOS,
    HEAD_SIZES,
    STEP,
    TOLERANCES,
    Choices,
    find_matches,
)
from smeltscope.model.recipe import load_recipe
from smeltscope.model.training import build_config

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def paper() -> SimpleNamespace:
    """The names of benchmarks/paper_table.py."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / "benchmarks" / "paper_table.py")))


def baseline(**overrides: Any) -> SmeltConfig:
    sizes = {
        "num_physical_layers": 8,
        "num_visits": 1,
        "hidden_size": 152,
        "head_dim": 32,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "qk_norm": False,
        "num_experts": 24,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 32,
        "vocab_size": 4096,
        "max_position_embeddings": 256,
    }
    return SmeltConfig(**{**sizes, **overrides})


@pytest.mark.parametrize("fix", ["nothing", "the paper's width and experts"])
def test_the_papers_twelve_sparse_cells(paper: SimpleNamespace, fix: str) -> None:
    """Within 4 % of the FLOPs, 1 % of the parameters, 4 % of the cache, counted anew from the configurations."""
    rows = list(paper.rows())
    cells = [
        (a, b) for a, b in zip(rows[:16], rows[16:], strict=True) if a.printed["experts"] != "8"
    ]
    assert len(cells) == 12
    for cell, smelt in cells:
        fixed = Choices()
        if fix != "nothing":
            fixed = Choices(width=smelt.config.hidden_size, experts=smelt.config.num_experts)
        length = paper.DOCUMENT_LENGTH
        best = find_matches(cell.config, document_length=length, fixed=fixed, most=1)[0]
        own = budget_of(sizes_of(best.config), document_length=length)
        assert best.config.executions == smelt.config.executions
        assert abs(own.training_flops / cell.budget.training_flops - 1) < 0.04
        assert abs(own.parameters / cell.budget.parameters - 1) < 0.01
        assert abs(own.cache_bytes / cell.budget.cache_bytes - 1) < 0.04
        assert best.mismatch <= 1


def near_ones(looped: Sizes, target: Budget, fixed: Choices) -> tuple[Any, Sizes]:
    """All within ten times the tolerances of `baseline()`, with the mismatch: every one of the grid is counted."""

    def axis(name: str, free: Any) -> Any:
        return free if getattr(fixed, name) is None else [getattr(fixed, name)]

    axes = np.meshgrid(
        axis("width", np.arange(152 * 8 // looped.executions // STEP * STEP, 153, STEP)),
        axis("head_size", HEAD_SIZES[HEAD_SIZES <= 128]),  # larger ones exceed the cache
        np.arange(1, 7),
        axis("gqa_ratio", GQA_RATIOS),
        axis("expert_width", np.arange(8, 169, STEP)),
        axis("experts", np.arange(8, 265, STEP)),
        indexing="ij",
        sparse=True,
    )

    def sizes(width: Any, head_size: Any, kv_heads: Any, ratio: Any, wide: Any, many: Any) -> Sizes:
        chosen = {"width": width, "head_size": head_size, "kv_heads": kv_heads}
        chosen |= {"heads": kv_heads * ratio, "expert_width": wide, "experts": many}
        return dataclasses.replace(looped, **chosen)

    budget = budget_of(sizes(*axes), document_length=256)
    mismatch = np.array(0.0)
    for name, tolerated in TOLERANCES.items():
        off = np.abs(getattr(budget, name) / getattr(target, name) - 1) / tolerated
        mismatch = np.maximum(mismatch, off)
    near = np.nonzero(mismatch <= FARTHEST)
    chosen = [values.ravel()[i] for values, i in zip(axes, near, strict=True)]
    return mismatch[near], sizes(*chosen)


def distance(sizes: Sizes, start: Sizes) -> Any:
    """Of head size, GQA ratio and the widths of attention and experts relative to the model, in logarithms."""
    return (
        np.abs(np.log(sizes.head_size / start.head_size))
        + np.abs(np.log(sizes.heads / sizes.kv_heads * start.kv_heads / start.heads))
        + np.abs(
            np.log(sizes.heads * sizes.head_size / sizes.width)
            - np.log(start.heads * start.head_size / start.width)
        )
        + np.abs(np.log(sizes.expert_width / sizes.width * start.width / start.expert_width))
    )


@pytest.mark.parametrize("visits", [2, 3])
@pytest.mark.parametrize(
    "fixed",
    [
        {},
        {"width": 112},
        {"width": 150},
        {"experts": 136},
        {"experts": 37},
        {"expert_width": 8},
        {"expert_width": 20},
        {"head_size": 32},
        {"head_size": 52},
        {"gqa_ratio": 3},
        {"head_size": 32, "width": 112},
        {"head_size": 32, "width": 112, "experts": 136},
        {"width": 128, "experts": 32, "expert_width": 32, "head_size": 32, "gqa_ratio": 2},
    ],
    ids=str,
)
def test_the_first_are_those_of_the_whole_grid(visits: int, fixed: dict[str, int]) -> None:
    """Every configuration is counted; the mismatches of the first 30 are the same, and so is their order."""
    config = baseline()
    start = sizes_of(config)
    target = budget_of(start, document_length=256)
    looped = dataclasses.replace(start, executions=8 + 4 * (visits - 1))
    choices = Choices(**fixed)
    mismatch, grid = near_ones(looped, target, choices)
    keys = np.stack([np.ceil(10 * mismatch), distance(grid, start)], axis=1)
    first = keys[np.lexsort(keys.T[::-1])][:30]
    found = find_matches(config, visits=visits, document_length=256, fixed=choices, most=30)
    assert len(found) == len(first) > 0
    for match, (step, far) in zip(found, first, strict=True):
        assert np.ceil(10 * match.mismatch) == step
        assert distance(sizes_of(match.config), start) == pytest.approx(far, abs=1e-9)
    assert len({tuple(model_table(match.config).items()) for match in found}) == len(found)


def test_few_experts_of_a_wide_model_or_many_narrow_ones() -> None:
    """Where one number of experts is guessed, 136 of width 8 are missed."""
    fixed = Choices(head_size=32, width=112)
    best = find_matches(baseline(), document_length=256, fixed=fixed)[0]
    assert (best.config.num_experts, best.config.moe_intermediate_size) == (136, 8)
    assert (best.config.num_attention_heads, best.config.num_key_value_heads) == (6, 2)
    assert best.mismatch == pytest.approx(0.758, abs=5e-4)


def test_matches_are_in_order_and_count_what_they_say() -> None:
    config = baseline()
    matches = find_matches(config, document_length=256)
    assert len(matches) == 10
    steps = [np.ceil(10 * match.mismatch) for match in matches]
    assert steps == sorted(steps)
    assert len({tuple(model_table(match.config).items()) for match in matches}) == 10
    target = budget_of(sizes_of(config), document_length=256)
    for match in matches:
        own = budget_of(sizes_of(match.config), document_length=256)
        for name in TOLERANCES:
            share = getattr(own, name) / getattr(target, name) - 1
            assert match.excess[name] == pytest.approx(share, abs=1e-12)
        assert match.config.residual_scale == 0.5
        assert match.config.span == range(2, 6)


def test_fixed_choices_stay() -> None:
    """The shipped pair is the first of them: 1.5 % more FLOPs, as many parameters, the same cache."""
    smelt, base = load_config("smelt-tiny"), load_config("baseline-tiny")
    fixed = Choices(width=104, experts=32, expert_width=40, head_size=32, gqa_ratio=2)
    found = find_matches(base, document_length=512, fixed=fixed)
    assert sizes_of(found[0].config) == sizes_of(smelt)
    assert all(match.config.num_experts == 32 for match in found)
    for name, value in dataclasses.asdict(fixed).items():
        alone = find_matches(base, document_length=512, fixed=Choices(**{name: value}), most=3)
        for match in alone:
            sizes = dataclasses.asdict(sizes_of(match.config))
            sizes["gqa_ratio"] = sizes["heads"] // sizes["kv_heads"]
            assert sizes[name] == value


def test_a_span_of_ones_own() -> None:
    for span, visits in (((0, 8), 2), ((3, 4), 4)):
        best = find_matches(baseline(), visits=visits, span=span, document_length=64, most=1)[0]
        assert best.config.span == range(*span)
        assert best.config.num_visits == visits
        assert best.config.residual_scale == 1 / visits


def test_a_small_baseline() -> None:
    """One head, two layers, as many experts as are active: the smallest that the grid can follow."""
    sizes = {"num_physical_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1}
    small = baseline(**sizes, hidden_size=32, head_dim=32, num_experts=4, moe_intermediate_size=16)
    assert find_matches(small, document_length=1)[0].config.num_experts >= 8
    smaller = baseline(**sizes, hidden_size=8, head_dim=4, num_experts=4, moe_intermediate_size=2)
    with pytest.raises(SmeltscopeError, match="within 10 times what is tolerated"):
        find_matches(smaller, document_length=1)


def test_wrong_choices_are_sentences() -> None:
    with pytest.raises(SmeltscopeError, match="runs every layer once, and this one loops 4"):
        find_matches(baseline(num_visits=2), document_length=256)
    with pytest.raises(SmeltscopeError, match="does not lie inside the stack"):
        find_matches(baseline(), span=(2, 9), document_length=256)
    with pytest.raises(SmeltscopeError, match="even head size"):
        find_matches(baseline(), document_length=256, fixed=Choices(head_size=33))
    with pytest.raises(SmeltscopeError, match="between 1 and num_experts 2"):
        find_matches(baseline(), document_length=256, fixed=Choices(experts=2))
    with pytest.raises(SmeltscopeError, match="free a choice"):
        find_matches(baseline(), document_length=256, fixed=Choices(gqa_ratio=20))


# ---- what is written


def test_a_written_table_is_read_as_the_same_configuration(tmp_path: Path) -> None:
    config = baseline(
        attention_bias=True,
        tie_word_embeddings=True,
        router_aux_loss_coef=0.02,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        rms_norm_eps=1e-5,
    )
    match = find_matches(config, document_length=256, visits=3, most=1)[0]
    file = tmp_path / "smelt.toml"
    file.write_text(write_table(model_table(match.config)))
    again = load_config(file)
    assert again.to_dict() == match.config.to_dict()
    for name in ("attention_bias", "tie_word_embeddings", "rope_parameters", "rms_norm_eps"):
        assert getattr(again, name) == getattr(config, name)
    assert tomllib.loads(file.read_text())["model"]["num_visits"] == 3


def test_a_recipe_takes_a_written_table(tmp_path: Path) -> None:
    """In place of the [model] table of the shipped recipe."""
    config = load_config("baseline-tiny")
    match = find_matches(config, document_length=256, most=1)[0]
    shipped = (SHIPPED_FOLDER / "baseline-tiny" / "recipe.toml").read_text()
    start, stop = shipped.index("[model]"), shipped.index("[tokenizer]")
    table = write_table(model_table(match.config))
    (tmp_path / "recipe.toml").write_text(shipped[:start] + table + shipped[stop:])
    for name in tomllib.loads(shipped)["data"]["train"] + tomllib.loads(shipped)["data"]["heldout"]:
        (tmp_path / name).touch()
    recipe = load_recipe(tmp_path / "recipe.toml")
    trained = build_config(recipe, load_tokenizer(SHIPPED_FOLDER / "smelt-tiny"))
    assert sizes_of(trained) == sizes_of(match.config)
    assert trained.executions == match.config.executions
