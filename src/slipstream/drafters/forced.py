"""Forced text: where a grammar leaves one way to go on, its tokens are drafted. They are guesses like all others."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.core.types import Limit, Observation, Offers, Row
from slipstream.drafters.base import Drafter

CHANCE = 0.97
"""Prior chance of a forced token: the text is certain, that the model cuts it into the usual tokens is not quite."""


class Forced(Drafter):
    """Drafts what the grammar of a row forces, such as the names of a JSON schema; nothing for rows without one."""

    name = "grammar"

    def begin(self, row: Row) -> None:
        """Nothing to prepare: the row's sampler knows its grammar."""

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[Offers]:
        """One chain per row."""
        return [self._chain(row, min(limit.nodes, limit.depth)) for row, limit in zip(rows, limits, strict=True)]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Nothing to learn: the grammar follows the committed tokens by itself."""

    def end(self, row: Row) -> None:
        """Nothing is kept per row."""

    def _chain(self, row: Row, size: int) -> Offers:
        tokens = row.sampler.forced()[:size]
        return Offers(self.name, tokens, list(range(-1, len(tokens) - 1)), [CHANCE] * len(tokens))
