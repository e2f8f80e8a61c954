"""Regions, marks and states of prompts against a slow reading of their text, with tokenizers of many kinds."""

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from smeltscope.errors import SmeltscopeError
from smeltscope.tasks import SpecialTokens
from smeltscope.tasks.dyck import (
    CLOSERS,
    USUAL,
    Item,
    ItemSet,
    bayes,
    generate_sets,
    guess,
    nested_sets,
    read_items,
    readable,
    sets_of_items,
)
from smeltscope.tasks.dyck.prompts import join, make_prompts, parse_prompt
from smeltscope.tasks.dyck.segments import MARKS, REGIONS
from smeltscope.tasks.dyck.templates import TEMPLATES, Template

ROOT = Path(__file__).parents[3]
SHARED = ROOT.parent / "shared" / "data"
GPT2 = SHARED / "tokenizers" / "gpt2_tokenizer.json"
BIGBENCH = SHARED / "dyck" / "bigbench_dyck_languages.jsonl"
BIG = TEMPLATES["bigbench"]
ARROWS = Template(name="arrows", shot="{input} => {answer}", instruction="Ünclosed:\n")


def byte_bpe(merges=(), **options):
    """Bytes and these merges; without options nothing splits the text before."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [tuple(part.replace(" ", "Ġ").replace("\n", "Ċ") for part in m) for m in merges]
    words = [*alphabet, *("".join(merge) for merge in merges), "<s>"]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=merges))
    options = {"use_regex": False, **options}
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, **options)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def fast(tokenizer, **special):
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{"bos_token": "<s>", "model_max_length": 64, **special}
    )


def trained(size):
    """Merges as they come, across words, lines and the end of the prompt."""
    sets = generate_sets(40, 3, 5) + generate_sets(10, 2, 6, pairing="in-context")
    texts = [written(s, len(s.demonstrations), BIG) for s in sets]
    tokenizer = byte_bpe()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>"],
        show_progress=False,
        max_token_length=12,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return fast(tokenizer)


def adds_its_own():
    """Start and end tokens and padding to 400 by itself; white space trimmed off offsets."""
    tokenizer = byte_bpe([(":", " "), (")", " "), ("]", "\n"), (" ", "(")])
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(
                single="<s> $A <s>", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
            ),
        ]
    )
    tokenizer.enable_padding(length=400, pad_token="<s>", pad_id=tokenizer.token_to_id("<s>"))
    tokenizer.enable_truncation(30)
    return fast(tokenizer)


KINDS = {
    "bytes": lambda: fast(byte_bpe()),
    "merging": lambda: fast(
        byte_bpe([("]", " "), ("] ", "]"), (")", " "), (") ", ")"), ("]", "\n"), ("}", "\n")])
    ),
    "adds-its-own": adds_its_own,
    "trained-300": lambda: trained(300),
    "trained-450": lambda: trained(450),
    "trained-800": lambda: trained(800),
    "shipped": lambda: PreTrainedTokenizerFast.from_pretrained(
        ROOT / "model" / "checkpoints" / "smelt-tiny"
    ),
    "gpt2": lambda: fast(Tokenizer.from_file(str(GPT2)), bos_token="<|endoftext|>"),
}


@pytest.fixture(scope="module")
def tokenizers():
    return {}


@pytest.fixture(
    params=[
        pytest.param(kind, marks=pytest.mark.shared_data if kind == "gpt2" else ())
        for kind in KINDS
    ]
)
def any_tokenizer(request, tokenizers):
    if request.param == "gpt2" and not GPT2.exists():
        pytest.skip("no shared data")
    if request.param not in tokenizers:
        tokenizers[request.param] = KINDS[request.param]()
    return tokenizers[request.param]


def written(item_set, shots, template):
    """The text of a prompt and its answer, the long way."""
    parts = []
    for item in (*item_set.demonstrations[:shots], item_set.query):
        shot = template.shot.replace("{input}", " ".join(item.input_symbols))
        shot = shot.replace("{answer}", " ".join(item.answer_symbols))
        first = template.repeat or not parts
        parts.append((template.instruction if first else "") + shot)
    return template.join.join(parts)


def read(item_set, shots, template, text):
    """Region and symbol of each character of `text`, by walking through it shot by shot."""
    regions, symbols = ["separator"] * len(text), [None] * len(text)
    before, between = template.literals
    place = 0
    items = [*item_set.demonstrations[:shots], item_set.query]
    for number, item in enumerate(items):
        query = number == len(items) - 1
        if number:
            place += len(template.join)
        if template.repeat or not number:
            words = re.compile(r"\S(.*\S)?", re.DOTALL).search(template.instruction)
            if words:
                for i in range(place + words.start(), place + words.end()):
                    regions[i] = "instruction"
            place += len(template.instruction)
        for literal, shown, name in (
            (before, item.input_symbols, "query_input" if query else "demo_input"),
            (between, item.answer_symbols, "query_answer" if query else "demo_answer"),
        ):
            place += len(literal)
            for i, symbol in enumerate(shown):
                assert text[place + 2 * i] == symbol
                regions[place + 2 * i] = name
                symbols[place + 2 * i] = (number, name.endswith("answer"), i)
            place += 2 * len(shown) - 1
    assert place == len(text)
    return regions, symbols


def characters_of(tokenizer, ids, text):
    """The characters that each token stands for, from the bytes that it decodes to."""
    spelled = [c for c in text for _ in c.encode()]
    index = [i for i, c in enumerate(text) for _ in c.encode()]
    inverse = {c: b for b, c in zip(*bytes_and_letters(), strict=True)}
    spans, done = [], 0
    for token in tokenizer.convert_ids_to_tokens(ids.tolist()):
        word = bytes(inverse[c] for c in token)
        spans.append(index[done : done + len(word)])
        done += len(word)
    assert done == len(spelled)
    return spans


def bytes_and_letters():
    """GPT-2's letters for bytes."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in own]
    return own + others, [*map(chr, own), *(chr(256 + i) for i in range(len(others)))]


