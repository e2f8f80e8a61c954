"""SMELT in TransformerLens and nnsight, against plain PyTorch hooks on the same weights."""

import os
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nnsight import NNsight, TransformersModel
from torch import Tensor, nn
from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge
from transformers import ByT5Tokenizer
from transformers.models.qwen3_moe.modeling_qwen3_moe import apply_rotary_pos_emb

from smeltscope.model import SmeltForCausalLM, lens, tiny
from smeltscope.model.lens import SmeltArchitectureAdapter, register

ROUNDING = 1e-5  # logits of some units in float32; measured: at most 2e-6
IN_SPAN = [1, 2, 3, 4, 5, 6]  # executions of layers 1:4, twice
HEADS, KV_HEADS, HEAD_DIM, WIDTH, EXPERTS = 4, 2, 8, 32, 8


def save(model: nn.Module, folder: Path) -> str:
    model.save_pretrained(folder)
    ByT5Tokenizer().save_pretrained(folder)  # bytes, from no file
    return str(folder)


def boot(model: nn.Module, folder: Path, **options: Any) -> TransformerBridge:
    return TransformerBridge.boot_transformers(save(model, folder), device="cpu", **options)


def max_error(a: Tensor, b: Tensor) -> float:
    return (a.double() - b.double()).abs().max().item()


