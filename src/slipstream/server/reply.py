"""Sending an answer, whole or as a stream of events, to a client that may go away at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from slipstream.server.errors import ApiError, dumps
from slipstream.server.job import Job, joined
from slipstream.server.wire import Writer, as_event

DONE = b"data: [DONE]\n\n"


class JsonReply(Response):
    """A JSON object that is sent at once."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The object as bytes."""
        return dumps(content)


def error_reply(error: ApiError) -> JsonReply:
    """An error as a reply."""
    return JsonReply(error.body, error.status, error.headers)


class Answer(Response):
    """The reply to a job. Nothing is sent before there is something to send, so that what fails early has its status.

    finish: awaited at the end, however it came; it cancels what still runs.
    """

    def __init__(
        self,
        job: Job,
        writer: Writer,
        finish: Callable[[Job], Awaitable[None]],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._job, self._writer, self._finish = job, writer, finish
        self._extra = dict(headers or {})
        self.background = None
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, unless the client goes away first; whatever happens, nothing of the job runs on."""
        answering = asyncio.ensure_future(self._answer(scope, receive, send))
        watching = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait((answering, watching), return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            for task in (answering, watching):
                task.cancel()
            await self._finish(self._job)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._job.task.stream:
            await self._stream(scope, receive, send)
            return
        try:
            reply = JsonReply(self._writer.whole(await self._job.finish()), headers=self._extra)
        except ApiError as error:
            reply = error_reply(error)
        await reply(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def write(chunks: Iterable[bytes], last: bool = False) -> None:
            nonlocal begun
            data = b"".join(chunks)
            if not begun and (data or last):
                begun = True
                await send({"type": "http.response.start", "status": 200, "headers": self._stream_headers()})
                data = b"".join(self._writer.opening()) + data
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})

        try:
            async for parts in self._job.parts():
                found = joined(parts, by_source=bool(self._writer.request.include_sources))
                await write(chunk for part in found for chunk in self._writer.chunks(part))
            await write(self._writer.closing(self._job.results()), last=True)
        except ApiError as error:
            if not begun:
                await error_reply(error)(scope, receive, send)
                return
            await write([as_event(error.body)])
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

    def _stream_headers(self) -> list[tuple[bytes, bytes]]:
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **self._extra}
        return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


async def _gone(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
