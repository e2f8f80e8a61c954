"""dyck-scores against whole logits, transformers' own generate on every prompt, and averages in plain loops."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from smeltscope.activations import open_run
from smeltscope.errors import SmeltscopeError
from smeltscope.probes import Resampling, RunOptions, run_probes, summarize
from smeltscope.probes.compare import compare
from smeltscope.probes.dyck_scores import (
    GUESSES,
    MORE_TOKENS,
    REFERENCES,
    DyckScores,
    Generation,
)
from smeltscope.probes.prompts import by_item
from smeltscope.tasks import DocumentInfo, HeldOut, Prompts
from smeltscope.tasks.dyck import REGIONS

PROBE = DyckScores()
KNOWN = (*REFERENCES, *(f"right_symbols_{name}" for name in GUESSES))  # labels of every prompt
TEXTS = (")", "]", " ", ") ]", "\n", " )", "} ", " ]", "  ", "]\n", ">")
SMALL = {"num_physical_layers": 3, "loop_start": 1, "loop_stop": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "smelt": ("smelt", SMALL),
    "3 visits": ("smelt", {**SMALL, "num_visits": 3}),
    "1 visit, 1 head": ("baseline", {"num_attention_heads": 1, "num_key_value_heads": 1}),
    "llama": ("llama", {}),
    "gpt_oss": ("gpt_oss", {}),
}


def vocabulary_of(seed: int, texts: Sequence[str] = TEXTS) -> list[str]:
    """A text for each of the 256 ids of a tiny model: many ids write the same, so that a text has many tokenizations."""
    rng = np.random.default_rng(seed)
    return ["<s>", *rng.choice(texts, 255).tolist()]


def made_heldout(
    pairs: Sequence[tuple[np.ndarray, Sequence[int]]],
    vocabulary: Sequence[str],
    **labels: Sequence[Any],
) -> HeldOut:
    """Prompts of token ids with their gold answers; a document is an item with one number of shots."""
    number = len(pairs)
    lengths = [len(prompt) + len(answer) for prompt, answer in pairs]
    answers = [np.arange(len(prompt), n) for (prompt, _), n in zip(pairs, lengths, strict=True)]
    known: dict[str, Any] = {
        "kind": ["scored"] * number,
        "item": [f"item {i}" for i in range(number)],
        **dict.fromkeys(("shots", "prompt_seed", "half", "readable"), [0] * number),
        **{name: [0.5] * number for name in KNOWN},
        **labels,
    }
    known = {name: np.array(values) for name, values in known.items()}
    names = [(str(i), f"{k} shots") for i, k in zip(known["item"], known["shots"], strict=True)]
    places = {name: place for place, name in enumerate(dict.fromkeys(names))}
    bears = [
        np.array([p for p, t in zip(at, answer, strict=True) if set(vocabulary[t]) & set(")]}>")])
        for at, (_, answer) in zip(answers, pairs, strict=True)
    ]
    prompts = Prompts(
        region_names=REGIONS,
        regions=[np.zeros(n, dtype=np.int8) for n in lengths],
        answers=answers,
        targets=[at.astype(np.int64) for at in bears],
        marks={},
        states={},
        labels=known,
        vocabulary=list(vocabulary),
        stop="\n",
    )
    tokens = [np.concatenate([prompt, np.array(answer, int)]) for prompt, answer in pairs]
    return HeldOut(
        tokens=np.concatenate(tokens).astype(np.int32),
        offsets=np.cumsum([0, *lengths]).astype(np.int64),
        document=np.array([places[name] for name in names], dtype=np.int32),
        documents=[
            DocumentInfo(id=f"{item}, {category}", category=category, source="made", file="made")
            for item, category in places
        ],
        start_token=0,
        dropped={},
        notes=[],
        digest=f"{[t.tolist() for t in tokens]} {labels}",
        prompts=prompts,
    )


@pytest.fixture
def run_of(tmp_path):
    def run(checkpoint, heldout, probe=PROBE, batch_tokens=200):
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}.h5"
        options = RunOptions(max_length=int(heldout.lengths.max()), batch_tokens=batch_tokens)
        return open_run(run_probes(checkpoint, heldout, [probe], out, options))

    return run


def by_segment(run, heldout: HeldOut) -> dict[str, np.ndarray]:
    """The arrays of a run in the order of the held-out set: of the prompt tokens, which differ in every test."""
    order = np.argsort(-heldout.lengths, kind="stable")
    back = np.argsort(order)
    return {str(n): a.values[back] for n, a in run["dyck_scores"].dataset.data_vars.items()}


def generated(model, prompt: np.ndarray, most: int) -> list[int]:
    """transformers' greedy generation: the new tokens."""
    ids = torch.from_numpy(prompt).long()[None]
    with torch.no_grad():
        done = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=most,
            pad_token_id=255,
        )
    return done[0, len(prompt) :].tolist()


