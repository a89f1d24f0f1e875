"""Sampling parameters, under the names vLLM and OpenAI users already type. Checked when made, immutable after."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.core.errors import InputError
from slipstream.core.structured import StructuredOutputs, structured

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, decided before dividing."""
MAX_CHOICES = 1024
"""Answers per prompt; more are a mistake, not a wish."""
MAX_BIAS = 1e9
"""Largest size of a logit_bias value; far below it a token is already banned or forced."""
_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


def _whole(name: str, value: object) -> int:
    """A Python int from any whole number (numpy's too), never from a truth value, a float or text."""
    if not isinstance(value, (bool, str, float)):
        try:
            return operator.index(value)  # type: ignore[arg-type]  # that it may fail is the point
        except TypeError:
            pass
    raise InputError(f"{name} is {value!r}; it must be a whole number")


def _number(name: str, value: object) -> float:
    """A finite Python float from any real number, never from a truth value or text."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise InputError(f"{name} is {value!r}; it must be a finite number")


def _token(name: str, value: object) -> int:
    token = _whole(name, value)
    if token < 0:
        raise InputError(f"{name} names token {token}; token ids start at 0")
    return token


def _items(name: str, value: object) -> tuple[object, ...]:
    """The items of a list or other sequence; () for None."""
    if value is None:
        return ()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise InputError(f"{name} is {value!r}; it must be a list")
    return tuple(value)


def _stops(value: object) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else _items("stop", value)
    texts = tuple(text for text in stops if isinstance(text, str) and text)
    if len(texts) < len(stops):
        raise InputError(f"stop is {list(stops)!r}; each stop must be a non-empty string")
    return texts


def _bias(value: object) -> dict[int, float]:
    """Keys may be digits, as JSON has no other keys."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InputError(f"logit_bias is {value!r}; it must map token ids to numbers")
    bias = {}
    for key, amount in value.items():
        digits = isinstance(key, str) and key.isascii() and key.isdigit()
        token = _token("logit_bias", int(key) if digits else key)
        bias[token] = _number(f"logit_bias of token {token}", amount)
        if abs(bias[token]) > MAX_BIAS:
            raise InputError(f"logit_bias of token {token} is {amount!r}; use -100 to ban a token, 100 to force it")
    return bias


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to draw tokens and when to stop.

    n: answers per prompt. temperature: 0 is greedy (the default). Off: top_k 0 or -1, top_p 1, min_p 0.
    presence_penalty, frequency_penalty: count output tokens only; repetition_penalty: prompt and output, 1 is off.
    logit_bias: added to the logits of token ids. min_tokens: end ids and stops do not count before it.
    stop: one string or several; the text is cut before the stop. stop_token_ids: further end ids. ignore_eos: only
    budget and explicit stops end the answer. seed: same seed, same tokens; None draws one and reports it.
    logprobs: None for none, else how many alternatives to report beside each token (0: the token's own only).
    structured_outputs: what the answer must look like, as StructuredOutputs or its fields: {"json": schema}, ...
    Raises InputError naming the value.
    """

    n: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    max_tokens: int = 256
    ignore_eos: bool = False
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    seed: int | None = None
    logprobs: int | None = None
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("n", "top_k", "min_tokens", "max_tokens"):
            self._set(name, _whole(name, getattr(self, name)))
        for name in ("seed", "logprobs"):
            value = getattr(self, name)
            self._set(name, None if value is None else _whole(name, value))
        for name in _NUMBERS:
            self._set(name, _number(name, getattr(self, name)))
        if not isinstance(self.ignore_eos, bool):
            raise InputError(f"ignore_eos is {self.ignore_eos!r}; it must be true or false")
        self._set("stop", _stops(self.stop))
        ids = _items("stop_token_ids", self.stop_token_ids)
        self._set("stop_token_ids", tuple(_token("stop_token_ids", token) for token in ids))
        self._set("logit_bias", _bias(self.logit_bias))
        self._set("structured_outputs", structured(self.structured_outputs))
        self._check_ranges()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_ranges(self) -> None:
        def need(name: str, good: bool, allowed: str) -> None:
            if not good:
                raise InputError(f"{name} is {getattr(self, name)!r}; it must be {allowed}")

        need("n", 1 <= self.n <= MAX_CHOICES, f"from 1 to {MAX_CHOICES}")
        need("temperature", 0 <= self.temperature <= 1e4, "from 0 (greedy) to 10000")
        need("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (1 is off)")
        need("top_k", self.top_k >= -1, "positive, or 0 or -1 for off")
        need("min_p", 0 <= self.min_p <= 1, "from 0 (off) to 1")
        need("presence_penalty", -2 <= self.presence_penalty <= 2, "from -2 to 2")
        need("frequency_penalty", -2 <= self.frequency_penalty <= 2, "from -2 to 2")
        need("repetition_penalty", 1e-3 <= self.repetition_penalty <= 1e3, "from 0.001 to 1000 (1 is off)")
        need("max_tokens", self.max_tokens >= 0, "0 or more")
        need("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"from 0 to max_tokens ({self.max_tokens})")
        need("seed", self.seed is None or 0 <= self.seed < 2**64, "a whole number from 0 to 2**64 - 1, or None")
        need("logprobs", self.logprobs is None or 0 <= self.logprobs <= 50, "None or from 0 to 50")

    @property
    def greedy(self) -> bool:
        """True when no noise is used."""
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSetting:
    """How one request, or the whole engine, drafts; its tokens are the same whatever is set.

    drafters: names of those that may be asked (None: all that are loaded; empty: none, which is plain decoding).
    max_nodes: draft nodes per pass at most (None: as loaded; 0 is plain decoding). Raises InputError.
    """

    drafters: Sequence[str] | None = None
    max_nodes: int | None = None

    def __post_init__(self) -> None:
        if self.drafters is not None:
            names = _items("drafters", self.drafters)
            if not all(isinstance(name, str) for name in names):
                raise InputError(f"drafters is {list(names)!r}; it must be a list of names")
            object.__setattr__(self, "drafters", tuple(names))
        if self.max_nodes is not None:
            object.__setattr__(self, "max_nodes", _whole("max_nodes", self.max_nodes))
            if self.max_nodes < 0:
                raise InputError(f"max_nodes is {self.max_nodes}; it must be 0 or more")


Speculating = bool | SpeculationSetting
"""What a call may say about speculation: yes, no, or how."""
