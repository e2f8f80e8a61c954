"""Start tokens, and long texts in pieces against one call for the whole text."""

import json
import lzma
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from smeltscope.tasks import tokens as module
from smeltscope.tasks.tokens import start_token, tokenize

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
GPT2 = SHARED / "tokenizers" / "gpt2_tokenizer.json"
PROSE = "The rain in Spain, said Ann, falls mainly on 1,234 plains;\n\n\tisn't it so?  " * 60


@pytest.mark.parametrize(
    ("special", "start", "words"),
    [
        ({"bos_token": "<s>", "eos_token": "</s>"}, 256, []),
        ({"bos_token": "<s>", "eos_token": "<s>"}, 256, ["is the tokenizer's end token too"]),
        ({"eos_token": "</s>"}, 257, ["no start token: its end token </s> (id 257) begins"]),
        ({}, None, ["neither a start nor an end token"]),
        ({"bos_token": "<s>", "pad_token": "<s>"}, 256, ["the padding token too: this is harml"]),
        ({"bos_token": "<s>", "adds_start": True}, 256, ["puts <s> (id 256) in front by itself"]),
    ],
)
def test_start_token(make_tokenizer, special, start, words):
    found, notes = start_token(make_tokenizer(**special), True)
    assert found == start
    assert len(notes) == len(words)
    assert all(word in note for word, note in zip(words, notes, strict=True))


def test_no_start_token_when_asked(tokenizer):
    start, notes = start_token(tokenizer, False)
    assert start is None
    assert "as asked" in notes[0]


def trained(kind: str) -> PreTrainedTokenizerFast:
    """Three families: words of bytes (GPT-2), whole text as one word (Llama), Unigram (T5)."""
    lines = [PROSE, "def f(x):\n    return [x, x + 1]\n" * 9]
    if kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=120, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
        )
    elif kind == "llama":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        trainer = trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=["<unk>", *(f"<0x{i:02X}>" for i in range(256))],
            max_token_length=8,
            show_progress=False,
        )
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    tokenizer.train_from_iterator(lines, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module", params=["gpt2", "llama", "unigram"])
def family(request):
    return trained(request.param)


WORDS = st.sampled_from(
    ["rain ", "  ", "\n", "\n\n\n", "é", "🙂🙂", "isn't", "aaaaaaa", "9.", "\t"]
)


@settings(max_examples=40, deadline=None)
@given(st.lists(WORDS, max_size=400).map("".join))
def test_pieces_give_the_tokens_of_the_whole(family, text):
    whole = family(text, add_special_tokens=False)["input_ids"]
    assert np.concatenate(list(tokenize(family, text, piece=400, overlap=200))).tolist() == whole


@pytest.mark.parametrize("text", ["a" * 3000, " " * 3000, "🙂" * 1000, "ab" * 1500, PROSE])
def test_pieces_of_monotonous_text(family, text):
    whole = family(text, add_special_tokens=False)["input_ids"]
    pieces = list(tokenize(family, text, piece=500, overlap=200))
    assert np.concatenate(pieces).tolist() == whole
    assert all(piece.dtype == np.int32 for piece in pieces)


def test_what_is_not_asked_for_is_not_tokenized(tokenizer, monkeypatch):
    characters = []
    encode = module._encode

    def count(tokenizer, text, **options):
        characters.append(len(text))
        return encode(tokenizer, text, **options)

    monkeypatch.setattr(module, "_encode", count)
    pieces = tokenize(tokenizer, PROSE * 1000, piece=4000, overlap=400)
    next(pieces)
    assert characters == [4000, 4000]
    next(pieces)
    assert characters == [4000, 4000, 4000]


def test_a_long_text_gives_no_warning(tokenizer, capfd, caplog):
    list(tokenize(tokenizer, "x" * 100))  # model_max_length is 16
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


@pytest.mark.shared_data
@pytest.mark.skipif(not GPT2.exists(), reason=f"{GPT2} is missing")
def test_pieces_with_gpt2():
    gpt2 = PreTrainedTokenizerFast(tokenizer_file=str(GPT2))
    corpus = SHARED / "corpora" / "code.heldout.jsonl.xz"
    with lzma.open(corpus, "rt", encoding="utf-8") as file:
        text = "".join(json.loads(next(file))["text"] for _ in range(12))[:200_000]
    whole = gpt2(text, add_special_tokens=False, verbose=False)["input_ids"]
    assert np.concatenate(list(tokenize(gpt2, text, piece=9_000, overlap=800))).tolist() == whole
