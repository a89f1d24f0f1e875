"""From a checked request to what the engine takes: sampling parameters, how to draft, the prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slipstream.core.errors import SlipstreamError
from slipstream.core.params import SamplingParams, Speculating, SpeculationSetting
from slipstream.server.errors import ApiError, from_ours
from slipstream.server.schemas import MAX_CHOICES, AnyForm, ChatRequest, CompletionRequest, Sampling

COMPLETION_TOKENS = 16
"""max_tokens of a completion that says nothing, as OpenAI has it."""
_SAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "stop", "stop_token_ids", "ignore_eos",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server allows. max_tokens: of one answer, and what a chat gets that says nothing."""

    max_tokens: int | None = None
    max_context: int = 2**31


def sampling_params(request: Sampling, limits: Limits) -> SamplingParams:
    """Sampling parameters of a request. Raises ApiError 400 naming the field."""
    values: dict[str, Any] = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    if request.seed is not None:
        values["seed"] = request.seed % 2**64
    values["max_tokens"] = most = _max_tokens(request, limits)
    if request.min_tokens is not None:
        values["min_tokens"] = min(request.min_tokens, most)  # no end before the last token: more cannot be meant
    values["logprobs"] = _logprobs(request)
    values["structured_outputs"] = _grammar(request)
    try:
        return SamplingParams(**values)
    except SlipstreamError as error:
        raise refusal(error, request) from None


def refusal(error: SlipstreamError, request: Sampling) -> ApiError:
    """What is wrong with a request, as an answer that names its field."""
    main = "messages" if isinstance(request, ChatRequest) else "prompt"
    made = from_ours(error, (main, *type(request).model_fields))
    if made.param == "structured_outputs" and request.structured_outputs is None:
        made.param = "response_format"
    return made


def _max_tokens(request: Sampling, limits: Limits) -> int:
    asked = {"max_tokens": request.max_tokens}
    if isinstance(request, ChatRequest):
        asked = {"max_completion_tokens": request.max_completion_tokens, **asked}
    said = {name: value for name, value in asked.items() if value is not None}
    for name, value in said.items():
        if limits.max_tokens is not None and value > limits.max_tokens:
            message = f"{name} is {value}; this server allows {limits.max_tokens} tokens per answer"
            raise ApiError(400, message, param=name)
    most = limits.max_tokens or limits.max_context
    default = min(COMPLETION_TOKENS, most) if isinstance(request, CompletionRequest) else most
    return next(iter(said.values()), default)


def _logprobs(request: Sampling) -> int | None:
    if isinstance(request, ChatRequest):
        if request.top_logprobs is not None and not request.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return (request.top_logprobs or 0) if request.logprobs else None
    return request.logprobs if isinstance(request, CompletionRequest) else None


def _grammar(request: Sampling) -> Any:
    """What the answer must look like, in the engine's words; None for any text."""
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return request.structured_outputs
    if request.structured_outputs is not None:
        raise ApiError(400, "structured_outputs and response_format were given; send one", param="structured_outputs")
    if isinstance(wanted, AnyForm):
        return {"json_object": True}
    return {"json": wanted.json_schema.schema_}


def speculation(request: Sampling, loaded: tuple[str, ...]) -> Speculating:
    """How to draft for a request. loaded: names of the drafters there are. Raises ApiError 400."""
    asked = request.speculation
    if asked is None or isinstance(asked, bool):
        return asked is not False
    names = asked.drafter.split(",") if isinstance(asked.drafter, str) else asked.drafter
    if names is None:
        return SpeculationSetting(max_nodes=asked.max_nodes)
    named = [name.strip() for name in names]
    chosen = loaded if named == ["auto"] else () if named == ["none"] else tuple(named)
    unknown = next((name for name in chosen if name not in loaded), None)
    if unknown is not None:
        there = ", ".join(loaded) or "none"
        raise ApiError(400, f"speculation names drafter {unknown!r}; loaded: {there}", param="speculation")
    return SpeculationSetting(drafters=chosen, max_nodes=asked.max_nodes)


def check_completion(request: CompletionRequest) -> None:
    """Refuse what would be ignored. Raises ApiError 400."""
    if request.best_of not in (None, 1):
        raise ApiError(400, f"best_of is {request.best_of}; answers are not chosen among: ask for n", param="best_of")
    if request.suffix:
        raise ApiError(400, "suffix is not supported: this server only continues prompts", param="suffix")
    if request.echo and request.logprobs is not None:
        raise ApiError(400, "echo with logprobs is not supported: prompts have no logprobs here", param="echo")
    many = len(prompts(request)) * (request.n or 1)
    if many > MAX_CHOICES:
        raise ApiError(400, f"{many} answers in one request; at most {MAX_CHOICES} are made", param="n")


def check_chat(request: ChatRequest) -> None:
    """Refuse what would be ignored. Raises ApiError 400."""
    for name in ("tools", "functions"):
        if getattr(request, name):
            raise ApiError(400, f"{name} are not supported; send none", param=name)
    if request.tool_choice not in (None, "none", "auto"):
        raise ApiError(400, "tool_choice needs tools, which are not supported", param="tool_choice")


def prompts(request: CompletionRequest) -> list[str | list[int]]:
    """The prompts of a completion, one or several."""
    given = request.prompt
    if isinstance(given, str):
        return [given]
    return [given] if isinstance(given[0], int) else list(given)
