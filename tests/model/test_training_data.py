"""What training reads: the rows that a recipe makes, and the tokenizer that is learned from the text."""

import json
import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from smeltscope.commands import prepare as preparing
from smeltscope.commands.prepare import prepare
from smeltscope.errors import SmeltscopeError
from smeltscope.model.recipe import Recipe, load_recipe
from smeltscope.model.rows import ARRAYS, Rows, load_rows
from smeltscope.model.tokenizer import BRACKETS, SPACED, train_tokenizer
from smeltscope.tasks.dyck.pairing import CLOSERS, OPENERS

RECIPE = """
seed = 3
[model]
num_physical_layers = 2
hidden_size = 16
num_attention_heads = 1
num_key_value_heads = 1
num_experts = 4
num_experts_per_tok = 2
moe_intermediate_size = 16
max_position_embeddings = 128
[tokenizer]
vocab_size = 300
[data]
train = ["a.train.jsonl", "b.train.jsonl"]
heldout = ["a.heldout.jsonl", "b.heldout.jsonl"]
context = 96
packed = true
heldout_tokens = 1920
[training]
output = "run"
steps = 20
batch_tokens = 384
learning_rate = 1e-2
warmup_steps = 2
"""
MIXTURE = """
[[mixture]]
source = "text"
weight = 4
[[mixture]]
source = "backcopy"
weight = 3
lengths = [4, 20]
loss = "copies"
[[mixture]]
source = "dyck"
weight = 2
template = "short.toml"
lengths = [2, 8]
shots = [0, 1, 2, 3, 20]
loss = "answers"
[[mixture]]
source = "dyck"
name = "usual"
weight = 1
pairing = "usual"
template = "short.toml"
shots = [1]
lengths = [2, 8]
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of a few words, and a template."""
    folder = tmp_path_factory.mktemp("text")
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdeé", k=rng.randint(2, 5))) for _ in range(40)]
    for name in ("a.train", "b.train", "a.heldout", "b.heldout"):
        lines = [
            json.dumps({"text": " ".join(rng.choices(words, k=rng.randint(1, 90)))})
            for _ in range(30)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    (folder / "short.toml").write_text('shot = "I {input}\\nO {answer}"')
    return folder


@pytest.fixture(scope="module", autouse=True)
def few_at_a_time() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparing, "CHUNK", 24)
        patch.setattr(preparing, "LOT", 2000)
        yield


def recipe_of(data: Path, text: str) -> Recipe:
    (data / "recipe.toml").write_text(text)
    return load_recipe(data / "recipe.toml")


def prepared(data: Path, output: Path, text: str) -> tuple[Rows, Rows]:
    output.mkdir()
    prepare(recipe_of(data, text), output, quiet=True)
    return load_rows(output / "rows.npz", "train"), load_rows(output / "rows.npz", "heldout")


@pytest.fixture(scope="module")
def mixed(data: Path) -> tuple[Rows, Rows]:
    return prepared(data, data / "mixed", RECIPE + MIXTURE)


@pytest.fixture(scope="module")
def learned(data: Path, mixed: tuple[Rows, Rows]) -> Any:
    return AutoTokenizer.from_pretrained(data / "mixed" / "tokenizer")


