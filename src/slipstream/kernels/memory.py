"""Memory in large pages, for what every pass reads: with small ones looking up addresses costs a tenth of the time."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

ALIGNMENT = 64
ARENA = 2**26
"""Bytes of address space in which smaller pieces lie one behind the other; memory is taken where it is written."""


def reserve(size: int) -> NDArray[np.uint8]:
    """`size` zero bytes that take real memory only where they are written, in large pages where the system has them.

    Raises OSError where so much address space is refused.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = mmap.mmap(-1, max(1, size), flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8, size)


class Arena:
    """Hands out pieces of one reservation after the other. Each lives as long as any of its pieces."""

    def __init__(self) -> None:
        self._rest: NDArray[np.uint8] = np.empty(0, np.uint8)

    def take(self, size: int) -> NDArray[np.uint8]:
        """`size` bytes of any content that begin on a cache line."""
        if size > ARENA // 4:
            return reserve(size)
        whole = -(-size // ALIGNMENT) * ALIGNMENT
        if whole > len(self._rest):
            self._rest = reserve(ARENA)
        piece, self._rest = self._rest[:size], self._rest[whole:]
        return piece


_arena: ContextVar[Arena | None] = ContextVar("arena", default=None)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """What is packed inside lies close together in large pages, and goes together: the weights of one model."""
    token = _arena.set(Arena())
    try:
        yield
    finally:
        _arena.reset(token)


def aligned(size: int) -> NDArray[np.uint8]:
    """`size` bytes of any content that begin on a cache line; inside of `together` they come from there."""
    arena = _arena.get()
    if arena is not None:
        return arena.take(size)
    buffer = np.empty(size + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + size]
