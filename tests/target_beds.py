"""Targets for tests, small and exact: both implement the whole protocol and check what callers do with it.

TableTarget looks its logits up by the last one or two tokens, so every right answer is known exactly.
TableTransformer is a real transformer in float64 with a real KV cache, for faults of cache and rollback.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import copy
from typing import Self

import numpy as np

from slipstream.core.errors import CacheFullError, InputError
from slipstream.targets.base import PassOutput, Read, RowInput


class SlotTarget:
    """Slots, the pass protocol and its checks; subclasses give logits. `passes` holds the token rows of each pass."""

    name = "bed"
    row_invariant = True
    reads_along = False
    kv_bytes_per_token = 1

    def __init__(self, vocab_size: int, max_context: int, slots: int):
        self.vocab_size, self.max_context = vocab_size, max_context
        self.free = list(range(slots))
        self.cache: dict[int, list[int]] = {}
        self.pending: list[RowInput] | None = None
        self.passes: list[int] = []
        self.prefilled = 0
        self.capacity = 10**9
        """Tokens that all slots together can hold, those of the last pass included."""

    def memory_bytes(self) -> dict[str, int]:
        used = sum(map(len, self.cache.values()))
        return {"weights": 0, "kv_used": used, "kv_free": self.capacity - used}

    def wait(self) -> None:
        """Nothing to wait for."""

    def share(self, max_context: int, slots: int) -> Self:
        assert 0 < max_context <= self.max_context
        other = copy(self)
        SlotTarget.__init__(other, self.vocab_size, max_context, slots)
        return other

    def open(self) -> int:
        if not self.free:
            raise InputError("all slots are taken")
        slot = self.free.pop(0)
        self.cache[slot] = []
        return slot

    def close(self, slot: int) -> None:
        del self.cache[slot]
        self.free.append(slot)

    def length(self, slot: int) -> int:
        return len(self.cache[slot])

    def truncate(self, slot: int, length: int) -> None:
        assert 0 <= length <= len(self.cache[slot])
        del self.cache[slot][length:]

    def fork(self, slot: int, length: int) -> int:
        assert 0 <= length <= len(self.cache[slot])
        copy = self.open()
        self.cache[copy] = self.cache[slot][:length]
        return copy

    def prefill(self, slot: int, tokens: Sequence[int], last: int | None = None) -> None:
        assert len(self.cache[slot]) + len(tokens) < self.max_context
        self.require(len(tokens))
        self.prefilled += len(tokens)
        for token in tokens:
            self.keep(slot, self.node(slot, [int(token)]))
            self.cache[slot].append(int(token))

    def require(self, more: int) -> None:
        if sum(map(len, self.cache.values())) + more > self.capacity:
            raise CacheFullError(f"the cache of {self.capacity} tokens is full")

    def forward(self, rows: Sequence[RowInput], reads: Sequence[Read] = ()) -> PassOutput:
        assert len({row.slot for row in rows}) == len(rows), "a slot appears twice in one pass"
        assert len({read.slot for read in reads}) == len(reads), "a slot is read twice in one pass"
        self.require(sum(1 + len(row.draft) for row in rows) + sum(len(read.tokens) for read in reads))
        for read in reads:
            self.prefill(read.slot, read.tokens, read.last)
        self.passes.append(sum(1 + len(row.draft) for row in rows))
        self.pending, self.aside, logits = list(rows), [], []
        for row in rows:
            row.draft.check(self.vocab_size)
            length, depth = len(self.cache[row.slot]), max(row.draft.depths(), default=0)
            assert length + 1 + depth < self.max_context, "a node lies at or past the end of the context"
            states = [self.node(row.slot, [row.anchor])]
            for index in range(len(row.draft)):
                above = [states[0], *(states[node + 1] for node in row.draft.path(index)[:-1])]
                states.append(self.node(row.slot, [row.anchor, *row.draft.path_tokens(index)], above))
            self.aside.append(states)
            logits.append(np.stack([np.asarray(self.logits(state), np.float32) for state in states]))
        return PassOutput(logits, read=[None for _ in reads])

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        assert self.pending is not None, "commit without a pass"
        assert len(paths) == len(self.pending)
        for row, path, states in zip(self.pending, paths, self.aside, strict=True):
            assert not path or list(path) == row.draft.path(path[-1]), "not a path of the draft"
            self.cache[row.slot] += [row.anchor, *(row.draft.tokens[node] for node in path)]
            for state in [states[0], *(states[node + 1] for node in path)]:
                self.keep(row.slot, state)
        self.pending = None

    def node(self, slot: int, path: list[int], above: list = ()) -> object:
        """State of the last token of `path`, which starts at the anchor; `above` are its ancestors' states."""
        raise NotImplementedError

    def logits(self, state: object) -> np.ndarray:
        raise NotImplementedError

    def keep(self, slot: int, state: object) -> None:
        """The state joins the slot's cache."""


