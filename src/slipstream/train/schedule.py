"""How a run's settings change as it goes: learning rate and steps unrolled, by the share of the run that is done."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slipstream.core.errors import InputError

WARM_UP = 0.03
FLOOR = 0.04
"""Learning rate at the end, as a share of its peak."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """peak: learning rate. unroll: steps in the end; `alone`: share of the run with the first step only."""

    peak: float = 1.5e-3
    unroll: int = 3
    alone: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.peak < 1:
            raise InputError(f"the learning rate is {self.peak}; it must be above 0 and below 1")
        if not 1 <= self.unroll <= 16:
            raise InputError(f"{self.unroll} steps are to be unrolled; it must be from 1 to 16")
        if not 0 <= self.alone <= 1:
            raise InputError(f"the share of one-step training is {self.alone}; it must be from 0 to 1")

    def rate(self, done: float) -> float:
        """Learning rate after a share `done` of the run: a short rise, then a cosine down to FLOOR."""
        if done < WARM_UP:
            return self.peak * max(done, 1e-3) / WARM_UP
        fall = (min(done, 1.0) - WARM_UP) / (1 - WARM_UP)
        return self.peak * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * fall)))

    def steps(self, done: float) -> int:
        """Steps to unroll."""
        return 1 if done < self.alone else self.unroll