def text_of(tokens: Sequence[int], vocabulary: Sequence[str], end: int | None = None) -> str:
    """What generation says, up to an end token and a line break."""
    said = list(tokens)
    if end in said:
        said = said[: said.index(end)]
    return "".join(vocabulary[t] for t in said).split("\n")[0].strip()


def tokenized(text: str, vocabulary: Sequence[str], rng: np.random.Generator) -> list[int]:
    """A tokenization of a text, drawn at random."""
    tokens: list[int] = []
    while text:
        fitting = [t for t, w in enumerate(vocabulary) if text.startswith(w) and w.strip("\n")]
        if not fitting:
            return tokens
        tokens.append(int(rng.choice(fitting)))
        text = text[len(vocabulary[tokens[-1]]) :]
    return tokens


def hard_pairs(
    model, vocabulary: Sequence[str], number: int, *, seed: int, end: int | None = None
) -> list[tuple[np.ndarray, list[int]]]:
    """Prompts with answers that the model gives, token by token or in other tokens, and answers that it does not give."""
    rng = np.random.default_rng([seed, 1])
    pairs = []
    for i in range(number):
        prompt = np.concatenate([[0], rng.integers(1, 256, rng.integers(1, 20))])
        own = generated(model, prompt, 5)
        text = text_of(own, vocabulary, end)
        own = own[: rng.integers(1, 4)]
        if i % 4 == 0 and "\n" not in text_of(own, vocabulary, end) and end not in own:
            answer = own
        elif i % 4 == 1:
            answer = [*own[:1], int(rng.integers(1, 256))]
        elif i % 4 == 2:
            answer = tokenized(" " + text, vocabulary, rng)
        else:
            answer = tokenized(text, vocabulary, rng)
        if any("\n" in vocabulary[t] for t in answer) or end in answer or not answer:
            answer = [next(t for t, w in enumerate(vocabulary) if w == ")" and t != end)]
        pairs.append((prompt, answer))
    return pairs


@pytest.mark.parametrize("variant", MODELS)
def test_teacher_forcing_like_whole_logits(run_of, make_checkpoint, variant):
    name, overrides = MODELS[variant]
    checkpoint, vocabulary = make_checkpoint(name, **overrides), vocabulary_of(0)
    heldout = made_heldout(hard_pairs(checkpoint.model, vocabulary, 16, seed=0), vocabulary)
    found = by_segment(run_of(checkpoint, heldout), heldout)
    assert heldout.prompts is not None
    for i, answer in enumerate(heldout.prompts.answers):
        ids = torch.from_numpy(heldout.segment(i)).long()[None]
        with torch.no_grad():
            logits = checkpoint.model(ids, use_cache=False).logits[0].double()
        loss, right = 0.0, []
        for position in answer:
            row = logits[position - 1]
            loss -= float(row[ids[0, position]] - row.logsumexp(0))
            right.append(int(row.argmax()) == int(ids[0, position]))
        targets = heldout.prompts.targets[i]
        assert found["answer_tokens"][i] == len(answer)
        assert found["right_tokens"][i] == sum(right)
        assert found["all_right"][i] == all(right)
        assert found["symbols"][i] == len(targets)
        assert found["right_symbols"][i] == sum(right[t - answer[0]] for t in targets)
        np.testing.assert_allclose(found["loss_sum"][i], loss, rtol=1e-4)
    assert 0 < found["all_right"].sum() < len(heldout)


@pytest.mark.parametrize(("variant", "end"), [("smelt", None), ("3 visits", 7), ("gpt2", None)])
def test_exact_like_generation_of_every_prompt(run_of, make_checkpoint, variant, end):
    """Few texts for many ids: a wrong token often writes the right text, and white space goes on and on."""
    name, overrides = MODELS.get(variant, (variant, {}))
    right_in_other_tokens = wrong_after_right_tokens = undecided = 0
    for seed in range(2):
        # Without ties of weights a random model does not say one token for ever.
        untied = {"tie_word_embeddings": False} if name == "smelt" else {}
        checkpoint = make_checkpoint(name, seed=seed, **untied, **overrides)
        model, vocabulary = checkpoint.model, vocabulary_of(seed)
        model.generation_config.eos_token_id = end
        pairs = hard_pairs(model, vocabulary, 14, seed=seed, end=end)
        heldout = made_heldout(pairs, vocabulary)
        found = by_segment(run_of(checkpoint, heldout), heldout)
        for i, (prompt, answer) in enumerate(pairs):
            said = generated(model, prompt, len(answer) + MORE_TOKENS)
            gold = "".join(vocabulary[t] for t in answer).strip()
            expected = text_of(said, vocabulary, end) == gold
            assert found["exact"][i] == expected, (seed, i)
            right_in_other_tokens += expected and not found["all_right"][i]
            wrong_after_right_tokens += bool(found["all_right"][i]) and not expected
            undecided += expected and len(said) > len(answer) + 1
    assert right_in_other_tokens > 0
    assert wrong_after_right_tokens > 0
    assert undecided > 0


