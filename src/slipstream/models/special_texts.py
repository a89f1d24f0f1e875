"""Finding the texts of special tokens in a text: leftmost first, the longest of those that begin there."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator


class SpecialTexts:
    """A set of texts to find. Fast for thousands of them: only places where one can begin are looked at.

    takes_before, takes_after: texts that swallow the white space on that side.
    """

    def __init__(
        self, texts: Collection[str], takes_before: Collection[str] = (), takes_after: Collection[str] = ()
    ) -> None:
        self._texts = {text for text in texts if text}
        self._before, self._after = frozenset(takes_before), frozenset(takes_after)
        self._lengths: dict[str, list[int]] = {}
        for text in self._texts:
            self._lengths.setdefault(text[0], []).append(len(text))
        self._lengths = {first: sorted(set(sizes), reverse=True) for first, sizes in self._lengths.items()}
        letters = "".join(map(re.escape, self._lengths))
        self._starts = re.compile(f"[{letters}]") if letters else None

    def find(self, text: str) -> Iterator[tuple[str, int, int]]:
        """(text, start, end) of each, from left to right, not overlapping, swallowed white space included."""
        done = 0
        for start in self.starts(text):
            if start < done:
                continue
            found = self._at(text, start)
            end = start + len(found)
            if found in self._before:
                start = done + len(text[done:start].rstrip())
            if found in self._after:
                end = len(text) - len(text[end:].lstrip())
            yield found, start, end
            done = end

    def starts(self, text: str) -> Iterator[int]:
        """Every place where one of the texts begins, those inside of another included."""
        for match in self._starts.finditer(text) if self._starts is not None else ():
            if self._at(text, match.start()):
                yield match.start()

    def _at(self, text: str, start: int) -> str:
        """The longest of the texts that begins at that place, '' for none."""
        for size in self._lengths[text[start]]:
            piece = text[start : start + size]
            if piece in self._texts:
                return piece
        return ""
