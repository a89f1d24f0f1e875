"""News of the engine's thread on their way to the event loop: all that is posted before the loop looks goes at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable


class Courier:
    """Carries what any thread posts to the event loop, in order. Made on the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._posted: deque[Callable[[], None]] = deque()
        self._coming = False
        """True while the loop has been told and has not looked yet."""

    def post(self, action: Callable[[], None]) -> None:
        """Have this called on the loop soon. From any thread."""
        self._posted.append(action)
        if not self._coming:
            self._coming = True
            with contextlib.suppress(RuntimeError):  # the loop has ended with the server
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        """On the loop: hand over what is there; what is posted from here on tells the loop again."""
        self._coming = False
        try:
            while self._posted:
                self._posted.popleft()()
        finally:
            if self._posted:  # one of them has failed
                self._loop.call_soon(self._deliver)
