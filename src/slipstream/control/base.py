"""How much to draft. Controllers see offers and costs; they never see or change tokens that are emitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from slipstream.core.tree import Draft
from slipstream.core.types import Limit, Observation, Offers, Row


@dataclass(slots=True)
class StepCost:
    """Measured seconds of one step and the token rows (anchors and nodes) its pass verified.

    pass_s: 0 where the pass read prompts as well, which says nothing about its rows.

    draft_s: all that came before the pass, the controller's own time included. rest_s: what came after verification,
    what drafters do with its outcome included.
    """

    rows: int
    pass_s: float
    verify_s: float
    draft_s: float = 0.0
    rest_s: float = 0.0


class Controller(Protocol):
    """Chooses the nodes worth verifying."""

    def limits(self, rows: Sequence[Row]) -> list[Limit]:
        """How much drafters may offer for each row; nodes = 0 asks for nothing."""

    def beside(
        self, name: str, rows: Sequence[Row], limits: Sequence[Limit], offers: Sequence[Sequence[Offers]]
    ) -> Sequence[Limit]:
        """The limits, with what one drafter may still offer now that those before it have (offers[drafter][row]).

        The next drafter and `choose` get them as they are returned.
        """

    def choose(self, rows: Sequence[Row], offers: Sequence[Sequence[Offers]], limits: Sequence[Limit]) -> list[Draft]:
        """One draft per row out of all drafters' offers for it (offers[row][drafter]).

        limits: those the drafters were asked with, cut to the room each row has left; no draft may have more nodes.
        """

    def observe(self, observations: Sequence[Observation], cost: StepCost) -> None:
        """Learn from verification and from the clock."""

    def end(self, row: Row) -> None:
        """The row leaves."""

    def gains(self) -> dict[str, float]:
        """By drafter, where it is judged: speed with its offers over speed without them, its own time included."""
