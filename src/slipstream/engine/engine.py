"""Requests in, answers out: adds, steps, cancels, streams. Between steps everything is consistent."""

from __future__ import annotations

import contextlib
import itertools
import operator
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from slipstream.control.base import Controller
from slipstream.core.errors import CacheFullError, ContextLengthError, InputError, SlipstreamError
from slipstream.core.params import SamplingParams
from slipstream.core.structured import structured
from slipstream.core.types import Piece, RequestOutput, Row
from slipstream.drafters.base import Drafter
from slipstream.drafters.guard import Guard
from slipstream.engine.batch import Batch
from slipstream.engine.detokenize import Detokenizer, Vocabulary
from slipstream.engine.interrupt import Interrupts
from slipstream.engine.request import CANCELLED, ERROR, Answer, Request
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.slots import SlotPool
from slipstream.engine.step import Clock, Parts, step
from slipstream.engine.stop import End, StopRules
from slipstream.sampling import Grammars, RowSampler, choice_seed, fresh_seed
from slipstream.targets.base import RowInput, Target
from slipstream.verify.base import Verifier

PREFILL_CHUNK = 512
"""Prompt tokens read between two chances to report progress or to be interrupted."""
PLAIN_STEPS = 64
"""Plain steps whose times are remembered, to know what one token costs without speculation."""


