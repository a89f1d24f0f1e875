"""From waiting to running: who gets a place, what the coming pass reads of whose prompt, and what follows from it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.engine.drafting import Drafting
from slipstream.engine.ledger import Ledger
from slipstream.engine.reading import ALONE_S, CHUNK_S, FEWEST_TOKENS, MOST_S, Pace
from slipstream.engine.request import Answer
from slipstream.engine.scheduler import Scheduler
from slipstream.targets.base import Read, Target
from slipstream.targets.slots import SlotPool, common_prefix

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

WORTH_SHARING = 32
"""Tokens of a prompt that another one must be about to read for this one to wait and share them; choices always do."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a pass reads of one prompt. begin: tokens of it that were read before. ends: whether it reads the rest."""

    answer: Answer
    read: Read
    begin: int
    ends: bool


class Reader:
    """Admits answers to the batch and reads their prompts in turns."""

    def __init__(
        self, target: Target, scheduler: Scheduler, slots: SlotPool, drafting: Drafting, ledger: Ledger
    ) -> None:
        self._target, self._scheduler, self._slots = target, scheduler, slots
        self._drafting, self._ledger = drafting, ledger
        self._pace = Pace()

    def admit(self) -> None:
        """Give places in the batch to those who came first, as long as there is memory for their prompts."""
        while (answer := self._scheduler.head()) is not None:
            shared, leader = self._shared(answer)
            if self._scheduler.admitted and not self._has_room(answer, shared):
                break
            self._scheduler.admit(leader)
            answer.started = True

    def _shared(self, answer: Answer) -> tuple[int, Answer | None]:
        """Leading tokens of the prompt that are cached or will be, and who is about to read them."""
        tokens, leader = answer.row.tokens, None
        if answer.request.replay:
            return 0, None
        shared = self._slots.shared(tokens)
        for other in self._scheduler.reading if self._target.row_invariant else ():
            ahead = min(common_prefix(other.row.tokens, tokens), len(tokens) - 1, len(other.row.tokens) - 1)
            if ahead >= shared + (1 if other.request is answer.request else WORTH_SHARING):
                shared, leader = ahead, other
        return shared, leader

    def _has_room(self, answer: Answer, shared: int) -> bool:
        """Whether the cache can take this prompt beside those that are being read; kept prefixes give way to it."""
        free = self._target.memory_bytes()["kv_free"] // self._target.kv_bytes_per_token + self._slots.kept_tokens
        unread = sum(len(other.row.tokens) - self._done(other) for other in self._scheduler.reading)
        return len(answer.row.tokens) - shared + unread < free

    def _done(self, answer: Answer) -> int:
        """Tokens of its prompt that were read."""
        return self._target.length(answer.row.slot) if answer.row.slot >= 0 else 0

    def turn(self, parts: Sequence[Part]) -> tuple[Answer, int] | None:
        """Whose prompt the coming pass reads beside these parts, and how many tokens at most; None for no more.

        Prompts are read for as long as running and waiting requests can bear. What is left of the time is used if it is
        enough for a part worth its while, and if nobody who is ready waits for it; newcomers may join those.
        """
        scheduler = self._scheduler
        answer = scheduler.next({part.answer for part in parts})
        if answer is None:
            return None
        alone = not scheduler.running and not scheduler.waiting and len(scheduler.reading) == 1
        done = self._done(answer)
        rest = len(answer.row.tokens) - 1 - done
        spent = sum(self._pace.seconds(part.begin, len(part.read.tokens)) for part in parts)
        most = self._pace.chunk(done, rest, (ALONE_S if alone else CHUNK_S) - spent, MOST_S - spent)
        ready = any(part.ends for part in parts) and answer.row.slot >= 0
        if parts and (ready or most < min(FEWEST_TOKENS, rest)):
            return None
        scheduler.turn(answer)
        return answer, max(most, FEWEST_TOKENS)

    def part(self, answer: Answer, most: int) -> Part | None:
        """At most so many tokens of a prompt; None when nothing of it is left to read, and the answer runs.

        Raises CacheFullError or another SlipstreamError when no slot is to be had.
        """
        row, request, started = answer.row, answer.request, time.perf_counter()
        if row.slot < 0:
            row.slot, reused = self._slots.take(row.tokens, reuse=not request.replay)
            self._ledger.started(answer, reused)
        done, whole = self._done(answer), len(row.tokens) - 1
        if request.progress is not None and done < whole:
            request.progress(done, whole)
        end = min(whole, done + most)
        wanted = self._drafting.features_wanted(row)
        last = None if wanted is None else max(0, min(end - done, wanted - (whole - end)))
        part = Part(answer, Read(row.slot, row.tokens[done:end], last), done, end == whole)
        if done == whole:
            self._ready(part)
            self.announce(part)
        request.timing.prefill_s += time.perf_counter() - started
        return part if done < whole else None

    def took_all(self, parts: Sequence[Part], features: Sequence[NDArray[np.float32] | None], seconds: float) -> None:
        """Several parts were read together in this time."""
        tokens = sum(len(part.read.tokens) for part in parts)
        for part, of_part in zip(parts, features, strict=True):
            self.took(part, of_part, seconds * len(part.read.tokens) / tokens)

    def took(self, part: Part, features: NDArray[np.float32] | None, seconds: float) -> None:
        """A part was read in this time."""
        started = time.perf_counter()
        read = part.read
        size = len(read.tokens)
        self._pace.took(part.begin, size, seconds)
        start = part.begin + (size - read.last if read.last is not None else 0)
        self._drafting.prefilled(part.answer.row, start, features)
        if part.ends:
            self._ready(part)
        part.answer.request.timing.prefill_s += seconds + time.perf_counter() - started

    def _ready(self, part: Part) -> None:
        """A prompt is read; from here on the answer is in every pass."""
        self._scheduler.run(part.answer)
        self._drafting.begin(part.answer.row)

    def announce(self, part: Part) -> None:
        """Tell whoever follows the prompt that it is read, if it is. What that call raises goes through."""
        progress, whole = part.answer.request.progress, len(part.read.tokens) + part.begin
        if part.ends and progress is not None:
            progress(whole, whole)
