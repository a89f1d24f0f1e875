"""Splitting rules of byte-level BPE, by the names GGUF files give them (`tokenizer.ggml.pre`).

Each rule is a list of steps; a step that is a pattern isolates its matches and leaves the rest in between as it is.
The patterns are those the models were trained with (their tokenizer.json), checked against llama.cpp's ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.core.errors import UnsupportedError

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

STEPS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), (_DIGIT, _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "dbrx", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen"), (_QWEN2,)),
    "tekken": (_TEKKEN,),
    "default": _DEFAULT,
}
IGNORE_MERGES = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")
"""Words that are tokens themselves are taken whole, whatever the merges say."""
ADDS_BOS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")
"""A BOS token is put first unless the file says otherwise."""


def pre_tokenizer(name: str, source: str) -> PreTokenizer:
    """The splitting rule of that name, ending in the byte-level alphabet. Raises UnsupportedError naming it."""
    if name not in STEPS:
        known = ", ".join(STEPS)
        raise UnsupportedError(
            f"{source}: pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; known: {known}"
        )
    from tokenizers import Regex, pre_tokenizers

    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in STEPS[name]]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
