"""Passes of fixed width over one slot: every tensor has the same shape and place each time, so that a CUDA graph can
replay what was recorded once. Behind a switch, for models that run our attention.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.core.errors import InputError
from slipstream.targets.transformers.cache import LayerShape, SlotCache
from slipstream.targets.transformers.passes import PassRow

log = logging.getLogger("slipstream")

WIDTHS = (1, 4, 8, 16, 32)
"""Rows that passes are filled up to; wider ones run as they are."""
MODES = ("cuda", "eager")
"""cuda: as CUDA graphs; eager: fixed shapes alone, which shows on any device that the shapes are right."""
MOST = 64
"""Recordings kept; the one longest unused goes first."""


def width_of(rows: int) -> int | None:
    """The width a pass of so many rows is filled up to, None when there is none."""
    return next((width for width in WIDTHS if width >= rows), None)


class FixedPass:
    """Static inputs of a pass of `width` rows over a slot whose buffers hold `capacity` rows.

    To a model it is what `passes.Pass` is. Rows beyond the real ones look at themselves alone; what they write lies
    behind the real rows and is never committed.
    """

    recorded: dict[int, LayerShape] | None = None

    def __init__(self, cache: SlotCache, slot: int, width: int, device: Any) -> None:
        self.cache, self.device, self.width = cache, device, width
        self.capacity = cache.slot_capacity(slot)
        self.rows = [PassRow(slot, 0, width, 0)]
        options = {"dtype": torch.long, "device": device}
        self.ids = torch.zeros((1, width), **options)
        self.positions = torch.zeros((1, width), **options)
        self.places = torch.arange(width, **options)
        self.key_positions = torch.arange(self.capacity, **options)
        self.seen = torch.zeros((width, self.capacity), dtype=torch.bool, device=device)
        self._buffers = {layer: cache.view(slot, layer, self.capacity) for layer in cache.layers}

    def fill(self, tokens: Sequence[int], row: PassRow) -> None:
        """Set the inputs for one real pass."""
        length, count = row.length, row.count
        positions = torch.full((self.width,), length, dtype=torch.long)
        positions[:count] = torch.tensor([length + depth for depth in row.depths()])
        ids = torch.zeros(self.width, dtype=torch.long)
        ids[:count] = torch.tensor(list(tokens))
        keys = torch.arange(self.capacity)
        keys[length : length + self.width] = positions
        seen = torch.zeros((self.width, self.capacity), dtype=torch.bool)
        seen[:count, :length] = True
        own = row.ancestors()
        seen[:count, length : length + count] = own if own is not None else torch.ones(count, count).tril().bool()
        seen[range(count, self.width), range(length + count, length + self.width)] = True
        for into, values in (
            (self.ids[0], ids), (self.positions[0], positions), (self.key_positions, keys), (self.seen, seen),
            (self.places, torch.arange(length, length + self.width)),
        ):  # fmt: skip
            into.copy_(values, non_blocking=True)

    def visible(self, index: int, rule: Callable[..., Any]) -> Any:
        """bool [1, 1, width, capacity] under a mask rule of transformers."""
        zero = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=self.device)
        own = self.positions[0]
        mask = rule(zero, zero, own[None, None, :, None], self.key_positions[None, None, None, :])
        return mask.expand(1, 1, self.width, self.capacity) & self.seen

    def view(self, row: PassRow, layer: int) -> tuple[Any, Any]:
        """The whole buffers of a layer."""
        return self._buffers[layer]

    def store(self, layer: int, keys: Any, values: Any) -> tuple[Any, Any]:
        """Write the rows where `places` says."""
        into_keys, into_values = self._buffers[layer]
        into_keys.index_copy_(2, self.places, keys)
        into_values.index_copy_(2, self.places, values)
        return keys, values

    def additive(self, mask: Any, groups: int, query: Any) -> Any:
        """The mask as numbers to add to scores."""
        numbers = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
        return numbers.masked_fill(~mask, -torch.inf).repeat(1, 1, groups, 1)


@dataclass(slots=True)
class _Recording:
    """One recorded pass. graph: a CUDA graph whose result lies in `logits`."""

    plan: FixedPass
    graph: Any = None
    logits: Any = None


class FixedRunner:
    """Runs passes over one slot in recorded form. call: runs the model on a plan and returns logits [1, width, head].

    mode: one of MODES. Raises InputError for another one, or for CUDA graphs elsewhere than on a CUDA device. A model
    that cannot be recorded (it waits for the device somewhere) runs unrecorded from then on, with a warning.
    """

    def __init__(self, call: Callable[[FixedPass], Any], cache: SlotCache, device: Any, mode: str) -> None:
        if mode not in MODES:
            raise InputError(f"graphs is {mode!r}; choose one of: {', '.join(MODES)}")
        if mode == "cuda" and device.type != "cuda":
            raise InputError(f"CUDA graphs were asked for, but the model is on {device}; leave graphs off")
        self._call, self._cache, self._device, self.mode = call, cache, device, mode
        self._made: dict[tuple[int, int], _Recording] = {}
        self._failed = False
        cache.keep_buffers()

    def __call__(self, tokens: Sequence[int], row: PassRow) -> Any | None:
        """Logits [rows, head] of one pass, whose width must be reserved; None when it cannot be run this way."""
        width = width_of(row.count)
        if width is None or self._failed:
            return None
        name = (self._cache.buffer_id(row.slot), width)
        made = self._made.pop(name, None) or _Recording(FixedPass(self._cache, row.slot, width, self._device))
        made.plan.fill(tokens, row)
        if self.mode == "cuda" and made.graph is None and not self._record(made):
            return None
        self._made[name] = made
        while len(self._made) > MOST:
            del self._made[next(iter(self._made))]
        if made.graph is None:
            return self._call(made.plan)[0, : row.count]
        made.graph.replay()
        return made.logits[0, : row.count].clone()

    def _record(self, made: _Recording) -> bool:
        """Record a pass whose inputs are set (so that what it writes while recording lies behind committed rows)."""
        try:
            stream = torch.cuda.Stream(self._device)
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):  # libraries set themselves up on first use, which cannot be recorded
                for _ in range(2):
                    self._call(made.plan)
            torch.cuda.current_stream(self._device).wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                made.logits = self._call(made.plan)
            made.graph = graph
        except RuntimeError as error:
            log.warning("CUDA graphs are off: %s", str(error).splitlines()[0])
            self._failed = True
        return not self._failed
