"""The native target: a decoder of the Llama family on the CPU, in the compiled core, without torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from slipstream.core.errors import InputError
from slipstream.kernels.decoder import make_decoder
from slipstream.kernels.passes import BLOCK, DecoderWeights, Pass
from slipstream.models.files import ModelFile, open_model
from slipstream.targets.base import PassOutput, RowInput
from slipstream.targets.native.buffers import Buffers
from slipstream.targets.native.kv import BlockPool, Slots
from slipstream.targets.native.load import decoder_shape, feature_layers, load_weights, require_supported
from slipstream.targets.native.rope import RopeTables

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slipstream.models.config import ModelConfig

PREFILL_ROWS = 256
"""Rows per prefill pass: large enough to share the unpacking of weights, small enough to report progress."""


class NativeTarget:
    """Implements `targets.base.Target`. One pass runs at a time; the object is not for use by several threads at once.

    weights_bytes: memory of the packed weights. kv_bytes_per_token: cache memory of one position.
    """

    row_invariant = True

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        weights: DecoderWeights,
        max_context: int | None = None,
        slots: int = 64,
    ) -> None:
        """Raises InputError for a context the model does not have."""
        if max_context is not None and not 0 < max_context <= config.max_context:
            raise InputError(f"max_context is {max_context}; the model allows 1 to {config.max_context}")
        self.name, self.config = name, config
        self.vocab_size = config.vocab_size
        self.max_context = max_context or config.max_context
        self.weights_bytes = weights.nbytes
        self.kv_bytes_per_token = 4 * weights.shape.block_floats // BLOCK
        self._shape, self._weights = weights.shape, weights
        pool = BlockPool(
            _pool_blocks(self.max_context, slots, 4 * weights.shape.block_floats), weights.shape.block_floats
        )
        self._slots = Slots(pool, slots, self.max_context)
        self._decoder = make_decoder(weights, pool.data)
        self._rope = RopeTables(config)
        self._decoder.rope(self._rope.cos, self._rope.sin)
        self._buffers = Buffers()
        self._padding = _selection(config.padding_ids)
        self._pending: list[tuple[int, int, int]] = []
        self._debug = os.environ.get("SLIPSTREAM_DEBUG") == "1"

    @classmethod
    def load(
        cls,
        model: str | Path | ModelFile,
        max_context: int | None = None,
        slots: int = 64,
        features: Sequence[int] = (),
    ) -> NativeTarget:
        """Open and pack a model.

        slots: sequences the cache can hold at once (memory is taken only as they grow). features: layers whose input
        hidden states passes return, concatenated in this order. Raises UnsupportedError before reading any weight.
        """
        file = model if isinstance(model, ModelFile) else open_model(model)
        require_supported(file.config)
        weights = load_weights(file, decoder_shape(file.config, features))
        return cls(file.name, file.config, weights, max_context, slots)

    def share(self, max_context: int, slots: int, features: Sequence[int] = ()) -> NativeTarget:
        """Another target over the same weights, with a cache and features of its own. Raises InputError."""
        shape = replace(self._shape, features=feature_layers(features, self.config))
        return NativeTarget(self.name, self.config, replace(self._weights, shape=shape), max_context, slots)

    @property
    def features_width(self) -> int:
        """Floats per row of the features; 0 when none were asked for."""
        return self._shape.hidden * len(self._shape.features)

    @property
    def free_slots(self) -> int:
        """Slots that can still be opened."""
        return self._slots.free

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of the weights, of the cache blocks in use, free, and ever touched."""
        pool = self._slots.pool
        blocks = {"kv_used": pool.used, "kv_free": pool.capacity - pool.used, "kv_touched": pool.touched}
        return {"weights": self.weights_bytes} | {
            name: count * 4 * self._shape.block_floats for name, count in blocks.items()
        }

    def wait(self) -> None:
        """Nothing to wait for: passes are done when they return."""

    def open(self) -> int:
        """A free slot of length 0. Raises InputError when all are taken."""
        return self._slots.open()

    def close(self, slot: int) -> None:
        """Give the slot and its memory back."""
        self._slots.require(slot)
        self._slots.close(slot)

    def length(self, slot: int) -> int:
        """Tokens in the slot's cache."""
        self._slots.require(slot)
        return self._slots.lengths[slot]

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first `length` tokens."""
        self._slots.truncate(slot, length)

    def fork(self, slot: int, length: int) -> int:
        """A new slot that starts with the first `length` tokens of `slot`; their memory is shared, not copied."""
        return self._slots.fork(slot, length)

    def prefill(self, slot: int, tokens: Sequence[int], last: int | None = None) -> NDArray[np.float32] | None:
        """Append tokens to the cache without logits.

        Returns their features [tokens, width], or those of the `last` ones, when features were asked for at load.
        """
        self._check_tokens(tokens)
        self._slots.reserve(slot, self.length(slot) + len(tokens))
        ids = np.asarray(tokens, np.int32)
        before = 0 if last is None else len(ids) - last  # tokens whose features nobody wants
        first = before // PREFILL_ROWS * PREFILL_ROWS
        width = 0 if last == 0 else self.features_width
        features = np.empty((len(ids) - first, width), np.float32) if width else None
        self._pending = []
        for start in range(0, len(ids), PREFILL_ROWS):
            part = ids[start : start + PREFILL_ROWS]
            kept = None if features is None or start < first else features[start - first :][: len(part)]
            self._store(slot, part, kept)
        return None if features is None else features[before - first :]

    def _store(self, slot: int, tokens: NDArray[np.int32], features: NDArray[np.float32] | None) -> None:
        """One pass over a chain of tokens whose keys and values go straight into the cache."""
        rows = Pass(
            tokens=tokens,
            parents=np.arange(-1, len(tokens) - 1, dtype=np.int32),
            first=np.asarray([0, len(tokens)], np.int32),
            prefix=np.asarray([self._slots.lengths[slot]], np.int32),
            tables=self._slots.tables[slot : slot + 1],
        )
        self._run(rows, None, features, store=True)
        self._slots.grow(slot, len(tokens))

    def forward(self, rows: Sequence[RowInput]) -> PassOutput:
        """One pass over the anchors and all nodes of all rows; each node attends to its prefix and its ancestors."""
        plan = self._plan(rows)
        logits = self._buffers.take(plan.rows, self.vocab_size)
        features = np.empty((plan.rows, self.features_width), np.float32) if self.features_width else None
        self._run(plan, logits, features, store=False)
        if self._padding is not None:
            logits[:, self._padding] = -np.inf
        bounds = plan.first.tolist()
        spans = [slice(start, end) for start, end in pairwise(bounds)]
        self._pending = [(row.slot, span.start, span.stop) for row, span in zip(rows, spans, strict=True)]
        kept = None if features is None else [features[span] for span in spans]
        return PassOutput([logits[span] for span in spans], kept)

    def _plan(self, rows: Sequence[RowInput]) -> Pass:
        """Flatten rows; make room in the cache for the longest path of each, so that commit cannot fail."""
        tokens: list[int] = []
        parents: list[int] = []
        first = [0]
        for row in rows:
            base = len(tokens)
            tokens += [row.anchor, *row.draft.tokens]
            parents += [-1, *(base + 1 + parent for parent in row.draft.parents)]
            first.append(len(tokens))
            deepest = max(row.draft.depths(), default=0)
            self._slots.reserve(row.slot, self.length(row.slot) + 1 + deepest)
        self._check_tokens(tokens)
        slots = [row.slot for row in rows]
        if not slots or len(set(slots)) != len(slots):
            raise InputError(f"a pass needs rows of distinct slots, got slots {slots}")
        return Pass(
            tokens=np.asarray(tokens, np.int32),
            parents=np.asarray(parents, np.int32),
            first=np.asarray(first, np.int32),
            prefix=np.asarray([self._slots.lengths[slot] for slot in slots], np.int32),
            tables=self._slots.tables[slots],
        )

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep, per row of the last pass, the anchor and the nodes of this path (in depth order)."""
        if len(paths) != len(self._pending):
            raise InputError(f"commit got {len(paths)} paths for a pass over {len(self._pending)} rows")
        kept, blocks, offsets = [], [], []
        for path, (slot, start, end) in zip(paths, self._pending, strict=True):
            chosen = np.asarray([start, *(start + 1 + node for node in path)], np.int32)
            if self._debug:
                assert chosen.max() < end, "a committed node is not in the draft"
                assert (self._parents[chosen[1:]] == chosen[:-1]).all(), "a committed path skips a node"
            block, offset = self._slots.places(slot, len(chosen))
            kept.append(chosen)
            blocks.append(block)
            offsets.append(offset)
        self._decoder.commit(np.concatenate(kept), np.concatenate(blocks), np.concatenate(offsets))
        for chosen, (slot, _, _) in zip(kept, self._pending, strict=True):
            self._slots.grow(slot, len(chosen))
        self._pending = []
        if self._debug:
            self._slots.check()

    def _run(
        self, plan: Pass, logits: NDArray[np.float32] | None, features: NDArray[np.float32] | None, store: bool
    ) -> None:
        if self._debug:
            plan.check(self._shape)
            self._slots.check()
            self._parents = plan.parents
        if self._rope.ensure(plan.end):
            self._decoder.rope(self._rope.cos, self._rope.sin)
        self._decoder.forward(plan, logits, features, store)

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        wrong = next((token for token in tokens if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise InputError(f"token id {wrong} is outside the vocabulary (0 to {self.vocab_size - 1})")


def _pool_blocks(max_context: int, slots: int, block_bytes: int) -> int:
    """Blocks to reserve: enough for all slots, but no more than the machine's memory could ever hold."""
    per_slot = -(-max_context // BLOCK)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**36
    return max(per_slot, min(slots * per_slot, memory // block_bytes))


def _selection(ids: list[int]) -> NDArray[np.intp] | slice | None:
    """Ascending ids as the fastest index of columns; None for none."""
    if not ids:
        return None
    if ids == list(range(ids[0], ids[-1] + 1)):
        return slice(ids[0], ids[-1] + 1)
    return np.asarray(ids, np.intp)
