"""What things cost here and now: seconds by size, learned from the clock while decoding."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from slipstream.core.errors import InputError

WINDOW = 15
"""Times remembered per size; their median stands for them, so single disturbances do not count."""
STALE_AFTER = 400
"""Observations after which a time is forgotten: what a pass costs changes with the length of the context."""
DOUBTFUL = 5
DOUBTFUL_AFTER = 100
"""A size measured fewer times than that is forgotten sooner: one bad time must not rule it out for long."""
CONFIRMED = 0.7
"""A forgotten size that measures at least this part of its old time again is kept twice as long from then on."""
LONGEST = 16
"""Times longer than at first, at most."""
BEYOND = 0.5
"""Part of the rise seen so far that is expected of sizes beyond the largest measured one."""
CHANGE = 0.03
"""Relative change of a level that makes the table worth rebuilding."""


class CostCurve:
    """Seconds as a function of a whole number (token rows of a pass, depth of a draft), never falling.

    From each size that was measured to the next the costs follow a prior shape, scaled to the lower one. The shape is
    1 + slope * (n - 1), or `initial`: seconds by size from an earlier measurement, which count until sizes near them
    are measured. A larger size that measured faster is pooled with its neighbours: what is cheaper for more work is
    noise. change: relative change of a level that makes the table worth rebuilding.
    """

    def __init__(self, slope: float, initial: Mapping[int, float] | None = None, change: float = CHANGE):
        if initial and not all(size >= 1 and seconds > 0 for size, seconds in initial.items()):
            raise InputError(f"initial costs are {dict(initial)}; sizes must be 1 or more and seconds positive")
        self.slope, self._change = slope, change
        self._initial = dict(sorted((initial or {}).items()))
        self._times: dict[int, deque[tuple[int, float]]] = {}
        self._level: dict[int, float] = {}
        self._forgotten: dict[int, float] = {}
        self._patience: dict[int, int] = {}
        self._clock = 0
        self._table: NDArray[np.float64] = np.zeros(0)

    @property
    def known(self) -> bool:
        """True when there is anything to go by."""
        return bool(self._times or self._initial)

    def measured(self, size: int) -> bool:
        """True when this size was measured, lately or beforehand."""
        return size in self._times or size in self._initial

    @property
    def largest(self) -> int:
        """The largest size that was measured lately, 0 for none."""
        return max(self._times, default=0)

    def observe(self, size: int, seconds: float) -> None:
        """One measurement."""
        if seconds <= 0:
            return
        self._clock += 1
        if size not in self._times:
            self._times[size] = deque(maxlen=WINDOW)
            confirmed = seconds >= CONFIRMED * self._forgotten.get(size, float("inf"))
            self._patience[size] = min(2 * self._patience[size], LONGEST) if confirmed else 1
        self._times[size].append((self._clock, seconds))
        self._weigh(size)
        if self._clock % DOUBTFUL_AFTER == 0:
            self._forget()

    def _weigh(self, size: int) -> None:
        ordered = sorted([seconds for _, seconds in self._times[size]])
        level = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
        if abs(level - self._level.get(size, 0.0)) > self._change * level:
            self._level[size] = level
            self._table = np.zeros(0)

    def _forget(self) -> None:
        for size, times in list(self._times.items()):
            age = (self._clock - times[-1][0]) / self._patience[size]
            if age >= STALE_AFTER or (len(times) < DOUBTFUL and age >= DOUBTFUL_AFTER):
                del self._times[size]
                self._forgotten[size] = self._level.pop(size)
                self._table = np.zeros(0)
                continue
            while len(times) > 1 and self._clock - times[0][0] >= STALE_AFTER:
                times.popleft()
            self._weigh(size)

    def at(self, size: int) -> float:
        """Seconds for one size; 0.0 for size 0 and while nothing is known."""
        self._ensure(size)
        return float(self._table[size])

    def table(self, largest: int) -> list[float]:
        """Seconds of the sizes 0..largest."""
        self._ensure(largest)
        seconds: list[float] = self._table[: largest + 1].tolist()
        return seconds

    def _ensure(self, largest: int) -> None:
        if len(self._table) <= largest:
            self._table = self._build(max(largest, 16))

    def _build(self, largest: int) -> NDArray[np.float64]:
        table = np.zeros(largest + 1)
        if not self.known:
            return table
        sizes = np.arange(1, largest + 1, dtype=np.float64)
        shape = self._shape(sizes)
        if self._times:
            measured = sorted(self._times)
            levels = _pooled([(self._level[n], len(self._times[n])) for n in measured])
            ratios = np.array(levels) / self._shape(np.array(measured, dtype=np.float64))
            # Between two measured sizes the hopeful assumption is the cost of the lower one: real curves have steps,
            # and a size believed to be dear would never be tried.
            below = np.maximum(np.searchsorted(measured, sizes, side="right") - 1, 0)
            above = np.append(levels, np.inf)[np.searchsorted(measured, sizes, side="left")]
            shape = np.minimum(shape * ratios[below], above)
            if len(measured) > 1:
                # Beyond the largest measured size costs rise at least half as fast as they did up to there: hopeful
                # enough to find out that more is free, not so hopeful as to try every size in turn.
                span = measured[-1] - measured[0]
                rise = BEYOND * (levels[-1] - levels[0]) / span
                shape = np.maximum(shape, np.where(sizes > measured[-1], levels[-1] + rise * (sizes - measured[-1]), 0))
        table[1:] = np.maximum.accumulate(shape)
        return table

    def _shape(self, sizes: NDArray[np.float64]) -> NDArray[np.float64]:
        """The prior curve, in seconds when initial costs were given, else in units of size 1."""
        straight = 1.0 + self.slope * (sizes - 1.0)
        if not self._initial:
            return straight
        known = np.array(list(self._initial), dtype=np.float64)
        inside = np.interp(sizes, known, np.array(list(self._initial.values())))
        result: NDArray[np.float64] = inside * np.maximum(straight / (1.0 + self.slope * (known[-1] - 1.0)), 1.0)
        return result


def _pooled(points: list[tuple[float, int]]) -> list[float]:
    """The nearest never-falling sequence to values with weights (pool adjacent violators)."""
    pools: list[tuple[float, int, int]] = []  # value, weight, points in it
    for value, weight in points:
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (low, low_weight, low_size), (high, high_weight, high_size) = pools[-2:]
            total = low_weight + high_weight
            pools[-2:] = [((low * low_weight + high * high_weight) / total, total, low_size + high_size)]
    return [value for value, _, size in pools for _ in range(size)]
