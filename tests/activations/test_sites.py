"""Sites against plain hooks on modules named by hand, and against what the models' own formulas say."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from smeltscope.activations import SITES, Routing, capture, sites_of
from smeltscope.activations.sites import _known
from smeltscope.errors import SmeltscopeError
from smeltscope.model import TINY_MODELS, tiny

LENGTH = 24  # longer than the tiny models' sliding windows of 16
ON_SDPA = tuple(n for n in TINY_MODELS if n not in ("gpt_oss", "inkling2_loop"))
NORMED = ("smelt", "baseline", "olmoe", "qwen3_moe", "dory")  # with QK-norm
ROUTED = ("smelt", "baseline", "olmoe", "qwen3_moe", "mixtral", "gpt_oss", "inkling2_loop")
WRITES = tuple(n for n in TINY_MODELS if n not in ("dory", "inkling2_loop"))  # at every execution
NO_ADDING = ("attn_out", "resid_mid", "mlp_out")

# The layers that run, in order, where that is not the order of the list.
ORDER = {
    "inkling2_loop": [0, 1, 2, 3, 2, 3, 2, 3, 4, 5],
    "dory": [0, 1, 2, 1, 2, 3],
    "hrm_text": [0, 1, 0, 1, 2, 3, 0, 1, 0, 1, 2, 3],
}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def some_tokens(rows: int = 2, length: int = LENGTH, seed: int = 0, size: int = 256) -> Tensor:
    return torch.randint(3, size, (rows, length), generator=torch.Generator().manual_seed(seed))


def build(name: str, **values: Any) -> Any:
    """A small model of transformers with noise on every parameter, as in `tiny`."""
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **values})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def layers_of(name: str, model: Any) -> list[Any]:
    """The layer module of each execution."""
    if name == "hrm_text":
        layers = [*model.model.L_module.layers, *model.model.H_module.layers]
    else:
        layers = list(model.transformer.h if name == "gpt2" else model.model.layers)
    return [layers[i] for i in ORDER.get(name, range(len(layers)))]


def attention_of(layer: Any) -> Any:
    return layer.attn if hasattr(layer, "attn") else layer.self_attn


def has_each(name: str) -> set[str]:
    """The sites that a model has at some execution at least."""
    missing = set() if name in NORMED else {"q_norm", "k_norm"}
    missing |= set() if name in ROUTED else {"router"}
    missing |= set(NO_ADDING) if name == "dory" else set()
    missing |= {"q", "k", "v"} if name == "inkling2_loop" else set()
    return set(SITES) - missing


def captured(model: Any, tokens: Tensor, sites: Any = None) -> Any:
    sites = sites or [site for site, found in sites_of(model).items() if found]
    with torch.no_grad(), capture(model, sites) as run:
        model(tokens)
    return run


def close(a: Tensor, b: Tensor, error: float = 2e-6) -> bool:
    return a.shape == b.shape and (a - b).abs().max().item() <= error * b.abs().max().item()


@pytest.mark.parametrize("name", TINY_MODELS)
def test_which_sites_there_are(name):
    found = sites_of(tiny(name))
    everywhere = list(range(len(layers_of(name, tiny(name)))))
    assert tuple(found) == SITES
    assert {site for site, executions in found.items() if executions} == has_each(name)
    for site, executions in found.items():
        if executions and name == "inkling2_loop" and site in NO_ADDING:
            # A layer that begins a block takes the stream out and starts a new one.
            assert executions == [1, 3, 5, 7, 9]
        elif executions:
            assert executions == everywhere


@pytest.mark.parametrize("name", TINY_MODELS)
def test_what_plain_hooks_see(name):
    """Bit-equal to hooks on modules that are named here, in the order in which they run."""
    model, tokens = tiny(name), some_tokens()
    seen: dict[str, list[Tensor]] = {}

    def before(site):
        def hook(module, args, kwargs) -> None:
            value = args[0] if args else kwargs["hidden_states"]
            seen.setdefault(site, []).append(value.clone())

        return hook

    def after(site):
        def hook(module, args, output) -> None:
            value = output[0] if isinstance(output, tuple) else output
            seen.setdefault(site, []).append(value.clone())

        return hook

    hooks = []
    for layer in dict.fromkeys(layers_of(name, model)):
        attention = attention_of(layer)
        for site, module in (("resid_pre", layer), ("attn_in", attention), ("mlp_in", layer.mlp)):
            hooks.append(module.register_forward_pre_hook(before(site), with_kwargs=True))
        inkling = name == "inkling2_loop"
        writes = {
            "attn_out": layer.post_attention_convolution if inkling else attention,
            "mlp_out": layer.post_mlp_convolution if inkling else layer.mlp,
            "resid_post": layer,
        }
        hooks += [m.register_forward_hook(after(site)) for site, m in writes.items()]
    with torch.no_grad():
        output = model(tokens, output_hidden_states=name != "hrm_text")
    for hook in hooks:
        hook.remove()
    found = sites_of(model)
    run = captured(model, tokens, list(seen.keys() & has_each(name)))
    for site, values in seen.items():
        assert len(values) == len(run.executions)
        for e in found[site]:
            assert torch.equal(run[e, site], values[e]), (site, e)
    if name not in ORDER:  # the last one is normed
        assert all(
            torch.equal(run[e, "resid_pre"], hidden)
            for e, hidden in enumerate(output.hidden_states[:-1])
        )
        assert all(
            torch.equal(run[e, "resid_post"], hidden)
            for e, hidden in enumerate(output.hidden_states[1:-1])
        )


@pytest.mark.parametrize("name", TINY_MODELS)
def test_the_layers_order_and_visits(name):
    model, given = tiny(name), []
    sites = ["resid_pre", "resid_post"]
    with torch.no_grad(), capture(model, sites, lambda e, s, _: given.append((e, s))) as run:
        model(some_tokens())
        model(some_tokens(length=5))
    assert given == [(e, site) for e in run.executions for site in sites] * 2
    expected = ORDER.get(name, range(len(layers_of(name, model))))
    if name == "smelt":  # its list holds a module for each visit
        expected = [0, 1, 2, 3, 1, 2, 3, 4, 5]
    assert [e.layer for e in run.executions] == list(expected)
    for layer in set(expected):
        visits = [e.visit for e in run.executions if e.layer == layer]
        assert visits == list(range(1, len(visits) + 1))
    # The modules that the names stand for.
    assert [run.module_of(e) for e in run.executions] == layers_of(name, model)


@pytest.mark.parametrize("name", WRITES)
def test_writes_add_up(name):
    model = tiny(name)
    run = captured(model, some_tokens())
    for e, layer in enumerate(layers_of(name, model)):
        before, middle, after = (run[e, f"resid_{place}"] for place in ("pre", "mid", "post"))
        attn, mlp = run[e, "attn_out"], run[e, "mlp_out"]
        assert torch.equal(middle, before + attn)
        assert close(after - before, attn + mlp, 1e-5)
        assert torch.equal(after, middle + mlp)
        norm = layer.ln_2 if name == "gpt2" else layer.post_attention_layernorm
        assert torch.equal(run[e, "mlp_in"], norm(middle))
        norm = layer.ln_1 if name == "gpt2" else layer.input_layernorm
        assert torch.equal(run[e, "attn_in"], norm(before))
        written = layer.mlp(run[e, "mlp_in"])
        assert close(written[0] if isinstance(written, tuple) else written, mlp)


def test_inklings_writes_add_up():
    run = captured(tiny("inkling2_loop"), some_tokens())
    for e in (1, 3, 5, 7, 9):
        assert torch.equal(run[e, "resid_mid"], run[e, "resid_pre"] + run[e, "attn_out"])
        assert close(run[e, "resid_mid"] + run[e, "mlp_out"], run[e, "resid_post"])


def normed(name: str, attention: Any, letter: str, value: Tensor) -> Tensor:
    """QK-norm of (B, T, head, size) by its formula."""
    if name == "dory":
        return value * (value.pow(2).sum(-1, keepdim=True) + 1e-6).rsqrt()
    weight = getattr(attention, f"{letter}_norm").weight
    flat = value.flatten(2) if name == "olmoe" else value  # OLMoE norms over all heads
    result = flat * (flat.pow(2).mean(-1, keepdim=True) + attention.config.rms_norm_eps).rsqrt()
    return (result * weight).view(value.shape)


@pytest.mark.parametrize("name", [n for n in TINY_MODELS if n != "inkling2_loop"])
def test_projections_before_and_after_the_norm(name):
    model = tiny(name)
    run = captured(model, some_tokens())
    for e, layer in enumerate(layers_of(name, model)):
        attention = attention_of(layer)
        kernel = run[e, "attention"]
        for part, (letter, used) in enumerate(
            zip("qkv", (kernel.query, kernel.key, kernel.value), strict=True)
        ):
            if name == "gpt2":
                weight = attention.c_attn.weight.T.chunk(3)[part]
                bias = attention.c_attn.bias.chunk(3)[part]
            else:
                projection = getattr(attention, f"{letter}_proj")
                weight, bias = projection.weight, projection.bias
            value = run[e, letter]
            assert value.shape == (2, LENGTH, used.shape[1], 8)
            assert close(value.flatten(2), F.linear(run[e, "attn_in"], weight, bias))
            if letter == "v":
                assert torch.equal(value.transpose(1, 2), used)
                continue
            if name in NORMED:
                before, value = value, run[e, f"{letter}_norm"]
                assert close(value, normed(name, attention, letter, before))
                assert not close(value, before, 0.1)
            # Rotary embedding leaves the first token as it is, and each token's length.
            if name == "gpt2":
                assert torch.equal(value.transpose(1, 2), used)
            elif name == "dory" and letter == "q":  # scaled by channel after it
                scale = (attention.sqk * attention.sqk_scale).view(4, 8).square()
                assert close(value[:, 0] * scale, used[:, :, 0])
            else:
                stretch = 1 if name != "gpt_oss" else model.model.rotary_emb.attention_scaling
                assert close(value[:, 0] * stretch, used[:, :, 0])
                assert close(value.norm(dim=-1) * stretch, used.transpose(1, 2).norm(dim=-1))
                assert not close(value[:, 5] * stretch, used[:, :, 5], 0.1)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_pv_is_eager_attention_times_values(name):
    model, tokens = tiny(name), some_tokens()
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = eager(tokens, output_attentions=True).attentions
    run = captured(model, tokens)
    for e, layer in enumerate(layers_of(name, model)):
        value = run[e, "attention"].value
        repeated = value.repeat_interleave(attentions[e].shape[1] // value.shape[1], dim=1)
        expected = (attentions[e] @ repeated).transpose(1, 2)
        assert (run[e, "pv"] - expected).abs().max() < 1e-5
        if name in WRITES and name != "hrm_text":  # which has a gate behind
            attention = attention_of(layer)
            project = attention.c_proj if name == "gpt2" else attention.o_proj
            assert close(project(run[e, "pv"].flatten(2)), run[e, "attn_out"])


def route(name: str, model: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and experts from router logits, as the papers of these models say."""
    if name == "gpt_oss":
        top, experts = logits.topk(2)
        return top.softmax(-1), experts
    weights, experts = logits.softmax(-1).topk(2)
    if name == "mixtral" or getattr(model.config, "norm_topk_prob", False):
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts


