"""What an answer must look like, under the names vLLM users already type. Checked when made, immutable after."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from slipstream.core.errors import InputError

KINDS = ("json", "json_object", "regex", "choice", "grammar")
MAX_TEXT = 1 << 20
"""Characters of a schema, pattern or grammar; longer ones are a mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """The form of an answer: exactly one of json, json_object, regex, choice and grammar.

    json: a JSON schema, as a mapping, true, or JSON text (kept as text). json_object: any JSON object. regex: a pattern
    for the whole answer. choice: texts, of which the answer is one (each counts once). grammar: Lark or GBNF text. For
    the JSON forms: whitespace_pattern is a regex for the white space between the parts (None: up to 32 characters, so
    that an answer cannot be blanks for ever), disable_any_whitespace allows none. Raises InputError naming the value.
    """

    json: str | Mapping[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        if self.json_object is False:
            self._set("json_object", None)
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            named = " and ".join(given) or "none of them"
            raise InputError(f"structured_outputs has {named}; give exactly one of {', '.join(KINDS)}")
        if self.json is not None:
            self._set("json", _schema(self.json))
        if self.json_object is not None and self.json_object is not True:
            raise InputError(f"structured_outputs json_object is {self.json_object!r}; it must be true or left out")
        if self.choice is not None:
            self._set("choice", _choices(self.choice))
        for name in ("regex", "grammar", "whitespace_pattern"):
            if getattr(self, name) is not None:
                self._set(name, _text(name, getattr(self, name)))
        if not isinstance(self.disable_any_whitespace, bool):
            value = self.disable_any_whitespace
            raise InputError(f"structured_outputs disable_any_whitespace is {value!r}; it must be true or false")
        spaced = self.whitespace_pattern is not None or self.disable_any_whitespace
        if spaced and self.kind not in ("json", "json_object"):
            raise InputError(f"structured_outputs has a white space rule for {self.kind}; it is for the JSON forms")
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise InputError("structured_outputs has whitespace_pattern and disable_any_whitespace; give one of them")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def kind(self) -> str:
        """Which of KINDS it is."""
        return next(name for name in KINDS if getattr(self, name) is not None)


def structured(value: object) -> StructuredOutputs | None:
    """The value of SamplingParams.structured_outputs: None, StructuredOutputs, or a mapping of its fields."""
    if value is None or isinstance(value, StructuredOutputs):
        return value
    names = [item.name for item in fields(StructuredOutputs)]
    if not isinstance(value, Mapping):
        raise InputError(f"structured_outputs is {value!r:.80}; it must map one of {', '.join(KINDS)} to its value")
    unknown = [name for name in value if name not in names]
    if unknown:
        raise InputError(f"structured_outputs has {unknown[0]!r:.80}, which is not known; known: {', '.join(names)}")
    given = {name: item for name, item in value.items() if item is not None}
    return StructuredOutputs(**given)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise InputError(f"structured_outputs {name} is {value!r:.80}; it must be a text that is not empty")
    if len(value) > MAX_TEXT:
        raise InputError(f"structured_outputs {name} has {len(value)} characters; at most {MAX_TEXT} are taken")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InputError(f"structured_outputs {name} holds a lone surrogate and is not valid Unicode") from None
    return value


def _choices(value: object) -> tuple[str, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence) or not value:
        raise InputError(f"structured_outputs choice is {value!r:.80}; it must be a list of texts")
    _text("choice", "".join(text for text in value if isinstance(text, str)))
    return tuple(dict.fromkeys(_text("choice", text) for text in value))


def _schema(value: object) -> str:
    """The schema as JSON text in the order it was given."""
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        if not isinstance(schema, (Mapping, bool)):
            raise InputError(f"structured_outputs json is {value!r:.80}; a JSON schema is an object, true or false")
        return _text("json", json.dumps(schema, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"structured_outputs json is no JSON schema: {error}") from None
