"""One pass over the rows of several slots, laid end to end: who sees whom, and how a model is made to obey.

A model that takes its attention from transformers' interface runs ours: each row attends over the views of its own
slot, under the model's own mask rule (causal, sliding window, chunks) evaluated at the true positions, and the tree.
Other models get one 4-D mask over the slots' keys, copied end to end when there are several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from slipstream.core.tree import Draft
from slipstream.targets.transformers.cache import LayerShape, SlotCache

NAME = "slipstream"
"""Our entry in the attention and mask tables of transformers."""


@dataclass(slots=True)
class PassRow:
    """One slot's rows: start..stop of the pass, after `length` committed ones. draft: None for a plain chain."""

    slot: int
    start: int
    stop: int
    length: int
    draft: Draft | None = None

    @property
    def count(self) -> int:
        """Rows of this slot in the pass."""
        return self.stop - self.start

    def depths(self) -> list[int]:
        """Distance of each row from the first one."""
        return list(range(self.count)) if self.draft is None else [0, *self.draft.depths()]

    def ancestors(self) -> Any:
        """bool [count, count]: row i sees row j of the same pass; None when that is what positions say anyway."""
        if self.draft is None or self.draft.is_chain():
            return None
        seen = torch.eye(self.count, dtype=torch.bool)
        for node, parent in enumerate(self.draft.parents):
            seen[node + 1] |= seen[parent + 1]
        return seen


@dataclass(slots=True)
class Pass:
    """All that one call of the model needs beside its ids. by_interface: our attention runs, else the 4-D mask."""

    rows: Sequence[PassRow]
    cache: SlotCache
    device: Any
    by_interface: bool
    positions: Any = None
    recorded: dict[int, LayerShape] | None = None
    """When set, the pass only records what each layer stores."""
    _ancestors: list[Any] = field(default_factory=list)
    _additive: dict[tuple[int, int, Any], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        places = [row.length + depth for row in self.rows for depth in row.depths()]
        self.positions = torch.tensor([places]).to(self.device, non_blocking=True)
        for row in self.rows:
            seen = row.ancestors()
            self._ancestors.append(None if seen is None else seen.to(self.device, non_blocking=True))

    def visible(self, index: int, rule: Callable[..., Any]) -> Any:
        """bool [1, 1, count, length + count] of one row under a mask rule of transformers; None: everything."""
        row, seen = self.rows[index], self._ancestors[index]
        if row.count == 1 and rule is causal_mask_function:
            return None
        own = self.positions[0, row.start : row.stop]
        keys = torch.cat((torch.arange(row.length, device=self.device), own))
        zero = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=self.device)
        mask = rule(zero, zero, own[None, None, :, None], keys[None, None, None, :])
        mask = mask.expand(1, 1, row.count, len(keys))
        if seen is not None:
            mask = mask.clone()
            mask[..., row.length :] &= seen
        return mask

    def view(self, row: PassRow, layer: int) -> tuple[Any, Any]:
        """Keys and values that the rows of a slot may look at, [1, heads, keys, dim]."""
        return self.cache.view(row.slot, layer, row.length + row.count)

    def additive(self, mask: Any, groups: int, query: Any) -> Any:
        """A mask of `visible` as numbers to add to scores, once per group of query heads: [1, 1, groups x rows, keys].

        Made once per pass, not once per layer.
        """
        name = (id(mask), groups, query.device)
        if name not in self._additive:
            numbers = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
            numbers.masked_fill_(~mask.to(query.device), -torch.inf)
            self._additive[name] = numbers.repeat(1, 1, groups, 1)
        return self._additive[name]

    def block_mask(self, dtype: Any) -> Any:
        """Additive [1, 1, rows, keys of all slots end to end]: 0 where a row may look."""
        total = sum(row.length + row.count for row in self.rows)
        mask = torch.full((1, 1, self.rows[-1].stop, total), torch.finfo(dtype).min, dtype=dtype, device=self.device)
        offset = 0
        for index, row in enumerate(self.rows):
            width = row.length + row.count
            seen = self.visible(index, causal_mask_function)
            part = mask[:, :, row.start : row.stop, offset : offset + width]
            part.zero_() if seen is None else part.masked_fill_(seen, 0.0)
            offset += width
        return mask

    def store(self, layer: int, keys: Any, values: Any) -> tuple[Any, Any]:
        """Write the new rows of a layer; returns what the model goes on with."""
        if self.recorded is not None:
            self.recorded[layer] = LayerShape.of(keys, values)
            return keys, values
        for row in self.rows:
            part = slice(row.start, row.stop)
            self.cache.write(row.slot, layer, keys[:, :, part], values[:, :, part])
        if self.by_interface:
            return keys, values
        views = [self.cache.view(row.slot, layer, row.length + row.count) for row in self.rows]
        if len(views) == 1:
            return views[0]
        return torch.cat([keys for keys, _ in views], 2), torch.cat([values for _, values in views], 2)


