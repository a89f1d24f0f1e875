"""Slipstream: large language models answer faster, with the same output.

from slipstream import LLM, SamplingParams

with LLM("smollm2") as llm:
    result = llm.chat([{"role": "user", "content": "Name three rivers."}], SamplingParams(max_tokens=64))[0]
    print(result.outputs[0].text, result.outputs[0].speculation.tokens_per_pass)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.core.errors import (
    ContextLengthError,
    InputError,
    ModelError,
    NonFiniteError,
    SlipstreamError,
    UnsupportedError,
)
from slipstream.core.params import SamplingParams
from slipstream.core.stats import Speculation
from slipstream.core.types import CompletionOutput, Piece, RequestOutput, Timing, TokenLogprob

if TYPE_CHECKING:
    from slipstream.llm import LLM

    __version__: str

__all__ = [
    "LLM",
    "CompletionOutput",
    "ContextLengthError",
    "InputError",
    "ModelError",
    "NonFiniteError",
    "Piece",
    "RequestOutput",
    "SamplingParams",
    "SlipstreamError",
    "Speculation",
    "Timing",
    "TokenLogprob",
    "UnsupportedError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """What is slow to import comes when it is asked for."""
    if name == "LLM":
        from slipstream.llm import LLM

        return LLM
    if name == "__version__":
        from importlib.metadata import version

        return version("slipstream")
    raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
