"""`capture` against the attention that the models themselves return when they run eagerly."""

import copy
import gc
import weakref

import pytest
import torch
import transformers
from torch import nn

from smeltscope.activations import Capture, capture
from smeltscope.errors import SmeltscopeError
from smeltscope.model import TINY_MODELS, Execution, executions_of, tiny

EXACT = 1e-5
LENGTH = 24  # longer than the tiny models' sliding windows of 16
WITH_LEARNED_SINKS = ("gpt_oss", "inkling2_loop")
ON_SDPA = tuple(n for n in TINY_MODELS if n not in WITH_LEARNED_SINKS)
VARIANTS = {name: (name, {}) for name in TINY_MODELS} | {
    "smelt, 1 visit": ("smelt", {"num_visits": 1}),
    "smelt, 3 visits": ("smelt", {"num_visits": 3}),
    "smelt, no span": ("smelt", {"loop_start": 3, "loop_stop": 3}),
    "smelt, whole stack": ("smelt", {"loop_start": 0, "loop_stop": 6}),
    "smelt, no qk-norm": ("smelt", {"qk_norm": False}),
    "mixtral, windows": ("mixtral", {"sliding_window": 8}),
    "gpt2, scaled by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
}


def some_tokens(rows: int = 3, length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 256, (rows, length), generator=torch.Generator().manual_seed(seed))


def padding(side: str, tokens: torch.Tensor) -> torch.Tensor | None:
    """Rows with 0, 5 and 20 tokens of padding."""
    if side == "none":
        return None
    mask = torch.ones_like(tokens)
    for row, n in enumerate((0, 5, 20)):
        mask[row, slice(None, n) if side == "left" else slice(tokens.shape[1] - n, None)] = 0
    return mask


def eagerly(model, tokens: torch.Tensor, mask: torch.Tensor | None = None):
    """The model's own eager attention and logits; a copy runs, the model is left alone."""
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        return eager(tokens, attention_mask=mask, output_attentions=True)


def every_key(tokens: torch.Tensor) -> torch.Tensor:
    return torch.arange(tokens.shape[1]).expand(len(tokens), -1)


