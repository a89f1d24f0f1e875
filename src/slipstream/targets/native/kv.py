"""The KV cache: one pool of blocks, a block table per slot. Blocks are shared by counting and copied before a write."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from slipstream.core.errors import CacheFullError, InputError, ModelError
from slipstream.kernels.memory import reserve
from slipstream.kernels.passes import BLOCK

if TYPE_CHECKING:
    from numpy.typing import NDArray


def reserve_memory(floats: int) -> NDArray[np.float32]:
    """float32 [floats], all zero, taking real memory only where it is written. Raises ModelError when refused."""
    try:
        return reserve(4 * floats).view(np.float32)
    except OSError as error:
        gib = 4 * floats / 2**30
        raise ModelError(f"cannot reserve {gib:.1f} GiB for the KV cache ({error}); lower max_context") from error


class BlockPool:
    """Blocks of equal size with reference counts.

    data: float32 [capacity, block_floats]. Freed blocks are reused before untouched ones, so memory grows only as
    far as the most blocks ever in use (`touched`).
    """

    def __init__(self, capacity: int, block_floats: int) -> None:
        self.data = reserve_memory(capacity * block_floats).reshape(capacity, block_floats)
        self.touched = 0
        self._references = np.zeros(capacity, np.int32)
        self._free: list[int] = []

    @property
    def capacity(self) -> int:
        """Blocks in all."""
        return len(self.data)

    @property
    def used(self) -> int:
        """Blocks that some slot holds."""
        return self.touched - len(self._free)

    def take(self) -> int:
        """A block that nobody else holds. Raises CacheFullError when all are taken."""
        if self._free:
            block = self._free.pop()
        elif self.touched < self.capacity:
            block = self.touched
            self.touched += 1
        else:
            raise CacheFullError(
                f"the KV cache is full ({self.capacity} blocks of {BLOCK} tokens); "
                "run fewer or shorter requests at once, or load the model with a larger cache"
            )
        self._references[block] = 1
        return block

    def share(self, block: int) -> int:
        """Count one more holder of `block`."""
        self._references[block] += 1
        return block

    def drop(self, block: int) -> None:
        """Count one holder less; the block is free when none is left."""
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free.append(block)

    def own(self, block: int) -> int:
        """A block with the same content that may be written: itself, or a copy when others hold it too."""
        if self._references[block] == 1:
            return block
        copy = self.take()
        self.data[copy] = self.data[block]
        self.drop(block)
        return copy

    def check(self, tables: list[list[int]]) -> None:
        """Assert that the counts are those of the given tables and that free blocks are in none."""
        counts = np.zeros(self.capacity, np.int32)
        for table in tables:
            np.add.at(counts, np.asarray(table, np.int64), 1)
        assert np.array_equal(counts, self._references), "KV block counts differ from the slots' tables"
        assert not counts[self._free].any(), "a free KV block is in use"
        assert len(set(self._free)) == len(self._free), "a KV block was freed twice"


class Slots:
    """Lengths and block tables of the slots.

    tables: int32 [slots, ceil(max_context / BLOCK)], valid up to `held[slot]` entries.
    """

    def __init__(self, pool: BlockPool, slots: int, max_context: int) -> None:
        self.pool = pool
        self.max_context = max_context
        self.tables = np.zeros((slots, -(-max_context // BLOCK)), np.int32)
        self.lengths = [0] * slots
        self._held = [0] * slots
        self._open: set[int] = set()
        self._closed = list(range(slots - 1, -1, -1))

    @property
    def free(self) -> int:
        """Slots that can still be opened."""
        return len(self._closed)

    def open(self) -> int:
        """A slot of length 0. Raises InputError when all are taken."""
        if not self._closed:
            raise InputError(f"all {len(self.lengths)} slots are in use; close one or load the model with more slots")
        slot = self._closed.pop()
        self._open.add(slot)
        return slot

    def close(self, slot: int) -> None:
        """Give the slot and its blocks back."""
        self.truncate(slot, 0)
        self._open.remove(slot)
        self._closed.append(slot)

    def require(self, slot: int) -> None:
        """Raise InputError unless the slot is open."""
        if slot not in self._open:
            raise InputError(f"slot {slot} is not open")

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first `length` positions; blocks no longer needed return to the pool at once."""
        self.require(slot)
        if not 0 <= length <= self.lengths[slot]:
            raise InputError(f"cannot truncate slot {slot} to {length}; it holds {self.lengths[slot]} tokens")
        keep = -(-length // BLOCK)
        for block in self.tables[slot, keep : self._held[slot]]:
            self.pool.drop(int(block))
        self._held[slot] = keep
        self.lengths[slot] = length

    def fork(self, slot: int, length: int) -> int:
        """A new slot with the first `length` positions of `slot`; blocks are shared until one of the two writes."""
        self.require(slot)
        if not 0 <= length <= self.lengths[slot]:
            raise InputError(f"cannot fork slot {slot} at {length}; it holds {self.lengths[slot]} tokens")
        copy = self.open()
        keep = -(-length // BLOCK)
        for index in range(keep):
            self.tables[copy, index] = self.pool.share(int(self.tables[slot, index]))
        self._held[copy] = keep
        self.lengths[copy] = length
        return copy

    def reserve(self, slot: int, length: int) -> None:
        """Make positions from the slot's length to `length` writable. Raises InputError past the context or memory."""
        self.require(slot)
        if length > self.max_context:
            raise InputError(f"slot {slot} would hold {length} tokens, over the context of {self.max_context}")
        table = self.tables[slot]
        if self.lengths[slot] % BLOCK and length > self.lengths[slot]:
            last = self.lengths[slot] // BLOCK
            table[last] = self.pool.own(int(table[last]))
        while self._held[slot] * BLOCK < length:
            table[self._held[slot]] = self.pool.take()
            self._held[slot] += 1

    def grow(self, slot: int, count: int) -> None:
        """Count `count` positions that were written after the slot's length."""
        self.lengths[slot] += count
        assert self.lengths[slot] <= self._held[slot] * BLOCK, "KV positions counted that were never reserved"

    def places(self, slot: int, count: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Block and offset, int32 [count] each, of the `count` positions after the slot's length; reserved before."""
        self.require(slot)
        if self.lengths[slot] + count > self._held[slot] * BLOCK:
            raise InputError(f"slot {slot} was truncated or closed since its last pass; run the pass again")
        positions = np.arange(self.lengths[slot], self.lengths[slot] + count, dtype=np.int32)
        return self.tables[slot, positions // BLOCK], positions % BLOCK

    def check(self) -> None:
        """Assert that every block is accounted for and every length fits its blocks."""
        self.pool.check([self.tables[slot, :held].tolist() for slot, held in enumerate(self._held)])
        for slot, length in enumerate(self.lengths):
            assert length <= self._held[slot] * BLOCK, f"slot {slot} is longer than its blocks"
            assert slot in self._open or not self._held[slot], f"closed slot {slot} holds blocks"
