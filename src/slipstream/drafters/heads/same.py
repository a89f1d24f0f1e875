"""What a head drafts on made-up hidden states: two heads that draft the same there are the same head."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slipstream.drafters.heads.medusa import Medusa
from slipstream.drafters.heads.parts import TargetParts
from slipstream.drafters.heads.weights import eagle_weights, rope_of
from slipstream.kernels.head import make_eagle_head
from slipstream.kernels.passes import BLOCK, Pass
from slipstream.models.heads.head import Head, store

ROWS = 24
DISTINCT = 512
"""Different rows of a made-up embedding, repeated to fill the vocabulary."""


def made_up_parts(head: Head) -> TargetParts:
    """A target's parts with random numbers, of the sizes this head needs."""
    config, rng = head.config, np.random.default_rng(0)
    vocab = max(config.vocab, int(head.ids.max(initial=0)) + 1)
    few = store(rng.standard_normal((min(DISTINCT, vocab), config.hidden), np.float32), "F16")
    rows = type(few)(few.type, (vocab, config.hidden), few.raw[np.arange(vocab) % len(few.raw)])
    return TargetParts(rows, rows, 1 + rng.random(config.target_hidden, np.float32), 1e-5)


def drafts(head: Head, target: TargetParts | None = None) -> list[NDArray[np.float32]]:
    """Logits of a first level and of a second one below it; for Medusa those of every head.

    target: real parts, or made-up ones. Two heads are to be asked with the same.
    """
    target = target or made_up_parts(head)
    rng = np.random.default_rng(1)
    if head.config.kind == "medusa":
        drafter = Medusa(head, target, head.config.vocab)
        states = rng.standard_normal((ROWS, head.config.hidden), np.float32)
        return [drafter.logits(number, states) for number in range(head.config.medusa_heads)]
    weights, rope = eagle_weights(head, target), rope_of(head.config)
    pool = np.zeros((-(-ROWS // BLOCK), weights.shape.block_floats), np.float32)
    runner = make_eagle_head(weights, pool)
    runner.rope(rope.cos, rope.sin)
    tokens = rng.integers(0, min(DISTINCT, target.embedding.shape[0]), 2 * ROWS).astype(np.int32)
    features = rng.standard_normal((ROWS, weights.features * weights.feature), np.float32)
    tables = np.arange(len(pool), dtype=np.int32)[None]
    first, every = np.asarray([0, ROWS], np.int32), np.arange(ROWS, dtype=np.int32)

    def rows(ids: NDArray[np.int32], parents: NDArray[np.int32], prefix: int) -> Pass:
        return Pass(tokens=ids, parents=parents, first=first, prefix=np.asarray([prefix], np.int32), tables=tables)

    top = runner.forward(rows(tokens[:ROWS], every - 1, 0), features, True, True, every)
    below = runner.forward(rows(tokens[ROWS:], np.full(ROWS, -1, np.int32), ROWS), top.hidden, False, False, every)
    return [top.logits, below.logits]


def same_drafts(one: Head, other: Head) -> bool:
    """True when both give the same logits, bit for bit, over the same tokens."""
    if not np.array_equal(one.ids, other.ids) or one.config.vocab != other.config.vocab:
        return False
    target = made_up_parts(one)
    pairs = zip(drafts(one, target), drafts(other, target), strict=True)
    return all(a.shape == b.shape and np.array_equal(a, b, equal_nan=True) for a, b in pairs)
