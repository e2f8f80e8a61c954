"""SMELT against the paper's equations, against transformers' Qwen3-MoE, and against itself."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from smeltscope.errors import SmeltscopeError
from smeltscope.model import SmeltConfig, SmeltForCausalLM, SmeltModel, tiny, with_visits

ROUNDING = 1e-5  # logits of some units in float32; against the reference: at most 1.3e-6


def smelt(**overrides: Any) -> SmeltForCausalLM:
    model = tiny("smelt", **overrides)
    assert isinstance(model, SmeltForCausalLM)
    return model


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits_of(model: nn.Module, ids: Tensor, **kwargs: Any) -> Tensor:
    return model(ids, **kwargs).logits


def max_error(a: Tensor, b: Tensor) -> float:
    return (a.double() - b.double()).abs().max().item()


def storages(model: nn.Module) -> dict[str, int]:
    return {n: p.data_ptr() for n, p in model.named_parameters(remove_duplicate=False)}


# ---------------------------------------------------------------- a slow reference, in float64


def rms_norm(x_TD: Tensor, gain_D: Tensor, eps: float) -> Tensor:
    return x_TD / torch.sqrt((x_TD**2).mean(-1, keepdim=True) + eps) * gain_D


def rotate(x_THD: Tensor, theta: float) -> Tensor:
    """Rotates the pair (i, i + D/2) of position t by the angle t theta^(-2i/D)."""
    half = x_THD.shape[-1] // 2
    out = x_THD.clone()
    for t in range(x_THD.shape[0]):
        for i in range(half):
            angle = t * theta ** (-i / half)
            a, b = x_THD[t, :, i], x_THD[t, :, half + i]
            out[t, :, i] = a * math.cos(angle) - b * math.sin(angle)
            out[t, :, half + i] = b * math.cos(angle) + a * math.sin(angle)
    return out


def attention(x_TD: Tensor, weights: dict[str, Tensor], sizes: dict[str, Any]) -> Tensor:
    heads, kv_heads, head_dim = sizes["heads"], sizes["kv_heads"], sizes["head_dim"]

    def project(name: str, inputs: Tensor) -> Tensor:
        out = inputs @ weights[f"self_attn.{name}_proj.weight"].T
        return out + weights.get(f"self_attn.{name}_proj.bias", 0)

    length = len(x_TD)
    q = project("q", x_TD).reshape(length, heads, head_dim)
    k = project("k", x_TD).reshape(length, kv_heads, head_dim)
    v = project("v", x_TD).reshape(length, kv_heads, head_dim)
    if sizes["qk_norm"]:
        q = rms_norm(q, weights["self_attn.q_norm.weight"], sizes["eps"])
        k = rms_norm(k, weights["self_attn.k_norm.weight"], sizes["eps"])
    q, k = rotate(q, sizes["theta"]), rotate(k, sizes["theta"])
    mixed = torch.zeros(length, heads, head_dim, dtype=torch.float64)
    for head in range(heads):
        shared = head // (heads // kv_heads)
        for t in range(length):
            scores = k[: t + 1, shared] @ q[t, head] / math.sqrt(head_dim)
            mixed[t, head] = torch.softmax(scores, 0) @ v[: t + 1, shared]
    return project("o", mixed.reshape(length, heads * head_dim))


def experts(x_TD: Tensor, weights: dict[str, Tensor], sizes: dict[str, Any]) -> Tensor:
    out = torch.zeros_like(x_TD)
    for t, x in enumerate(x_TD):
        chances = torch.softmax(weights["mlp.gate.weight"] @ x, 0)
        chosen = sorted(range(len(chances)), key=lambda e: -chances[e].item())[: sizes["top_k"]]
        total = sum(chances[e] for e in chosen) if sizes["norm_topk"] else 1.0
        for e in chosen:
            gate, up = (weights["mlp.experts.gate_up_proj"][e] @ x).chunk(2)
            hidden = gate * torch.sigmoid(gate) * up
            out[t] += chances[e] / total * (weights["mlp.experts.down_proj"][e] @ hidden)
    return out


def reference_logits(
    model: SmeltForCausalLM, ids_T: Tensor, *, span: tuple[int, int], visits: int, scale: float
) -> Tensor:
    """dx_attn = s Attn(LN(x)), dx_moe = s MoE(LN(x + dx_attn)) with s = 1 outside of the span.

    The weights of each layer are found by counting, not by asking the model.
    """
    config = model.config
    layers, (start, stop) = config.num_physical_layers, span
    sizes = {
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "qk_norm": config.qk_norm,
        "eps": config.rms_norm_eps,
        "theta": config.rope_parameters["rope_theta"],
        "top_k": config.num_experts_per_tok,
        "norm_topk": config.norm_topk_prob,
    }
    state = {name: w.double() for name, w in model.state_dict().items()}

    def weights_of(layer: int) -> dict[str, Tensor]:
        later_visits = (config.num_visits - 1) * (config.loop_stop - config.loop_start)
        number = layer if layer < config.loop_stop else layer + later_visits
        prefix = f"model.layers.{number}."
        return {n.removeprefix(prefix): w for n, w in state.items() if n.startswith(prefix)}

    x = state["model.embed_tokens.weight"][ids_T]
    stack = [*range(start), *(list(range(start, stop)) * visits), *range(stop, layers)]
    for layer in stack:
        weights = weights_of(layer)
        s = scale if start <= layer < stop else 1.0
        normed = rms_norm(x, weights["input_layernorm.weight"], sizes["eps"])
        x = x + s * attention(normed, weights, sizes)
        normed = rms_norm(x, weights["post_attention_layernorm.weight"], sizes["eps"])
        x = x + s * experts(normed, weights, sizes)
    return rms_norm(x, state["model.norm.weight"], sizes["eps"]) @ state["lm_head.weight"].T


SPANS = {
    "zero length": {"loop_start": 3, "loop_stop": 3, "num_visits": 2},
    "one visit": {"num_visits": 1},
    "two visits": {"num_visits": 2},
    "three visits": {"num_visits": 3},
    "whole stack": {"loop_start": 0, "loop_stop": 6, "num_visits": 2},
    "from the first layer": {"loop_start": 0, "loop_stop": 2, "num_visits": 2},
    "to the last layer": {"loop_start": 4, "loop_stop": 6, "num_visits": 2},
    "scale of its own": {"residual_scale": 0.7},
    "no QK-norm": {"qk_norm": False},
    "no grouping": {"num_key_value_heads": 4},
    "one K/V head": {"num_key_value_heads": 1},
    "wide heads": {"head_dim": 12},
    "biases": {"attention_bias": True},
    "unnormalised top-k": {"norm_topk_prob": False},
    "every expert": {"num_experts_per_tok": 8},
    "untied embeddings": {"tie_word_embeddings": False},
    "short wavelengths": {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
}


@pytest.mark.parametrize("name", SPANS)
def test_logits_are_the_papers_equations(name: str) -> None:
    model = smelt(**SPANS[name])
    config, ids = model.config, tokens(1, 9)
    expected = reference_logits(
        model,
        ids[0],
        span=(config.loop_start, config.loop_stop),
        visits=config.num_visits,
        scale=SPANS[name].get("residual_scale", 1 / config.num_visits),
    )
    assert max_error(logits_of(model, ids)[0], expected) < ROUNDING


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_logits_are_the_papers_equations_for_any_loop(data: st.DataObject) -> None:
    layers = data.draw(st.integers(1, 5), "layers")
    start = data.draw(st.integers(0, layers), "start")
    stop = data.draw(st.integers(start, layers), "stop")
    visits = data.draw(st.integers(1, 3), "visits")
    model = smelt(
        num_physical_layers=layers,
        loop_start=start,
        loop_stop=stop,
        num_visits=visits,
        qk_norm=data.draw(st.booleans(), "QK-norm"),
        seed=data.draw(st.integers(0, 3), "seed"),
    )
    ids = tokens(1, 4, seed=1)
    expected = reference_logits(model, ids[0], span=(start, stop), visits=visits, scale=1 / visits)
    assert max_error(logits_of(model, ids)[0], expected) < ROUNDING


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_one_visit_is_transformers_qwen3_moe(norm_topk_prob: bool) -> None:
    ours = smelt(num_visits=1, norm_topk_prob=norm_topk_prob)
    names = Qwen3MoeConfig().to_dict().keys() - {
        "model_type",
        "architectures",
        "transformers_version",
    }
    values = {name: value for name, value in ours.config.to_dict().items() if name in names}
    theirs = Qwen3MoeForCausalLM(Qwen3MoeConfig(**values)).eval()
    theirs.load_state_dict(ours.state_dict())
    assert theirs.config._experts_implementation == ours.config._experts_implementation
    assert torch.equal(logits_of(ours, tokens(2, 17)), logits_of(theirs, tokens(2, 17)))


def test_a_span_of_zero_length_is_the_baseline() -> None:
    looped, baseline = smelt(loop_start=3, loop_stop=3, num_visits=4), smelt(num_visits=1)
    baseline.load_state_dict(looped.state_dict())  # strict: the same names and shapes
    assert torch.equal(logits_of(looped, tokens(2, 9)), logits_of(baseline, tokens(2, 9)))


# ---------------------------------------------------------------- writes


@contextmanager
def outputs(modules: dict[str, nn.Module]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """{name: (input, output)} of each module's next call."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple, kwargs: dict, out: Any) -> None:
            given = args[0] if args else kwargs["hidden_states"]
            seen[name] = (given, out[0] if isinstance(out, tuple) else out)

        return hook

    handles = [m.register_forward_hook(keep(n), with_kwargs=True) for n, m in modules.items()]
    yield seen
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("visits", [1, 2, 3])
def test_module_outputs_are_the_writes(visits: int) -> None:
    model = with_visits(smelt(num_visits=2), visits)  # trained with 2: the scale stays 1/2
    for execution, layer in zip(model.config.executions, model.model.layers, strict=True):
        parts = {"layer": layer, "attn": layer.self_attn, "mlp": layer.mlp}
        parts |= {"o": layer.self_attn.o_proj, "experts": layer.mlp.experts}
        with outputs(parts) as seen:
            logits_of(model, tokens(2, 9))
        before, after = seen["layer"]
        assert torch.equal(before + seen["attn"][1] + seen["mlp"][1], after)
        scale = 0.5 if 1 <= execution.layer < 4 else 1.0
        mixed, write = seen["o"]
        assert torch.equal(
            write, nn.functional.linear(mixed, layer.self_attn.o_proj.weight) * scale
        )
        assert torch.equal(write, seen["attn"][1])
        assert torch.equal(seen["experts"][1].reshape(2, 9, -1) * scale, seen["mlp"][1])


