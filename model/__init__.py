"""The model: configuration, SMELT and its Baseline, loading, training, views for other tools.

Importing this package registers SMELT with transformers' Auto classes.
"""

from smeltscope.model.checkpoint import Checkpoint, checkpoint_of
from smeltscope.model.configuration import SmeltConfig, default_span
from smeltscope.model.controls import CONTROLS, build_control
from smeltscope.model.executions import Execution, executions_of
from smeltscope.model.loading import UNTRAINED, load_checkpoint, shipped_checkpoints
from smeltscope.model.smelt import SmeltForCausalLM, SmeltModel, with_visits
from smeltscope.model.stack import decoder_stack
from smeltscope.model.tiny import TINY_MODELS, tiny

__all__ = [
    "CONTROLS",
    "TINY_MODELS",
    "UNTRAINED",
    "Checkpoint",
    "Execution",
    "SmeltConfig",
    "SmeltForCausalLM",
    "SmeltModel",
    "build_control",
    "checkpoint_of",
    "decoder_stack",
    "default_span",
    "executions_of",
    "load_checkpoint",
    "shipped_checkpoints",
    "tiny",
    "with_visits",
]
