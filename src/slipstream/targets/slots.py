"""Cache slots of the target, and the prefixes that finished answers leave in them for the next prompt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from slipstream.core.errors import InputError
from slipstream.targets.base import Target


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of leading tokens two sequences share."""
    size = min(len(one), len(other))
    if one[:size] == other[:size]:
        return size
    return next(index for index in range(size) if one[index] != other[index])


class SlotPool:
    """Opens slots for rows, and keeps up to `keep` finished ones, the one longest unused first to go.

    A kept slot holds exactly the committed tokens of an answer up to its end; all of them together hold no more tokens
    than one full context. Prompts begin from the longest prefix that a kept or a running slot shares with them. Reuse
    needs no test of the output: in a row-invariant target the cache rows of equal tokens are equal; with other targets
    nothing is reused.
    """

    def __init__(self, target: Target, keep: int) -> None:
        self._target = target
        self._keep = keep
        self._idle: OrderedDict[int, list[int]] = OrderedDict()
        self._running: dict[int, list[int]] = {}

    def take(self, tokens: list[int], reuse: bool = True) -> tuple[int, int]:
        """A slot for a row with these tokens, whose cache holds the first n of them and nothing else; and that n.

        The last token is the anchor, which is never in the cache. The list stays the row's own and may grow. reuse:
        False for an empty slot.
        """
        best, shared = self._longest(tokens) if reuse else (None, 0)
        if best is None:
            slot = self._make(self._target.open)
        elif shared == len(self._idle.get(best, ())):
            del self._idle[best]
            slot = best
        else:
            slot = self._make(lambda: self._target.fork(best, shared), spare=best)
        self._target.truncate(slot, shared)
        self._running[slot] = tokens
        return slot, shared

    @property
    def kept_tokens(self) -> int:
        """Tokens that kept prefixes hold; they give way to whatever needs the memory."""
        return sum(map(len, self._idle.values()))

    def shared(self, tokens: list[int]) -> int:
        """Leading tokens that some slot holds now."""
        return self._longest(tokens)[1]

    def _longest(self, tokens: list[int]) -> tuple[int | None, int]:
        best, shared = None, 0
        cached = [*self._idle.items(), *self._running.items()] if self._target.row_invariant else []
        for slot, held in cached:
            size = min(common_prefix(held, tokens), self._target.length(slot), len(tokens) - 1)
            if size > shared:
                best, shared = slot, size
        return best, shared

    def _make(self, make: Callable[[], int], spare: int | None = None) -> int:
        """A new slot, at the cost of idle ones when there is no other; `spare` goes last, and then becomes it."""
        while True:
            try:
                return make()
            except InputError:
                oldest = next((slot for slot in self._idle if slot != spare), spare)
                if oldest is None or oldest not in self._idle:
                    raise
                del self._idle[oldest]
                if oldest == spare:
                    return oldest
                self._target.close(oldest)

    def park(self, slot: int) -> None:
        """An answer has ended; its prefix may serve again."""
        tokens = self._running.pop(slot)
        self._idle[slot] = tokens[: self._target.length(slot)]
        keep = self._keep if self._target.row_invariant else 0
        while len(self._idle) > keep or sum(map(len, self._idle.values())) > self._target.max_context:
            self._target.close(self._idle.popitem(last=False)[0])

    def drop(self, slot: int) -> None:
        """Give back a slot whose content is not known."""
        self._running.pop(slot, None)
        self._target.close(slot)

    def forget(self) -> bool:
        """Give back all idle slots; False when there were none."""
        had = bool(self._idle)
        while self._idle:
            self._target.close(self._idle.popitem()[0])
        return had
