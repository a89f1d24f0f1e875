"""Drafts from a suffix automaton over prompt and output: the most probable continuations of the longest match."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.core.types import Limit, Observation, Offers, Row
from slipstream.drafters.base import Drafter
from slipstream.kernels.suffix import Automaton, make_automaton

LEAST = 0.03
"""Paths less probable than this, or than the limit's floor, are not offered: verifying them would not pay."""


class Suffix(Drafter):
    """A tree of the most probable continuations; a chain when the limit's width is one."""

    name = "suffix"

    def __init__(self) -> None:
        self._rows: dict[int, Automaton] = {}

    def begin(self, row: Row) -> None:
        """A row joins; its text is read."""
        self._rows[row.id] = automaton = make_automaton()
        automaton.extend(row.tokens)

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[Offers]:
        """One tree per row, nodes by falling probability of their path."""
        return [self._tree(row, limit) for row, limit in zip(rows, limits, strict=True)]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Nothing to learn: the text itself is the memory."""

    def end(self, row: Row) -> None:
        """The row leaves."""
        self._rows.pop(row.id, None)

    def _tree(self, row: Row, limit: Limit) -> Offers:
        automaton = self._rows[row.id]
        automaton.extend(row.tokens[automaton.size :])
        found = automaton.tree(limit.nodes, limit.depth, max(1, limit.width), max(LEAST, limit.floor))
        tokens, parents, chances, matches = found
        return Offers(self.name, tokens, parents, chances, features=matches)
