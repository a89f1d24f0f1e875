"""Forms, a tokenizer and a target for tests of structured outputs."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec

import pytest

import beds
from slipstream.core.structured import structured
from slipstream.sampling import grammar
from slipstream.sampling.grammar import Grammars

needs_library = pytest.mark.skipif(find_spec("llguidance") is None, reason="llguidance (extra serve) is not installed")
PIECES = [b'{"', b'":', b', "', b'"}', b"name", b"age", b"na", b"me", b"true", b"12", b"  ", b"\n\n", b"red", b"blue"]
TOKENIZER = beds.Pieces([*(bytes([code]) for code in range(256)), *PIECES, b"<s>", b"<e>", b"<f>"], end_ids=[271, 272])
TOKENIZER.control.add(270)
BOS, END, OTHER_END, WIDTH = 270, 271, 272, 275
"""Ids 273 and 274 are padding: the logits are wider than the token list."""
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "blue", "grün"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMS = {
    "json": {"json": PERSON},
    "tight json": {"json": PERSON, "disable_any_whitespace": True},
    "regex": {"regex": r"(ab|c)+[0-9]{2,4}ü?"},
    "choice": {"choice": ["red", "redder", "blue", "grün", "日本"]},
    "grammar": {"grammar": 'start: "a" (start "b")? | /[xyz]{1,3}/'},
    "gbnf": {"grammar": 'root ::= "name" ("-" [0-9])*'},
}


def holds(form: dict, text: str) -> bool:
    """Whether a finished text has the form, judged without the library."""
    if "json" in form:
        found = json.loads(text)
        good = list(found) == ["name", "age", "tags"] and len(found["name"]) <= 5 and 0 <= found["age"] <= 120
        good = good and isinstance(found["age"], int) and len(found["tags"]) <= 3
        return good and set(found["tags"]) <= {"red", "blue", "grün"}
    if "choice" in form:
        return text in form["choice"]
    pattern = form.get("regex") or (r"a*(a|[xyz]{1,3})b*" if "start" in form["grammar"] else r"name(-[0-9])*")
    balanced = "start" not in form.get("grammar", "") or re.search(r"[xyz]b|b[axyz]", text) is not None
    return re.fullmatch(pattern, text) is not None and (balanced or text.strip("axyz") == "" or "b" in text)


def target(seed: int = 1, **settings: object) -> beds.TableTarget:
    """A table that knows nothing of any form, with logits for padding that would win if they were allowed."""
    table = beds.random_table(seed, WIDTH, spread=3.0)
    table[:, 273:] = 50.0
    return beds.TableTarget(table, **settings)


def engine(made: beds.TableTarget | None = None, drafters: tuple = (), **settings: object):
    return beds.engine(made or target(), drafters, tokenizer=TOKENIZER, **settings)


def start(form: dict) -> grammar.TokenGrammar:
    return Grammars(TOKENIZER, WIDTH).start(structured(form))


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)
