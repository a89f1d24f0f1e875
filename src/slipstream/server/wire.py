"""What completions and chat completions share on the wire: identity, usage, statistics, token texts."""

from __future__ import annotations

import codecs
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from slipstream.core.types import CompletionOutput, RequestOutput, speculation_of
from slipstream.engine.detokenize import Detokenizer, Vocabulary
from slipstream.engine.stop import ENDED_WELL
from slipstream.server.errors import dumps
from slipstream.server.job import Part
from slipstream.server.schemas import Sampling
from slipstream.server.service import Served

Json = dict[str, Any]
_STATISTICS = (
    "mean_acceptance_length", "draft_acceptance_rate", "num_draft_tokens", "num_accepted_draft_tokens",
    "num_spec_steps", "acceptance_histogram", "speedup_estimate", "num_steps", "tokens_per_pass",
    "drafted_by_source", "accepted_by_source", "drafter_failures", "near_ties", "exact",
)  # fmt: skip


class Writer(ABC):
    """Turns results and pieces of them into the objects that clients read; one per HTTP request.

    n: choices per prompt.
    """

    prefix: str
    whole_kind: str
    chunk_kind: str

    def __init__(self, request: Sampling, served: Served) -> None:
        self.request, self.vocabulary = request, served.vocabulary
        self.n = request.n or 1
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._head = {
            "created": int(time.time()),
            "model": served.name,
            "system_fingerprint": served.fingerprint,
        }
        self._chunk_head = {"id": self.id, "object": self.chunk_kind, **self._head, "choices": []}
        common = self._chunk_head | ({"usage": None} if self.with_usage else {})
        # What is the same in all chunks is made once; a choice goes between these.
        self._before, bracket, after = as_event(common).rpartition(b"]")
        self._after = bracket + after

    def whole(self, results: Sequence[RequestOutput]) -> Json:
        """The reply of a request that does not stream."""
        choices = [
            self._whole_choice(place * self.n + output.index, output)
            for place, result in enumerate(results)
            for output in result.outputs
        ]
        found = {"id": self.id, "object": self.whole_kind, **self._head, "choices": choices}
        return found | {"usage": usage(results), "speculative_decoding": statistics(results)}

    def opening(self) -> Iterator[bytes]:
        """Events before the first token."""
        yield from ()

    @abstractmethod
    def chunks(self, part: Part) -> Iterator[bytes]:
        """The events that say what is new of one answer."""

    def closing(self, results: Sequence[RequestOutput]) -> Iterator[bytes]:
        """Events after the last token."""
        if self.with_usage:
            last = {"usage": usage(results), "speculative_decoding": statistics(results)}
            yield as_event(self._chunk_head | last)

    @property
    def with_usage(self) -> bool:
        """True when a stream ends with the usage."""
        options = self.request.stream_options
        return bool(options and options.include_usage)

    @abstractmethod
    def _whole_choice(self, index: int, output: CompletionOutput) -> Json:
        """One choice of a reply."""

    def chunk(self, choice: Json) -> bytes:
        """The event of a chunk with one choice."""
        return self._before + dumps(choice) + self._after

    def beside(self, part: Part) -> Json:
        """What a chunk's choice says about its tokens, where that was asked for."""
        found: Json = {}
        if self.request.include_sources and part.piece.token_ids:
            found["source"] = part.piece.sources[0] if part.piece.sources else ""
        if self.request.include_sources or self.request.return_token_ids:
            found["token_ids"] = part.piece.token_ids
        return found

    def beside_whole(self, output: CompletionOutput) -> Json:
        """The same for a whole choice, per token; and the seed, with which this choice comes again."""
        found: Json = {"seed": output.seed, "stop_reason": output.stop_reason}
        if self.request.include_sources:
            found["sources"] = output.sources
        if self.request.include_sources or self.request.return_token_ids:
            found["token_ids"] = output.token_ids
        return found

    def silent(self, part: Part) -> bool:
        """True for a part with nothing in it that this client wants."""
        piece = part.piece
        wanted = piece.text or part.logprobs or (piece.token_ids and self.beside(part))
        return not wanted


def as_event(value: Json) -> bytes:
    """An object as one event of a stream."""
    return b"data: " + dumps(value) + b"\n\n"


def ending(part: Part) -> str | None:
    """The finish reason to tell the client; failures are told as errors instead."""
    return part.piece.finish_reason if part.piece.finish_reason in ENDED_WELL else None


def usage(results: Sequence[RequestOutput]) -> Json:
    """Token counts of all prompts and answers, under OpenAI's names."""
    counts = [result.usage for result in results]
    found: Json = {name: sum(count[name] for count in counts) for name in counts[0]}
    cached = sum(min(result.timing.reused_tokens, len(result.prompt_token_ids)) for result in results)
    return found | {"prompt_tokens_details": {"cached_tokens": cached}}


def statistics(results: Sequence[RequestOutput]) -> Json:
    """What speculation did for all answers of the request; definitions in docs/statistics.md."""
    found = speculation_of(results).as_dict()
    decode_s = sum(result.timing.decode_s for result in results)
    return {**{name: found[name] for name in _STATISTICS}, "decode_s": decode_s}


def text_of(vocabulary: Vocabulary, tokens: Sequence[int]) -> str:
    """The text of tokens."""
    reader = Detokenizer(vocabulary)
    return "".join(map(reader.push, tokens)) + reader.flush()


def token_text(vocabulary: Vocabulary, token: int) -> str:
    """A token as a name: its text, or its bytes where they are no text, so that two tokens never look alike."""
    raw = vocabulary.token_bytes(token)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class Offsets:
    """Where the text of each token begins, in characters, for the logprobs of completions."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = 0

    def next(self, token: int) -> int:
        """The offset of the next token; control tokens have no text."""
        here = self._at
        if not self._vocabulary.is_control(token):
            self._at += len(self._decoder.decode(self._vocabulary.token_bytes(token)))
        return here
