"""Processors: what changes logits before temperature, for the history of one node.

Only few tokens are touched (bans, biased ids, ids already seen), so their processed logits are computed sparsely: ids
and float64 values that replace the raw logits. Order: grammar, min_tokens bans, logit_bias,
repetition_penalty (prompt and output), frequency_penalty and presence_penalty (output only).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from slipstream.core.errors import InputError
from slipstream.core.params import SamplingParams
from slipstream.kernels.sampling import NO_IDS, NO_VALUES
from slipstream.sampling.question import Question, Touched


class Grammar(Protocol):
    """What constrains the answer: the tokens allowed after the committed output and a path of drafted tokens."""

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_]:
        """Mask [vocab] of tokens that may follow."""

    def append(self, tokens: Sequence[int]) -> None:
        """Extend the committed output."""


class _Touched:
    """Growing columns, one line per token whose logit the bias or a penalty can change."""

    def __init__(self) -> None:
        self.line: dict[int, int] = {}
        self.ids = np.zeros(64, np.int64)
        self.bias = np.zeros(64)
        self.seen = np.zeros(64, np.bool_)
        self.count = np.zeros(64)

    def line_of(self, token: int) -> int:
        """The token's line, a new one when it has none."""
        line = self.line.get(token)
        if line is None:
            line = len(self.line)
            if line == len(self.ids):
                for name in ("ids", "bias", "seen", "count"):
                    old = getattr(self, name)
                    setattr(self, name, np.concatenate((old, np.zeros_like(old))))
            self.line[token] = line
            self.ids[line] = token
        return line


class Processors:
    """All processors of one row, with the committed history they depend on.

    end_ids: end-of-sequence tokens; banned, with stop_token_ids, while fewer than min_tokens are out. With ignore_eos
    end ids are ordinary tokens. Raises InputError for token ids outside the vocabulary.
    """

    def __init__(
        self, params: SamplingParams, vocab_size: int, prompt_tokens: Sequence[int], end_ids: Iterable[int]
    ) -> None:
        self._params = params
        self._length = 0
        stops = tuple(params.stop_token_ids or ())
        for name, ids in (("stop_token_ids", stops), ("logit_bias", tuple(params.logit_bias))):
            wrong = [token for token in ids if not 0 <= token < vocab_size]
            if wrong:
                raise InputError(f"{name} names token {wrong[0]}; this model's ids are 0 to {vocab_size - 1}")
        ends = () if params.ignore_eos else tuple(token for token in end_ids if 0 <= token < vocab_size)
        self._bans = np.array(sorted({*stops, *ends}), np.int64)
        self._repeats = params.repetition_penalty != 1.0
        self._counts = params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        self._touched = _Touched()
        # A new line may move the columns: the line comes first, then the column.
        for token, value in params.logit_bias.items():
            line = self._touched.line_of(token)
            self._touched.bias[line] = value
        if self._repeats:
            for token in dict.fromkeys(prompt_tokens):
                line = self._touched.line_of(token)
                self._touched.seen[line] = True

    def append(self, tokens: Sequence[int]) -> None:
        """Extend the committed output."""
        self._length += len(tokens)
        self._count(tokens, 1.0)

    def _count(self, tokens: Sequence[int], change: float) -> None:
        if self._repeats or self._counts:
            for token in tokens:
                line = self._touched.line_of(token)
                self._touched.count[line] += change
                self._touched.seen[line] = True

    def __call__(
        self, logits: NDArray[np.float32], path: Sequence[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The changed tokens after `path` and their processed logits (float64)."""
        banned = len(self._bans) > 0 and self._length + len(path) < self._params.min_tokens
        if not self._touched.line and not (path and (self._repeats or self._counts)):
            return (self._bans, np.full(len(self._bans), -np.inf)) if banned else (NO_IDS, NO_VALUES)
        ids, values = self._adjusted(logits, path)
        if banned:
            keep = np.isin(ids, self._bans, invert=True)
            ids = np.concatenate((ids[keep], self._bans))
            values = np.concatenate((values[keep], np.full(len(self._bans), -np.inf)))
        return ids, values

    def _adjusted(
        self, logits: NDArray[np.float32], path: Sequence[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        params, touched = self._params, self.touched(path)
        values = logits[touched.ids].astype(np.float64) + touched.bias
        if self._repeats:
            penalty = params.repetition_penalty
            penalised = np.where(values > 0.0, values / penalty, values * penalty)
            values = np.where(touched.seen, penalised, values)
        if self._counts:
            values = values - params.frequency_penalty * touched.count
            values = values - params.presence_penalty * (touched.count > 0.0)
        return touched.ids, values

    def touched(self, path: Sequence[int]) -> Touched:
        """The tokens that bias and penalties change after `path`, copied."""
        touched = self._touched
        lines = [touched.line_of(token) for token in path] if self._repeats else []
        seen_before = [bool(touched.seen[line]) for line in lines]
        self._count(path, 1.0)
        size = len(touched.line)
        found = Touched(
            touched.ids[:size].copy(),
            touched.bias[:size].copy(),
            touched.seen[:size].copy(),
            touched.count[:size].copy(),
        )
        self._count(path, -1.0)
        for token, before in zip(path, seen_before, strict=False):
            if not before:
                touched.seen[touched.line[token]] = False
        return found

    def question(self, key: int, path: Sequence[int]) -> Question:
        """What `__call__` would do to any logits after `path`."""
        params = self._params
        banned = len(self._bans) > 0 and self._length + len(path) < params.min_tokens
        question = Question(key, banned=self._bans if banned else None)
        if self._touched.line or (path and (self._repeats or self._counts)):
            question.touched = self.touched(path)
            question.repetition = params.repetition_penalty
            question.frequency, question.presence = params.frequency_penalty, params.presence_penalty
            question.counts = self._counts
        return question
