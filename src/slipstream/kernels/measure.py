"""Short measurements of this machine: how fast it reads memory, how many threads are worth using."""

from __future__ import annotations

import time

import numpy as np

from slipstream.kernels import native
from slipstream.kernels.pack import pack

TOLERANCE = 0.25
"""How much slower more threads may be and still be used."""


def read_bandwidth(megabytes: int = 256, repeats: int = 4) -> float:
    """GB/s of the fastest of `repeats` reads of a fresh array by all threads (about .2 s)."""
    data = np.ones(megabytes * 250_000, np.float32)
    if native.core is not None:
        return float(data.nbytes / native.core.read_seconds(data, repeats) / 1e9)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        data.max()
        best = min(best, time.perf_counter() - start)
    return data.nbytes / best / 1e9


def settle_threads() -> None:
    """Choose the number of threads once per process, unless SLIPSTREAM_THREADS or `set_threads` has named it."""
    if not native.threads_settled:
        native.set_threads(choose_threads())


def choose_threads() -> int:
    """Time passes of one and of four rows on 1, 2, 4, ... usable cores (a fraction of a second); use the most threads
    within TOLERANCE of the fastest and return their number. No result depends on it.

    All usable cores are the rule: fewer only where more clearly hurt, because a neighbour that is busy just now may
    be gone in a moment.
    """
    if native.core is None:
        return 1
    most = int(native.core.usable_cores())
    candidates = sorted({1, most, *(2**k for k in range(9) if 2**k < most)})
    weights = pack("F32", np.zeros((16384, 4 * 1024), np.uint8), 1024)  # 64 MB: more than most caches hold
    inputs = [np.ones((rows, 1024), np.float32) for rows in (1, 4)]
    out = [np.empty((len(x), 16384), np.float32) for x in inputs]
    seconds = {}
    for count in candidates:
        native.core.set_threads(count)
        best = [float("inf")] * len(inputs)
        for _ in range(6):
            for k, x in enumerate(inputs):
                start = time.perf_counter()
                native.core.linear(x, weights.handle, out[k], None)
                best[k] = min(best[k], time.perf_counter() - start)
        seconds[count] = sum(best)
    fastest = min(seconds.values())
    chosen: int = max(count for count in candidates if seconds[count] <= (1 + TOLERANCE) * fastest)
    native.core.set_threads(chosen)
    return chosen
