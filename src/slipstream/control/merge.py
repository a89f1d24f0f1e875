"""Several drafters' offers for one row become one tree whose best part is verified."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slipstream.core.tree import ANCHOR, Draft
from slipstream.core.types import Offers

ALONE, BESIDE = " alone", " beside"
"""Added to the label of nodes when all other sources had nothing to offer, or when the guide offers others there."""
LEFT_OVER = 0.02
"""Least probability that a guide's nodes leave to others."""
MOST_CERTAIN = 0.995
"""No combination of estimates is believed beyond this."""


@dataclass(slots=True)
class Ranked:
    """One tree in the order in which its nodes deserve verification; every beginning of it is itself a tree.

    tokens, parents: as in Draft. sources: the drafter whose estimate was highest.
    chances: probability of each node given its parent. reach: probability that its whole path is accepted,
    never rising along the order. labels, beliefs: which sources offered a node ("a" or "a+b"), and the highest of their
    chances, from which its own was made. drawn: as in Offers.
    whole: the tree must be verified whole, because its tokens are random draws.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    reach: list[float] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    beliefs: list[float] = field(default_factory=list)
    drawn: Offers | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def whole(self) -> bool:
        """True when nothing may be left out."""
        return self.drawn is not None

    def draft(self, count: int) -> Draft:
        """The best `count` nodes; all of them when the tree was drawn."""
        if self.drawn is not None:
            count = len(self)
        q = self.drawn.q if self.drawn is not None else None
        expected = sum(self.reach[:count])
        return Draft(self.tokens[:count], self.parents[:count], q, self.sources[:count], expected)


@dataclass(slots=True)
class _Node:
    token: int
    parent: int
    depth: int
    chance: float
    best: float
    source: str
    label: str
    total: float
    count: int = 1

    @property
    def belief(self) -> float:
        """Mean of the chances its sources gave it."""
        return self.total / self.count


Combine = Callable[[str, float, int], float]
"""(label, belief, depth) to the chance of a node that several sources could have offered."""


def merge(
    offers: Sequence[Offers], probs: Sequence[Sequence[float]] | None = None, combine: Combine | None = None
) -> Ranked:
    """All offers for one row as one ranked tree; the same token below the same path is one node.

    probs: the chances to use in place of the offers' own, one list per offer (calibrated ones).
    combine: where several sources were asked, the first is the guide: its nodes keep their chances, and `combine` says
    what it means that only others offered a node. Without it sources count as independent, and the chance of a
    duplicate is 1 - prod(1 - chance). Siblings exclude each other, so their
    chances are scaled down where they sum to more than one. A drawn offer is taken whole, in its own order, and alone:
    leaving out or re-ranking draws would bias the classical verifiers.
    """
    for offer in offers:
        if offer.drawn and len(offer):
            return _whole(offer)
    chances = probs if probs is not None else [offer.probs for offer in offers]
    nodes = _union(offers, chances)
    if combine is not None and len(offers) > 1:
        _weigh(nodes, offers[0], chances[0], combine, sum(len(offer) > 0 for offer in offers) == 1)
    _share(nodes)
    reach: list[float] = []
    for node in nodes:
        reach.append(node.chance * (reach[node.parent] if node.parent != ANCHOR else 1.0))
    # Chances lie below one, so parents outrank their children; equal ones keep the order of the offers.
    order = sorted(range(len(nodes)), key=lambda index: (-reach[index], index))
    ranked = Ranked()
    place = {ANCHOR: ANCHOR}
    for index in order:
        node = nodes[index]
        place[index] = len(ranked.tokens)
        ranked.tokens.append(node.token)
        ranked.parents.append(place[node.parent])
        ranked.sources.append(node.source)
        ranked.chances.append(node.chance)
        ranked.reach.append(reach[index])
        ranked.labels.append(node.label)
        ranked.beliefs.append(node.belief)
    return ranked


def _weigh(nodes: Sequence[_Node], guide: Offers, chances: Sequence[float], combine: Combine, alone: bool) -> None:
    """Set the chances of nodes that several sources could have offered; the guide is believed where it speaks.

    What only others offer competes for the probability that the guide's own nodes below the same parent leave over.
    """
    index = {(node.parent, node.token): place for place, node in enumerate(nodes)}
    taken: dict[int, float] = {}
    own: list[int] = []
    for token, parent, chance in zip(guide.tokens, guide.parents, chances, strict=True):
        above = ANCHOR if parent == ANCHOR else own[parent]
        own.append(index[above, token])
        taken[above] = taken.get(above, 0.0) + chance
    for place, chance in zip(own, chances, strict=True):
        nodes[place].chance, nodes[place].label = min(chance, MOST_CERTAIN), ""
    for node in nodes:
        if node.label:
            left = max(LEFT_OVER, 1.0 - taken.get(node.parent, 0.0))
            node.total, node.count = node.belief * left, 1
            node.label += ALONE if alone else BESIDE if node.parent in taken else ""
            node.chance = min(combine(node.label, node.total, node.depth), MOST_CERTAIN)


def _share(nodes: Sequence[_Node]) -> None:
    """Where chances of siblings sum to more than MOST_CERTAIN, make them shares of their odds.

    Of several that exclude each other one is right in proportion to its odds: a sure one hardly suffers from doubtful
    rivals, as it would if all were scaled alike.
    """
    totals: dict[int, float] = {}
    for node in nodes:
        totals[node.parent] = totals.get(node.parent, 0.0) + node.chance
    crowded = {parent: 1.0 for parent, total in totals.items() if total > MOST_CERTAIN}
    if not crowded:
        return
    for node in nodes:
        if node.parent in crowded:
            crowded[node.parent] += node.chance / (1.0 - node.chance)
    for node in nodes:
        if node.parent in crowded:
            node.chance = node.chance / (1.0 - node.chance) / crowded[node.parent]


def _union(offers: Sequence[Offers], chances: Sequence[Sequence[float]]) -> list[_Node]:
    nodes: list[_Node] = []
    known: dict[tuple[int, int], int] = {}
    for offer, probs in zip(offers, chances, strict=True):
        place: list[int] = []
        for token, parent, raw in zip(offer.tokens, offer.parents, probs, strict=True):
            chance = min(max(raw, 0.0), MOST_CERTAIN)
            above = ANCHOR if parent == ANCHOR else place[parent]
            index = known.get((above, token))
            if index is None:
                index = known[above, token] = len(nodes)
                depth = 1 if above == ANCHOR else nodes[above].depth + 1
                nodes.append(_Node(token, above, depth, chance, chance, offer.source, offer.source, chance))
            else:
                node = nodes[index]
                node.label += "+" + offer.source
                node.total += chance
                node.count += 1
                node.chance = min(1.0 - (1.0 - node.chance) * (1.0 - chance), MOST_CERTAIN)
                if chance > node.best:
                    node.best, node.source = chance, offer.source
            place.append(index)
    return nodes


def _whole(offer: Offers) -> Ranked:
    reach: list[float] = []
    for parent, prob in zip(offer.parents, offer.probs, strict=True):
        reach.append(prob * (1.0 if parent == ANCHOR else reach[parent]))
    return Ranked(
        list(offer.tokens), list(offer.parents), [offer.source] * len(offer), list(offer.probs), reach, drawn=offer
    )


def best_chain(tree: Ranked) -> Ranked:
    """The one path of a tree on which most tokens are expected to be accepted (a drawn tree stays as it is)."""
    if tree.whole or not len(tree):
        return tree
    gain: list[float] = []
    for node, parent in enumerate(tree.parents):
        gain.append(tree.reach[node] + (gain[parent] if parent != ANCHOR else 0.0))
    node = max(range(len(tree)), key=lambda index: (gain[index], -index))
    nodes = []
    while node != ANCHOR:
        nodes.append(node)
        node = tree.parents[node]
    nodes.reverse()
    return Ranked(
        [tree.tokens[i] for i in nodes],
        list(range(-1, len(nodes) - 1)),
        [tree.sources[i] for i in nodes],
        [tree.chances[i] for i in nodes],
        [tree.reach[i] for i in nodes],
        [tree.labels[i] for i in nodes],
        [tree.beliefs[i] for i in nodes],
    )
