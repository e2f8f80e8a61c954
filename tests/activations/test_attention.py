"""`attend` and `Attention` against a dense softmax in float64, written out here."""

from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from smeltscope.activations import Attention
from smeltscope.activations.attention import attend
from smeltscope.errors import SmeltscopeError

# A score is a sum in float32: it is off by at most a few of its last places, and probabilities follow it.
LAST_PLACE = 2.0**-23
EXACT = 2e-6  # probabilities, for scores up to about 8


@dataclass
class Case:
    """What a model hands to attention, and what it must come to."""

    module: nn.Module
    query: Tensor  # (B, H, Q, D)
    key: Tensor  # (B, G, K, D)
    value: Tensor
    mask: Tensor | None
    extra: dict

    def attend(self, **more) -> tuple[Tensor, Attention]:
        return attend(
            self.module, self.query, self.key, self.value, self.mask, **{**self.extra, **more}
        )

    def largest_score(self) -> float:
        """The largest sum of magnitudes that goes into a score: what its rounding is relative to."""
        groups = self.module.num_key_value_groups
        key = self.key.abs().float().repeat_interleave(groups, dim=1)
        scale = self.extra.get("scaling") or self.query.shape[-1] ** -0.5
        scores = self.query.detach().abs().float() @ key.transpose(2, 3) * scale
        for bias in (self.extra.get("position_bias"), self.mask):
            if bias is not None and bias.dtype != torch.bool:
                scores = scores + bias.abs().float().masked_fill(bias < -1e30, 0.0)
        return max(1.0, scores.max().item())

    def dense(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Attention on keys (B, H, Q, K), on the sink (B, H, Q), lse (B, H, Q) and what is seen (B, Q, K)."""
        rows, heads, queries, size = self.query.shape
        keys = self.key.shape[2]
        scale = self.extra.get("scaling") or size**-0.5
        scores = torch.zeros(rows, heads, queries, keys, dtype=torch.float64)
        seen = torch.ones(rows, queries, keys, dtype=torch.bool)
        for h in range(heads):
            key = self.key[:, h // (heads // self.key.shape[1])].double()
            scores[:, h] = self.query[:, h].double() @ key.transpose(1, 2) * scale
        if self.extra.get("position_bias") is not None:
            scores += self.extra["position_bias"].double()
        if self.mask is None and queries > 1:
            seen &= torch.arange(keys)[None, :] <= torch.arange(queries)[:, None]
        elif self.mask is not None and self.mask.dtype == torch.bool:
            seen &= self.mask[:, 0]
        elif self.mask is not None:
            scores += self.mask.double()
            seen &= self.mask[:, 0] > -1e30
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        sink = torch.full((rows, heads, queries), -torch.inf, dtype=torch.float64)
        if self.extra.get("s_aux") is not None:
            sink[:] = self.extra["s_aux"].double()[None, :, None]
        if self.extra.get("sinks") is not None:
            sink[:] = self.extra["sinks"].double()
        everything = torch.cat([scores, sink[..., None]], dim=-1)
        lse = everything.logsumexp(-1)
        attention = (everything - lse[..., None]).exp()
        return attention[..., :-1], attention[..., -1], lse, seen


def a_module(groups: int = 1) -> nn.Module:
    module = nn.Module()
    module.is_causal, module.num_key_value_groups = True, groups
    return module.eval()


def a_case(
    rows=2, heads=4, groups=2, queries=6, keys=None, size=8, *, mask=None, seed=0, **kwargs
) -> Case:
    """`mask` is None, "bool", "float" or "chunk" (cached keys before the queries)."""
    generator = torch.Generator().manual_seed(seed)
    keys = keys or queries

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 1.5

    query, key = normal(rows, heads, queries, size), normal(rows, heads // groups, keys, size)
    value = normal(rows, heads // groups, keys, size)
    extra = {name: value for name, value in kwargs.items() if isinstance(value, float)}
    if kwargs.get("position_bias"):
        extra["position_bias"] = normal(kwargs.get("bias_rows", 1), heads, queries, keys)
    if kwargs.get("sink") == "head":
        extra["s_aux"] = normal(heads)
    if kwargs.get("sink") == "token":
        extra["sinks"] = normal(rows, heads, queries)
    offset = keys - queries
    seen = torch.ones(rows, 1, queries, keys, dtype=torch.bool).tril(offset)
    if mask in ("bool", "float"):  # each query keeps its own key and some others
        drop = torch.rand(rows, 1, queries, keys, generator=generator) < 0.4
        seen &= ~drop | torch.eye(queries, keys, dtype=torch.bool).roll(offset, dims=1)
    if mask == "float":
        seen = torch.where(seen, normal(rows, 1, queries, keys), torch.finfo(torch.float32).min)
    return Case(a_module(groups), query, key, value, seen if mask else None, extra)


@st.composite
def cases(draw) -> Case:
    heads_of_keys = draw(st.integers(1, 3), label="key heads")
    groups = draw(st.integers(1, 3), label="groups")
    mask = draw(st.sampled_from([None, "bool", "float", "chunk", "decode"]), label="mask")
    queries = 1 if mask == "decode" else draw(st.integers(1, 12), label="queries")
    longer = mask in ("chunk", "decode") or (mask is not None and draw(st.booleans()))
    keys = queries + (draw(st.integers(0, 9), label="cached keys") if longer else 0)
    return a_case(
        rows=draw(st.integers(1, 3), label="rows"),
        heads=heads_of_keys * groups,
        groups=groups,
        queries=queries,
        keys=keys,
        size=draw(st.sampled_from([2, 4, 8, 16, 20]), label="size"),
        mask=None if mask == "decode" else mask,
        position_bias=draw(st.booleans(), label="position bias"),
        sink=draw(st.sampled_from([None, "head", "token"]), label="sink"),
        scaling=draw(st.sampled_from([0.11, 0.5, 1.0]), label="scaling"),
        seed=draw(st.integers(0, 10**6), label="seed"),
    )


MODES = {"grad": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}


def every_key(case: Case) -> Tensor:
    return torch.arange(case.key.shape[2]).expand(len(case.query), -1)


def assert_like_dense(case: Case, attention: Attention, kernel: float = 0.0) -> None:
    """`kernel` is the error of the kernel's own log-sum-exp, where it is not float32's rounding."""
    dense, sink, lse, seen = case.dense()
    mass = log = kernel + 4 * LAST_PLACE * case.largest_score()
    queries = torch.arange(case.query.shape[2]).expand(len(case.query), -1)
    assert attention.lse.dtype == torch.float32
    torch.testing.assert_close(attention.lse.double(), lse, atol=log, rtol=0)
    on_all = attention.mass_on(every_key(case))
    assert on_all.dtype == torch.float32
    torch.testing.assert_close(on_all.double(), dense, atol=mass, rtol=0)
    torch.testing.assert_close(attention.rows(queries).double(), dense, atol=mass, rtol=0)
    assert torch.equal(attention.sees(every_key(case)), seen)
    assert torch.equal(attention.keys_seen(), seen.sum(-1))
    if attention.learned_sink is None:
        assert not (sink > 0).any()
        torch.testing.assert_close(
            on_all.sum(-1), torch.ones(()).expand_as(lse), atol=1e-5 + kernel, rtol=0
        )
    else:
        torch.testing.assert_close(attention.learned_sink.double(), sink, atol=mass, rtol=0)
        torch.testing.assert_close(
            on_all.sum(-1),
            1 - attention.learned_sink,
            atol=1e-5 + kernel,
            rtol=0,
            check_dtype=False,
        )


@settings(max_examples=80, deadline=None)
@given(cases(), st.sampled_from(list(MODES)))
def test_like_a_dense_softmax(case, mode):
    if mode == "grad":
        case.query.requires_grad_()
    with MODES[mode]():
        output, attention = case.attend()
        assert_like_dense(case, attention)
    assert not attention.lse.requires_grad
    dense, *_ = case.dense()
    value = case.value.double().repeat_interleave(case.module.num_key_value_groups, dim=1)
    expected = (dense @ value).transpose(1, 2)
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(cases(), st.sampled_from(list(MODES)), st.sampled_from([torch.float32, torch.bfloat16]))
def test_output_is_bit_equal_to_transformers(case, mode, dtype):
    case.extra = {"scaling": case.extra["scaling"]}
    with MODES[mode]():
        q, k, v = (t.to(dtype) for t in (case.query, case.key, case.value))
        mask = (
            case.mask if case.mask is None or case.mask.dtype == torch.bool else case.mask.to(dtype)
        )
        output, _ = attend(case.module, q, k, v, mask, **case.extra)
        expected, _ = sdpa_attention_forward(case.module, q, k, v, mask, **case.extra)
    assert output.dtype == dtype
    assert torch.equal(output, expected)


@settings(max_examples=40, deadline=None)
@given(cases(), st.sampled_from(list(MODES)))
def test_bfloat16_is_as_exact_as_its_inputs(case, mode):
    """Against the float64 truth of the rounded inputs: the probabilities themselves are not rounded.

    PyTorch's CPU kernel has a faster exp for 16-bit inputs, good to 1e-4 (7.2e-5 seen in 150 cases).
    """
    case.query, case.key, case.value = (t.bfloat16() for t in (case.query, case.key, case.value))
    if case.mask is not None and case.mask.dtype != torch.bool:
        case.mask = case.mask.clamp(min=torch.finfo(torch.bfloat16).min).bfloat16()
        case.extra.pop("position_bias", None)  # their sum, made by the model, would be rounded
    if "position_bias" in case.extra:
        case.extra["position_bias"] = case.extra["position_bias"].bfloat16()
    with MODES[mode]():
        _, attention = case.attend()
        assert_like_dense(case, attention, kernel=1e-4)


def test_mass_on_keys_by_head():
    case = a_case(rows=2, heads=4, groups=2, queries=7, mask="bool", sink="head")
    _, attention = case.attend()
    dense, *_ = case.dense()
    keys = torch.randint(7, (2, 4, 3), generator=torch.Generator().manual_seed(1))
    mass = attention.mass_on(keys)
    assert mass.shape == (2, 4, 7, 3)
    for b in range(2):
        for h in range(4):
            for n in range(3):
                expected = dense[b, h, :, keys[b, h, n]]
                torch.testing.assert_close(mass[b, h, :, n].double(), expected, atol=EXACT, rtol=0)


@settings(max_examples=25, deadline=None)
@given(cases(), st.data())
def test_chosen_keys_and_queries_in_any_order_and_twice(case, data):
    _, attention = case.attend()
    rows, _, queries, _ = case.query.shape
    seed = data.draw(st.integers(0, 1000))
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(case.key.shape[2], (rows, 5), generator=generator)
    chosen = torch.randint(queries, (rows, 5), generator=generator)
    dense, _, _, seen = case.dense()
    for b in range(rows):
        bound = {"atol": 4 * LAST_PLACE * case.largest_score(), "rtol": 0}
        got = attention.mass_on(keys)[b].double()
        torch.testing.assert_close(got, dense[b][:, :, keys[b]], **bound)
        got = attention.rows(chosen)[b].double()
        torch.testing.assert_close(got, dense[b][:, chosen[b]], **bound)
        assert torch.equal(attention.sees(keys)[b], seen[b][:, keys[b]])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["bool", "float", "position_bias"])
def test_queries_that_see_nothing_are_nan(kind, mode):
    """Padding on the left: whatever a kernel makes of such rows, they are no attention."""
    case = a_case(rows=2, queries=5, mask="chunk", position_bias=kind == "position_bias")
    case.mask[0, :, :2] = False  # queries 0 and 1 of row 0 see nothing
    case.mask[0, :, :, :2] = False
    if kind == "float":
        case.mask = torch.where(case.mask, 0.0, torch.finfo(torch.float32).min)
    with MODES[mode]():
        _, attention = case.attend()
        mass = attention.mass_on(every_key(case))
        assert mass[0, :, :2].isnan().all()
        assert attention.rows(torch.tensor([[0, 1], [0, 1]]))[0].isnan().all()
        assert not attention.sees(every_key(case))[0, :2].any()
        assert attention.keys_seen().tolist() == [[0, 0, 1, 2, 3], [1, 2, 3, 4, 5]]
    dense, *_ = case.dense()
    real = ~dense.isnan()
    assert real.sum() == mass.numel() - 2 * 4 * 5
    torch.testing.assert_close(mass[real].double(), dense[real], atol=EXACT, rtol=0)


@pytest.mark.parametrize("sink", ["head", "token"])
def test_blind_queries_with_learned_sinks(sink):
    case = a_case(rows=1, queries=4, mask="chunk", sink=sink)
    case.mask[:, :, 0] = False
    output, attention = case.attend()
    assert output.isfinite().all()
    assert attention.mass_on(every_key(case))[:, :, 0].isnan().all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mask", [None, "bool", "float"])
@pytest.mark.parametrize("groups", [1, 2])
def test_without_a_fused_kernel(mask, groups, mode):
    """PyTorch's plain attention returns no log-sum-exp: it is computed by blocks."""
    case = a_case(rows=2, heads=4, groups=groups, queries=9, mask=mask)
    with MODES[mode]():
        _, fused = case.attend()
        with sdpa_kernel(SDPBackend.MATH):
            _, plain = case.attend()
        torch.testing.assert_close(plain.lse, fused.lse, atol=1e-5, rtol=0)
        assert_like_dense(case, plain)


@pytest.mark.parametrize("mask", [None, "bool"])
def test_dropout_in_training_leaves_the_probabilities_alone(mask):
    case = a_case(rows=2, queries=300, mask=mask, seed=3)  # longer than one block
    case.module.train()
    torch.manual_seed(0)
    output, attention = case.attend(dropout=0.5)
    torch.manual_seed(0)
    expected, _ = sdpa_attention_forward(
        case.module, case.query, case.key, case.value, case.mask, dropout=0.5
    )
    assert torch.equal(output, expected)
    assert not torch.allclose(output, case.attend()[0])
    assert_like_dense(case, attention)


def test_prefill_of_a_static_cache():
    """Empty slots stand behind the queries' own keys; causal, so nothing sees them."""
    case = a_case(rows=2, queries=5, keys=9)
    output, attention = case.attend()
    expected, _ = sdpa_attention_forward(case.module, case.query, case.key, case.value, None)
    assert torch.equal(output, expected)
    assert_like_dense(case, attention)


@pytest.mark.parametrize("name", ["softcap", "attention_chunk_size", "head_mask"])
def test_what_is_not_known_is_refused_by_name(name):
    case = a_case()
    with pytest.raises(SmeltscopeError, match=name):
        case.attend(**{name: 30.0})
    case.attend(**{name: None})


def test_a_value_head_of_another_size():
    """Multi-head latent attention: values are narrower than keys."""
    case = a_case(rows=2, heads=4, groups=1, queries=6, size=8)
    case.value = case.value[..., :4]
    output, attention = case.attend()
    assert output.shape == (2, 6, 4, 4)
    assert_like_dense(case, attention)


def test_large_scores_do_not_overflow():
    case = a_case(rows=1, queries=8, scaling=20.0)
    _, attention = case.attend()
    assert case.largest_score() > 500
    assert_like_dense(case, attention)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("sink", [None, "head", "token"])
def test_gradients_pass_through(sink, kind, padded):
    case = a_case(sink=sink, mask="bool")
    if padded:
        case.mask[0, :, :2] = False
    if kind == "float":
        case.mask = torch.where(case.mask, 0.0, torch.finfo(torch.float32).min)
    blind = (~case.dense()[3]).all(-1)  # (B, Q)
    names = [n for n in ("s_aux", "sinks") if n in case.extra]

    def gradients(dtype: torch.dtype, run) -> tuple[Tensor, ...]:
        wanted = [t.to(dtype).requires_grad_() for t in (case.query, case.key, case.value)]
        wanted += [case.extra[n].to(dtype).requires_grad_() for n in names]
        extra = dict(zip(names, wanted[3:], strict=True))
        output = run(Case(case.module, *wanted[:3], case.mask, extra))  # (B, Q, H, D)
        return torch.autograd.grad(output[~blind].square().sum(), wanted)

    def dense(case: Case) -> Tensor:
        value = case.value.repeat_interleave(2, dim=1)
        # What a blind row would be is not compared; it must not spoil the others.
        return (case.dense()[0].nan_to_num(0.0) @ value).transpose(1, 2)

    case_gradients = gradients(torch.float32, lambda case: case.attend()[0])
    if padded and sink is None:
        assert all(g.isfinite().all() for g in case_gradients)
        return
    if (
        padded
    ):  # the dense softmax has no gradient where a row is empty: give it a key and count it out
        case.mask[0, :, :2, 0] = True if kind == "bool" else 0.0
    expected = gradients(torch.float64, dense)
    for got, true in zip(case_gradients, expected, strict=True):
        torch.testing.assert_close(got.double(), true, atol=2e-5, rtol=1e-5)
