"""The model: configuration, SMELT and its Baseline, loading, training, views for other tools.

Importing this package registers SMELT with transformers' Auto classes.
"""

from smeltscope.model.configuration import SmeltConfig, default_span
from smeltscope.model.executions import Execution, executions_of
from smeltscope.model.loading import Checkpoint, load_checkpoint, shipped_checkpoints
from smeltscope.model.smelt import SmeltForCausalLM, SmeltModel, with_visits
from smeltscope.model.tiny import TINY_MODELS, tiny

__all__ = [
    "TINY_MODELS",
    "Checkpoint",
    "Execution",
    "SmeltConfig",
    "SmeltForCausalLM",
    "SmeltModel",
    "default_span",
    "executions_of",
    "load_checkpoint",
    "shipped_checkpoints",
    "tiny",
    "with_visits",
]
