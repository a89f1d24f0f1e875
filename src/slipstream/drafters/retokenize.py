"""One text in two vocabularies: a row's tokens as those of another tokenizer, kept up to date from its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

LOOK_BACK = 12
"""Tokens at the end of a text that are encoded anew when it grows: a new character may change how they are cut."""
MOST_PENDING = 3
"""Bytes that may be the beginning of an unfinished character."""


class Words(Protocol):
    """What two vocabularies need of each other's tokenizers."""

    special_texts: Mapping[str, int]

    def encode_parts(self, parts: Sequence[tuple[str, bool]]) -> list[int]:
        """Ids of a text given as (stretch, parse control tokens in it)."""

    def token_bytes(self, index: int) -> bytes:
        """The exact bytes of a token."""

    def is_control(self, index: int) -> bool:
        """True for tokens that are never text."""


@dataclass(slots=True)
class Mirror:
    """The text of target tokens in the other vocabulary.

    data: bytes of the text so far. ids: tokens of the other vocabulary for the bytes up to ends[-1]; `pending` bytes of
    an unfinished character may follow. ends: where each of them ends. controls: start to end of control tokens.
    read: target tokens taken in.
    """

    ours: Words
    theirs: Words
    data: bytearray = field(default_factory=bytearray)
    ids: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    controls: dict[int, int] = field(default_factory=dict)
    read: int = 0

    @property
    def pending(self) -> bytes:
        """Bytes at the end that are not a whole character yet."""
        return bytes(self.data[self.ends[-1] if self.ends else 0 :])

    def extend(self, tokens: Sequence[int]) -> int:
        """Take in the target tokens from `read` on; `tokens` are all of the row's. Returns how many first ids stay."""
        if self.read == len(tokens):
            return len(self.ids)
        for token in tokens[self.read :]:
            raw = self.ours.token_bytes(token)
            if self.ours.is_control(token):
                self.controls[len(self.data)] = len(self.data) + len(raw)
            self.data += raw
        first = self.read == 0
        self.read = len(tokens)
        keep = 0 if first else self._boundary()
        del self.ids[keep:], self.ends[keep:]
        self._encode(self.ends[-1] if self.ends else 0)
        return keep

    def _boundary(self) -> int:
        """Tokens that stay: all but the last LOOK_BACK, and then back to one after which a word or line begins."""
        keep = max(0, len(self.ids) - LOOK_BACK)
        for back in range(keep, max(0, keep - LOOK_BACK), -1):
            if bytes(self.data[self.ends[back - 1] : self.ends[back - 1] + 1]) in (b" ", b"\n"):
                keep = back
                break
        while 0 < keep < len(self.ids) and (self.ends[keep - 1] == self.ends[keep] or self._inside(keep)):
            keep -= 1
        return keep

    def _inside(self, keep: int) -> bool:
        """Whether a character goes on after so many tokens."""
        return self.data[self.ends[keep - 1]] & 0xC0 == 0x80

    def _encode(self, start: int) -> None:
        stretches = self._stretches(start)
        for place, (stretch, control) in enumerate(stretches, 1):
            whole = whole_characters(stretch) if place == len(stretches) and not control else len(stretch)
            text = stretch[:whole].decode("utf-8", "replace")
            known = control and text in self.theirs.special_texts
            tokens = self.theirs.encode_parts([(text, known)]) if text else []
            sizes = [len(self.theirs.token_bytes(token)) for token in tokens]
            if tokens and sum(sizes) != whole:
                # The other tokenizer cannot write this text exactly; only the end of the stretch is certain.
                sizes = [0] * (len(tokens) - 1) + [whole]
            for token, size in zip(tokens, sizes, strict=True):
                start += size
                self.ids.append(token)
                self.ends.append(start)

    def _stretches(self, start: int) -> list[tuple[bytes, bool]]:
        """The bytes from `start` on, control tokens apart."""
        found: list[tuple[bytes, bool]] = []
        for first, end in self.controls.items():
            if end <= start:
                continue
            if first > start:
                found.append((bytes(self.data[start:first]), False))
            found.append((bytes(self.data[max(first, start) : end]), True))
            start = end
        if start < len(self.data):
            found.append((bytes(self.data[start:]), False))
        return found


def whole_characters(data: bytes) -> int:
    """Length of the bytes without an unfinished UTF-8 character at their end."""
    for back in range(1, min(MOST_PENDING, len(data)) + 1):
        byte = data[-back]
        if byte < 0x80:
            break
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - back if needed > back else len(data)
    return len(data)
