"""News of the engine's thread on their way to the event loop: at once after a pause, else gathered for a while."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

GATHER_S = 0.025
"""Seconds for which news are gathered while more keep coming; readers do not see the difference. Every awakening
of the event loop takes time from the engine, whose threads use all cores."""


class Courier:
    """Carries what any thread posts to the event loop, in order. Made on the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._posted: deque[Callable[[], None]] = deque()
        self._coming = False
        """True while the loop is going to look by itself."""
        self._timer: asyncio.TimerHandle | None = None

    def post(self, action: Callable[[], None], *, urgent: bool = False) -> None:
        """Have this called on the loop, within GATHER_S or, if it is urgent, at once. From any thread."""
        self._posted.append(action)
        if urgent or not self._coming:
            self._coming = True
            with contextlib.suppress(RuntimeError):  # the loop has ended with the server
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        """On the loop: hand over what is there, and look again later; a look that finds nothing is the last one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._posted:
            self._coming = False
            if not self._posted:  # what is posted from here on sees that nobody looks
                return
            self._coming = True
        self._timer = self._loop.call_later(GATHER_S, self._deliver)  # first, should one of the actions fail
        while self._posted:
            self._posted.popleft()()
