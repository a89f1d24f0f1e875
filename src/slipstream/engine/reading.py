"""How much of a prompt is read at once: as much as fits into a time, by the clock."""

from __future__ import annotations

CHUNK_S = 0.06
"""Seconds aimed at for what one step reads while other requests run or wait."""
MOST_S = 0.09
"""Seconds that it may take if that brings a prompt to its end; with the rows of the pass a tenth of a second."""
ALONE_S = 0.15
"""The same while nobody else is there: a newcomer waits no longer than this."""
FEWEST_TOKENS, MOST_TOKENS = 16, 512
"""Bounds of a chunk. Fewer tokens cost nearly as much, because all weights are read for any number."""
FIRST_TOKENS = 32
"""Tokens of a chunk while nothing is known."""
SMOOTHING = 0.5


class Pace:
    """Seconds per prompt token, as measured lately, by the position they stand at: each attends to all before it.

    Any chunks fill the cache alike; only the timing differs.
    """

    def __init__(self) -> None:
        self._per_token: dict[int, float] = {}
        """By `_zone`."""

    def tokens(self, position: int, seconds: float) -> int:
        """Tokens that can be read in this time from a position on."""
        return min(MOST_TOKENS, int(seconds / self._nearest(position))) if self._per_token else FIRST_TOKENS

    def seconds(self, position: int, tokens: int) -> float:
        """What so many tokens from a position on are expected to take, 0.0 while nothing is known."""
        return tokens * self._nearest(position)

    def _nearest(self, position: int) -> float:
        if not self._per_token:
            return 0.0
        zone = _zone(position)
        return self._per_token[min(self._per_token, key=lambda known: (known > zone, abs(known - zone)))]

    def chunk(self, position: int, rest: int, seconds: float, most: float) -> int:
        """Tokens to read from a position on: what fits into `seconds`, or the whole `rest` if that fits into `most`."""
        return rest if rest <= self.tokens(position, most) else self.tokens(position, seconds)

    def took(self, position: int, tokens: int, seconds: float) -> None:
        """A chunk was read. A slower pace than before counts at once, a faster one by and by."""
        if tokens < FEWEST_TOKENS or seconds <= 0:
            return
        zone, found = _zone(position), seconds / tokens
        before = self._per_token.get(zone, found)
        keep = SMOOTHING if before > found else 0.0
        self._per_token[zone] = keep * before + (1.0 - keep) * found


def _zone(position: int) -> int:
    """Positions of about equal cost: up to 255, 511, 1023, ..."""
    return (position >> 8).bit_length()
