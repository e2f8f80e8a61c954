"""What a probe is: sites it reads, arrays it fills, and what it makes of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import xarray as xr
from torch import Tensor, nn

from smeltscope.activations import Variable
from smeltscope.probes.regions import Regions
from smeltscope.probes.sampling import Sample
from smeltscope.probes.statistics import Quantities, Resampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from smeltscope.model import Execution


@dataclass(frozen=True, kw_only=True)
class VisitPair:
    """An execution and an earlier visit of the same layer, with their places in cross-visit arrays."""

    earlier: int  # execution of the earlier visit
    layer: int  # index along `looped_layer`
    pair: int  # index along `visit_pair`


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a run that a probe lays its arrays out by. 0 where the model has none of a kind."""

    executions: list[Execution]
    layers: Sequence[nn.Module]  # what each execution runs
    modules: list[str]  # their names in the model
    sites: Mapping[str, Sequence[int]]  # site -> the executions that have it
    heads: int  # the most query heads that any layer has
    kv_heads: int
    experts: int
    experts_per_token: int
    max_length: int
    categories: Sequence[str]
    regions: Sequence[str]
    shots: Sequence[int] = ()  # of prompts: numbers of demonstrations
    prompt_seeds: Sequence[int] = ()  # of prompts: seeds that the demonstrations were drawn with

    @cached_property
    def looped_layers(self) -> list[int]:
        """Layers that run more than once, in the order of their first execution."""
        return [e.layer for e in self.executions if e.visit == 2]

    @cached_property
    def visit_pairs(self) -> list[tuple[int, int]]:
        """Every (earlier, later) pair of visits that some layer has: (1, 2), (1, 3), (2, 3), ..."""
        most = max(e.visit for e in self.executions)
        return list(combinations(range(1, most + 1), 2))

    def pairs_of(self, execution: Execution) -> list[VisitPair]:
        """This execution with each earlier visit of its layer; none at a first visit."""
        return [
            VisitPair(
                earlier=other.index,
                layer=self.looped_layers.index(execution.layer),
                pair=self.visit_pairs.index((other.visit, execution.visit)),
            )
            for other in self.executions
            if other.layer == execution.layer and other.visit < execution.visit
        ]

    def is_last_visit(self, execution: Execution) -> bool:
        """Whether no later visit of its layer follows: nothing of it needs to be kept."""
        return not any(
            e.layer == execution.layer and e.visit > execution.visit for e in self.executions
        )


@dataclass(frozen=True, kw_only=True)
class PromptBatch:
    """What is known of the segments of a batch that are prompts, see `smeltscope.tasks.Prompts`."""

    answer: Sample  # the answer's tokens, at the end of each segment
    targets: Sample  # those of them that bear a symbol
    marks: Mapping[str, Tensor]  # (B, N, T), bool: N targets, padded as in `targets`
    labels: Mapping[str, np.ndarray]  # (B,)
    vocabulary: Sequence[str]  # the text of each token id
    stop: str  # what ends an answer


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The segments of one forward, padded on the right.

    Of prompts, `queries` are the rows of the targets: the positions that predict them.
    """

    shape: ModelShape
    input_ids: Tensor  # (B, T), on the model's device
    lengths: Tensor  # (B,), real tokens of each row
    queries: Sample  # sampled queries, spread over log position, never the first token
    tokens: Sample  # sampled tokens, all alike, never the first token
    regions: Regions  # parts that the keys of a query fall into
    category: np.ndarray  # (B,), index along `table_category`
    fold: np.ndarray  # (B,), index along `fold`
    prompts: PromptBatch | None = None
    _made: dict[Callable[[Batch], Any], Any] = field(default_factory=dict, init=False, repr=False)

    def once(self, make: Callable[[Batch], Any]) -> Any:
        """What `make` gives of this batch, made at the first of its executions."""
        if make not in self._made:
            self._made[make] = make(self)
        return self._made[make]

    @cached_property
    def real(self) -> Tensor:
        """Tokens that are no padding: (B, T), bool."""
        positions = self.lengths.new_tensor(range(self.input_ids.shape[1]))
        return positions < self.lengths[:, None]

    @cached_property
    def counted(self) -> Tensor:
        """Real tokens but the first, which is special in every model: (B, T), bool."""
        counted = self.real.clone()
        counted[:, 0] = False
        return counted


@dataclass(frozen=True, kw_only=True)
class Output:
    """What comes out at the end of a forward; logits are made for a stretch of tokens at a time."""

    model: PreTrainedModel  # what ran; nothing watches it any more
    hidden: Tensor  # (B, T, width), what the language-model head reads
    logits: Callable[[Tensor], Tensor]  # (B, t, width) -> (B, t, vocabulary)


class Probe(ABC):
    """A diagnostic. It holds its options and no results: what it measures goes into arrays.

    Subclasses are frozen dataclasses whose fields are the options; their docstring is the definition
    that is copied into the run file.
    """

    name: ClassVar[str]  # the command's name
    sites: ClassVar[tuple[str, ...]]  # where it reads
    reads_output: ClassVar[bool] = False  # whether `observe_output` is to be called
    resampled: ClassVar[str] = "documents"  # what its intervals draw again
    # Quantities that say which of several it is: a difference of two such numbers means nothing.
    names: ClassVar[tuple[str, ...]] = ()

    def check(self, model: PreTrainedModel) -> None:
        """Raises `SmeltscopeError` for a model of which it cannot be measured, before anything is run."""
        return

    def options(self) -> dict[str, Any]:
        """What changes its numbers, recorded in the run file."""
        return asdict(self)  # type: ignore[call-overload]

    def dimensions(self, shape: ModelShape) -> Mapping[str, np.ndarray]:
        """Dimensions of its own, with their coordinate values."""
        return {}

    @abstractmethod
    def variables(self, shape: ModelShape) -> Mapping[str, Variable]:
        """The arrays it fills; `segment` comes first in their dimensions."""

    def tables(self, shape: ModelShape) -> Mapping[str, Variable]:
        """Integer counts too big to keep for each segment, summed over the run by `table_category` and `fold`."""
        return {}

    def observe(
        self,
        arrays: Mapping[str, np.ndarray],
        batch: Batch,
        execution: Execution,
        sites: Mapping[str, Any],
        earlier: Mapping[int, Any],
    ) -> Any:
        """Reduce what one execution did into rows of `arrays`.

        Called at the end of each execution that has at least one of the probe's sites. `arrays` holds (B, ...)
        for each variable, NaN so far, and the whole table, 0 so far, for each table. `sites` maps each of its
        sites that this execution has to the value. What is returned is found in `earlier` at later
        executions of the same forward, under this execution's index, unless it is None.
        """
        return None

    def observe_output(
        self, arrays: Mapping[str, np.ndarray], batch: Batch, output: Output
    ) -> None:
        """Reduce the model's output; called after the last execution where `reads_output`."""
        return

    def progress(
        self, arrays: Mapping[str, np.ndarray], shape: ModelShape
    ) -> Mapping[str, tuple[float, float]]:
        """Headline numbers of one batch to show while the run goes on: {label: (sum, count)}."""
        return {}

    @abstractmethod
    def estimates(self, run: xr.DataTree, resampling: Resampling) -> Quantities:
        """What the rows of a run amount to: sums over counts, drawn again with other documents."""

    def sentence(self, summary: xr.Dataset) -> str:
        """The result in a few sentences, with numbers, chance level and interval."""
        return ""


def group_name(probe_name: str) -> str:
    """The probe's group in the run file: `attention-sink` -> `attention_sink`."""
    return probe_name.replace("-", "_")
