"""One prompt with the attention of every head, stored or live, and the blocks of bytes in which pages get it.

Attention comes in two encodings: `f4`, little-endian float32, and `u1`, one byte b for the mass (b / 255)^2, which is off by
at most 1/255 of its square root. A whole pattern is the lower triangle alone, row after row: a query sees no later key.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import xarray as xr

from smeltscope.errors import SmeltscopeError
from smeltscope.probes.dyck_map import LEARNED_SINK

GROUP = "dyck_patterns"
THUMB = 48  # pixels on a side of a head's thumbnail
EXACT_TOKENS = 512  # a pattern of more tokens goes to the page in bytes
Encoding = Literal["f4", "u1"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Example:
    """A prompt with its gold answer, and where every head looks in it."""

    title: str
    tokens: Sequence[str]  # (T,)
    regions: np.ndarray  # (T,) numbers among region_names
    region_names: Sequence[str]  # the first is the start token's
    targets: np.ndarray  # (N,) positions of the answer's tokens that bear a symbol
    gold: Sequence[str]  # (N,)
    predicted: Sequence[str]  # (N,) the likeliest token, given the right ones before it
    probability: np.ndarray | None  # (N,) of the gold token; a run file does not hold it
    marks: Mapping[str, np.ndarray]  # (N, T) bool, what a target's row may look at
    layer: Sequence[int]  # (execution,)
    visit: Sequence[int]  # (execution,)
    rows: np.ndarray  # (execution, head, N, T) float32; NaN where a layer has fewer heads
    pattern: (
        Callable[[int, int, np.ndarray], np.ndarray] | None
    )  # (execution, head, queries) -> (queries, T)

    @property
    def right(self) -> list[bool]:
        return [g == p for g, p in zip(self.gold, self.predicted, strict=True)]

    @property
    def heads(self) -> list[int]:
        """How many heads each execution has: (execution,)."""
        return [int(n) for n in np.isfinite(self.rows[:, :, 0, 0]).sum(1)]

    def check(self, execution: int, head: int = 0) -> None:
        """Refuse an execution or head that is not there."""
        if not 0 <= execution < len(self.layer) or not 0 <= head < self.heads[execution]:
            raise SmeltscopeError(
                f"This prompt has no head {head} at execution {execution}: executions go from 0 to "
                f"{len(self.layer) - 1}, heads from 0 to {max(self.heads) - 1}."
            )


def stored_examples(run: xr.DataTree) -> int:
    """How many examples a run holds."""
    return run.children[GROUP].sizes["example"] if GROUP in run.children else 0


def stored_example(run: xr.DataTree, number: int) -> Example:
    """Example `number` of a run that `probe dyck` made."""
    if not 0 <= number < stored_examples(run):
        raise SmeltscopeError(
            f"The run has no example {number}: it holds {stored_examples(run)}, counted from 0."
        )
    data = run.children[GROUP].to_dataset(inherit=False).isel(example=number)
    labels = run.children[GROUP].coords
    region, target = data["key_region"].values, data["target"].values
    length, targets = int((region >= 0).sum()), target >= 0
    pattern = None
    if "pattern" in data:
        whole = data["pattern"].values  # (execution, head, query, key)

        def pattern(execution: int, head: int, queries: np.ndarray) -> np.ndarray:
            return whole[execution, head, queries, :length]

    marks = data["marked"].values.astype(bool)[targets, :, :length]  # (N, mark, T)
    names = [str(name) for name in labels["mark_name"].values]
    return Example(
        title=str(data["example_id"].item()),
        tokens=[str(token) for token in data["token"].values[:length]],
        regions=region[:length],
        region_names=[str(name) for name in labels["region_name"].values],
        targets=target[targets],
        gold=[str(text) for text in data["gold"].values[targets]],
        predicted=[str(text) for text in data["predicted"].values[targets]],
        probability=None,
        marks={name: marks[:, i] for i, name in enumerate(names)},
        layer=labels["layer"].values.tolist(),
        visit=labels["visit"].values.tolist(),
        rows=data["row"].values[:, :, targets, :length],
        pattern=pattern,
    )


def header_of(example: Example, key: str, encoding: Encoding | None = None) -> dict[str, Any]:
    """What a page needs to know of an example before it asks for blocks; `key` is the blocks' common name."""
    if encoding is None:
        encoding = "f4" if len(example.tokens) <= EXACT_TOKENS else "u1"
    return {
        "key": key,
        "title": example.title,
        "tokens": list(example.tokens),
        "region": np.asarray(example.regions).tolist(),
        "regions": [*example.region_names, LEARNED_SINK],
        "targets": [
            {
                "position": int(position),
                "gold": example.gold[i],
                "predicted": example.predicted[i],
                "right": example.right[i],
                "probability": None
                if example.probability is None
                else finite(example.probability[i]),
                "marks": {
                    name: np.flatnonzero(mark[i]).tolist() for name, mark in example.marks.items()
                },
            }
            for i, position in enumerate(example.targets)
        ],
        "layer": list(example.layer),
        "visit": list(example.visit),
        "heads": example.heads,
        "mass": finite(region_mass(example)),
        "thumb": len(_edges(len(example.tokens))),
        "whole": example.pattern is not None,
        "encoding": encoding,
    }


