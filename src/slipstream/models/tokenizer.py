"""Text to token ids and back, exact to the byte, with control tokens parsed only where the caller allows it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from slipstream.core.errors import InputError
from slipstream.models.special_texts import SpecialTexts
from slipstream.models.vocabulary import Vocabulary

PlainEncoder = Callable[[str, bool], Sequence[int]]
"""(stretch of text without special tokens, it stands at the very beginning) to ids."""


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """What a file format hands over.

    encode: ids of plain text. bytes_of: exact bytes of an id below token_count. specials: text to id of the tokens that
    are found in text as a whole; `always` are those found even when special tokens are not parsed, takes_before and
    takes_after those that swallow white space. prefix, suffix: ids put around a text when add_special is asked for.
    """

    encode: PlainEncoder
    bytes_of: Callable[[int], bytes]
    vocabulary: Vocabulary
    specials: Mapping[str, int]
    always: frozenset[str] = frozenset()
    takes_before: frozenset[str] = frozenset()
    takes_after: frozenset[str] = frozenset()
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()


class Tokenizer:
    """One model's tokenizer. Safe to share between threads.

    vocab_size: number of real tokens; ids from there on are padding. end_ids: ids that end an answer, ascending.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._parts = parts
        self._control = parts.vocabulary.control
        self._unused = frozenset(parts.vocabulary.unused_ids)
        self.vocab_size = parts.vocabulary.token_count
        self.bos_id = parts.vocabulary.bos_id
        self.end_ids = parts.vocabulary.end_ids
        self.special_texts: Mapping[str, int] = parts.specials
        self._all = SpecialTexts(parts.specials, parts.takes_before, parts.takes_after)
        self._always = SpecialTexts(parts.always)

    def encode(self, text: str, add_special: bool = False, parse_special: bool = True) -> list[int]:
        """Ids of a text; add_special puts BOS (or more) around it where the model's settings say so.

        parse_special: the text of a control token becomes that token; else it is text like any other.
        Raises InputError for text that is not valid Unicode.
        """
        ids = self.encode_parts([(text, parse_special)])
        return [*self._parts.prefix, *ids, *self._parts.suffix] if add_special else ids

    def encode_parts(self, parts: Sequence[tuple[str, bool]]) -> list[int]:
        """Ids of a text given as (stretch, parse control tokens in it), as if it had come in one piece.

        Plain stretches beside each other, parsed or not, are joined before they are split into words.
        """
        ids: list[int] = []
        pending: list[str] = []
        first = True

        def flush() -> None:
            nonlocal first
            text = "".join(pending)
            if text:
                ids.extend(self._encode_plain(text, first))
                first = False
            pending.clear()

        for stretch, parse in parts:
            finder = self._all if parse else self._always
            at = 0
            for text, start, end in finder.find(stretch):
                pending.append(stretch[at:start])
                flush()
                ids.append(self._parts.specials[text])
                first = False
                at = end
            pending.append(stretch[at:])
        flush()
        return ids

    def _encode_plain(self, text: str, first: bool) -> Sequence[int]:
        try:
            return self._parts.encode(text, first)
        except (UnicodeEncodeError, TypeError):
            raise InputError("the text holds a lone surrogate and is not valid Unicode; remove it") from None

    def token_bytes(self, index: int) -> bytes:
        """The exact bytes of a token (of a control token its text); b"" for padding. Raises InputError out of range."""
        if index < 0:
            raise InputError(f"token id {index} is negative")
        return self._parts.bytes_of(index) if index < self.vocab_size and index not in self._unused else b""

    def token_text(self, index: int) -> str:
        """The token for the eye: incomplete characters become replacement signs."""
        return self.token_bytes(index).decode("utf-8", errors="replace")

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The bytes of the tokens joined and read as UTF-8; control tokens are left out unless asked for."""
        kept = [index for index in ids if not (skip_special and index in self._control)]
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", errors="replace")

    def is_control(self, index: int) -> bool:
        """True for tokens that are never text: <|im_start|>, <|endoftext|>, ..."""
        return index in self._control

    def fingerprint(self) -> str:
        """Hash of the map from id to bytes, padding left out: equal for models that can share token ids."""
        digest = hashlib.sha256()
        for index in range(self.vocab_size):
            raw = self.token_bytes(index)
            digest.update(len(raw).to_bytes(4, "little") + raw)
        return digest.hexdigest()