class Engine:
    """Runs requests over one target, in batches of up to `max_batch` rows.

    verifier, controller, drafters: as in the step. keep_prefixes: finished answers whose cache rows stay for prompts
    that begin with the same tokens. debug: check the cache against the tokens around every step (None: when the
    environment says SLIPSTREAM_DEBUG=1). Several threads may use one engine: they take turns, step by step.
    """

    def __init__(
        self,
        target: Target,
        tokenizer: Vocabulary,
        verifier: Verifier,
        controller: Controller,
        drafters: Sequence[Drafter] = (),
        *,
        max_batch: int = 8,
        keep_prefixes: int = 4,
        debug: bool | None = None,
    ) -> None:
        if max_batch < 1:
            raise InputError(f"max_batch is {max_batch}; it must be 1 or more")
        self.target, self.tokenizer = target, tokenizer
        self.debug = os.environ.get("SLIPSTREAM_DEBUG") == "1" if debug is None else debug
        guards = [Guard(drafter, target.vocab_size) for drafter in drafters]
        self._parts = Parts(target, verifier, controller, guards)
        self._scheduler = Scheduler(max_batch)
        self._slots = SlotPool(target, min(keep_prefixes, max_batch))
        self._grammars = Grammars(tokenizer, target.vocab_size)
        self._ids = itertools.count()
        self._plain_steps: deque[float] = deque(maxlen=PLAIN_STEPS)
        self._lock = threading.RLock()
        self._interrupts = Interrupts()
        self._stepping = False
        self._dropped: list[Request] = []
        """Cancelled from inside a step (by its progress call, or by the garbage collector); ended after it."""

    @property
    def idle(self) -> bool:
        """True when no request waits or runs."""
        return self._scheduler.idle

    def add(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        speculation: bool = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> Request:
        """Queue a prompt (raw text or token ids). Raises InputError or ContextLengthError before anything runs."""
        params = params or SamplingParams()
        tokens = self._prompt_tokens(prompt)
        text = prompt if isinstance(prompt, str) else None
        request = Request(text, tokens, params, speculation, progress)
        seed = fresh_seed() if params.seed is None else params.seed
        form = structured(params.structured_outputs)
        room = min(params.max_tokens, self.target.max_context - len(tokens))
        for index in range(params.n):
            own = choice_seed(seed, index)
            grammar = self._grammars.start(form) if form else None
            sampler = RowSampler(params, own, self.target.vocab_size, tokens, self.tokenizer.end_ids, grammar)
            row = Row(next(self._ids), list(tokens), len(tokens), params, own, sampler)
            row.speculate = speculation and bool(self._parts.drafters)
            rules = StopRules(params, self.tokenizer.end_ids, room)
            answer = Answer(request, index, row, rules, Detokenizer(self.tokenizer))
            answer.stats.exact = self._parts.verifier.exact
            answer.logprobs = None if params.logprobs is None else []
            request.answers.append(answer)
            if room == 0:
                answer.finish(End("length"))
        self._scheduler.add(answer for answer in request.answers if not answer.finish_reason)
        return request

    def _prompt_tokens(self, prompt: str | Sequence[int]) -> list[int]:
        tokens = self.tokenizer.encode(prompt, add_special=True) if isinstance(prompt, str) else whole_numbers(prompt)
        if not tokens:
            bos = self.tokenizer.bos_id
            if bos is None:
                raise InputError("the prompt is empty and this model has no BOS token to begin with; give some text")
            tokens = [bos]
        limit, size = self.target.max_context, self.target.vocab_size
        if len(tokens) >= limit:
            raise ContextLengthError(
                f"the prompt has {len(tokens)} tokens; this model's context of {limit} leaves room for at most "
                f"{limit - 1}: shorten the prompt or raise max_context"
            )
        wrong = next((token for token in tokens if not 0 <= token < size), None)
        if wrong is not None:
            raise InputError(f"the prompt holds token {wrong}; this model's ids are 0 to {size - 1}")
        return tokens

    def step(self) -> None:
        """Start what can start, run one pass over all running rows, let go of what has ended.

        An exception inside ends all running answers, whose state is then unknown, and is raised again. Ctrl-C waits
        for the end of the step, or of the present chunk of a prompt.
        """
        with self._lock, self._interrupts:
            if self._stepping:
                raise InputError("this model is in the middle of a step; do not generate from inside a progress call")
            try:
                self._stepping = True
                while (answer := self._scheduler.next()) is not None:
                    self._start(answer)
                self._pass()
            except BaseException as error:
                if not self._interrupts.clean:
                    self._abort(f"{type(error).__name__}: {error}")
                raise
            finally:
                self._stepping = False
                while self._dropped:
                    self.cancel(self._dropped.pop())

    def _pass(self) -> None:
        """One pass over what runs. Without memory for it, kept prefixes go first, then drafts, then the last row."""
        running, draft = self._scheduler.running, True
        while running:
            try:
                self._run(Batch(running, self.target.max_context, draft))
                break
            except CacheFullError as error:
                if self._slots.forget():
                    continue
                if not draft:
                    self._preempt(running[-1], error)
                draft = False

    def _preempt(self, answer: Answer, error: CacheFullError) -> None:
        """The row gives its memory back and starts again later from its tokens; alone, it cannot go on."""
        if len(self._scheduler.running) == 1:
            answer.finish(End(ERROR, str(error)))
        self._leave(answer)
        self._drop(answer.row)
        if not answer.finish_reason:
            self._scheduler.put_back(answer)

    def _drop(self, row: Row) -> None:
        """Give back the row's slot, whose content is not known, if it has one."""
        if row.slot >= 0:
            self._slots.drop(row.slot)
            row.slot = -1

    def _run(self, batch: Batch) -> None:
        clock = Clock()
        self._check(batch)
        step(batch, self._parts, clock)
        ended = [answer for answer in batch.answers if answer.finish_reason]
        batch.charge(clock.seconds)
        if len(batch.rows) == 1 and clock.token_rows == 1:
            self._plain_steps.append(sum(clock.seconds.values()))
        for answer in ended:
            self._finish(answer)
        self._check(batch)

    def _start(self, answer: Answer) -> None:
        """Read the row's tokens, but for the anchor, and let the drafters know."""
        row, started = answer.row, time.perf_counter()
        try:
            self._read(answer)
        except SlipstreamError as error:
            self._drop(row)
            waits = isinstance(error, CacheFullError) and (self._slots.forget() or len(self._scheduler.running) > 1)
            if waits:
                self._scheduler.put_back(answer)
            else:
                answer.finish(End(ERROR, str(error)))
                self._scheduler.remove(answer)
            return
        for drafter in self._parts.drafters if row.speculate else ():
            drafter.begin(row)
        answer.request.timing.prefill_s += time.perf_counter() - started

    def _read(self, answer: Answer) -> None:
        row, request, tokens = answer.row, answer.request, answer.row.tokens[:-1]
        row.slot, reused = self._slots.take(row.tokens)
        request.timing.reused_tokens += 0 if answer.count else reused
        for done in range(reused, len(tokens), PREFILL_CHUNK):
            try:
                self._interrupts.release()
            except BaseException:
                self._drop(row)
                self._scheduler.put_back(answer, full=False)
                raise
            if request.progress is not None:
                request.progress(done, len(tokens))
            self.target.prefill(row.slot, tokens[done : done + PREFILL_CHUNK])
        if request.progress is not None:
            request.progress(len(tokens), len(tokens))

    def _finish(self, answer: Answer) -> None:
        """An answer that ran has ended: its cache rows stay for a while, unless they are not to be trusted."""
        self._estimate(answer)
        self._leave(answer)
        if answer.finish_reason == ERROR:
            self._drop(answer.row)
        else:
            self._slots.park(answer.row.slot)

    def _leave(self, answer: Answer) -> None:
        """The row leaves the scheduler, the drafters and the controller."""
        self._scheduler.remove(answer)
        for drafter in self._parts.drafters if answer.row.speculate else ():
            answer.stats.drafter_failures += drafter.failures(answer.row)
            drafter.end(answer.row)
        self._parts.controller.end(answer.row)

    def _estimate(self, answer: Answer) -> None:
        """How much faster this answer came than plain decoding would have, by the measured time of a plain step."""
        if not self._plain_steps and answer.finish_reason != CANCELLED:
            self._calibrate(answer.row)
        if self._plain_steps and answer.decode_s > 0:
            plain = statistics.median(self._plain_steps)
            answer.stats.speedup_estimate = answer.count * plain / answer.decode_s

    def _calibrate(self, row: Row) -> None:
        """Measure one pass over an anchor alone; nothing of it is kept."""
        if self.target.length(row.slot) + 2 > self.target.max_context:
            return
        started = time.perf_counter()
        with contextlib.suppress(CacheFullError):
            output = self.target.forward([RowInput(row.slot, row.tokens[-1])])
            output.logits[0][0].max()  # reading it waits for devices that compute on while the host goes ahead
            self._plain_steps.append(time.perf_counter() - started)

    def cancel(self, request: Request) -> None:
        """End what is left of a request, now or after the step that calls; its slots are then free again.

        Safe for requests that are done.
        """
        with self._lock, self._interrupts:
            if self._stepping:
                self._dropped.append(request)
                return
            for answer in request.answers:
                if answer.finish_reason:
                    continue
                answer.finish(End(CANCELLED))
                if answer in self._scheduler.running:
                    self._finish(answer)
                else:
                    self._scheduler.remove(answer)

    def _abort(self, reason: str) -> None:
        for answer in list(self._scheduler.running):
            if not answer.finish_reason:
                answer.finish(End(ERROR, reason))
            self._leave(answer)
            self._drop(answer.row)

    def stream(self, request: Request) -> Iterator[Piece]:
        """Pieces of one request as they come, other requests running along; leaving early cancels it."""
        try:
            while not request.done:
                self.step()
                yield from self._pieces(request)
            yield from self._pieces(request)
        finally:
            self.cancel(request)

    def _pieces(self, request: Request) -> list[Piece]:
        with self._lock:
            return [piece for answer in request.answers for piece in answer.pieces()]

    def run(self, requests: Sequence[Request]) -> list[RequestOutput]:
        """Results of these requests, in their order."""
        try:
            while not all(request.done for request in requests):
                self.step()
        finally:
            with self._lock, self._interrupts:
                for request in requests:
                    self.cancel(request)
        return [request.result() for request in requests]

    def forget(self) -> None:
        """Drop the prefixes kept of earlier answers."""
        with self._lock:
            self._slots.forget()

    def _check(self, batch: Batch) -> None:
        """The invariant between steps: the cache holds a row's tokens but for its anchor."""
        if self.debug:
            for row in (answer.row for answer in batch.answers if not answer.finish_reason):
                length = self.target.length(row.slot)
                assert length == len(row.tokens) - 1, f"row {row.id}: cache {length}, tokens {len(row.tokens)}"


def whole_numbers(tokens: Sequence[int]) -> list[int]:
    """Token ids as Python integers. Raises InputError for anything else, floats and truth values included."""
    try:
        found = [token if isinstance(token, (bool, float)) else operator.index(token) for token in tokens]
        if isinstance(tokens, (str, bytes)) or any(isinstance(token, (bool, float)) for token in found):
            raise TypeError
        return found
    except TypeError:
        raise InputError(f"prompt token ids are {tokens!r:.80}; they must be a list of whole numbers") from None
