"""Requests in, answers out: adds, steps, cancels, streams. Between steps everything is consistent."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from slipstream.control.base import Controller
from slipstream.core.errors import CacheFullError, InputError, SlipstreamError
from slipstream.core.params import SamplingParams, Speculating
from slipstream.core.structured import structured
from slipstream.core.types import Piece, RequestOutput, Row
from slipstream.drafters.base import Drafter
from slipstream.engine.batch import Batch
from slipstream.engine.detokenize import Detokenizer, Vocabulary
from slipstream.engine.drafting import Drafting
from slipstream.engine.interrupt import Interrupts
from slipstream.engine.ledger import Ledger, Snapshot
from slipstream.engine.prompt import prompt_tokens
from slipstream.engine.reader import Part, Reader
from slipstream.engine.request import CANCELLED, ERROR, Answer, Request
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.step import Along, Clock, Parts, step
from slipstream.engine.stop import End, StopRules
from slipstream.engine.watch import Watch
from slipstream.sampling import Grammars, RowSampler, choice_seed, fresh_seed
from slipstream.targets.base import Target
from slipstream.targets.slots import SlotPool
from slipstream.verify.base import Verifier


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
        self.verifier, self.controller = verifier, controller
        self.debug = os.environ.get("SLIPSTREAM_DEBUG") == "1" if debug is None else debug
        self.drafting = Drafting(drafters, target.vocab_size)
        self.watch, self.ledger = Watch(self.drafting), Ledger()
        self._scheduler = Scheduler(max_batch)
        self._slots = SlotPool(target, min(keep_prefixes, max_batch))
        self._reader = Reader(target, self._scheduler, self._slots, self.drafting, self.ledger)
        self._grammars = Grammars(tokenizer, target.vocab_size)
        self._ids, self._request_ids = itertools.count(), itertools.count(1)
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
        speculation: Speculating = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> Request:
        """Queue a prompt (raw text or token ids). Raises InputError or ContextLengthError before anything runs."""
        request = self.make(prompt, params, speculation=speculation, progress=progress)
        self.queue(request)
        return request

    def make(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        speculation: Speculating = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> Request:
        """A checked request that is not queued yet, so that this can be done beside a running step."""
        params = params or SamplingParams()
        tokens = prompt_tokens(prompt, self.tokenizer, self.target)
        text = prompt if isinstance(prompt, str) else None
        request = Request(text, tokens, params, speculation, progress, id=next(self._request_ids))
        seed = fresh_seed() if params.seed is None else params.seed
        form = structured(params.structured_outputs)
        room = min(params.max_tokens, self.target.max_context - len(tokens))
        for index in range(params.n):
            own = choice_seed(seed, index)
            grammar = self._grammars.start(form) if form else None
            sampler = RowSampler(params, own, self.target.vocab_size, tokens, self.tokenizer.end_ids, grammar)
            row = Row(next(self._ids), list(tokens), len(tokens), params, own, sampler)
            self.drafting.describe(row, speculation)
            rules = StopRules(params, self.tokenizer.end_ids, room)
            answer = Answer(request, index, row, rules, Detokenizer(self.tokenizer))
            answer.stats.exact = self.verifier.exact
            answer.logprobs = None if params.logprobs is None else []
            request.answers.append(answer)
            if room == 0:
                answer.finish(End("length"))
        return request

    def queue(self, request: Request) -> None:
        """Let a request that was made wait for its turn."""
        with self._lock:
            self.ledger.queued(request)
            self._scheduler.add(answer for answer in request.answers if not answer.finish_reason)

    def step(self) -> None:
        """Admit what can start, read a bit of the prompts that wait for it, run one pass over all running rows.

        An exception inside ends all answers that hold a place in the batch, whose state is then unknown, and is raised
        again. Ctrl-C waits for the end of the step.
        """
        with self._lock, self._interrupts:
            if self._stepping:
                raise InputError("this model is in the middle of a step; do not generate from inside a progress call")
            try:
                self._stepping = True
                self._reader.admit()
                parts = self._plan()
                if not self.target.reads_along:
                    self._read(parts)
                    parts = []
                self._pass(parts)
            except BaseException as error:
                self._abort(f"{type(error).__name__}: {error}")
                raise
            finally:
                self._stepping = False
                while self._dropped:
                    self.cancel(self._dropped.pop())

    def _plan(self) -> list[Part]:
        """What the coming pass reads of prompts. A refusal ends its request, want of memory makes it wait."""
        parts: list[Part] = []
        while (turn := self._reader.turn(parts)) is not None:
            try:
                part = self._reader.part(*turn)
                parts += [part] if part is not None else []
            except CacheFullError as error:
                parts = self._make_room(error, parts)
            except SlipstreamError as error:
                self._fail(turn[0], error)
        return parts

    def _read(self, parts: Sequence[Part]) -> None:
        """Read these parts of prompts by themselves."""
        for part in parts:
            started = time.perf_counter()
            try:
                features = self.target.prefill(part.read.slot, part.read.tokens, part.read.last)
                self._reader.took(part, features, time.perf_counter() - started)
                self._reader.announce(part)
            except CacheFullError as error:
                self._make_room(error)
                break
            except SlipstreamError as error:
                self._fail(part.answer, error)

    def _pass(self, parts: Sequence[Part]) -> None:
        """One pass over what runs, which reads parts of prompts on the way.

        Without memory kept prefixes go first; prompts wait while others run; then drafts go, then the last row.
        """
        most = self.drafting.max_nodes
        while (running := self._scheduler.running) or parts:
            try:
                ready = [part.answer for part in parts if part.ends]
                self._run(Batch([*running, *ready], self.target.max_context, most), parts)
                break
            except CacheFullError as error:
                if parts and running and not self._slots.kept_tokens:
                    parts = []
                elif parts or most == 0 or self._slots.kept_tokens:
                    parts = self._make_room(error, parts)
                else:
                    most = 0

    def _make_room(self, error: CacheFullError, parts: Sequence[Part] = ()) -> list[Part]:
        """Kept prefixes go first, then whoever came last: it starts again later from its tokens; alone, it cannot.

        Returns those parts that can still be read.
        """
        if self._slots.forget():
            return list(parts)
        holders = [answer for answer in self._scheduler.admitted if answer.row.slot >= 0]
        last = max(holders, key=lambda answer: answer.row.id)
        if len(holders) == 1:
            self._fail(last, error)
        else:
            self._leave(last)
            self._drop(last.row)
            self._scheduler.put_back(last)
        return [part for part in parts if part.answer is not last]

    def _fail(self, answer: Answer, error: SlipstreamError) -> None:
        """This answer alone ends."""
        answer.finish(End(ERROR, str(error)))
        self._finish(answer)

    def _drop(self, row: Row) -> None:
        """Give back the row's slot, whose content is not known, if it has one."""
        if row.slot >= 0:
            self._slots.drop(row.slot)
            row.slot = -1

    def _run(self, batch: Batch, parts: Sequence[Part]) -> None:
        clock = Clock()
        self._check(self._scheduler.running)
        before = sum(len(row.tokens) for row in batch.rows)
        new = sum(part.ends for part in parts)
        along = Along([part.read for part in parts], partial(self._reader.took_all, parts), new)
        step(batch, Parts(self.target, self.verifier, self.controller, self.drafting.active), clock, along)
        self._announce(parts)
        batch.charge(clock.seconds)
        self.ledger.step(batch, clock, sum(len(row.tokens) for row in batch.rows) - before)
        for answer in batch.answers:
            if answer.finish_reason:
                self._finish(answer)
        # In a pass that reads prompts not everybody is asked, so it says nothing about who rests.
        if self.watch.due(not parts and any(row.speculate for row in batch.rows)):
            nodes, _ = self.ledger.totals([*self._scheduler.waiting, *self._scheduler.admitted])
            self.watch.look(nodes.drafted_by_source, nodes.accepted_by_source, self.controller.gains())
        self._check(self._scheduler.running)

    def _announce(self, parts: Sequence[Part]) -> None:
        """After the pass: what is refused inside this call, being for between steps, ends its request alone."""
        for part in parts:
            try:
                self._reader.announce(part)
            except SlipstreamError as error:
                if not part.answer.finish_reason:
                    part.answer.finish(End(ERROR, str(error)))

    def _finish(self, answer: Answer) -> None:
        """An answer has ended: its cache rows stay for a while, unless they are not to be trusted."""
        cold = self.ledger.plain_step_s is None and answer.count > 0 and answer.row.slot >= 0
        if cold and answer.finish_reason not in (ERROR, CANCELLED):
            self.ledger.calibrate(self.target, answer.row)
        self._leave(answer)
        self.ledger.ended(answer)
        if answer.finish_reason == ERROR or answer.request.replay:
            self._drop(answer.row)
        elif answer.row.slot >= 0:
            self._slots.park(answer.row.slot)

    def _leave(self, answer: Answer) -> None:
        """The row leaves the scheduler, the drafters and the controller."""
        self._scheduler.remove(answer)
        answer.stats.drafter_failures += self.drafting.end(answer.row)
        self.controller.end(answer.row)

    def cancel(self, request: Request, reason: str = CANCELLED) -> None:
        """End what is left of a request, now or after the step that calls; its slots are then free again.

        reason: its finish_reason. Safe for requests that are done.
        """
        with self._lock, self._interrupts:
            if self._stepping:
                self._dropped.append(request)
                return
            for answer in request.answers:
                if not answer.finish_reason:
                    answer.finish(End(reason))
                    self._finish(answer)

    def _abort(self, reason: str) -> None:
        for answer in self._scheduler.admitted:
            if not answer.finish_reason:
                answer.finish(End(ERROR, reason))
            self._finish(answer)

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
            return request.pieces()

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

    def configure(self, **changes: Any) -> None:
        """Set `speculation` (bool), `drafters` (names or None) or `max_nodes` from the next step on.

        No running request is dropped and no token changes. Raises InputError; nothing is changed then.
        """
        with self._lock:
            self.drafting.configure(**changes)

    def exchange(self, drafter: Drafter) -> None:
        """From the next step on this drafter stands for the loaded one of the same name."""
        with self._lock:
            self.drafting.exchange(drafter)

    def previous(self) -> None:
        """Back to the setting before the last `configure` or `exchange`. Raises InputError when there was none."""
        with self._lock:
            self.drafting.previous()

    def snapshot(self) -> Snapshot:
        """The state between two steps."""
        with self._lock:
            return self.ledger.snapshot(self._scheduler, self.target.memory_bytes(), self.drafting, self.watch)

    def forget(self) -> None:
        """Drop what earlier answers left, kept prefixes and what drafters learned, as if the next were the first."""
        with self._lock:
            self._slots.forget()
            for guard in self.drafting.guards:
                guard.drafter.forget()

    def close(self) -> None:
        """Free the cache and let drafters save what they keep. Raises InputError when that cannot be written."""
        with self._lock:
            self._slots.forget()
            for guard in self.drafting.guards:
                guard.drafter.close()

    def _check(self, running: Sequence[Answer]) -> None:
        """The invariant between steps: the cache holds a row's tokens but for its anchor."""
        if self.debug:
            for row in (answer.row for answer in running):
                length = self.target.length(row.slot)
                assert length == len(row.tokens) - 1, f"row {row.id}: cache {length}, tokens {len(row.tokens)}"
