"""Activations: capturing them from one forward, and the run file they are reduced into."""

from smeltscope.activations.attention import Attention
from smeltscope.activations.capture import Capture, capture

__all__ = ["Attention", "Capture", "capture"]