@pytest.mark.parametrize("name", [n for n in ROUTED if n != "inkling2_loop"])
def test_routing(name):
    model = tiny(name)
    run = captured(model, some_tokens())
    for e, layer in enumerate(layers_of(name, model)):
        routing = run[e, "router"]
        assert isinstance(routing, Routing)
        router = layer.mlp.router if name == "gpt_oss" else layer.mlp.gate
        logits = F.linear(run[e, "mlp_in"], router.weight, getattr(router, "bias", None))
        assert routing.logits.shape == (2, LENGTH, 8) and routing.logits.dtype == torch.float32
        assert close(routing.logits, logits)
        weights, experts = route(name, model, logits)
        found, order = routing.experts.sort(-1)
        expected, other = experts.sort(-1)
        assert torch.equal(found, expected) and routing.experts.dtype == torch.int64
        assert close(routing.weights.gather(-1, order), weights.gather(-1, other))


def test_inklings_routing():
    model, tokens, seen = tiny("inkling2_loop"), some_tokens(), []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda m, a, output: seen.append(output))
    run = captured(model, tokens, ["router"])
    del seen[: len(seen) - 10]  # a first forward looked for the sites
    for e, (logits, weights, experts) in enumerate(seen):
        routing = run[e, "router"]
        assert torch.equal(routing.logits, logits.float().view(2, LENGTH, -1))
        assert torch.equal(routing.experts, experts.view(2, LENGTH, 2))
        assert torch.equal(routing.weights, weights.view(2, LENGTH, 2))


