"""What every request goes through: an id, keys, the size of the body; in the end the log, the count, the errors."""

from __future__ import annotations

import logging
import re
import secrets
import time
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.core.errors import SlipstreamError
from slipstream.server.errors import ApiError, from_ours
from slipstream.server.logs import event
from slipstream.server.reply import error_reply
from slipstream.server.service import Service, same_key

_GOOD_ID = re.compile(r"[\x21-\x7e]{1,128}")


def log_fields(scope: Scope) -> dict[str, Any]:
    """What the log line of this request will say besides what it always says."""
    found: dict[str, Any] = scope["state"].setdefault("log", {})
    return found


class Gate:
    """ASGI middleware, the outermost one."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {})
        visit = _Visit(scope, send)
        try:
            self._check_key(scope, visit.headers)
            await self._app(scope, self._limited(visit.headers, receive), visit.send)
        except Exception as error:
            await self._failed(error, visit, scope, receive)
        finally:
            self._note(visit, scope)

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        settings, path = self._service.settings, scope["path"]
        key = settings.api_key if path.startswith("/v1") else settings.admin_key if path.startswith("/admin") else None
        if key is None:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not same_key(given.strip(), key):
            raise ApiError(
                401, "the API key is missing or wrong; send Authorization: Bearer KEY", code="invalid_api_key"
            )

    def _limited(self, headers: Headers, receive: Receive) -> Receive:
        """The same body, as long as it is not too long, said or not."""
        limit, read = self._service.settings.max_body, 0
        said = headers.get("content-length", "")
        if said.isascii() and said.isdigit() and int(said) > limit:
            raise _too_large(limit)

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > limit:
                raise HTTPException(413, _too_large(limit).message)
            return message

        return counted

    async def _failed(self, error: Exception, visit: _Visit, scope: Scope, receive: Receive) -> None:
        if isinstance(error, SlipstreamError):
            error = from_ours(error)
        if not isinstance(error, ApiError):
            event("request failed", logging.ERROR, exc_info=error, id=visit.id)
            error = ApiError(500, "something went wrong here; the log of the server says what")
        if visit.status is None:
            await error_reply(error)(scope, receive, visit.send)

    def _note(self, visit: _Visit, scope: Scope) -> None:
        route = scope.get("route")
        endpoint = getattr(route, "path", "other") or "other"
        status = visit.status or 499
        self._service.meter.answered(endpoint, status)
        level = logging.DEBUG if endpoint in ("/health", "/metrics") else logging.INFO
        seconds = round(time.monotonic() - visit.arrived, 4)
        said = {"id": visit.id, "method": scope["method"], "path": scope["path"], "status": status, "seconds": seconds}
        event("request", level, **said, **log_fields(scope))


class _Visit:
    """One request on its way: its id, and what has been sent."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.arrived = time.monotonic()
        self.headers = Headers(scope=scope)
        given = self.headers.get("x-request-id", "")
        self.id = given if _GOOD_ID.fullmatch(given) else f"req-{secrets.token_hex(8)}"
        self.status: int | None = None
        self._send = send

    async def send(self, message: Message) -> None:
        """Pass on, with the id in the headers."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(raw=message.setdefault("headers", [])).append("x-request-id", self.id)
        await self._send(message)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body has more than {limit} bytes; the server was started with that limit (--max-body)")
