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
BACKED_OFF = 3
"""Contexts that are blended: the longest match and the next shorter ones with other occurrences."""
IGNORED = 0.1
"""Shorter contexts that have less weight than this together are not looked at."""
DOUBT = 3.0
"""Weight of the shorter contexts against one occurrence of a match of one token."""
MOST_CERTAIN = 0.99

Guess = tuple[float, int, int, int, int]
"""Chance, when last seen, token, state after it, tokens that match there."""
Tree = tuple[list[int], list[int], list[float], list[float]]
"""Tokens, parents (-1 at the top), chances given the parent, tokens matched at each node."""


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

    def tree(self, nodes: int, depth: int, width: int, least: float) -> Tree:
        """The most probable continuations of the longest match, by falling probability of their path."""
        tokens, parents, chances, matches = tree = list[int](), list[int](), list[float](), list[float]()
        start = self.match()
        if start == ROOT:
            return tree
        # Best path first; the counter keeps the order of siblings and makes equal ones comparable.
        waiting: list[tuple[float, int, float, int, int, int, int, int]] = []
        order = 0
        at: tuple[int, int, int, int, float] = (start, self.length[start], NONE, 0, 1.0)
        while len(tokens) < nodes:
            state, match, parent, deep, reach = at
            if deep < depth:
                for chance, _, token, after, matched in predict(self, state, match, width):
                    if reach * chance < least:
                        break
                    order += 1
                    entry = (-reach * chance, order, chance, token, after, matched, parent, deep + 1)
                    heapq.heappush(waiting, entry)
            if not waiting:
                break
            negative, _, chance, token, state, match, parent, deep = heapq.heappop(waiting)
            tokens.append(token)
            parents.append(parent)
            chances.append(chance)
            matches.append(float(match))
            at = (state, match, len(tokens) - 1, deep, -negative)
        return tree


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
