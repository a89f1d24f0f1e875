"""When an answer ends. Asked after every single token, so that a block is cut where plain decoding ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from slipstream.core.params import SamplingParams

ENDED_WELL = ("stop", "length")
"""Finish reasons of answers that came to their own end."""


@dataclass(frozen=True, slots=True)
class End:
    """Why an answer ended: its finish_reason; the stop string, stop token id or message; the text length to keep."""

    reason: str
    cause: int | str | None = None
    keep_text: int | None = None


class StopRules:
    """Ends of one answer: end ids, stop token ids, stop strings, budget.

    room: tokens the answer may have at most, by max_tokens and by the end of the context.
    Stops and end ids that come before token number min_tokens do not count.
    """

    def __init__(self, params: SamplingParams, end_ids: Iterable[int], room: int) -> None:
        self.room = room
        self._min_tokens = params.min_tokens
        self._end_ids = frozenset() if params.ignore_eos else frozenset(end_ids)
        self._stop_ids = frozenset(params.stop_token_ids or ())
        self._stops = tuple(params.stop or ())

    def by_token(self, count: int, token: int) -> End | None:
        """End at token number `count` (from 1) because of its id; the text of that token is then left out."""
        if count < self._min_tokens:
            return None
        if token in self._stop_ids:
            return End("stop", token)
        return End("stop") if token in self._end_ids else None

    def by_text(self, count: int, text: str, before: int) -> End | None:
        """End because the last token, which grew the text from length `before`, completed a stop string.

        Among the stops it completed the one that starts first wins, then the first in the list.
        """
        if not self._stops or count < self._min_tokens:
            return None
        best: tuple[int, str] | None = None
        for stop in self._stops:
            # An occurrence that was complete earlier did not count, so only new ends are searched.
            start = text.find(stop, max(0, before - len(stop) + 1))
            if start >= 0 and (best is None or start < best[0]):
                best = (start, stop)
        return None if best is None else End("stop", best[1], best[0])

    def by_budget(self, count: int) -> End | None:
        """End because there is no room for another token."""
        return End("length") if count >= self.room else None

    def held_back(self, text: str) -> int:
        """Characters at the end of the text that may be the beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
