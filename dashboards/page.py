"""One HTML file with figures, that opens without a server and asks the network for nothing."""

import inspect
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import plotly.io
import xarray as xr

from smeltscope.activations import attributes_of
from smeltscope.dashboards.figures import sink_by_position, sink_depth_profile, sink_heatmaps
from smeltscope.errors import SmeltscopeError
from smeltscope.probes import AttentionSink

# plotly.js shows a button that sends figures to its makers' server unless told otherwise.
PLOTLY_CONFIG = {"showSendToCloud": False, "displaylogo": False, "responsive": True}

_STYLE = """
body { font: 15px/1.55 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 0 auto;
  max-width: 1180px; padding: 1.5rem; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; }
.lead { font-size: 1.05rem; max-width: 62rem; } figure { margin: 1.2rem 0; overflow-x: auto; }
figure > div { min-width: 720px; } table { border-collapse: collapse; }
td, th { text-align: left; vertical-align: top; padding: .15rem .9rem .15rem 0; font-weight: normal; }
th { color: #555; white-space: nowrap; } td { overflow-wrap: anywhere; }
pre { overflow-x: auto; background: #f5f5f5; padding: .8rem 1rem; font-size: 12px; }
"""


def write_sink_page(run: xr.DataTree, summary: xr.Dataset, path: str | Path) -> Path:
    """The page of an attention-sink run: what was found, figures, how it was measured.

    Raises `SmeltscopeError` when the file cannot be written; nothing half-written stays.
    """
    attributes = attributes_of(run)
    group = run["attention_sink"]
    figures = [sink_heatmaps(summary), sink_depth_profile(summary), sink_by_position(summary)]
    page = render_page(
        title=f"Attention on the first token: {attributes['checkpoint']}",
        lead=AttentionSink().sentence(summary),
        figures=figures,
        definition=inspect.cleandoc(str(group.attrs["definition"])),
        facts=_facts(attributes, summary, str(group.attrs["options"])),
    )
    return _write(Path(path), page)


def render_page(
    *,
    title: str,
    lead: str,
    figures: Sequence[go.Figure],
    definition: str,
    facts: dict[str, str],
) -> str:
    """HTML of a page; all text is escaped, plotly.js stands in it once."""
    parts = [
        plotly.io.to_html(
            figure,
            full_html=False,
            include_plotlyjs=i == 0,
            config=PLOTLY_CONFIG,
            div_id=f"figure-{i}",
        )
        for i, figure in enumerate(figures)
    ]
    rows = "\n".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in facts.items())
    body = "\n".join(f"<figure>{part}</figure>" for part in parts)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><style>{_STYLE}</style></head>
<body><h1>{escape(title)}</h1>
<p class="lead">{escape(lead)}</p>
{body}
<h2>How it was measured</h2><pre>{escape(definition)}</pre>
<h2>What it was measured on</h2><table>{rows}</table>
</body></html>
"""


def _facts(attributes: dict[str, Any], summary: xr.Dataset, options: str) -> dict[str, str]:
    identity, config = attributes["identity"], attributes["model_config"]
    facts = {
        "checkpoint": f"{attributes['checkpoint']}, sha256 {identity['checkpoint_digest'][:16]}",
        "model": f"{attributes['model_type']}, {summary.sizes['execution']} executions of "
        f"{len(set(summary['layer'].values))} layers, {summary.sizes['head']} heads",
        "number type, device": f"{identity['dtype']}, {identity['device']}",
        "data": f"{summary.attrs['tokens']:,} tokens, {summary.attrs['segments']:,} segments of "
        f"{summary.attrs['documents']:,} documents, sha256 {identity['data_digest'][:16]}",
        "notes on the data": " ".join(attributes["data_notes"]) or "none",
        "options": options,
        "intervals": f"95 %, {summary.attrs['bootstrap_draws']} bootstrap draws of documents within each category, "
        f"seed {summary.attrs['bootstrap_seed']}; they cover the choice of text, not the training seed",
        "packages": ", ".join(f"{k} {v}" for k, v in attributes["packages"].items()),
    }
    if "residual_scale" in config:
        facts["loop"] = (
            f"layers {config['loop_start']}:{config['loop_stop']} run {config['num_visits']} times, "
            f"residual scale {config['residual_scale']:g}"
        )
    return facts


def _write(path: Path, text: str) -> Path:
    unfinished = path.with_name(path.name + ".partial")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise SmeltscopeError(f"The page {path} could not be written: {error.strerror}.") from error
    return path
