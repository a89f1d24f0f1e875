"""One thread that owns an engine and steps it while there is work; everybody else leaves notes for it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.core.errors import QueueFullError, StoppedError
from slipstream.core.params import SamplingParams, Speculating
from slipstream.core.types import Piece
from slipstream.engine.engine import Engine
from slipstream.engine.ledger import Snapshot
from slipstream.engine.replay import Mismatch, Shadow, ShadowCounts
from slipstream.engine.request import CANCELLED, DEADLINE, ERROR, Request
from slipstream.engine.stop import End

log = logging.getLogger(__name__)

TICK_S = 0.25
"""An idle thread shows this often that it is alive; counts of running answers are at most this old."""
GRACE_S = 10.0
"""What runs is cancelled after the present step, which takes no longer than this."""

Listener = Callable[[Request, list[Piece] | None], None]
"""Called with what is new after a step, or some steps, and once with None when the request has ended."""


@dataclass(slots=True)
class _Job:
    """A request in the thread's care. deadline: by time.monotonic."""

    request: Request
    listener: Listener
    deadline: float | None
    told: bool = False
    """True once it has had news."""


class Worker:
    """Runs an engine in a thread of its own. `start` once; all other methods may be called from any thread at any time.

    max_waiting: answers that may wait for a place in the batch; while so many do, requests are refused. on_fault:
    called with the exception when the thread has died of one, after all requests were told. shadow_share: share of
    finished requests that are decoded again plainly; on_alarm: called from the thread with each one that differs;
    alarm_stops: speculation is switched off then. gather_s: seconds for which news are gathered; what is new of a
    request at first and at its end is told at once. Raises InputError for what the shadow check cannot do.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_waiting: int = 128,
        on_fault: Callable[[BaseException], None] | None = None,
        shadow_share: float = 0.0,
        on_alarm: Callable[[Mismatch], None] | None = None,
        alarm_stops: bool = False,
        gather_s: float = 0.0,
    ) -> None:
        self.engine, self.max_waiting = engine, max_waiting
        self._on_fault, self._on_alarm, self._alarm_stops = on_fault, on_alarm, alarm_stops
        self._shadow = Shadow(engine, shadow_share, self._alarm)
        self._thread = threading.Thread(target=self._main, name="slipstream-engine", daemon=True)
        self._wake = threading.Condition()
        # Guarded by _wake; the thread takes notes out between steps.
        self._arrived: list[_Job] = []
        self._notes: list[Callable[[], None]] = []
        self._open = True
        self._stopping = False
        self._jobs: dict[Request, _Job] = {}
        """Touched by the thread alone, but for being counted."""
        self._died: BaseException | None = None
        self._idle = threading.Event()
        self._idle.set()
        self._snapshot = engine.snapshot()
        self._snapshot_at = self._told_at = 0.0
        self._gather_s = gather_s
        self.last_progress = time.monotonic()
        """Monotonic seconds of the last completed step or idle tick."""

    @property
    def alive(self) -> bool:
        """True from `start` until the thread has stopped or died."""
        return self._thread.is_alive() and self._died is None

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def submit(
        self,
        tokens: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        speculation: Speculating = True,
        deadline_s: float | None = None,
        listener: Listener,
    ) -> Request:
        """Queue a prompt, which is checked here and now. The thread may call the listener before this returns.

        deadline_s: seconds from now after which it ends with finish_reason "deadline". Raises InputError,
        ContextLengthError, QueueFullError when max_waiting answers wait, StoppedError when nothing new is taken.
        """
        self._check_open()
        request = self.engine.make(tokens, params, speculation=speculation)
        deadline = None if deadline_s is None else time.monotonic() + deadline_s
        with self._wake:
            self._check_open()
            if self.waiting >= self.max_waiting:
                raise QueueFullError(f"{self.max_waiting} answers wait already; send this request again later")
            self._arrived.append(_Job(request, listener, deadline))
            self._idle.clear()
            self._wake.notify()
        return request

    def _check_open(self) -> None:
        if self._died is not None:
            raise StoppedError(f"the engine has failed ({self._died}); restart it")
        if not self._open:
            raise StoppedError("the engine is about to stop and takes nothing new; send the request elsewhere")

    @property
    def waiting(self) -> int:
        """Answers that have no place in the batch yet, all `n` of a request counted."""
        with self._wake:
            requests = [*(job.request for job in self._arrived), *list(self._jobs)]
        return sum(request.waiting for request in requests)

    def cancel(self, request: Request) -> None:
        """End a request; its memory is free after the present step. Safe for requests that are done."""
        self._note(lambda: self._end(request, CANCELLED))

    def configure(self, **settings: Any) -> None:
        """`Engine.configure`, between two steps; returns when it holds. Raises InputError."""
        self.between(lambda: self.engine.configure(**settings))

    def previous(self) -> None:
        """`Engine.previous`, between two steps; returns when it holds. Raises InputError."""
        self.between(self.engine.previous)

    def between(self, action: Callable[[], None]) -> None:
        """Do something to the engine between two steps and wait until it is done; what it raises is raised here."""
        done, raised = threading.Event(), list[BaseException]()

        def act() -> None:
            try:
                action()
            except Exception as error:
                raised.append(error)
            finally:
                done.set()

        if self.alive and threading.current_thread() is not self._thread:
            self._note(act)
            while not done.wait(TICK_S) and self.alive:
                pass
        if not done.is_set():
            act()
        if raised:
            raise raised[0]

    def _note(self, action: Callable[[], None]) -> None:
        with self._wake:
            self._notes.append(action)
            self._wake.notify()

    def stats(self) -> Snapshot:
        """The engine's counts and state, at most a moment old; as soon as a request has ended it is counted in."""
        return self._snapshot

    @property
    def shadow(self) -> ShadowCounts:
        """What the shadow check has found."""
        return self._shadow.counts

    def _alarm(self, mismatch: Mismatch) -> None:
        if self._alarm_stops:
            log.error("speculation is switched off: the shadow check found a difference")
            self.engine.configure(speculation=False)
        if self._on_alarm is not None:
            self._on_alarm(mismatch)

    def drain(self, seconds: float) -> bool:
        """Take nothing new; let what there is end, for so many seconds, then cancel it. True when all could end."""
        with self._wake:
            self._open = False
        done = self._idle.wait(max(0.0, seconds)) or not self.alive
        if not done:
            self._note(self._end_all)
            self._idle.wait(GRACE_S)
        return done

    def stop(self) -> None:
        """Cancel what runs, end the thread and wait for it."""
        with self._wake:
            self._open, self._stopping = False, True
            self._wake.notify()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _main(self) -> None:
        try:
            while self._attend():
                self._expire()
                self._shadow.attend(waiting=self._snapshot.waiting > 0 and not self.engine.idle)
                if not self.engine.idle:
                    self.engine.step()
                self._tell()
                self.last_progress = time.monotonic()
            self._end_all()
            self._shadow.drop()
            self._tell()
        except BaseException as error:
            self._die(error)

    def _attend(self) -> bool:
        """Take in what was left for the thread, and wait while there is nothing to do; False when it is to stop."""
        with self._wake:
            if not (self._arrived or self._notes or self._jobs or self._stopping):
                self._idle.set()
                if self._shadow.idle:
                    self._wake.wait(TICK_S)
            arrived, self._arrived = self._arrived, []
            notes, self._notes = self._notes, []
            self._jobs |= {job.request: job for job in arrived}
        for job in arrived:
            self.engine.queue(job.request)
        for note in notes:
            note()
        return not self._stopping

    def _expire(self) -> None:
        now = time.monotonic()
        for job in list(self._jobs.values()):
            if job.deadline is not None and now >= job.deadline:
                self._end(job.request, DEADLINE)

    def _end(self, request: Request, reason: str) -> None:
        if request in self._jobs:
            self.engine.cancel(request, reason)

    def _end_all(self) -> None:
        with self._wake:
            self._jobs |= {job.request: job for job in self._arrived}
            self._arrived = []
        for request in list(self._jobs):
            self.engine.cancel(request)

    def _tell(self) -> None:
        """Pass on what is new; counts are brought up to date before anyone hears that a request has ended."""
        ended = [job for job in self._jobs.values() if job.request.done]
        now = time.monotonic()
        if ended or now - self._snapshot_at >= TICK_S:
            self._snapshot, self._snapshot_at = self.engine.snapshot(), now
        due = now - self._told_at >= self._gather_s
        if due:
            self._told_at = now
        for job in list(self._jobs.values()):
            if (due or not job.told or job.request.done) and (pieces := job.request.pieces()):
                job.told = True
                self._call(job, pieces)
        for job in ended:
            del self._jobs[job.request]
            self._call(job, None)
            self._shadow.finished(job.request)

    def _call(self, job: _Job, pieces: list[Piece] | None) -> None:
        try:
            job.listener(job.request, pieces)
        except Exception:
            log.exception("a listener failed; its request is cancelled")
            self.engine.cancel(job.request)

    def _die(self, error: BaseException) -> None:
        """The engine cannot go on: every request ends with the error, and nothing new is taken."""
        self._died = error
        log.critical("the engine's thread has died", exc_info=error)
        with self._wake:
            self._open = False
            self._jobs |= {job.request: job for job in self._arrived}
            self._arrived, notes, self._notes = [], self._notes, []
        for job in self._jobs.values():
            for answer in job.request.answers:
                if not answer.finish_reason:
                    answer.finish(End(ERROR, f"{type(error).__name__}: {error}"))
            for news in (job.request.pieces(), None):
                with contextlib.suppress(Exception):
                    job.listener(job.request, news)
        self._jobs = {}
        for note in notes:
            with contextlib.suppress(Exception):
                note()
        self._idle.set()
        if self._on_fault is not None:
            self._on_fault(error)
