"""What training reads: rows, their order, and the tokenizer that is learned from the text."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from smeltscope.errors import SmeltscopeError
from smeltscope.model.rows import Rows, cut_rows, load_rows, save_rows, training_order
from smeltscope.model.tokenizer import BRACKETS, train_tokenizer

# ---------------------------------------------------------------- rows and their order


def test_rows_hold_every_token_of_a_document_behind_start_tokens() -> None:
    documents = [("x", list(range(10, 19))), ("y", [20]), ("x", [30, 31, 32])]
    rows = cut_rows(documents, context=5, start=0, end=1, pad=2)
    assert rows.tokens.tolist() == [
        [0, 10, 11, 12, 13],
        [0, 14, 15, 16, 17],
        [0, 18, 1, 2, 2],
        [0, 20, 1, 2, 2],
        [0, 30, 31, 32, 1],
    ]
    assert rows.lengths.tolist() == [5, 5, 3, 3, 5]
    assert [rows.categories[c] for c in rows.category] == ["x", "x", "x", "y", "x"]


def test_no_documents_is_an_error() -> None:
    with pytest.raises(SmeltscopeError, match="holds no documents"):
        cut_rows([], context=5, start=0, end=1, pad=2)


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    count=st.integers(1, 40),
    more=st.integers(0, 20),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_categories_take_turns_and_a_longer_run_begins_with_the_shorter(
    sizes: list[int], count: int, more: int, seed: int
) -> None:
    category = np.repeat(np.arange(len(sizes)), sizes).astype(np.int32)
    rows = Rows(
        tokens=np.zeros((len(category), 4), dtype=np.int32),
        lengths=np.full(len(category), 4, dtype=np.int32),
        category=category,
        categories=tuple(map(str, range(len(sizes)))),
    )
    order = training_order(rows, count=count, seed=seed)
    assert (category[order] == np.arange(count) % len(sizes)).all()
    for c, size in enumerate(sizes):  # nothing comes again before all was seen
        mine = order[c :: len(sizes)]
        for begin in range(0, len(mine), size):
            assert len(set(mine[begin : begin + size])) == len(mine[begin : begin + size])
    assert (training_order(rows, count=count + more, seed=seed)[:count] == order).all()


def test_rows_survive_the_file(tmp_path: Path) -> None:
    rows = cut_rows([("x", [5, 6, 7])], context=3, start=0, end=1, pad=2)
    save_rows(tmp_path / "rows.npz", train=rows)
    back = load_rows(tmp_path / "rows.npz", "train")
    assert back.tokens.tolist() == rows.tokens.tolist() and back.categories == ("x",)
    assert [p.name for p in tmp_path.iterdir()] == ["rows.npz"]


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
        assert len(token) == 1 or token.startswith("<|") or not set(token) & set(BRACKETS)


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
