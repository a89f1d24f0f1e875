"""Drafts and grammars: what a grammar forces is drafted, what it forbids is not verified in vain.

Both are guesses like all others: what is accepted is decided by verification alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.core.tree import ANCHOR
from slipstream.core.types import Limit, Observation, Offers, Row
from slipstream.drafters.base import Drafter

CHANCE = 0.97
"""Prior chance of a forced token: the text is certain, that the model cuts it into the usual tokens is not quite."""


class Forced(Drafter):
    """Drafts what the grammar of a row forces, such as the names of a JSON schema."""

    name = "grammar"

    def wants(self, row: Row) -> bool:
        """Rows without a grammar leave everything open."""
        return row.params.structured_outputs is not None

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


def within_grammar(row: Row, offer: Offers) -> Offers:
    """The offer without the nodes that cannot be accepted; random draws stay whole, as classical rules need them."""
    if offer.drawn or not offer.tokens or row.params.structured_outputs is None:
        return offer
    fits = row.sampler.fitting(offer.tokens, offer.parents)
    if all(fits):
        return offer
    kept = [node for node, good in enumerate(fits) if good]
    place = {node: index for index, node in enumerate(kept)} | {ANCHOR: ANCHOR}
    return Offers(
        offer.source,
        [offer.tokens[node] for node in kept],
        [place[offer.parents[node]] for node in kept],
        [offer.probs[node] for node in kept],
        features=[offer.features[node] for node in kept] if offer.features else [],
    )
