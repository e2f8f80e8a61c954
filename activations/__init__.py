"""Activations: capturing them from one forward, and the run file they are reduced into."""

from typing import TYPE_CHECKING

from smeltscope.activations.store import (
    Fixed,
    RunWriter,
    Schema,
    Variable,
    attributes_of,
    check_out,
    flattened,
    is_finished,
    join_ranks,
    open_run,
)
from smeltscope.lazy import lazily

if TYPE_CHECKING:
    from smeltscope.activations.attention import Attention, values_of
    from smeltscope.activations.capturing import Capture, capture, sites_of
    from smeltscope.activations.dump import Dump, dump_sites, open_dump
    from smeltscope.activations.edit import editing
    from smeltscope.activations.head import decode, head_of
    from smeltscope.activations.sites import SITES, Routing

_WATCHING = {
    "attention": ("Attention", "values_of"),
    "capturing": ("Capture", "capture", "sites_of"),
    "dump": ("Dump", "dump_sites", "open_dump"),
    "edit": ("editing",),
    "head": ("decode", "head_of"),
    "sites": ("SITES", "Routing"),
}
_PLACES = {n: f"{__name__}.{module}.{n}" for module, names in _WATCHING.items() for n in names}
__getattr__ = lazily(__name__, _PLACES)

__all__ = [
    "SITES",
    "Attention",
    "Capture",
    "Dump",
    "Fixed",
    "Routing",
    "RunWriter",
    "Schema",
    "Variable",
    "attributes_of",
    "capture",
    "check_out",
    "decode",
    "dump_sites",
    "editing",
    "flattened",
    "head_of",
    "is_finished",
    "join_ranks",
    "open_dump",
    "open_run",
    "sites_of",
    "values_of",
]
