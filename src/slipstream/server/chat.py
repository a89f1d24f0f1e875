"""The wire format of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slipstream.core.types import CompletionOutput, TokenLogprob
from slipstream.server.job import Part
from slipstream.server.wire import Json, Writer, ending


class ChatWriter(Writer):
    """Answers in a conversation."""

    prefix, whole_kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _whole_choice(self, index: int, output: CompletionOutput) -> Json:
        return {
            "index": index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": None if output.logprobs is None else self._logprobs(output.logprobs),
            "finish_reason": output.finish_reason,
            **self.beside_whole(output),
        }

    def opening(self) -> Iterator[bytes]:
        """The role of every choice."""
        for index in range(self.n):
            yield self._delta(index, {"role": "assistant", "content": ""})

    def chunks(self, part: Part) -> Iterator[bytes]:
        """A chunk of content, if there is any, and an empty one with the finish reason at the end."""
        if not self.silent(part):
            yield self._delta(part.index, {"content": part.piece.text}, part)
        if ending(part):
            yield self._delta(part.index, {}, None, ending(part))

    def _delta(self, index: int, delta: Json, part: Part | None = None, finish_reason: str | None = None) -> bytes:
        logprobs = None if part is None or part.logprobs is None else self._logprobs(part.logprobs)
        choice: Json = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self.chunk(choice if part is None else choice | self.beside(part))

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> Json:
        return {"content": [self._token(entry) for entry in entries], "refusal": None}

    def _token(self, entry: TokenLogprob) -> Json:
        rivals = [self._entry(token, value) for token, value in entry.top]
        return {**self._entry(entry.token_id, entry.logprob), "top_logprobs": rivals}

    def _entry(self, token: int, value: float) -> Json:
        raw = self.vocabulary.token_bytes(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": value, "bytes": list(raw)}
