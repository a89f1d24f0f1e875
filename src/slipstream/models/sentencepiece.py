"""SentencePiece's BPE over a scored vocabulary, as GGUF files of tokenizer model `llama` store it.

Characters are merged pairwise, always the pair whose joined piece scores highest, leftmost on ties; characters without
a piece become their UTF-8 bytes.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

SPACE = "▁"
_WORDS = re.compile(f"{SPACE}*[^{SPACE}]+|{SPACE}+")


class SentencePieceBPE:
    """ids: piece to id; scores: by id; byte_ids: the 256 ids of single bytes; space_prefix: put a space before text."""

    def __init__(
        self, ids: Mapping[str, int], scores: Sequence[float], byte_ids: Sequence[int], space_prefix: bool
    ) -> None:
        self._ids, self._scores, self._byte_ids = ids, scores, byte_ids
        self._prefix = SPACE if space_prefix else ""
        # When no piece goes on after a word's end, words can be merged apart from each other, and remembered.
        inner = re.compile(f"[^{SPACE}]{SPACE}")
        self._by_word = not any(inner.search(piece) for piece in ids)
        self._merge: Callable[[str], tuple[int, ...]] = lru_cache(maxsize=1 << 16)(self._merge_word)

    def encode(self, text: str) -> list[int]:
        """Ids of a stretch of plain text."""
        escaped = self._prefix + text.replace(" ", SPACE)
        if not self._by_word:
            return list(self._merge_word(escaped))
        return [index for word in _WORDS.findall(escaped) for index in self._merge(word)]

    def _merge_word(self, text: str) -> tuple[int, ...]:
        pieces: list[str] = list(text)
        after = [*range(1, len(pieces)), -1]
        before = list(range(-1, len(pieces) - 1))
        queue: list[tuple[float, int, int]] = []

        def offer(left: int) -> None:
            right = after[left]
            if right >= 0:
                joined = pieces[left] + pieces[right]
                index = self._ids.get(joined)
                if index is not None:
                    heapq.heappush(queue, (-self._scores[index], left, len(joined)))

        for left in range(len(pieces) - 1):
            offer(left)
        while queue:
            _, left, length = heapq.heappop(queue)
            right = after[left]
            # A pair is stale when either side was merged away or has grown since it was offered.
            if not pieces[left] or right < 0 or len(pieces[left]) + len(pieces[right]) != length:
                continue
            pieces[left], pieces[right] = pieces[left] + pieces[right], ""
            after[left] = after[right]
            if after[right] >= 0:
                before[after[right]] = left
            if before[left] >= 0:
                offer(before[left])
            offer(left)
        return tuple(index for piece in pieces if piece for index in self._lookup(piece))

    def _lookup(self, piece: str) -> Sequence[int]:
        index = self._ids.get(piece)
        return (index,) if index is not None else [self._byte_ids[byte] for byte in piece.encode("utf-8")]