def test_deepseeks_routing():
    """A bias and groups choose other experts than the highest logits; the first layer has no experts."""
    model = build(
        "DeepseekV3",
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        v_head_dim=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        moe_intermediate_size=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        n_shared_experts=1,
        routed_scaling_factor=2.5,
    )
    router = model.model.layers[1].mlp.gate
    router.e_score_correction_bias.copy_(torch.linspace(-0.5, 0.5, 8))
    sites = sites_of(model)
    assert sites["router"] == [1] and sites["mlp_out"] == [0, 1]
    assert not sites["q"] and not sites["k"] and not sites["v"]  # latent attention
    run = captured(model, some_tokens(size=64))
    routing, scores = run[1, "router"], run[1, "router"].logits.sigmoid()
    assert close(routing.logits, F.linear(run[1, "mlp_in"], router.weight))
    biased = (scores + router.e_score_correction_bias).unflatten(-1, (4, 2))
    groups = biased.sum(-1).topk(2).indices  # a group's score: its best two, here both
    allowed = torch.zeros(2, LENGTH, 4, dtype=torch.bool).scatter(-1, groups, True)
    experts = biased.masked_fill(~allowed[..., None], -torch.inf).flatten(2).topk(2).indices
    assert torch.equal(routing.experts.sort(-1).values, experts.sort(-1).values)
    top = routing.logits.topk(2).indices
    assert not torch.equal(routing.experts.sort(-1).values, top.sort(-1).values)
    weights = scores.gather(-1, routing.experts)
    assert close(routing.weights, 2.5 * weights / weights.sum(-1, keepdim=True))
    with pytest.raises(SmeltscopeError, match="Execution 0 holds no site 'router'"):
        run[0, "router"]


