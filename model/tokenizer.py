"""A byte-level byte-pair tokenizer made from the training text.

Brackets and digits are never merged with each other: each is a token of its own, as the Dyck prompts and sums need.
"""

from collections.abc import Iterable
from itertools import chain, repeat
from typing import TYPE_CHECKING

from smeltscope.errors import SmeltscopeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BRACKETS = "()[]{}<>"
# Every symbol of a Dyck prompt (`smeltscope.tasks.dyck`) is one token together with the space before it: prompts take half
# the tokens, and the position that predicts a symbol is that of the symbol before it, not of a space between them.
SPACED = BRACKETS + "!#$%&*+/;=?@"
OFTEN = 20_000  # how often the spaced symbols are shown beside the text, so that all of them are learned
START, END, PAD = "<|start|>", "<|end|>", "<|pad|>"  # ids 0, 1, 2
SMALLEST_VOCABULARY = 3 + 256  # the special tokens and every byte


def train_tokenizer(
    texts: Iterable[str], *, vocab_size: int, max_length: int
) -> "PreTrainedTokenizerFast":
    """A fast tokenizer with exactly `vocab_size` tokens, learned from `texts`.

    Any text comes back from its ids unchanged. It adds no start token by itself; `max_length`
    (tokens) is what it tells others the model can take.
    Raises SmeltscopeError when the vocabulary is too small for the bytes, or the text too short
    to fill it.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < SMALLEST_VOCABULARY:
        raise SmeltscopeError(
            f"vocab_size is {vocab_size}: a byte-level tokenizer needs {SMALLEST_VOCABULARY} or more."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?[()\[\]{}<>]"), "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[START, END, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    symbols = "".join(f" {symbol}" for symbol in SPACED)
    tokenizer.train_from_iterator(chain(texts, repeat(symbols, OFTEN)), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise SmeltscopeError(
            f"The training text yields {tokenizer.get_vocab_size()} tokens, not the vocab_size of "
            f"{vocab_size}: ask for fewer or give more text."
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=START,
        eos_token=END,
        pad_token=PAD,
        padding_side="right",
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )
