"""Sampling kernels behind plain functions: one row of logits in, tokens out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slipstream.kernels import reference_sampling as reference
from slipstream.kernels.reference_sampling import Floats, Ids, Rule

__all__ = ["NO_IDS", "NO_VALUES", "Rule", "argmax", "distribution", "gumbel", "log_softmax", "select", "uniforms"]

NO_IDS: Ids = np.zeros(0, np.int64)
NO_VALUES: Floats = np.zeros(0, np.float64)

gumbel = reference.gumbel
uniforms = reference.uniforms
log_softmax = reference.log_softmax


def argmax(logits: NDArray[np.float32]) -> int:
    """The lowest id of the largest logit; -1 when one is NaN or +infinity, or none is finite."""
    return reference.argmax(logits)


def select(
    logits: NDArray[np.float32], ids: Ids, values: Floats, rule: Rule, key: int, count: int
) -> tuple[list[int], list[float]]:
    """The best `count` tokens under processed scores plus the noise of `key`, best first, with these scores.

    ids, values: the distinct tokens whose processed logit differs from the raw one, and that processed logit (float64,
    before temperature; -inf bans). Greedy rules use no noise and no cuts. Empty lists when a raw logit is NaN or
    +infinity, or when nothing can be drawn.
    """
    z = reference.scores(logits, ids, values, rule.temperature)
    return ([], []) if z is None else reference.select(z, rule, key, count)


def distribution(logits: NDArray[np.float32], ids: Ids, values: Floats, rule: Rule) -> Floats | None:
    """Probabilities [vocab] (float64) of the draw, one-hot when greedy; None where `select` returns nothing."""
    z = reference.scores(logits, ids, values, rule.temperature)
    return None if z is None else reference.probabilities(z, rule)
