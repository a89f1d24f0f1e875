"""Facts about a model's token list that need no tokenizer: counts, padding, control tokens, end ids."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.core.errors import ModelError
from slipstream.models.gguf_file import GGUFFile

END_TEXTS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "</s>")
"""Texts that end an answer wherever they are control tokens of the vocabulary."""
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5
"""GGUF token types (1 is normal, 6 a byte)."""
_PADDING = re.compile(r"\[PAD\d*\]")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """token_count: ids from it on are padding, those in unused_ids below it too; control: id to text.

    end_ids: ids that end an answer, ascending. bos_id: None when the model has none.
    """

    token_count: int
    unused_ids: tuple[int, ...]
    control: Mapping[int, str]
    end_ids: tuple[int, ...]
    bos_id: int | None


def is_number(value: Any) -> bool:
    """True for int and float, not for bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def vocabulary_from_gguf(file: GGUFFile) -> Vocabulary:
    """From tokenizer.ggml.*. Raises ModelError naming the key."""
    tokens, types = gguf_tokens(file)
    real = [not (kind == UNUSED or _PADDING.fullmatch(text)) for text, kind in zip(tokens, types, strict=True)]
    ends = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    control = {index: tokens[index] for index, kind in enumerate(types) if kind in (UNKNOWN, CONTROL)}
    source = str(file.path)
    bos = _checked_id(file.metadata.get("tokenizer.ggml.bos_token_id"), len(tokens), "bos_token_id", source)
    found = [_checked_id(end, len(tokens), "eos_token_id", source) for end in ends]
    return _build(real, control, found, bos, source)


def gguf_tokens(file: GGUFFile) -> tuple[list[str], list[int]]:
    """(texts, types) of the vocabulary in id order."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise ModelError(f"{file.path}: tokenizer.ggml.tokens is missing; the file holds no vocabulary")
    types = file.metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens) or not all(type(kind) is int for kind in types):
        raise ModelError(f"{file.path}: tokenizer.ggml.token_type does not match the {len(tokens)} tokens")
    return tokens, types


def vocabulary_from_hf(
    tokenizer: Mapping[str, Any], settings: Mapping[str, Any], ends: Iterable[Any], bos: Any, source: str
) -> Vocabulary:
    """From the parsed tokenizer.json, tokenizer_config.json, and the end and BOS ids of the (generation) config."""
    try:
        table = tokenizer["model"]["vocab"]
        ids = list(table.values()) if isinstance(table, dict) else list(range(len(table)))
        texts = {index: text for text, index in table.items()} if isinstance(table, dict) else {}
        added = {entry["id"]: entry for entry in tokenizer.get("added_tokens") or ()}
        texts.update({index: entry["content"] for index, entry in added.items()})
        present = {*ids, *added}
        good = bool(present) and all(type(index) is int and 0 <= index < 1 << 24 for index in present)
        good = good and all(isinstance(text, str) for text in texts.values())
    except (KeyError, TypeError, AttributeError, ValueError):
        good = False
    if not good:
        raise ModelError(f"{source}: tokenizer.json is damaged (its vocabulary or added_tokens); fetch it again")
    count = max(present) + 1
    real = [index in present and not _PADDING.fullmatch(texts.get(index, "")) for index in range(count)]
    control = {index: entry["content"] for index, entry in added.items() if entry.get("special")}
    named = settings.get("eos_token")
    name = named.get("content") if isinstance(named, dict) else named
    by_name = [index for index, text in control.items() if text == name]
    found = [_checked_id(end, 1 << 24, "eos_token_id", source) for end in ends]
    return _build(real, control, [*found, *by_name], _checked_id(bos, 1 << 24, "bos_token_id", source), source)


def _checked_id(value: Any, count: int, key: str, source: str) -> int | None:
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < count:
        raise ModelError(f"{source}: {key} is {value!r}, not an id of the vocabulary ({count} tokens)")
    return value


def _build(
    real: list[bool], control: Mapping[int, str], ends: Iterable[int | None], bos: int | None, source: str
) -> Vocabulary:
    count = len(real)
    while count and not real[count - 1]:
        count -= 1
    if not count:
        raise ModelError(f"{source}: the vocabulary holds no tokens; fetch the model again")
    unused = tuple(index for index in range(count) if not real[index])
    end_ids = {end for end in ends if end is not None}
    end_ids |= {index for index, text in control.items() if text in END_TEXTS}
    return Vocabulary(count, unused, dict(control), tuple(sorted(end_ids)), bos)


def hf_end_ids(*configs: Mapping[str, Any]) -> list[Any]:
    """eos_token_id of each configuration, one id or a list, flattened."""
    found: list[Any] = []
    for config in configs:
        value = config.get("eos_token_id")
        found += value if isinstance(value, list) else [value]
    return found
