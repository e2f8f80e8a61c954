"""Segments counted by hand, the budget, and that no token is lost."""

import gzip
import json
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from smeltscope.errors import SmeltscopeError
from smeltscope.tasks import load_heldout, shipped_heldout
from smeltscope.tasks import tokens as tokens_module

START = 256
GPT2 = Path(__file__).parents[2].parent / "shared/data/tokenizers/gpt2_tokenizer.json"


def write(path, texts):
    """A .jsonl of texts, or of (category, text)."""
    rows = [{"text": t} if isinstance(t, str) else {"category": t[0], "text": t[1]} for t in texts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def segments(heldout):
    return [heldout.segment(i).tolist() for i in range(len(heldout))]


def by_category(heldout):
    count = Counter()
    for category, length in zip(heldout.categories, heldout.lengths, strict=True):
        count[category] += int(length)
    return dict(count)


def letters(tokenizer, text):
    return [START, *tokenizer(text, add_special_tokens=False)["input_ids"]]


def test_segments_by_hand(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", ["abcdefgh", "abcd", "abc", "x", "", "ab"])
    found = load_heldout([path], tokenizer, max_length=4)
    expected = ["abc", "def", "gh", "abc", "abc", "ab"]  # "d" and "x" are dropped
    assert segments(found) == [letters(tokenizer, text) for text in expected]
    assert found.document.tolist() == [0, 0, 0, 1, 2, 3]
    assert [d.id for d in found.documents] == [f"a.jsonl:{i}" for i in (1, 2, 3, 6)]
    assert found.dropped == {"empty_document": 1, "one_token_document": 1, "one_token_tail": 1}
    assert found.lengths.tolist() == [4, 4, 3, 4, 4, 3]
    assert found.tokens.dtype == found.document.dtype == np.int32
    assert found.offsets.dtype == np.int64
    assert found.categories == ["a"] * 6
    assert found.sources == [""] * 6


def test_without_start_token(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", ["abcde"])
    found = load_heldout([path], tokenizer, max_length=4, bos=False)
    assert segments(found) == [letters(tokenizer, "abcd")[1:]]
    assert found.start_token is None
    assert found.dropped == {"one_token_tail": 1}


@pytest.mark.parametrize("adds_start", [True, False])
def test_the_start_token_is_never_doubled(tmp_path, make_tokenizer, adds_start):
    tokenizer = make_tokenizer(bos_token="<s>", adds_start=adds_start)
    path = write(tmp_path / "a.jsonl", ["abcd", "<s>abcd"])
    found = load_heldout([path], tokenizer, max_length=9)
    assert segments(found) == [letters(tokenizer, "abcd")] * 2
    assert found.dropped == {"doubled_start_token": 1}


TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), max_size=6)


@settings(max_examples=40, deadline=None)
@given(TEXTS, st.integers(3, 12), st.booleans())
def test_no_token_is_lost(tokenizer, texts, max_length, bos):
    texts = ["two", *texts]
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "a.jsonl", texts)
        found = load_heldout([path], tokenizer, max_length=max_length, bos=bos)
        again = load_heldout([path], tokenizer, max_length=max_length, bos=bos, tokens=10_000)
    real = len(found.tokens) - len(found) * bos
    lost = found.dropped.get("one_token_tail", 0) + found.dropped.get("one_token_document", 0)
    assert real + lost == sum(len(text.encode()) for text in texts)
    assert found.lengths.max() <= max_length
    for i, info in enumerate(found.documents):
        own = [found.segment(s)[int(bos) :] for s in np.flatnonzero(found.document == i)]
        original = texts[int(info.id.split(":")[1]) - 1]
        kept = tokenizer.decode(np.concatenate(own)).encode()
        cut = len(original.encode()) % (max_length - bos) == 1
        if not cut:
            assert kept.decode() == original
    assert again.digest == found.digest  # a budget that is large enough changes nothing


def test_categories_share_the_budget(tmp_path, tokenizer):
    rows = [("big", "b" * 500), ("small", "s" * 20), ("mid", "m" * 60), ("mid", "n" * 500)]
    path = write(tmp_path / "a.jsonl", rows)
    found = load_heldout([path], tokenizer, max_length=11, tokens=325)
    # small gives 2 segments of 11, big 14, mid 13 and the 6 tokens that are left
    assert by_category(found) == {"big": 154, "small": 22, "mid": 149}
    assert len(found.tokens) == 325
    assert [d.category for d in found.documents] == ["big", "small", "mid", "mid"]


