"""Typical acceptance (Medusa, Cai et al. 2024): lossy, never a default; it marks every result it touches."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from slipstream.core.errors import InputError, NonFiniteError
from slipstream.core.tree import ANCHOR, Draft
from slipstream.core.types import Row, Verdict
from slipstream.verify import rules

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
        children = rules.children_by_parent(draft)
        paths: dict[int, list[int]] = {ANCHOR: []}
        best: list[int] = []
        try:
            for parent in range(ANCHOR, len(draft)):
                if parent not in paths:
                    continue
                best = max(best, paths[parent], key=len)
                if parent in children:
                    p = row.sampler.distribution(logits[parent + 1], [draft.tokens[node] for node in paths[parent]])
                    floor = self._floor(p)
                    paths |= {n: [*paths[parent], n] for n in children[parent] if p[draft.tokens[n]] > floor}
            tokens = [draft.tokens[node] for node in best]
            own = row.sampler.draw(logits[best[-1] + 1 if best else 0], tokens)
        except NonFiniteError as error:
            return Verdict([], [], error=str(error))
        return Verdict([*tokens, own], best)

    def _floor(self, p: NDArray[np.float64]) -> float:
        present = p[p > 0.0]
        entropy = -float(np.sum(present * np.log(present)))
        return min(self._threshold, self._alpha * math.exp(-entropy))