def expected(tokenizer, item_set, shots, template, ids):
    """Regions, marks, states, targets and straddling tokens, one token at a time."""
    text = written(item_set, shots, template)
    regions, symbols = read(item_set, shots, template, text)
    items = [*item_set.demonstrations[:shots], item_set.query]
    spans = [[], *characters_of(tokenizer, ids[1:], text)]
    of_token, straddling, borne = ["bos"], 0, [[]]
    for span in spans[1:]:
        inked = [i for i in span if not text[i].isspace()]
        votes = Counter(regions[i] for i in inked)
        best = [name for name, n in votes.items() if n == max(votes.values())]
        last = [regions[i] for i in inked if regions[i] in best]
        of_token.append(last[-1] if last else "separator")
        while span and text[span[0]].isspace():
            span = span[1:]
        straddling += len({regions[i] for i in span}) > 1
        borne.append([symbols[i] for i in inked if symbols[i]])
    place = {symbol: t for t, many in enumerate(borne) for symbol in many}
    query = len(items) - 1
    targets = sorted({t for (n, answer, _), t in place.items() if answer and n == query})
    marks = {name: np.zeros((len(targets), len(ids)), dtype=bool) for name in MARKS}
    for row, target in enumerate(targets):
        marks["local"][row, max(target - 8, 0) : target] = True
        for number, answer, i in borne[target]:
            if number != query or not answer:
                continue
            closer = items[query].answer_symbols[i]
            for (n, of_answer, j), t in place.items():
                if of_answer and n < query and items[n].answer_symbols[j] == closer:
                    marks["right_demo_answer"][row, t] = True
            open_ = stack_after(items[query], len(items[query].prefix))
            marks["stack_top_opener"][row, place[query, False, open_[-1 - i]]] = True
    states = {n: np.full(len(ids), -1) for n in ("depth", "stack_top", "match", "closer")}
    for t, many in enumerate(borne):
        for number, answer, i in many:
            if answer:
                continue
            item = items[number]
            stack = stack_after(item, i + 1)
            states["depth"][t] = len(stack)
            kind = item.prefix[stack[-1]] if stack else -1
            states["stack_top"][t] = kind
            states["match"][t] = place[number, False, stack[-1]] if stack else -1
            states["closer"][t] = CLOSERS.index(item.pairing.closers[kind]) if stack else -1
    return of_token, marks, states, targets, straddling, spans, text


def stack_after(item, symbols):
    stack = []
    for i, symbol in enumerate(item.prefix[:symbols]):
        if symbol >= 0:
            stack.append(i)
        else:
            stack.pop()
    return stack


