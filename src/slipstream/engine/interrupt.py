"""Ctrl-C between steps, not inside them."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self


class Interrupts:
    """Inside, Ctrl-C waits for the end of the block, so that no bookkeeping is torn.

    Then the handler that stood before is called, which by default raises KeyboardInterrupt. A second Ctrl-C does not
    wait; where a cache slot changes hands in that very moment, the slot stays taken until the model is closed. Only
    signals to the main thread can be held back, and only those that Python handles; blocks may be nested.
    """

    def __init__(self) -> None:
        self._heard: list[tuple[int, FrameType | None]] = []
        self._before: Callable[[int, FrameType | None], Any] | None = None
        self._depth = 0

    def __enter__(self) -> Self:
        self._depth += 1
        before = signal.getsignal(signal.SIGINT)
        if self._depth == 1 and callable(before) and threading.current_thread() is threading.main_thread():
            with contextlib.suppress(ValueError):  # not the main interpreter
                signal.signal(signal.SIGINT, self._hear)
                self._before = before
        return self

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._heard.append((number, frame))
        if len(self._heard) > 1:
            self._let_through()

    def _let_through(self) -> None:
        heard, self._heard = self._heard, []
        for number, frame in heard:
            if self._before is not None:
                self._before(number, frame)

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0 and self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            try:
                self._let_through()
            finally:
                self._before = None
