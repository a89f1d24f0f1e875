"""A draft tree while it grows: expanded level by level where the joint probability is highest, then cut to the best."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.core.tree import ANCHOR
from slipstream.core.types import Limit, Offers, Row
from slipstream.drafters.heads.candidates import Candidates
from slipstream.drafters.small_model import prune

EXPANDED = 4
"""Nodes of a level that are expanded: so many rows cost a pass of the head next to nothing more."""
LEAST = 0.02
"""Paths less probable than this, or than the limit's floor, are not expanded."""


@dataclass(slots=True)
class Growing:
    """One row's tree. reach: probability of each node's whole path. level: the nodes added last."""

    row: Row
    limit: Limit
    depth: int
    offers: Offers
    reach: list[float] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    level: list[int] = field(default_factory=list)

    def add(self, parent: int, found: Candidates) -> list[int]:
        """Children of a node; returns their numbers."""
        tokens, chances, features = found
        offers, above = self.offers, 1.0 if parent == ANCHOR else self.reach[parent]
        first = len(offers)
        offers.tokens += tokens
        offers.parents += [parent] * len(tokens)
        offers.probs += chances
        offers.features += features
        self.reach += [above * chance for chance in chances]
        self.depths += [1 if parent == ANCHOR else self.depths[parent] + 1] * len(tokens)
        return list(range(first, len(offers)))

    def path(self, node: int) -> list[int]:
        """Tokens from the first level down to the node; none for the anchor."""
        tokens: list[int] = []
        while node != ANCHOR:
            tokens.append(self.offers.tokens[node])
            node = self.offers.parents[node]
        return tokens[::-1]

    def to_expand(self) -> list[int]:
        """The nodes of the newest level whose children could still be among the best; none at the deepest level."""
        if not self.level or self.depths[self.level[0]] >= self.depth:
            return []
        bar = max(LEAST, self.limit.floor)
        if len(self.reach) >= self.limit.nodes:
            bar = max(bar, sorted(self.reach, reverse=True)[self.limit.nodes - 1])
        chosen = sorted((node for node in self.level if self.reach[node] >= bar), key=lambda node: -self.reach[node])
        return sorted(chosen[: 1 if self.limit.width <= 1 else EXPANDED])

    def done(self) -> Offers:
        """The best nodes within the limit."""
        prune(self.offers, self.limit.nodes)
        return self.offers
