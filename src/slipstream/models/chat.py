"""Chat templates: messages to the prompt a model was trained on, rendered in jinja's sandbox as transformers does.

A message cannot forge control tokens. Their text inside messages is cut by a private mark before rendering; the prompt
is then read stretch by stretch between the marks, so that only what the template itself wrote is parsed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

from slipstream.core.errors import InputError, ModelError
from slipstream.models.special_texts import SpecialTexts

if TYPE_CHECKING:
    from jinja2 import Template

    from slipstream.models.files import ModelFile
    from slipstream.models.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
_PRIVATE = range(0x10FFFD, 0x100000, -1)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The rendered prompt and its ids; the ids are not always those of the text (see the module)."""

    text: str
    token_ids: list[int]


class _RefusedError(Exception):
    """Raised by a template through raise_exception."""


def chat_prompt(
    model: ModelFile,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> ChatPrompt:
    """The prompt for a conversation, ending where the assistant's answer begins.

    variables: further names for the template (`tools`, `enable_thinking`, ...). Raises InputError for messages that are
    malformed or that the template refuses, ModelError when the model has no template or a broken one.
    """
    if model.chat_template is None:
        raise ModelError(f"{model.name} has no chat template; give it plain text (generate --raw) or an instruct model")
    checked = [_checked(message, place) for place, message in enumerate(_listed(messages))]
    if "developer" not in model.chat_template:
        # Models that know no developer know the system by that role.
        checked = [{**each, "role": "system"} if each["role"] == "developer" else each for each in checked]
    tokenizer = model.tokenizer()
    mark = _unused_character([model.chat_template, *_texts(checked), *_texts(variables or {})])
    finder = _ControlFinder(tokenizer, mark)
    values = {**model.template_tokens, **_marked(variables or {}, finder)}
    values.update(messages=_marked(checked, finder), add_generation_prompt=add_generation_prompt)
    rendered = _render(model, values)
    ids = tokenizer.encode_parts([(stretch, True) for stretch in rendered.split(mark)])
    return ChatPrompt(rendered.replace(mark, ""), ids)


def _listed(messages: Any) -> Sequence[Any]:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InputError("messages must be a list of at least one {'role': ..., 'content': ...}")
    return messages


def _checked(message: Any, place: int) -> dict[str, Any]:
    """A copy of the message with text parts joined. Raises InputError naming the place and the value."""
    if not isinstance(message, Mapping):
        raise InputError(f"messages[{place}] is a {type(message).__name__}; it must have a role and a content")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise InputError(f"messages[{place}] has role {role!r}; it must be one of {', '.join(ROLES)}")
    if isinstance(content, (list, tuple)):
        content = "".join(_part_text(part, place) for part in content)
    elif content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise InputError(f"messages[{place}] has a content of type {type(content).__name__}; it must be text")
    return {**message, "content": content}


def _part_text(part: Any, place: int) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(text, str):
        raise InputError(f"messages[{place}] has a part of type {kind!r}; only text parts are understood")
    return text


class _ControlFinder:
    """Cuts control-token text in strings by a mark, and text that could become such at the edge of a message."""

    def __init__(self, tokenizer: Tokenizer, mark: str) -> None:
        specials = tokenizer.special_texts.items()
        # A text of one character cannot be cut; no chat model has such a control token.
        self.controls = [text for text, index in specials if len(text) > 1 and tokenizer.is_control(index)]
        self.finder = SpecialTexts(self.controls)
        self.mark = mark

    def cut(self, text: str) -> str:
        """The text with marks in it; without them it is the text again."""
        cuts = {start + 1 for start in self.finder.starts(text)}
        first, last = self._forged_head(text), self._forged_tail(text)
        if first:
            cuts.add(first - 1)
        if last:
            cuts.add(len(text) - last + 1)
        ends = [0, *sorted(cuts), len(text)]
        return self.mark.join(text[start:end] for start, end in pairwise(ends))

    def _forged_head(self, text: str) -> int:
        """Length, 2 or more, of the longest beginning of the text that ends a control token; else 0."""
        sizes = (size for control in self.controls for size in range(2, len(control)) if text[:size] == control[-size:])
        return max(sizes, default=0)

    def _forged_tail(self, text: str) -> int:
        """Length, 2 or more, of the longest end of the text that begins a control token; else 0."""
        sizes = (size for control in self.controls for size in range(2, len(control)) if text[-size:] == control[:size])
        return max(sizes, default=0)


def _marked(value: Any, finder: _ControlFinder) -> Any:
    """A copy of plain data with every string cut, except roles."""
    if isinstance(value, str):
        return finder.cut(value)
    if isinstance(value, Mapping):
        return {_marked(key, finder): item if key == "role" else _marked(item, finder) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_marked(item, finder) for item in value]
    return value


def _texts(value: Any) -> list[str]:
    """All strings in plain data."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for item in pair for text in _texts(item)]
    if isinstance(value, (list, tuple)):
        return [text for item in value for text in _texts(item)]
    return []


def _unused_character(texts: Sequence[str]) -> str:
    """A private-use character that appears in none of the texts."""
    used = set().union(*map(set, texts))
    return next(chr(point) for point in _PRIVATE if chr(point) not in used)


def _render(model: ModelFile, values: Mapping[str, Any]) -> str:
    from jinja2 import TemplateError

    try:
        return _compiled(model.chat_template or "").render(**values)
    except _RefusedError as error:
        raise InputError(f"the chat template of {model.name} refuses these messages: {error}") from None
    except TemplateError as error:
        raise ModelError(f"the chat template of {model.name} is broken: {_first_line(error)}") from None
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError, ZeroDivisionError) as error:
        raise ModelError(f"the chat template of {model.name} fails: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


@lru_cache(maxsize=16)
def _compiled(source: str) -> Template:
    """The template in the environment that transformers defines for chat templates."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what is trained on; for a prompt it is only its body."""

        tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            """The statements up to `{% endgeneration %}`."""
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, unlike jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise _RefusedError(message)
