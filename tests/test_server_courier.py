"""Between the event loop and the engine's thread: how news come, in which order, and what a cancelled job leaves."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest

import serve_beds as sb

pytest.importorskip("fastapi", reason="the server needs the extra `serve`")
from slipstream.core.params import SamplingParams
from slipstream.server.courier import Courier
from slipstream.server.job import Job, Task


def test_news_come_in_order_and_at_once():
    async def main():
        loop, heard, told = asyncio.get_running_loop(), [], []
        courier, tell = Courier(loop), loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda action: (told.append(action), tell(action))
        for batch in ([1, 2, 3], [4]):
            for what in batch:
                courier.post(lambda what=what: heard.append(what))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert heard == [1, 2, 3, 4]
        assert len(told) == 2, "once for all that is posted before the loop looks"

    asyncio.run(main())


def test_news_that_fail_do_not_hold_up_the_others():
    async def main():
        loop, heard, failed = asyncio.get_running_loop(), [], []
        loop.set_exception_handler(lambda _, context: failed.append(context["exception"]))
        courier = Courier(loop)
        courier.post(lambda: 1 / 0)
        courier.post(lambda: heard.append(1))
        await asyncio.sleep(0.05)
        assert heard == [1]
        assert [type(error) for error in failed] == [ZeroDivisionError]

    asyncio.run(main())


def test_a_job_is_not_settled_before_all_its_prompts_are_queued():
    """The first prompt has ended, and the loop knows, before the second one is queued."""

    async def main():
        settled = []

        class Quick:
            def submit(self, tokens, params, *, speculation, deadline_s, listener):
                listener(SimpleNamespace(answers=[]), None)
                time.sleep(0.1)
                settled.append(job.settled.is_set())
                return SimpleNamespace(answers=[], prompt=None)

        job = Job(Quick(), Task(SamplingParams()), None, Courier(asyncio.get_running_loop()))
        await asyncio.to_thread(job.submit, [("a", [1]), ("b", [2])])
        assert settled == [False, True]

    asyncio.run(main())


def test_a_request_that_is_cancelled_while_it_is_queued_leaves_nothing(monkeypatch):
    """The thread that queues cannot be interrupted: it must see for itself that nobody waits any more."""
    with sb.running(sb.small(monkeypatch, pause=0.004)) as server:
        worker, entered, go, taken = server.served.worker, threading.Event(), threading.Event(), []

        def submit(*given: object, plain=worker.submit, **named: object) -> object:
            entered.set()
            go.wait(10)
            taken.append(plain(*given, **named))
            return taken[-1]

        async def cancelled() -> None:
            queueing = server.service.start(Task(sb.sampling(max_tokens=390, ignore_eos=True)), ["Hello"] * 3)
            task = asyncio.create_task(queueing)
            await asyncio.to_thread(entered.wait, 10)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            go.set()

        monkeypatch.setattr(worker, "submit", submit)
        asyncio.run(cancelled())  # and wait for its threads
        assert len(taken) == 1, "what is cancelled queues no further prompt"
        sb.wait_for(lambda: taken[0].done)
        assert taken[0].answers[0].finish_reason == "cancelled"
        assert not server.service.jobs
