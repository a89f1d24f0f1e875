"""The application: routes over a service. Everything it answers is JSON, but for metrics, streams and the page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from slipstream.core.errors import SlipstreamError
from slipstream.server.admin import admin_routes
from slipstream.server.call import Call, echoed
from slipstream.server.chat import ChatWriter
from slipstream.server.completions import CompletionWriter
from slipstream.server.errors import ApiError, from_http, from_ours, from_validation
from slipstream.server.gate import Gate
from slipstream.server.openapi import description
from slipstream.server.params import check_chat, check_completion, prompts
from slipstream.server.reply import JsonReply, error_reply
from slipstream.server.schemas import ChatRequest, CompletionRequest
from slipstream.server.service import Served, Service

PAGE = Path(__file__).parent / "page"
PAGE_HEADERS = {"cache-control": "no-cache", "x-content-type-options": "nosniff", "x-frame-options": "DENY"}
"""Asked for again after every upgrade, and never shown inside of another page."""
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def make_app(service: Service) -> ASGIApp:
    """The ASGI application of a service."""
    app = FastAPI(title="Slipstream", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.openapi = lambda: description(app, service)  # type: ignore[method-assign]  # FastAPI's own way to change it
    app.include_router(_api(service))
    app.include_router(_watching(service))
    if service.settings.admin_key:
        app.include_router(admin_routes(service))
    if (PAGE / "index.html").exists():
        app.add_api_route("/", _page, include_in_schema=False)
        app.mount("/page", _PageFiles(directory=PAGE))
    for kind, make in _HANDLERS.items():
        app.add_exception_handler(kind, _handler(make))
    return Gate(app, service)


def _api(service: Service) -> APIRouter:
    """What clients of OpenAI's interface call."""
    api = APIRouter(prefix="/v1")

    @api.post("/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue prompts."""
        call = Call(service, body, request)
        check_completion(body)
        asked = [each if isinstance(each, str) else {"prompt_token_ids": each} for each in prompts(body)]
        job = await call.begin(asked)
        return call.reply(job, CompletionWriter(body, call.served, echoed(body, job, call.served)))

    @api.post("/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        call = Call(service, body, request)
        check_chat(body)
        messages = [{"content": "", **message.model_dump(exclude_none=True)} for message in body.messages]
        job = await call.begin([messages], body.chat_template_kwargs)
        return call.reply(job, ChatWriter(body, call.served))

    @api.get("/models")
    async def models() -> Response:
        """The model, in a list."""
        return JsonReply({"object": "list", "data": [_model(service.served)]})

    @api.get("/models/{name:path}")
    async def model(name: str) -> Response:
        """The model."""
        return JsonReply(_model(service.named(name)))

    return api


def _watching(service: Service) -> APIRouter:
    """What those call who watch over the server; open to all, cheap whatever the load."""
    watching = APIRouter()

    @watching.get("/health")
    async def health() -> Response:
        """200 while the engine makes progress."""
        service.served  # noqa: B018  raises what keeps it from answering
        return JsonReply({"status": "ok"})

    @watching.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus text."""
        return Response(service.meter.render(), media_type=METRICS_TYPE)

    return watching


def _page() -> Response:
    """The page."""
    return FileResponse(PAGE / "index.html", headers=PAGE_HEADERS)


class _PageFiles(StaticFiles):
    """What the page is made of."""

    def file_response(self, *args: Any, **given: Any) -> Response:
        """The file, with our headers."""
        made = super().file_response(*args, **given)
        made.headers.update(PAGE_HEADERS)
        return made


def _model(served: Served) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "slipstream",
        "max_model_len": served.max_context,
        "drafters": list(served.drafters),
    }


_HANDLERS: dict[type[Exception], Callable[[Any], ApiError]] = {
    ApiError: lambda error: error,
    SlipstreamError: from_ours,
    RequestValidationError: lambda error: from_validation(error.errors()),
    HTTPException: from_http,
    Exception: lambda error: ApiError(500, "something went wrong here; the log of the server says what"),
}


def _handler(make: Callable[[Any], ApiError]) -> Callable[[Request, Exception], Response]:
    def handle(request: Request, error: Exception) -> Response:
        return error_reply(make(error))

    return handle
