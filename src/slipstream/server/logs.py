"""Structured logs: one JSON object a line on stderr, with the request's id, without any text of prompts or answers."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

log = logging.getLogger("slipstream.server")


class JsonLines(logging.Formatter):
    """time, level, event, what `event` was given, and the traceback of an exception."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": moment, "level": record.levelname.lower(), "event": record.getMessage()}
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def event(name: str, level: int = logging.INFO, *, exc_info: BaseException | None = None, **fields: Any) -> None:
    """Log what happened."""
    log.log(level, name, exc_info=exc_info, extra={"fields": fields})


def begin_logging(level: str = "info") -> None:
    """Send the logs of the server, of uvicorn and of the engine to stderr as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("slipstream", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers[:], logger.propagate = [handler], False
        logger.setLevel(level.upper() if name == "slipstream" else logging.WARNING)
