"""Which answers run now: first come, first served, up to `max_batch` rows; and whose prompt is read next."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from slipstream.engine.request import Answer


class Scheduler:
    """Answers wait in order, then their prompts are read in turns, then they run until they end.

    waiting -> reading -> running; for want of memory an answer may have to go back and wait again. All three together
    are what is alive here; reading and running hold no more than `max_batch`.
    """

    def __init__(self, max_batch: int) -> None:
        self.max_batch = max_batch
        self.waiting: deque[Answer] = deque()
        self.reading: list[Answer] = []
        """In the order of their next turns; those that had none yet are in `_fresh` as well."""
        self.running: list[Answer] = []
        self._fresh: set[Answer] = set()
        self._fresh_next = True
        self._leaders: dict[Answer, Answer] = {}
        self._full = False

    @property
    def idle(self) -> bool:
        """True when there is nothing to do."""
        return not (self.waiting or self.reading or self.running)

    @property
    def admitted(self) -> list[Answer]:
        """All that hold a place in the batch."""
        return self.running + self.reading

    def add(self, answers: Iterable[Answer]) -> None:
        """Queue answers."""
        self.waiting.extend(answers)

    def head(self) -> Answer | None:
        """The answer whose prompt may be read from now on, if there is a place for it."""
        admitted = len(self.running) + len(self.reading)
        if not self.waiting or admitted >= self.max_batch or (self._full and admitted):
            return None
        return self.waiting[0]

    def admit(self, leader: Answer | None = None) -> None:
        """The head of the queue gets its place. leader: one that is reading a prompt this one can share; it waits."""
        answer = self.waiting.popleft()
        self.reading.append(answer)
        self._fresh.add(answer)
        if leader is not None:
            self._leaders[answer] = leader

    def next(self, beside: Collection[Answer] = ()) -> Answer | None:
        """Whose prompt is read next, `beside` those whose turn it is already. Prompts take turns; every other turn goes
        to one that had none, if there is any.

        So a short prompt waits for one chunk of a long one, and no stream of short ones keeps a long one from going on.
        """
        ready = [
            answer for answer in self.reading if answer not in beside and self._leaders.get(answer) not in self.reading
        ]
        fresh = next((answer for answer in ready if answer in self._fresh), None)
        begun = next((answer for answer in ready if answer not in self._fresh), None)
        return fresh if fresh is not None and (self._fresh_next or begun is None) else begun

    def turn(self, answer: Answer) -> None:
        """It is this one's turn."""
        self._fresh_next = answer not in self._fresh
        self._fresh.discard(answer)
        self._leaders.pop(answer, None)
        self.reading.remove(answer)
        self.reading.append(answer)

    def run(self, answer: Answer) -> None:
        """Its prompt is read; from here on it is in every pass."""
        self.reading.remove(answer)
        self.running.append(answer)

    def remove(self, answer: Answer) -> None:
        """Take an answer out, wherever it is."""
        if answer in self.running or answer in self.reading:
            (self.running if answer in self.running else self.reading).remove(answer)
            self._fresh.discard(answer)
            # Who waited for it goes on alone: it may come back and wait for one of them.
            self._leaders = {one: by for one, by in self._leaders.items() if answer not in (one, by)}
            self._full = False
        elif answer in self.waiting:
            self.waiting.remove(answer)

    def put_back(self, answer: Answer) -> None:
        """This answer is the next to start; there is no memory for it until another one has ended."""
        self.remove(answer)
        self.waiting.appendleft(answer)
        self._full = True
