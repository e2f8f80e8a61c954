"""From what a probe found to Plotly figures: pure functions, usable in a notebook and on pages.

    figures_of(smeltscope.summarize(run, "attention-sink"))["heads"]

`FIGURES` lists what each probe has. A figure draws from a summary (`smeltscope.summarize`) and what else of the context it `takes`:

- `baseline`: the summary of a Baseline's run over the same data.
- `by_category`, `by_length`, `baseline_by_category`, `baseline_by_length`: summaries of groups of documents.
- `patterns`: a run's `dyck_patterns`, as a dataset.
- choices, for which each figure has a default: `layer`, `head`, `pair` ("1-2"), `write`, `centred`, `region`, `example`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from smeltscope.dashboards.figures import (
    attended_tokens,
    attention_sink,
    dyck_heads,
    dyck_map,
    dyck_scores,
    dyck_state,
    loss,
    qkv_similarity,
    residual_updates,
    router_overlap,
    swap,
)
from smeltscope.dashboards.figures.attention_sink import (
    sink_by_position,
    sink_depth_profile,
    sink_heatmaps,
)
from smeltscope.dashboards.figures.common import PLOTLY_CONFIG, FigureKind, themed
from smeltscope.dashboards.figures.dyck_map import head_of_map, regions_there
from smeltscope.dashboards.figures.trajectory import trajectory_figure

FIGURES: dict[str, tuple[FigureKind, ...]] = {
    "attention-sink": attention_sink.KINDS,
    "router-overlap": router_overlap.KINDS,
    "residual-updates": residual_updates.KINDS,
    "qkv-similarity": qkv_similarity.KINDS,
    "attended-tokens": attended_tokens.KINDS,
    "swap": swap.KINDS,
    "loss": loss.KINDS,
    "dyck-scores": dyck_scores.KINDS,
    "dyck-heads": dyck_heads.KINDS,
    "dyck-map": dyck_map.KINDS,
    "dyck-state": dyck_state.KINDS,
}


def figures_of(
    summary: xr.Dataset,
    *,
    baseline: xr.Dataset | None = None,
    groups: Mapping[str, xr.Dataset] | None = None,
    baseline_groups: Mapping[str, xr.Dataset] | None = None,
    **context: Any,
) -> dict[str, go.Figure]:
    """Every figure of a probe by name; those that have nothing to show for this run are left out.

    `groups` holds summaries of groups of documents (`summarize_groups`) by what they are grouped by: `category`, `length`.
    """
    context |= context_of(baseline, groups, baseline_groups)
    return {
        kind.name: kind.draw(summary, **context)
        for kind in FIGURES.get(str(summary.attrs.get("probe")), ())
        if kind.applies(summary, **context)
    }


def context_of(
    baseline: xr.Dataset | None = None,
    groups: Mapping[str, xr.Dataset] | None = None,
    baseline_groups: Mapping[str, xr.Dataset] | None = None,
) -> dict[str, Any]:
    """What `FigureKind.draw` takes besides choices."""
    found = {f"by_{name}": data for name, data in (groups or {}).items()}
    found |= {f"baseline_by_{name}": data for name, data in (baseline_groups or {}).items()}
    return found | {"baseline": baseline}


def choices_of(
    kind: FigureKind, summary: xr.Dataset, patterns: xr.Dataset | None = None
) -> dict[str, list[Any]]:
    """What may be chosen of a figure, `{"layer": [2, 3, 4, 5], "pair": ["1-2"]}`: the values that its `make` takes."""
    of_layers = "looped_layer" if "looped_layer" in summary.dims else "layer"
    known: dict[str, Any] = {
        "layer": summary[of_layers] if of_layers in summary.coords else [],
        "head": range(summary.sizes.get("head", 0)),
        "pair": summary["visit_pair"] if "visit_pair" in summary.dims else [],
        "write": summary["write"] if "write" in summary.dims else [],
        "centred": [False, True],
        "region": [],
        "example": [] if patterns is None else patterns["example"],
    }
    if "map_region" in summary.dims:
        known["region"] = regions_there(summary)
    return {
        name: list(dict.fromkeys(np.asarray(known[name]).tolist()))
        for name in kind.takes
        if name in known and len(known[name])
    }


__all__ = [
    "FIGURES",
    "PLOTLY_CONFIG",
    "FigureKind",
    "choices_of",
    "context_of",
    "figures_of",
    "head_of_map",
    "sink_by_position",
    "sink_depth_profile",
    "sink_heatmaps",
    "themed",
    "trajectory_figure",
]
