"""What a head remembers of texts: keys and values of committed tokens, and features that it has not read yet.

Entry i of a cache holds the features of one token and the token after it. What a head is not asked about it does not
read: of features that wait only the last are kept, because what lies far back hardly changes a guess. A row whose
prefix the target had in its own cache has no features for it either; the head then goes on from the longest text it
remembers, or from nothing. Positions are counted by entries: rotary attention sees distances only, and a gap makes
guesses worse, never wrong.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.core.errors import InputError
from slipstream.kernels.passes import BLOCK
from slipstream.targets.native.kv import BlockPool, Slots
from slipstream.targets.slots import common_prefix

SLOTS = 64
"""Texts remembered at once, those of running rows among them."""
LOOK_BACK = 32
"""Features that wait at most: the head of SmolLM2 saves 2 % fewer passes after the last 32 tokens of a prompt than
after all of it, and reads them in half the time of 64."""
KEPT = 4
"""Finished texts that stay for prompts that begin alike."""


@dataclass(slots=True, eq=False)
class Memory:
    """One text. tokens: the row's own growing list, a copy once it has ended. places: the token of each entry.

    waiting: features that are not read yet, [parts][tokens, width], of the tokens before `next`.
    """

    slot: int
    tokens: list[int]
    places: list[int]
    next: int
    waiting: list[NDArray[np.float32]] = field(default_factory=list)
    unread: int = 0
    """Tokens whose features wait."""

    def add(self, start: int, features: NDArray[np.floating[Any]]) -> None:
        """Features of the tokens from `start` on; where there is a gap before it, what waits is dropped."""
        if start != self.next:
            # What waits must be next to `next`: tokens without features between them are rare, and then left out.
            self.waiting, self.unread = [], 0
        last = features[-LOOK_BACK:]
        self.waiting.append(np.asarray(last if len(last) == len(features) else last.copy(), np.float32))
        self.unread += len(last)
        self.next = start + len(features)
        while (excess := self.unread - LOOK_BACK) > 0:
            dropped = min(excess, len(self.waiting[0]))
            self.unread -= dropped
            if dropped == len(self.waiting[0]):
                self.waiting.pop(0)
            else:
                self.waiting[0] = self.waiting[0][dropped:]

    def take(self, count: int) -> tuple[NDArray[np.float32], list[int]]:
        """The first `count` waiting features [count, width], and the tokens that follow theirs; they become entries."""
        first = self.next - self.unread
        joined = self.waiting[0] if len(self.waiting) == 1 else np.concatenate(self.waiting)
        self.waiting = [joined[count:]] if count < len(joined) else []
        self.unread -= count
        self.places += range(first, first + count)
        return np.ascontiguousarray(joined[:count]), self.tokens[first + 1 : first + 1 + count]


class Memories:
    """All texts of a head, over one pool of blocks."""

    def __init__(self, block_floats: int, max_context: int) -> None:
        per_slot = -(-max_context // BLOCK)
        self.pool = BlockPool(SLOTS * per_slot, block_floats)
        self.slots = Slots(self.pool, SLOTS, max_context)
        self._live: dict[int, Memory] = {}
        self._kept: list[Memory] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks in use."""
        return int(self.pool.used * self.pool.data[0].nbytes)

    def get(self, row: int) -> Memory | None:
        """The memory of a running row."""
        return self._live.get(row)

    def join(self, row: int, tokens: list[int], start: int) -> Memory:
        """A memory for a row whose features come from token `start` on: what other texts share with what is before."""
        self.leave(row, keep=False)
        best, shared = None, 0
        for memory in [*self._kept, *self._live.values()]:
            common = common_prefix(memory.tokens, tokens)
            usable = bisect_left(memory.places, min(common - 1, start))
            if usable > shared:
                best, shared = memory, usable
        slot = self._open() if best is None else self._open((best.slot, shared))
        made = Memory(slot, tokens, [] if best is None else best.places[:shared], start)
        self._live[row] = made
        return made

    def _open(self, source: tuple[int, int] | None = None) -> int:
        """A new slot, empty or the beginning of another, at the cost of kept texts when there is no other."""
        while True:
            try:
                return self.slots.open() if source is None else self.slots.fork(*source)
            except InputError:
                spare = next((memory for memory in self._kept if source is None or memory.slot != source[0]), None)
                if spare is None:
                    raise
                self._kept.remove(spare)
                self.slots.close(spare.slot)

    def leave(self, row: int, keep: bool) -> None:
        """The row has ended; its text may be kept."""
        memory = self._live.pop(row, None)
        if memory is None:
            return
        if not keep or not memory.places:
            self.slots.close(memory.slot)
            return
        memory.tokens, memory.waiting, memory.unread = list(memory.tokens), [], 0
        self._kept.append(memory)
        while len(self._kept) > KEPT:
            self.slots.close(self._kept.pop(0).slot)

    def forget(self) -> None:
        """Drop the texts of rows that have ended."""
        while self._kept:
            self.slots.close(self._kept.pop().slot)