class TableTarget(SlotTarget):
    """Logits are `table[last]` or `table[one before, last]`; before the first token stands token 0.

    pause: seconds that every pass takes longer, so that speculation can pay.
    """

    name = "table"

    def __init__(self, table: np.ndarray, max_context: int = 512, slots: int = 8, pause: float = 0.0):
        self.table, self.pause = np.asarray(table, np.float64), pause
        self.order = self.table.ndim - 1
        super().__init__(self.table.shape[-1], max_context, slots)

    def node(self, slot: int, path: list[int], above: list = ()) -> tuple[int, ...]:
        return tuple([0, *self.cache[slot], *path][-self.order :])

    def logits(self, state: object) -> np.ndarray:
        return self.table[state]

    def forward(self, rows: Sequence[RowInput], reads: Sequence[Read] = ()) -> PassOutput:
        if self.pause:
            time.sleep(self.pause)
        return super().forward(rows, reads)

    def after(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits that follow these tokens, without any cache."""
        return self.table[tuple([0, *tokens][-self.order :])].astype(np.float32)


class TableTransformer(SlotTarget):
    """Attention over a real cache, `keys` and `values` [layers, length, width] per slot, one token at a time."""

    name = "transformer"

    def __init__(self, seed: int = 0, vocab_size: int = 16, max_context: int = 512, slots: int = 8, layers: int = 2):
        super().__init__(vocab_size, max_context, slots)
        rng, width = np.random.default_rng(seed), 8
        self.embedding = rng.normal(size=(vocab_size, width))
        self.position = rng.normal(size=(max_context, width))
        self.weights = rng.normal(size=(layers, 4, width, width)) / width**0.5
        self.head = rng.normal(size=(width, vocab_size)) * 2
        self.kv: dict[int, list[np.ndarray]] = {}

    def share(self, max_context: int, slots: int) -> Self:
        other = super().share(max_context, slots)
        other.kv = {}
        return other

    def open(self) -> int:
        slot = super().open()
        self.kv[slot] = []
        return slot

    def truncate(self, slot: int, length: int) -> None:
        super().truncate(slot, length)
        del self.kv[slot][length:]

    def fork(self, slot: int, length: int) -> int:
        copy = super().fork(slot, length)
        self.kv[copy] = self.kv[slot][:length]
        return copy

    def keep(self, slot: int, state: object) -> None:
        self.kv[slot].append(state[0])

    def rows(self, slot: int) -> np.ndarray:
        """The cache of a slot, [length, layers, 2, width]."""
        return np.array(self.kv[slot])

    def node(self, slot: int, path: list[int], above: list = ()) -> tuple[np.ndarray, np.ndarray]:
        past = self.kv[slot] + [state[0] for state in above]
        x = self.embedding[path[-1]] + self.position[len(past)]
        own = np.empty((len(self.weights), 2, len(x)))
        for layer, (query, key, value, mlp) in enumerate(self.weights):
            own[layer] = x @ key, x @ value
            keys = np.array([row[layer, 0] for row in past] + [own[layer, 0]])
            values = np.array([row[layer, 1] for row in past] + [own[layer, 1]])
            scores = keys @ (x @ query) / len(x) ** 0.5
            weight = np.exp(scores - scores.max())
            x = x + weight @ values / weight.sum()
            x = x + np.tanh(x @ mlp)
            x = x / np.sqrt(np.mean(x * x))
        return own, x @ self.head

    def logits(self, state: object) -> np.ndarray:
        return state[1]
