"""The admin endpoint: speculation off and on, drafters, nodes, and back, while requests run."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from slipstream.core.errors import SlipstreamError
from slipstream.server.errors import ApiError, from_ours
from slipstream.server.logs import event
from slipstream.server.reply import JsonReply
from slipstream.server.schemas import AdminChange
from slipstream.server.service import Served, Service


def admin_routes(service: Service) -> APIRouter:
    """Routes that only exist with an admin key; the gate has checked it."""
    admin = APIRouter(prefix="/admin", include_in_schema=False)

    @admin.get("/speculation")
    async def now() -> Response:
        """What is set."""
        return JsonReply(await asyncio.to_thread(describe, service.served))

    @admin.post("/speculation")
    async def change(body: AdminChange) -> Response:
        """Change it from the next step on; no request is dropped and no token changes."""
        served = service.served
        try:
            found = await asyncio.to_thread(apply, served, body)
        except SlipstreamError as error:
            raise from_ours(error, tuple(AdminChange.model_fields)) from None
        event("speculation changed", change=body.model_dump(exclude_unset=True), now=found)
        return JsonReply(found)

    return admin


def describe(served: Served) -> dict[str, Any]:
    """The setting, and what follows from it. In any thread."""
    seen = served.worker.engine.snapshot()
    limits = seen.setting.limits
    return {
        "enabled": seen.setting.speculation,
        "drafters": None if limits.drafters is None else list(limits.drafters),
        "max_nodes": limits.max_nodes,
        "loaded": {name: asdict(state) for name, state in seen.drafters.items()},
        "in_use": list(seen.drafting),
        "speedup_estimate": seen.speedup,
    }


def apply(served: Served, body: AdminChange) -> dict[str, Any]:
    """Do what the body says, between two steps; returns the new state. In any thread. Raises InputError, ApiError."""
    for field, names in (("drafters", body.drafters or []), ("reload", [] if body.reload is None else [body.reload])):
        unknown = next((name for name in names if name not in served.drafters), None)
        if unknown is not None:
            loaded = ", ".join(served.drafters) or "none"
            raise ApiError(400, f"{field} names drafter {unknown!r}; loaded: {loaded}", param=field)
    given = body.model_dump(exclude_unset=True)
    words = {"enabled": "speculation", "drafters": "drafters", "max_nodes": "max_nodes"}
    changes = {words[name]: value for name, value in given.items() if name in words}
    if changes.get("speculation", True) is None:
        del changes["speculation"]
    if body.rollback and (changes or body.reload):
        raise ApiError(400, "rollback goes alone: it takes back the last change", param="rollback")
    if body.rollback:
        served.worker.previous()
    if body.reload is not None:
        served.reload(body.reload)
    if changes:
        served.worker.configure(**changes)
    return describe(served)
