"""Activations: capturing them from one forward, and the run file they are reduced into."""

from smeltscope.activations.attention import Attention
from smeltscope.activations.capture import SITES, Capture, capture
from smeltscope.activations.store import (
    RunWriter,
    Schema,
    Variable,
    attributes_of,
    check_out,
    open_run,
)

__all__ = [
    "SITES",
    "Attention",
    "Capture",
    "RunWriter",
    "Schema",
    "Variable",
    "attributes_of",
    "capture",
    "check_out",
    "open_run",
]
