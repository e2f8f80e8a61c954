"""The kernels of a GPU: their log-sum-exp against a plain one, and logits that stay bit-equal."""

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from smeltscope.activations import capture
from smeltscope.activations.attention import attend
from smeltscope.model import TINY_MODELS, tiny

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device"),
]
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-4, torch.float16: 2e-4}


def a_module(groups: int) -> nn.Module:
    module = nn.Module()
    module.is_causal, module.num_key_value_groups = True, groups
    return module.eval()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_log_sum_exp_of_every_kernel(kernel, dtype, mode):
    taken = [
        is_right(kernel, dtype, groups, queries, masked, mode)
        for groups in (1, 4)
        for queries in (1, 33, 128, 300)
        for masked in (False, True)
    ]
    if not any(taken):
        pytest.skip(f"{kernel} takes no such inputs on this device")


def is_right(kernel, dtype, groups, queries, masked, mode) -> bool:
    """False where the kernel does not take such inputs."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    query, key, value = normal(2, 8, queries, 64), *(normal(2, 8 // groups, 300, 64) for _ in "kv")
    if queries > 1:
        key, value = key[:, :, :queries], value[:, :, :queries]
    query.requires_grad_(mode is torch.enable_grad)
    seen = torch.ones(queries, key.shape[2], dtype=torch.bool, device="cuda")
    seen = seen.tril(key.shape[2] - queries)
    if masked:
        seen &= ~seen.tril(key.shape[2] - queries - 40)  # a window
    mask = seen[None, None].expand(2, 1, -1, -1) if masked else None
    with mode(), sdpa_kernel(KERNELS[kernel]):
        try:
            _, attention = attend(a_module(groups), query, key, value, mask)
        except RuntimeError as error:
            assert "No available kernel" in str(error) or "No viable backend" in str(error)
            return False
    repeated = key.double().repeat_interleave(groups, dim=1)
    scores = query.detach().double() @ repeated.transpose(2, 3) / 8
    scores = scores.masked_fill(~seen, -torch.inf)
    assert (attention.lse - scores.logsumexp(-1)).abs().max() < BOUND[dtype]
    with mode():
        keys = torch.arange(key.shape[2], device="cuda").expand(2, -1)
        mass = attention.mass_on(keys)
    assert (mass - scores.softmax(-1)).abs().max() < BOUND[dtype]
    return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", [n for n in TINY_MODELS if n not in ("gpt_oss", "inkling2_loop")])
def test_logits_are_bit_equal(name, padded, dtype):
    model = tiny(name).to("cuda", dtype)
    tokens = torch.randint(1, 256, (3, 40), generator=torch.Generator().manual_seed(0)).cuda()
    mask = torch.ones_like(tokens)
    mask[1, :7] = 0
    mask = mask if padded else None
    with torch.inference_mode():
        bare = model(tokens, attention_mask=mask).logits
        again = model(tokens, attention_mask=mask).logits
        if not torch.equal(bare, again):
            pytest.skip("the bare model does not repeat itself on this device")
        with capture(model):
            watched = model(tokens, attention_mask=mask).logits
    assert torch.equal(watched, bare)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_mass_like_on_the_cpu(name):
    model = tiny(name)
    tokens = torch.randint(1, 256, (3, 40), generator=torch.Generator().manual_seed(0))
    keys = torch.arange(40).expand(3, -1)
    with torch.inference_mode():
        with capture(model) as run:
            model(tokens)
        expected = [run[e.index, "attention"].mass_on(keys) for e in run.executions]
        model.cuda()
        with capture(model) as run:
            model(tokens.cuda())
        measured = [run[e.index, "attention"].mass_on(keys.cuda()).cpu() for e in run.executions]
    # Deep executions inherit the rounding of all earlier ones.
    assert max((a - b).abs().max() for a, b in zip(measured, expected, strict=True)) < 1e-3


def test_flash_attn_agrees_on_the_log_sum_exp():
    """The flash-attn package against PyTorch's kernels, on what both take: bfloat16, causal."""
    flash_attn = pytest.importorskip(
        "flash_attn", reason="the extra `cuda` (flash-attn) is not installed"
    )
    generator = torch.Generator("cuda").manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, 256, 64, generator=generator, device="cuda").bfloat16()
        for heads in (8, 2, 2)
    )
    output, lse, _ = flash_attn.flash_attn_func(
        *(x.transpose(1, 2) for x in (query, key, value)), causal=True, return_attn_probs=True
    )
    ours, attention = attend(a_module(4), query, key, value, None)
    assert (attention.lse - lse).abs().max() < BOUND[torch.bfloat16]
    assert (ours.float() - output.float()).abs().max() < 1e-2  # one step of bfloat16 around 1
