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
from slipstream.targets.base import PassOutput, Read, RowInput
from slipstream.targets.native.buffers import Buffers
from slipstream.targets.native.kv import BlockPool, Slots
from slipstream.targets.native.load import decoder_shape, feature_layers, load_weights, require_supported
from slipstream.targets.native.rope import RopeTables

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slipstream.models.config import ModelConfig

PREFILL_ROWS = 256
"""Prompt tokens per pass at most: enough to share the unpacking of weights, few enough to stay in the caches."""


class NativeTarget:
    """Implements `targets.base.Target`. One pass runs at a time; the object is not for use by several threads at once.

    weights_bytes: memory of the packed weights. kv_bytes_per_token: cache memory of one position.
    """

    row_invariant = True
    reads_along = True

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
        return self.forward((), [Read(slot, tokens, last)]).read[0]

    def forward(self, rows: Sequence[RowInput], reads: Sequence[Read] = ()) -> PassOutput:
        """One pass over the anchors and all nodes of all rows; each node attends to its prefix and its ancestors.

        reads: parts of prompts, of distinct slots, to append first, as `prefill` does; a row of the same slot follows
        its part. What is more than one pass should hold is read in passes before it.
        """
        self._reserve(rows, reads)
        self._pending = []
        room = PREFILL_ROWS
        rest: list[Read] = []
        features: list[list[NDArray[np.float32]]] = [[] for _ in reads]
        for read, made in zip(reads, features, strict=True):
            early = max(0, len(read.tokens) - room)
            for start in range(0, early, PREFILL_ROWS):
                made += self._pass((), [read.part(start, min(start + PREFILL_ROWS, early))])[1]
            rest.append(read.part(early, len(read.tokens)))
            room -= len(rest[-1].tokens)
        output, last = self._pass(rows, rest)
        whole = [np.concatenate([*made, end]) for made, end in zip(features, last, strict=True)]
        output.read = list(whole if self.features_width else [None] * len(reads))
        return output

    def _reserve(self, rows: Sequence[RowInput], reads: Sequence[Read]) -> None:
        """Make room in the cache for parts of prompts and the longest path of each row, so that commit cannot fail."""
        for slots in ([row.slot for row in rows], [read.slot for read in reads]):
            if len(set(slots)) != len(slots) or not (rows or reads):
                raise InputError(f"a pass needs rows of distinct slots, got slots {slots}")
        for read in reads:
            self._check_tokens(read.tokens)
            self._slots.reserve(read.slot, self.length(read.slot) + len(read.tokens))
        ahead = {read.slot: len(read.tokens) for read in reads}
        for row in rows:
            self._check_tokens((row.anchor, *row.draft.tokens))
            deepest = max(row.draft.depths(), default=0)
            self._slots.reserve(row.slot, self.length(row.slot) + ahead.get(row.slot, 0) + 1 + deepest)

    def _pass(self, rows: Sequence[RowInput], reads: Sequence[Read]) -> tuple[PassOutput, list[NDArray[np.float32]]]:
        """One call of the decoder, for which there is room; and of each part of a prompt the features wanted of it."""
        plan = self._plan(rows, [read for read in reads if len(read.tokens)])
        starts = plan.first.tolist()
        aside = starts[len(rows)]
        featured = plan.rows if any(read.last != 0 for read in reads) else aside
        features = np.empty((featured, self.features_width), np.float32)
        logits = self._buffers.take(aside, self.vocab_size)
        if plan.rows:
            self._run(plan, logits if aside else None, features if features.size else None, len(starts) - 1 - len(rows))
        if self._padding is not None:
            logits[:, self._padding] = -np.inf
        spans = [slice(start, end) for start, end in pairwise(starts[: len(rows) + 1])]
        self._pending = [(row.slot, span.start, span.stop) for row, span in zip(rows, spans, strict=True)]
        kept = [features[span] for span in spans] if self.features_width else None
        read_features, end = [], aside
        for read in reads:
            self._slots.grow(read.slot, len(read.tokens))
            end += len(read.tokens)
            wanted = len(read.tokens) if read.last is None else read.last
            read_features.append(features[end - wanted : end] if featured > aside else features[:0])
        return PassOutput([logits[span] for span in spans], kept), read_features

    def _plan(self, rows: Sequence[RowInput], chains: Sequence[Read] = ()) -> Pass:
        """Flatten rows, and parts of prompts behind them."""
        tokens: list[int] = []
        parents: list[int] = []
        first = [0]
        for row in rows:
            base = len(tokens)
            tokens += [row.anchor, *row.draft.tokens]
            parents += [-1, *(base + 1 + parent for parent in row.draft.parents)]
            first.append(len(tokens))
        for read in chains:
            base = len(tokens)
            tokens += read.tokens
            parents += [-1, *range(base, base + len(read.tokens) - 1)]
            first.append(len(tokens))
        slots = [row.slot for row in rows] + [read.slot for read in chains]
        ahead = {read.slot: len(read.tokens) for read in chains}
        prefix = [self._slots.lengths[slot] for slot in slots]
        for index, row in enumerate(rows):
            prefix[index] += ahead.get(row.slot, 0)
        return Pass(
            tokens=np.asarray(tokens, np.int32),
            parents=np.asarray(parents, np.int32),
            first=np.asarray(first, np.int32),
            prefix=np.asarray(prefix, np.int32),
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
        self, plan: Pass, logits: NDArray[np.float32] | None, features: NDArray[np.float32] | None, stored: int
    ) -> None:
        if self._debug:
            plan.check(self._shape)
            self._slots.check()
            self._parents = plan.parents
        if self._rope.ensure(plan.end):
            self._decoder.rope(self._rope.cos, self._rope.sin)
        self._decoder.forward(plan, logits, features, stored)

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
