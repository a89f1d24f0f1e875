"""All substrings of a fixed text in order, on disk: where one occurs, and what follows it there.

Tokens are stored as big-endian 32-bit words, so that comparing bytes compares tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SORTED_DEPTH = 64
"""Suffixes are in order by their first so many tokens; what follows does not matter to a draft."""
WORD = 4
SAMPLE = 256
"""Of a longer run of occurrences, so many are looked at."""

Words = NDArray[np.uint32]
Places = NDArray[np.int32]


def suffix_array(tokens: NDArray[np.uint32]) -> Places:
    """Places of all suffixes, in order of their first SORTED_DEPTH tokens (prefix doubling, Manber and Myers 1990)."""
    size = len(tokens)
    if size == 0:
        return np.zeros(0, np.int32)
    order = np.argsort(tokens, kind="stable").astype(np.int32)
    rank = _ranks(order, tokens[order][1:] != tokens[order][:-1])
    depth = 1
    while depth < SORTED_DEPTH and int(rank[order[-1]]) < size - 1:
        # The rank of what stands `depth` later; a text that ends before comes first.
        later = np.zeros(size, np.int64)
        later[: max(0, size - depth)] = rank[depth:] + 1
        key = rank.astype(np.int64) * (size + 1) + later
        order = np.argsort(key, kind="stable").astype(np.int32)
        ordered = key[order]
        rank = _ranks(order, ordered[1:] != ordered[:-1])
        depth *= 2
    return order


def _ranks(order: Places, differs: NDArray[np.bool_]) -> Places:
    ranks = np.empty(len(order), np.int32)
    ranks[order] = np.concatenate(([0], np.cumsum(differs))).astype(np.int32)
    return ranks


class SuffixArray:
    """words: the text, uint32 big-endian [n]; places: its suffixes in order, int32 [n]. Both may be memory-mapped."""

    def __init__(self, words: Words, places: Places) -> None:
        self.words, self.places = words, places
        self._bytes = words.view(np.uint8)

    def find(self, pattern: bytes, low: int = 0, high: int | None = None) -> tuple[int, int]:
        """The run of suffixes that begin with a pattern (tokens as big-endian words); empty when low == high."""
        high = len(self.places) if high is None else high
        first = self._bisect(pattern, low, high, after=False)
        return first, self._bisect(pattern, first, high, after=True)

    def _bisect(self, pattern: bytes, low: int, high: int, after: bool) -> int:
        data, places, size = self._bytes, self.places, len(pattern)
        while low < high:
            middle = (low + high) // 2
            start = int(places[middle]) * WORD
            here = data[start : start + size].tobytes()
            if here < pattern or (after and here == pattern):
                low = middle + 1
            else:
                high = middle
        return low

    def followers(self, low: int, high: int, length: int) -> list[tuple[int, int]]:
        """(token, occurrences) after the patterns of a run, the most frequent first; long runs are sampled."""
        count = high - low
        step = -(-count // SAMPLE)
        after = self.places[low:high:step].astype(np.int64) + length
        found, counts = np.unique(self.words[after[after < len(self.words)]], return_counts=True)
        order = np.argsort(-counts, kind="stable")
        scale = count / max(1, len(after))
        return [(int(found[i]), max(1, round(int(counts[i]) * scale))) for i in order.tolist()]
