"""Ranking what drafters offer: compiled, or its Python twin with the same results where there is no compiled core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

from slipstream.kernels import native
from slipstream.kernels import reference_tree as reference
from slipstream.kernels.reference_tree import Offer, Ranking

__all__ = ["Offer", "Ranker", "Ranking", "make_ranker", "spread"]


class Ranker(Protocol):
    """As in kernels/reference_tree.py."""

    def chance(self, source: int, belief: float, depth: int) -> float:
        """Chance of a node of one source alone, given that its parent stands."""

    def rank(self, row: int, offers: list[Offer], keys: list[int], scale: float, keep: bool) -> Ranking:
        """All offers as one tree, best paths first. keys: of the noise of the next positions, none when greedy."""

    def learn(self, row: int, emitted: list[int]) -> list[tuple[int, float]]:
        """Compare the tree kept for a row with the tokens emitted; returns how surprising each source's hit was."""

    def forget(self, row: int) -> None:
        """Drop what was kept for a row."""


def make_ranker() -> Ranker:
    """One that knows nothing yet."""
    return reference.Ranker() if native.core is None else cast(Ranker, native.core.Ranker())


def spread(
    reaches: Sequence[Sequence[float]], costs: Sequence[float], base: int, tokens: float, fixed: float
) -> tuple[list[int], float, float]:
    """Nodes worth verifying of each row's tree, expected tokens and seconds; as in kernels/reference_tree.py."""
    if native.core is None:
        return reference.spread(reaches, costs, base, tokens, fixed)
    found: tuple[list[int], float, float] = native.core.spread(reaches, costs, base, tokens, fixed)
    return found