def test_recorded_outputs_follow_the_executions() -> None:
    model = smelt()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(
            tokens(2, 9),
            output_hidden_states=True,
            output_router_logits=True,
            output_attentions=True,
        )
    assert len(out.hidden_states) == 10
    assert [a.shape for a in out.attentions] == [(2, 4, 9, 9)] * 9
    assert [r.shape for r in out.router_logits] == [(18, 8)] * 9


# ---------------------------------------------------------------- shared weights


@pytest.mark.parametrize("qk_norm", [True, False])
def test_visits_share_storage(qk_norm: bool) -> None:
    model = smelt(num_visits=3, qk_norm=qk_norm)
    pointers = storages(model)
    one_visit = storages(smelt(num_visits=1, qk_norm=qk_norm))
    assert len(set(pointers.values())) == len(set(one_visit.values()))
    for first, second, third in ((1, 4, 7), (2, 5, 8), (3, 6, 9)):
        names = [n for n, _ in model.model.layers[first].named_parameters()]
        assert len(names) == (11 if qk_norm else 9)
        for name in names:
            shared = {pointers[f"model.layers.{i}.{name}"] for i in (first, second, third)}
            assert len(shared) == 1
    visits_are_modules = {id(layer.self_attn) for layer in model.model.layers}
    assert len(visits_are_modules) == 12