def test_gemma_3():
    """Heads are moved in front of the tokens before their norm, and what is written is normed."""
    model = build("Gemma3Text", head_dim=8, sliding_window=8, query_pre_attn_scalar=8)
    run = captured(model, some_tokens(size=64))
    for e, layer in enumerate(model.model.layers):
        for letter, heads in (("q", 4), ("k", 2)):
            before, after = run[e, letter], run[e, f"{letter}_norm"]
            assert after.shape == (2, LENGTH, heads, 8)
            weight = 1 + getattr(layer.self_attn, f"{letter}_norm").weight
            rms = (before.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
            assert close(after, before / rms * weight)
        used = run[e, "attention"]
        assert close(run[e, "q_norm"][:, 0], used.query[:, :, 0])
        assert close(run[e, "k_norm"][:, 0], used.key[:, :, 0])
        unnormed = layer.self_attn.o_proj(run[e, "pv"].flatten(2))
        assert close(layer.post_attention_layernorm(unnormed), run[e, "attn_out"])
        assert torch.equal(run[e, "resid_mid"], run[e, "resid_pre"] + run[e, "attn_out"])
        assert close(run[e, "resid_mid"] + run[e, "mlp_out"], run[e, "resid_post"])
        assert close(run[e, "mlp_in"], layer.pre_feedforward_layernorm(run[e, "resid_mid"]))


def test_gemma_2_without_its_attention():
    """Soft caps are refused where attention is watched; the rest of the model can be seen."""
    model, tokens = build("Gemma2", head_dim=8, sliding_window=8), some_tokens(size=64)
    with torch.no_grad():
        bare = model(tokens).logits
        with pytest.raises(SmeltscopeError, match="softcap"), capture(model):
            model(tokens)
        with capture(model, ["resid_post", "mlp_out"]) as run:
            assert torch.equal(model(tokens).logits, bare)
    assert run[1, "resid_post"].shape == (2, LENGTH, 32)


@pytest.mark.parametrize("name", ["Olmo2", "Exaone4"])
def test_norms_behind_the_sublayers_alone(name):
    model = build(name, sliding_window=8)
    run = captured(model, some_tokens(size=64))
    for e, layer in enumerate(model.model.layers):
        unnormed = layer.self_attn.o_proj(run[e, "pv"].flatten(2))
        assert close(layer.post_attention_layernorm(unnormed), run[e, "attn_out"])
        assert torch.equal(run[e, "resid_mid"] + run[e, "mlp_out"], run[e, "resid_post"])
        assert torch.equal(run[e, "attn_in"], run[e, "resid_pre"])


def test_gated_queries_are_not_taken_for_heads():
    linear = {f"linear_{what}": 2 for what in ("num_key_heads", "num_value_heads")}
    linear |= {f"linear_{what}_head_dim": 8 for what in ("key", "value")}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = build(
        "Qwen3Next",
        head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        shared_expert_intermediate_size=16,
        **linear,
        **experts,
    )
    sites = sites_of(model)
    assert not sites["q"] and sites["k"] == sites["v"] == sites["q_norm"] == [1]
    assert sites["attention"] == sites["pv"] == [1]  # the other layer has none
    run = captured(model, some_tokens(size=64))
    assert close(run[1, "q_norm"][:, 0], run[1, "attention"].query[:, :, 0])


def test_interleaved_projections_are_not_cut_in_three():
    model = build("GPTBigCode", n_embd=32, n_head=4, n_layer=2, n_positions=64)
    sites = sites_of(model)
    assert not sites["q"] and not sites["k"] and not sites["v"]
    assert sites["attn_out"] == sites["attention"] == [0, 1]


def test_a_model_that_chooses_its_attention_by_name():
    """Falcon has attention of its own for SDPA and another for all else: it must not be renamed."""
    values = {"num_kv_heads": 2, "new_decoder_architecture": True, "alibi": False}
    model, tokens = build("Falcon", **values), some_tokens(size=64)
    with torch.no_grad():
        bare = model(tokens).logits
        with capture(model, ["resid_post"]):
            assert torch.equal(model(tokens).logits, bare)
        with pytest.raises(SmeltscopeError, match="attention interface"), capture(model):
            model(tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ON_SDPA)
def test_logits_are_bit_equal_with_all_sites_watched(name, dtype):
    model, tokens = tiny(name).to(dtype), some_tokens()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            bare = model(tokens).logits
            with capture(model, sorted(has_each(name))) as run:
                assert torch.equal(model(tokens).logits, bare)
    assert run[0, "resid_post"].dtype == dtype


@pytest.mark.parametrize("name", ["gpt_oss", "inkling2_loop"])
def test_logits_with_all_sites_watched(name):
    model, tokens = tiny(name), some_tokens()
    with torch.no_grad():
        bare = model(tokens).logits
        with capture(model, sorted(has_each(name))):
            assert (model(tokens).logits - bare).abs().max() < 1e-5
        # Without attention the model runs on its own.
        with capture(model, sorted(has_each(name) - {"attention", "pv"})):
            assert torch.equal(model(tokens).logits, bare)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_step_by_step_with_a_cache(name):
    """At each step the sites of its token, as in a forward over all of them."""
    model, tokens = tiny(name), some_tokens(rows=1, length=22)
    sites = [s for s in has_each(name) if s != "attention"]
    whole = captured(model, tokens, sites)
    found = sites_of(model)
    given: list[tuple[int, str]] = []
    cache = None
    with torch.no_grad():
        for step in (slice(0, 19), slice(19, 20), slice(20, 21), slice(21, 22)):
            with capture(model, sites) as run:
                cache = model(tokens[:, step], cache=cache, use_cache=True).cache
            for site in sites:
                for e in found[site]:
                    given.append((e, site))
                    now, then = run[e, site], whole[e, site]
                    if site == "router":
                        assert torch.equal(now.experts, then.experts[:, step])
                        now, then = now.logits, then.logits
                    assert now.shape == then[:, step].shape
                    assert (now - then[:, step]).abs().max() < 2e-5 * then.abs().max()
    assert len(given) == 4 * sum(len(found[site]) for site in sites)


class InPlace(transformers.models.llama.modeling_llama.LlamaDecoderLayer):
    """Adds to the residual stream in place, as some models do to save memory."""

    def forward(self, hidden_states, **kwargs):
        hidden_states += self.self_attn(self.input_layernorm(hidden_states), **kwargs)[0]
        hidden_states += self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states


def test_a_model_that_changes_tensors_in_place():
    model, tokens = tiny("llama"), some_tokens()
    sites = sorted(has_each("llama") - {"attention"})
    expected = captured(model, tokens, sites)
    other = tiny("llama")
    for layer in other.model.layers:
        layer.__class__ = InPlace
    at_the_end: dict[str, Tensor] = {}
    wrong = []

    def on_site(execution, site, value) -> None:
        if site == "resid_pre":
            at_the_end.clear()
        at_the_end[site] = value  # looked at when the execution ends
        if site == "resid_post":
            wrong.extend(
                (execution.index, s)
                for s, kept in at_the_end.items()
                if not torch.equal(kept, expected[execution.index, s])
            )

    with torch.no_grad():
        bare = other(tokens).logits
        with capture(other, sites, on_site):
            assert torch.equal(other(tokens).logits, bare)
    assert wrong == []
    kept = captured(other, tokens, sites)
    assert all(torch.equal(kept[e, s], expected[e, s]) for e in range(3) for s in sites)


def test_projections_that_are_clipped_in_place():
    model = build("Olmo", clip_qkv=0.05)
    given = []
    with torch.no_grad(), capture(model, "qkv", lambda e, s, value: given.append(value)):
        model(some_tokens(size=64))
    for value in given:  # before the clipping, although it came while they were changed
        assert value.abs().max() > 0.1
    run = captured(model, some_tokens(size=64))
    for letter in "qkv":
        projection = getattr(model.model.layers[0].self_attn, f"{letter}_proj")
        assert close(run[0, letter].flatten(2), projection(run[0, "attn_in"]))
    assert close(run[0, "v"].clamp(-0.05, 0.05).transpose(1, 2), run[0, "attention"].value)


def test_values_that_are_handed_over_are_the_models_own():
    model, tokens, seen, given = tiny("llama"), some_tokens(), [], []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda m, args, output: seen.append(output.data_ptr()))
    sites_of(model)
    seen.clear()
    with torch.no_grad(), capture(model, ["resid_post"], lambda e, s, v: given.append(v)):
        model(tokens)
    assert [value.data_ptr() for value in given] == seen
    assert not any(value.requires_grad for value in given)


