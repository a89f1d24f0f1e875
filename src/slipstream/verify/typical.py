"""Typical acceptance (Medusa, Cai et al. 2024): lossy, never a default; it marks every result it touches."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from slipstream.core.errors import InputError, NonFiniteError
from slipstream.core.tree import ANCHOR, Draft
from slipstream.core.types import Row, Verdict

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Typical:
    """Accepts a token x when p(x) > min(threshold, alpha exp(-entropy(p))); p: the target's processed distribution.

    The longest accepted path wins, among equals the first in draft order; then the target's own token is drawn with
    keyed noise. Greedy rows reduce to the exact rule. Raises InputError for factors outside (0, 1).
    """

    name = "typical"
    exact = False
    same_tokens = False

    def __init__(self, threshold: float = 0.09, alpha: float = 0.3) -> None:
        for label, value in (("threshold", threshold), ("alpha", alpha)):
            if not 0.0 < value < 1.0:
                raise InputError(f"typical acceptance {label} is {value!r}; it must lie between 0 and 1")
        self._threshold, self._alpha = threshold, alpha

    def __call__(self, logits: NDArray[np.float32], draft: Draft, row: Row) -> Verdict:
        """logits [1 + nodes, vocab]: row 0 for the anchor, row i + 1 for node i."""
        standing, best = {ANCHOR}, ANCHOR
        try:
            for node in range(ANCHOR, len(draft)):
                if node not in standing:
                    continue
                best = max(best, node, key=lambda end: len(draft.path(end)))
                if children := draft.children(node):
                    p = row.sampler.distribution(logits[node + 1], draft.path_tokens(node))
                    floor = self._floor(p)
                    standing |= {child for child in children if p[draft.tokens[child]] > floor}
            own = row.sampler.draw(logits[best + 1], draft.path_tokens(best))
        except NonFiniteError as error:
            return Verdict([], [], error=str(error))
        return Verdict([*draft.path_tokens(best), own], draft.path(best))

    def _floor(self, p: NDArray[np.float64]) -> float:
        present = p[p > 0.0]
        entropy = -float(np.sum(present * np.log(present)))
        return min(self._threshold, self._alpha * math.exp(-entropy))