@pytest.mark.parametrize(
    "treat",
    [
        copy.deepcopy,
        lambda model: model.to(torch.bfloat16),
        lambda model: model.double(),
        lambda model: with_visits(model, 3),
    ],
    ids=["deepcopy", "bfloat16", "double", "three visits"],
)
def test_visits_stay_shared(treat: Callable[[SmeltForCausalLM], SmeltForCausalLM]) -> None:
    model = treat(smelt())
    pointers = storages(model)
    first = {e.layer: e.index for e in model.config.executions if e.visit == 1}
    for execution in model.config.executions:
        for name, _ in model.model.layers[execution.index].named_parameters():
            here = pointers[f"model.layers.{execution.index}.{name}"]
            assert here == pointers[f"model.layers.{first[execution.layer]}.{name}"]


def test_an_optimizer_steps_a_shared_weight_once() -> None:
    model = smelt()
    parameters = list(model.parameters())
    assert sum(p.numel() for p in parameters) == sum(
        p.numel() for p in tiny("baseline").parameters()
    )
    weight = model.model.layers[1].self_attn.q_proj.weight
    before = weight.detach().clone()
    for p in parameters:
        p.grad = torch.ones_like(p)
    torch.optim.SGD(parameters, lr=0.125).step()
    assert torch.equal(model.model.layers[4].self_attn.q_proj.weight, before - 0.125)