def state(model) -> list:
    """All that a capture could leave behind."""
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    configs = [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")]
    return [hooks, configs]


@pytest.mark.parametrize("side", ["none", "right", "left"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_like_the_models_own_eager_attention(variant, side):
    name, overrides = VARIANTS[variant]
    model, tokens = tiny(name, **overrides), some_tokens()
    mask = padding(side, tokens)
    with torch.no_grad(), capture(model) as run:
        model(tokens, attention_mask=mask)
    attentions = eagerly(model, tokens, mask).attentions
    assert len(attentions) == len(run.executions)
    real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
    for execution, eager in zip(run.executions, attentions, strict=True):
        watched = run[execution.index, "attention"]
        # gpt-oss and Inkling drop the sink's column before they return weights.
        mass = watched.mass_on(every_key(tokens))
        assert mass.shape == eager.shape
        for row in range(len(tokens)):
            queries = real[row]
            assert (mass[row][:, queries] - eager[row][:, queries]).abs().max() < EXACT
            whole = watched.rows(queries.nonzero()[:, 0].expand(len(tokens), -1))[row]
            assert (whole - eager[row][:, queries]).abs().max() < EXACT
            total = mass[row][:, queries].sum(-1)
            if name in WITH_LEARNED_SINKS:
                assert (total < 1 - 1e-4).all()
                total = total + watched.learned_sink[row][:, queries]
            else:
                assert watched.learned_sink is None
            assert (total - 1).abs().max() < EXACT
        assert torch.equal((eager[:, 0] > 0)[real], (mass[:, 0] > 0)[real])
        seen = watched.sees(every_key(tokens))
        assert torch.equal(seen[real], (eager[:, 0] > 0)[real])
        assert torch.equal(watched.keys_seen()[real], (eager[:, 0] > 0).sum(-1)[real])


def test_inklings_attention_is_not_uniform():
    """What the comparison above is worth: bias, sinks and windows all matter in these models."""
    tokens = some_tokens()
    for name in TINY_MODELS:
        model = tiny(name)
        for weights in eagerly(model, tokens).attentions:
            keys = (weights > 0).sum(-1, keepdim=True)
            assert (weights - 1 / keys).abs()[:, :, 4:].max() > 0.05


@pytest.mark.parametrize(("name", "windowed"), [("gpt_oss", (0, 2)), ("inkling2_loop", None)])
def test_sliding_windows(name, windowed):
    model, tokens = tiny(name), some_tokens()
    with torch.no_grad(), capture(model) as run:
        model(tokens)
    if windowed is None:
        types = model.config.layer_types
        windowed = [e.index for e in run.executions if types[e.layer] == "hybrid_sliding"]
        assert 0 < len(windowed) < 10
    positions = torch.arange(LENGTH)
    for execution in run.executions:
        watched = run[execution.index, "attention"]
        width = 16 if execution.index in windowed else LENGTH
        seen = (positions[None] <= positions[:, None]) & (positions[:, None] - positions < width)
        assert torch.equal(watched.sees(every_key(tokens)), seen.expand(3, -1, -1))
        assert torch.equal(watched.keys_seen(), seen.sum(-1).expand(3, -1))
        assert (watched.mass_on(every_key(tokens))[:, :, ~seen] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("side", ["none", "right", "left"])
@pytest.mark.parametrize("name", ON_SDPA)
def test_logits_are_bit_equal(name, side, dtype):
    model, tokens = tiny(name).to(dtype), some_tokens()
    mask = padding(side, tokens)
    assert model.config._attn_implementation == "sdpa"
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            bare = model(tokens, attention_mask=mask).logits
            with capture(model):
                watched = model(tokens, attention_mask=mask).logits
        assert torch.equal(watched, bare)


@pytest.mark.parametrize("side", ["none", "right", "left"])
@pytest.mark.parametrize("name", WITH_LEARNED_SINKS)
def test_logits_of_models_with_eager_attention_only(name, side):
    model, tokens = tiny(name), some_tokens()
    mask = padding(side, tokens)
    real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
    assert model.config._attn_implementation == "eager"
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            bare = model(tokens, attention_mask=mask).logits
            with capture(model):
                watched = model(tokens, attention_mask=mask).logits
        assert (watched - bare)[real].abs().max() < EXACT


@pytest.mark.parametrize("name", WITH_LEARNED_SINKS)
def test_bfloat16_logits_of_models_with_eager_attention_only(name, tmp_path):
    """No further from the float32 truth of the same weights than the bare model is.

    The median, since rounding makes some tokens change their experts, in both.
    """
    model, tokens = tiny(name), some_tokens(rows=8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
        truth = model(tokens).logits
        model.save_pretrained(
            tmp_path
        )  # Inkling keeps some of its parameters in float32 when loaded
        rounded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
        bare = rounded(tokens).logits.float()
        with capture(rounded) as run:
            watched = rounded(tokens).logits.float()
    assert run[0, "attention"].query.dtype == torch.bfloat16
    assert (watched - truth).abs().median() < 1.1 * (bare - truth).abs().median()


@pytest.mark.parametrize("name", TINY_MODELS)
def test_with_gradients_recorded_logits_are_the_same(name):
    model, tokens = tiny(name), some_tokens()
    bare = model(tokens).logits
    with capture(model):
        watched = model(tokens).logits
    if name in ON_SDPA:
        assert torch.equal(watched, bare)
    else:
        assert (watched - bare).abs().max() < EXACT


def test_inklings_visits_in_order():
    """Layers 2 and 3 run three times; transformers returns one attention for each execution."""
    model, tokens = tiny("inkling2_loop"), some_tokens()
    order = [(0, 1), (1, 1), (2, 1), (3, 1), (2, 2), (3, 2), (2, 3), (3, 3), (4, 1), (5, 1)]
    begun, given = [], []
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda *_, number=number: begun.append(number))
    with torch.no_grad(), capture(model, on_site=lambda e, s, a: given.append((e, s))) as run:
        model(tokens)
    assert run.executions == [
        Execution(index=i, layer=n, visit=v) for i, (n, v) in enumerate(order)
    ]
    assert given == [(e, "attention") for e in run.executions]
    assert begun == [layer for layer, _ in order]


def test_inkling_calls_attention_for_more_than_layers(monkeypatch):
    """Otherwise the test of its labels would be worth nothing."""
    model, tokens, others = tiny("inkling2_loop"), some_tokens(), []
    bare = Capture._bare_attention

    def counted(self, module, *args, **kwargs):
        others.append(type(module).__name__)
        return bare(self, module, *args, **kwargs)

    monkeypatch.setattr(Capture, "_bare_attention", counted)
    with torch.no_grad(), capture(model) as run:
        model(tokens)
    assert others and all("AttentionResidual" in name for name in others)
    for e in run.executions:
        assert run[e.index, "attention"].query.shape == (3, 4, LENGTH, 8)


def test_smelt_visits_in_order():
    given = []
    model = tiny("smelt", num_physical_layers=4, loop_start=1, loop_stop=3, num_visits=3)
    with torch.no_grad(), capture(model, on_site=lambda e, s, a: given.append((e.layer, e.visit))):
        model(some_tokens())
    assert given == [(0, 1), (1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (2, 3), (3, 1)]


@pytest.mark.parametrize("name", ["smelt", "llama", "inkling2_loop"])
def test_everything_is_put_back(name):
    model, tokens = tiny(name), some_tokens()
    before = state(model)
    with torch.no_grad(), capture(model):
        model(tokens)
        assert state(model) != before
    assert state(model) == before


class Boom(Exception):
    pass


@pytest.mark.parametrize("where", ["on_site", "hook", "body"])
@pytest.mark.parametrize("name", ["smelt", "inkling2_loop"])
def test_everything_is_put_back_after_an_exception(name, where):
    model, tokens = tiny(name), some_tokens()
    with torch.no_grad():
        bare = model(tokens).logits
    before = state(model)

    def raises(*_) -> None:
        raise Boom

    def on_site(execution, site, value) -> None:
        if where == "on_site" and execution.index == 3:
            raise Boom

    with pytest.raises(Boom), torch.no_grad(), capture(model, on_site=on_site):
        if where == "body":
            raise Boom
        handle = model.model.layers[2].register_forward_hook(raises)
        try:
            if where == "on_site":
                handle.remove()
            model(tokens)
        finally:
            handle.remove()
    assert state(model) == before
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, bare)
        with capture(model) as run:
            model(tokens)
    assert [run[e.index, "attention"].lse.shape for e in run.executions] == [
        (3, 4, LENGTH) for _ in run.executions
    ]


def test_a_forward_after_a_failed_one_in_the_same_capture():
    """A notebook's user mends the input and goes on."""
    model, tokens = tiny("smelt"), some_tokens()
    calls = []

    def on_site(execution, site, value) -> None:
        calls.append(execution.index)
        if len(calls) == 4:
            raise Boom

    with torch.no_grad(), capture(model, on_site=on_site):
        with pytest.raises(Boom):
            model(tokens)
        model(tokens)
    assert calls == [0, 1, 2, 3, *range(9)]


def test_two_forwards_in_one_capture():
    model = tiny("smelt")
    first, second = some_tokens(seed=1), some_tokens(rows=2, length=7, seed=2)
    with torch.no_grad(), capture(model) as run:
        model(first)
        one = run[8, "attention"].lse.clone()
        model(second)
        two = run[8, "attention"].lse.clone()
    for tokens, lse in ((first, one), (second, two)):
        with torch.no_grad(), capture(model) as alone:
            model(tokens)
        assert torch.equal(alone[8, "attention"].lse, lse)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_generation_with_a_cache_step_by_step(name):
    model, tokens = tiny(name), some_tokens(rows=1, length=20)
    given = []
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    bare = model.generate(tokens, **options)

    def on_site(execution, site, value) -> None:
        keys = torch.arange(value.key.shape[2])[None]
        given.append((execution.index, value.mass_on(keys), value.learned_sink))

    with capture(model, on_site=on_site) as run:
        watched = model.generate(tokens, **options)
    assert torch.equal(watched, bare)
    executions = len(run.executions)
    assert [index for index, *_ in given] == list(range(executions)) * 6
    # A step's only query attends like the last query of an uncached forward.
    for step in range(6):
        attentions = eagerly(model, bare[:, : 20 + step]).attentions
        for (_, mass, _), eager in zip(given[step * executions :], attentions, strict=False):
            last = eager[:, :, -1, -mass.shape[-1] :]  # a sliding cache holds the last keys only
            assert (mass[:, :, -1] - last).abs().max() < EXACT


def test_a_batch_with_left_padding_generates_the_same():
    model, tokens = tiny("smelt"), some_tokens(rows=3, length=12)
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    bare = model.generate(tokens, attention_mask=mask, **options)
    with capture(model):
        watched = model.generate(tokens, attention_mask=mask, **options)
    assert torch.equal(watched, bare)


@pytest.mark.parametrize("name", ["smelt", "gpt2", "gpt_oss", "inkling2_loop"])
def test_left_padding_and_the_first_real_token(name):
    """Each row's own start token, wherever padding puts it: as if the row had run alone."""
    model, tokens = tiny(name), some_tokens()
    mask = padding("left", tokens)
    first = mask.argmax(1, keepdim=True)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad(), capture(model) as run:
        model(tokens, attention_mask=mask, position_ids=positions)
        mass = {e.index: run[e.index, "attention"].mass_on(first) for e in run.executions}
        for row, start in enumerate(first[:, 0].tolist()):
            model(tokens[row : row + 1, start:])
            for e in run.executions:
                alone = run[e.index, "attention"].mass_on(torch.zeros(1, 1, dtype=torch.long))
                padded = mass[e.index][row, :, start:]
                assert (padded - alone[0]).abs().max() < EXACT
                assert mass[e.index][row, :, :start].isnan().all()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_nested_capture_is_refused(implementation):
    model = tiny("smelt")
    model.set_attn_implementation(implementation)
    with capture(model):
        with pytest.raises(SmeltscopeError, match="captured already"), capture(model):
            pass
        with torch.no_grad():
            model(some_tokens())  # the outer one goes on
    assert model.config._attn_implementation == implementation


def test_two_models_at_once():
    one, other, tokens = tiny("smelt"), tiny("llama", seed=1), some_tokens()
    with torch.no_grad(), capture(one) as a, capture(other) as b:
        one(tokens)
        other(tokens)
    assert len(a.executions) == 9 and len(b.executions) == 3
    for run, model in ((a, one), (b, other)):
        eager = eagerly(model, tokens).attentions[-1]
        mass = run[len(run.executions) - 1, "attention"].mass_on(every_key(tokens))
        assert (mass - eager).abs().max() < EXACT


def test_a_model_on_eager_attention_is_watched_too():
    model, tokens = tiny("smelt"), some_tokens()
    expected = eagerly(model, tokens)
    model.set_attn_implementation("eager")
    with torch.no_grad(), capture(model) as run:
        logits = model(tokens).logits
    assert (logits - expected.logits).abs().max() < EXACT
    for e, eager in zip(run.executions, expected.attentions, strict=True):
        mass = run[e.index, "attention"].mass_on(every_key(tokens))
        assert (mass - eager).abs().max() < EXACT


def test_other_attention_implementations_are_refused():
    model = tiny("llama")
    model.set_attn_implementation("flex_attention")
    with (
        pytest.raises(SmeltscopeError, match=r"flex_attention.*set_attn_implementation"),
        capture(model),
    ):
        pass


def test_attention_outside_the_interface_is_refused():
    bloom = transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=64, hidden_size=16, n_layer=2, n_head=2)
    ).eval()
    before = state(bloom)
    with (
        pytest.raises(SmeltscopeError, match=r"Bloom.*attention interface"),
        torch.no_grad(),
        capture(bloom),
    ):
        bloom(some_tokens() % 64)
    assert state(bloom) == before


def test_gpt2_that_reorders_its_attention_is_refused():
    model = tiny("gpt2", reorder_and_upcast_attn=True)
    with pytest.raises(SmeltscopeError, match="reorder_and_upcast_attn"), capture(model):
        pass


def test_a_looped_model_without_a_known_order_is_refused():
    model = tiny("llama")
    model.config.model_type = "ouro"
    with pytest.raises(SmeltscopeError, match="ouro runs its layers more than"), capture(model):
        pass


def test_a_loop_that_the_configuration_does_not_tell_is_noticed():
    model, tokens = tiny("llama"), some_tokens()
    model.model.layers = nn.ModuleList([*model.model.layers, model.model.layers[1]])
    with pytest.raises(SmeltscopeError, match="cannot be labelled rightly"), capture(model):
        model(tokens)

    model = tiny("llama")
    layers = list(model.model.layers)
    with pytest.raises(SmeltscopeError, match="another order"), torch.no_grad(), capture(model):
        model.model.layers = nn.ModuleList([layers[1], layers[0], layers[2]])
        model(tokens)

    model = tiny("llama")
    with pytest.raises(SmeltscopeError, match="2 layers ran"), torch.no_grad(), capture(model):
        model.model.layers = nn.ModuleList(layers := list(model.model.layers)[:2])
        model(tokens)


def test_a_wrong_site():
    model = tiny("llama")
    with (
        pytest.raises(SmeltscopeError, match=r"No site is called atention; there are .*attention"),
        capture(model, ["atention"]),
    ):
        pass


def test_reading_what_is_not_there():
    model, tokens = tiny("llama"), some_tokens()
    with torch.no_grad(), capture(model) as run:
        with pytest.raises(SmeltscopeError, match="no forward has reached it"):
            run[0, "attention"]
        model(tokens)
    run[0, "attention"]
    with pytest.raises(SmeltscopeError, match="Execution 3"):
        run[3, "attention"]
    with torch.no_grad(), capture(model, on_site=lambda *_: None) as run:
        model(tokens)
    with pytest.raises(SmeltscopeError, match="handed to on_site"):
        run[0, "attention"]


@pytest.mark.parametrize(
    "wrap",
    [torch.compile, lambda m: nn.Sequential(m), lambda m: nn.DataParallel(m), lambda m: m.lm_head],
)
def test_wrapped_models_are_refused(wrap):
    with (
        pytest.raises(SmeltscopeError, match="holds the original inside"),
        capture(wrap(tiny("llama"))),
    ):
        pass


def test_a_model_without_a_layer_list_is_refused():
    class Empty(transformers.PreTrainedModel):
        config_class = transformers.LlamaConfig

    with (
        pytest.raises(SmeltscopeError, match="no list of decoder layers"),
        capture(Empty(transformers.LlamaConfig(num_hidden_layers=1))),
    ):
        pass


@pytest.mark.parametrize("name", TINY_MODELS)
def test_training_inside_a_capture(name):
    """Gradients of every parameter, learned sinks included, are those of the bare model."""
    tokens = some_tokens()
    gradients = []
    for watched in (False, True):
        model = tiny(name).train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.0
        if watched:
            with capture(model, on_site=lambda e, s, a: a.mass_on(every_key(tokens))):
                model(tokens, labels=tokens).loss.backward()
        else:
            model(tokens, labels=tokens).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    bare, inside = gradients
    for parameter, gradient in bare.items():
        if gradient is None:
            assert inside[parameter] is None
        elif name in ON_SDPA:
            assert torch.equal(gradient, inside[parameter]), parameter
        else:
            scale = gradient.abs().max().clamp(min=1e-3)
            assert ((gradient - inside[parameter]).abs() / scale).max() < 1e-4, parameter


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_inside_a_capture(reentrant):
    """Layers run again in the backward pass; they are handed over once, and gradients stay right."""
    model, tokens = tiny("llama").train(), some_tokens()
    model(tokens, labels=tokens).loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    given, again = [], []
    with capture(model, on_site=lambda e, s, a: given.append(e.index)):
        loss = model(tokens, labels=tokens).loss
        for layer in model.model.layers:
            layer.self_attn.register_forward_hook(lambda *_: again.append(1))
        loss.backward()
    assert given == [0, 1, 2] and len(again) == 3
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-7)


def test_values_are_let_go_when_handed_over():
    model, tokens = tiny("smelt"), some_tokens()
    alive = []

    def on_site(execution, site, value) -> None:
        # The value of the execution before is gone when the next one comes.
        assert not any(ref() is not None for ref in alive)
        alive.extend([weakref.ref(value), weakref.ref(value.lse)])

    with torch.no_grad(), capture(model, on_site=on_site) as run:
        model(tokens)
        assert len(alive) == 18
        assert not any(ref() is not None for ref in alive)
        assert run._values == {}


def test_values_end_with_the_run():
    model, tokens = tiny("smelt"), some_tokens()
    with torch.no_grad(), capture(model) as run:
        model(tokens)
    kept = weakref.ref(run[0, "attention"])
    assert kept() is not None
    del run
    gc.collect()
    assert kept() is None
    model_ref = weakref.ref(model)
    del model
    gc.collect()
    assert model_ref() is None


def test_the_stack_alone():
    """Without the head: what the runner calls."""
    model, tokens = tiny("smelt"), some_tokens()
    with torch.no_grad(), capture(model) as run:
        model(tokens)
        whole = [run[e.index, "attention"].lse for e in run.executions]
        model.get_decoder()(input_ids=tokens, use_cache=False)
        stack = [run[e.index, "attention"].lse for e in run.executions]
    assert all(torch.equal(a, b) for a, b in zip(whole, stack, strict=True))
    assert run.executions == executions_of(model.config)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_one_token(name):
    model, tokens = tiny(name), some_tokens(rows=2, length=1)
    with torch.no_grad(), capture(model) as run:
        model(tokens)
    for e in run.executions:
        watched = run[e.index, "attention"]
        mass = watched.mass_on(torch.zeros(2, 1, dtype=torch.long))
        learned = watched.learned_sink
        expected = torch.ones_like(mass) if learned is None else (1 - learned)[..., None]
        assert (mass - expected).abs().max() < EXACT
        assert watched.keys_seen().tolist() == [[1], [1]]
