"""Cache slots of the target, and the prefixes that finished answers leave in them for the next prompt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from slipstream.core.errors import InputError
from slipstream.targets.base import Target


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of leading tokens two sequences share."""
    size = min(len(one), len(other))
    if one[:size] == other[:size]:
        return size
    return next(index for index in range(size) if one[index] != other[index])


class SlotPool:
    """Opens slots for rows and keeps up to `keep` finished ones, oldest first to go.

    A kept slot holds exactly the committed tokens of an answer up to its end. Reuse needs no test of the output: in a
    row-invariant target the rows of equal tokens are equal; for other targets nothing is kept.
    """

    def __init__(self, target: Target, keep: int) -> None:
        self._target = target
        self._keep = keep if target.row_invariant else 0
        self._idle: OrderedDict[int, list[int]] = OrderedDict()

    def take(self, tokens: Sequence[int]) -> tuple[int, int]:
        """A slot whose cache holds the first `n` of these tokens and nothing else, and that n."""
        best, shared = None, 0
        for slot, kept in self._idle.items():
            size = common_prefix(kept, tokens)
            if size > shared:
                best, shared = slot, size
        if best is None:
            return self._open(), 0
        del self._idle[best]
        self._target.truncate(best, shared)
        return best, shared

    def _open(self) -> int:
        while True:
            try:
                return self._target.open()
            except InputError:
                if not self._idle:
                    raise
                self._evict()

    def _evict(self) -> None:
        slot, _ = self._idle.popitem(last=False)
        self._target.close(slot)

    def park(self, slot: int, tokens: Sequence[int]) -> None:
        """An answer has ended; its slot holds these tokens."""
        self._idle[slot] = list(tokens)
        while len(self._idle) > self._keep:
            self._evict()

    def drop(self, slot: int) -> None:
        """Give back a slot whose content is not known."""
        self._target.close(slot)

    def forget(self) -> None:
        """Give back all idle slots."""
        while self._idle:
            self._evict()
