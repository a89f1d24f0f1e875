"""Load on any OpenAI-compatible address: streamed chats, a fixed number at a time or arriving at random."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slipstream.core.errors import InputError

if TYPE_CHECKING:
    import httpx


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of the server. concurrency: that many at a time; rate: so many per second, Poisson, instead."""

    url: str
    rows: Sequence[Sequence[dict[str, Any]]]
    requests: int
    concurrency: int = 4
    rate: float | None = None
    model: str | None = None
    max_tokens: int = 128
    key: str | None = None
    seed: int = 0
    timeout_s: float = 600.0
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of every request, for instance {"speculation": false}."""


@dataclass(slots=True)
class Call:
    """One request on the clock of the run, in seconds. chunks: when each piece of text came.

    tokens: as the server counts them in its usage; without one the number of chunks stands in (`counted` is False).
    """

    start: float
    row: int
    chunks: list[float] = field(default_factory=list)
    end: float = 0.0
    tokens: int = 0
    counted: bool = False
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds to the first text."""
        return self.chunks[0] - self.start

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first, whatever chunks they came in; None for fewer than two tokens."""
        return (self.chunks[-1] - self.chunks[0]) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between chunks: what a reader waits."""
        return [late - early for early, late in zip(self.chunks, self.chunks[1:], strict=False)]


async def run(load: Load, client: httpx.AsyncClient, progress: Callable[[int], None] = lambda done: None) -> list[Call]:
    """Send all requests; the calls in order of their start. Cancelling keeps what has ended. Raises InputError."""
    if not load.rows:
        raise InputError("there is no row to ask; the rows file is empty")
    calls: list[Call] = []
    model = load.model or await _first_model(load, client)
    began, tasks = time.perf_counter(), set[asyncio.Task[None]]()

    async def one(number: int, start: float) -> None:
        call = Call(start, number % len(load.rows))
        await _ask(load, client, model, call, began)
        calls.append(call)
        progress(len(calls))

    try:
        if load.rate is not None:
            chance = random.Random(load.seed)
            due = 0.0  # latencies count from here, also where this process is late: a waiting client would see them
            for number in range(load.requests):
                await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
                tasks.add(asyncio.create_task(one(number, due)))
                due += chance.expovariate(load.rate)
        else:
            waiting = iter(range(load.requests))

            async def worker() -> None:
                for number in waiting:
                    await one(number, time.perf_counter() - began)

            tasks |= {asyncio.create_task(worker()) for _ in range(load.concurrency)}
        await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return sorted(calls, key=lambda call: call.start)


def _headers(load: Load) -> dict[str, str]:
    return {"Authorization": f"Bearer {load.key}"} if load.key else {}


async def _first_model(load: Load, client: httpx.AsyncClient) -> str:
    import httpx

    try:
        answer = await client.get(f"{load.url}/models", headers=_headers(load), timeout=10)
        return str(answer.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
        raise InputError(f"{load.url}/models does not answer ({error}); check --url, or name the --model") from None


async def _ask(load: Load, client: httpx.AsyncClient, model: str, call: Call, began: float) -> None:
    import httpx

    body = {
        "model": model, "messages": load.rows[call.row], "max_tokens": load.max_tokens, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True}, **load.extra,
    }  # fmt: skip
    url = f"{load.url}/chat/completions"
    try:
        async with client.stream("POST", url, json=body, headers=_headers(load), timeout=load.timeout_s) as answer:
            if answer.status_code != 200:
                call.error = f"HTTP {answer.status_code}"
                return
            await _read(answer.aiter_lines(), call, began)
    except httpx.HTTPError as error:
        call.error = type(error).__name__
    finally:
        call.end = time.perf_counter() - began
        if call.error is None and not call.chunks:
            call.error = "no text"


async def _read(lines: AsyncIterator[str], call: Call, began: float) -> None:
    """Take note of a stream's events as they come."""
    finished = False
    async for line in lines:
        if not line.startswith("data:"):
            continue
        now, data = time.perf_counter() - began, line[5:].strip()
        if data == "[DONE]":
            finished = True  # and read on: only a connection whose reply has been read to its end is used again
            continue
        try:
            event = json.loads(data)
        except ValueError:
            call.error = "not JSON"
            return
        if "error" in event:
            call.error = "error in the stream"
            return
        choices = event.get("choices") or [{}]
        if (choices[0].get("delta") or {}).get("content"):
            call.chunks.append(now)
        if event.get("usage"):
            call.tokens, call.counted = int(event["usage"]["completion_tokens"]), True
    if not finished:
        call.error = "the stream was cut off"
    if not call.counted:
        call.tokens = len(call.chunks)
