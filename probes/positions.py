"""Bins of position in a segment, wider with every step: what probes split their averages by."""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot


def position_edges(max_length: int) -> np.ndarray:
    """Edges of the bins: 0, 1, 2, 4, 8, ... up to the length; bin i is [edge i, edge i + 1)."""
    return np.concatenate([[0], 2 ** np.arange(int(np.ceil(np.log2(max(max_length, 2)))) + 1)])


def position_bins(length: int, device: torch.device) -> Tensor:
    """Which bin each of `length` positions falls into: (T, bin), float32, one 1 in each row."""
    positions = torch.arange(length, device=device)
    edges = torch.as_tensor(position_edges(length), device=device)
    return one_hot(torch.bucketize(positions, edges, right=True) - 1, len(edges) - 1).float()
