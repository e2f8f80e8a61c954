"""Dyck: prompts whose answer closes brackets, with known regions."""

from smeltscope.tasks.dyck.generate import generate_sets, nested_sets
from smeltscope.tasks.dyck.grammar import (
    Word,
    branching_word,
    completion,
    count_prefixes,
    count_words,
    depths,
    matches,
    sample_prefix,
    sample_word,
    stack_tops,
    top_positions,
)
from smeltscope.tasks.dyck.items import (
    Item,
    ItemSet,
    bayes,
    candidates,
    guess,
    most_common_answer,
    read_items,
    readable,
    right_tokens,
    sets_of_items,
)
from smeltscope.tasks.dyck.pairing import (
    CLOSERS,
    USUAL,
    Pairing,
    draw_pairing,
)
from smeltscope.tasks.dyck.prompts import join, make_prompts, parse_prompt
from smeltscope.tasks.dyck.segments import MARKS, REGIONS
from smeltscope.tasks.dyck.templates import TEMPLATES, Template, read_template

__all__ = [
    "CLOSERS",
    "MARKS",
    "REGIONS",
    "TEMPLATES",
    "USUAL",
    "Item",
    "ItemSet",
    "Pairing",
    "Template",
    "Word",
    "bayes",
    "branching_word",
    "candidates",
    "completion",
    "count_prefixes",
    "count_words",
    "depths",
    "draw_pairing",
    "generate_sets",
    "guess",
    "join",
    "make_prompts",
    "matches",
    "most_common_answer",
    "nested_sets",
    "parse_prompt",
    "read_items",
    "read_template",
    "readable",
    "right_tokens",
    "sample_prefix",
    "sample_word",
    "sets_of_items",
    "stack_tops",
    "top_positions",
]
