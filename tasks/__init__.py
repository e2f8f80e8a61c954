"""What a model is run on: held-out text, and Dyck prompts."""

from smeltscope.tasks.batches import pad_batch, plan_batches
from smeltscope.tasks.prompts import Prompts
from smeltscope.tasks.text import DocumentInfo, HeldOut, load_heldout, shipped_heldout
from smeltscope.tasks.tokens import SpecialTokens, delimiter_tokens

__all__ = [
    "DocumentInfo",
    "HeldOut",
    "Prompts",
    "SpecialTokens",
    "delimiter_tokens",
    "load_heldout",
    "pad_batch",
    "plan_batches",
    "shipped_heldout",
]
