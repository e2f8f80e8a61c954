"""A tokenizer whose tokens are the bytes of the text, so that segments can be counted by hand."""

from collections.abc import Callable
from functools import partial

import pytest
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def make_tokenizer(byte_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> Callable:
    return partial(byte_tokenizer, model_max_length=16)


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> PreTrainedTokenizerFast:
    return make_tokenizer(bos_token="<s>", eos_token="</s>")
