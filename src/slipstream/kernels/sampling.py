"""Sampling kernels behind plain functions: one row of logits in, tokens out.

The compiled core does the work; without it its numpy twin does, with the same bits, more slowly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.kernels import native
from slipstream.kernels import reference_sampling as reference
from slipstream.kernels.reference_sampling import MASK, Floats, Ids, Rule

__all__ = [
    "NO_IDS",
    "NO_VALUES",
    "Rule",
    "argmax",
    "distribution",
    "gumbel",
    "keys",
    "logprobs",
    "select",
    "top",
    "uniforms",
]

NO_IDS: Ids = np.zeros(0, np.int64)
NO_VALUES: Floats = np.zeros(0, np.float64)


core: Any = native.core
"""The compiled module; None without it and with SLIPSTREAM_KERNELS=numpy, where the numpy twin serves."""


def argmax(logits: NDArray[np.float32]) -> int:
    """The lowest id of the largest logit; -1 when one is NaN or +infinity, or none is finite."""
    return reference.argmax(logits) if core is None else int(core.argmax(logits))


def select(
    logits: NDArray[np.float32], ids: Ids, values: Floats, rule: Rule, key: int, count: int
) -> tuple[list[int], list[float]]:
    """The best `count` tokens under processed scores plus the noise of `key`, best first, with these scores.

    ids, values: the distinct tokens whose processed logit differs from the raw one, and that processed logit (float64,
    before temperature; -inf bans). Greedy rules use no noise and no cuts. Empty lists when a raw logit is NaN or
    +infinity, or when nothing can be drawn.
    """
    if core is not None:
        tokens, scores = core.select(logits, ids, values, *rule, key, count)
        return tokens, scores
    z = reference.scores(logits, ids, values, rule.temperature)
    return ([], []) if z is None else reference.select(z, rule, key, count)


def distribution(logits: NDArray[np.float32], ids: Ids, values: Floats, rule: Rule) -> Floats | None:
    """Probabilities [vocab] (float64) of the draw, one-hot when greedy; None where `select` returns nothing."""
    if core is not None:
        p = np.empty(len(logits))
        return p if core.probabilities(logits, ids, values, *rule, p) else None
    z = reference.scores(logits, ids, values, rule.temperature)
    return None if z is None else reference.probabilities(z, rule)


def logprobs(logits: NDArray[np.float32], token: int, count: int) -> tuple[float, list[int], list[float]] | None:
    """Log-softmax of raw logits: the token's, then the `count` likeliest ids and theirs; None when a logit is bad."""
    if core is not None:
        found: tuple[float, list[int], list[float]] | None = core.logprobs(logits, token, count)
        return found
    return reference.logprobs(logits, token, count)


def keys(seed: int, begin: int, count: int, stream: int) -> list[int]:
    """Keys of the noise of `count` positions (or steps) from `begin` on, in one stream; all of it modulo 2**64."""
    seed, begin = seed & MASK, begin & MASK
    if core is not None:
        found: list[int] = core.keys(seed, begin, count, stream)
        return found
    return [reference.key(seed, begin + place, stream) for place in range(count)]


def gumbel(key: int, ids: Ids) -> Floats:
    """G of each id under a key."""
    if core is None:
        return reference.gumbel(key, ids)
    out = np.empty(len(ids))
    core.gumbel(key, ids, out)
    return out


def uniforms(key: int, count: int) -> Floats:
    """u of the ids 0 to count - 1 under a key, strictly between 0 and 1."""
    if core is None:
        return reference.uniforms(key, np.arange(count, dtype=np.int64))
    out = np.empty(count)
    core.uniforms(key, out)
    return out


def top(logits: NDArray[np.float32], count: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Of each row of logits [rows, vocab] the `count` likeliest ids and their logits, [rows, count], best first.

    Order as everywhere; places that stay empty hold -1 and -infinity. A NaN is passed over.
    """
    if core is None:
        return reference.top(logits, count)
    ids = np.empty((len(logits), count), np.int32)
    values = np.empty((len(logits), count), np.float32)
    core.top(np.ascontiguousarray(logits), ids, values)
    return ids, values
