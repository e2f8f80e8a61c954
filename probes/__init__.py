"""The diagnostics: one file for each probe, the runner that feeds them, and their statistics."""

from smeltscope.probes.attention_sink import AttentionSink
from smeltscope.probes.probe import Batch, ModelShape, Output, Probe, VisitPair, group_name
from smeltscope.probes.runner import (
    Measurement,
    RunOptions,
    empty_arrays,
    empty_tables,
    model_shape,
    run_probes,
)
from smeltscope.probes.statistics import Quantities, Quantity, Resampling, quantities
from smeltscope.probes.summary import summarize

__all__ = [
    "AttentionSink",
    "Batch",
    "Measurement",
    "ModelShape",
    "Output",
    "Probe",
    "Quantities",
    "Quantity",
    "Resampling",
    "RunOptions",
    "VisitPair",
    "empty_arrays",
    "empty_tables",
    "group_name",
    "model_shape",
    "quantities",
    "run_probes",
    "summarize",
]
