"""An online suffix automaton over token ids: every substring of a growing text, how often and where it last occurred.

After Blumer et al. (1985). A state stands for all substrings that end at the same places; `link` leads to the longest
suffix that occurs elsewhere too. Adding a token is amortised constant time; a token takes about 60 bytes.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence

ROOT = 0
NONE = -1
COUNTED_SUFFIXES = 64
"""Of the suffixes of the text, this many classes (longest first) are counted per token. A text has more only when it is
highly periodic, where the counts of its shortest substrings do not matter."""
WIDE = 12
"""A state with more continuations than this keeps a list of its most frequent ones."""
KEPT = 8


class SuffixAutomaton:
    """State arrays: link, length of the longest substring, count of occurrences, index after the latest one.

    Nearly every state has a single continuation, kept in two arrays; the others are in `_more`, a dict per state.
    """

    def __init__(self) -> None:
        self.link = array("i", [NONE])
        self.length = array("i", [0])
        self.count = array("i", [0])
        self.latest = array("i", [0])
        self._token = array("i", [NONE])
        self._to = array("i", [NONE])
        self._more: dict[int, dict[int, int]] = {}
        self._frequent: dict[int, list[int]] = {}
        self._last = ROOT
        self.size = 0

    def step(self, state: int, token: int) -> int:
        """The state after `token`, NONE when the substring with it does not occur."""
        if self._token[state] == token:
            return self._to[state]
        more = self._more.get(state)
        return more.get(token, NONE) if more else NONE

    def match(self) -> int:
        """State of the longest suffix of the text that also ends earlier; ROOT when there is none."""
        return max(ROOT, self.link[self._last])

    def followers(self, state: int) -> int:
        """How often an occurrence of the state was followed by a token: the one that ends the text is not."""
        return self.count[state] - (self.latest[state] == self.size)

    def continuations(self, state: int) -> Iterator[tuple[int, int]]:
        """(token, next state) after a state; of a wide state only the KEPT most frequent, the latest first on ties."""
        more = self._more.get(state)
        if more is None:
            if self._token[state] != NONE:
                yield self._token[state], self._to[state]
        elif len(more) < WIDE:
            yield self._token[state], self._to[state]
            yield from more.items()
        else:
            for token in self._most_frequent(state):
                yield token, self.step(state, token)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        link, length = self.link, self.length
        before, state = self._last, self._last
        added = self._new(self.size + 1)
        found = self.step(state, token)
        while found == NONE:
            self._connect(state, token, added)
            state = link[state]
            if state == NONE:
                break
            found = self.step(state, token)
        if state == NONE:
            link[added] = ROOT
        elif length[state] + 1 == length[found]:
            link[added] = found
        else:
            link[added] = self._split(state, token, found)
        self._last = added
        self.size += 1
        self._recount(added, before, token)

    def _split(self, state: int, token: int, found: int) -> int:
        """Give the shorter substrings of `found` a state of their own, because they now occur once more."""
        clone = self._new(self.length[state] + 1)
        for array_ in (self.link, self.count, self.latest, self._token, self._to):
            array_[clone] = array_[found]
        if found in self._more:
            self._more[clone] = dict(self._more[found])
        while state != NONE and self.step(state, token) == found:
            if self._token[state] == token:
                self._to[state] = clone
            else:
                self._more[state][token] = clone
            state = self.link[state]
        self.link[found] = clone
        return clone

    def _recount(self, added: int, before: int, token: int) -> None:
        """All suffixes of the text occurred once more; `token` followed all suffixes of the text before it."""
        link, count, latest, size = self.link, self.count, self.latest, self.size
        state = added
        for _ in range(COUNTED_SUFFIXES):
            count[state] += 1
            latest[state] = size
            state = link[state]
            if state <= ROOT:
                break
        if not self._frequent:
            return
        state = before
        for _ in range(COUNTED_SUFFIXES):
            if state <= ROOT:
                break
            if state in self._frequent:
                self._refresh(state, token)
            state = link[state]

    def _most_frequent(self, state: int) -> list[int]:
        kept = self._frequent.get(state)
        if kept is None:
            tokens = [self._token[state], *self._more[state]]
            kept = heapq.nlargest(KEPT, tokens, key=lambda token: self._rank(state, token))
            self._frequent[state] = kept
        return kept

    def _refresh(self, state: int, token: int) -> None:
        """Only the rank of `token` has changed, and it rose: the best of (kept, token) are the best of all."""
        kept = self._frequent[state]
        if token in kept:
            return
        if len(kept) < KEPT:
            kept.append(token)
            return
        worst = min(range(KEPT), key=lambda index: self._rank(state, kept[index]))
        if self._rank(state, token) > self._rank(state, kept[worst]):
            kept[worst] = token

    def _rank(self, state: int, token: int) -> tuple[int, int]:
        after = self.step(state, token)
        return self.count[after], self.latest[after]

    def _new(self, length: int) -> int:
        self.link.append(NONE)
        self.length.append(length)
        self.count.append(0)
        self.latest.append(0)
        self._token.append(NONE)
        self._to.append(NONE)
        return len(self.link) - 1

    def _connect(self, state: int, token: int, target: int) -> None:
        if self._token[state] == NONE:
            self._token[state], self._to[state] = token, target
        else:
            self._more.setdefault(state, {})[token] = target
