"""`editing` against hooks put by hand on the output projection's input."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from smeltscope.activations import capture, decode, editing
from smeltscope.errors import SmeltscopeError
from smeltscope.model import TINY_MODELS, Execution, decoder_stack, executions_of, tiny

EAGER_ONLY = ("gpt_oss", "inkling2_loop")
GATED = ("dory", "hrm_text")  # before the projection each head is multiplied by a gate
LOOPED = {
    "smelt": {},
    "smelt, 3 visits": {"num_visits": 3},
    "smelt, 1 visit": {"num_visits": 1},
    "smelt, one head": {"num_attention_heads": 1, "num_key_value_heads": 1},
    "dory": {},
    "inkling2_loop": {},
    "hrm_text": {},
    "llama": {},
}


def some_tokens(rows: int = 2, length: int = 24) -> Tensor:
    return torch.randint(1, 256, (rows, length), generator=torch.Generator().manual_seed(0))


def build(variant: str) -> Any:
    return tiny(variant.partition(",")[0], **LOOPED.get(variant, {}))


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(tokens, use_cache=False).logits


def state(model: Any) -> list[Any]:
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    configs = [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")]
    return [hooks, configs]


@contextmanager
def by_hand(model: Any, edit: Callable[[Execution, Tensor], Tensor]) -> Iterator[None]:
    """The same through hooks on `o_proj` that count how often each has run; one forward."""
    executions, layers = executions_of(model.config), decoder_stack(model)[1]
    runs = Counter[Any]()
    hooks = []
    for layer in dict.fromkeys(layers):
        mine = [e for e, other in zip(executions, layers, strict=True) if other is layer]
        size = layer.self_attn.head_dim

        def hook(module, args, mine=mine, size=size):
            execution = mine[runs[module]]
            runs[module] += 1
            edited = edit(execution, args[0].unflatten(-1, (-1, size)).clone())
            return (edited.flatten(2), *args[1:])  # Inkling gives its gates what they read

        hooks.append(layer.self_attn.o_proj.register_forward_pre_hook(hook))
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


@pytest.mark.parametrize("name", TINY_MODELS)
def test_what_is_returned_as_it_came_changes_nothing(name):
    model, tokens = tiny(name), some_tokens()
    expected, before, seen = logits_of(model, tokens), state(model), []

    def edit(execution, pv):
        seen.append(execution)
        return pv

    with editing(model, edit):
        found = logits_of(model, tokens)
    if name in EAGER_ONLY:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(found, expected)
    assert seen == executions_of(model.config)
    assert state(model) == before and torch.equal(logits_of(model, tokens), expected)


@pytest.mark.parametrize("variant", LOOPED)
def test_like_hooks_on_the_output_projection(variant):
    """One head of one row at one execution, each in turn."""
    model, tokens = build(variant), some_tokens()
    plain = logits_of(model, tokens)
    gated = variant in GATED
    for target in executions_of(model.config):

        def edit(execution, pv, target=target):
            if execution == target:
                pv[1, 2:, -1] = 0 if gated else 0.3 - pv[0, 2:, 0]
            return pv

        with editing(model, edit):
            found = logits_of(model, tokens)
        with by_hand(model, edit):
            expected = logits_of(model, tokens)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert (found[1] - plain[1]).abs().max() > 1e-4
        torch.testing.assert_close(found[0], plain[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["smelt", "gpt2", "gpt_oss"])
def test_capture_reads_what_an_edit_is_given(name):
    model, tokens = tiny(name), some_tokens()
    with torch.no_grad(), capture(model, ["pv"]) as run:
        model(tokens)
    seen = {}
    with editing(model, lambda e, pv: seen.setdefault(e.index, pv)):
        logits_of(model, tokens)
    for execution in executions_of(model.config):
        assert torch.equal(seen[execution.index], run[execution.index, "pv"])


def test_in_bfloat16_and_through_the_decoder():
    model, tokens = tiny("smelt").bfloat16(), some_tokens(1, 1)
    with torch.no_grad():
        plain = decode(model, tokens).last_hidden_state
        with editing(model, lambda _, pv: pv):
            assert torch.equal(decode(model, tokens).last_hidden_state, plain)
        with editing(model, lambda _, pv: pv.zero_()):
            changed = decode(model, tokens).last_hidden_state
    assert changed.dtype == torch.bfloat16 and not torch.equal(changed, plain)


def test_gradients_go_through_an_edit():
    model, tokens = tiny("smelt"), some_tokens()
    factor = torch.ones((), requires_grad=True)
    with editing(model, lambda _, pv: pv * factor):
        model(tokens).logits.square().mean().backward()
    assert factor.grad is not None and factor.grad.abs() > 0


def test_an_exception_in_mid_forward_puts_everything_back():
    model, tokens = tiny("smelt"), some_tokens()
    expected, before = logits_of(model, tokens), state(model)

    def edit(execution, pv):
        if execution.index == 4:
            raise KeyboardInterrupt
        return pv * 0

    with pytest.raises(KeyboardInterrupt), editing(model, edit):
        logits_of(model, tokens)
    assert state(model) == before and torch.equal(logits_of(model, tokens), expected)
    with editing(model, lambda _, pv: pv):
        assert torch.equal(logits_of(model, tokens), expected)


def test_refusals():
    model, tokens = tiny("smelt"), some_tokens()
    for wrong in (lambda _, pv: pv[:, 1:], lambda _, pv: pv.double()):
        with pytest.raises(SmeltscopeError, match="edit of execution 0"), editing(model, wrong):
            logits_of(model, tokens)
    with (
        editing(model, lambda _, pv: pv),
        pytest.raises(SmeltscopeError, match="captured already"),
        capture(model),
    ):
        pass
    with (
        pytest.raises(SmeltscopeError, match="as it was loaded"),
        editing(torch.nn.Linear(1, 1), id),
    ):
        pass
    assert state(model) == state(tiny("smelt"))


SCRIPT = """
import sys
import torch
from smeltscope.activations import editing
from smeltscope.model import load_checkpoint

def edit(execution, pv):
    assert pv.shape[2] == 4
    if execution.index in (2, 5):
        pv[:, 1:, 3] = pv[:, 1:, 0]
    return pv

model = load_checkpoint(sys.argv[1], tensor_parallel=sys.argv[2] != "alone").model
with torch.no_grad(), editing(model, edit):
    logits = model(torch.arange(1, 25).reshape(2, 12)).logits
if sys.argv[2] == "alone" or torch.distributed.get_rank() == 0:
    torch.save(logits, sys.argv[3])
"""


@pytest.mark.slow
def test_heads_spread_over_processes(tmp_path: Path, tiny_checkpoint: Path):
    (tmp_path / "script.py").write_text(SCRIPT)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = []
    for launcher, name in (([], "alone"), (torchrun, "spread")):
        out = tmp_path / f"{name}.pt"
        done = subprocess.run(
            [sys.executable, *launcher, tmp_path / "script.py", tiny_checkpoint, name, out],
            check=False,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        found.append(torch.load(out))
    assert (found[0] - found[1]).abs().max() < 1e-5
