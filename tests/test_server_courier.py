"""The way of news from the engine's thread to the event loop: their order, their pace, and who has ended."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

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
