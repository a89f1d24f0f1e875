"""What requests may hold, checked before any work: strict types, finite numbers, sizes. Null means default."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema

from slipstream.control.fixed import MOST_NODES

MAX_CHOICES = 128
"""Answers of one request: prompts times n."""
MAX_ID = 2**31 - 1
FEWEST_SEED, MOST_SEED = -(2**63), 2**64 - 1


def _whole(value: object) -> object:
    """5.0 is 5: JSON knows one kind of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_whole)
Token = Annotated[int, Field(ge=0, le=MAX_ID, json_schema_extra={"title": "Token"}), WHOLE]
Nodes = Annotated[int, Field(ge=0, le=MOST_NODES), WHOLE]
AnswerTokens = Annotated[int, Field(ge=0, le=MAX_ID, json_schema_extra={"title": "AnswerTokens"}), WHOLE]
Penalty = Annotated[float, Field(ge=-2, le=2)]
StopText = Annotated[str, Field(min_length=1)]
BiasKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
NONE_YET = Field(json_schema_extra={"maxItems": 0})
SCHEMA_SAYS: dict[str, Any] = {
    "properties": {"type": {"enum": ["object", "array", "string", "number", "integer", "boolean", "null"]}}
}
COMPLETION_SAYS: dict[str, Any] = {
    "allOf": [
        {
            "not": {
                "properties": {"echo": {"const": True}, "logprobs": {"type": "integer"}},
                "required": ["echo", "logprobs"],
            }
        },
        {
            "if": {"properties": {"prompt": {"type": "array", "minItems": 2, "items": {"type": ["string", "array"]}}}},
            "then": {"properties": {"n": {"enum": [1, None]}}},
        },
    ]
}
CHAT_SAYS: dict[str, Any] = {
    "if": {"properties": {"top_logprobs": {"type": "integer"}}, "required": ["top_logprobs"]},
    "then": {"properties": {"logprobs": {"const": True}}, "required": ["logprobs"]},
}
"""What holds between fields, for readers of the description; requests are checked in params.py."""
BiasValue = Annotated[float, Field(ge=-100, le=100)]


class Strict(BaseModel):
    """No type is turned into another one. Fields nobody knows are kept, to be listed in a warning."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Strict):
    """include_usage: one more chunk with the usage, before the end of the stream."""

    include_usage: bool | None = None


DrafterName = Annotated[str, Field(json_schema_extra={"title": "DrafterName"})]


class SpeculationOption(Strict):
    """drafter: names of loaded drafters ("suffix,recycling", or a list; "none"; "auto" for all of them)."""

    drafter: DrafterName | list[DrafterName] | None = None
    max_nodes: Nodes | None = None


class JsonSchema(Strict):
    """A JSON schema that the answer must follow, with its name."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema", json_schema_extra=SCHEMA_SAYS)]
    strict: bool | None = None


class AnyForm(Strict):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaForm(Strict):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[AnyForm | SchemaForm, Field(discriminator="type")]


class Sampling(Strict):
    """What completions and chat completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE] | None = None
    max_tokens: AnswerTokens | None = None
    temperature: Annotated[float, Field(ge=0, le=10000)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_ID), WHOLE] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.001, le=1000)] | None = None
    logit_bias: dict[BiasKey, BiasValue] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=4)] | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_ID), WHOLE] | None = None
    seed: (
        Annotated[int, Field(ge=FEWEST_SEED, le=MOST_SEED, json_schema_extra={"title": "SeedNumber"}), WHOLE] | None
    ) = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: SkipJsonSchema[dict[str, Any] | None] = None
    speculation: bool | SpeculationOption | None = None
    include_sources: bool | None = None
    return_token_ids: bool | None = None

    @property
    def unknown(self) -> list[str]:
        """Fields that were sent and mean nothing here."""
        return sorted(self.model_extra or ())


PromptText = Annotated[str, Field(json_schema_extra={"title": "PromptText"})]
PromptTokens = Annotated[list[Token], Field(min_length=1, json_schema_extra={"title": "PromptTokens"})]
Prompts = (
    PromptText
    | Annotated[list[PromptText], Field(min_length=1, max_length=MAX_CHOICES)]
    | PromptTokens
    | Annotated[list[PromptTokens], Field(min_length=1, max_length=MAX_CHOICES)]
)


class CompletionRequest(Sampling):
    """POST /v1/completions. best_of and suffix are known so that they can be refused where they would change things."""

    model_config = ConfigDict(json_schema_extra=COMPLETION_SAYS)

    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0, le=5), WHOLE] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(json_schema_extra={"const": 1}), WHOLE] | None = None
    suffix: Annotated[str, Field(json_schema_extra={"const": ""})] | None = None


class TextPart(Strict):
    """A part of a message; only text is understood."""

    type: Literal["text"]
    text: str


Content = str | list[TextPart]


class Said(Strict):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "tool"]
    content: Content


class Answered(Strict):
    """What the assistant said before; nothing, when it only called tools."""

    role: Literal["assistant"]
    content: Content | None = None


Message = Annotated[Said | Answered, Field(discriminator="role")]


class ChatRequest(Sampling):
    """POST /v1/chat/completions. tools and functions are known so that they can be refused."""

    model_config = ConfigDict(json_schema_extra=CHAT_SAYS)

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: AnswerTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    tools: Annotated[list[Any], NONE_YET] | None = None
    tool_choice: Annotated[Any, Field(json_schema_extra={"enum": ["none", "auto", None]})] = None
    functions: Annotated[list[Any], NONE_YET] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class AdminChange(Strict):
    """POST /admin/speculation: what is to change; the rest stays.

    drafters: those that may be asked; null for all that are loaded. max_nodes: null for as many as the server was
    started with. reload: the name of a drafter to read again from its files. rollback: take back the last change.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    enabled: bool | None = None
    drafters: list[str] | None = None
    max_nodes: Nodes | None = None
    reload: str | None = None
    rollback: bool | None = None
