"""The controller without opinions: always the same number of nodes, the best that are offered."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.control.base import StepCost
from slipstream.control.merge import Merger, best_chain
from slipstream.core.errors import InputError
from slipstream.core.tree import Draft
from slipstream.core.types import Limit, Observation, Offers, Row

SHAPES = ("chain", "tree")
TREE_WIDTH = 3
"""Children per node that drafters may offer."""
MOST_NODES = 512
"""Nodes per row at most: no pass is worth more, and all that is offered is looked at."""


def check_shape(max_nodes: int, shape: str) -> None:
    """Raise InputError unless the two settings of every controller make sense."""
    if isinstance(max_nodes, bool) or not isinstance(max_nodes, int) or not 0 <= max_nodes <= MOST_NODES:
        raise InputError(
            f"max_nodes is {max_nodes!r}; it must be a whole number up to {MOST_NODES}, 0 for plain decoding"
        )
    if shape not in SHAPES:
        raise InputError(f"shape is {shape!r}; it must be one of {', '.join(SHAPES)}")


class Fixed:
    """Up to `max_nodes` nodes per row in every step: one chain, or a tree of at most TREE_WIDTH children per node."""

    def __init__(self, max_nodes: int, shape: str = "chain"):
        check_shape(max_nodes, shape)
        self.max_nodes, self.shape = max_nodes, shape
        self.width = TREE_WIDTH if shape == "tree" else 1
        self._merger = Merger()

    def limits(self, rows: Sequence[Row]) -> list[Limit]:
        """The same for every row that speculates."""
        return [
            Limit(self.max_nodes, self.max_nodes, self.width) if row.speculate else Limit(0, 0, self.width)
            for row in rows
        ]

    def beside(
        self, name: str, rows: Sequence[Row], limits: Sequence[Limit], offers: Sequence[Sequence[Offers]]
    ) -> Sequence[Limit]:
        """Nobody is spared."""
        return limits

    def choose(self, rows: Sequence[Row], offers: Sequence[Sequence[Offers]], limits: Sequence[Limit]) -> list[Draft]:
        """The best nodes of all offers, as many as a row's limit allows (draws are never left out)."""
        drafts = []
        for row, of_row, limit in zip(rows, offers, limits, strict=True):
            tree = self._merger.tree(row, of_row)
            if self.shape == "chain":
                tree = best_chain(tree)
            drafts.append(tree.draft(limit.nodes))
        return drafts

    def observe(self, observations: Sequence[Observation], cost: StepCost) -> None:
        """Nothing is learned."""

    def end(self, row: Row) -> None:
        """Nothing is kept per row."""

    def gains(self) -> dict[str, float]:
        """Nobody is judged."""
        return {}