def segments_of(rows: Rows, category: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """(tokens, predicted) of every segment of a category."""
    found = []
    for i in np.flatnonzero(rows.category == rows.categories.index(category)):
        inside = slice(0, rows.lengths[i])
        cuts = np.flatnonzero(rows.positions[i, inside] == 0)[1:]
        found += zip(
            np.split(rows.tokens[i, inside], cuts),
            np.split(rows.predicted[i, inside], cuts),
            strict=True,
        )
    return found


# ---------------------------------------------------------------- mixtures


def test_sources_have_their_shares(mixed: tuple[Rows, Rows]) -> None:
    rows, heldout = mixed
    assert rows.categories == heldout.categories == ("a", "b", "backcopy", "dyck", "usual")
    assert np.bincount(rows.category).tolist() == [16, 16, 24, 16, 8]  # of 80
    assert np.bincount(heldout.category).tolist() == [4, 4, 6, 4, 2]  # of 20
    full = {c: rows.lengths[rows.category == i].mean() / 96 for i, c in enumerate(rows.categories)}
    assert full["a"] > 0.9 and full["backcopy"] == 1 and full["dyck"] > 0.8


PARTS = """
[[mixture]]
source = "text"
categories = ["b", "c"]
weight = 0.6
[[mixture]]
source = "text"
categories = ["a"]
weight = 0.4
"""


def test_categories_of_the_text_have_weights_of_their_own(
    mixed: tuple[Rows, Rows], data: Path, tmp_path: Path
) -> None:
    for split in ("train", "heldout"):
        text = (data / f"b.{split}.jsonl").read_text()
        (data / f"c.{split}.jsonl").write_text(text.replace("a", "x"))
        (data / f"d.{split}.jsonl").write_text('{"text": "no source names these"}')
    more = RECIPE
    for name in ("train", "heldout"):
        files = ", ".join(f'"{c}.{name}.jsonl"' for c in "abcd")
        more = more.replace(f'["a.{name}.jsonl", "b.{name}.jsonl"]', f"[{files}]")
    more = more.replace("vocab_size = 300", f'path = "{data / "mixed" / "tokenizer"}"')
    rows, heldout = prepared(data, tmp_path / "parts", more + PARTS)
    assert rows.categories == heldout.categories == ("b", "c", "a")
    assert np.bincount(rows.category).tolist() == [24, 24, 32]  # of 80
    assert np.bincount(heldout.category).tolist() == [6, 6, 8]  # of 20
    # The rows of a category are those of a recipe that gives all categories their turns.
    for ours, theirs in zip((rows, heldout), mixed, strict=True):
        for name in "ab":
            tokens = [r.tokens[r.category == r.categories.index(name)] for r in (ours, theirs)]
            shorter = min(map(len, tokens))
            assert (tokens[0][:shorter] == tokens[1][:shorter]).all() and shorter >= 4
    # Named all at once they are what they are unnamed.
    for text, name in ((more + MIXTURE, "unnamed"), (named_all(more + MIXTURE), "named")):
        prepared(data, tmp_path / name, text)
    files = [tmp_path / name / "rows.npz" for name in ("unnamed", "named")]
    assert all(same(*(load_rows(file, split) for file in files)) for split in ("train", "heldout"))


def named_all(text: str) -> str:
    return text.replace('"text"\n', '"text"\ncategories = ["d", "c", "b", "a"]\n', 1)


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ('categories = ["a"]', "", "several sources text: each must name"),
        ('categories = ["a"]', 'categories = ["b"]', "names the category 'b' of the text twice"),
        ('categories = ["a"]', 'categories = "a"', "expected a list of names"),
        ('categories = ["a"]', "categories = [1]", "expected a list of names"),
        ('categories = ["a"]', 'categories = ["e"]', "'e', which .data. train lacks: it has a, b"),
        ("weight = 0.4", "weight = nan", r"mixture.. 2 weight is nan: it must be a finite number"),
    ],
)
def test_wrong_categories(data: Path, tmp_path: Path, old: str, new: str, match: str) -> None:
    text = RECIPE + PARTS.replace(', "c"', "")
    assert old in text
    with pytest.raises(SmeltscopeError, match=match):
        prepared(data, tmp_path / "out", text.replace(old, new, 1))


def test_wrong_texts_are_told_before_anything_is_tokenized(
    mixed: tuple[Rows, Rows], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "_lots", lambda *_: pytest.fail("tokenized"))
    monkeypatch.setattr(preparing, "_tokenizer", lambda *_: pytest.fail("learned"))
    (data / "usual.heldout.jsonl").write_text('{"text": "some"}')
    (data / "empty.jsonl").write_text('{"text": ""}\n{"text": ""}')
    (data / "cut.jsonl").write_text('{"text": "some"}\n{"text": "cut sho')
    text = RECIPE.replace("vocab_size = 300", f'path = "{data / "mixed" / "tokenizer"}"') + MIXTURE
    for number, (old, new, match) in enumerate(
        [
            ("b.heldout", "usual.heldout", r"usual has the name of a category of \[data\] heldout"),
            ("b.heldout", "cut", "cut.jsonl, line 2 is broken JSON"),
            ("b.heldout", "empty", r"\[data\] heldout: all documents of the category 'empty' are"),
            (
                "b.train",
                "empty",
                r"\[data\] train: all documents of the category 'empty' are empty",
            ),
        ]
    ):
        with pytest.raises(SmeltscopeError, match=match):
            prepared(data, tmp_path / str(number), text.replace(old, new))