@pytest.mark.parametrize(
    ("name", "site", "reason"),
    [
        ("llama", "router", "no router of experts"),
        ("gpt2", "q_norm", "queries have no norm"),
        ("mixtral", "k_norm", "keys have no norm"),
        ("dory", "attn_out", "does not add up"),
        ("dory", "resid_mid", "does not add up"),
        ("inkling2_loop", "k", "no module of its attention gives them alone"),
    ],
)
def test_a_site_that_no_layer_has(name, site, reason):
    model = tiny(name)
    refusal = f"No layer of {type(model).__name__} has the site '{site}': .*{reason}.*leave it out"
    with pytest.raises(SmeltscopeError, match=refusal), capture(model, ["resid_post", site]):
        pass


def test_a_module_that_did_not_run_is_no_empty_row():
    model, tokens = tiny("llama"), some_tokens()
    layer = model.model.layers[1]
    with (
        torch.no_grad(),
        pytest.raises(
            SmeltscopeError, match=r"Execution 1 .* has no mlp_in to watch: the module .* never ran"
        ),
        capture(model, ["resid_pre", "mlp_in", "resid_post"]),
    ):
        layer.forward = lambda hidden_states, **_: hidden_states
        model(tokens)


def test_a_module_that_ran_twice_is_refused():
    model, tokens = tiny("llama"), some_tokens()
    mlp = model.model.layers[1].mlp
    once = mlp.forward
    with (
        torch.no_grad(),
        pytest.raises(SmeltscopeError, match="Execution 1 gave the site 'attn_in' twice"),
        capture(model, ["attn_in"]),
    ):
        attention = model.model.layers[1].self_attn
        mlp.forward = lambda x: once(attention(x, **arguments)[0])
        arguments: dict[str, Any] = {}
        attention.register_forward_pre_hook(
            lambda m, a, k: arguments.update(
                {n: v for n, v in k.items() if n not in ("hidden_states", "past_key_values")}
            ),
            with_kwargs=True,
        )
        model(tokens, use_cache=False)


