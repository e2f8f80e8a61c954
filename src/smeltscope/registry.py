"""The probes by name. A new probe is a file in `probes/` and one entry here.

Imports nothing heavy, so that the command line can list them without loading torch.
"""

import difflib
import importlib
import json
from typing import TYPE_CHECKING, Any

from smeltscope.errors import SmeltscopeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import xarray as xr

    from smeltscope.probes import Probe

# name: (where the class is, its line in --help)
PROBES = {
    "attention-sink": (
        "smeltscope.probes.attention_sink:AttentionSink",
        "How much attention rests on the first token, by layer, head and visit.",
    ),
    "router-overlap": (
        "smeltscope.probes.router_overlap:RouterOverlap",
        "How many experts a token keeps from one visit to the next.",
    ),
    "residual-updates": (
        "smeltscope.probes.residual_updates:ResidualUpdates",
        "What each execution writes into the residual stream: norms, ratios, cosines.",
    ),
    "qkv-similarity": (
        "smeltscope.probes.qkv_similarity:QkvSimilarity",
        "How alike the stages of attention are at the visits of a layer.",
    ),
    "attended-tokens": (
        "smeltscope.probes.attended_tokens:AttendedTokens",
        "Whether the visits of a layer attend to the same tokens.",
    ),
    "swap": (
        "smeltscope.probes.swap:Swap",
        "Whether a later visit reads other places or other content.",
    ),
    "loss": (
        "smeltscope.probes.loss:Loss",
        "Loss by document and by position; --visits 0..N sweeps the number of visits.",
    ),
}

# Those that need prompts with known regions: `probe dyck` runs them.
PROMPT_PROBES = {
    "dyck-scores": (
        "smeltscope.probes.dyck_scores:DyckScores",
        "How many prompts are answered rightly, by the number of shots.",
    ),
    "dyck-heads": (
        "smeltscope.probes.dyck_heads:DyckHeads",
        "Which looped head the answers need most: each ablated, at one visit or all.",
    ),
    "dyck-map": (
        "smeltscope.probes.dyck_map:DyckMap",
        "Where each head looks when an answer is due: attention by region of the prompt.",
    ),
    "dyck-state": (
        "smeltscope.probes.dyck_state:DyckState",
        "What of the brackets' state can be read from the residual stream at each execution.",
    ),
}

ALL_PROBES = PROBES | PROMPT_PROBES


def make_probe(name: str, **options: Any) -> "Probe":
    """A probe by its name, with options of its own where they are not to be the default."""
    if name not in ALL_PROBES:
        close = difflib.get_close_matches(name, ALL_PROBES, n=1)
        hint = f"Did you mean {close[0]}?" if close else f"There is: {', '.join(ALL_PROBES)}."
        raise SmeltscopeError(f"No probe is called {name!r}. {hint}")
    module, attribute = ALL_PROBES[name][0].split(":")
    probe: Probe = getattr(importlib.import_module(module), attribute)(**options)
    return probe


def check_for_text(names: "Sequence[str]") -> None:
    """Refuse probes of prompts where there is only text, on which they find nothing."""
    for name in names:
        if name in PROMPT_PROBES:
            command = "probe dyck-state" if name == "dyck-state" else "probe dyck"
            raise SmeltscopeError(f"{name} measures Dyck prompts, not text; {command} runs it.")


def recorded_probe(run: "xr.DataTree", name: str) -> "Probe":
    """A probe with the options that a run was made with."""
    group = name.replace("-", "_")
    options = json.loads(run[group].attrs["options"]) if group in run.children else {}
    # JSON knows no tuples; options are frozen
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    try:
        return make_probe(name, **options)
    except TypeError as error:
        raise SmeltscopeError(
            f"This run's {name} was made with options that this smeltscope does not know ({error}); "
            "use the version that made it."
        ) from error


def probes_of(run: "xr.DataTree") -> list[str]:
    """The probes that a run holds, those first that are known here, in their order."""
    # What no probe made has no definition.
    names = [g.replace("_", "-") for g in run.children if "definition" in run[g].attrs]
    order = list(ALL_PROBES)
    return sorted(names, key=lambda name: order.index(name) if name in order else len(order))
