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

    @property
    def error(self) -> str:
        """Why nothing is allowed any more; empty while all is well."""

    def forced(self) -> list[int]:
        """A guess of the tokens that must come next."""

    def fitting(self, tokens: Sequence[int], parents: Sequence[int]) -> list[bool]:
        """Which nodes of a tree may be accepted, as far as is known cheaply."""

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_]:
        """Mask [vocab] of tokens that may follow."""

    def append(self, tokens: Sequence[int]) -> None:
        """Extend the committed output."""


class _Columns:
    """The columns of `Touched`, growing: one line per token whose logit the bias or a penalty can change."""

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

    def copy(self) -> Touched:
        """The lines that are in use."""
        size = len(self.line)
        return Touched(
            self.ids[:size].copy(), self.bias[:size].copy(), self.seen[:size].copy(), self.count[:size].copy()
        )


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
        repeats = params.repetition_penalty != 1.0
        self._penalises = repeats or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        self._idle = not (self._penalises or params.logit_bias)
        """Nothing changes once min_tokens are out."""
        self._columns = _Columns()
        # A new line may move the columns: the line comes first, then the column.
        for token, value in params.logit_bias.items():
            line = self._columns.line_of(token)
            self._columns.bias[line] = value
        for token in dict.fromkeys(prompt_tokens) if repeats else ():
            line = self._columns.line_of(token)
            self._columns.seen[line] = True

    def append(self, tokens: Sequence[int]) -> None:
        """Extend the committed output."""
        self._length += len(tokens)
        for token in tokens if self._penalises else ():
            line = self._columns.line_of(token)
            self._columns.seen[line] = True
            self._columns.count[line] += 1.0

    def question(self, key: int, path: Sequence[int]) -> Question:
        """What is done to any logits after `path`."""
        params = self._params
        banned = len(self._bans) > 0 and self._length + len(path) < params.min_tokens
        return Question(
            key,
            touched=self._touched(path),
            banned=self._bans if banned else None,
            repetition=params.repetition_penalty,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
        )

    def _touched(self, path: Sequence[int]) -> Touched | None:
        """The tokens that bias and penalties change after `path`; None when there are none."""
        lines = [self._columns.line_of(token) for token in path] if self._penalises else []
        if not self._columns.line:
            return None
        touched = self._columns.copy()
        for line in lines:
            touched.seen[line] = True
            touched.count[line] += 1.0
        return touched

    def __call__(
        self, logits: NDArray[np.float32], path: Sequence[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The changed tokens after `path` and their processed logits (float64)."""
        if self._idle and self._length >= self._params.min_tokens:
            return NO_IDS, NO_VALUES
        question = self.question(0, path)
        ids, values = NO_IDS, NO_VALUES
        if question.touched is not None:
            ids, values = question.touched.ids, _penalised(logits, question, question.touched)
        if question.banned is not None:
            keep = np.isin(ids, question.banned, invert=True)
            ids = np.concatenate((ids[keep], question.banned))
            values = np.concatenate((values[keep], np.full(len(question.banned), -np.inf)))
        return ids, values


def _penalised(logits: NDArray[np.float32], question: Question, touched: Touched) -> NDArray[np.float64]:
    """Bias and penalties, in their order."""
    values = logits[touched.ids].astype(np.float64) + touched.bias
    if question.repetition != 1.0:
        penalised = np.where(values > 0.0, values / question.repetition, values * question.repetition)
        values = np.where(touched.seen, penalised, values)
    if question.counts:
        values = values - question.frequency * touched.count
        values = values - question.presence * (touched.count > 0.0)
    return values
