"""From token ids to text, one token at a time, without ever showing half a character."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Protocol


class Vocabulary(Protocol):
    """What the engine needs of a tokenizer."""

    @property
    def bos_id(self) -> int | None:
        """The token an empty prompt becomes, if the model has one."""

    @property
    def vocab_size(self) -> int:
        """Number of real tokens."""

    @property
    def end_ids(self) -> Collection[int]:
        """Tokens that end an answer."""

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Ids of raw text; add_special puts BOS before it where the model's settings say so."""

    def encode_parts(self, parts: Sequence[tuple[str, bool]]) -> list[int]:
        """Ids of stretches of text, each with whether control tokens are found in it."""

    def token_bytes(self, index: int) -> bytes:
        """The bytes a token stands for; none for padding."""

    def is_control(self, index: int) -> bool:
        """True for tokens that are never part of the text."""


class Detokenizer:
    """Text of one answer, growing. Bytes of an unfinished character are held back until it is complete.

    Everything pushed, then flushed, equals the bytes of all tokens decoded at once; bytes that are no UTF-8 become
    the replacement character.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that this token completes; empty for control tokens."""
        if self._vocabulary.is_control(token):
            return ""
        return self._decoder.decode(self._vocabulary.token_bytes(token))

    def flush(self) -> str:
        """The text of bytes still held back, at the end of an answer."""
        return self._decoder.decode(b"", True)
