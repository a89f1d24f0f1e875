"""Which answers run now: first come, first served, up to `max_batch` rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from slipstream.engine.request import Answer


class Scheduler:
    """Answers wait in order and run until they end, or until they must wait again for memory."""

    def __init__(self, max_batch: int) -> None:
        self.max_batch = max_batch
        self.waiting: deque[Answer] = deque()
        self.running: list[Answer] = []
        self._full = False

    @property
    def idle(self) -> bool:
        """True when there is nothing to do."""
        return not self.waiting and not self.running

    def add(self, answers: Iterable[Answer]) -> None:
        """Queue answers."""
        self.waiting.extend(answers)

    def next(self) -> Answer | None:
        """The answer to start now, if a row is free; it is running from here on."""
        if not self.waiting or len(self.running) >= self.max_batch or (self._full and self.running):
            return None
        answer = self.waiting.popleft()
        self.running.append(answer)
        return answer

    def remove(self, answer: Answer) -> None:
        """Take an answer out, wherever it is."""
        if answer in self.running:
            self.running.remove(answer)
            self._full = False
        elif answer in self.waiting:
            self.waiting.remove(answer)

    def put_back(self, answer: Answer, full: bool = True) -> None:
        """This answer is the next to start. full: there is no memory for it until another one has ended."""
        self.remove(answer)
        self.waiting.appendleft(answer)
        self._full = full
