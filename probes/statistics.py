"""Averages over segments and their uncertainty: sums over counts, resampled by document."""

import math
import warnings
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import xarray as xr
from scipy.sparse import csr_array

DRAWS = 1000
LEVEL = 0.95
ROUNDING = 1e-6  # what float32 sums may be wrong by, as a share of their value


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Which document each segment belongs to, and which category each document."""

    of_segment: np.ndarray  # (segment,), index of the document
    category: np.ndarray  # (document,), index of the category

    @classmethod
    def from_labels(cls, document: np.ndarray, category: np.ndarray) -> "Documents":
        """From one document label and one category label for each segment."""
        _, first, of_segment = np.unique(document, return_index=True, return_inverse=True)
        _, codes = np.unique(np.asarray(category)[first], return_inverse=True)
        return cls(of_segment=of_segment, category=codes)

    def __len__(self) -> int:
        return len(self.category)

    @property
    def strata(self) -> np.ndarray:
        """Within what each document is drawn, (document,): its category; categories of one document are one stratum."""
        alone = np.bincount(self.category)[self.category] == 1  # (document,)
        return np.where(alone, self.category.max(initial=-1) + 1, self.category)

    @property
    def fewest(self) -> int:
        """The size of the smallest stratum; of n documents draws vary by sqrt(1 - 1 / n) of what they should."""
        return int(np.unique(self.strata, return_counts=True)[1].min(initial=len(self)))

    def add(self, sums: np.ndarray, rows: slice, values: np.ndarray) -> None:
        """Add the values of some segments to the sums of their documents, (document, ...); NaN counts nothing."""
        of = self.of_segment[rows]
        members = csr_array((np.ones(len(of)), (of, np.arange(len(of)))), (len(self), len(of)))
        flat = np.nan_to_num(values).reshape(len(of), math.prod(values.shape[1:]))
        sums += (members @ flat).reshape(sums.shape)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A value, and as many of it as the bootstrap drew. `draws` is (draw, ...) where `value` is (...)."""

    value: np.ndarray
    draws: np.ndarray

    def __sub__(self, other: "Estimate") -> "Estimate":
        """The paired difference: both were drawn with the same documents."""
        return Estimate(value=self.value - other.value, draws=self.draws - other.draws)

    def __getitem__(self, index: object) -> "Estimate":
        """A part of the value: `estimate[3]`, `estimate[:, 2]`."""
        index = index if isinstance(index, tuple) else (index,)
        return Estimate(value=self.value[index], draws=self.draws[(slice(None), *index)])

    def mean(self, axis: int = -1) -> "Estimate":
        """The mean over an axis of the value (heads, say), entries without a value left out."""
        with np.errstate(invalid="ignore"):
            inner = axis if axis < 0 else axis + 1
            return Estimate(value=_mean(self.value, axis), draws=_mean(self.draws, inner))

    def sum(self, axis: int = -1) -> "Estimate":
        """The sum over an axis of the value, entries without a value left out."""
        inner = axis if axis < 0 else axis + 1
        return Estimate(value=np.nansum(self.value, axis), draws=np.nansum(self.draws, inner))

    def exp(self) -> "Estimate":
        """The perplexity, of a mean loss in nats."""
        with np.errstate(over="ignore"):
            return Estimate(value=np.exp(self.value), draws=np.exp(self.draws))

    def where(self, keep: np.ndarray) -> "Estimate":
        """NaN wherever `keep`, which broadcasts against the value, is False."""
        return Estimate(
            value=np.where(keep, self.value, np.nan), draws=np.where(keep, self.draws, np.nan)
        )

    def flatten(self) -> "Estimate":
        """All axes of the value as one."""
        return Estimate(
            value=self.value.ravel(), draws=self.draws.reshape(len(self.draws), self.value.size)
        )

    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        """The percentile interval at 95 %; NaN where it cannot be drawn (a single document)."""
        tail = 100 * (1 - LEVEL) / 2
        if len(self.draws) == 0:
            nothing = np.full_like(self.value, np.nan)
            return nothing, nothing
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # nothing but NaN gives NaN
            low, high = np.nanpercentile(self.draws, [tail, 100 - tail], axis=0)
        return low, high

    def simultaneous_interval(self) -> tuple[np.ndarray, np.ndarray]:
        """An interval for each entry such that with 95 % confidence all hold at once (max-t).

        value -+ t * sd, where sd is the standard deviation of the entry's draws and t the 95 %
        quantile, over draws, of the largest |draw - value| / sd of any entry. Entries that vary by rounding
        errors alone keep their value and widen no other; without draws it is NaN. Few documents make it
        a little too narrow: 50 heads of 200 documents hold together in 94 % of samples, of 40 documents in 88 %.
        Source: Romano & Wolf, Econometrica 73 (2005) 1237.
        """
        if len(self.draws) == 0:
            nothing = np.full_like(self.value, np.nan)
            return nothing, nothing
        with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
            warnings.simplefilter("ignore", RuntimeWarning)
            sd = np.nanstd(self.draws, axis=0)
            sd = np.where(sd <= ROUNDING * np.abs(self.value), 0.0, sd)
            t = np.abs(self.draws - self.value) / np.where(sd > 0, sd, np.nan)
            t = t.reshape(len(t), -1)
            largest = np.nanmax(np.where(np.isfinite(t), t, 0.0), axis=1)
            reach = np.quantile(largest, LEVEL) * sd
        return self.value - reach, self.value + reach


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """An estimate with the names of its axes. `family`: its entries are judged together, so it has simultaneous intervals.

    `trials`: of a share, out of how many things that are drawn, for where they are all alike (see `interval`).
    """

    dims: tuple[str, ...]
    estimate: Estimate
    family: bool = False
    trials: np.ndarray | None = None

    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        """That of the estimate, but of a share of exactly 0 or 1 Clopper and Pearson's: draws of things that are all alike are
        alike too, whatever the others may be. Of n things it ends at tail^(1 / n), with tail = 2.5 %."""
        low, high = self.estimate.interval()
        if self.trials is None:
            return low, high
        value, known = self.estimate.value, np.isfinite(low)
        with np.errstate(divide="ignore"):
            end = ((1 - LEVEL) / 2) ** (1 / self.trials)
        high = np.where(known & (value == 0), 1 - end, high)
        low = np.where(known & (value == 1), end, low)
        return low, high


