"""What things cost here and now: seconds by size, learned from the clock while decoding."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
WEIGH_EVERY = 3
"""Once there are some, every so many new times make a new median."""
SIZES = 17
"""Sizes of a table at least."""
CHANGE = 0.03
"""Relative change of a level that makes the table worth rebuilding."""


class CostCurve:
    """Seconds as a function of a whole number (token rows of a pass, depth of a draft), never falling.

    Between sizes that were measured the costs follow a prior shape, or a straight line. The shape is
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
        self._table: list[float] = []

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
        times = self._times[size]
        times.append((self._clock, seconds))
        if len(times) < WEIGH_EVERY or self._clock % WEIGH_EVERY == 0:
            self._weigh(size)
        if self._clock % DOUBTFUL_AFTER == 0:
            self._forget()

    def _weigh(self, size: int) -> None:
        ordered = sorted([seconds for _, seconds in self._times[size]])
        level = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
        if abs(level - self._level.get(size, 0.0)) > self._change * level:
            self._level[size] = level
            self._table = []

    def _forget(self) -> None:
        for size, times in list(self._times.items()):
            age = (self._clock - times[-1][0]) / self._patience[size]
            if age >= STALE_AFTER or (len(times) < DOUBTFUL and age >= DOUBTFUL_AFTER):
                del self._times[size]
                self._forgotten[size] = self._level.pop(size)
                self._table = []
                continue
            while len(times) > 1 and self._clock - times[0][0] >= STALE_AFTER:
                times.popleft()
            self._weigh(size)

    def at(self, size: int) -> float:
        """Seconds for one size; 0.0 for size 0 and while nothing is known."""
        return self.table(size)[size]

    def table(self, largest: int) -> list[float]:
        """Seconds of the sizes 0..largest, and perhaps of further ones; to read only."""
        if len(self._table) <= largest:
            self._table = self._build(max(largest, SIZES))
        return self._table

    def _build(self, largest: int) -> list[float]:
        """The table; in plain numbers, because it is made every few steps and right after a pass numpy is slow."""
        table = [0.0] * (largest + 1)
        sure = sorted(size for size, times in self._times.items() if len(times) >= DOUBTFUL)
        curve = _Levels(sure, _pooled([(self._level[n], len(self._times[n])) for n in sure]))
        if len(sure) < len(self._times):
            measured = sorted(self._times)
            points = [(self._believed(size, curve), len(self._times[size])) for size in measured]
            curve = _Levels(measured, _pooled(points))
        for size in range(1, largest + 1 if self.known else 0):
            table[size] = max(curve.seconds(size, self._prior), table[size - 1])
        return table

    def _believed(self, size: int, sure: _Levels) -> float:
        """The level of a size. A few times above what the others let expect may be those of a busy moment: they are
        believed as far as there are enough of them.
        """
        level, count = self._level[size], len(self._times[size])
        if count >= DOUBTFUL or not sure.sizes or not sure.sizes[0] < size < sure.sizes[-1]:
            return level
        expected = sure.seconds(size, self._prior)
        return level if level <= expected else expected + (level - expected) * count / DOUBTFUL

    def _prior(self, size: int) -> float:
        """The prior curve, in seconds when initial costs were given, else in units of size 1."""
        straight = 1.0 + self.slope * (size - 1.0)
        if not self._initial:
            return straight
        last, seconds = 0, 0.0
        for known, cost in self._initial.items():
            if known >= size:
                share = (size - last) / (known - last)
                return cost if not last else seconds + share * (cost - seconds)
            last, seconds = known, cost
        # Beyond them costs go on as they rose, and at least by the slope.
        first, least = next(iter(self._initial.items()))
        rise = (seconds - least) / (last - first) if last > first else 0.0
        return max(seconds * max(straight / (1.0 + self.slope * (last - 1.0)), 1.0), seconds + rise * (size - last))


@dataclass(frozen=True, slots=True)
class _Levels:
    """Seconds of some sizes, both rising, and what they let expect of others."""

    sizes: list[int]
    levels: list[float]

    def seconds(self, size: int, prior: Callable[[int], float]) -> float:
        """Known, or hoped for: a size believed to be dear would never be tried.

        From one size to the next costs follow the prior shape, or a straight line where that is lower. Beyond the
        largest they rise at least half as fast as they did up to there: hopeful enough to find out that more is free,
        not so hopeful as to try every size in turn.
        """
        sizes, levels = self.sizes, self.levels
        if not sizes:
            return prior(size)
        above = bisect_left(sizes, size)
        if above < len(sizes) and sizes[above] == size:
            return levels[above]
        below = max(0, above - 1)
        seconds = levels[below] * prior(size) / prior(sizes[below])
        if above == len(sizes):
            if len(sizes) == 1:
                return seconds
            rise = BEYOND * (levels[-1] - levels[0]) / (sizes[-1] - sizes[0])
            return max(seconds, levels[-1] + rise * (size - sizes[-1]))
        if above == 0:
            return min(seconds, levels[0])
        share = (size - sizes[below]) / (sizes[above] - sizes[below])
        return min(seconds, levels[below] + share * (levels[above] - levels[below]))


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
