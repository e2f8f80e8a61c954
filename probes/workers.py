"""Several processes on one run: `torchrun --nproc-per-node N -m smeltscope probe batch ...`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# One that is done waits for the slowest, which PyTorch would allow half an hour.
_PATIENCE = timedelta(days=30)


@dataclass(frozen=True, kw_only=True)
class Workers:
    """How the processes of torchrun share a run. Without torchrun there is one.

    Either each takes some of the batches, or, where the model itself is spread over them (tensor parallelism), all
    work on every batch and the first one writes.
    """

    rank: int = 0  # of those that take batches
    ranks: int = 1
    processes: int = 1
    writes: bool = True

    @classmethod
    def of_environment(cls, model: PreTrainedModel) -> Workers:
        """As torchrun says; joins its process group."""
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        if processes == 1:
            return cls()
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=_PATIENCE)
        rank = dist.get_rank()
        if model.tp_size not in (None, 1):
            return cls(processes=processes, writes=rank == 0)
        return cls(rank=rank, ranks=processes, processes=processes)

    def wait(self) -> None:
        """Until all processes have come here."""
        if self.processes > 1:
            dist.barrier()

    def agreed(self, value: Any) -> Any:
        """What the process that writes says, where only one writes."""
        if self.processes == 1 or self.ranks > 1:
            return value
        said = [value]
        dist.broadcast_object_list(said, src=0)
        return said[0]


def split_batches(tokens: Sequence[int], ranks: int) -> list[range]:
    """One contiguous run of batches for each process, of about the same number of tokens; some may be empty."""
    ends = np.cumsum(tokens)
    shares = np.arange(1, ranks) * ends[-1] / ranks
    cuts = [0, *np.searchsorted(ends, shares, side="left").tolist(), len(tokens)]
    return [range(start, stop) for start, stop in pairwise(cuts)]
