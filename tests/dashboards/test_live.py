"""Prompts run live: what they show against `patterns_of`, eager attention, and weights of the output projection set to 0."""

import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from smeltscope.dashboards import live as live_module
from smeltscope.dashboards.examples import Example
from smeltscope.dashboards.live import Live, Zeroed, zeroed_heads
from smeltscope.errors import SmeltscopeError
from smeltscope.model import Checkpoint, checkpoint_of, decoder_stack, executions_of, tiny
from smeltscope.model import load_checkpoint as load
from smeltscope.probes.patterns import patterns_of
from smeltscope.tasks import dyck

PROMPT = "Close them.\n\nInput: ( [ { }\nOutput: ] )\n\nInput: < ( [ ]\nOutput:"
SHAPES = {
    "two visits": {},
    "three visits": {"num_visits": 3},
    "one visit": {"num_visits": 1},
    "one head": {"num_attention_heads": 1, "num_key_value_heads": 1},
}


@pytest.fixture(scope="module")
def make(byte_tokenizer: Callable[..., Any]) -> Callable[..., Checkpoint]:
    """A SMELT of random weights with a tokenizer of bytes."""

    def made(shape: str = "two visits", **more: Any) -> Checkpoint:
        model = tiny("smelt", vocab_size=258, **SHAPES[shape], **more)
        return checkpoint_of(model, tokenizer=byte_tokenizer(bos_token="<s>", eos_token="</s>"))

    return made


def run(checkpoint: Checkpoint, *zeroed: Zeroed, text: str = PROMPT) -> Example:
    return Live(lambda _: checkpoint).run_text(0, text, zeroed)[1]


def parsed(checkpoint: Checkpoint, text: str = PROMPT) -> Any:
    return dyck.parse_prompt(
        text,
        checkpoint.tokenizer,
        template=dyck.read_template("bigbench"),
        context=checkpoint.context,
        vocab_size=258,
    )


def same(a: Example, b: Example, atol: float = 1e-6) -> None:
    np.testing.assert_allclose(a.rows, b.rows, atol=atol)
    assert a.probability is not None and b.probability is not None
    np.testing.assert_allclose(a.probability, b.probability, atol=atol)
    assert list(a.predicted) == list(b.predicted)
    for execution in range(len(a.layer)):
        for head in range(a.heads[execution]):
            np.testing.assert_allclose(
                whole(a, execution, head), whole(b, execution, head), atol=atol
            )


def whole(example: Example, execution: int, head: int) -> np.ndarray:
    assert example.pattern is not None
    return example.pattern(execution, head, np.arange(len(example.tokens)))


@pytest.mark.parametrize("shape", SHAPES)
def test_as_it_is_equals_patterns_of(shape: str, make: Callable[..., Checkpoint]) -> None:
    checkpoint = make(shape)
    found = run(checkpoint)
    arrays = {
        n: a.values for n, a in patterns_of(checkpoint, parsed(checkpoint), [0]).arrays.items()
    }
    np.testing.assert_allclose(found.rows, arrays["row"][0], atol=1e-6)
    assert list(found.tokens) == arrays["token"][0].tolist()
    assert list(found.gold) == arrays["gold"][0].tolist()
    assert list(found.predicted) == arrays["predicted"][0].tolist()
    np.testing.assert_array_equal(found.regions, arrays["key_region"][0])
    for i, name in enumerate(("stack_top_opener", "right_demo_answer", "local")):
        np.testing.assert_array_equal(found.marks[name], arrays["marked"][0, :, i])
    for execution, head in np.ndindex(found.rows.shape[:2]):
        expected = arrays["pattern"][0, execution, head]
        np.testing.assert_allclose(whole(found, execution, head), expected, atol=1e-6)


