"""How much of a prompt is read at once: as much as fits into a time, by the clock."""

from __future__ import annotations

CHUNK_S = 0.08
"""Seconds aimed at for what one step reads while other requests run or wait; with noise it stays below 0.1."""
ALONE_S = 0.2
"""The same while nobody else is there: a newcomer waits no longer than this."""
FIRST_TOKENS = 32
"""Tokens of a chunk while nothing is known."""
FEWEST_TOKENS, MOST_TOKENS = 8, 512
"""Bounds of a chunk. Chunks shorter than the first teach nothing: they cost what the reading of all weights costs."""
SMOOTHING = 0.5


class Pace:
    """Seconds per prompt token, as measured lately. Any chunks fill the cache alike; only the timing differs."""

    def __init__(self) -> None:
        self._per_token = 0.0

    def tokens(self, seconds: float) -> int:
        """Tokens that can be read in this time."""
        if not self._per_token:
            return FIRST_TOKENS
        return max(FEWEST_TOKENS, min(MOST_TOKENS, int(seconds / self._per_token)))

    def took(self, tokens: int, seconds: float) -> None:
        """A chunk was read. A slower pace than before counts at once, a faster one by and by."""
        if tokens < FEWEST_TOKENS:
            return
        found = seconds / tokens
        keep = SMOOTHING if self._per_token > found else 0.0
        self._per_token = keep * self._per_token + (1.0 - keep) * found
