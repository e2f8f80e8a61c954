"""What training minimises, against plain loops, PyTorch and transformers."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from smeltscope.model import SmeltConfig, SmeltForCausalLM
from smeltscope.model.losses import router_losses, token_losses

SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "num_physical_layers": 8,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


def plain_losses(
    router_logits: list[Tensor], real: Tensor, top_k: int
) -> tuple[float, float, list[list[int]]]:
    """Balance, z and load, one execution, token and expert after another."""
    balances, squares, loads = [], [], []
    counted = [t for t, is_real in enumerate(real.flatten().tolist()) if is_real]
    for logits in router_logits:
        experts = logits.shape[1]
        load, mean = [0] * experts, [0.0] * experts
        for t in counted:
            exponentials = [math.exp(x) for x in logits[t].tolist()]
            total = sum(exponentials)
            squares.append(math.log(total) ** 2)
            for i in sorted(range(experts), key=lambda i: -exponentials[i])[:top_k]:
                load[i] += 1
            for i in range(experts):
                mean[i] += exponentials[i] / total / len(counted)
        f = [n / len(counted) for n in load]
        balances.append(experts * sum(a * b for a, b in zip(f, mean, strict=True)))
        loads.append(load)
    return sum(balances) / len(balances), sum(squares) / len(squares), loads


@pytest.mark.parametrize("executions", [1, 12])
@pytest.mark.parametrize("padded", [False, True])
def test_router_losses_are_those_of_a_plain_loop(executions: int, padded: bool) -> None:
    generator = torch.Generator().manual_seed(executions)
    logits = [2 * torch.randn(3 * 7, 8, generator=generator) for _ in range(executions)]
    real = torch.ones(3, 7, dtype=torch.bool)
    if padded:
        real[1, 4:] = real[2, 1:] = False
    found = router_losses(logits, real, top_k=3)
    balance, z, load = plain_losses(logits, real, 3)
    assert found.balance.item() == pytest.approx(balance, rel=1e-5)
    assert found.z.item() == pytest.approx(z, rel=1e-5)
    assert found.load.tolist() == load
    if executions == 1:  # there transformers has the same
        theirs = load_balancing_loss_func(tuple(logits), 8, 3, real.long())
        assert found.balance.item() == pytest.approx(float(theirs), rel=1e-5)


def test_every_visit_is_balanced_by_itself() -> None:
    """Two collapsed routers that make up for each other: transformers' loss calls them balanced."""
    real = torch.ones(1, 6, dtype=torch.bool)
    low, high = torch.tensor([[30.0, 30.0, 0.0, 0.0]]), torch.tensor([[0.0, 0.0, 30.0, 30.0]])
    collapsed = (low.expand(6, 4), high.expand(6, 4))
    assert float(load_balancing_loss_func(collapsed, 4, 2)) == pytest.approx(2)  # k: perfect
    assert router_losses(collapsed, real, top_k=2).balance.item() == pytest.approx(
        4
    )  # E: the worst
    uniform = torch.zeros(6, 4)
    assert router_losses([uniform], real, top_k=2).balance.item() == pytest.approx(2)
    # An expert overused at one of 12 executions has a twelfth of the weight, whatever its layer.
    once = [low.expand(6, 4)] + [uniform] * 11
    assert router_losses(once, real, top_k=2).balance.item() == pytest.approx(2 + 2 / 12)


def test_model_gives_a_router_for_each_visit() -> None:
    config = SmeltConfig(**SIZES)  # 8 layers, of which 2 to 5 run twice
    torch.manual_seed(0)
    model = SmeltForCausalLM(config).eval()
    ids = torch.randint(60, (2, 9))
    logits = model(ids, output_router_logits=True).router_logits
    real = torch.ones(2, 9, dtype=torch.bool)
    assert len(logits) == 12 and [e.layer for e in config.executions] == [
        *(0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 6, 7)
    ]
    found = router_losses(logits, real, top_k=2)
    assert found.balance.item() == pytest.approx(plain_losses(list(logits), real, 2)[0], rel=1e-5)
    found.balance.backward()
    gate = model.model.layers[2].mlp.gate.weight.grad  # the same parameter as at execution 6
    assert gate is model.model.layers[6].mlp.gate.weight.grad and gate.abs().sum() > 0


def test_token_losses_sum_to_the_model_s_own_loss() -> None:
    torch.manual_seed(1)
    model = SmeltForCausalLM(SmeltConfig(**{**SIZES, "num_physical_layers": 2})).eval()
    ids = torch.randint(60, (3, 10))
    labels = ids.clone()
    labels[0, 4:] = labels[1, 0] = labels[2, 3] = -100
    losses = token_losses(model(ids).logits, labels)
    theirs = model(ids, labels=labels).loss
    assert losses.sum().item() / (labels[:, 1:] >= 0).sum() == pytest.approx(
        theirs.item(), rel=1e-6
    )
    assert losses.shape == (3, 10)
    assert (losses[:, 0] == 0).all() and (losses[labels < 0] == 0).all()  # where they stand
    log_probabilities = model(ids).logits.log_softmax(-1)
    assert losses[2, 5].item() == pytest.approx(
        -log_probabilities[2, 4, ids[2, 5]].item(), rel=1e-5
    )


def test_a_single_token_predicts_nothing() -> None:
    assert token_losses(torch.randn(2, 1, 5), torch.tensor([[1], [2]])).tolist() == [[0.0], [0.0]]


def test_bfloat16_logits_are_reduced_in_float32() -> None:
    logits = 3 * torch.randn(1, 40, 16, generator=torch.Generator().manual_seed(2)).bfloat16()
    labels = torch.arange(40)[None] % 16
    exact = token_losses(logits.double().float(), labels)
    assert token_losses(logits, labels).dtype == torch.float32
    assert torch.equal(token_losses(logits, labels), exact)
    real = torch.ones(1, 40, dtype=torch.bool)
    assert router_losses([logits[0]], real, top_k=2).balance.item() == pytest.approx(
        plain_losses([logits[0].float()], real, 2)[0], rel=1e-4
    )