def test_text_may_be_of_a_category_named_text(data: Path, tmp_path: Path) -> None:
    (data / "text.jsonl").write_text((data / "a.train.jsonl").read_text())
    rows, _ = prepared(data, tmp_path / "text", RECIPE.replace("a.train", "text"))
    assert rows.categories == ("text", "b")


def test_copies_are_of_the_text(mixed: tuple[Rows, Rows], data: Path, learned: Any) -> None:
    for rows, split in zip(mixed, ("train", "heldout"), strict=True):
        texts = [
            json.loads(line)["text"]
            for name in "ab"
            for line in (data / f"{name}.{split}.jsonl").read_text().splitlines()
        ]
        corpus = [tuple(learned(text)["input_ids"]) for text in texts]
        for tokens, predicted in segments_of(rows, "backcopy"):
            assert len(tokens) == 96
            body = tokens.tolist()[1:]
            first = next(n for n in range(4, 21) if body[:n] == body[n : 2 * n])
            assert any(
                tuple(body[:first]) == ids[i : i + first]
                for ids in corpus
                for i in range(len(ids) - first + 1)
            )
            assert not predicted[: first + 2].any() and predicted[first + 2 : 2 * first + 1].all()


def solve(symbols: list[str], pairs: dict[str, str]) -> list[str | None]:
    """What closes the open brackets, by a plain stack; `pairs` learns the pairs that are shown."""
    stack: list[str] = []
    for symbol in symbols:
        if symbol in "([{<":
            stack.append(symbol)
        else:
            assert pairs.setdefault(stack.pop(), symbol) == symbol
    return [pairs.get(opener) for opener in reversed(stack)]


