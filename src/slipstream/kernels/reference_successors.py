"""Numpy twin of the table of successors, in the compiled core's order of operations: same bits, more slowly."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slipstream.kernels import reference_sampling as sampling

KEPT = 8
"""Successors per context."""
NEWEST = np.float32(0.5)
"""Weight of what was shown last."""
PAIR_WEIGHT = 0.85
"""Weight of the row of a pair, where it is known, against that of its second token."""
NO_TOKEN = -1

Ids = NDArray[np.int32]
Weights = NDArray[np.float32]
Tree = tuple[list[int], list[int], list[float]]


class Successors:
    """The three arrays, as in kernels/successors.py, and what can be done with them."""

    def __init__(self, ids: Ids, weights: Weights, owner: NDArray[np.int64]) -> None:
        self.ids, self.weights, self.owner = ids, weights, owner
        self.vocab = len(ids) - len(owner)

    def row_of(self, before: int, token: int) -> int:
        """The row of a pair."""
        return self.vocab + ((before * 0x9E3779B1 + token * 0x85EBCA77) >> 7) % len(self.owner)

    def learn(self, before: int, token: int, logits: NDArray[np.float32]) -> None:
        """Blend in what a row of logits says."""
        ids, values = (found[0] for found in sampling.top(logits[None], KEPT))
        if ids[0] < 0 or np.isposinf(values[0]):
            return
        peak = np.float64(values[0])
        share = np.zeros(KEPT)
        share[ids >= 0] = sampling.exp(values[ids >= 0].astype(np.float64) - peak)
        total = 0.0
        for one in share.tolist():
            total += one
        self._blend(before, token, ids.tolist(), (share / total).astype(np.float32), whole=True)

    def saw(self, before: int, token: int, following: int) -> None:
        """Blend in that a token was seen."""
        self._blend(before, token, [following], np.ones(1, np.float32), whole=False)

    def _blend(self, before: int, token: int, ids: Sequence[int], weights: Weights, whole: bool) -> None:
        self._blend_row(token, ids, weights, whole)
        if before < 0:
            return
        row, name = self.row_of(before, token), before * self.vocab + token
        if self.owner[row - self.vocab] != name:
            self.owner[row - self.vocab] = name
            self.ids[row], self.weights[row] = NO_TOKEN, 0.0
        self._blend_row(row, ids, weights, whole)

    def _blend_row(self, row: int, ids: Sequence[int], weights: Weights, whole: bool) -> None:
        """whole: the list is the model's own, and fills an empty row; a single sighting never does."""
        share = np.float32(1.0) if whole and self.weights[row, 0] <= 0 else NEWEST
        found = {one: share * weight for one, weight in zip(ids, weights, strict=True) if one >= 0}
        for one, weight in zip(self.ids[row].tolist(), self.weights[row], strict=True):
            if one >= 0:
                rest = (np.float32(1.0) - share) * weight
                found[one] = found[one] + rest if one in found else rest
        best = sorted(found.items(), key=lambda item: -item[1])[:KEPT]
        best = [(one, weight) for one, weight in best if weight > 0]
        self.ids[row], self.weights[row] = NO_TOKEN, 0.0
        for place, (one, weight) in enumerate(best):
            self.ids[row, place], self.weights[row, place] = one, weight

    def after(self, before: int, token: int) -> list[tuple[int, float]]:
        """(token, chance) of what may follow, best first."""
        found = self._entries(token)
        if before >= 0:
            row = self.row_of(before, token)
            if self.owner[row - self.vocab] == before * self.vocab + token:
                found = {one: weight * (1.0 - PAIR_WEIGHT) for one, weight in found.items()}
                for one, weight in self._entries(row).items():
                    found[one] = found.get(one, 0.0) + PAIR_WEIGHT * weight
        return sorted(found.items(), key=lambda item: -item[1])

    def _entries(self, row: int) -> dict[int, float]:
        pairs = zip(self.ids[row].tolist(), self.weights[row].tolist(), strict=True)
        return {one: weight for one, weight in pairs if one >= 0}

    def tree(self, before: int, token: int, limits: tuple[int, int, int], bounds: tuple[float, float]) -> Tree:
        """Nodes by falling probability of their path. limits: nodes, depth, width; bounds: least, most certain."""
        (nodes, deepest, width), (least, certain) = limits, bounds
        tokens: list[int] = []
        parents: list[int] = []
        chances: list[float] = []
        waiting: list[tuple[float, int, float, int, int, int, int]] = []
        order, parent, depth, reach = 0, NO_TOKEN, 0, 1.0
        while len(tokens) < nodes:
            if depth < deepest:
                for follower, weight in self.after(before, token)[:width]:
                    chance = min(weight, certain)
                    if reach * chance < least:
                        break
                    heapq.heappush(waiting, (-reach * chance, order, chance, token, follower, parent, depth + 1))
                    order += 1
            if not waiting:
                break
            negative, _, chance, before, token, above, depth = heapq.heappop(waiting)
            parent, reach = len(tokens), -negative
            tokens.append(token)
            parents.append(above)
            chances.append(chance)
        return tokens, parents, chances