def test_against_eager_attention(make: Callable[..., Checkpoint]) -> None:
    """Weights that transformers' own eager attention gives out, and probabilities of its logits."""
    checkpoint = make()
    found = run(checkpoint)
    model = copy.deepcopy(checkpoint.model)
    model.set_attn_implementation("eager")
    weights = []
    layers = decoder_stack(model)[1]
    for layer in dict.fromkeys(layers):
        layer.self_attn.register_forward_hook(lambda _, __, output: weights.append(output[1]))
    ids = torch.from_numpy(parsed(checkpoint).segment(0)).long()[None]
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0]
    assert len(weights) == len(layers)
    for execution, expected in enumerate(weights):
        for head in range(expected.shape[1]):
            np.testing.assert_allclose(whole(found, execution, head), expected[0, head], atol=1e-5)
    targets = torch.from_numpy(found.targets)
    p = logits[targets - 1].softmax(-1)[torch.arange(len(targets)), ids[0, targets]]
    np.testing.assert_allclose(found.probability, p, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("head", [0, -1])
def test_a_zeroed_head_is_one_without_its_columns(
    shape: str, head: int, make: Callable[..., Checkpoint]
) -> None:
    """At all visits: the columns of the output projection that read the head, set to 0."""
    checkpoint = make(shape)
    layer = decoder_stack(checkpoint.model)[1][2]
    head %= layer.self_attn.q_proj.out_features // layer.self_attn.head_dim
    found = run(checkpoint, Zeroed(layer=2, head=head))
    other = make(shape)
    other.model.load_state_dict(checkpoint.model.state_dict())
    size = layer.self_attn.head_dim
    with torch.no_grad():
        masked = decoder_stack(other.model)[1][2].self_attn.o_proj.weight
        masked[:, head * size : (head + 1) * size] = 0
    same(found, run(other))
    assert np.abs(found.rows[3:] - run(checkpoint).rows[3:]).max() > 1e-4  # it matters


@contextmanager
def zeroed_by_hand(model: Any, off: dict[int, list[int]]) -> Iterator[None]:
    """Hooks on the output projections that count how often each has run."""
    executions, layers = executions_of(model.config), decoder_stack(model)[1]
    runs = Counter[Any]()
    hooks = []
    for layer in dict.fromkeys(layers):
        mine = [e.index for e, other in zip(executions, layers, strict=True) if other is layer]
        size = layer.self_attn.head_dim

        def hook(module: Any, args: Any, mine: list[int] = mine, size: int = size) -> Any:
            execution = mine[runs[module]]
            runs[module] += 1
            read = args[0].clone()
            for head in off.get(execution, ()):
                read[..., head * size : (head + 1) * size] = 0
            return (read,)

        hooks.append(layer.self_attn.o_proj.register_forward_pre_hook(hook))
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


@pytest.mark.parametrize(
    "zeroed",
    [
        [Zeroed(layer=2, visit=2, head=1)],
        [Zeroed(layer=3, visit=1)],
        [Zeroed(visit=2)],  # the whole second visit
        [Zeroed(layer=2, head=0), Zeroed(layer=2, visit=1, head=3), Zeroed(layer=5)],
    ],
)
def test_single_visits_and_whole_ones(
    zeroed: list[Zeroed], make: Callable[..., Checkpoint]
) -> None:
    checkpoint = make()
    executions = executions_of(checkpoint.model.config)
    looped = {e.layer for e in executions if e.visit > 1}
    off = {
        e.index: [
            head
            for head in range(4)
            if any(
                (z.layer == e.layer or (z.layer is None and e.layer in looped))
                and z.visit in (None, e.visit)
                and z.head in (None, head)
                for z in zeroed
            )
        ]
        for e in executions
    }
    found = run(checkpoint, *zeroed)
    with zeroed_by_hand(checkpoint.model, off):
        expected = run(checkpoint)
    same(found, expected)


def test_nothing_stays_changed(make: Callable[..., Checkpoint]) -> None:
    checkpoint = make()
    before = run(checkpoint)
    run(checkpoint, Zeroed(visit=2))
    with pytest.raises(SmeltscopeError, match="has no head 9"):
        run(checkpoint, Zeroed(layer=2, head=9))
    same(before, run(checkpoint), atol=0)


def test_bfloat16(make: Callable[..., Checkpoint]) -> None:
    checkpoint = make()
    checkpoint.model.to(torch.bfloat16)
    found = run(checkpoint, Zeroed(layer=2, head=1))
    assert found.rows.dtype == np.float32
    np.testing.assert_allclose(found.rows.sum(-1), 1, atol=0.01)
    assert found.probability is not None and np.isfinite(found.probability).all()


def test_a_stored_example_runs_again(make: Callable[..., Checkpoint]) -> None:
    """From its text: also one whose brackets close by a map of its own."""
    checkpoint = make()
    sets = dyck.nested_sets(2, 2, 0, pairing="in-context")
    heldout = dyck.make_prompts(
        sets,
        checkpoint.tokenizer,
        shots=[2],
        template=dyck.read_template("dclm"),
        context=checkpoint.context,
        seed=0,
    )
    prompts = heldout.prompts
    assert prompts is not None
    stored = live_module.run_prompt(checkpoint, live_module._prompt_of(heldout), {})
    live = Live(lambda _: checkpoint)
    same(live.run_again(0, stored)[1], stored)
    broken = copy.copy(stored)
    object.__setattr__(broken, "tokens", [*stored.tokens[:-1], "x" * 2])
    with pytest.raises(SmeltscopeError, match="reads this example as other tokens"):
        live.run_again(0, broken)


def test_without_a_start_token(byte_tokenizer: Callable[..., Any]) -> None:
    checkpoint = checkpoint_of(tiny("smelt", vocab_size=258), tokenizer=byte_tokenizer())
    found = run(checkpoint)
    assert found.region_names[found.regions[0]] == "instruction"
    same(Live(lambda _: checkpoint).run_again(0, found)[1], found)


def test_drawn_prompts(make: Callable[..., Checkpoint]) -> None:
    live = Live(lambda _: make())
    text, shots = live.draw(0, 2, 7, 1)
    assert shots == 2
    assert text == live.draw(0, 2, 7, 1)[0] != live.draw(0, 2, 8, 1)[0]
    assert text.count("Input:") == 3 and text.endswith("Output:")
    assert not set("[]{}<>") & set(text)  # one type of bracket
    name, example = live.run_text(0, text)
    assert live.example(name) is example
    assert live.run_text(0, text)[1] is example  # it isn't run twice


@pytest.mark.parametrize("pairs", ["answers", "inputs"])
def test_drawn_prompts_with_pairs_of_their_own(pairs: str, make: Callable[..., Checkpoint]) -> None:
    """The same as `probe dyck --pairing in-context` draws; what is shown answers the query."""
    live = Live(lambda _: make())
    for seed in range(3):
        text, shots = live.draw(0, 3, seed, 4, pairs)
        assert shots == 3
        [drawn] = dyck.generate_sets(1, 3, seed, pairing="in-context", reveal=pairs)
        assert " ".join(drawn.query.input_symbols) in text.splitlines()[-2]
        example = live.run_text(0, text)[1]
        answer = drawn.query.answer_symbols
        assert tuple(g.strip() for g in example.gold) == answer
        for i, mark in enumerate(example.marks["right_demo_answer"]):
            shown = {example.tokens[k].strip() for k in np.flatnonzero(mark)}
            assert shown == ({answer[i]} if pairs == "answers" else shown & {answer[i]})
            regions = {example.region_names[example.regions[k]] for k in np.flatnonzero(mark)}
            assert regions <= {"demo_answer"}
    with pytest.raises(
        SmeltscopeError, match="closes another type"
    ):  # nothing else shows the pairs
        live.run_text(0, live.draw(0, 0, 0, 4, "answers")[0])
    with pytest.raises(SmeltscopeError, match="usual, or revealed by answers, inputs, both"):
        live.draw(0, 3, 0, 4, "in-context")


def test_a_drawn_prompt_has_as_many_shots_as_fit(make: Callable[..., Checkpoint]) -> None:
    live = Live(lambda _: make())
    text, shots = live.draw(0, 60, 0, 4)
    assert 0 < shots < 60 and text.count("Input:") == shots + 1
    assert len(live.run_text(0, text)[1].tokens) <= 512


@pytest.mark.parametrize(
    ("draw", "says"),
    [
        ((-1, 0, 4), "0 to 64 shots"),
        ((65, 0, 4), "0 to 64 shots"),
        ((1, -1, 4), "seed"),
        ((1, 0, 5), "1 to 4 bracket types"),
    ],
)
def test_draws_that_are_refused(
    draw: tuple[int, int, int], says: str, make: Callable[..., Checkpoint]
) -> None:
    with pytest.raises(SmeltscopeError, match=says):
        Live(lambda _: make()).draw(0, *draw)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "does not end in"),
        ("Input: ( [", "does not end in"),
        ("Input: ( )\nOutput:", "No bracket is left open"),
        ("Input: ( ]\nOutput:", "input 1"),
        ("Input: ( (\nOutput: )\n\nInput: (\nOutput:", "does not close input 1"),
        (
            "Input: (\nOutput: !\n\nInput: (\nOutput: #\n\nInput: (\nOutput:",
            "by ! in answer 1 and by #",
        ),
        ("Input: ( !\nOutput:", "input 1"),
        ("Input: ( ! [\nOutput:", "never shows"),
        ("x" * 600 + "\nInput: (\nOutput:", "tokens"),
    ],
)
def test_prompts_that_are_refused(text: str, says: str, make: Callable[..., Checkpoint]) -> None:
    with pytest.raises(SmeltscopeError, match=says):
        run(make(), text=text)


