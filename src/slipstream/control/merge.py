"""Several drafters' offers for one row become one tree whose best part is verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.core.tree import ANCHOR, Draft, reach_of
from slipstream.core.types import Offers, Row
from slipstream.kernels.tree import Offer, Ranker, make_ranker
from slipstream.sampling import noise


@dataclass(slots=True)
class Ranked:
    """One tree in the order in which its nodes deserve verification; every beginning of it is itself a tree.

    tokens, parents: as in Draft. sources: the drafter whose estimate was highest. chances: probability of each node
    given its parent. reach: probability that its whole path is accepted, never rising along the order. drawn: set when
    the tree must be verified whole, because its tokens are random draws.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    reach: list[float] = field(default_factory=list)
    drawn: Offers | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def draft(self, count: int) -> Draft:
        """The best `count` nodes; all of them when the tree was drawn."""
        if self.drawn is not None:
            count = len(self)
        q = self.drawn.q if self.drawn is not None else None
        expected = sum(self.reach[:count])
        return Draft(self.tokens[:count], self.parents[:count], q, self.sources[:count], expected)


class Merger:
    """Ranks the union of offers, and learns from outcomes what each source's word is worth, alone and beside others."""

    def __init__(self) -> None:
        self._ranker: Ranker = make_ranker()
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []

    def tree(self, row: Row, offers: Sequence[Offers], keep: bool = False) -> Ranked:
        """All offers for one row as one ranked tree; the same token below the same path is one node.

        A drawn offer is taken whole, in its own order, and alone: leaving out or re-ranking draws would bias the
        classical verifiers. keep: remember the tree until `learn`.
        """
        given: list[Offer] = [
            (self._number(offer.source), offer.tokens, offer.parents, offer.probs) for offer in offers
        ]
        keys, scale = _noise(row, max((len(offer) for offer in offers), default=0))
        tokens, parents, sources, chances, reach = self._ranker.rank(row.id, given, keys, scale, keep)
        drawn = next((offer for offer in offers if offer.drawn and offer.tokens), None)
        if drawn is not None:
            return _whole(drawn)
        names = self._names
        return Ranked(tokens, parents, [names[number] for number in sources], chances, reach)

    def learn(self, row: Row, emitted: Sequence[int]) -> list[tuple[str, float]]:
        """Compare the kept tree with what was emitted; returns by source how surprising a right first token was."""
        return [(self._names[number], surprise) for number, surprise in self._ranker.learn(row.id, list(emitted))]

    def path(self, offer: Offers) -> list[float]:
        """Chance by depth that one offer's best path is accepted that far, were it the only one."""
        number, depths = self._number(offer.source), list[int]()
        best: dict[int, tuple[float, int]] = {}
        for index, (parent, belief) in enumerate(zip(offer.parents, offer.probs, strict=True)):
            depths.append(1 if parent == ANCHOR else depths[parent] + 1)
            chance = self._ranker.chance(number, belief, depths[index])
            if parent not in best or chance > best[parent][0]:
                best[parent] = (chance, index)
        found: list[float] = []
        node, reach = ANCHOR, 1.0
        while node in best:
            chance, node = best[node]
            reach *= chance
            found.append(reach)
        return found

    def forget(self, row: Row) -> None:
        """The row leaves."""
        self._ranker.forget(row.id)

    def _number(self, source: str) -> int:
        number = self._numbers.get(source)
        if number is None:
            number = self._numbers[source] = len(self._names)
            self._names.append(source)
        return number


def _noise(row: Row, depth: int) -> tuple[list[int], float]:
    """Keys of the noise that decides the next `depth` tokens, and what a unit of it weighs against logits."""
    if row.params.greedy:
        return [], 0.0
    return noise.keys(row.seed, len(row.tokens), depth), min(row.params.temperature, 1.0)


def _whole(offer: Offers) -> Ranked:
    reach = reach_of(offer.parents, offer.probs)
    return Ranked(
        list(offer.tokens), list(offer.parents), [offer.source] * len(offer), list(offer.probs), reach, drawn=offer
    )


def best_chain(tree: Ranked) -> Ranked:
    """The one path of a tree on which most tokens are expected to be accepted (a drawn tree stays as it is)."""
    if tree.drawn is not None or not len(tree):
        return tree
    gain: list[float] = []
    for node, parent in enumerate(tree.parents):
        gain.append(tree.reach[node] + (gain[parent] if parent != ANCHOR else 0.0))
    nodes = Draft(tree.tokens, tree.parents).path(max(range(len(tree)), key=lambda index: (gain[index], -index)))
    return Ranked(
        [tree.tokens[i] for i in nodes],
        list(range(-1, len(nodes) - 1)),
        [tree.sources[i] for i in nodes],
        [tree.chances[i] for i in nodes],
        [tree.reach[i] for i in nodes],
    )