def hooks_of(model: Any) -> list[tuple[int, int]]:
    return [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]


@pytest.mark.parametrize("where", ["mlp_in", "q", "resid_mid", "router"])
def test_an_exception_in_the_middle(where):
    model, tokens, forwards, given = tiny("smelt"), some_tokens(), [], []
    with torch.no_grad():
        bare = model(tokens).logits
    before = hooks_of(model)

    def on_site(execution, site, value) -> None:
        given.append((execution.index, site))
        if given[-1] == (4, where) and len(forwards) < 2:
            forwards.append(given.copy())
            given.clear()
            raise ZeroDivisionError

    sites = sorted(has_each("smelt"))
    with torch.no_grad(), capture(model, sites, on_site):
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                model(tokens)
        model(tokens)  # the same capture goes on
    assert forwards[0] == forwards[1] == given[: len(forwards[0])]
    assert sorted(given) == sorted((e, site) for e in range(9) for site in sites)
    assert hooks_of(model) == before
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, bare)
    run = captured(model, tokens, sites)
    assert run[8, "resid_post"].isfinite().all()


def test_a_forward_that_fails_while_sites_are_looked_for():
    model, tokens = tiny("llama"), some_tokens()
    model.train()
    before = hooks_of(model)
    attention = model.model.layers[2].self_attn
    attention.forward = lambda *_, **__: 1 / 0
    with pytest.raises(ZeroDivisionError), capture(model, ["resid_post"]):
        pass
    assert hooks_of(model) == before and all(m.training for m in model.modules())
    del attention.forward
    assert captured(model.eval(), tokens, ["resid_post"])[2, "resid_post"].isfinite().all()


