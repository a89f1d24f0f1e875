"""Keys and values of all slots: committed rows first, the rows of the running pass behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.core.errors import CacheFullError, InputError

FIRST_CAPACITY = 128
"""Rows of a slot's first buffers; they double when they are full."""
KEPT_CAPACITY = 512
"""The same when buffers are kept for recorded passes."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer stores per row. Layers of equal shape share their buffers."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    device: Any
    dtype: Any

    @classmethod
    def of(cls, keys: Any, values: Any) -> LayerShape:
        """The shape of keys and values [1, heads, rows, dim] as a model hands them over."""
        return cls(keys.shape[1], keys.shape[3], values.shape[1], values.shape[3], keys.device, keys.dtype)

    def row_bytes(self) -> int:
        """Bytes of one row."""
        return (self.key_heads * self.key_dim + self.value_heads * self.value_dim) * int(self.dtype.itemsize)


@dataclass(slots=True)
class _Slot:
    """buffers: per group of layers, keys and values [layers, heads, capacity, dim]."""

    length: int = 0
    capacity: int = 0
    buffers: list[tuple[Any, Any]] | None = None


class SlotCache:
    """Slots with their own buffers, so that a pass reads views and never gathers.

    Rows 0..length of a slot are committed. A pass writes its rows from there on; `commit` moves the kept ones to their
    places on the device and counts them. Buffers grow by doubling and are given back when a slot closes.
    """

    def __init__(self, slots: int, max_context: int) -> None:
        self.max_context = max_context
        self._slots = [_Slot() for _ in range(slots)]
        self._closed = list(range(slots - 1, -1, -1))
        self._open: set[int] = set()
        self._groups: list[tuple[LayerShape, int]] = []
        self._place: dict[int, tuple[int, int]] = {}
        self._spare: list[_Slot] | None = None

    def alike(self, slots: int, max_context: int) -> SlotCache:
        """An empty cache for the same layers."""
        made = SlotCache(slots, max_context)
        made._groups, made._place = self._groups, self._place
        return made

    @property
    def layers(self) -> list[int]:
        """Indices of the layers that store anything."""
        return list(self._place)

    def keep_buffers(self) -> None:
        """From now on buffers of closed slots are kept and used again, at the same place in memory."""
        self._spare = []

    def slot_capacity(self, slot: int) -> int:
        """Rows that a slot has buffers for."""
        return self._slots[slot].capacity

    def buffer_id(self, slot: int) -> int:
        """A number for the place of a slot's buffers in memory."""
        return int((self._slots[slot].buffers or [])[0][0].data_ptr())

    def describe(self, shapes: dict[int, LayerShape]) -> None:
        """Learn what the layers store, by layer index."""
        members: dict[LayerShape, list[int]] = {}
        for layer, shape in sorted(shapes.items()):
            members.setdefault(shape, []).append(layer)
        self._groups = [(shape, len(layers)) for shape, layers in members.items()]
        self._place = {
            layer: (group, index) for group, layers in enumerate(members.values()) for index, layer in enumerate(layers)
        }

    @property
    def row_bytes(self) -> int:
        """Bytes of one position over all layers."""
        return sum(shape.row_bytes() * layers for shape, layers in self._groups)

    @property
    def capacity(self) -> int:
        """Rows that buffers are held for, over all slots."""
        return sum(slot.capacity for slot in self._slots)

    @property
    def slots(self) -> int:
        """Slots in all, open or not."""
        return len(self._slots)

    @property
    def free(self) -> int:
        """Slots that can still be opened."""
        return len(self._closed)

    def open(self) -> int:
        """A slot of length 0. Raises InputError when all are taken."""
        if not self._closed:
            raise InputError(f"all {len(self._slots)} slots are in use; close one or load the model with more slots")
        slot = self._closed.pop()
        self._open.add(slot)
        return slot

    def close(self, slot: int) -> None:
        """Give the slot and its buffers back."""
        self.require(slot)
        self._retire(self._slots[slot])
        self._slots[slot] = _Slot()
        self._open.remove(slot)
        self._closed.append(slot)

    def require(self, slot: int) -> None:
        """Raise InputError unless the slot is open."""
        if slot not in self._open:
            raise InputError(f"slot {slot} is not open")

    def length(self, slot: int) -> int:
        """Committed rows."""
        self.require(slot)
        return self._slots[slot].length

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first `length` rows."""
        if not 0 <= length <= self.length(slot):
            raise InputError(f"cannot truncate slot {slot} to {length}; it holds {self._slots[slot].length} tokens")
        self._slots[slot].length = length

    def fork(self, slot: int, length: int) -> int:
        """A new slot with a copy of the first `length` rows."""
        if not 0 <= length <= self.length(slot):
            raise InputError(f"cannot fork slot {slot} at {length}; it holds {self._slots[slot].length} tokens")
        copy = self.open()
        if length:
            try:
                self._allocate(self._slots[copy], self._slots[slot].capacity)
            except CacheFullError:
                self.close(copy)
                raise
            self._copy(self._slots[slot], self._slots[copy], length)
        self._slots[copy].length = length
        return copy

    def reserve(self, slot: int, rows: int, depth: int) -> None:
        """Room for `rows` more rows, of which at most `depth` become committed.

        Raises InputError past the context, CacheFullError without memory.
        """
        length = self.length(slot)
        if length + depth > self.max_context:
            raise InputError(f"slot {slot} would hold {length + depth} tokens, over the context of {self.max_context}")
        held = self._slots[slot]
        if held.capacity < length + rows:
            grown = _Slot(length)
            least = FIRST_CAPACITY if self._spare is None else KEPT_CAPACITY
            self._allocate(grown, max(least, 1 << (length + rows - 1).bit_length()))
            if length:
                self._copy(held, grown, length)
            self._retire(held)
            self._slots[slot] = grown

    def view(self, slot: int, layer: int, rows: int) -> tuple[Any, Any]:
        """The first `rows` keys and values of a layer, [1, heads, rows, dim], not copied."""
        group, index = self._place[layer]
        keys, values = (self._slots[slot].buffers or [])[group]
        return keys[index : index + 1, :, :rows], values[index : index + 1, :, :rows]

    def write(self, slot: int, layer: int, keys: Any, values: Any) -> None:
        """Put rows of the running pass [1, heads, rows, dim] behind the committed ones."""
        length = self._slots[slot].length
        into_keys, into_values = self.view(slot, layer, length + keys.shape[2])
        into_keys[:, :, length:].copy_(keys)
        into_values[:, :, length:].copy_(values)

    def commit(self, slot: int, kept: Sequence[int]) -> None:
        """Keep these rows of the pass (numbered from 0, ascending), in this order; the rest is dropped."""
        held = self._slots[slot]
        moved = next((place for place, row in enumerate(kept) if row != place), len(kept))
        if moved < len(kept):
            index = torch.tensor([held.length + row for row in kept[moved:]])
            into = slice(held.length + moved, held.length + len(kept))
            for pair in held.buffers or ():
                for buffer in pair:
                    buffer[:, :, into] = buffer.index_select(2, index.to(buffer.device, non_blocking=True))
        held.length += len(kept)

    def _retire(self, slot: _Slot) -> None:
        if self._spare is not None and slot.capacity:
            self._spare.append(slot)

    def _allocate(self, slot: _Slot, capacity: int) -> None:
        """As `_resize`. Raises CacheFullError when the device has no memory for it."""
        try:
            self._resize(slot, capacity)
        except (torch.OutOfMemoryError, MemoryError) as error:
            slot.capacity, slot.buffers = 0, None
            raise CacheFullError(
                f"no memory for {capacity} more cache rows ({capacity * self.row_bytes / 2**20:.0f} MiB); "
                "run fewer or shorter requests at once, or lower max_context"
            ) from error

    def _resize(self, slot: _Slot, capacity: int) -> None:
        slot.capacity = capacity
        for spare in self._spare or ():
            if spare.capacity == capacity:
                slot.buffers = spare.buffers
                self._spare = [other for other in self._spare or () if other is not spare]
                return
        slot.buffers = []
        # Passes of fixed width read all of a buffer, and what they must not see counts 0 times; but 0 x NaN is NaN.
        make = torch.empty if self._spare is None else torch.zeros
        for shape, layers in self._groups:
            options = {"device": shape.device, "dtype": shape.dtype}
            keys = make((layers, shape.key_heads, capacity, shape.key_dim), **options)
            values = make((layers, shape.value_heads, capacity, shape.value_dim), **options)
            slot.buffers.append((keys, values))

    @staticmethod
    def _copy(source: _Slot, into: _Slot, length: int) -> None:
        for old, new in zip(source.buffers or (), into.buffers or (), strict=True):
            for one, other in zip(old, new, strict=True):
                other[:, :, :length].copy_(one[:, :, :length])