def test_a_fresh_model_is_initialised_as_configured() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_experts": 16, "moe_intermediate_size": 32, "vocab_size": 256}
    model = SmeltForCausalLM(
        SmeltConfig(
            **sizes,
            num_physical_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.05,
        )
    )
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            assert parameter.std().item() == pytest.approx(0.05, rel=0.15), name
            assert parameter.mean().abs().item() < 0.005, name


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_sums_over_visits(checkpointing: bool) -> None:
    model, ids = smelt(num_visits=3), tokens(2, 12)
    untied = copy.deepcopy(model)
    for i, layer in enumerate(untied.model.layers):
        untied.model.layers[i] = copy.deepcopy(layer)
    assert len(set(storages(untied).values())) > len(set(storages(model).values()))
    if checkpointing:
        model.activation_checkpointing_enable()
    for each in (model, untied):
        each.train()
        each(ids, labels=ids).loss.backward()

    grads = dict(untied.named_parameters())
    compared = 0
    for first in range(1, 4):
        for name, shared in model.model.layers[first].named_parameters():
            visits = [grads[f"model.layers.{first + 3 * v}.{name}"].grad for v in range(3)]
            assert all(g is not None and g.abs().max() > 0 for g in visits)
            total = torch.stack(visits).sum(0)
            assert shared.grad is not None
            torch.testing.assert_close(shared.grad, total, rtol=1e-4, atol=1e-6)
            assert max_error(shared.grad, visits[0]) > 1e-4  # one visit alone would not do
            compared += 1
    assert compared == 33


# ---------------------------------------------------------------- checkpoints


def stored(folder: Path) -> dict[str, Tensor]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


def layers_in(folder: Path) -> list[int]:
    return sorted({int(n.split(".")[2]) for n in stored(folder) if n.startswith("model.layers.")})


