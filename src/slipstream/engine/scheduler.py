"""Which answers run now: first come, first served, up to `max_batch` rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from slipstream.engine.request import Answer


class Scheduler:
    """Answers wait in order and run until they end."""

    def __init__(self, max_batch: int) -> None:
        self.max_batch = max_batch
        self.waiting: deque[Answer] = deque()
        self.running: list[Answer] = []

    @property
    def idle(self) -> bool:
        """True when there is nothing to do."""
        return not self.waiting and not self.running

    def add(self, answers: Iterable[Answer]) -> None:
        """Queue answers."""
        self.waiting.extend(answers)

    def next(self) -> Answer | None:
        """The answer to start now, if a row is free; it is running from here on."""
        if not self.waiting or len(self.running) >= self.max_batch:
            return None
        answer = self.waiting.popleft()
        self.running.append(answer)
        return answer

    def remove(self, answer: Answer) -> bool:
        """Take an answer out; True when it was running."""
        if answer in self.running:
            self.running.remove(answer)
            return True
        if answer in self.waiting:
            self.waiting.remove(answer)
        return False