def test_generation_ends_with_the_context(run_of, make_checkpoint):
    """GPT-2 has no position beyond its context: 8 more tokens would not fit."""
    checkpoint, vocabulary = make_checkpoint("gpt2", n_positions=20), ["<s>", *[" "] * 254, ")"]
    rng = np.random.default_rng(0)
    pairs = [
        (np.concatenate([[0], rng.integers(1, 255, n)]), tokenized("  )", vocabulary, rng))
        for n in (16, 14, 9, 3)
    ]
    found = by_segment(run_of(checkpoint, heldout := made_heldout(pairs, vocabulary)), heldout)[
        "exact"
    ]
    for i, (prompt, answer) in enumerate(pairs):
        said = generated(checkpoint.model, prompt, min(len(answer) + 8, 20 - len(prompt) + 1))
        assert found[i] == (text_of(said, vocabulary) == ")")


def verdicts(said: Sequence[str], answer: str, most: int = 10) -> list[bool | None]:
    """After each token of what is said, until it is decided; `END` is an end token."""
    vocabulary = list(dict.fromkeys([*said, "END"]))
    generation = Generation(
        prompt=[],
        answer=answer,
        most_tokens=most,
        vocabulary=vocabulary,
        stop="\n",
        end_tokens=[vocabulary.index("END")],
    )
    ids = [vocabulary.index(word) for word in said]
    return [generation.verdict(ids[: i + 1]) for i in range(len(ids))]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([" )", " ]", "\n"], [None, None, True]),
        ([" ", ")", " ]\n"], [None, None, True]),  # the stop inside a token
        ([" )", " ]", " }"], [None, None, False]),
        ([" )", "]"], [None, False]),  # white space inside counts
        ([" )", "\n"], [None, False]),
        ([" ) ]", " ", "END"], [None, None, True]),
        ([" ) ]", " ", " ", " "], [None, None, None, True]),  # four tokens at most
        (["\n", ") ]"], [False, False]),
        (["END"], [False]),
        ([".", ") ]"], [False, False]),  # punctuation is not stripped
    ],
)
def test_verdicts_by_hand(said, expected):
    assert verdicts(said, ") ]", most=4) == expected


def test_ids_beyond_the_vocabulary_are_wrong():
    generation = Generation(
        prompt=[], answer=")", most_tokens=9, vocabulary=[")"], stop="\n", end_tokens=[None]
    )
    assert generation.verdict([0]) is None
    assert generation.verdict([0, 3]) is False


def test_prompts_do_not_depend_on_their_neighbours(run_of, make_checkpoint):
    checkpoint, vocabulary = make_checkpoint("smelt", **SMALL), vocabulary_of(2)
    heldout = made_heldout(hard_pairs(checkpoint.model, vocabulary, 10, seed=5), vocabulary)
    apart, together = (
        by_segment(run_of(checkpoint, heldout, batch_tokens=n), heldout) for n in (26, 4000)
    )
    for name, values in together.items():
        np.testing.assert_allclose(apart[name], values, rtol=1e-4, err_msg=name)


def test_no_answer_has_no_score(run_of, make_checkpoint):
    pairs = [(np.arange(5), []), (np.arange(4), [9, 8])]
    vocabulary = ["<s>", *[")"] * 255]
    run = run_of(make_checkpoint("smelt", **SMALL), made_heldout(pairs, vocabulary))
    assert np.isnan(run["dyck_scores"]["all_right"].values).tolist() == [False, True]
    assert np.isnan(run["dyck_scores"]["exact"].values).sum() == 1
    assert np.isfinite(summarize(run, PROBE, draws=0)["all_right"]).all()


