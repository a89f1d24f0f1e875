"""Errors as OpenAI clients read them: a status and `{"error": {message, type, param, code}}`, always JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from starlette.exceptions import HTTPException

from slipstream.core.errors import (
    ContextLengthError,
    InputError,
    ModelError,
    QueueFullError,
    SlipstreamError,
    StoppedError,
)

RETRY_S = 1
"""Seconds after which a refused request may be sent again."""
_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error", 504: "timeout_error"}
_CODES = {
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
    429: "queue_full",
    500: "internal_error",
    504: "deadline_exceeded",
}
_ABOUT_PROMPTS = ("the prompt", "a prompt", "prompt token", "the text", "the chat template")


class ApiError(Exception):
    """An answer that is not 200. Type and code follow from the status where they are not given."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.code = code or _CODES.get(status)
        self.headers = {"retry-after": str(RETRY_S)} if status in (429, 503) else {}
        if status == 401:
            self.headers["www-authenticate"] = "Bearer"

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def dumps(value: Any) -> bytes:
    """Compact JSON in UTF-8; what UTF-8 cannot hold (lone surrogates) as JSON's own escapes. Raises on NaN."""
    return _JSON.encode(value).encode("utf-8", "backslashreplace")


def from_ours(error: SlipstreamError, fields: Sequence[str] = ()) -> ApiError:
    """What went wrong below, as a status.

    fields: of the request, the one with the prompt first; the one that the message begins with is the param.
    """
    message = str(error)
    first = message.partition(" ")[0].partition("[")[0]
    param = first if first in fields else fields[0] if fields and message.startswith(_ABOUT_PROMPTS) else None
    if isinstance(error, ContextLengthError):
        return ApiError(400, message, code="context_length_exceeded", param=param)
    if isinstance(error, QueueFullError):
        return ApiError(429, message)
    if isinstance(error, StoppedError):
        return ApiError(503, message, code="stopped")
    return ApiError(400 if isinstance(error, (InputError, ModelError)) else 500, message, param=param)


def from_http(error: HTTPException) -> ApiError:
    """What routing refuses: no such path, no such method."""
    made = ApiError(error.status_code, str(error.detail))
    made.headers.update(error.headers or {})
    return made


def from_validation(errors: Sequence[Any]) -> ApiError:
    """The first complaint of pydantic: of alternatives, the one that went furthest into the value."""
    deepest = max(errors, key=lambda error: len(error["loc"]), default=None)
    if deepest is None:
        return ApiError(400, "the request is malformed")
    if deepest["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {deepest.get('ctx', {}).get('error', 'it cannot be parsed')}")
    words = [str(part) for part in deepest["loc"][1:]]
    if not words:
        return ApiError(400, "the body must be a JSON object, sent with Content-Type: application/json")
    named = ".".join(word for word in words if word.replace("_", "").isalnum())
    return ApiError(400, f"{named}: {deepest['msg']}", param=words[0])
