"""The diagnostics: one file for each probe, the runner that feeds them, and their statistics."""

from smeltscope.probes.attention_sink import AttentionSink
from smeltscope.probes.probe import Batch, ModelShape, Probe, empty_arrays
from smeltscope.probes.runner import RunOptions, run_probes

__all__ = [
    "AttentionSink",
    "Batch",
    "ModelShape",
    "Probe",
    "RunOptions",
    "empty_arrays",
    "run_probes",
]
