"""One HTTP request's prompts on their way through the worker: from its thread to the event loop, and cancelling."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.core.params import SamplingParams, Speculating
from slipstream.core.types import Piece, RequestOutput, TokenLogprob
from slipstream.engine.request import CANCELLED, DEADLINE
from slipstream.engine.stop import ENDED_WELL
from slipstream.server.errors import ApiError

if TYPE_CHECKING:
    from slipstream.engine.request import Request
    from slipstream.engine.worker import Worker
    from slipstream.server.courier import Courier
    from slipstream.server.metrics import Meter


@dataclass(frozen=True, slots=True)
class Part:
    """What is new of one answer. index: prompt * n + choice. logprobs: of the piece's tokens, when asked for."""

    index: int
    piece: Piece
    logprobs: list[TokenLogprob] | None = None


def joined(parts: Sequence[Part], by_source: bool) -> list[Part]:
    """The same news in few parts: one per answer or, by source, one per run of tokens of the same origin."""
    runs: list[list[Part]] = []
    open_runs: dict[int, list[Part]] = {}
    for part in parts:
        run = open_runs.get(part.index)
        if run is not None and not (by_source and run[-1].piece.sources[:1] != part.piece.sources[:1]):
            run.append(part)
        else:
            open_runs[part.index] = run = [part]
            runs.append(run)
    return [run[0] if len(run) == 1 else _one(run) for run in runs]


def _one(run: Sequence[Part]) -> Part:
    pieces = [part.piece for part in run]
    piece = Piece(
        pieces[0].index,
        "".join(each.text for each in pieces),
        [token for each in pieces for token in each.token_ids],
        pieces[-1].finish_reason,
        [source for each in pieces for source in each.sources],
    )
    known = [part.logprobs for part in run if part.logprobs is not None]
    return Part(run[0].index, piece, [entry for logprobs in known for entry in logprobs] if known else None)


@dataclass(frozen=True, slots=True)
class Task:
    """How the prompts of a request are to be answered. deadline_s: counted from the request's arrival."""

    params: SamplingParams
    speculation: Speculating = True
    deadline_s: float | None = None
    stream: bool = False


News = list[Part] | ApiError | None
"""What is new of a prompt's answers, why all of them have failed, or that they have ended."""


class Job:
    """Prompts in work. `submit` runs in any thread, the rest on the event loop that made the job.

    Raises ApiError: what cannot be queued from `submit`, what fails later from `parts` or `finish`.
    """

    def __init__(self, worker: Worker, task: Task, meter: Meter, courier: Courier) -> None:
        self.task = task
        self.requests: list[Request] = []
        self.arrived = time.monotonic()
        self.first_at: float | None = None
        self._worker, self._meter, self._courier = worker, meter, courier
        self._news: deque[News] = deque()
        self._came = asyncio.Event()
        """Set when there are news."""
        self._open = 0
        self._left = 0
        self.settled = asyncio.Event()
        """Set when the engine has let go of everything."""
        self._told: dict[int, int] = {}
        """Tokens of each answer that parts have been made of; only the worker's thread touches it."""
        self._cancelled = False

    def submit(self, prompts: Sequence[tuple[str | None, list[int]]]) -> None:
        """Queue all prompts (text and ids) or, when one is refused, none. Raises what the worker raises.

        After `cancel`, also while this runs, nothing more is queued.
        """
        # All count before the first is queued: it may have ended before the next one is.
        self._open = self._left = len(prompts)
        for place, (text, tokens) in enumerate(prompts):
            if self._cancelled:
                return
            try:
                request = self._submit(place, tokens)
            except BaseException:
                self.cancel()
                raise
            request.prompt = text
            self.requests.append(request)
            if self._cancelled:  # `cancel` may have come before the request was in the list
                self._worker.cancel(request)

    def _submit(self, place: int, tokens: list[int]) -> Request:
        def hear(request: Request, pieces: Sequence[Piece] | None) -> None:
            self._hear(place, request, pieces)

        task = self.task
        left = None if task.deadline_s is None else task.deadline_s - (time.monotonic() - self.arrived)
        return self._worker.submit(tokens, task.params, speculation=task.speculation, deadline_s=left, listener=hear)

    def _hear(self, place: int, request: Request, pieces: Sequence[Piece] | None) -> None:
        """In the worker's thread: pass on what is new."""
        if pieces is None:
            self._post(None)
            return
        if self.first_at is None and any(piece.token_ids for piece in pieces):
            self.first_at = time.monotonic()
            self._meter.first_token(self.first_at - self.arrived)
        if self.task.stream:
            self._post([self._part(place, request, piece) for piece in pieces])

    def _part(self, place: int, request: Request, piece: Piece) -> Part:
        index = place * self.task.params.n + piece.index
        begin = self._told.get(index, 0)
        self._told[index] = end = begin + len(piece.token_ids)
        known = request.answers[piece.index].logprobs
        return Part(index, piece, None if known is None else known[begin:end])

    def _post(self, news: News) -> None:
        self._courier.post(lambda: self._take(news))

    def _take(self, news: News) -> None:
        """On the event loop."""
        self._left = 0 if isinstance(news, ApiError) else self._left - (news is None)
        if self._left == 0:
            self.settled.set()
        self._news.append(news)
        self._came.set()

    def fail(self, error: ApiError) -> None:
        """End the job with this error, from any thread: the worker cannot go on."""
        self._post(error)

    async def parts(self) -> AsyncIterator[list[Part]]:
        """All that is new, again and again, until every answer has ended. Raises ApiError when an answer has failed."""
        while self._open:
            await self._came.wait()
            self._came.clear()
            found: list[Part] = []
            failure = self._gather(found)
            if found:
                yield found
            if failure is not None:
                raise failure

    def _gather(self, found: list[Part]) -> ApiError | None:
        """Add what is new to `found`, up to the first failure, which is returned."""
        while self._news:
            news = self._news.popleft()
            if isinstance(news, ApiError):
                return news
            if news is not None:
                found += news
                continue
            self._open -= 1
            failure = self._failure()
            if failure is not None:
                return failure
        return None

    async def finish(self) -> list[RequestOutput]:
        """Wait for the end; the results in the order of the prompts. Raises ApiError when an answer failed."""
        async for _ in self.parts():
            pass
        return self.results()

    def results(self) -> list[RequestOutput]:
        """What has been generated."""
        return [request.result() for request in self.requests]

    def _failure(self) -> ApiError | None:
        """What to tell of an answer that could not come to its end."""
        for answer in (answer for request in self.requests for answer in request.answers):
            reason = answer.finish_reason
            if reason is None or reason in ENDED_WELL:
                continue
            if reason == DEADLINE:
                return ApiError(504, f"the answer took longer than the deadline of {self.task.deadline_s:g} s")
            if reason == CANCELLED:
                return ApiError(503, "the request was cancelled: the server shuts down", code="draining")
            return ApiError(500, f"the answer could not go on: {answer.stop_reason}")
        return None

    def cancel(self) -> None:
        """Let go of what still runs; its memory is free after the present step."""
        if not self._cancelled:
            self._cancelled = True
            for request in self.requests:
                if not request.done:
                    self._worker.cancel(request)
