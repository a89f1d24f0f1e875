"""A prompt on its way to `n` answers, and what the engine knows of each answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from slipstream.core.params import SamplingParams, Speculating
from slipstream.core.stats import Speculation
from slipstream.core.types import CompletionOutput, Piece, RequestOutput, Row, Timing, TokenLogprob
from slipstream.engine.detokenize import Detokenizer
from slipstream.engine.stop import End, StopRules

ERROR = "error"
"""finish_reason of an answer that could not go on; stop_reason then holds the message."""
CANCELLED = "cancelled"
DEADLINE = "deadline"
"""finish_reason of an answer whose time was over."""


@dataclass(slots=True, eq=False)
class Request:
    """One prompt with its parameters; `answers` in the order of their index."""

    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    speculation: Speculating = True
    progress: Callable[[int, int], None] | None = None
    """Called while the prompt is read, with the tokens read so far and their number."""
    answers: list[Answer] = field(default_factory=list)
    timing: Timing = field(default_factory=Timing)
    replay: bool = False
    """Decodes another request again: it uses nothing cached, leaves nothing, and is not counted."""
    id: int = 0
    """Number of the request in its engine, from 1."""

    @property
    def done(self) -> bool:
        """True when every answer has ended."""
        return all(answer.finish_reason for answer in self.answers)

    @property
    def started(self) -> bool:
        """True once one of its answers has got a place in the batch."""
        return any(answer.started for answer in self.answers)

    @property
    def waiting(self) -> int:
        """Answers that have not got a place in the batch yet."""
        return sum(not (answer.started or answer.finish_reason) for answer in self.answers)

    @property
    def error(self) -> str | None:
        """The message of the first answer that failed."""
        failed = (answer.stop_reason for answer in self.answers if answer.finish_reason == ERROR)
        return next((str(reason) for reason in failed), None)

    def pieces(self) -> list[Piece]:
        """What is new in all answers since the last call."""
        return [piece for answer in self.answers for piece in answer.pieces()]

    def charge(self, seconds: dict[str, float]) -> None:
        """Add the time of one step to the decoding time and its split."""
        for part, spent in seconds.items():
            self.timing.split[part] = self.timing.split.get(part, 0.0) + spent
            self.timing.decode_s += spent

    def result(self) -> RequestOutput:
        """What the caller gets; complete once `done`."""
        made = sum(len(answer.row.tokens) - answer.row.prompt_length for answer in self.answers)
        self.timing.tokens_per_second = made / self.timing.decode_s if self.timing.decode_s else 0.0
        outputs = [answer.result() for answer in self.answers]
        return RequestOutput(self.prompt, list(self.prompt_token_ids), outputs, self.timing)


@dataclass(slots=True, eq=False)
class Answer:
    """One choice of a request. `append` is the only way for tokens to get in."""

    request: Request
    index: int
    row: Row
    rules: StopRules
    detokenizer: Detokenizer
    stats: Speculation = field(default_factory=Speculation)
    text: str = ""
    sources: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    decode_s: float = 0.0
    started: bool = False
    """True once it has got a place in the batch."""
    _shown: list[int] = field(default_factory=list)
    """Per token: the length of text that may be shown once it is there."""
    _told: int = 0
    """Tokens that pieces have been made of."""
    _told_end: bool = False

    @property
    def count(self) -> int:
        """Tokens generated so far."""
        return len(self.row.tokens) - self.row.prompt_length

    @property
    def room(self) -> int:
        """Tokens that may still come."""
        return self.rules.room - self.count

    def append(self, token: int, source: str) -> bool:
        """Take one emitted token; False when it ends the answer."""
        self.row.tokens.append(token)
        self.sources.append(source)
        count = self.count
        end = self.rules.by_token(count, token)
        if end is None:
            before = len(self.text)
            self.text += self.detokenizer.push(token)
            end = self.rules.by_text(count, self.text, before) or self.rules.by_budget(count)
        if end is not None:
            self.finish(end)
        self._shown.append(len(self.text) - (0 if end else self.rules.held_back(self.text)))
        return end is None

    def finish(self, end: End) -> None:
        """No more tokens: cut the text at a stop string, or show what was held back."""
        if end.keep_text is None:
            self.text += self.detokenizer.flush()
        else:
            self.text = self.text[: end.keep_text]
        self.finish_reason, self.stop_reason = end.reason, end.cause

    def pieces(self) -> list[Piece]:
        """What is new since the last call, one piece per run of tokens from the same source."""
        made: list[Piece] = []
        tokens, count = self.row.tokens, self.count
        while self._told < count:
            start, source = self._told, self.sources[self._told]
            stop = start + 1
            while stop < count and self.sources[stop] == source:
                stop += 1
            shown_from = self._shown[start - 1] if start else 0
            text = self.text[shown_from : self._shown[stop - 1]]
            first = self.row.prompt_length
            made.append(Piece(self.index, text, tokens[first + start : first + stop], None, [source] * (stop - start)))
            self._told = stop
        if self.finish_reason and not self._told_end:
            self._told_end = True
            shown = self._shown[-1] if self._shown else 0
            if not made or shown < len(self.text):
                made.append(Piece(self.index, self.text[shown:], []))
            made[-1].finish_reason = self.finish_reason
        return made

    def result(self) -> CompletionOutput:
        """The answer as callers see it."""
        return CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=self.row.output,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=self.logprobs,
            seed=self.row.seed,
            speculation=self.stats,
            sources=list(self.sources),
        )