@pytest.mark.parametrize("category", ["dyck", "usual"])
def test_prompts_are_right(mixed: tuple[Rows, Rows], learned: Any, category: str) -> None:
    shots, revealed, maps = [], [], [set(), set()]
    for rows, seen in zip(mixed, maps, strict=True):
        for tokens, predicted in segments_of(rows, category):
            assert tokens[0] == learned.bos_token_id and tokens[-1] == learned.eos_token_id
            text = learned.decode(tokens[1:-1])
            lines = text.split("\n")
            assert all(line[:2] == "IO"[i % 2] + " " for i, line in enumerate(lines))
            pairs: dict[str, str] = {}
            for asked, answer in zip(lines[::2], lines[1::2], strict=True):
                known = solve(asked[2:].split(), pairs)
                query_known = None not in known
                answered = answer[2:].split()
                assert len(answered) == len(known)
                for symbol, expected in zip(answered, known, strict=True):
                    assert expected in (None, symbol)
                solve([*asked[2:].split(), *answered], pairs)  # consistent to the end
            shots.append(len(lines) // 2 - 1)
            revealed.append(query_known)
            if len(pairs) == 4:
                seen.add("".join(pairs[opener] for opener in "([{<"))
            if category == "usual":
                assert pairs.items() <= {"(": ")", "[": "]", "{": "}", "<": ">"}.items()
                assert predicted[1:].all() and not predicted[0]
            else:  # the answers with the space before, and what ends them
                said = [learned.decode([t]) for t, p in zip(tokens, predicted, strict=True) if p]
                expected_text = "".join(line[1:] + "\n" for line in lines[1::2])
                assert "".join(said) == expected_text[:-1] + learned.eos_token
    if category == "usual":
        assert set(shots) == {1}
        return
    assert set(shots) == {0, 1, 2, 3}  # twenty do not fit into 96 tokens
    assert all(known == (k > 0) for k, known in zip(shots, revealed, strict=True))
    for of_split, heldout in zip(maps, (False, True), strict=True):
        assert of_split and all((zlib.crc32(m.encode()) % 8 == 0) == heldout for m in of_split)


def same(first: Rows, second: Rows) -> bool:
    return all((getattr(first, name) == getattr(second, name)).all() for name in ARRAYS)


def test_any_model_and_any_length_of_run_see_the_same_sequence(
    mixed: tuple[Rows, Rows], data: Path, tmp_path: Path
) -> None:
    other = RECIPE.replace("num_physical_layers = 2", "num_physical_layers = 3\nnum_visits = 1")
    other = other.replace("steps = 20", "steps = 12").replace("hidden_size = 16", "hidden_size = 8")
    assert other.count("= 12") == 2
    rows, heldout = prepared(data, tmp_path / "other", other + MIXTURE)
    assert same(rows, mixed[0].take(np.arange(48))) and same(heldout, mixed[1])
    seeded, _ = prepared(data, tmp_path / "seeded", RECIPE.replace("= 3", "= 4", 1) + MIXTURE)
    for category in mixed[0].categories:
        assert str(segments_of(seeded, category)) != str(segments_of(mixed[0], category))


def test_text_rows_do_not_depend_on_what_they_are_mixed_with(
    mixed: tuple[Rows, Rows], data: Path, tmp_path: Path
) -> None:
    rows, _ = prepared(data, tmp_path / "plain", RECIPE)
    text = mixed[0].take(np.flatnonzero(mixed[0].category < 2))
    assert (rows.tokens[: len(text)] == text.tokens).all() and rows.categories == ("a", "b")


def test_only_as_much_text_is_tokenized_as_the_run_needs(
    data: Path, tmp_path: Path, learned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    lots = preparing._lots

    def counted(*given: Any) -> Any:
        for segments in lots(*given):
            seen.append(sum(len(segment.tokens) for segment in segments))
            yield segments

    monkeypatch.setattr(preparing, "_lots", counted)
    short = RECIPE.replace("steps = 20", "steps = 4")
    rows, _ = prepared(data, tmp_path / "short", short)
    few = len(seen)
    longer, _ = prepared(data, tmp_path / "long", RECIPE.replace("steps = 20", "steps = 60"))
    assert few < len(seen) - few
    assert same(longer.take(np.arange(len(rows))), rows)  # whatever came after


def test_random_stretches_have_no_special_tokens(data: Path, tmp_path: Path) -> None:
    mixture = '[[mixture]]\nsource = "backcopy"\nweight = 1\nstretches = "random"\nlengths = [2, 9]'
    rows, heldout = prepared(data, tmp_path / "random", RECIPE + mixture)
    assert rows.categories == heldout.categories == ("backcopy",)
    assert rows.tokens[:, 1:].min() == 3 and rows.tokens.max() == 299
    assert (rows.tokens[:, 0] == 0).all() and rows.predicted[:, 1:].all()


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ('source = "backcopy"', 'source = "copy"', "has the source 'copy'"),
        ('source = "backcopy"', 'source = "text"', "text has an unknown key 'lengths'"),
        ('name = "usual"', "", "has dyck twice"),
        ('name = "usual"', 'name = "a"', "name of a category"),
        ("weight = 3", "weight = 0", "above 0"),
        ("weight = 3", "", "lacks weight"),
        ("lengths = [4, 20]", "lengths = [4]", "shortest length"),
        ("lengths = [4, 20]", "lengths = [1, 20]", "2 or more"),
        ("lengths = [4, 20]", "lengths = [4, 2.5]", "list of whole numbers"),
        ("lengths = [4, 20]", "lengths = [4, 48]", "do not fit into context 96"),
        ("lengths = [4, 20]", 'stretches = "words"', "text or random"),
        ('loss = "copies"', 'loss = "answers"', "all or copies"),
        ('loss = "answers"', 'loss = "none"', "all or answers"),
        ("shots = [1]", "shots = []", "numbers from 0 on"),
        ("shots = [1]", "shots = [14]", "more than context 96: list fewer shots"),
        ('pairing = "usual"', 'pairing = "odd"', "usual or in-context"),
        ("weight = 2\n", 'weight = 2\nreveal = "all"\n', "not by 'all'"),
        ("lengths = [2, 8]", "lengths = [8, 2]", "No input of 8 to 2 symbols"),
        ('template = "short.toml"', 'template = "long.toml"', "no template .*long.toml"),
        ("packed = true", 'packed = "yes"', "expected bool"),
        ("packed = true", 'broken_lines = "mend"', "refuse or skip"),
    ],
)
def test_wrong_mixture(data: Path, tmp_path: Path, old: str, new: str, match: str) -> None:
    text = RECIPE + MIXTURE
    assert old in text
    with pytest.raises(SmeltscopeError, match=match):
        prepared(data, tmp_path / "out", text.replace(old, new, 1))