@pytest.mark.parametrize("pairing", ["usual", "in-context"])
@pytest.mark.parametrize("template", [*TEMPLATES.values(), ARROWS], ids=lambda t: t.name)
def test_regions_marks_states(any_tokenizer, template, pairing):
    sets = generate_sets(5, 3, 11, pairing=pairing, lengths=(3, 12))
    found = make_prompts(
        sets, any_tokenizer, shots=[3, 0, 1], template=template, context=2000, seed=11
    )
    prompts = found.prompts
    assert prompts.region_names == REGIONS
    total = 0
    for i in range(len(found)):
        shots, item_set, ids = (0, 1, 3)[i // 5], sets[i % 5], found.segment(i)
        assert ids[0] == any_tokenizer.bos_token_id
        regions, marks, states, targets, straddling, spans, text = expected(
            any_tokenizer, item_set, shots, template, ids
        )
        assert [REGIONS[r] for r in prompts.regions[i]] == regions
        assert prompts.regions[i].dtype == np.int8
        assert prompts.targets[i].tolist() == targets
        for name in MARKS:
            np.testing.assert_array_equal(prompts.marks[name][i], marks[name], name)
            assert prompts.marks[name][i].dtype == bool
        for name, state in states.items():
            np.testing.assert_array_equal(prompts.states[name][i], state, name)
            assert prompts.states[name][i].dtype == np.int32
        # No token lies both in the prompt and in the answer, which begins with its space.
        answers = prompts.answers[i]
        assert answers.tolist() == list(range(answers[0], len(ids)))
        answer = text[spans[answers[0]][0] :]
        assert answer == " " + " ".join(item_set.query.answer_symbols)
        assert prompts.labels["straddling"][i] == straddling
        total += straddling
        if template is not ARROWS:  # its ü is two tokens
            told = "".join(prompts.vocabulary[t] for t in ids[1:])
            assert told == text
    counted = [note for note in found.notes if note.startswith("Tokens over two regions")]
    assert len(counted) == (total > 0)
    assert all(f": {total:,}, in" in note for note in counted)


def test_a_prompt_by_hand():
    tokenizer = fast(byte_bpe([("]", "\n"), (" ", "]"), (" ]", " ]")]))
    demonstration = Item(name="d", prefix=USUAL.read("[]["), pairing=USUAL)
    query = Item(name="q", prefix=USUAL.read("({}["), pairing=USUAL)
    sets = [ItemSet(query=query, demonstrations=(demonstration,))]
    template = Template(name="t", shot="{input}: {answer}", instruction="Go\n")
    found = make_prompts(sets, tokenizer, shots=[1], template=template, context=99, seed=3)
    prompts = found.prompts
    words = [prompts.vocabulary[t] for t in found.segment(0)]
    table = [
        ("<s>", "bos"),
        ("G", "instruction"),
        ("o", "instruction"),
        ("\n", "separator"),
        ("[", "demo_input"),
        (" ]", "demo_input"),
        (" ", "separator"),
        ("[", "demo_input"),
        (":", "separator"),
        (" ", "separator"),
        ("]\n", "demo_answer"),
        ("(", "query_input"),
        (" ", "separator"),
        ("{", "query_input"),
        (" ", "separator"),
        ("}", "query_input"),
        (" ", "separator"),
        ("[", "query_input"),
        (":", "separator"),
        (" ]", "query_answer"),
        (" ", "separator"),
        (")", "query_answer"),
    ]
    assert list(zip(words, (REGIONS[r] for r in prompts.regions[0]), strict=True)) == table
    assert prompts.answers[0].tolist() == [19, 20, 21]
    assert prompts.targets[0].tolist() == [19, 21]
    where = {
        name: [np.flatnonzero(row).tolist() for row in m[0]] for name, m in prompts.marks.items()
    }
    assert where == {
        "stack_top_opener": [[17], [11]],
        "right_demo_answer": [[10], []],
        "local": [list(range(11, 19)), list(range(13, 21))],
    }
    inputs = [4, 5, 7, 11, 13, 15, 17]
    assert {name: state[0][inputs].tolist() for name, state in prompts.states.items()} == {
        "depth": [1, 0, 1, 1, 2, 1, 2],
        "stack_top": [1, -1, 1, 0, 2, 0, 1],
        "match": [4, -1, 7, 11, 13, 11, 17],
        "closer": [1, -1, 1, 0, 2, 0, 1],
        "shown": [0, -1, 1, 0, 0, 0, 1],
    }
    assert all((np.delete(state[0], inputs) == -1).all() for state in prompts.states.values())
    assert {name: values[0].item() for name, values in prompts.labels.items()} == {
        "kind": "scored",
        "shots": 1,
        "kept_shots": 1,
        "prompt_seed": 3,
        "item": "q",
        "half": 0,
        "symbols": 2,
        "readable": 0,
        "bayes_nothing": 1 / 12,
        "bayes_query": 1 / 6,  # } is known: two of three
        "bayes_inputs": 1 / 2,  # and ]
        "bayes_answers": 1 / 2,
        "most_common": 1,
        "guess": 1 / 16,
        "right_symbols_bayes_nothing": 1 / 4 + 1 / 3,
        "right_symbols_bayes_query": 1 / 3 + 1 / 2,
        "right_symbols_bayes_inputs": 1 + 1 / 2,
        "right_symbols_bayes_answers": 1 + 1 / 2,
        "right_symbols_guess": 1 / 4 + 1 / 4,
        "straddling": 1,
    }
    assert prompts.stop == "\n"
    such, count = found.notes
    assert such.startswith(r"Tokens such as ']\n' lie over two regions: each counts to the one")
    assert count == "Tokens over two regions: 1, in 1 of 1 prompts."


def test_ties_and_majorities_over_regions():
    merges = [(":", "("), ("i", ":"), ("x", "(")]
    demonstration = Item(name="d", prefix=USUAL.read("("), pairing=USUAL)
    sets = [ItemSet(query=demonstration, demonstrations=())]
    found = {}
    for shot in ("k:{input}x {answer}", "ii:{input}y {answer}"):
        tokenizer = fast(byte_bpe([*merges[:1], ("i", "i"), ("ii", ":(")]))
        template = Template(name="t", shot=shot)
        made = make_prompts(sets, tokenizer, shots=[0], template=template, context=99, seed=0)
        for token, region in zip(made.segment(0), made.prompts.regions[0], strict=True):
            found[made.prompts.vocabulary[token]] = REGIONS[region]
    assert found[":("] == "query_input"  # one character each: the later region
    assert found["ii:("] == "separator"  # three to one


@pytest.mark.shared_data
@pytest.mark.skipif(not BIGBENCH.exists(), reason="no shared data")
def test_dclm_joins_contexts_and_continuations(tokenizers):
    rows = [json.loads(line) for line in BIGBENCH.read_text().splitlines()[:40]]
    texts = {row["context"]: row["continuation"] for row in rows}
    items = read_items(BIGBENCH)[:40]
    tokenizer = tokenizers.setdefault("bytes", KINDS["bytes"]())
    sets = sets_of_items(items, 10, 4)
    found = make_prompts(
        sets, tokenizer, shots=[0, 10], template=TEMPLATES["dclm"], context=9999, seed=4
    )
    for i in range(len(found)):
        row, shots = rows[i % 40], (0, 10)[i // 40]
        begin = found.prompts.answers[i][0]
        whole = tokenizer.decode(found.segment(i)[1:])
        assert tokenizer.decode(found.segment(i)[begin:]) == " " + row["continuation"]
        assert whole.endswith(row["context"] + " " + row["continuation"])
        shown = whole.removesuffix(row["context"] + " " + row["continuation"])
        pattern = "|".join(f"{re.escape(c)} {re.escape(a)}\n" for c, a in texts.items())
        assert re.fullmatch(f"({pattern}){{{shots}}}", shown)
        assert row["context"] not in shown


@pytest.mark.shared_data
@pytest.mark.skipif(not BIGBENCH.exists(), reason="no shared data")
def test_dclm_texts_are_those_of_the_file(tokenizers):
    """Instruction and shot are the row's context, a space and its continuation: 1,000 of 1,000 rows."""
    rows = [json.loads(line) for line in BIGBENCH.read_text().splitlines()]
    tokenizer = tokenizers.setdefault("bytes", KINDS["bytes"]())
    sets = sets_of_items(read_items(BIGBENCH), 0, 0)
    dclm = TEMPLATES["dclm"]
    found = make_prompts(sets, tokenizer, shots=[0], template=dclm, context=9999, seed=0)
    texts = [tokenizer.decode(found.segment(i)[1:]) for i in range(len(found))]
    assert texts == [f"{row['context']} {row['continuation']}" for row in rows]
    assert len(texts) == 1000


def test_bigbench_gives_the_instruction_once(tokenizers):
    tokenizer = tokenizers.setdefault("bytes", KINDS["bytes"]())
    [item_set] = generate_sets(1, 2, 0)
    found = make_prompts([item_set], tokenizer, shots=[2], template=BIG, context=999, seed=0)
    lines = tokenizer.decode(found.segment(0)[1:]).split("\n\n")
    assert lines[0].startswith("Complete the rest of the sequence") and len(lines) == 4
    assert all(re.fullmatch(r"Input: [^\n]+\nOutput: [^\n]+", line) for line in lines[1:])


def test_other_normalizers():
    """Llama's: a space is put in front and spaces become letters; a tokenizer of words drops white space."""
    sets = generate_sets(4, 2, 1)
    letters = sorted(set("".join(written(s, 2, BIG) for s in sets)) - {" "})
    words = ["<unk>", "<s>", "▁", *letters, "▁(", "▁]", "▁]▁", "▁]▁]"]
    llama = Tokenizer(
        models.BPE(
            vocab={w: i for i, w in enumerate(words)},
            merges=[("▁", "("), ("▁", "]"), ("▁]", "▁"), ("▁]▁", "]")],
            unk_token="<unk>",
        )
    )
    llama.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    llama.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    plain = Tokenizer(
        models.WordLevel(
            vocab={w: i for i, w in enumerate([*words, "Input", "Output"])}, unk_token="<unk>"
        )
    )
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    for tokenizer in (fast(llama, unk_token="<unk>"), fast(plain, unk_token="<unk>")):
        found = make_prompts(sets, tokenizer, shots=[2], template=BIG, context=2000, seed=1)
        prompts = found.prompts
        if tokenizer.backend_tokenizer.normalizer is not None:
            assert prompts.vocabulary[llama.token_to_id("▁]▁]")] == " ] ]"
        for i, item_set in enumerate(sets):
            ids = found.segment(i)
            for name, items, which in (
                ("demo_input", item_set.demonstrations, "input_symbols"),
                ("demo_answer", item_set.demonstrations, "answer_symbols"),
                ("query_input", [item_set.query], "input_symbols"),
                ("query_answer", [item_set.query], "answer_symbols"),
            ):
                within = prompts.regions[i] == REGIONS.index(name)
                told = "".join(prompts.vocabulary[t] for t in ids[within])
                assert told.replace(" ", "") == "".join(
                    "".join(getattr(item, which)) for item in items
                )


def test_too_long_prompts_lose_their_last_demonstrations(tokenizers):
    tokenizer = tokenizers.setdefault("bytes", KINDS["bytes"]())
    sets = generate_sets(12, 6, 2)
    context = 260
    found = make_prompts(
        sets, tokenizer, shots=[0, 2, 4, 5, 6], template=BIG, context=context, seed=0
    )
    labels = found.prompts.labels
    lengths = {
        (i, k, kept): 1 + len(written(first(item_set, kept), kept, BIG))
        for i, item_set in enumerate(sets)
        for k in (2, 4, 5, 6)
        for kept in range(k + 1)
    }
    left_out = [k for k in (2, 4, 5, 6) if all(lengths[i, k, k] > context for i in range(12))]
    assert left_out and left_out != [2, 4, 5, 6]
    assert found.notes[0] == (
        f"Left out: {', '.join(map(str, left_out))} shots, for no prompt with them fits into 260 tokens."
    )
    lost = 0
    for row, (i, k) in enumerate(
        (i, k) for k in (0, 2, 4, 5, 6) if k not in left_out for i in range(12)
    ):
        kept = max((n for n in range(k + 1) if k and lengths[i, k, n] <= context), default=0)
        lost += k - kept
        assert labels["shots"][row] == k and labels["kept_shots"][row] == kept
        told = tokenizer.decode(found.segment(row)[1:])
        assert told == written(first(sets[i], kept), kept, BIG)
        assert found.prompts.regions[row][0] == 0
        best = bayes(first(sets[i], kept), kept)
        assert labels["bayes_answers"][row] == best["answers"]
    assert lost and found.dropped == {"demonstrations": lost}
    assert found.lengths.max() <= context
    # The only number of shots stays, with as many as fit.
    alone = make_prompts(sets, tokenizer, shots=[6], template=BIG, context=context, seed=0)
    assert (alone.prompts.labels["shots"] == 6).all() and len(alone) == 12
    assert (alone.prompts.labels["kept_shots"] < 6).all() and alone.lengths.max() <= context
    short = [
        k
        for k in np.unique(labels["shots"])
        if (labels["kept_shots"] < k)[labels["shots"] == k].any()
    ]
    assert sum("lost their last demonstrations" in note for note in found.notes) == len(short)


def first(item_set, kept):
    return ItemSet(query=item_set.query, demonstrations=item_set.demonstrations[:kept])


def test_nested_prompts_lose_nothing(tokenizers):
    """Their first demonstration shows the targets' symbols, and all numbers of shots have the same items."""
    tokenizer = tokenizers.setdefault("trained-450", KINDS["trained-450"]())
    sets = nested_sets(12, 8, 0, pairing="in-context", reveal="answers")
    options = {"template": BIG, "seed": 0, "kind": "nested"}
    lengths = {
        k: make_prompts(sets, tokenizer, shots=[k], context=9999, **options).lengths
        for k in (1, 2, 4, 8)
    }
    assert lengths[4].min() < lengths[4].max()
    for context, kept in (
        (9999, [1, 2, 4, 8]),
        (lengths[4].max(), [1, 2, 4]),
        (lengths[4].min(), [1, 2]),
    ):
        found = make_prompts(sets, tokenizer, shots=[1, 2, 4, 8], context=int(context), **options)
        labels = found.prompts.labels
        assert labels["shots"].tolist() == [k for k in kept for _ in sets]
        assert (labels["kept_shots"] == labels["shots"]).all() and not found.dropped
        assert (labels["bayes_answers"] == 1).all()
        left_out = ", ".join(str(k) for k in (1, 2, 4, 8) if k not in kept)
        note = f"Left out: {left_out} shots, for not every nested prompt with them fits into {context} tokens."
        assert (note in found.notes) == bool(left_out)
    with pytest.raises(
        SmeltscopeError, match=r"A nested prompt with 1 shot has .* leave nested prompts out"
    ):
        make_prompts(sets, tokenizer, shots=[1, 2], context=int(lengths[1].max()) - 1, **options)


def test_labels_and_documents(tokenizers):
    tokenizer = tokenizers.setdefault("bytes", KINDS["bytes"]())
    sets = generate_sets(6, 2, 3, pairing="in-context", reveal="answers")
    found = make_prompts(sets, tokenizer, shots=[0, 2], template=BIG, context=999, seed=8)
    labels = found.prompts.labels
    answers = [s.query.answer_symbols for s in sets]
    most = Counter(answers).most_common(1)[0][0]
    for row in range(12):
        k, query = (0, 2)[row // 6], sets[row % 6].query
        assert labels["item"][row] == query.name
        assert labels["half"][row] == row % 2  # of six items: the same for both numbers of shots
        assert labels["readable"][row] == readable(query)
        assert labels["guess"][row] == pytest.approx(guess(query))
        assert labels["most_common"][row] == (query.answer_symbols == most)
        for given, value in bayes(sets[row % 6], k).items():
            assert labels[f"bayes_{given}"][row] == value
        info = found.documents[found.document[row]]
        assert (info.category, info.source) == (f"{k} shots", "bigbench")
        assert info.id == f"{query.name}, {k} shots"
    assert len(found.documents) == 12
    assert all(len(values) == 12 for values in labels.values())
    nested = make_prompts(
        nested_sets(4, 2, 3),
        tokenizer,
        shots=[1, 2],
        template=BIG,
        context=999,
        seed=3,
        kind="nested",
    )
    assert sorted({d.category for d in nested.documents}) == ["nested 1 shots", "nested 2 shots"]
    assert set(nested.prompts.labels["kind"]) == {"nested"}


@pytest.mark.shared_data
@pytest.mark.skipif(not BIGBENCH.exists(), reason="no shared data")
def test_join_keeps_a_query_one_document(tokenizers):
    tokenizer = tokenizers.setdefault("trained-450", KINDS["trained-450"]())
    items = read_items(BIGBENCH)[:12]
    options = {"template": BIG, "context": 600}
    parts = [
        make_prompts(sets_of_items(items, 4, seed), tokenizer, shots=[0, 4], seed=seed, **options)
        for seed in (0, 1)
    ]
    parts.append(
        make_prompts(nested_sets(4, 2, 0), tokenizer, shots=[2], seed=0, kind="nested", **options)
    )
    whole = join(parts)
    assert len(whole) == 52
    assert len(whole.documents) == 28
    assert sorted(Counter(whole.document.tolist()).values()) == [1] * 4 + [2] * 24
    for name in ("item", "prompt_seed", "kind"):
        expected = np.concatenate([part.prompts.labels[name] for part in parts])
        np.testing.assert_array_equal(whole.prompts.labels[name], expected)
    row = 0
    for part in parts:
        for i in range(len(part)):
            assert whole.segment(row).tolist() == part.segment(i).tolist()
            assert whole.categories[row] == part.categories[i]
            assert whole.prompts.regions[row] is part.prompts.regions[i]
            assert whole.prompts.marks["local"][row] is part.prompts.marks["local"][i]
            row += 1
    counted = [note for note in whole.notes if note.startswith("Tokens over two regions")]
    total = whole.prompts.labels["straddling"].sum()
    assert len(counted) == 1 and f": {total:,}, in" in counted[0]
    assert len(set(whole.notes)) == len(whole.notes)
    assert join(parts).digest == whole.digest
    assert len({whole.digest, join(parts[:2]).digest, *(part.digest for part in parts)}) == 5


def test_digest_and_seeds(tokenizers):
    tokenizer = tokenizers.setdefault("bytes", KINDS["bytes"]())
    sets = generate_sets(3, 1, 0)
    options = {"shots": [0, 1], "template": BIG, "context": 400, "seed": 0}
    one = make_prompts(sets, tokenizer, **options)
    assert make_prompts(sets, tokenizer, **options).digest == one.digest
    for change in ({"seed": 1}, {"shots": [1]}, {"template": TEMPLATES["dclm"]}, {"bos": False}):
        assert make_prompts(sets, tokenizer, **{**options, **change}).digest != one.digest


def test_without_start_token(tokenizers):
    tokenizer = tokenizers.setdefault("bytes", KINDS["bytes"]())
    sets = generate_sets(1, 0, 0)
    options = {"shots": [0], "template": BIG, "context": 400, "seed": 0}
    usual = make_prompts(sets, tokenizer, **options)
    found = make_prompts(sets, tokenizer, bos=False, **options)
    assert found.start_token is None and "as asked" in found.notes[0]
    assert found.prompts.regions[0].tolist() == usual.prompts.regions[0][1:].tolist()
    assert (found.prompts.answers[0] + 1).tolist() == usual.prompts.answers[0].tolist()


def test_typed_prompts(tokenizers):
    tokenizer = tokenizers.setdefault("bytes", KINDS["bytes"]())

    def parse(text, template=BIG):
        found = parse_prompt(text, tokenizer, template=template, context=300)
        told = tokenizer.decode(found.segment(0)[1:])
        words = {}
        for token, region in zip(found.segment(0), found.prompts.regions[0], strict=True):
            words[REGIONS[region]] = words.get(REGIONS[region], "") + tokenizer.decode([token])
        return found, told, words

    found, told, words = parse(r"Input: ( [ \nOutput:")
    assert told == "Input: ( [ \nOutput: ] )"
    assert words["query_input"] == "([" and words["query_answer"] == "])"
    assert found.prompts.labels["kind"].tolist() == ["typed"]
    assert found.categories == ["typed 0 shots"]
    assert parse("Input: ( [ \nOutput: ")[0].digest == found.digest

    text = "Close it.\n\nInput: {<\nOutput: > }\n\nInput: [[ ]\nOutput:]\nInput:<(\nOutput:"
    found, told, words = parse(text)
    assert told == text + " ) >"
    assert words["instruction"].replace(" ", "") == "Closeit."
    assert words["demo_input"] == "{<[[]" and words["demo_answer"] == ">}]"
    assert found.prompts.labels["shots"].tolist() == [2]
    opener, right = (found.prompts.marks[m][0] for m in ("stack_top_opener", "right_demo_answer"))
    assert [told[np.flatnonzero(row)[0] - 1] for row in opener] == ["(", "<"]
    assert [[told[i - 1] for i in np.flatnonzero(row)] for row in right] == [[], [">"]]

    # The same as the prompt that it is the text of, up to where the name of the item is a label.
    [item_set] = generate_sets(1, 2, 5)
    for template in (BIG, TEMPLATES["dclm"], ARROWS):
        made = make_prompts(
            [item_set], tokenizer, shots=[2], template=template, context=900, seed=0
        )
        text = written(item_set, 2, template)
        text = text[: len(text) - 2 * len(item_set.query.answer)]
        typed = parse_prompt(text, tokenizer, template=template, context=900)
        for one, other in zip(all_arrays(made), all_arrays(typed), strict=True):
            np.testing.assert_array_equal(one, other)


def test_typed_prompts_with_pairs_of_their_own(tokenizers):
    """Drawn ones read from their text are what they were drawn as: regions, marks, states and chances of guessing."""
    tokenizer = tokenizers.setdefault("bytes", KINDS["bytes"]())
    refused = whole = 0
    for seed, reveal in enumerate(["answers", "inputs", "both"] * 8):
        [item_set] = generate_sets(1, 4, seed, pairing="in-context", reveal=reveal)
        template = (BIG, TEMPLATES["dclm"], ARROWS)[seed % 3]
        options = {"template": template, "context": 900}
        made = make_prompts([item_set], tokenizer, shots=[4], seed=0, **options)
        text = written(item_set, 4, template)
        text = text[: len(text) - 2 * len(item_set.query.answer)]
        needed = {~symbol for symbol in item_set.query.answer}
        words = [item_set.query.prefix, *(i.prefix + i.answer for i in item_set.demonstrations)]
        if not needed <= {~symbol for word in words for symbol in word if symbol < 0}:
            refused += 1
            with pytest.raises(SmeltscopeError, match="which the prompt never shows"):
                parse_prompt(text, tokenizer, **options)
            continue
        typed = parse_prompt(text, tokenizer, **options)
        of_typed, of_made = typed.prompts, made.prompts
        if {symbol for word in words for symbol in word if symbol >= 0} == {0, 1, 2, 3}:
            whole += 1  # of fewer types the others would have other numbers
            for one, other in zip(all_arrays(made), all_arrays(typed), strict=True):
                np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(typed.tokens, made.tokens)
        np.testing.assert_array_equal(of_typed.regions[0], of_made.regions[0])
        for name in ("stack_top_opener", "right_demo_answer", "local"):
            np.testing.assert_array_equal(of_typed.marks[name][0], of_made.marks[name][0])
        for name in ("depth", "match", "closer", "shown"):
            np.testing.assert_array_equal(of_typed.states[name][0], of_made.states[name][0])
        for name in ("guess", "readable", *(f"bayes_{g}" for g in ("nothing", "query", "answers"))):
            assert of_typed.labels[name] == of_made.labels[name]
        told = typed.documents[0].id
        assert all(f"by {symbol}" in told for symbol in item_set.query.answer_symbols)
    assert refused <= 8 and whole > 8  # refused where nothing had to be revealed

    # Usual closers that close other brackets, without spaces; a pair that the query alone shows.
    found = parse_prompt(
        "Input: ([\nOutput: )]\nInput: {!([\nOutput:", tokenizer, template=BIG, context=300
    )
    assert tokenizer.decode(found.segment(0)[1:]).endswith("Output: ) ]")
    assert found.documents[0].id == "prompt, ( by ], [ by ), { by !, typed 1 shots"
    # What the prompt shows is usual: so is the rest.
    found = parse_prompt("Input: ( ) [\nOutput:", tokenizer, template=BIG, context=300)
    assert tokenizer.decode(found.segment(0)[1:]).endswith("Output: ]")
    assert found.documents[0].id == "prompt, typed 0 shots"


def all_arrays(found):
    prompts = found.prompts
    lists = [prompts.regions, prompts.answers, prompts.targets, *prompts.marks.values()]
    return [found.tokens, *(array for many in (*lists, *prompts.states.values()) for array in many)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Input: ( [", 'does not end in "Output:" after an input'),
        ("", 'does not end in "Output:"'),
        ("Input: ( [\nOutput: ]", 'does not end in "Output:"'),
        ("Input: (\nOutput: )\nInput: [", 'does not end in "Output:"'),
        ("Input: ( x\nOutput:", "input 1, '( x': Symbol 2 is 'x', no bracket"),
        ("Input: (\nOutput: x\nInput: (\nOutput:", "answer 1, 'x': Symbol 1 is 'x', no bracket"),
        ("Input: ( ]\nOutput:", "input 1, '( ]': Symbol 2 closes another type of bracket"),
        ("Input: ( ( ]\nOutput:", "input 1, '( ( ]': Symbol 3 closes another type of bracket"),
        ("Input: ) (\nOutput:", "Symbol 1 closes a bracket but none is open"),
        ("Input: ( )\nOutput:", "input 1, '( )': No bracket is left open"),
        ("Input:\nOutput:", "input 1, '': No bracket is left open"),
        (
            "Input: (\nOutput: ]\nInput: [\nOutput:",
            "needs what closes [, which the prompt never shows, and its pairs are not the usual ones: ( is closed by ]",
        ),
        ("Input: ! (\nOutput:", "input 1, '! (': Symbol 1 closes a bracket but none is open"),
        (
            "Input: ( !\nOutput: \nInput: ( (\nOutput: # !\nInput: (\nOutput:",
            "closes ( by ! in input 1 and by # in answer 2: in one prompt a bracket has one closer",
        ),
        ("Input: ( ) ( [ ] ( ]\nOutput:", "closes ( by ) in input 1 and by ] in input 1"),
        (
            "Input: (\nOutput: !\nInput: [ ! (\nOutput:",
            "closes ( by ! in answer 1 and [ too in input 2: each bracket needs a closer of its own",
        ),
        (
            "Input: ( [\nOutput: !\nInput: [\nOutput:",
            "answer 1, '!', does not close input 1: it leaves ( open",
        ),
        (
            "Input: ( (\nOutput: !\nInput: (\nOutput:",
            "answer 1, '!', does not close input 1: write '! !'",
        ),
        (
            "Input: (\nOutput: ! (\nInput: (\nOutput:",
            "answer 1, '! (', does not close input 1: write '!'",
        ),
        ("Input: (\nOutput: ! !\nInput: (\nOutput:", "answer 1, '! !': Symbol 2 closes a bracket"),
        (
            "Input: ( ) (\nOutput: ) )\nInput: (\nOutput:",
            "answer 1, ') )': Symbol 2 closes a bracket",
        ),
        ("Input: (\nOutput:\nInput: [\nOutput:", "answer 1, '', does not close input 1"),
        ("Input: (\nInput: [\nOutput:", "Before input 1 the prompt has a shot that is not whole"),
        ("Input: (\n[\nOutput: ] )\nInput: [\nOutput:", "Before input 1 the prompt has a shot"),
        ("Input: " + "( " * 200 + "\nOutput:", "tokens with its answer but 300 fit"),
    ],
)
def test_broken_typed_prompts(tokenizers, text, words):
    tokenizer = tokenizers.setdefault("bytes", KINDS["bytes"]())
    with pytest.raises(SmeltscopeError) as error:
        parse_prompt(text, tokenizer, template=BIG, context=300)
    assert words in str(error.value)


def word_level(words, **special):
    tokenizer = Tokenizer(
        models.WordLevel(vocab={w: i for i, w in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return fast(tokenizer, **special)


def characters_only(letters):
    """A BPE without an unknown token: it leaves out what it does not know."""
    return fast(Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[])))


@pytest.mark.parametrize(
    ("tokenizer", "words"),
    [
        (lambda: word_level(["<unk>", "<s>", *"([{<)]}"], unk_token="<unk>"), "for >: use a check"),
        (lambda: word_level(["<unk>", "<s>", *"([{<)"]), "no tokens of their own for "),
        (lambda: characters_only("abc )]}>(["), "no tokens of their own for "),
        (lambda: ByT5Tokenizer(), "ByT5Tokenizer is a slow tokenizer"),
        (lambda: SpecialTokens(bos_token_id=0, eos_token_id=1), "the checkpoint holds none"),
    ],
)
def test_tokenizers_that_cannot(tokenizer, words):
    options = {"template": BIG, "context": 400}
    for make in (
        lambda made: make_prompts(generate_sets(2, 0, 0), made, shots=[0], seed=0, **options),
        lambda made: parse_prompt("Input: ( [\nOutput:", made, **options),
    ):
        with pytest.raises(SmeltscopeError) as error:
            make(tokenizer())
        assert words in str(error.value)


def test_bad_input(tokenizers):
    tokenizer = tokenizers.setdefault("bytes", KINDS["bytes"]())
    sets = generate_sets(3, 2, 0)
    closed = Item(name="closed", prefix=USUAL.read("()"), pairing=USUAL)
    for change, words in (
        ({"shots": [0, 3]}, "Numbers of shots 0, 3 are not all from 0 to 2"),
        ({"shots": [-1]}, "not all from 0 to 2"),
        ({"shots": []}, "no prompt to make"),
        ({"sets": []}, "no prompt to make"),
        ({"context": 60, "shots": [0]}, f"The prompt of item {sets[0].query.name}, without demo"),
        ({"context": 60, "shots": [2]}, f"The prompt of item {sets[0].query.name}, without demo"),
        ({"sets": [ItemSet(query=closed, demonstrations=())], "shots": [0]}, "has no targets"),
        ({"vocab_size": 40}, "but the model's vocabulary has 40 entries"),
    ):
        options = {"sets": sets, "shots": [0, 1], "template": BIG, "context": 400, "seed": 0}
        options |= change
        with pytest.raises(SmeltscopeError) as error:
            make_prompts(options.pop("sets"), tokenizer, **options)
        assert words in str(error.value)
