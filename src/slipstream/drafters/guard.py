"""The one place where a drafter may fail: it then offers nothing, is counted, and decoding goes on plainly."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from numbers import Integral
from time import perf_counter
from typing import TYPE_CHECKING

from slipstream.core.errors import InputError
from slipstream.core.tree import Draft
from slipstream.core.types import Limit, Observation, Offers, Row
from slipstream.drafters.base import Drafter, ReadsFeatures
from slipstream.drafters.forced import within_grammar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

log = logging.getLogger(__name__)

PATIENCE = 8
"""Failures in a row after which a drafter is no longer asked for the rows it failed on."""


class Guard:
    """A drafter around a drafter: keeps exceptions in, checks what comes out, asks only within limits, takes the time.

    Rows whose limit leaves nothing to this drafter are not passed on, so a drafter that is not asked costs nothing.
    """

    def __init__(self, drafter: Drafter, vocab_size: int):
        self.drafter, self.name, self.vocab_size = drafter, drafter.name, vocab_size
        self.looks_back = drafter.looks_back
        self.asked = 0
        """Steps in which it was asked for some row."""
        self._rows: dict[int, Row] = {}
        self._failures: dict[int, int] = {}
        self._in_a_row: dict[int, int] = {}
        self._logged = False

    def failures(self, row: Row) -> int:
        """How often this drafter failed for a row that has not ended."""
        return self._failures.get(row.id, 0)

    def wants(self, row: Row) -> bool:
        """Whether the drafter takes any interest in this row; none where it fails to say."""
        try:
            return self.drafter.wants(row)
        except Exception:
            self._failed([row])
            return False

    def begin(self, row: Row) -> None:
        """A row joins, at its beginning or later: row.tokens are its prompt and what was emitted so far."""
        self._rows[row.id] = row
        self._failures.setdefault(row.id, 0)
        self._in_a_row[row.id] = 0
        self._attempt([row], lambda: self.drafter.begin(row))

    @property
    def reads_features(self) -> bool:
        """Whether it works on the target's hidden states."""
        return isinstance(self.drafter, ReadsFeatures)

    def prefilled(self, row: Row, start: int, features: NDArray[np.float32]) -> None:
        """A part of the row's prompt was read; of interest to drafters that work on features."""
        drafter = self.drafter
        if isinstance(drafter, ReadsFeatures):
            self._rows[row.id] = row
            self._attempt([row], lambda: drafter.prefilled(row, start, features))

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[Offers]:
        """One well-formed tree per row, each with this drafter's share of seconds; empty where it failed."""
        asked: dict[int, Row] = {}
        own: list[Limit] = []
        for index, (row, limit) in enumerate(zip(rows, limits, strict=True)):
            if row.speculate and limit.asks(self.name) and self._in_a_row.get(row.id, 0) < PATIENCE and self.wants(row):
                asked[index] = row
                own.append(limit.of(self.name))
        if not asked:
            return [Offers(self.name) for _ in rows]
        self.asked += 1
        started = perf_counter()
        made = self._ask(list(asked.values()), own)
        share = (perf_counter() - started) / len(asked)
        for offer in made:
            offer.seconds, offer.looks_back = share, self.looks_back
        if len(made) == len(rows):
            return made
        offers = [Offers(self.name) for _ in rows]
        for index, offer in zip(asked, made, strict=True):
            offers[index] = offer
        return offers

    def _ask(self, rows: list[Row], limits: list[Limit]) -> list[Offers]:
        """An offer per row, all of them empty where the drafter fails."""
        try:
            for row in rows:
                if row.id not in self._rows:
                    self.begin(row)
            made = self.drafter.propose(rows, limits)
            if len(made) != len(rows):
                raise InputError(f"drafter {self.name} made {len(made)} offers for {len(rows)} rows")
            for offer in made:
                self._check(offer)
            made = [within_grammar(row, offer) for row, offer in zip(rows, made, strict=True)]
        except Exception:
            self._failed(rows)
            return [Offers(self.name) for _ in rows]
        for row in rows:
            self._in_a_row[row.id] = 0
        return made

    def observe(self, observations: Sequence[Observation]) -> None:
        """Pass on what a step showed about the rows that have joined."""
        known = [seen for seen in observations if seen.row.id in self._rows]
        if known:
            self._attempt([seen.row for seen in known], lambda: self.drafter.observe(known))

    def end(self, row: Row) -> None:
        """The row leaves for good."""
        self._release(row)
        self._failures.pop(row.id, None)
        self._in_a_row.pop(row.id, None)

    def retire(self) -> None:
        """Let go of all rows; those that are asked for again join anew."""
        for row in list(self._rows.values()):
            self._release(row)

    def _release(self, row: Row) -> None:
        if self._rows.pop(row.id, None) is not None:
            self._attempt([row], lambda: self.drafter.end(row))

    def _check(self, offer: Offers) -> None:
        Draft(offer.tokens, offer.parents).check(self.vocab_size)
        # Only whole numbers sum to one; the compiled core takes nothing else.
        if offer.source != self.name or not isinstance(sum(offer.tokens) + sum(offer.parents), Integral):
            raise InputError(f"drafter {self.name} offered {offer.tokens} below {offer.parents} as {offer.source!r}")
        if len(offer.probs) != len(offer.tokens) or len(offer.features) not in (0, len(offer.tokens)):
            raise InputError(f"drafter {self.name} offered {len(offer)} nodes but {len(offer.probs)} probabilities")
        probs = offer.probs
        # The sum is not finite where one of them is not a number, which comparisons may pass over.
        if probs and not (min(probs) >= 0.0 and max(probs) <= 1.0 and sum(probs) <= len(probs)):
            raise InputError(f"drafter {self.name} offered a probability outside 0..1: {offer.probs}")

    def _attempt(self, rows: Sequence[Row], action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            self._failed(rows)

    def _failed(self, rows: Sequence[Row]) -> None:
        """Whatever a drafter does wrong, the answer must not change: nothing is offered and decoding goes on."""
        for row in rows:
            self._failures[row.id] = self._failures.get(row.id, 0) + 1
            self._in_a_row[row.id] = self._in_a_row.get(row.id, 0) + 1
        if not self._logged:
            self._logged = True
            log.warning("drafter %s failed; decoding goes on without its offers", self.name, exc_info=True)
