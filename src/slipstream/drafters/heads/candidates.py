"""From a head's logits to the tokens worth offering at a node, and their chances."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slipstream.core.errors import NonFiniteError
from slipstream.core.params import SamplingParams
from slipstream.core.types import Row
from slipstream.drafters.small_model import MOST_CERTAIN, RIVALS, same_noise_chances
from slipstream.kernels import sampling as kernels
from slipstream.sampling import noise

NEAREST = 24
"""Tokens whose noise is looked at when sampling: with fewer chances the noise must be improbably large."""

Candidates = tuple[list[int], list[float], list[float]]
"""Tokens, best first; chances; what the head knew of each: its probability, or the gap to the best score."""


def is_plain(params: SamplingParams) -> bool:
    """True when nothing but temperature and cuts stands between logits and draw."""
    return (
        params.repetition_penalty == 1.0
        and params.frequency_penalty == 0.0
        and params.presence_penalty == 0.0
        and not params.logit_bias
        and params.structured_outputs is None
        and not params.min_tokens
    )


def candidates(
    row: Row, path: Sequence[int], logits: NDArray[np.float32], ids: NDArray[np.int32], width: int, vocab: int
) -> Candidates:
    """The best `width` tokens after `path`; none where the logits are broken. ids: the target's id of each logit.

    Greedy: by the head's own probability. Sampled: by its scores plus the row's own noise, which the target's draw will
    meet too. Where processors act, they act on the head's logits as well.
    """
    if not is_plain(row.params):
        return _processed(row, path, logits, ids, width, vocab)
    greedy = row.params.greedy
    found = kernels.logprobs(logits, 0, min(width if greedy else max(NEAREST, width), len(logits)))
    if found is None:
        return [], [], []
    places, logs = found[1], found[2]
    if greedy:
        chances = [min(math.exp(log), MOST_CERTAIN) for log in logs]
        return [ids.item(place) for place in places], chances, chances
    tokens = ids[places].astype(np.int64)
    key = noise.key(row.seed, len(row.tokens) + len(path))
    scores = np.asarray(logs) / row.params.temperature + kernels.gumbel(key, tokens)
    order = np.lexsort((tokens, -scores))[: max(width, RIVALS)]
    return _by_gaps(row, tokens[order].tolist(), scores[order].tolist(), width)


def _processed(
    row: Row, path: Sequence[int], logits: NDArray[np.float32], ids: NDArray[np.int32], width: int, vocab: int
) -> Candidates:
    if kernels.argmax(logits) < 0:
        return [], [], []
    whole = np.full(vocab, -np.inf, np.float32)
    whole[ids] = logits
    try:
        tokens, scores = row.sampler.top(whole, path, max(width, RIVALS))
    except NonFiniteError:  # all that the head could say is banned here
        return [], [], []
    return _by_gaps(row, tokens, scores, width)


def _by_gaps(row: Row, tokens: list[int], scores: list[float], width: int) -> Candidates:
    chances = same_noise_chances(scores, row.params.temperature)
    gaps = [score - scores[0] for score in scores]
    return tokens[:width], chances[:width], gaps[:width]
