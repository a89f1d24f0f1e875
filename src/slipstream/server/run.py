"""Running the application: the socket first, then the model, and an orderly end on SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable
from types import FrameType

import uvicorn
from prometheus_client import disable_created_metrics
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from slipstream.core.errors import InputError
from slipstream.server.app import make_app
from slipstream.server.errors import ApiError, dumps
from slipstream.server.logs import event
from slipstream.server.service import Served, Service, Settings

LOOPBACK = ("127.0.0.1", "::1", "localhost")
_CLOSE_S = 2
"""Seconds for connections to close once nothing runs any more."""


def serve(load: Callable[[Service], Served], settings: Settings, host: str, port: int) -> int:
    """Serve until told to stop; returns the exit code. Health is 503 until `load` has returned.

    Raises InputError when the address cannot be used, and whatever `load` raises.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call]
    service = Service(settings)
    listener = bind(host, port)
    address = listener.getsockname()
    event("listening", host=address[0], port=address[1])
    if host not in LOOPBACK and settings.api_key is None:
        event("warning", logging.WARNING, message=f"{host} can be reached by others and there is no --api-key")
    return Server(configure(make_app(service)), service, load).run_until_told(listener)


def configure(app: ASGIApp) -> uvicorn.Config:
    """How uvicorn is run: it logs and announces nothing itself."""
    return uvicorn.Config(
        app,
        http=Connection,  # the same parser, with its bound on headers, whatever else is installed
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_CLOSE_S,
    )


def bind(host: str, port: int) -> socket.socket:
    """A socket on this address. Raises InputError naming it."""
    try:
        kind = socket.AF_INET6 if ":" in host else socket.AF_INET
        made = socket.create_server((host, port), family=kind, backlog=2048)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot listen on {host} port {port}: {reason}; choose another --host or --port") from None
    made.setblocking(False)
    return made


class Connection(H11Protocol):
    """Uvicorn's, but what is no HTTP is refused in JSON, as everything else is."""

    def send_400_response(self, msg: str) -> None:
        """Refuse what cannot be read and close; a reply that is under way is cut off."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            body = dumps(ApiError(400, "what was sent is no valid HTTP request, or its headers are too long").body)
            head = "HTTP/1.1 400 Bad Request", "content-type: application/json", f"content-length: {len(body)}"
            self.transport.write("\r\n".join((*head, "connection: close", "", "")).encode() + body)
        self.transport.close()


class Server(uvicorn.Server):
    """Uvicorn, with our own way to begin and to end."""

    def __init__(self, config: uvicorn.Config, service: Service, load: Callable[[Service], Served]) -> None:
        super().__init__(config)
        self._service, self._load = service, load
        self._told = False
        self._draining: asyncio.Task[None] | None = None

    def run_until_told(self, listener: socket.socket) -> int:
        """Serve on a bound socket; returns the exit code."""
        try:
            asyncio.run(self._run(listener))
        finally:
            self._service.close()
            listener.close()
        if self._service.failure is not None and not self._told:
            raise self._service.failure
        return 0

    async def _run(self, listener: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        # A daemon, so that the process can end while a model is still being read.
        threading.Thread(target=self._open, name="load", daemon=True).start()
        await self.serve(sockets=[listener])

    def _open(self) -> None:
        """In a thread of its own: load the model, or end the server."""
        try:
            served = self._load(self._service)
        except BaseException as error:
            self._service.failure = error
            self.should_exit = True
            return
        self._loop.call_soon_threadsafe(self._service.open, served)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains; the second one ends the process where it stands."""
        if self._told:
            event("stopped at once", logging.WARNING, signal=sig)
            os._exit(128 + sig)
        self._told = True
        self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._draining = asyncio.ensure_future(self._service.drain())
        self._draining.add_done_callback(lambda _: setattr(self, "should_exit", True))
