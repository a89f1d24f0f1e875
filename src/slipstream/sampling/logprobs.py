"""Log-probabilities that are reported beside tokens: those of the raw logits, before every processor."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slipstream.core.types import TokenLogprob
from slipstream.kernels import sampling as kernels
from slipstream.kernels.reference_sampling import largest


def token_logprob(logits: NDArray[np.float32], token: int, count: int) -> TokenLogprob:
    """Log-softmax (float64) of `token`, and the `count` most likely tokens, by log-probability and then id."""
    values = np.minimum(kernels.log_softmax(logits), 0.0)
    best = largest(values, np.flatnonzero(values > -np.inf), count) if count else ()
    return TokenLogprob(token, float(values[token]), [(int(other), float(values[other])) for other in best])
