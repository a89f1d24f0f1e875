"""A short measurement: what passes of different sizes cost on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from slipstream.core.tree import chain
from slipstream.targets.base import RowInput

if TYPE_CHECKING:
    from slipstream.targets.base import Target

ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
CONTEXT = 128
"""Tokens in the cache while passes are timed."""
PATIENCE_S = 20.0
"""Rounds stop here; every size is measured at least once."""


def pass_costs(target: Target, rows: Sequence[int] = ROWS, rounds: int = 5) -> list[dict[str, float]]:
    """Milliseconds of a pass over an anchor and a chain below it, by token rows; the best of interleaved rounds."""
    context = min(CONTEXT, target.max_context // 2)
    fitting = [size for size in rows if context + size < target.max_context]
    best = dict.fromkeys(fitting, float("inf"))
    slot = target.open()
    wait = getattr(target, "wait", lambda: None)
    try:
        target.prefill(slot, [1 + index % 7 for index in range(context)])
        begun = time.perf_counter()
        for done in range(rounds):
            if done and time.perf_counter() - begun > PATIENCE_S:
                break
            for size in fitting:
                inputs = [RowInput(slot, 1, chain([2 + index % 5 for index in range(size - 1)]))]
                started = time.perf_counter()
                target.forward(inputs)
                wait()  # a device goes on while the host is back already
                best[size] = min(best[size], time.perf_counter() - started)
    finally:
        target.close(slot)
    return [{"rows": size, "ms": round(1e3 * best[size], 3)} for size in fitting]
