"""Short measurements: what passes of different sizes cost on this machine, and keeping them for the next start."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.core.tree import chain
from slipstream.models.home import home
from slipstream.targets.base import RowInput

if TYPE_CHECKING:
    from slipstream.targets.base import Target

ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
CONTEXT = 128
"""Tokens in the cache while passes are timed."""
PATIENCE_S = 20.0
"""Measuring stops here."""
FEWEST = 4
"""Sizes up to this one are measured however long it takes."""


START_ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
START_CONTEXT = 16
START_S = 1.0
"""The measurement at the first start ends after about this time."""
START_ROUNDS = 5
AGAIN_S, AGAIN_ROUNDS = 0.15, 2
"""The measurement at later starts."""


def pass_costs(target: Target, rounds: int = 5) -> list[dict[str, float]]:
    """Milliseconds of a pass over an anchor and a chain below it, by token rows; the best of interleaved rounds."""
    best = fastest(target, ROWS, rounds, CONTEXT, PATIENCE_S)
    return [{"rows": size, "ms": round(1e3 * seconds, 3)} for size, seconds in best.items()]


def fastest(target: Target, rows: Sequence[int], rounds: int, context: int, patience: float) -> dict[int, float]:
    """Seconds of the fastest pass by token rows, after `context` tokens; without patience only of the smaller sizes."""
    context = min(context, target.max_context // 2)
    fitting = [size for size in rows if context + size < target.max_context]
    best = dict.fromkeys(fitting, float("inf"))
    slot = target.open()
    try:
        target.prefill(slot, [1 + index % 7 for index in range(context)])
        begun = time.perf_counter()
        for done in range(rounds):
            for size in fitting:
                if time.perf_counter() - begun > patience and (done or size > FEWEST):
                    return {size: seconds for size, seconds in best.items() if seconds < float("inf")}
                inputs = [RowInput(slot, 1, chain([2 + index % 5 for index in range(size - 1)]))]
                started = time.perf_counter()
                target.forward(inputs)
                target.wait()  # a device goes on while the host is back already
                best[size] = min(best[size], time.perf_counter() - started)
    finally:
        target.close(slot)
    return best


def start_costs(target: Target, key: Sequence[object]) -> dict[int, float]:
    """Seconds of a pass by token rows, for a controller to begin with: the fastest of this start and earlier ones.

    A busy moment makes passes look dear, never cheap, so every start times a few and the fastest of each size is kept.
    key: all that the costs depend on (model, kernels, threads, version); equal keys share a measurement. A file that
    cannot be read is made anew, one that cannot be written is not needed.
    """
    path = home() / "costs" / f"{hashlib.sha256(repr(tuple(key)).encode()).hexdigest()[:24]}.json"
    known = _read(path) or {}
    rounds, patience = (AGAIN_ROUNDS, AGAIN_S) if known else (START_ROUNDS, START_S)
    now = fastest(target, START_ROWS, rounds, START_CONTEXT, patience)
    timed = {size: seconds for size, seconds in now.items() if seconds > 0}  # a coarse clock shows nothing
    best = {size: min(seconds, known.get(size, seconds)) for size, seconds in (known | timed).items()}
    if best != known:
        _write(path, best)
    return best


def _read(path: Path) -> dict[int, float] | None:
    try:
        found = {int(size): float(seconds) for size, seconds in json.loads(path.read_text())["seconds"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return found if 1 in found and all(size >= 1 and 0 < cost < 3600 for size, cost in found.items()) else None


def _write(path: Path, costs: dict[int, float]) -> None:
    aside = path.with_name(f"{path.name}.{os.getpid()}.part")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps({"seconds": costs}))
        aside.replace(path)