def region_mass(example: Example) -> np.ndarray:
    """Attention mass by region, mean over targets, last what goes to no token: (execution, head, region + 1)."""
    one_hot = np.asarray(example.regions)[:, None] == np.arange(len(example.region_names))
    mean = example.rows.mean(2, dtype=np.float64)  # (execution, head, T)
    mass = mean @ one_hot
    rest = np.where(np.isnan(mean[..., 0]), np.nan, np.maximum(1 - mean.sum(-1), 0))
    return np.concatenate([mass, rest[..., None]], axis=-1)


def thumbs_of(example: Example, execution: int) -> bytes:
    """Every head of an execution, small: `u1` (head, thumb, thumb), the largest mass of the queries and keys in each cell.

    The first key has cells of its own. In a prompt of more than `EXACT_TOKENS` the last query stands for all of a cell. Without
    whole patterns the targets' rows alone: (head, N, thumb).
    """
    example.check(execution)
    length = len(example.tokens)
    edges = _edges(length)
    queries, starts = np.arange(length), edges
    if length > EXACT_TOKENS:
        queries, starts = np.append(edges[1:], length) - 1, np.arange(len(edges))

    def small(head: int) -> np.ndarray:
        if example.pattern is None:
            return np.maximum.reduceat(example.rows[execution, head], edges, axis=1)
        by_query = np.maximum.reduceat(example.pattern(execution, head, queries), starts, axis=0)
        return np.maximum.reduceat(by_query, edges, axis=1)

    return encoded(np.stack([small(h) for h in range(example.heads[execution])]), "u1")


def rows_of(example: Example, execution: int, head: int) -> bytes:
    """The rows of the targets: `f4` (N, T)."""
    example.check(execution, head)
    return encoded(example.rows[execution, head], "f4")


def map_of(example: Example, execution: int, head: int, encoding: Encoding) -> bytes:
    """The lower triangle of a head's pattern, row after row: (T (T + 1) / 2,)."""
    example.check(execution, head)
    if example.pattern is None:
        raise SmeltscopeError(
            "The run holds the rows of the answer alone: its prompts were too long to keep whole patterns."
        )
    pattern = example.pattern(execution, head, np.arange(len(example.tokens)))
    return encoded(pattern[np.tri(len(pattern), dtype=bool)], encoding)


def encoded(mass: np.ndarray, encoding: Encoding) -> bytes:
    if encoding == "f4":
        return mass.astype("<f4").tobytes()
    return np.rint(255 * np.sqrt(np.clip(mass, 0, 1))).astype(np.uint8).tobytes()


def changes(example: Example, region: int = 0) -> np.ndarray:
    """Mass on a region at a layer's second visit minus that at its first: (layer, head); NaN without two."""
    mass = region_mass(example)[..., region]
    found = np.full((max(example.layer) + 1, mass.shape[1]), np.nan)
    at = {place: e for e, place in enumerate(zip(example.layer, example.visit, strict=True))}
    for layer in set(example.layer):
        if (layer, 2) in at:
            found[layer] = mass[at[layer, 2]] - mass[at[layer, 1]]
    return found


def _edges(length: int) -> np.ndarray:
    """Where the cells of a thumbnail begin; the first holds the first token alone."""
    if length <= THUMB:
        return np.arange(length)
    return np.append(0, 1 + np.arange(THUMB - 1) * (length - 1) // (THUMB - 1))


def finite(values: np.ndarray) -> Any:
    """Nested lists with None for NaN, which JSON lacks."""
    if values.ndim:
        return [finite(part) for part in values]
    return round(float(values), 7) if np.isfinite(values) else None
