"""What a probe is: sites it reads, arrays it fills, and a table made from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from smeltscope.activations import Variable
from smeltscope.model import Execution


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Segments of one forward, padded on the right."""

    input_ids: Tensor  # (B, T), on the model's device
    lengths: Tensor  # (B,), real tokens of each row


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a run that a probe lays its arrays out by."""

    executions: list[Execution]
    modules: list[str]  # of each execution, by its name in the model
    heads: int  # the most query heads that any layer has
    max_length: int


class Probe(Protocol):
    """A diagnostic. It holds its options and no results: what it measures goes into the arrays of a batch."""

    @property
    def name(self) -> str:
        """The command's name."""
        ...

    @property
    def sites(self) -> Sequence[str]:
        """Where it reads."""
        ...

    def options(self) -> dict[str, Any]:
        """What changes its numbers, recorded in the run file."""
        ...

    def dimensions(self, shape: ModelShape) -> Mapping[str, np.ndarray]:
        """Dimensions of its own, with their coordinate values."""
        ...

    def variables(self, shape: ModelShape) -> Mapping[str, Variable]:
        """The arrays it fills; `segment` comes first in their dimensions."""
        ...

    def observe(
        self,
        arrays: Mapping[str, np.ndarray],
        batch: Batch,
        execution: Execution,
        site: str,
        value: Any,
    ) -> None:
        """Reduce a site's value into rows of `arrays`, each (B, ...) and NaN so far."""
        ...


def group_name(probe_name: str) -> str:
    """The probe's group in the run file: `attention-sink` -> `attention_sink`."""
    return probe_name.replace("-", "_")


def empty_arrays(probe: Probe, shape: ModelShape, rows: int) -> dict[str, np.ndarray]:
    """NaN for everything that a probe measures of `rows` segments: what its `observe` fills."""
    sizes = {"execution": len(shape.executions), "head": shape.heads}
    sizes |= {name: len(values) for name, values in probe.dimensions(shape).items()}
    return {
        name: np.full((rows, *(sizes[d] for d in variable.dims[1:])), np.nan, variable.dtype)
        for name, variable in probe.variables(shape).items()
    }
