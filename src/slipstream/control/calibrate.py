"""From what drafters believe to what verification shows: chances by source, belief and depth, learned online."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slipstream.core.tree import ANCHOR
from slipstream.core.types import Offers

BINS = 10
"""Beliefs are told apart in tenths."""
DEPTH_EDGES = (1, 2, 4, 8)
"""Depths 1, 2, 3-4, 5-8 and beyond are told apart."""
WEIGHT = 4.0
"""Observations that the coarser estimate counts for against a finer one."""
FORGET = 0.97
"""Weight left of old observations with each new one of the same kind: about the last thirty count."""
LEAST, MOST = 0.002, 0.99
LOSS_FORGET = 0.995
"""Weight left of a source's mean loss with each new step."""


@dataclass(slots=True)
class _Tally:
    """Decayed sums: observations, hits, and what was believed beforehand."""

    seen: float = 0.0
    hits: float = 0.0
    believed: float = 0.0

    def add(self, hit: bool, belief: float) -> None:
        self.seen = self.seen * FORGET + 1.0
        self.hits = self.hits * FORGET + hit
        self.believed = self.believed * FORGET + belief


class _Source:
    """What is known of one source: as a whole, by tenth of its beliefs, and by tenth and depth."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.whole = _Tally()
        self.bins = [_Tally() for _ in range(BINS + 1)]
        self.cells = [[_Tally() for _ in range(len(DEPTH_EDGES) + 1)] for _ in range(BINS + 1)]


class Calibrator:
    """Corrects chances of acceptance in three steps, coarse to fine: source, then belief, then belief and depth.

    Each finer estimate starts from the coarser one, so a new source is soon known as a whole and later in detail.
    """

    def __init__(self, weight: float = WEIGHT) -> None:
        self._sources: dict[str, _Source] = {}
        self._weight = weight

    def chance(self, source: str, belief: float, depth: int) -> float:
        """Estimated probability that a node is accepted given that its parent is."""
        known = self._sources.get(source)
        if known is None:
            return min(max(belief, LEAST), MOST)
        weight, whole, bin_ = self._weight, known.whole, int(belief * BINS)
        expected = min(belief * (whole.hits + weight) / (whole.believed + weight), MOST)
        tally = known.bins[bin_]
        expected = (tally.hits + weight * expected) / (tally.seen + weight)
        tally = known.cells[bin_][_level(depth)]
        expected = (tally.hits + weight * expected) / (tally.seen + weight)
        return min(max(expected, LEAST), MOST)

    def loss(self, source: str) -> float:
        """Mean quadratic loss of a source's first level: the lower, the better it tells right nodes from wrong ones."""
        known = self._sources.get(source)
        return known.loss if known is not None else 0.0

    def compare(self, offers: Sequence[Offers], emitted: Sequence[int]) -> None:
        """Book the losses of sources in a step in which several of them offered something."""
        speaking = [offer for offer in offers if len(offer)]
        for offer in speaking if len(speaking) > 1 and emitted else ():
            loss = 0.0
            for token, parent, belief in zip(offer.tokens, offer.parents, offer.probs, strict=True):
                if parent == ANCHOR:
                    chance = self.chance(offer.source, belief, 1)
                    loss += chance * (chance - 2.0 * (token == emitted[0]))
            known = self._sources.get(offer.source)
            if known is not None:
                known.loss += (1.0 - LOSS_FORGET) * (loss - known.loss)

    def chances(self, offers: Offers) -> list[float]:
        """The same for every node of an offer."""
        depths: list[int] = []
        found: list[float] = []
        for parent, belief in zip(offers.parents, offers.probs, strict=True):
            depth = 1 if parent == ANCHOR else depths[parent] + 1
            depths.append(depth)
            found.append(self.chance(offers.source, belief, depth))
        return found

    def observe(self, source: str, belief: float, depth: int, hit: bool) -> None:
        """A node whose parent stood turned out right or wrong."""
        known = self._sources.get(source)
        if known is None:
            known = self._sources[source] = _Source()
        bin_ = int(belief * BINS)
        for tally in (known.whole, known.bins[bin_], known.cells[bin_][_level(depth)]):
            tally.add(hit, belief)

    def learn(self, offers: Offers, emitted: Sequence[int]) -> float:
        """Compare an offer with the tokens that were emitted, whether its nodes were verified or not.

        Returns how surprising a right first token was: 1 up to an estimate of .5, then falling to 0 at certainty.

        The emitted tokens decide every node whose parent lies on their path: so even plain decoding tells at no cost
        which first-level nodes would have been accepted, and a source that stopped paying is seen to come back.
        """
        surprise = 0.0
        for node, depth, hit in decided(offers.tokens, offers.parents, emitted):
            if hit and depth == 1:
                surprise = min(1.0, 2.0 - 2.0 * self.chance(offers.source, offers.probs[node], 1))
            self.observe(offers.source, offers.probs[node], depth, hit)
        return surprise


def decided(tokens: Sequence[int], parents: Sequence[int], emitted: Sequence[int]) -> Iterator[tuple[int, int, bool]]:
    """(node, depth, right) of every node whose parent lies on the path of the emitted tokens."""
    standing = {ANCHOR: 0}
    for node, parent in enumerate(parents):
        depth = standing.get(parent)
        if depth is None or depth >= len(emitted):
            continue
        hit = tokens[node] == emitted[depth]
        if hit:
            standing[node] = depth + 1
        yield node, depth + 1, hit


def _level(depth: int) -> int:
    return bisect_left(DEPTH_EDGES, depth)
