"""Drafts from a folder of the user's own text or code: how it went on where the last tokens occur there."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from slipstream.core.tree import ANCHOR
from slipstream.core.types import Limit, Observation, Offers, Row
from slipstream.drafters.base import Drafter
from slipstream.drafters.suffix_array import WORD, SuffixArray

LONGEST = 16
"""Tokens matched at most."""
SHORTEST = 2
"""A match of one token says nothing that the model does not know better."""
DOUBT = 4.0
LEAST = 0.03
MOST_CERTAIN = 0.98

Run = tuple[int, int, int]
"""Suffixes low to high of the array, which begin with the same `length` tokens."""


class Corpus(Drafter):
    """A tree of the most frequent continuations of the longest match. vocab_size: ids from there on are separators."""

    name = "corpus"

    def __init__(self, text: SuffixArray, vocab_size: int) -> None:
        self.text, self.vocab_size = text, vocab_size
        self._rows: dict[int, tuple[int, Run]] = {}

    def begin(self, row: Row) -> None:
        """A row joins; its match is looked up when first asked for."""
        self._rows[row.id] = (0, (0, 0, 0))

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[Offers]:
        """One tree per row, nodes by falling probability of their path."""
        return [self._tree(row, limit) for row, limit in zip(rows, limits, strict=True)]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Nothing to learn: the corpus stays as it is."""

    def end(self, row: Row) -> None:
        """The row leaves."""
        self._rows.pop(row.id, None)

    def match(self, row: Row) -> Run:
        """The run of the longest suffix of the row's tokens that the corpus holds; the last match is extended."""
        known, run = self._rows[row.id]
        tokens = row.tokens
        if not 0 < known <= len(tokens) or len(tokens) - known > LONGEST:
            run = self._longest(tokens, min(LONGEST, len(tokens)))
        else:
            for end in range(known + 1, len(tokens) + 1):
                run = self._extend(tokens[max(0, end - LONGEST) : end], run)
        self._rows[row.id] = (len(tokens), run)
        return run

    def _extend(self, tokens: Sequence[int], run: Run) -> Run:
        """The match after one more token (the last of `tokens`): the old one and it, or a shorter one."""
        low, high, length = run
        if length < LONGEST and length + 1 <= len(tokens):
            low, high = self.text.find(_pattern(tokens[len(tokens) - length - 1 :]), low, high or None)
            if low < high:
                return low, high, length + 1
        return self._longest(tokens, min(length, len(tokens)))

    def _longest(self, tokens: Sequence[int], most: int) -> Run:
        """The longest suffix of `tokens`, up to `most` of them: if one occurs, so do all shorter ones."""
        best, shortest = (0, 0, 0), 1
        while shortest <= most:
            length = (shortest + most + 1) // 2
            low, high = self.text.find(_pattern(tokens[len(tokens) - length :]))
            if low < high:
                best, shortest = (low, high, length), length + 1
            else:
                most = length - 1
        return best

    def _tree(self, row: Row, limit: Limit) -> Offers:
        offers = Offers(self.name)
        run = self.match(row)
        if run[2] < SHORTEST:
            return offers
        matched = row.tokens[len(row.tokens) - run[2] :]
        waiting: list[tuple[float, int, float, int, list[int], int]] = []
        order, least = 0, max(LEAST, limit.floor)
        parent, path, reach = ANCHOR, list[int](), 1.0
        while len(offers) < limit.nodes:
            if len(path) < limit.depth and run[1] > run[0]:
                for token, chance in self._next(run, limit.width):
                    if reach * chance < least:
                        break
                    order += 1
                    heapq.heappush(waiting, (-reach * chance, order, chance, parent, [*path, token], run[2]))
            if not waiting:
                break
            negative, _, chance, above, path, length = heapq.heappop(waiting)
            offers.tokens.append(path[-1])
            offers.parents.append(above)
            offers.probs.append(chance)
            offers.features.append(float(length))
            parent, reach = len(offers) - 1, -negative
            run = (*self.text.find(_pattern([*matched, *path])), len(matched) + len(path))
        return offers

    def _next(self, run: Run, width: int) -> list[tuple[int, float]]:
        """(token, chance) after a run, best first: its share of the occurrences, times how far the match is trusted."""
        low, high, length = run
        total = high - low
        trust = total * length / (total * length + DOUBT)
        found = self.text.followers(low, high, length)[: max(1, width)]
        return [(token, min(trust * n / total, MOST_CERTAIN)) for token, n in found if token < self.vocab_size]


def _pattern(tokens: Sequence[int]) -> bytes:
    return b"".join(token.to_bytes(WORD, "big") for token in tokens)