Quantities = Mapping[str, Quantity]


def quantities(
    dims: tuple[str, ...],
    estimates: Mapping[str, Estimate],
    family: Container[str] = (),
    trials: Mapping[str, Estimate] | None = None,
) -> Quantities:
    """Estimates of the same dimensions, by name; those named in `family` get simultaneous intervals, those in `trials` are
    shares of so many things."""
    return {
        name: Quantity(
            dims=dims,
            estimate=estimate,
            family=name in family,
            trials=trials[name].value if trials and name in trials else None,
        )
        for name, estimate in estimates.items()
    }


@dataclass(frozen=True, kw_only=True, eq=False)
class Resampling:
    """The documents of a run and how often each bootstrap draw takes each of them."""

    documents: Documents
    weights: np.ndarray  # (draw, document)
    seed: int  # of the draws

    @classmethod
    def of_run(cls, run: xr.DataTree, *, draws: int = DRAWS, seed: int = 0) -> "Resampling":
        """Documents drawn with replacement within each category."""
        segments = run["segments"].dataset
        documents = Documents.from_labels(segments["document"].values, segments["category"].values)
        weights = bootstrap_weights(documents, draws=draws, seed=seed)
        return cls(documents=documents, weights=weights, seed=seed)

    def ratio(self, numerator: np.ndarray, denominator: np.ndarray) -> Estimate:
        """sum of `numerator` / sum of `denominator` over segments, see `ratio`."""
        return ratio(numerator, denominator, self.documents, self.weights)


def exact(value: np.ndarray) -> Estimate:
    """A value without uncertainty from the choice of documents: a count, a chance level."""
    value = np.asarray(value, dtype=np.float64)
    return Estimate(value=value, draws=np.empty((0, *value.shape)))


def bootstrap_weights(documents: Documents, *, draws: int = DRAWS, seed: int = 0) -> np.ndarray:
    """How often each document is drawn, (draw, document): with replacement, within each category.

    The intervals made with them cover the choice of documents, not the training seed. Categories of
    one document have nothing to draw within: they are drawn from together, as one. With one
    document in all there is nothing to draw: (0, document).
    """
    rng = np.random.default_rng(seed)
    if len(documents) < 2:
        return np.zeros((0, len(documents)), dtype=np.uint16)
    strata = documents.strata
    weights = np.zeros((draws, len(documents)), dtype=np.uint16)  # few are drawn often
    for stratum in np.unique(strata):
        members = np.flatnonzero(strata == stratum)
        size = len(members)
        weights[:, members] = rng.multinomial(size, np.full(size, 1 / size), size=draws)
    return weights


def ratio(
    numerator: np.ndarray, denominator: np.ndarray, documents: Documents, weights: np.ndarray
) -> Estimate:
    """sum over segments of `numerator` / sum of `denominator`, and the same for every bootstrap draw.

    Both are (segment, ...); the denominator broadcasts over trailing axes that it lacks. Where the
    numerator is NaN (a head that a layer lacks, a segment too short) nothing is counted; 0 / 0 is NaN.
    """
    missing = (1,) * (numerator.ndim - denominator.ndim)
    below = denominator.reshape(denominator.shape + missing)
    up, down = (np.zeros((len(documents), *numerator.shape[1:])) for _ in range(2))
    for rows in _blocks(numerator):
        part = np.asarray(numerator[rows], dtype=np.float64)
        counted = np.where(np.isfinite(part), below[rows], 0.0)
        documents.add(up, rows, part)
        documents.add(down, rows, counted)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = up.sum(0) / down.sum(0)
        drawn = _weighted(weights, up) / _weighted(weights, down)
    return Estimate(value=value, draws=drawn)


def _weighted(weights: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """Sums of documents (document, ...) as each draw weighs them: (draw, ...)."""
    drawn = np.empty((len(weights), *sums.shape[1:]))
    for first in range(0, len(weights), 100):  # all in float64 could be larger than the run
        some = slice(first, first + 100)
        drawn[some] = np.tensordot(weights[some].astype(np.float64), sums, 1)
    return drawn


def _blocks(values: np.ndarray) -> Iterator[slice]:
    """Its rows, some megabytes in float64 at a time."""
    step = max(1, 2**19 // max(1, math.prod(values.shape[1:])))
    for start in range(0, len(values), step):
        yield slice(start, start + step)


def _mean(values: np.ndarray, axis: int) -> np.ndarray:
    """numpy's nanmean without its warning for slices that hold nothing."""
    count = np.isfinite(values).sum(axis)
    with np.errstate(invalid="ignore"):
        return np.where(count > 0, np.nansum(values, axis) / np.maximum(count, 1), np.nan)