def test_bfloat16_is_near_float32(run_of, make_checkpoint):
    """With all experts in use: another choice of two of eight, near ties, would move a loss by 2 %."""
    vocabulary, size = vocabulary_of(1), {**SMALL, "num_experts_per_tok": 8}
    pairs = hard_pairs(make_checkpoint("smelt", **size).model, vocabulary, 12, seed=3)
    heldout = made_heldout(pairs, vocabulary)
    full, half = (
        by_segment(run_of(make_checkpoint("smelt", dtype=dtype, **size), heldout), heldout)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert half["loss_sum"].dtype == np.float32
    np.testing.assert_allclose(full["loss_sum"], half["loss_sum"], rtol=0.01)


# Averages


def labelled(number: int, seed: int = 0) -> tuple[list, dict[str, Any]]:
    """Items with 0, 1 and 4 shots and three seeds each, and nested ones; some of them answered right by the model."""
    rng = np.random.default_rng(seed)
    rows = [("scored", i, k, s) for i in range(number) for k in (0, 1, 4) for s in (0, 1, 2)]
    rows += [("nested", i, k, 0) for i in range(4) for k in (1, 4, 8)]
    pairs = [(np.concatenate([[0], rng.integers(1, 256, 6 + row[2])]), [0, 0]) for row in rows]
    labels: dict[str, Any] = {
        "kind": [row[0] for row in rows],
        "item": [f"{row[0]} {row[1]}" for row in rows],
        "shots": [row[2] for row in rows],
        "prompt_seed": [row[3] for row in rows],
        "half": [row[1] % 2 if row[0] == "nested" else 0 for row in rows],
        "readable": [row[1] % 3 == 0 for row in rows],
        **{name: rng.random(len(rows)) for name in KNOWN},
    }
    labels["readable"] = [int(value) for value in labels["readable"]]
    return pairs, labels


@pytest.fixture(scope="module")
def labelled_run(tmp_path_factory, make_checkpoint):
    checkpoint = make_checkpoint("smelt", **SMALL)
    pairs, labels = labelled(6)
    rng = np.random.default_rng(1)
    answered = []
    for prompt, _ in pairs:
        own = generated(checkpoint.model, prompt, 3)
        answered.append(
            (prompt, own[:2] if rng.random() < 0.5 else [own[0], int(rng.integers(1, 256))])
        )
    # Half of the ids break the line, so that some answers end where they should.
    heldout = made_heldout(answered, vocabulary_of(3, (")", "]", "\n")), **labels)
    out = tmp_path_factory.mktemp("dyck") / "run.h5"
    options = RunOptions(max_length=40, batch_tokens=200)
    return open_run(run_probes(checkpoint, heldout, [PROBE], out, options)), heldout


def test_summary_like_slow_averages(labelled_run):
    run, heldout = labelled_run
    summary = summarize(run, PROBE, draws=50)
    assert summary["shots"].values.tolist() == [0, 1, 4, 8]
    assert summary["prompt_seed"].values.tolist() == [0, 1, 2]
    data, labels = by_segment(run, heldout), heldout.prompts.labels
    scored, nested = labels["kind"] == "scored", labels["kind"] == "nested"
    assert 0 < data["all_right"].mean() < 1 and 0 < data["exact"].mean() < 1
    for i, shots in enumerate([0, 1, 4, 8]):
        at = scored & (labels["shots"] == shots)
        for name in ("all_right", "exact"):
            values = data[name]
            if shots == 8:  # nested prompts alone
                assert np.isnan(summary[name][i]) and np.isnan(summary[f"{name}_sd"][i])
                continue
            by_seed = []
            for s in range(3):
                by_seed.append(values[at & (labels["prompt_seed"] == s)].mean())
                np.testing.assert_allclose(summary[f"{name}_by_seed"][i, s], by_seed[-1])
            np.testing.assert_allclose(summary[f"{name}_sd"][i], np.std(by_seed, ddof=1))
            for r in range(2):
                part = at & (labels["readable"] == r)
                np.testing.assert_allclose(
                    summary[f"{name}_by_readable"][i, r], values[part].mean()
                )
            np.testing.assert_allclose(summary[name][i], values[at].mean())
            low, high = summary[f"{name}_low"][i], summary[f"{name}_high"][i]
            assert low <= summary[name][i] <= high
        inside = nested & (labels["shots"] == shots)
        for name, part in (("", at), ("nested_", inside)):
            if not part.any():
                assert np.isnan(summary[f"{name}token_loss"][i])
                continue
            loss, tokens = data["loss_sum"][part].sum(), data["answer_tokens"][part].sum()
            np.testing.assert_allclose(summary[f"{name}token_loss"][i], loss / tokens, rtol=1e-6)
            np.testing.assert_allclose(
                summary[f"{name}answer_loss"][i], loss / part.sum(), rtol=1e-6
            )
        assert summary["prompts"][i] == at.sum()
        if at.any():
            assert summary["items"][i] == 6
            assert summary["items_by_readable"][i].values.tolist() == [4, 2]
            accuracy = data["right_symbols"][at].sum() / data["symbols"][at].sum()
            np.testing.assert_allclose(summary["symbol_accuracy"][i], accuracy)
            for name in REFERENCES:
                np.testing.assert_allclose(summary[name][i], labels[name][at].mean(), rtol=1e-6)
                for r in range(2) if name != "kept_shots" else ():
                    part = labels[name][at & (labels["readable"] == r)].mean()
                    np.testing.assert_allclose(summary[f"{name}_by_readable"][i, r], part)
            symbols = data["symbols"][at].sum()
            for name in GUESSES:
                right = labels[f"right_symbols_{name}"][at].sum() / symbols
                np.testing.assert_allclose(summary[f"symbol_accuracy_{name}"][i], right)
        for name in GUESSES:
            for kind, part in (("", at), ("nested_", inside)):
                if part.any():
                    nats = sum(-math.log(chance) for chance in labels[name][part])
                    tokens = data["answer_tokens"][part].sum()
                    loss = (summary[f"{kind}{of}_loss_{name}"][i] for of in ("token", "answer"))
                    np.testing.assert_allclose(
                        list(map(float, loss)), [nats / tokens, nats / part.sum()]
                    )


def test_items_are_drawn_whole_and_within_their_kind(labelled_run):
    run, _ = labelled_run
    resampling = Resampling.of_run(run, draws=40)
    items = by_item(run, resampling)
    assert len(items.documents) == 10 and items.weights.shape == (40, 10)
    assert len(resampling.documents) == 30
    segments = run["segments"].dataset
    for kind, number in (("scored", 6), ("nested", 4)):
        members = np.unique(items.documents.of_segment[segments["label_kind"].values == kind])
        assert len(members) == number
        assert (items.weights[:, members].sum(1) == number).all()
    names = segments["label_item"].values
    for name in np.unique(names):
        assert len(np.unique(items.documents.of_segment[names == name])) == 1


def test_a_run_of_an_older_version_is_told(labelled_run):
    old = labelled_run[0].copy(deep=True)
    old["segments"] = old["segments"].dataset.drop_vars("label_right_symbols_guess")
    with pytest.raises(SmeltscopeError, match="older smeltscope made this run"):
        summarize(old, PROBE, draws=5)


def test_one_item_has_no_interval(run_of, make_checkpoint):
    pairs = [(np.array([0, 5, 6]), [7]), (np.array([0, 5]), [7])]
    heldout = made_heldout(pairs, vocabulary_of(0), item=["one", "one"], shots=[0, 1])
    summary = summarize(run_of(make_checkpoint("smelt", **SMALL), heldout), PROBE)
    assert np.isfinite(summary["all_right"]).all() and np.isnan(summary["all_right_low"]).all()
    assert np.isnan(summary["all_right_sd"]).all()  # one seed
    assert "over 1 item:" in PROBE.sentence(summary)


def test_against_another_checkpoint(labelled_run, run_of, make_checkpoint):
    run, heldout = labelled_run
    other = run_of(make_checkpoint("smelt", seed=3, **SMALL), heldout)
    both = compare(run, other, PROBE, PROBE, draws=30)
    difference = summarize(other, PROBE, draws=0)["exact"] - summarize(run, PROBE, draws=0)["exact"]
    np.testing.assert_allclose(both["exact"], difference)
    assert (both["bayes_query"].dropna("shots") == 0).all()
    assert (both["exact_low"] <= both["exact_high"]).sum() == 3


def test_sentences_and_progress(labelled_run, run_of, make_checkpoint, make_heldout):
    run, _ = labelled_run
    text = PROBE.sentence(summarize(run, PROBE, draws=30))
    assert "over 6 items" in text and "by generation 0: " in text and ", 4: " in text
    assert "length known and type guessed" in text and "at 4 shots: " in text
    arrays = {name: array.values for name, array in run["dyck_scores"].data_vars.items()}
    shape = type("Shape", (), {"shots": [0]})
    assert PROBE.progress(arrays, shape)["exact"] == (np.nansum(arrays["exact"]), 66)

    run = run_of(make_checkpoint("smelt", **SMALL), make_heldout([9, 5]))
    assert len(run["dyck_scores"].data_vars) == 0
    assert (
        PROBE.sentence(summarize(run, PROBE))
        == "The run is over text: there is no prompt to answer."
    )
