"""What a model last said after each token and after each pair of tokens, behind plain functions.

The compiled core does the work; without it its numpy twin does, with the same bits, more slowly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slipstream.kernels import native
from slipstream.kernels import reference_successors as reference
from slipstream.kernels.reference_successors import KEPT, NO_TOKEN, Tree

__all__ = ["KEPT", "NO_TOKEN", "PAIRS", "Successors"]

PAIRS = 1 << 15
"""Places for contexts of two tokens; a new pair takes the place of an old one with the same hash."""


class Successors:
    """ids int32 and weights float32, [vocab_size + PAIRS, KEPT]: row t is for token t, the rows after it for pairs.

    owner int64 [PAIRS]: which pair a place belongs to, -1 for none. Weights are probabilities, best first; what a row
    lacks to 1 is unknown. Rows are blended, not replaced: half of a row is what was shown last, a quarter what came
    before it, and so on. Empty places hold -1 and 0.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.ids = np.full((vocab_size + PAIRS, KEPT), NO_TOKEN, np.int32)
        self.weights = np.zeros((vocab_size + PAIRS, KEPT), np.float32)
        self.owner = np.full(PAIRS, NO_TOKEN, np.int64)

    def learn(
        self, before: Sequence[int], tokens: Sequence[int], logits: NDArray[np.float32], order: Sequence[int]
    ) -> None:
        """Blend in what rows of logits [n, vocab_size] say about their contexts, row by row in this order.

        Context i is tokens[i] that followed before[i] (-1: nothing). A row with infinite logits teaches nothing.
        """
        if native.core is not None:
            logits = np.ascontiguousarray(logits, np.float32)
            native.core.successors_learn(self.ids, self.weights, self.owner, before, tokens, order, logits)
            return
        twin = self._twin()
        for row in order:
            twin.learn(before[row], tokens[row], logits[row])

    def read(self, tokens: Sequence[int]) -> None:
        """Learn which token follows which in a text."""
        if native.core is not None:
            native.core.successors_read(self.ids, self.weights, self.owner, tokens)
            return
        twin = self._twin()
        for place in range(1, len(tokens)):
            twin.saw(tokens[place - 2] if place > 1 else NO_TOKEN, tokens[place - 1], tokens[place])

    def tree(self, before: int, token: int, limits: tuple[int, int, int], bounds: tuple[float, float]) -> Tree:
        """Tokens, parents (-1 at the top) and chances of the most probable paths after `token` that followed `before`.

        limits: nodes in all, depth, children per node. bounds: the least probability of a path, the largest chance.
        """
        if native.core is not None:
            found: Tree = native.core.successors_tree(
                self.ids, self.weights, self.owner, before, token, *limits, *bounds
            )
            return found
        return self._twin().tree(before, token, limits, bounds)

    def _twin(self) -> reference.Successors:
        return reference.Successors(self.ids, self.weights, self.owner)
