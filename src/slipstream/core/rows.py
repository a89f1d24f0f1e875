"""Files of prompts: the one reader of their lines, for commands, measurements and training alike."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.core.errors import InputError

TEXTS = ("prompt", "question")
NEEDS = "needs messages or turns (lists), a prompt or a question (texts), or prompt_token_ids (a list)"


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One line: what is asked (a conversation, a text, {"prompt_token_ids": [...]}), and the category it counts in."""

    content: list[Any] | str | dict[str, Any]
    category: str = ""

    @property
    def messages(self) -> list[Any]:
        """What is asked as a conversation. Raises InputError for token ids."""
        if isinstance(self.content, dict):
            raise InputError("a row of prompt_token_ids is no conversation; give messages, turns or a prompt")
        return self.content if isinstance(self.content, list) else [{"role": "user", "content": self.content}]


def read_text(path: Path) -> str:
    """A text file, or stdin for -. Raises InputError."""
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start})") from None


def read_rows(path: Path, limit: int | None = None) -> list[PromptRow]:
    """The rows of a JSONL file (- for stdin), or its first. Raises InputError naming the line, or without any."""
    # Not splitlines: texts may hold other line separators than the newline.
    lines = [(number, line) for number, line in enumerate(read_text(path).split("\n"), 1) if line.strip()]
    if not lines:
        raise InputError(f"{path} holds no rows")
    return [parse_row(line, f"{path} line {number}") for number, line in lines[:limit]]


def parse_row(line: str, place: str) -> PromptRow:
    """One line. place: what errors call it. Of several turns the first one is asked."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"{place} is not an object; it {NEEDS}")
    category = found.get("category")
    return PromptRow(_content(found, place), "" if category is None else str(category))


def _content(found: dict[str, Any], place: str) -> list[Any] | str | dict[str, Any]:
    messages, turns, ids = (found.get(name) for name in ("messages", "turns", "prompt_token_ids"))
    if isinstance(messages, list) and messages:
        return messages
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        return [{"role": "user", "content": turns[0]}]
    for name in TEXTS:
        if isinstance(found.get(name), str):
            return str(found[name])
    if isinstance(ids, list):
        return {"prompt_token_ids": ids}
    raise InputError(f"{place} {NEEDS}")
