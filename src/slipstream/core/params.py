"""Sampling parameters, under the names vLLM and OpenAI users already type. Checked when made, immutable after."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slipstream.core.errors import InputError

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, decided before dividing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to draw tokens and when to stop.

    n: answers per prompt. temperature: 0 is greedy (the default). top_k: 0 or -1 is off. top_p: 1 is off. min_p: 0 is off.
    presence_penalty, frequency_penalty: count output tokens only; repetition_penalty: prompt and output, 1 is off.
    logit_bias: added to the logits of token ids. min_tokens: end ids and stops do not count before it.
    stop: one string or several; the text is cut before the stop. stop_token_ids: further end ids. ignore_eos: only
    budget and explicit stops end the answer. seed: same seed, same tokens; None draws one and reports it.
    logprobs: None for none, else how many alternatives to report beside each token (0: the token's own only).
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

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        bias = {int(token): float(value) for token, value in (self.logit_bias or {}).items()}
        object.__setattr__(self, "logit_bias", bias)
        self._check_numbers()
        if any(not isinstance(text, str) or not text for text in stop):
            raise InputError(f"stop is {list(stop)!r}; each stop must be a non-empty string")
        if any(not math.isfinite(value) for value in bias.values()):
            raise InputError(f"logit_bias holds a value that is not finite: {bias}; use -100 to ban a token")

    def _check_numbers(self) -> None:
        def need(name: str, good: bool, allowed: str) -> None:
            if not good:
                raise InputError(f"{name} is {getattr(self, name)!r}; it must be {allowed}")

        for name in ("n", "top_k", "min_tokens", "max_tokens"):
            value = getattr(self, name)
            need(name, isinstance(value, int) and not isinstance(value, bool), "a whole number")
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
        ):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            need(name, number and math.isfinite(value), "a finite number")
        need("n", self.n >= 1, "1 or more")
        need("temperature", self.temperature >= 0, "0 (greedy) or more")
        need("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (1 is off)")
        need("top_k", self.top_k >= -1, "positive, or 0 or -1 for off")
        need("min_p", 0 <= self.min_p <= 1, "from 0 (off) to 1")
        need("presence_penalty", -2 <= self.presence_penalty <= 2, "from -2 to 2")
        need("frequency_penalty", -2 <= self.frequency_penalty <= 2, "from -2 to 2")
        need("repetition_penalty", self.repetition_penalty > 0, "above 0 (1 is off)")
        need("max_tokens", self.max_tokens >= 0, "0 or more")
        need("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"from 0 to max_tokens ({self.max_tokens})")
        seed_fits = self.seed is None or (isinstance(self.seed, int) and 0 <= self.seed < 2**64)
        need("seed", seed_fits, "a whole number from 0 to 2**64 - 1, or None")
        top_fits = self.logprobs is None or (isinstance(self.logprobs, int) and 0 <= self.logprobs <= 50)
        need("logprobs", top_fits, "None or from 0 to 50")

    @property
    def greedy(self) -> bool:
        """True when no noise is used."""
        return self.temperature < GREEDY_BELOW
