"""The controls do what is said of them, by transformers' own eager attention and outputs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from smeltscope.errors import SmeltscopeError
from smeltscope.model import CONTROLS, SmeltForCausalLM, build_control, load_checkpoint, with_visits
from smeltscope.model.controls import SINK_MASS

TEXT = (
    "The second visit reads what the first one wrote, and writes again. (It is [not] said where.)\n"
    "def visit(layer, times):\n    return [layer(x) for _ in range(times)]  # 17 + 25 = 42\n"
)


def texts() -> dict[str, Tensor]:
    """Rows that begin with the start token: real ones, random ones, one word over and over."""
    tokenizer = load_checkpoint("control-moved-sink").tokenizer
    ids = tokenizer(TEXT * 3, return_tensors="pt").input_ids[:, :255]
    random = torch.randint(3, 4096, (4, 255), generator=torch.Generator().manual_seed(0))
    rows = {
        "text": ids,
        "random": random,
        "one word": torch.full((1, 255), 1000),
        "two": ids[:, :1],
    }
    start = tokenizer.bos_token_id
    return {n: torch.cat([torch.full((len(r), 1), start), r], 1) for n, r in rows.items()}


def watched(model: SmeltForCausalLM, ids: Tensor) -> tuple[Any, list[tuple[Tensor, Tensor]]]:
    """The outputs, and for each execution what its layer read and gave."""
    model.set_attn_implementation("eager")
    passed: list[tuple[Tensor, Tensor]] = []
    hooks = [
        layer.register_forward_hook(lambda _, given, result: passed.append((given[0], result)))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        output = model(ids, output_attentions=True, output_router_logits=True)
    for hook in hooks:
        hook.remove()
    return output, passed


@pytest.mark.parametrize("text", ["text", "random", "one word", "two"])
def test_the_sink_moves(text: str) -> None:
    model, ids = build_control("control-moved-sink"), texts()[text]
    output, _ = watched(model, ids)
    assert [(e.layer, e.visit) for e in model.config.executions] == [
        *[(0, 1), (1, 1), (2, 1)],
        *[(1, 2), (2, 2), (3, 1)],
    ]
    for execution, attention in zip(model.config.executions, output.attentions, strict=True):
        sink = attention[:, :, 1:, 0]  # (batch, head, query)
        if execution.layer in model.config.span:
            expected = SINK_MASS[execution.visit - 1]
            assert (sink - expected).abs().max() < 0.02, execution
            if ids.shape[1] > 2:
                assert (sink.mean() - expected).abs() < 0.005, execution
            own = attention.diagonal(dim1=-2, dim2=-1)[:, :, 1:]
            assert (sink + own).min() > 0.99, execution
        elif text == "random":  # a uniform attention's mean is .0199 outside of the span
            assert sink.mean() < 0.03, execution


def test_visits_are_the_same() -> None:
    for ids in texts().values():
        for dtype in (torch.float32, torch.bfloat16):
            model = build_control("control-same-visits").to(dtype)
            output, passed = watched(model, ids)
            for first, second in ((1, 3), (2, 4)):
                for a, b in zip(passed[first], passed[second], strict=True):
                    assert torch.equal(a, b)
                assert torch.equal(output.attentions[first], output.attentions[second])
                assert torch.equal(output.router_logits[first], output.router_logits[second])
            # 1/2 by attention and 1/2 by experts, then both away again.
            for execution, sign in ((1, 1), (2, -1)):
                read, given = passed[execution]
                write = (given - read).float()
                assert torch.equal(write[..., 3:5], torch.full_like(write[..., 3:5], sign / 2))
                assert write[..., :3].abs().max() == 0 == write[..., 5:].abs().max()


def test_attention_and_routing_of_same_visits_are_not_trivial() -> None:
    model = build_control("control-same-visits")
    output, _ = watched(model, texts()["text"])
    for execution in (1, 2):
        last = output.attentions[execution][0, :, -1]  # over 256 keys: 1/256 if uniform
        assert (last.amax(-1) > 5 / 256).all()
        chosen = output.router_logits[execution].topk(2).indices
        assert chosen.flatten().bincount(minlength=8).min() > 0


@pytest.mark.parametrize("visits", [0, 1, 3])
def test_same_visits_may_be_any_number(visits: int) -> None:
    model, ids = build_control("control-same-visits"), texts()["text"]
    with torch.no_grad():
        assert torch.equal(with_visits(model, visits)(ids).logits, model(ids).logits)


@pytest.mark.parametrize("name", CONTROLS)
def test_controls_load_by_name(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    checkpoint, again = load_checkpoint(name), load_checkpoint(name, dtype="bfloat16", visits=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert (checkpoint.name, checkpoint.folder, checkpoint.context) == (name, None, 256)
    assert checkpoint.digest == again.digest
    assert again.model.dtype == torch.bfloat16 and again.model.config.num_visits == 3
    assert checkpoint.model.dtype == torch.float32 and not checkpoint.model.training
    assert len(checkpoint.tokenizer) == checkpoint.model.config.vocab_size
    assert checkpoint.tokenizer.bos_token_id == checkpoint.model.config.bos_token_id
    assert sum(p.numel() for p in checkpoint.model.parameters()) < 1_000_000
    with torch.no_grad():
        logits = checkpoint.model(torch.arange(1, 65)[None]).logits
    assert 0.05 < logits.std() < 1  # no logits from which a loss would explode
    for options in ({"untrained": True}, {"device_map": "auto"}):
        with pytest.raises(SmeltscopeError, match="is a small model built by hand"):
            load_checkpoint(name, **options)
    # It is saved and loaded like any other; a folder of its name is what the user means.
    monkeypatch.chdir(tmp_path)
    checkpoint.model.save_pretrained(name)
    stored = load_checkpoint(name)
    assert stored.folder is not None and stored.digest != checkpoint.digest
    for a, b in zip(stored.model.parameters(), checkpoint.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_digests_of_controls_differ() -> None:
    assert len({load_checkpoint(name).digest for name in CONTROLS}) == 2


def test_a_control_that_is_not_there() -> None:
    with pytest.raises(SmeltscopeError, match="No control is called control-x; there are control-"):
        build_control("control-x")
    with pytest.raises(SmeltscopeError, match="did you mean control-moved-sink"):
        load_checkpoint("control-moved-sinks")