def test_broken_line_is_named_or_skipped(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    whole = (data / "a.train.jsonl").read_text()
    (data / "c.train.jsonl").write_text(whole + '\n{"text": "cut sho')
    with pytest.raises(SmeltscopeError, match=r"c\.train\.jsonl, line 31 is broken JSON"):
        prepared(data, tmp_path / "out", RECIPE.replace("a.train", "c.train"))
    # Skipped, what is left is what it was.
    (data / "broken").mkdir()
    (data / "broken" / "a.train.jsonl").write_text('{"text": 5}\n' + whole + '\n{"text": "cut sho')
    skipping = RECIPE.replace("packed = true", 'packed = true\nbroken_lines = "skip"')
    recipe = recipe_of(data, skipping.replace("a.train", "broken/a.train"))
    (tmp_path / "skipped").mkdir()
    prepare(recipe, tmp_path / "skipped", quiet=False)
    assert "skipped 2 broken lines, the first: " in capsys.readouterr().err
    rows, _ = prepared(data, tmp_path / "whole", RECIPE)
    assert (load_rows(tmp_path / "skipped" / "rows.npz", "train").tokens == rows.tokens).all()


# ---------------------------------------------------------------- the tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer that was saved and loaded."""
    text = (
        "the cat (sat) on the [mat]] {{x}} <<a>> 1999 ((((( 11111 or somewhere else entirely " * 20
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([text], vocab_size=280, max_length=64).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_brackets_and_digits_are_single_tokens(tokenizer: Any) -> None:
    for text in (BRACKETS, "(((((", "1999", "[]]<<>>"):
        ids = tokenizer(text)["input_ids"]
        assert [tokenizer.decode([i]) for i in ids] == list(text)
    for token in tokenizer.get_vocab():
        alone = token.removeprefix("\u0120")  # how a byte-level vocabulary writes a space
        assert len(alone) == 1 or token.startswith("<|") or not set(alone) & set(BRACKETS)


def test_symbols_of_dyck_prompts_are_one_token_with_their_space(tokenizer: Any) -> None:
    assert set(SPACED) == set(CLOSERS) | set(OPENERS)
    ids = tokenizer("Input: " + " ".join(SPACED))["input_ids"][-len(SPACED) :]
    assert [tokenizer.decode([i]) for i in ids] == [f" {symbol}" for symbol in SPACED]


def test_tokenizer_adds_no_start_token(tokenizer: Any) -> None:
    assert tokenizer.bos_token == "<|start|>" and tokenizer.bos_token_id == 0
    assert tokenizer("the")["input_ids"][0] != tokenizer.bos_token_id
    assert tokenizer.model_max_length == 64


@given(text=st.text(max_size=60) | st.binary(max_size=40).map(lambda b: b.decode("latin-1")))
@settings(max_examples=80, deadline=None)
def test_any_text_comes_back(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < 280 for i in ids)


def test_tokenizer_learns_the_same_twice() -> None:
    texts = ["some words and others (with) brackets or none"] * 9
    first, second = (
        train_tokenizer(texts, vocab_size=270, max_length=8).get_vocab() for _ in range(2)
    )
    assert first == second


@pytest.mark.parametrize(("vocab_size", "match"), [(100, "259 or more"), (5000, "more text")])
def test_vocabulary_that_cannot_be(vocab_size: int, match: str) -> None:
    with pytest.raises(SmeltscopeError, match=match):
        train_tokenizer(["a few words"], vocab_size=vocab_size, max_length=8)
