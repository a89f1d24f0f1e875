"""Log-probabilities that are reported beside tokens: those of the raw logits, before every processor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.core.errors import NonFiniteError
from slipstream.core.types import TokenLogprob
from slipstream.kernels import sampling as kernels

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def token_logprob(logits: NDArray[np.float32], token: int, count: int) -> TokenLogprob:
    """Log-softmax (float64) of `token`, and the `count` most likely tokens, by logit and then id.

    Raises NonFiniteError when a logit is NaN or +infinity.
    """
    found = kernels.logprobs(logits, token, count)
    if found is None:
        raise NonFiniteError("the model's logits are NaN or infinite; no log-probabilities exist")
    own, ids, values = found
    # Rounding can lift the log-probability of a certain token above 0 by an ulp.
    return TokenLogprob(token, min(own, 0.0), [(one, min(value, 0.0)) for one, value in zip(ids, values, strict=True)])
