"""What the server serves and in which state it is: loading, ready, draining, dead."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slipstream.server.courier import Courier
from slipstream.server.errors import ApiError
from slipstream.server.job import Job, Task
from slipstream.server.logs import event
from slipstream.server.metrics import Meter, engine_metrics, gauge
from slipstream.server.params import Limits

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from slipstream.engine.detokenize import Vocabulary
    from slipstream.engine.worker import Worker

STALLED_S = 30.0
"""Without any progress for so long while there is work, the engine counts as dead; passes take far less."""
GATHER_S = 0.04
"""Seconds for which a stream's news are gathered; readers do not see the difference. Every awakening of the event loop
takes time from the engine, whose threads use all cores."""
SETTLE_S = 5.0
"""Seconds to wait until the engine has let go of what was cancelled."""
_STATES = {
    "loading": "the model is being loaded",
    "draining": "the server is about to stop",
    "dead": "the engine has stopped",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """How the server is run. Keys: None for none. deadline_s: of a request; max_body: bytes of a request."""

    api_key: str | None = None
    admin_key: str | None = None
    max_body: int = 8_000_000
    max_tokens: int | None = None
    deadline_s: float | None = 600.0
    drain_s: float = 30.0
    log_prompts: bool = False


@dataclass(frozen=True, slots=True)
class Served:
    """A loaded model.

    names: what clients may call it; replies use the first. encode: raw text, token ids or messages (with template
    variables) to text and token ids. drafters: names of those that are loaded. reload: reads one of them anew.
    close: lets go of the model once its worker has stopped.
    """

    names: tuple[str, ...]
    fingerprint: str
    max_context: int
    vocabulary: Vocabulary
    vocabulary_size: int
    encode: Callable[..., tuple[str | None, list[int]]]
    worker: Worker
    drafters: tuple[str, ...] = ()
    reload: Callable[[str], None] = lambda name: None
    close: Callable[[], None] = lambda: None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def name(self) -> str:
        """The name in replies."""
        return self.names[0]


class Service:
    """One model for many requests. All methods run on the event loop unless they say otherwise."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.meter = Meter()
        self.meter.watch(self._metrics)
        self.failure: BaseException | None = None
        self.jobs: set[Job] = set()
        self._served: Served | None = None
        self._courier: Courier | None = None
        self._draining = False

    @property
    def state(self) -> str:
        """loading, ready, draining or dead."""
        if self.failure is not None:
            return "dead"
        if self._served is None:
            return "loading"
        worker = self._served.worker
        seen = time.monotonic() - worker.last_progress
        if not worker.alive or (self.jobs and seen > STALLED_S):
            return "dead"
        return "draining" if self._draining else "ready"

    def open(self, served: Served) -> None:
        """The model is there."""
        self._served = served

    @property
    def served(self) -> Served:
        """The model. Raises ApiError 503 when requests cannot be taken."""
        state = self.state
        if self._served is None or state != "ready":
            raise ApiError(503, f"{_STATES.get(state, state)}; try again later", code=state)
        return self._served

    def named(self, name: str | None) -> Served:
        """The model of this name. Raises ApiError 404 for any other."""
        served = self.served
        if name is not None and name not in served.names:
            raise ApiError(404, f"there is no model {name!r}; this server has {served.name!r}", code="model_not_found")
        return served

    @property
    def limits(self) -> Limits:
        """What requests may ask for."""
        return Limits(self.settings.max_tokens, self.served.max_context)

    def fail(self, error: BaseException) -> None:
        """The engine cannot go on: end what waits for it. From any thread."""
        if self.failure is None:
            self.failure = error
            event("engine died", logging.ERROR, exc_info=error)
        for job in list(self.jobs):
            job.fail(ApiError(503, "the engine has stopped", code="dead"))

    async def start(self, task: Task, prompts: Sequence[Any], variables: Mapping[str, Any] | None = None) -> Job:
        """Queue the prompts of a request. Raises what is wrong with them; nothing is queued then."""
        served = self.served
        most, n = served.worker.max_waiting, task.params.n
        if (len(prompts) - 1) * n >= most:  # so many would wait before the last is queued, even if nobody else does
            said = f"{len(prompts)} prompts with n = {n} never fit into the queue of {most} answers (--max-waiting)"
            raise ApiError(400, f"{said}; send fewer at once", param="prompt")
        self._courier = self._courier or Courier(asyncio.get_running_loop())
        job = Job(served.worker, task, self.meter, self._courier)

        def submit() -> None:
            encoded = [served.encode(prompt, variables) for prompt in prompts]
            job.submit(encoded)

        self.jobs.add(job)
        try:
            await asyncio.to_thread(submit)
            return job
        except BaseException:
            job.cancel()
            self.jobs.discard(job)
            raise

    async def finish(self, job: Job) -> None:
        """Let go of a job, ended or not, and wait until the engine has done so too."""
        job.cancel()
        try:
            async with asyncio.timeout(SETTLE_S):
                await job.settled.wait()
        except TimeoutError:
            event("cancelled request still runs", logging.WARNING)
        finally:
            self.jobs.discard(job)
            longest = max((a.count for request in job.requests for a in request.answers), default=0)
            first = None if job.first_at is None else job.first_at - job.arrived
            self.meter.ended(longest, first, time.monotonic() - job.arrived)

    async def drain(self) -> None:
        """Take no more requests, let those in work end within the time there is, end the others."""
        self._draining = True
        event("draining", requests=len(self.jobs), seconds=self.settings.drain_s)
        limit = time.monotonic() + self.settings.drain_s
        while self.jobs and time.monotonic() < limit:
            await asyncio.sleep(0.02)
        for job in list(self.jobs):
            job.fail(ApiError(503, "the server has stopped before the answer was complete", code="draining"))
        limit = time.monotonic() + SETTLE_S
        while self.jobs and time.monotonic() < limit:
            await asyncio.sleep(0.02)

    def close(self) -> None:
        """Stop the engine."""
        if self._served is not None:
            self._served.worker.stop()
            self._served.close()

    def _metrics(self) -> Iterable[Metric]:
        yield gauge("engine_up", "1 while the engine makes progress", float(self.state in ("ready", "draining")))
        if self._served is not None:
            worker = self._served.worker
            yield from engine_metrics(worker.stats(), worker.shadow)


def same_key(given: str, key: str) -> bool:
    """True for equal keys; the time it takes does not tell where they differ."""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), key.encode())
