"""What the paper reports, to stand beside a run's numbers: context from its models, not a target for others.

arXiv 2609.01343, "SMELT: Scaling Laws for Compute-Matched MoE Looped Transformers": models of 0.1B to 54B parameters, 8
experts for each token, sparsity S from 0 to 97 %, diagnostics over a held-out sample of 1M tokens. S is the share of
parameters that a token does not use. Its averages over layers, heads and tokens are not spelt out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import xarray as xr

MODELS = "models of 0.1B to 54B"


@dataclass(frozen=True, kw_only=True)
class Reported:
    """A number of the paper, and which of ours it stands beside."""

    probe: str
    quantity: str  # of the probe's summary
    at: Mapping[str, str | int] = field(default_factory=dict)  # the entry of it, by dimension
    what: str
    says: str
    between: tuple[float, float] | None = None  # the ends, where it is a range

    def ours(self, summary: xr.Dataset) -> tuple[float, float] | None:
        """The least and the greatest of the same number here, over layers (heads averaged); None where there is none.

        Its models have two visits: of more, those of visits 1 and 2 are taken, unless `at` names a pair.
        """
        if self.quantity not in summary:
            return None
        values = summary[self.quantity]
        if any(label not in values[dim].values for dim, label in self.at.items()):
            return None  # e.g. other numbers of shots were asked for
        values = values.sel(self.at)
        if "visit_pair" in values.dims:
            values = values.isel(visit_pair=0)
        if "execution" in values.dims:  # by later visit
            values = values.isel(execution=values["visit"].values == 2)
        values = values.mean([d for d in values.dims if d in ("head", "kv_head")])
        finite = values.values[np.isfinite(values.values)]
        return (float(finite.min()), float(finite.max())) if finite.size else None


# Vectors whose norms it compares between visits, as `residual-updates` names them.
NORMS = {
    "update": "whole update",
    "attn_out": "attention's write",
    "mlp_out": "MLP's write",
    "attn_in": "normed input",
}

REPORTED = (
    Reported(
        probe="attention-sink",
        quantity="change",
        what="sink mass at visit 2 minus visit 1",
        says="below 0 in nearly all looped layers and heads; the Baseline's sink rises with depth",
    ),
    Reported(
        probe="router-overlap",
        quantity="overlap",
        what="experts shared by two visits",
        says="2 to 3 of 8 at S ~ 97 %, about 8 at S = 0",
    ),
    *(
        Reported(
            probe="residual-updates",
            quantity="norm_ratio",
            at={"vector": vector},
            what=f"norm at visit 2 / at visit 1, {what}",
            says="1.2 to 3.5 in all 16 models",
            between=(1.2, 3.5),
        )
        for vector, what in NORMS.items()
    ),
    Reported(
        probe="residual-updates",
        quantity="relative_update_ratio",
        what="relative update at visit 2 / at visit 1",
        says="above 1 from 200M up; below 1 in a few early layers at 100M",
    ),
    Reported(
        probe="residual-updates",
        quantity="matched_cosine",
        at={"write": "update"},
        what="cosine of a layer's two updates",
        says=".42 to .65, mean .56 (1.6B)",
        between=(0.42, 0.65),
    ),
    Reported(
        probe="residual-updates",
        quantity="nonmatching_overall",
        at={"write": "update"},
        what="cosine of updates of different layers",
        says="mean .16 (1.6B)",
    ),
    *(
        Reported(
            probe="qkv-similarity",
            quantity="cosine",
            at={"stage": stage},
            what=f"cosine of {stage} at two visits",
            says=f"{low} to {high}".replace("0.", "."),
            between=(low, high),
        )
        for stage, low, high in (
            ("X", 0.84, 0.93),
            ("Q", 0.89, 0.93),
            ("K", 0.89, 0.93),
            ("V", 0.65, 0.74),
            ("PV", 0.56, 0.69),
            ("O", 0.49, 0.64),
        )
    ),
    Reported(
        probe="attended-tokens",
        quantity="top8",
        what="the 8 most attended tokens at both visits",
        says=".56 to .66",
        between=(0.56, 0.66),
    ),
    Reported(
        probe="attended-tokens",
        quantity="top8_control",
        what="the same for two heads of one visit",
        says=".28 to .34",
        between=(0.28, 0.34),
    ),
    *(
        Reported(
            probe="loss",
            quantity="swept_loss",
            at={"num_visits": visits},
            what=f"loss, {visits} visit{'s' * (visits > 1)}",
            says=f"{loss} (200M at S ~ 85 %, each model trained with its number of visits)",
        )
        for visits, loss in ((1, "1.9445"), (2, "1.9257"), (3, "1.9385"), (4, "1.9360"))
    ),
    *(
        Reported(
            probe="dyck-scores",
            quantity="exact",
            at={"shots": shots},
            what=f"prompts answered exactly, {shots} shots (here: of this run's items)",
            says=f"{says} of BIG-bench's items",
        )
        for shots, says in ((0, "about 0 %"), (32, "29.8 % (its Baseline 26.4 %)"))
    ),
    *(
        Reported(
            probe="dyck-map",
            quantity="dyck_head_change",
            at={"map_region": region},
            what=f"mass on {words} at visit 2 minus visit 1, the Dyck head",
            says=f"{says}, one prompt of 4 shots (1.6B)",
        )
        for region, words, says in (
            ("bos", "the start token", "-.58 (.60 to .02)"),
            ("demo_answer", "shown answers", "+.61 (.24 to .85)"),
        )
    ),
)


def reported_by(probe: str) -> list[Reported]:
    """What the paper reports of a probe's numbers."""
    return [entry for entry in REPORTED if entry.probe == probe]