class Plan(Protocol):
    """What the cache layers and our attention ask of a pass."""

    @property
    def rows(self) -> Sequence[PassRow]:
        """The slots' rows, in order."""

    @property
    def cache(self) -> SlotCache:
        """Where keys and values lie."""

    @property
    def recorded(self) -> dict[int, LayerShape] | None:
        """Not None while a pass only records what layers store."""

    def visible(self, index: int, rule: Callable[..., Any]) -> Any:
        """What a slot's rows may see under a mask rule."""

    def view(self, row: PassRow, layer: int) -> tuple[Any, Any]:
        """Keys and values that they may look at."""

    def additive(self, mask: Any, groups: int, query: Any) -> Any:
        """A mask as numbers to add to scores."""

    def store(self, layer: int, keys: Any, values: Any) -> tuple[Any, Any]:
        """Write new rows."""


class PassLayer(CacheLayerMixin):
    """What a model sees of one layer of the cache during a pass."""

    def __init__(self, index: int, plan: Plan) -> None:
        super().__init__()
        self.index, self.plan = index, plan
        self.is_initialized = True

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Nothing: the buffers are the slots'."""

    def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Store the new rows."""
        return self.plan.store(self.index, key_states, value_states)

    def get_seq_length(self, *_: Any) -> int:
        """Committed rows (models that are given positions do not need it)."""
        return self.plan.rows[0].length

    def get_mask_sizes(self, query_length: Any, *_: Any) -> tuple[int, int]:
        """Keys in all, and where they start."""
        return sum(row.length + row.count for row in self.plan.rows), 0

    def get_max_length(self) -> int:
        """The context."""
        return self.plan.cache.max_context

    def get_max_cache_shape(self) -> int:
        """The same under its older name."""
        return self.plan.cache.max_context


_running: ContextVar[Plan | None] = ContextVar("slipstream_pass", default=None)


@contextmanager
def running(plan: Plan, layers: int) -> Iterator[Cache]:
    """While this lasts, models set to our attention follow the plan; yields the cache object to hand them."""
    token = _running.set(plan)
    try:
        yield Cache(layers=[PassLayer(index, plan) for index in range(layers)])
    finally:
        _running.reset(token)


def attention_mask(*args: Any, **kwargs: Any) -> Any:
    """The mask function behind our name: one mask per row of the pass (see `Pass.visible`)."""
    plan = _running.get()
    if plan is None or plan.recorded is not None:
        return sdpa_mask(*args, **kwargs)
    rule = kwargs.get("mask_function", causal_mask_function)
    return [plan.visible(index, rule) for index in range(len(plan.rows))]


def attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None, **options: Any
) -> tuple[Any, None]:
    """The attention function behind our name: query [1, heads, rows, dim]; returns [1, rows, heads, dim]."""
    plan = _running.get()
    if plan is None or plan.recorded is not None:
        options.pop("softcap", None)
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    made = []
    for row, mask in zip(plan.rows, attention_mask, strict=True):
        keys, values = plan.view(row, module.layer_idx)
        part = query[:, :, row.start : row.stop]
        bias = None if mask is None else plan.additive(mask, query.shape[1] // keys.shape[1], query)
        made.append(attend(part, keys, values, bias, scaling, options))
    return (made[0] if len(made) == 1 else torch.cat(made, 1)), None


def attend(query: Any, keys: Any, values: Any, bias: Any, scaling: float | None, options: dict[str, Any]) -> Any:
    """One row: query heads that share a key head are stacked as further queries of it, so nothing is repeated."""
    heads, rows, groups = query.shape[1], query.shape[2], query.shape[1] // keys.shape[1]
    packed = query.reshape(1, keys.shape[1], groups * rows, query.shape[3])
    sinks, softcap = options.get("s_aux"), options.get("softcap")
    if sinks is None and softcap is None:
        out = torch.nn.functional.scaled_dot_product_attention(packed, keys, values, attn_mask=bias, scale=scaling)
    else:
        scores = packed @ keys.transpose(2, 3) * (scaling or packed.shape[-1] ** -0.5)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            scores = scores + bias
        if sinks is not None:
            per_row = sinks.reshape(1, keys.shape[1], groups, 1).expand(-1, -1, -1, rows)
            scores = torch.cat((scores, per_row.reshape(1, keys.shape[1], groups * rows, 1).to(scores.dtype)), -1)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(packed.dtype)[..., : keys.shape[2]]
        out = weights @ values
    return out.reshape(1, heads, rows, values.shape[3]).transpose(1, 2)


def register() -> None:
    """Enter our functions into transformers' tables (again and again does no harm)."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, attention_mask)
