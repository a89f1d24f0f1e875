"""Prompt lookup: the tokens that followed the last n tokens when they last occurred in this text."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.core.errors import InputError
from slipstream.core.types import Limit, Observation, Offers, Row
from slipstream.drafters.base import Drafter

MEASURED_MATCH = 32
"""A match is measured back to this many tokens; longer ones say no more."""


def match_chance(length: int) -> float:
    """Prior chance that the token after a match of `length` tokens is right: .25 for one, .5 for three, .84 for 16."""
    return length / (length + 3.0)


class NgramIndex:
    """Where each n-gram of a growing text was last followed by something; adding a token costs O(max_n)."""

    def __init__(self, max_n: int, min_n: int):
        self.max_n, self.min_n = max_n, min_n
        self.size = 0
        # One table per length; the value is the index of the token that followed. The n-gram that ends the text has
        # no follower yet and is therefore never found as its own match.
        self._after: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in range(min_n, max_n + 1)}

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in the tokens from `size` on; `tokens` is the whole text."""
        for index in range(self.size, len(tokens)):
            for n, table in self._after.items():
                if index >= n:
                    table[tuple(tokens[index - n : index])] = index
        self.size = len(tokens)

    def find(self, tokens: Sequence[int]) -> int | None:
        """Index of the token that followed the longest indexed suffix of the text, the latest such place."""
        for n in range(min(self.max_n, len(tokens)), self.min_n - 1, -1):
            place = self._after[n].get(tuple(tokens[len(tokens) - n :]))
            if place is not None:
                return place
        return None


class Lookup(Drafter):
    """Drafts the continuation of the longest earlier occurrence of the last `max_n` down to `min_n` tokens.

    When the continuation reaches the end of the text it goes on with the tokens just drafted: a text that repeats
    itself is continued in the same period.
    """

    name = "lookup"

    def __init__(self, max_n: int = 3, min_n: int = 1):
        if not 1 <= min_n <= max_n:
            raise InputError(f"lookup lengths are {min_n} to {max_n}; they must satisfy 1 <= min_n <= max_n")
        self.max_n, self.min_n = max_n, min_n
        self._rows: dict[int, NgramIndex] = {}

    def begin(self, row: Row) -> None:
        """A row joins: a microsecond per token of its text."""
        self._rows[row.id] = NgramIndex(self.max_n, self.min_n)
        self._rows[row.id].extend(row.tokens)

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[Offers]:
        """One chain per row."""
        return [self._chain(row, limit) for row, limit in zip(rows, limits, strict=True)]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Nothing to learn: the text itself is the memory."""

    def end(self, row: Row) -> None:
        """The row leaves."""
        self._rows.pop(row.id, None)

    def _chain(self, row: Row, limit: Limit) -> Offers:
        tokens, index = row.tokens, self._rows[row.id]
        index.extend(tokens)
        offers = Offers(self.name)
        place = index.find(tokens)
        if place is None:
            return offers
        match = _matched(tokens, place)
        drafted = offers.tokens
        for step in range(min(limit.nodes, limit.depth)):
            source = place + step
            drafted.append(tokens[source] if source < len(tokens) else drafted[source - len(tokens)])
            offers.parents.append(step - 1)
            offers.probs.append(match_chance(match + step))
            offers.features.append(float(match + step))
        return offers


def _matched(tokens: Sequence[int], place: int) -> int:
    """How many tokens before `place` equal those at the end of the text, up to MEASURED_MATCH."""
    length = 0
    while length < min(place, MEASURED_MATCH) and tokens[place - 1 - length] == tokens[-1 - length]:
        length += 1
    return length
