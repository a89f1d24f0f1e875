"""Statistics that the measurements share: paired ratios of interleaved runs, and how far to trust them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A statistic of `count` paired ratios with its bootstrap interval."""

    value: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f}-{self.high:.3f})"


def paired(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Ratio of each run to the run of the other side that lay next to it in time."""
    return [mine / other for mine, other in zip(ours, theirs, strict=True)]


def geometric_mean(values: Sequence[float]) -> float:
    """NaN without values."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else float("nan")


def median(values: Sequence[float], seed: int = 0) -> Estimate:
    """The median, and the interval in which it lies with 95 % confidence when the values are drawn again."""
    return _interval(float(np.median(values)), np.median(_resampled(values, seed), axis=-1), len(values))


def over_groups(groups: Mapping[str, Sequence[float]], seed: int = 0) -> Estimate:
    """Geometric mean over groups of each group's median, groups weighing the same; values are drawn within groups."""
    draws = [_resampled(values, seed + place) for place, values in enumerate(groups.values())]
    medians = np.log([np.median(drawn, axis=-1) for drawn in draws])
    value = geometric_mean([float(np.median(values)) for values in groups.values()])
    return _interval(value, np.exp(medians.mean(axis=0)), sum(map(len, groups.values())))


def _resampled(values: Sequence[float], seed: int) -> NDArray[np.float64]:
    known = np.asarray(values, np.float64)
    places = np.random.default_rng(seed).integers(0, len(known), (RESAMPLES, len(known)))
    drawn: NDArray[np.float64] = known[places]
    return drawn


def _interval(value: float, drawn: NDArray[np.float64], count: int) -> Estimate:
    tail = 50.0 * (1.0 - CONFIDENCE)
    low, high = np.percentile(drawn, (tail, 100.0 - tail))
    return Estimate(value, float(low), float(high), count)