@pytest.mark.parametrize(
    "zeroed", [Zeroed(layer=99), Zeroed(layer=2, visit=3), Zeroed(layer=0, visit=2)]
)
def test_what_does_not_run_is_not_zeroed(zeroed: Zeroed, make: Callable[..., Checkpoint]) -> None:
    with pytest.raises(SmeltscopeError, match="Nothing can be zeroed at layer"):
        zeroed_heads(make(), [zeroed])
    with pytest.raises(SmeltscopeError, match="any looped layer"):
        zeroed_heads(make("one visit"), [Zeroed(visit=2)])


def test_no_tokenizer() -> None:
    with pytest.raises(SmeltscopeError, match="has no tokenizer"):
        run(checkpoint_of(tiny("smelt")))


def test_one_checkpoint_and_few_prompts_in_memory(make: Callable[..., Checkpoint]) -> None:
    loaded = []

    def load_one(number: int) -> Checkpoint:
        loaded.append(number)
        return make()

    live = Live(load_one)
    names = [
        live.run_text(0, f"{i}\nInput: (\nOutput:")[0] for i in range(live_module.MOST_KEPT + 2)
    ]
    assert [live.example(name) is not None for name in names] == [False] * 2 + [True] * 4
    live.run_text(1, PROMPT)
    assert loaded == [0, 1]
    assert live.example(names[-1]) is None  # another checkpoint's