def test_looking_for_sites_leaves_the_model_alone():
    model, tokens = tiny("smelt").train(), some_tokens()
    model.model.layers[2].mlp.eval()
    modes = [module.training for module in model.modules()]
    before, state = hooks_of(model), torch.get_rng_state()
    with torch.inference_mode():
        assert sites_of(model)["router"]
    assert [module.training for module in model.modules()] == modes
    assert hooks_of(model) == before and torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    model.eval()
    calls: list[int] = []
    model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    captured(model, tokens)
    assert len(calls) == 1  # what was found is remembered


def test_layers_that_were_exchanged_are_looked_at_anew():
    model, other, tokens = tiny("llama"), tiny("llama", seed=1), some_tokens()
    sites = ["resid_mid", "mlp_in"]
    captured(model, tokens, sites)
    model.model.layers = other.model.layers
    run = captured(model, tokens, sites)
    assert close(
        run[2, "mlp_in"], other.model.layers[2].post_attention_layernorm(run[2, "resid_mid"])
    )


def test_a_second_forward_replaces_the_first():
    model, first, second = tiny("smelt"), some_tokens(seed=1), some_tokens(rows=1, length=7, seed=2)
    sites = sorted(has_each("smelt"))
    with torch.no_grad(), capture(model, sites) as run:
        model(first)
        kept = run[8, "resid_post"]
        model(second)
    assert torch.equal(kept, captured(model, first, sites)[8, "resid_post"])
    assert torch.equal(run[8, "resid_post"], captured(model, second, sites)[8, "resid_post"])
    assert run[8, "router"].experts.shape == (1, 7, 2)


