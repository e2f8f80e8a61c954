"""The order of executions and their modules, against what runs in a forward of the real model."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from smeltscope.errors import SmeltscopeError
from smeltscope.model import decoder_stack, executions_of, tiny, with_visits

# {model: what runs, by the names that transformers gives, e.g. H3 is H_module.layers.3}
RUNS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("llama", {}, "0 1 2"),
    "baseline": ("baseline", {}, "0 1 2 3 4 5"),
    "inkling2_loop": ("inkling2_loop", {}, "0 1 2 3 2 3 2 3 4 5"),
    "dory": ("dory", {}, "0 1 2 1 2 3"),
    "dory, one loop": ("dory", {"n_recurrent_loops": 1}, "0 1 2 3"),
    "dory, three loops": ("dory", {"n_recurrent_loops": 3}, "0 1 2 1 2 1 2 3"),
    "dory, no output layers": (
        "dory",
        {"n_input_layers": 0, "n_recurrent_layers": 4, "n_output_layers": 0},
        "0 1 2 3 0 1 2 3",
    ),
    "dory, uneven": (
        "dory",
        {"n_input_layers": 2, "n_recurrent_layers": 1, "n_recurrent_loops": 3},
        "0 1 2 2 2 3",
    ),
    "hrm_text": ("hrm_text", {}, "L0 L1 L0 L1 H0 H1 L0 L1 L0 L1 H0 H1"),
    "hrm_text, flat": ("hrm_text", {"H_cycles": 1, "L_cycles": 1}, "L0 L1 H0 H1"),
    "hrm_text, one layer a stack": (
        "hrm_text",
        {"num_hidden_layers": 1, "H_cycles": 3, "L_cycles": 1},
        "L0 H0 L0 H0 L0 H0",
    ),
    "hrm_text, deep": (
        "hrm_text",
        {"num_hidden_layers": 3, "H_cycles": 1, "L_cycles": 3},
        "L0 L1 L2 L0 L1 L2 L0 L1 L2 H0 H1 H2",
    ),
}


def ran_in(model: PreTrainedModel) -> tuple[list[nn.Module], list[str]]:
    """The decoder layers that run in a forward, and their short names."""
    modules: list[nn.Module] = []
    names: list[str] = []
    for name, module in model.named_modules():
        if type(module).__name__.endswith("DecoderLayer"):
            stack = "L" if "L_module" in name else "H" if "H_module" in name else ""
            short = stack + name.rpartition(".")[2]

            def ran(module: nn.Module, *_: object, short: str = short) -> None:
                modules.append(module)
                names.append(short)

            module.register_forward_hook(ran)
    with torch.no_grad():
        model(torch.arange(1, 7)[None])
    return modules, names


@pytest.mark.parametrize("case", RUNS)
def test_executions_are_what_runs(case: str) -> None:
    kind, overrides, expected = RUNS[case]
    model = tiny(kind, **overrides)
    modules, names = ran_in(model)
    assert " ".join(names) == expected
    executions = executions_of(model.config)
    # Layers are numbered in the order of their first run, visits of a layer in the order of its runs.
    first = list(dict.fromkeys(names))
    assert [e.layer for e in executions] == [first.index(name) for name in names]
    assert [e.visit for e in executions] == [names[: i + 1].count(n) for i, n in enumerate(names)]
    assert [e.index for e in executions] == list(range(len(names)))
    stack, layers = decoder_stack(model)
    assert layers == modules
    assert stack is model.get_decoder()


@pytest.mark.parametrize("visits", [0, 1, 2, 3])
def test_each_execution_of_smelt_has_a_module_of_its_own(visits: int) -> None:
    model = with_visits(tiny("smelt"), visits)
    modules, _ = ran_in(model)
    stack, layers = decoder_stack(model)
    assert stack is model.model
    assert layers == modules == list(model.model.layers)
    assert [m.execution for m in layers] == executions_of(model.config)


@pytest.mark.parametrize("kind", ["smelt", "dory", "hrm_text"])
def test_the_stack_without_its_head(kind: str) -> None:
    model = tiny(kind).get_decoder()
    stack, layers = decoder_stack(model)
    assert stack is model
    assert layers == ran_in(model)[0]


def test_hrm_text_is_causal_without_token_types() -> None:
    model = tiny("hrm_text")
    assert model.config.prefix_lm
    ids = torch.arange(1, 9)[None]
    changed = ids.clone()
    changed[0, 5:] = 77
    with torch.no_grad():
        difference = model(ids).logits - model(changed).logits
    assert difference[:, :5].abs().max() < 1e-5
    assert difference[:, 5:].abs().max() > 1e-2


def test_models_that_cannot_be_labelled_are_refused() -> None:
    model: Any = tiny("llama")
    model.model.layers = nn.ModuleList([*model.model.layers, model.model.layers[1]])
    with pytest.raises(SmeltscopeError, match=r"has 4 layers, .* implies that 3 run; it cannot be"):
        decoder_stack(model)

    model = tiny("hrm_text")
    model.model.H_module.layers = model.model.H_module.layers[:1]
    with pytest.raises(SmeltscopeError, match="has 3 layers, but its configuration implies that 4"):
        decoder_stack(model)

    model = tiny("llama")
    model.model.layers = nn.ModuleList([])
    with pytest.raises(SmeltscopeError, match="no list of decoder layers"):
        decoder_stack(model)

    t5 = transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1)
    with pytest.raises(SmeltscopeError, match="has 2 stacks of layers; smeltscope watches decoder"):
        decoder_stack(transformers.T5ForConditionalGeneration(t5))
