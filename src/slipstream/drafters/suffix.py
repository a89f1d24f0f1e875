"""Drafts from a suffix automaton over prompt and output: the most probable continuations of the longest match."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from slipstream.core.tree import ANCHOR
from slipstream.core.types import Limit, Observation, Offers, Row
from slipstream.drafters.automaton import NONE, ROOT, SuffixAutomaton

BACKED_OFF = 3
"""Contexts that are blended: the longest match and the next shorter ones with other occurrences."""
IGNORED = 0.1
"""Shorter contexts that have less weight than this together are not looked at."""
DOUBT = 3.0
"""Weight of the shorter contexts against one occurrence of a match of one token."""
MOST_CERTAIN = 0.99
LEAST = 0.03
"""Paths less probable than this, or than the limit's floor, are not offered: verifying them would not pay."""

Guess = tuple[float, int, int, int, int]
"""Chance, when last seen, token, state after it, tokens that match there."""


def predict(automaton: SuffixAutomaton, state: int, match: int, width: int) -> list[Guess]:
    """The `width` most probable next tokens after `state`, of which the last `match` tokens are the text's own.

    chance = trust * share of the token among the followers + (1 - trust) * chance in the next shorter context, where
    trust = seen * match / (seen * match + DOUBT): long matches and many occurrences outweigh the shorter context.
    Equal chances: the one seen latest first.
    """
    chances: dict[int, list[float]] = {}
    where: dict[int, tuple[int, int]] = {}
    rest = 1.0
    for _ in range(BACKED_OFF):
        if state <= ROOT or rest < IGNORED:
            break
        followers = automaton.followers(state)
        if followers > 0:
            trust = followers * match / (followers * match + DOUBT)
            weight = rest * trust / followers
            rest *= 1.0 - trust
            for token, after in automaton.continuations(state):
                entry = chances.get(token)
                if entry is None:
                    chances[token] = [weight * automaton.count[after], float(automaton.latest[after])]
                    where[token] = (after, match + 1)
                else:
                    entry[0] += weight * automaton.count[after]
        state = automaton.link[state]
        match = automaton.length[state] if state > ROOT else 0
    ranked = [(min(chance, MOST_CERTAIN), int(latest), token) for token, (chance, latest) in chances.items()]
    ranked.sort(reverse=True)
    return [(chance, latest, token, *where[token]) for chance, latest, token in ranked[:width]]


class Suffix:
    """A tree of the most probable continuations; a chain when the limit's width is one."""

    name = "suffix"

    def __init__(self) -> None:
        self._rows: dict[int, SuffixAutomaton] = {}

    def begin(self, row: Row) -> None:
        """A row joins: reading its text takes some 3 microseconds per token."""
        self._rows[row.id] = SuffixAutomaton()
        self._rows[row.id].extend(row.tokens)

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
        offers = Offers(self.name)
        start = automaton.match()
        if start == ROOT:
            return offers
        # Best path first; the counter keeps the order of siblings and makes equal ones comparable.
        waiting: list[tuple[float, int, float, int, int, int, int, int]] = []
        order, least = 0, max(LEAST, limit.floor)
        at: tuple[int, int, int, int, float] = (start, automaton.length[start], ANCHOR, 0, 1.0)
        while len(offers) < limit.nodes:
            state, match, parent, depth, reach = at
            if depth < limit.depth and state != NONE:
                for chance, _, token, after, matched in predict(automaton, state, match, limit.width):
                    if reach * chance < least:
                        break
                    order += 1
                    entry = (-reach * chance, order, chance, token, after, matched, parent, depth + 1)
                    heapq.heappush(waiting, entry)
            if not waiting:
                break
            negative, _, chance, token, state, match, parent, depth = heapq.heappop(waiting)
            offers.tokens.append(token)
            offers.parents.append(parent)
            offers.probs.append(chance)
            offers.features.append(float(match))
            at = (state, match, len(offers) - 1, depth, -negative)
        return offers