def test_files_share_the_budget_when_one_is_huge(tmp_path, tokenizer):
    (tmp_path / "huge.txt").write_text("h" * 100_000)
    (tmp_path / "tiny.txt").write_text("t" * 300)
    found = load_heldout([tmp_path], tokenizer, max_length=101, tokens=500)
    assert by_category(found) == {"huge": 298, "tiny": 202}


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 60)), min_size=1, max_size=12),
    st.integers(6, 200),
)
def test_budget_properties(tokenizer, rows, budget):
    rows = [("a", "xx"), *((category, "y" * n) for category, n in rows)]
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "a.jsonl", rows)
        whole = load_heldout([path], tokenizer, max_length=8)
        found = load_heldout([path], tokenizer, max_length=8, tokens=budget)
        again = load_heldout([path], tokenizer, max_length=8, tokens=budget)
    assert found.digest == again.digest
    assert len(found.tokens) <= budget
    all_tokens, taken = by_category(whole), by_category(found)
    if sum(all_tokens.values()) >= budget:
        assert len(found.tokens) >= budget - 2  # less than a segment of two real tokens is left
    most = max(taken.values())
    for category, count in all_tokens.items():
        # Nobody is more than a segment behind, unless there is no more of it.
        assert taken.get(category, 0) in range(most - 8, most + 1) or taken[category] == count


def test_same_data_same_digest(tmp_path, tokenizer):
    first = write(tmp_path / "a.jsonl", [("x", "abcdef"), ("y", "ghi")])
    other = write(tmp_path / "b.jsonl", [("x", "abcdef"), ("z", "ghi")])
    digests = {
        load_heldout([path], tokenizer, max_length=n, **options).digest
        for path, n, options in [
            (first, 9, {}),
            (first, 5, {}),
            (first, 9, {"bos": False}),
            (first, 9, {"tokens": 6}),
            (other, 9, {}),
        ]
    }
    assert len(digests) == 5


def test_a_big_document_is_tokenized_as_far_as_needed(tmp_path, tokenizer, monkeypatch):
    characters = []
    encode = tokens_module._encode

    def count(tokenizer, text, **options):
        characters.append(len(text))
        return encode(tokenizer, text, **options)

    monkeypatch.setattr(tokens_module, "_encode", count)
    (tmp_path / "a.txt").write_text("some words \n" * 400_000)  # 4.8 MB
    found = load_heldout([tmp_path / "a.txt"], tokenizer, max_length=65, tokens=6_500)
    assert len(found.tokens) == 6_500
    assert sum(characters) <= 2 * tokens_module.PIECE
    assert tokenizer.decode(found.segment(0)[1:]) == ("some words \n" * 9)[:64]


def test_data_that_is_used_up_is_said(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", ["abc"])
    found = load_heldout([path], tokenizer, max_length=9, tokens=50_000)
    assert "All data is used: 4 tokens of the 50,000 asked for." in found.notes


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_length": 2}, "--max-length 2 is too short: give 3 or more"),
        ({"max_length": 9, "tokens": 2}, "--tokens 2 is too few: give 3 or more"),
        (
            {"max_length": 9, "vocab_size": 60},
            r"a\.jsonl: the tokenizer's ids reach \d+ but the model's vocabulary has 60 entries",
        ),
    ],
)
def test_options_that_cannot_work(tmp_path, tokenizer, options, sentence):
    path = write(tmp_path / "a.jsonl", ["abc z"])
    with pytest.raises(SmeltscopeError, match=sentence):
        load_heldout([path], tokenizer, **options)


def test_what_ships():
    sources = (Path(shipped_heldout()[0]).parent / "SOURCES.md").read_text()
    names = [path.name.split(".")[0] for path in shipped_heldout()]
    assert names == ["code", "encyclopedic", "finance", "math_stem", "web_prose"]
    for path in shipped_heldout():
        rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
        assert len(rows) >= 20
        assert all(len(row["text"]) <= 12_000 for row in rows)
        assert len({row["id"] for row in rows}) == len(rows)
        for row in rows:
            assert row["source"] in sources
            assert row["license"].startswith(("PSF-2.0", "BSD-3", "Public domain", "US-Gov public"))


@pytest.mark.shared_data
@pytest.mark.skipif(not GPT2.exists(), reason=f"{GPT2} is missing")
def test_what_ships_in_gpt2_tokens():
    special = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    gpt2 = PreTrainedTokenizerFast(tokenizer_file=str(GPT2), **special)
    found = load_heldout(shipped_heldout(), gpt2, max_length=1024, vocab_size=50257)
    assert all(55_000 <= count <= 66_000 for count in by_category(found).values())
    with pytest.raises(SmeltscopeError, match=r"ids reach \d+ but the model"):
        load_heldout(shipped_heldout(), gpt2, max_length=1024, vocab_size=512)