def test_several_at_once(make: Callable[..., Checkpoint]) -> None:
    checkpoint = make()
    live = Live(lambda _: checkpoint)
    asked = [[], [Zeroed(layer=2, head=0)], [Zeroed(visit=1)], [Zeroed(layer=4)]]
    expected = [run(checkpoint, *zeroed) for zeroed in asked]
    found: dict[int, Example] = {}

    def ask(i: int) -> None:
        found[i] = live.run_text(0, PROMPT, asked[i])[1]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, example in enumerate(expected):
        same(found[i], example)


@pytest.mark.parametrize("kind", ["gpt_oss", "inkling2_loop", "gpt2"])
def test_other_models(kind: str, byte_tokenizer: Callable[..., Any]) -> None:
    """Learned sinks, position bias, another name for the projection: maps of one head equal whole rows."""
    size = {} if kind == "inkling2_loop" else {"vocab_size": 258}
    model = tiny(kind, **size)
    checkpoint = checkpoint_of(model, tokenizer=byte_tokenizer())
    before, found = run(checkpoint), run(checkpoint, Zeroed(layer=0))
    for example in (before, found):
        for execution, head in np.ndindex(example.rows.shape[:2]):
            np.testing.assert_allclose(
                whole(example, execution, head)[example.targets - 1],
                example.rows[execution, head],
                atol=1e-6,
            )
    np.testing.assert_array_equal(before.rows[0], found.rows[0])
    assert np.abs(before.rows[1] - found.rows[1]).max() > 1e-5


def test_smelt_tiny() -> None:
    found = run(load("smelt-tiny", device="cpu"))
    assert [text.strip() for text in found.gold] == [")", ">"]
    assert found.rows.shape[:2] == (12, 4)