def test_one_token():
    for name in TINY_MODELS:
        model = tiny(name)
        run = captured(model, some_tokens(length=1))
        for site, executions in sites_of(model).items():
            for e in executions:
                value = run[e, site]
                value = value.logits if site == "router" else value
                assert site == "attention" or value.shape[:2] == (2, 1)


def test_captures_without_attention_inside_one_with_it():
    model, tokens = tiny("smelt"), some_tokens()
    with torch.no_grad(), capture(model) as outer:
        with capture(model, ["resid_post"]) as inner:
            model(tokens)
        assert inner[8, "resid_post"].shape == (2, LENGTH, 32)
        model(tokens)
    assert outer[8, "attention"].query.shape == (2, 4, LENGTH, 8)
    assert model.config._attn_implementation == "sdpa"


def test_gradients_pass_by():
    """Sites carry no gradient, and the model's is what it was."""
    tokens, gradients = some_tokens(), []
    for watched in (False, True):
        model = tiny("smelt").train()
        if watched:
            with capture(model, sorted(has_each("smelt"))) as run:
                model(tokens, labels=tokens).loss.backward()
            assert not run[0, "q"].requires_grad and not run[0, "router"].weights.requires_grad
        else:
            model(tokens, labels=tokens).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_what_is_known_of_a_model_ends_with_it():
    model = tiny("smelt")
    captured(model, some_tokens())
    assert model in _known
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_like_transformer_lens(tmp_path):
    """The same names in TransformerLens, on the same weights."""
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import ByT5Tokenizer

    model, tokens = tiny("smelt", vocab_size=384), some_tokens(length=11)
    run = captured(model, tokens)
    model.save_pretrained(tmp_path)
    ByT5Tokenizer().save_pretrained(tmp_path)
    bridge = TransformerBridge.boot_transformers(str(tmp_path), device="cpu")
    with torch.no_grad():
        _, cache = bridge.run_with_cache(tokens)
    names = {
        **{site: f"hook_{site}" for site in ("resid_pre", "attn_out", "mlp_out", "resid_post")},
        "q": "attn.hook_q",
        "k": "attn.hook_k",
        "v": "attn.hook_v",
        "pv": "attn.hook_z",
        "resid_mid": "hook_resid_mid",
        "mlp_in": "mlp.hook_in",
    }
    for e in run.executions:
        for site, name in names.items():
            lens = cache[f"blocks.{e.index}.{name}"]
            value = run[e.index, site]
            assert (lens.reshape(value.shape) - value).abs().max() < 1e-5, (e, site)
