"""The configuration and the order of executions it implies."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from smeltscope.errors import SmeltscopeError
from smeltscope.model import SmeltConfig, default_span, executions_of, tiny

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


def config_of(**values: object) -> SmeltConfig:
    return SmeltConfig(**{**SIZES, "num_physical_layers": 6, **values})


def order(config: SmeltConfig) -> list[tuple[int, int]]:
    return [(e.layer, e.visit) for e in config.executions]


@st.composite
def loops(draw: st.DrawFn) -> dict[str, int]:
    layers = draw(st.integers(1, 12))
    start = draw(st.integers(0, layers))
    return {
        "num_physical_layers": layers,
        "loop_start": start,
        "loop_stop": draw(st.integers(start, layers)),
        "num_visits": draw(st.integers(1, 4)),
    }


# ---------------------------------------------------------------- the span


@pytest.mark.parametrize(
    ("layers", "span", "executed"),
    [(10, (2, 7), 15), (12, (3, 9), 18), (20, (5, 15), 30), (30, (7, 22), 45)],
)
def test_default_span_is_the_papers(layers: int, span: tuple[int, int], executed: int) -> None:
    config = config_of(num_physical_layers=layers)
    assert default_span(layers) == span
    assert (config.loop_start, config.loop_stop) == span
    assert config.num_hidden_layers == len(config.executions) == executed


@given(st.integers(1, 400))
def test_default_span_is_the_middle_half(layers: int) -> None:
    start, stop = default_span(layers)
    before, after = start, layers - stop
    assert stop - start == layers // 2
    assert 0 <= after - before <= 1  # an odd layer goes behind the span, as in the paper's L = 30


# ---------------------------------------------------------------- the executions


@given(loops())
def test_executions_run_the_span_as_a_block(loop: dict[str, int]) -> None:
    executions = config_of(**loop).executions
    layers, start, stop, visits = loop.values()
    span = list(range(start, stop))

    assert [e.index for e in executions] == list(range(layers + (visits - 1) * len(span)))
    # Every layer runs as often as it is visited, and its visits are numbered in time.
    runs = Counter(e.layer for e in executions)
    assert runs == {layer: visits if layer in span else 1 for layer in range(layers)}
    for layer in range(layers):
        assert [e.visit for e in executions if e.layer == layer] == list(range(1, runs[layer] + 1))
    # First visits are the plain stack; visit 2 starts only after the whole span had its first.
    assert [e.layer for e in executions if e.visit == 1] == list(range(layers))
    middle = executions[start : start + visits * len(span)]
    assert [e.visit for e in middle] == sorted(e.visit for e in middle)
    assert [e.layer for e in middle] == span * visits


def test_executions_written_out() -> None:
    config = config_of(loop_start=2, loop_stop=4, num_visits=3)
    assert [e.layer for e in config.executions] == [0, 1, 2, 3, 2, 3, 2, 3, 4, 5]
    assert [e.visit for e in config.executions] == [1, 1, 1, 1, 2, 2, 3, 3, 1, 1]


@given(loops())
def test_executions_of_reads_what_the_configuration_says(loop: dict[str, int]) -> None:
    config = config_of(**loop)
    assert executions_of(config) == config.executions


def test_executions_of_other_models() -> None:
    plain = executions_of(LlamaConfig(num_hidden_layers=3))
    assert [(e.index, e.layer, e.visit) for e in plain] == [(0, 0, 1), (1, 1, 1), (2, 2, 1)]
    looped = executions_of(tiny("inkling2_loop").config)  # 6 layers, 2:4 three times
    assert [e.layer for e in looped] == [0, 1, 2, 3, 2, 3, 2, 3, 4, 5]
    assert [e.visit for e in looped] == [1, 1, 1, 1, 2, 2, 3, 3, 1, 1]


def test_executions_of_refuses_a_loop_it_does_not_know() -> None:
    config = PreTrainedConfig()
    config.model_type, config.num_hidden_layers = "ouro", 4
    with pytest.raises(SmeltscopeError, match="ouro runs its layers more than once"):
        executions_of(config)


# ---------------------------------------------------------------- derived values


@pytest.mark.parametrize("visits", [1, 2, 3, 4])
def test_residual_scale_defaults_to_one_over_visits(visits: int) -> None:
    assert config_of(num_visits=visits).residual_scale == 1 / visits


def test_another_number_of_visits_keeps_the_trained_scale() -> None:
    trained = config_of(num_visits=2)
    more = trained.with_visits(3)
    assert more.residual_scale == 0.5
    assert order(more) == order(config_of(num_visits=3))
    assert more.num_hidden_layers == 12
    assert (trained.num_visits, trained.num_hidden_layers) == (2, 9)  # left alone
    assert config_of(num_visits=1).with_visits(2).residual_scale == 1.0  # a Baseline's


def test_no_visit_leaves_the_span_out() -> None:
    trained = config_of(num_visits=2)
    without = trained.with_visits(0)
    assert order(without) == [(0, 1), (4, 1), (5, 1)] == order(without.with_visits(0))
    assert (without.num_visits, without.num_hidden_layers, without.residual_scale) == (0, 3, 0.5)
    assert executions_of(without) == without.executions
    assert without.with_visits(2).to_dict() == trained.to_dict()


@pytest.mark.parametrize("scale", [1, 0.5, 0.0])
def test_another_residual_scale(scale: float) -> None:
    baseline = config_of(num_visits=1)
    looped = baseline.with_visits(2, scale)
    assert [looped.write_scale(layer) for layer in range(6)] == [1, scale, scale, scale, 1, 1]
    assert looped.with_visits(3).residual_scale == scale
    assert baseline.residual_scale == 1.0  # left alone
    assert SmeltConfig.from_dict(looped.to_dict()).residual_scale == scale


def test_head_dim_defaults_to_an_equal_share() -> None:
    assert config_of().head_dim == 8
    assert config_of(head_dim=16).head_dim == 16


@given(loops(), st.one_of(st.none(), st.floats(0.1, 2.0)), st.booleans())
def test_configuration_survives_the_file(
    loop: dict[str, int], scale: float | None, qk_norm: bool
) -> None:
    config = config_of(**loop, residual_scale=scale, qk_norm=qk_norm)
    again = SmeltConfig.from_dict(config.to_dict())
    assert again.to_dict() == config.to_dict()
    assert again.executions == config.executions


def test_auto_config_reads_it(tmp_path: Path) -> None:
    config = config_of(num_visits=3, loop_start=1, loop_stop=2)
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is SmeltConfig
    assert {**again.to_dict(), "_name_or_path": ""} == config.to_dict()


def test_a_saved_other_number_of_visits_loads_as_such(tmp_path: Path) -> None:
    config_of(num_visits=2).with_visits(3).save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert (again.num_visits, again.residual_scale, again.num_hidden_layers) == (3, 0.5, 12)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"num_physical_layers": 0}, "num_physical_layers is 0; a model needs at least one layer"),
        ({"loop_start": 3, "loop_stop": 2}, "looped span 3:2 does not lie inside the stack of 6"),
        ({"loop_start": -1, "loop_stop": 2}, "looped span -1:2 does not lie inside"),
        ({"loop_start": 2, "loop_stop": 7}, "looped span 2:7 does not lie inside"),
        ({"num_visits": 0}, "num_visits is 0: a model that is made or stored has its span visited"),
        ({"num_visits": -1}, "num_visits is -1; give 1 or more, or 0 to leave the span out"),
        ({"residual_scale": float("nan")}, "residual_scale is nan; it must be a finite number"),
        ({"num_hidden_layers": 6}, "num_hidden_layers is 6, but 6 layers with 1:4 run 2 times"),
        ({"num_attention_heads": 5}, "hidden_size 32 is not divisible by num_attention_heads 5"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not divisible by num_key_value"),
        ({"num_key_value_heads": 0}, "not divisible by num_key_value_heads 0"),
        ({"head_dim": 7}, "head_dim is 7; rotary embeddings need an even head size"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 must lie between 1 and num_experts 8"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok 0 must lie between 1 and num_experts 8"),
        ({"mlp_only_layers": [1]}, "A SMELT layer always has experts"),
        ({"decoder_sparse_step": 2}, "A SMELT layer always has experts"),
    ],
)
def test_contradictions_are_refused(values: dict[str, object], sentence: str) -> None:
    with pytest.raises(SmeltscopeError, match=sentence):
        config_of(**values)


def test_with_visits_refuses_what_cannot_run() -> None:
    with pytest.raises(SmeltscopeError, match="num_visits is -2; give 1 or more, or 0"):
        config_of().with_visits(-2)
    with pytest.raises(SmeltscopeError, match="0 and the span is the whole stack: no layer would"):
        config_of(loop_start=0, loop_stop=6).with_visits(0)
    with pytest.raises(SmeltscopeError, match="residual_scale is inf"):
        config_of().with_visits(2, float("inf"))


def test_auto_classes_refuse_another_number_of_visits(tmp_path: Path) -> None:
    config_of().save_pretrained(tmp_path)
    for auto in (AutoConfig, AutoModelForCausalLM):
        with pytest.raises(SmeltscopeError, match="another number of visits use SmeltForCausalLM"):
            auto.from_pretrained(tmp_path, num_visits=3)