def aligned(model: SmeltForCausalLM) -> SmeltForCausalLM:
    """Weights in memory of their own: a matrix product of a memory-mapped one rounds otherwise."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


@pytest.mark.parametrize("tied", [True, False], ids=["tied embeddings", "untied embeddings"])
@pytest.mark.parametrize("shard", ["5GB", "40KB"], ids=["one file", "shards"])
def test_a_checkpoint_holds_each_layer_once(tmp_path: Path, tied: bool, shard: str) -> None:
    model = smelt(num_visits=3, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "40KB")
    assert layers_in(tmp_path) == [0, 1, 2, 3, 10, 11]
    assert ("lm_head.weight" in stored(tmp_path)) != tied
    assert sum(w.numel() for w in stored(tmp_path).values()) == model.num_parameters()

    for loader in (SmeltForCausalLM, AutoModelForCausalLM):
        again, info = loader.from_pretrained(tmp_path, output_loading_info=True)
        assert type(again) is SmeltForCausalLM
        assert not any(info.values())
        assert set(storages(again)) == set(storages(model))
        assert len(set(storages(again).values())) == len(set(storages(model).values()))
        assert torch.equal(logits_of(aligned(again), tokens(2, 9)), logits_of(model, tokens(2, 9)))


def test_the_stack_alone_loads_by_auto_model(tmp_path: Path) -> None:
    model = smelt()
    model.save_pretrained(tmp_path)
    stack = AutoModel.from_pretrained(tmp_path)
    assert type(stack) is SmeltModel
    with torch.no_grad():
        ours, expected = (m(tokens(2, 9)).last_hidden_state for m in (stack, model.model))
    assert max_error(ours, expected) < ROUNDING


@pytest.mark.parametrize("trained", [1, 2, 3])
@pytest.mark.parametrize("visits", [1, 2, 3, 4])
def test_a_checkpoint_runs_with_another_number_of_visits(
    tmp_path: Path, trained: int, visits: int
) -> None:
    model, ids = smelt(num_visits=trained), tokens(1, 5)
    model.save_pretrained(tmp_path / "trained")
    other = SmeltForCausalLM.from_pretrained(tmp_path / "trained", num_visits=visits)
    expected = reference_logits(model, ids[0], span=(1, 4), visits=visits, scale=1 / trained)
    assert max_error(logits_of(other, ids)[0], expected) < ROUNDING
    assert not other.training

    # Saved again it is what it now is, for whoever loads it next.
    other.save_pretrained(tmp_path / "other")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "other")
    assert (again.config.num_visits, again.config.residual_scale) == (visits, 1 / trained)
    coda = 4 + 3 * (visits - 1)
    assert layers_in(tmp_path / "other") == [0, 1, 2, 3, coda, coda + 1]
    assert max_error(logits_of(again, ids)[0], expected) < ROUNDING

    # And back: the file of the first training, bit for bit.
    SmeltForCausalLM.from_pretrained(tmp_path / "other", num_visits=trained).save_pretrained(
        tmp_path / "back"
    )
    before, after = stored(tmp_path / "trained"), stored(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_another_number_of_visits_copies_nothing_and_spares_the_original() -> None:
    model, ids = smelt(), tokens(1, 5)
    before = logits_of(model, ids)
    other = with_visits(model, 3)
    assert set(storages(other).values()) == set(storages(model).values())
    assert torch.equal(logits_of(model, ids), before)
    assert model.config.num_visits == 2
    assert torch.equal(logits_of(with_visits(other, 2), ids), before)


def test_another_number_of_visits_keeps_how_the_model_runs(tmp_path: Path) -> None:
    smelt().save_pretrained(tmp_path)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "attn_implementation": "eager"}
    other, info = SmeltForCausalLM.from_pretrained(
        tmp_path, num_visits=3, output_loading_info=True, **options
    )
    assert not any(info.values())
    assert other.dtype == other.config.dtype == torch.bfloat16
    assert other.config._attn_implementation == "eager"
    assert with_visits(smelt().train(), 3).training


def test_another_number_of_visits_needs_weights() -> None:
    with torch.device("meta"):
        empty = SmeltForCausalLM(smelt().config)
    with pytest.raises(SmeltscopeError, match="needs all weights in memory"):
        with_visits(empty, 3)


@pytest.mark.parametrize("trained", [1, 2])
@pytest.mark.parametrize(("visits", "scale"), [(0, None), (2, 1.0), (2, 0.5), (3, 0.0), (1, 0.25)])
def test_visits_and_residual_scale_can_be_set_apart(
    trained: int, visits: int, scale: float | None
) -> None:
    model, ids = smelt(num_visits=trained), tokens(1, 5)
    before = logits_of(model, ids)
    other = with_visits(model, visits, scale)
    used = 1 / trained if scale is None else scale
    expected = reference_logits(model, ids[0], span=(1, 4), visits=visits, scale=used)
    assert max_error(logits_of(other, ids)[0], expected) < ROUNDING
    assert other.config.residual_scale == used
    assert torch.equal(logits_of(model, ids), before)


def test_a_model_without_its_span_generates_and_keeps_to_itself(tmp_path: Path) -> None:
    model, ids = smelt(), tokens(1, 5)
    model.save_pretrained(tmp_path / "model")
    without = SmeltForCausalLM.from_pretrained(tmp_path / "model", num_visits=0)
    assert len(without.model.layers) == 3
    generated = without.generate(ids, max_new_tokens=3, do_sample=False)
    again = without.generate(ids, max_new_tokens=3, do_sample=False, use_cache=False)
    assert torch.equal(generated, again)
    for holder in (without, without.model):
        with pytest.raises(SmeltscopeError, match="does not hold the layers of its span, and a ch"):
            holder.save_pretrained(tmp_path / "without")
    assert not (tmp_path / "without").exists()
    with pytest.raises(SmeltscopeError, match="change the number of visits of the model it was"):
        with_visits(without, 2)


def test_the_auto_classes_refuse_another_number_of_visits(tmp_path: Path) -> None:
    smelt().save_pretrained(tmp_path)
    for loader in (AutoModelForCausalLM, AutoModel):
        with pytest.raises(SmeltscopeError, match="the Auto classes cannot"):
            loader.from_pretrained(tmp_path, num_visits=3)


def test_a_configuration_of_other_executions_is_refused(tmp_path: Path) -> None:
    model = smelt()
    model.save_pretrained(tmp_path)
    same = SmeltForCausalLM.from_pretrained(tmp_path, config=model.config)
    assert torch.equal(logits_of(aligned(same), tokens(1, 5)), logits_of(model, tokens(1, 5)))
    for loader in (SmeltForCausalLM, AutoModelForCausalLM, AutoModel):
        with pytest.raises(SmeltscopeError, match="runs other executions than the checkpoint"):
            loader.from_pretrained(tmp_path, config=model.config.with_visits(3))
    changed = copy.deepcopy(model.config)
    changed.num_visits = 3
    with pytest.raises(SmeltscopeError, match="changed after it was made: 9 executions became 12"):
        SmeltForCausalLM(changed)


# ---------------------------------------------------------------- running it


GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.mark.parametrize("visits", [1, 2, 3])
def test_each_execution_has_a_cache_of_its_own(visits: int) -> None:
    model, ids = smelt(num_visits=visits), tokens(2, 12)
    whole = logits_of(model, ids)
    cache, parts = None, []
    for start, stop in ((0, 5), (5, 6), (6, 11), (11, 12)):
        with torch.no_grad():
            out = model(ids[:, start:stop], cache=cache, use_cache=True)
        cache = out.cache
        parts.append(out.logits)
    assert len(cache.layers) == 6 + 3 * (visits - 1)
    assert {layer.keys.shape for layer in cache.layers} == {(2, 2, 12, 8)}
    assert max_error(torch.cat(parts, 1), whole) < ROUNDING


@pytest.mark.parametrize("visits", [1, 2, 3])
def test_greedy_generation_with_cache_equals_without(visits: int) -> None:
    model, ids = smelt(num_visits=visits), tokens(3, 6)
    cached = model.generate(ids, max_new_tokens=16, use_cache=True, **GREEDY)
    uncached = model.generate(ids, max_new_tokens=16, use_cache=False, **GREEDY)
    by_hand = ids
    for _ in range(16):
        by_hand = torch.cat([by_hand, logits_of(model, by_hand)[:, -1:].argmax(-1)], 1)
    assert cached.tolist() == uncached.tolist() == by_hand.tolist()


@pytest.mark.parametrize("use_cache", [True, False])
def test_generation_of_a_left_padded_batch(use_cache: bool) -> None:
    model = smelt()
    prompts = [tokens(1, n, seed=n) for n in (3, 7, 5)]
    alone = [model.generate(p, max_new_tokens=12, **GREEDY)[0, p.shape[1] :] for p in prompts]
    batch = torch.cat([nn.functional.pad(p, (7 - p.shape[1], 0)) for p in prompts])
    mask = torch.tensor([[int(i >= 7 - p.shape[1]) for i in range(7)] for p in prompts])
    together = model.generate(
        batch, attention_mask=mask, max_new_tokens=12, use_cache=use_cache, **GREEDY
    )
    assert together[:, 7:].tolist() == [a.tolist() for a in alone]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("given_positions", [True, False])
def test_padding_changes_no_real_token(attention: str, side: str, given_positions: bool) -> None:
    model = smelt()
    model.set_attn_implementation(attention)
    ids = tokens(1, 8)
    alone = logits_of(model, ids)
    for junk in (0, 255):
        pad = (5, 0) if side == "left" else (0, 5)
        padded = nn.functional.pad(ids, pad, value=junk)
        mask = nn.functional.pad(torch.ones_like(ids), pad, value=0)
        extra = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if given_positions else {}
        other = torch.cat([padded, tokens(1, 13, seed=5)])  # a full row beside it
        masks = torch.cat([mask, torch.ones_like(mask)])
        if extra:
            extra = {"position_ids": torch.cat([extra["position_ids"], torch.arange(13)[None]])}
        logits = logits_of(model, other, attention_mask=masks, **extra)
        assert max_error(logits[0][mask[0].bool()], alone[0]) < ROUNDING
        assert max_error(logits[1], logits_of(model, other[1:])[0]) < ROUNDING


def test_one_token_and_a_batch_of_one() -> None:
    model, ids = smelt(), tokens(3, 7)
    together = logits_of(model, ids)
    for row in range(3):
        assert max_error(logits_of(model, ids[row : row + 1])[0], together[row]) < ROUNDING
    first = logits_of(model, ids[:1, :1])
    assert first.shape == (1, 1, 256)
    assert max_error(first[0, 0], together[0, 0]) < ROUNDING


def test_bfloat16_forward() -> None:
    model, ids = smelt(), tokens(2, 16)
    full = logits_of(model, ids)
    half = logits_of(copy.deepcopy(model).to(torch.bfloat16), ids)
    assert half.dtype == torch.bfloat16
    assert half.isfinite().all()
    # Eight bits of mantissa over nine executions; a routing near-tie may flip a token's expert.
    close = (half.float() - full).abs().amax(-1) < 0.05 * full.abs().max()
    assert close.float().mean() > 0.8


# ---------------------------------------------------------------- the experts' implementation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("visits", [1, 2])
def test_grouped_matmul_is_what_runs(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, visits: int
) -> None:
    calls = []
    grouped_mm = nn.functional.grouped_mm

    def counting(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args[1].shape)
        return grouped_mm(*args, **kwargs)

    monkeypatch.setattr(nn.functional, "grouped_mm", counting)
    model = smelt(num_visits=visits).to(dtype)
    logits_of(model, tokens(2, 9))
    # Two products, up and down, over all 8 experts at once, for each execution.
    assert len(calls) == 2 * len(model.config.executions)
    assert {shape[0] for shape in calls} == {8}


def test_grouped_matmul_trains_and_equals_eager_experts() -> None:
    grouped, ids = smelt(), tokens(2, 9)
    eager = copy.deepcopy(grouped)
    eager.set_experts_implementation("eager")
    assert grouped.config._experts_implementation == "grouped_mm"
    assert eager.config._experts_implementation == "eager"
    assert max_error(logits_of(grouped, ids), logits_of(eager, ids)) < ROUNDING
    for model in (grouped, eager):
        model(ids, labels=ids).loss.backward()
    for (name, a), (_, b) in zip(grouped.named_parameters(), eager.named_parameters(), strict=True):
        assert a.grad is not None and b.grad is not None, name
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-6, msg=name)


def test_auxiliary_loss_sees_every_execution() -> None:
    model, ids = smelt(output_router_logits=True, router_aux_loss_coef=0.5), tokens(2, 9)
    with torch.no_grad():
        out = model(ids, labels=ids)
        plain = model(ids, labels=ids, output_router_logits=False)
    # Switch's balancing loss over all routings: E sum_e (share of tokens) (mean probability).
    logits = torch.cat(out.router_logits)
    probabilities = logits.softmax(-1)
    chosen = nn.functional.one_hot(probabilities.topk(2).indices, 8).float()
    expected = 8 * (chosen.mean(0) * probabilities.mean(0)).sum()
    torch.testing.assert_close(out.aux_loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.loss, plain.loss + 0.5 * expected, rtol=1e-5, atol=1e-6)
