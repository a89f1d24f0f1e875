"""A prompt as its callers give it, checked and as token ids."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from slipstream.core.errors import ContextLengthError, InputError
from slipstream.engine.detokenize import Vocabulary
from slipstream.targets.base import Target


def prompt_tokens(prompt: str | Sequence[int], tokenizer: Vocabulary, target: Target) -> list[int]:
    """The ids of a prompt. Raises InputError for what this model cannot read, ContextLengthError for too much of it."""
    tokens = tokenizer.encode(prompt, add_special=True) if isinstance(prompt, str) else whole_numbers(prompt)
    if not tokens:
        bos = tokenizer.bos_id
        if bos is None:
            raise InputError("the prompt is empty and this model has no BOS token to begin with; give some text")
        tokens = [bos]
    limit, size = target.max_context, target.vocab_size
    if len(tokens) >= limit:
        raise ContextLengthError(
            f"the prompt has {len(tokens)} tokens; this model's context of {limit} leaves room for at most "
            f"{limit - 1}: shorten the prompt or raise max_context"
        )
    wrong = next((token for token in tokens if not 0 <= token < size), None)
    if wrong is not None:
        raise InputError(f"the prompt holds token {wrong}; this model's ids are 0 to {size - 1}")
    return tokens


def whole_numbers(tokens: Sequence[int]) -> list[int]:
    """Token ids as Python integers. Raises InputError for anything else, floats and truth values included."""
    try:
        found = [token if isinstance(token, (bool, float)) else operator.index(token) for token in tokens]
        if isinstance(tokens, (str, bytes)) or any(isinstance(token, (bool, float)) for token in found):
            raise TypeError
        return found
    except TypeError:
        raise InputError(f"prompt token ids are {tokens!r:.80}; they must be a list of whole numbers") from None
