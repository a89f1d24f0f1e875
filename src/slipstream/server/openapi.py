"""/openapi.json: what the routes say of themselves, completed by what only the running server knows."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from slipstream.server.schemas import FEWEST_SEED, MOST_SEED
from slipstream.server.service import Served, Service

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_POSTED = {
    "400": "the request is wrong",
    "413": "too large",
    "429": "the queue is full",
    "500": "it failed",
    "504": "late",
}
_ALL = {"401": "the key is wrong", "503": "loading, draining or dead"}


def description(app: FastAPI, service: Service) -> dict[str, Any]:
    """The document. Token ids, drafters and lengths are bounded by those of the model, once it is loaded.

    How many tokens a text has no schema can say: that it must fit into the context stands at the status 400.
    """
    found = get_openapi(title=app.title, version="1", routes=app.routes)
    for path, methods in found["paths"].items():
        for method, operation in methods.items():
            _answers(operation, path, method)
    schemas = found["components"]["schemas"]
    for name in [name for name in schemas if "ValidationError" in name]:
        del schemas[name]
    schemas["Error"] = ERROR
    if service.settings.api_key is not None:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, methods in found["paths"].items():
            if path.startswith("/v1"):
                for operation in methods.values():
                    operation["security"] = [{"key": []}]
    if service.state == "ready":
        served, most = service.served, service.settings.max_tokens
        _bound(schemas, served, most)
        for operation in (methods["post"] for path, methods in found["paths"].items() if path.startswith("/v1/c")):
            operation["responses"]["400"]["description"] += (
                f", or the prompt has more than {served.max_context - 1} tokens (context_length_exceeded)"
            )
    return found


def _answers(operation: dict[str, Any], path: str, method: str) -> None:
    """Every status that an operation may have, and in which form its answer comes."""
    answers = operation["responses"]
    answers.pop("422", None)
    statuses = dict(_ALL)
    if method == "post":
        statuses |= _POSTED
        answers["200"]["content"]["text/event-stream"] = {"schema": {}}
    if method == "post" or "{" in path:
        statuses["404"] = "no such model"
    if path == "/metrics":
        answers["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    for status, text in statuses.items():
        answers[status] = {"description": text, "content": error}


def _bound(schema: Any, served: Served, most: int | None) -> None:
    """Write the model's own limits into every schema of a token id, a bias, a prompt, a drafter's name.

    most: tokens that an answer may have at most, None for any number.
    """
    if isinstance(schema, list):
        for part in schema:
            _bound(part, served, most)
    if not isinstance(schema, dict):
        return
    title = schema.get("title")
    if title == "Token":
        schema["maximum"] = served.vocabulary_size - 1
    elif title == "SeedNumber":  # FastAPI writes bounds as floats, which cannot hold these
        schema.update(minimum=FEWEST_SEED, maximum=MOST_SEED)
    elif title == "DrafterName":
        schema["enum"] = list(served.drafters)
    elif title == "AnswerTokens" and most is not None:
        schema["maximum"] = most
    elif title == "PromptTokens":
        schema["maxItems"] = served.max_context - 1
    elif title == "PromptText" and served.vocabulary.bos_id is None:
        schema["minLength"] = 1
    if "patternProperties" in schema:
        (value,) = schema["patternProperties"].values()
        schema["patternProperties"] = {below(served.vocabulary_size): value}
        schema["additionalProperties"] = False
    for part in list(schema.values()):
        _bound(part, served, most)


def below(size: int) -> str:
    """A pattern of the decimal numbers from 0 to size - 1."""
    digits = str(size - 1)
    shorter = [rf"[0-9]{{1,{len(digits) - 1}}}"] if len(digits) > 1 else []
    for place, digit in enumerate(digits):
        rest = len(digits) - place - 1
        first = 0 if place or len(digits) == 1 else 1
        if int(digit) > first:
            shorter.append(f"{digits[:place]}[{first}-{int(digit) - 1}][0-9]{{{rest}}}")
    return f"^(?:{'|'.join([*shorter, digits])})$"