@pytest.fixture(scope="module", params=[True, False], ids=["QK-norm", "no QK-norm"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model, the same in TransformerLens, and what each computes for the same tokens."""
    model = tiny("smelt", vocab_size=384, qk_norm=request.param)
    model.set_attn_implementation("eager")
    bridge = boot(model, tmp_path_factory.mktemp("smelt"))
    ids = torch.randint(3, 256, (2, 11), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(ids).logits
        lens_logits, cache = bridge.run_with_cache(ids)
    return SimpleNamespace(
        model=model,
        bridge=bridge,
        ids=ids,
        logits=logits,
        lens_logits=lens_logits,
        cache=cache,
        qk_norm=request.param,
    )


@contextmanager
def hooked(module: nn.Module, hook: Any, *, before: bool = False) -> Iterator[None]:
    register_hook = module.register_forward_pre_hook if before else module.register_forward_hook
    handle = register_hook(hook)
    yield
    handle.remove()


def output_of(module: nn.Module, model: nn.Module, ids: Tensor) -> Any:
    kept: list[Any] = []
    with torch.no_grad(), hooked(module, lambda _m, _args, out: kept.append(out)):
        model(ids)
    return kept[0]


@torch.no_grad()
def with_hook(both: Any, name: str, hook: Any) -> Tensor:
    return both.bridge.run_with_hooks(both.ids, fwd_hooks=[(name, hook)])


# ---------------------------------------------------------------- the same model


def test_one_block_for_each_execution(both: Any) -> None:
    assert isinstance(both.bridge.adapter, SmeltArchitectureAdapter)
    assert len(both.bridge.blocks) == both.bridge.cfg.n_layers == 9
    executions = both.bridge.original_model.config.executions
    assert [(e.layer, e.visit) for e in executions[3:6]] == [(3, 1), (1, 2), (2, 2)]


def test_logits_are_equal(both: Any) -> None:
    assert max_error(both.lens_logits, both.logits) < ROUNDING
    with torch.no_grad():
        assert max_error(both.bridge(both.ids), both.logits) < ROUNDING
        both.model.set_attn_implementation("sdpa")
        sdpa = both.model(both.ids).logits
        both.model.set_attn_implementation("eager")
    assert max_error(both.lens_logits, sdpa) < ROUNDING


def test_visits_share_weights_after_booting(both: Any) -> None:
    blocks = both.bridge.blocks
    for layer in (1, 2, 3):
        first, second = dict(blocks[layer].named_parameters()), blocks[layer + 3].named_parameters()
        pairs = [(first[name], weight) for name, weight in second]
        assert len(pairs) == (11 if both.qk_norm else 9)
        assert all(a is b for a, b in pairs)


@pytest.mark.parametrize("execution", range(9))
def test_residual_differences_are_the_writes(both: Any, execution: int) -> None:
    at = f"blocks.{execution}.hook_"
    before, middle, after, attn, mlp = (
        both.cache[at + name]
        for name in ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")
    )
    assert torch.equal(before + attn, middle)
    assert torch.equal(middle + mlp, after)
    assert max_error(after - before, attn + mlp) < 1e-6
    if execution:
        assert torch.equal(before, both.cache[f"blocks.{execution - 1}.hook_resid_post"])


# ---------------------------------------------------------------- what the hook points carry


@pytest.mark.parametrize("execution", [0, 2, 5, 8])
def test_hook_points_carry_what_torch_hooks_see(both: Any, execution: int) -> None:
    model, ids, at = both.model, both.ids, f"blocks.{execution}."
    layer = model.model.layers[execution]
    attention, batch, length = layer.self_attn, 2, 11

    def seen(module: nn.Module) -> Any:
        return output_of(module, model, ids)

    def heads(x: Tensor) -> Tensor:
        return x.reshape(batch, length, -1, HEAD_DIM)

    router_logits, weights, indices = seen(layer.mlp.gate)
    spread = torch.zeros(batch * length, EXPERTS).scatter(1, indices, weights)
    attn_write, pattern = seen(attention)
    q_normed, k_normed = (
        seen(norm).transpose(1, 2) for norm in (attention.q_norm, attention.k_norm)
    )
    cos_sin = model.model.rotary_emb(q_normed, torch.arange(length)[None])
    q_rot, k_rot = (x.transpose(1, 2) for x in apply_rotary_pos_emb(q_normed, k_normed, *cos_sin))
    mixed: list[Tensor] = []
    with (
        torch.no_grad(),
        hooked(attention.o_proj, lambda _m, args: mixed.append(args[0]), before=True),
    ):
        model(ids)

    expected = {
        "hook_resid_post": seen(layer),
        "hook_attn_out": attn_write,
        "hook_mlp_out": seen(layer.mlp),
        "ln1.hook_out": seen(layer.input_layernorm),
        "ln2.hook_out": seen(layer.post_attention_layernorm),
        "attn.hook_q": heads(seen(attention.q_proj)),
        "attn.hook_k": heads(seen(attention.k_proj)),
        "attn.hook_v": heads(seen(attention.v_proj)),
        "attn.hook_q_normed": q_normed,
        "attn.hook_k_normed": k_normed,
        "attn.hook_rot_q": q_rot,
        "attn.hook_rot_k": k_rot,
        "attn.hook_z": heads(mixed[0]),
        "attn.hook_pattern": pattern,
        "attn.hook_attn_scores": pattern,
        "attn.hook_out": attn_write,
        "mlp.hook_out": seen(layer.mlp),
        "mlp.gate.hook_out": router_logits,
        "mlp.hook_expert_weights": spread,
        "mlp.hook_expert_indices": indices,
    }
    if not both.qk_norm:
        assert torch.equal(
            both.cache[at + "attn.hook_q_normed"].transpose(1, 2), both.cache[at + "attn.hook_q"]
        )
    for name, value in expected.items():
        got = both.cache[at + name]
        got = got.softmax(-1) if name.endswith("attn_scores") else got
        assert got.shape == value.shape, name
        assert max_error(got, value) < ROUNDING, name
    assert both.cache[at + "attn.hook_k"].shape == (batch, length, KV_HEADS, HEAD_DIM)


BY_PART = {
    "hook_": ["resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "in", "out"],
    "ln1.hook_": ["in", "scale", "normalized", "out"],
    "ln2.hook_": ["in", "scale", "normalized", "out"],
    "attn.hook_": ["in", "q", "k", "v", "q_normed", "k_normed", "rot_q", "rot_k", "z", "out"],
    "attn.hook_attn_": ["scores"],
    "attn.": ["hook_cos", "hook_sin", "hook_pattern"],
    "mlp.hook_": ["in", "pre", "post", "out", "expert_weights", "expert_indices"],
    "mlp.gate.hook_": ["in", "out"],
}
FIRED = [prefix + name for prefix, names in BY_PART.items() for name in names]
FIRED_ON_REQUEST = {
    "use_attn_result": ["attn.hook_result"],
    "use_split_qkv_input": ["hook_q_input", "hook_k_input", "hook_v_input"],
    "use_attn_in": ["hook_attn_in"],
    "use_hook_mlp_in": ["hook_mlp_in"],
}
OUTSIDE_BLOCKS = ["hook_embed", "ln_final.hook_normalized", "ln_final.hook_out", "unembed.hook_out"]
# TransformerLens lists these for every model of this kind, but nothing fires them.
NEVER_FIRED = ["mlp.hook_router_scores", "attn.hook_hidden_states"]


@contextmanager
def requested(bridge: TransformerBridge, flag: str) -> Iterator[None]:
    getattr(bridge, f"set_{flag}")(True)
    yield
    getattr(bridge, f"set_{flag}")(False)


@torch.no_grad()
def firings(both: Any, names: list[str]) -> dict[str, int]:
    counts = dict.fromkeys(names, 0)

    def counting(name: str) -> Any:
        def count(_: Tensor, hook: HookPoint) -> None:
            counts[name] += 1

        return count

    logits = both.bridge.run_with_hooks(both.ids, fwd_hooks=[(n, counting(n)) for n in names])
    assert max_error(logits, both.logits) < ROUNDING
    return counts


def in_every_block(names: list[str]) -> list[str]:
    return [f"blocks.{i}.{name}" for i in range(9) for name in names]


def test_hooks_fire_once_for_each_execution(both: Any) -> None:
    names = OUTSIDE_BLOCKS + in_every_block(FIRED)
    assert firings(both, names) == dict.fromkeys(names, 1)
    assert set(names) <= set(both.cache.keys())


@pytest.mark.parametrize("flag", FIRED_ON_REQUEST)
def test_hooks_that_fire_on_request(both: Any, flag: str) -> None:
    names = in_every_block(FIRED_ON_REQUEST[flag])
    assert not set(names) & set(both.cache.keys())
    with requested(both.bridge, flag):
        assert firings(both, names) == dict.fromkeys(names, 1)


def test_hooks_that_never_fire(both: Any) -> None:
    names = in_every_block(NEVER_FIRED)
    assert set(names) <= set(both.bridge.hook_dict)
    assert firings(both, names) == dict.fromkeys(names, 0)


# ---------------------------------------------------------------- interventions


def zero(value: Tensor, hook: HookPoint) -> Tensor:
    return torch.zeros_like(value)


@pytest.mark.parametrize(("first", "second"), [(1, 4), (3, 6)])
def test_a_hook_on_visit_two_alone(both: Any, first: int, second: int) -> None:
    def zero_write(_m: nn.Module, _args: Any, out: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        return torch.zeros_like(out[0]), out[1]

    expected = {}
    for execution in (first, second):
        module = both.model.model.layers[execution].self_attn
        with torch.no_grad(), hooked(module, zero_write):
            expected[execution] = both.model(both.ids).logits
        got = with_hook(both, f"blocks.{execution}.hook_attn_out", zero)
        assert max_error(got, expected[execution]) < ROUNDING
    assert max_error(expected[first], expected[second]) > 0.01
    assert max_error(expected[second], both.logits) > 0.01

    hooks = [(f"blocks.{second}.hook_attn_out", zero)]
    with torch.no_grad(), both.bridge.hooks(fwd_hooks=hooks):
        _, cache = both.bridge.run_with_cache(both.ids)
    at = f"blocks.{second}."
    # Nothing before it changes: earlier executions, and this one up to its write.
    untouched = [n for n in both.cache if n.startswith("blocks.") and int(n.split(".")[1]) < second]
    untouched += [at + n for n in ("hook_resid_pre", "attn.hook_pattern", "attn.hook_z")]
    assert len(untouched) > 50 * second
    assert all(torch.equal(cache[name], both.cache[name]) for name in untouched)
    # It changes what it should: the residual stream goes past this attention.
    assert torch.equal(cache[at + "hook_resid_mid"], cache[at + "hook_resid_pre"])
    assert not torch.equal(cache[at + "hook_resid_post"], both.cache[at + "hook_resid_post"])
    # And nothing stays behind.
    with torch.no_grad():
        assert torch.equal(both.bridge(both.ids), both.lens_logits)


def test_one_head_of_one_visit(both: Any) -> None:
    def zero_head(z: Tensor, hook: HookPoint) -> Tensor:
        z = z.clone()
        z[:, :, 2] = 0
        return z

    def zero_slice(_m: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        mixed = args[0].clone()
        mixed[..., 2 * HEAD_DIM : 3 * HEAD_DIM] = 0
        return (mixed,)

    module = both.model.model.layers[5].self_attn.o_proj
    with torch.no_grad(), hooked(module, zero_slice, before=True):
        expected = both.model(both.ids).logits
    assert max_error(expected, both.logits) > 0.01
    assert max_error(with_hook(both, "blocks.5.attn.hook_z", zero_head), expected) < ROUNDING
    with requested(both.bridge, "use_attn_result"):
        by_result = with_hook(both, "blocks.5.attn.hook_result", zero_head)
    assert max_error(by_result, expected) < ROUNDING


def test_the_pattern_of_one_visit(both: Any) -> None:
    def all_on_the_first_key(pattern: Tensor, hook: HookPoint) -> Tensor:
        sink = torch.zeros_like(pattern)
        sink[..., 0] = 1
        return sink

    def first_value(_m: nn.Module, _args: Any, v: Tensor) -> Tensor:
        return v[:, :1].expand_as(v)

    with torch.no_grad(), hooked(both.model.model.layers[4].self_attn.v_proj, first_value):
        expected = both.model(both.ids).logits
    got = with_hook(both, "blocks.4.attn.hook_pattern", all_on_the_first_key)
    assert max_error(expected, both.logits) > 0.01
    assert max_error(got, expected) < ROUNDING


def test_the_router_of_one_visit(both: Any) -> None:
    def experts_0_and_1(_: Tensor, hook: HookPoint) -> Tensor:
        return torch.tensor([[0.75, 0.25] + [0.0] * 6]).repeat(22, 1)

    def routed(_m: nn.Module, _args: Any, out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (
            out[0],
            torch.tensor([[0.75, 0.25]]).repeat(22, 1),
            torch.tensor([[0, 1]]).repeat(22, 1),
        )

    with torch.no_grad(), hooked(both.model.model.layers[6].mlp.gate, routed):
        expected = both.model(both.ids).logits
    got = with_hook(both, "blocks.6.mlp.hook_expert_weights", experts_0_and_1)
    assert max_error(expected, both.logits) > 0.01
    assert max_error(got, expected) < ROUNDING


def test_head_results_sum_to_the_write(both: Any) -> None:
    with torch.no_grad(), requested(both.bridge, "use_attn_result"):
        logits, cache = both.bridge.run_with_cache(both.ids)
    assert max_error(logits, both.logits) < ROUNDING
    for execution in range(9):
        result = cache[f"blocks.{execution}.attn.hook_result"]
        assert result.shape == (2, 11, HEADS, WIDTH)
        assert max_error(result.sum(2), both.cache[f"blocks.{execution}.hook_attn_out"]) < 1e-6
    # The same without asking the model again: by z and W_O.
    stacked = both.cache.stack_head_results(layer=-1).unflatten(0, (9, HEADS))
    for execution in range(9):
        write = both.cache[f"blocks.{execution}.hook_attn_out"]
        assert max_error(stacked[execution].sum(0), write) < 1e-6


def test_the_residual_stream_decomposes(both: Any) -> None:
    parts, labels = both.cache.decompose_resid(return_labels=True)
    assert labels == ["embed"] + [f"{i}_{w}_out" for i in range(9) for w in ("attn", "mlp")]
    assert max_error(parts.sum(0), both.cache["blocks.8.hook_resid_post"]) < 1e-6


def test_gradients_reach_one_visit(both: Any) -> None:
    kept: list[Tensor] = []

    def keep_gradient(_m: nn.Module, _args: Any, out: tuple[Tensor, Any]) -> None:
        out[0].register_hook(kept.append)

    with hooked(both.model.model.layers[4].self_attn, keep_gradient):
        both.model(both.ids).logits.pow(2).sum().backward()
    both.model.zero_grad()
    both.bridge.add_hook(
        "blocks.4.hook_attn_out", lambda grad, hook: kept.append(grad.clone()), dir="bwd"
    )
    both.bridge(both.ids).pow(2).sum().backward()
    both.bridge.reset_hooks()
    both.bridge.zero_grad()
    assert kept[0].abs().max() > 0.1
    torch.testing.assert_close(kept[1], kept[0], rtol=1e-4, atol=1e-5)


def test_stopping_and_starting_between_executions(both: Any) -> None:
    with torch.no_grad():
        middle = both.bridge(both.ids, stop_at_layer=5)
        assert torch.equal(middle, both.cache["blocks.4.hook_resid_post"])
        assert max_error(both.bridge(middle, start_at_layer=5), both.logits) < ROUNDING


# ---------------------------------------------------------------- running it


def test_left_padding_changes_no_real_token(both: Any) -> None:
    padded = nn.functional.pad(both.ids[:1], (4, 0), value=7)
    mask = nn.functional.pad(torch.ones_like(both.ids[:1]), (4, 0))
    with torch.no_grad():
        logits = both.bridge(padded, attention_mask=mask)
    assert max_error(logits[0, 4:], both.logits[0]) < ROUNDING


@pytest.mark.parametrize("cached", [True, False])
def test_greedy_generation_is_transformers(both: Any, cached: bool) -> None:
    expected = both.model.generate(
        both.ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    got = both.bridge.generate(
        both.ids,
        max_new_tokens=12,
        do_sample=False,
        stop_at_eos=False,
        use_past_kv_cache=cached,
        verbose=False,
    )
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize(
    "overrides",
    [
        {"num_visits": 1},
        {"num_visits": 3},
        {"loop_start": 0, "loop_stop": 6},
        {"residual_scale": 0.7},
        {"num_key_value_heads": 4},
        {"attention_bias": True},
        {"tie_word_embeddings": False},
    ],
    ids=str,
)
def test_other_models_boot(tmp_path: Path, overrides: dict[str, Any]) -> None:
    model = tiny("smelt", vocab_size=384, **overrides)
    ids = torch.arange(3, 20)[None]
    bridge = boot(model, tmp_path)
    with torch.no_grad():
        expected, got = model(ids).logits, bridge(ids)
        bridge.set_use_attn_result(True)
        by_heads = bridge(ids)
    assert len(bridge.blocks) == len(model.config.executions)
    assert max_error(got, expected) < ROUNDING
    assert max_error(by_heads, expected) < ROUNDING


def test_another_number_of_visits_boots(tmp_path: Path) -> None:
    folder = save(tiny("smelt", vocab_size=384), tmp_path)
    ids = torch.arange(3, 20)[None]
    model = SmeltForCausalLM.from_pretrained(folder, num_visits=3)
    with torch.no_grad():
        expected = model(ids).logits
        bridge = TransformerBridge.boot_transformers(folder, hf_model=model, device="cpu")
        _, cache = bridge.run_with_cache(ids)
        assert max_error(bridge(ids), expected) < ROUNDING
    assert len(bridge.blocks) == 12
    write = cache["blocks.8.hook_attn_out"] + cache["blocks.8.hook_mlp_out"]
    assert (
        max_error(cache["blocks.8.hook_resid_post"] - cache["blocks.8.hook_resid_pre"], write)
        < 1e-6
    )


def test_bfloat16_boots_with_shared_weights(tmp_path: Path) -> None:
    bridge = boot(tiny("smelt", vocab_size=384), tmp_path, dtype=torch.bfloat16)
    with torch.no_grad():
        logits = bridge(torch.arange(3, 20)[None])
    assert logits.dtype == torch.bfloat16
    assert logits.isfinite().all()
    assert bridge.blocks[2].attn.k.weight is bridge.blocks[5].attn.k.weight


def test_compatibility_mode_leaves_norms_and_predictions(tmp_path: Path) -> None:
    model = tiny("smelt", vocab_size=384)
    bridge, ids = boot(model, tmp_path), torch.arange(3, 20)[None]
    with pytest.warns(UserWarning, match="does not support fold_ln"):
        bridge.enable_compatibility_mode()
    for block, layer in zip(bridge.blocks, model.model.layers, strict=True):
        assert torch.equal(block.ln1.weight, layer.input_layernorm.weight)
    with torch.no_grad():
        expected, got = model(ids).logits.log_softmax(-1), bridge(ids).log_softmax(-1)
    assert max_error(got, expected) < ROUNDING


# ---------------------------------------------------------------- registration


def test_the_entry_point_names_the_adapter() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    value = project["entry-points"]["transformer_lens.architectures"]["SmeltForCausalLM"]
    assert value == f"{SmeltArchitectureAdapter.__module__}:{SmeltArchitectureAdapter.__qualname__}"


def test_registering_again_is_harmless() -> None:
    register()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ArchitectureAdapterFactory.discover_entry_points()
    register()
    assert ArchitectureAdapterFactory._adapters["SmeltForCausalLM"] is SmeltArchitectureAdapter


def test_registering_a_checkout_that_was_never_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lens, "entry_points", lambda **_: ())
    monkeypatch.setattr(ArchitectureAdapterFactory, "_adapters", {})
    register()
    assert ArchitectureAdapterFactory._adapters == {"SmeltForCausalLM": SmeltArchitectureAdapter}


BOOT = """
import sys, warnings
warnings.simplefilter("error", UserWarning)
{imports}
from transformer_lens.model_bridge import TransformerBridge
bridge = TransformerBridge.boot_transformers({folder!r}, device="cpu")
assert type(bridge.adapter).__module__ == "smeltscope.model.lens"
print("blocks", len(bridge.blocks))
"""
SMELTSCOPE_FIRST = """
import smeltscope.model
heavy = {"transformer_lens", "nnsight"} & set(sys.modules)
assert not heavy, heavy
"""
TRANSFORMER_LENS_FIRST = """
import transformer_lens.model_bridge
import smeltscope.model
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    [SMELTSCOPE_FIRST, TRANSFORMER_LENS_FIRST],
    ids=["smeltscope first", "TransformerLens first"],
)
def test_a_fresh_process_boots(tmp_path: Path, imports: str) -> None:
    """In either order of imports, with the entry point of an installed package."""
    if not entry_points(group="transformer_lens.architectures", name="SmeltForCausalLM"):
        info = tmp_path / "site" / "smeltscope_test-0.dist-info"  # run from a checkout
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: smeltscope-test\nVersion: 0\n")
        (info / "entry_points.txt").write_text(
            "[transformer_lens.architectures]\n"
            "SmeltForCausalLM = smeltscope.model.lens:SmeltArchitectureAdapter\n"
        )
    folder = save(tiny("smelt", vocab_size=384), tmp_path / "model")
    path = os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", BOOT.format(imports=imports, folder=folder)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "blocks 9" in done.stdout


# ---------------------------------------------------------------- nnsight


def test_nnsight_reads_one_visit_by_name(both: Any) -> None:
    attention, gate = both.model.model.layers[5].self_attn, both.model.model.layers[5].mlp.gate
    write, pattern = output_of(attention, both.model, both.ids)
    indices = output_of(gate, both.model, both.ids)[2]

    seen = NNsight(both.model)
    with torch.no_grad(), seen.trace(both.ids):
        got_write = seen.model.layers[5].self_attn.output[0].save()
        got_pattern = seen.model.layers[5].self_attn.output[1].save()
        got_indices = seen.model.layers[5].mlp.gate.output[2].save()
        logits = seen.lm_head.output.save()
    assert torch.equal(got_write, write)
    assert torch.equal(got_pattern, pattern)
    assert torch.equal(got_indices, indices)
    assert torch.equal(logits, both.logits)


def test_nnsight_edits_one_visit_by_name(both: Any) -> None:
    def zero_write(_m: nn.Module, _args: Any, out: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        return torch.zeros_like(out[0]), out[1]

    with torch.no_grad(), hooked(both.model.model.layers[5].self_attn, zero_write):
        expected = both.model(both.ids).logits
    first = output_of(both.model.model.layers[2], both.model, both.ids)

    edited = NNsight(both.model)
    with torch.no_grad(), edited.trace(both.ids):
        same_layer_before = edited.model.layers[2].output.save()
        edited.model.layers[5].self_attn.output[0][:] = 0
        logits = edited.lm_head.output.save()
    assert torch.equal(logits, expected)
    assert not torch.equal(logits, both.logits)
    assert torch.equal(same_layer_before, first)


def test_nnsight_carries_visit_one_into_visit_two(both: Any) -> None:
    first, _ = output_of(both.model.model.layers[2].self_attn, both.model, both.ids)

    def put_first(_m: nn.Module, _args: Any, out: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        return first, out[1]

    with torch.no_grad(), hooked(both.model.model.layers[5].self_attn, put_first):
        expected = both.model(both.ids).logits
    patched = NNsight(both.model)
    with torch.no_grad(), patched.trace(both.ids):
        carried = patched.model.layers[2].self_attn.output[0].clone()
        patched.model.layers[5].self_attn.output[0][:] = carried
        logits = patched.lm_head.output.save()
    assert torch.equal(logits, expected)
    assert max_error(logits, both.logits) > 0.01


def test_nnsight_loads_a_folder(tmp_path: Path) -> None:
    model = tiny("smelt", vocab_size=384)
    folder = save(model, tmp_path)
    loaded = TransformersModel(folder, task="text-generation", device_map="cpu", dispatch=True)
    with torch.no_grad(), loaded.trace("a sink"):
        write = loaded.model.layers[4].mlp.output.save()
    ids = ByT5Tokenizer()("a sink", return_tensors="pt").input_ids
    assert max_error(write, output_of(model.model.layers[4].mlp, model, ids)) < ROUNDING
    assert [e.visit for e in loaded.config.executions] == [1, 1, 1, 1, 2, 2, 2, 1, 1]
