"""What a drafter is: four verbs, and two for its own life. A drafter guesses; it never decides what is emitted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from slipstream.core.types import Limit, Observation, Offers, Row

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Drafter(Protocol):
    """Offers nodes for rows. It may be wrong in any way without changing the output.

    A class that names this protocol as its base need not write down `wants`, `forget` and `close`, if it takes all rows
    and has nothing to do.
    """

    name: str
    looks_back: int | None = None
    """Most tokens of a row that it reads when it is asked after a pause; None for all that it has not seen."""

    def wants(self, row: Row) -> bool:
        """Whether this row is of any interest; asked before it joins, and the same as long as it lives."""
        return True

    def begin(self, row: Row) -> None:
        """A row joins, after its prefill or later; row.tokens is the prompt and what was emitted so far."""

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[Offers]:
        """One tree per row, within its limit; an empty one when there is nothing to offer."""

    def observe(self, observations: Sequence[Observation]) -> None:
        """Learn what a step showed; row.tokens already holds the emitted tokens."""

    def end(self, row: Row) -> None:
        """The row leaves; drop all that belongs to it."""

    def forget(self) -> None:
        """Drop what earlier rows taught, as if the next row were the first."""
        return

    def close(self) -> None:
        """Save what is to be kept. Raises InputError when it cannot be written."""
        return


@runtime_checkable
class ReadsFeatures(Protocol):
    """A drafter that works on the target's hidden states: one verb more, beside the features of observations."""

    def prefilled(self, row: Row, start: int, features: NDArray[np.float32]) -> None:
        """Tokens `start` .. of the row entered the target's cache: their features [tokens, width].

        Comes before `begin`, part after part, from `looks_back` tokens before the end of the prompt on. What lies
        before the first part is older than that or was in the cache of an earlier answer.
        A row that ends before it begins is ended like any other.
        """
