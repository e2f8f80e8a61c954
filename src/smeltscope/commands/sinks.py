"""The attention sink while a model is trained: by visit and category, at every evaluation."""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from smeltscope.activations import Attention, capture
from smeltscope.model import Execution
from smeltscope.model.rows import Rows
from smeltscope.model.trainer import Watch
from smeltscope.probes.attention_sink import SINK_RATE_THRESHOLD, measure_sink

SEGMENTS = 8  # of each category


def watch_sinks(heldout: Rows) -> Watch:
    """What `train_model` logs of the sink, over the first segments of the first 8 rows of each category.

    `max_head_sink/CATEGORY/visit V` is the largest mean mass on the first token of a head at visit V, over the looped
    layers and all queries but the first; `sink_rate/CATEGORY/visit V` the share of (segment, head) in which the mean
    mass in the first 64 tokens is above .3, of segments that have as many. Layers outside the span are `other layers`.
    Definitions as in the probe attention-sink.
    """
    chosen = [
        np.flatnonzero(heldout.category == c)[:SEGMENTS] for c in range(len(heldout.categories))
    ]

    def watch(model: PreTrainedModel) -> Mapping[str, float]:
        found: dict[str, float] = {}
        for name, rows in zip(heldout.categories, chosen, strict=True):
            if len(rows):
                found |= _sinks(model, heldout.take(rows), name)
        return found

    return watch


def _sinks(model: PreTrainedModel, rows: Rows, name: str) -> dict[str, float]:
    begins = rows.positions[:, 1:] == 0  # of the next segment, or of the padding
    context = rows.tokens.shape[1]
    lengths = np.where(begins.any(1), begins.argmax(1) + 1, context)
    tokens = torch.from_numpy(rows.tokens[:, : lengths.max()].astype(np.int64)).to(model.device)
    known = torch.from_numpy(lengths).to(model.device)
    masses, alphas = defaultdict(list), defaultdict(list)

    def on_site(execution: Execution, site: str, attention: Attention) -> None:
        looped = execution.layer in model.config.span
        where = f"visit {execution.visit}" if looped else "other layers"
        measured = measure_sink(attention, known)
        queries = measured["queries"].sum()
        masses[where].append(measured["sink_mass_sum"].sum(0) / queries)  # (head,)
        alphas[where].append(measured["sink_alpha"].flatten())  # (segment x head,)

    model.eval()
    with torch.no_grad(), capture(model, ("attention",), on_site):
        model(tokens, use_cache=False, output_router_logits=False)
    found: dict[str, float] = {}
    for where, values in masses.items():
        found[f"max_head_sink/{name}/{where}"] = float(torch.cat(values).max())
        alpha = torch.cat(alphas[where])
        if bool(alpha.isfinite().any()):
            found[f"sink_rate/{name}/{where}"] = _share_above(alpha[alpha.isfinite()])
    return found


def _share_above(alpha: Tensor) -> float:
    return float((alpha > SINK_RATE_THRESHOLD).float().mean())
