"""The wire format of /v1/completions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from slipstream.core.types import CompletionOutput, TokenLogprob
from slipstream.server.job import Part
from slipstream.server.schemas import CompletionRequest
from slipstream.server.service import Served
from slipstream.server.wire import Json, Offsets, Writer, ending, token_text


class CompletionWriter(Writer):
    """Text completions. echoed: what stands before the answers to each prompt."""

    prefix, whole_kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, request: CompletionRequest, served: Served, echoed: Sequence[str]) -> None:
        super().__init__(request, served)
        self._echoed, self._rivals = echoed, bool(request.logprobs)
        self._offsets: defaultdict[int, Offsets] = defaultdict(lambda: Offsets(served.vocabulary))

    def _whole_choice(self, index: int, output: CompletionOutput) -> Json:
        logprobs = None if output.logprobs is None else self._logprobs(index, output.logprobs)
        return {
            "index": index,
            "text": self._echoed[index // self.n] + output.text,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
            **self.beside_whole(output),
        }

    def opening(self) -> Iterator[bytes]:
        """The prompt, where it is to be echoed."""
        for place, prompt in enumerate(self._echoed):
            if prompt:
                for index in range(place * self.n, (place + 1) * self.n):
                    yield self.chunk({"index": index, "text": prompt, "logprobs": None, "finish_reason": None})

    def chunks(self, part: Part) -> Iterator[bytes]:
        """One chunk; the last one of an answer carries its finish reason."""
        if self.silent(part) and not ending(part):
            return
        logprobs = None if part.logprobs is None else self._logprobs(part.index, part.logprobs)
        choice = {"index": part.index, "text": part.piece.text, "logprobs": logprobs, "finish_reason": ending(part)}
        yield self.chunk(choice | self.beside(part))

    def _logprobs(self, index: int, entries: Sequence[TokenLogprob]) -> Json:
        """Parallel lists. The token itself is always among its rivals, where rivals were asked for."""
        name, offsets = self.vocabulary, self._offsets[index]
        tops = None
        if self._rivals:
            tops = [
                {token_text(name, token): value for token, value in [*entry.top, (entry.token_id, entry.logprob)]}
                for entry in entries
            ]
        return {
            "tokens": [token_text(name, entry.token_id) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": tops,
            "text_offset": [offsets.next(entry.token_id) for entry in entries],
        }
