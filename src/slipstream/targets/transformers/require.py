"""What this runtime needs and what it refuses: torch itself, and models whose passes cannot be exact."""

from __future__ import annotations

from typing import Any

from slipstream.core.errors import ModelError, UnsupportedError, install_hint

POSITIONAL_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
"""Layer types whose masks depend on positions alone: exact for any tree, and nothing to roll back but cache rows."""
SWITCHING_ROPE = frozenset({"dynamic", "longrope"})
"""Rotations that change for all tokens once the context passes a length."""


def require_torch() -> None:
    """Raise ModelError in one line unless torch and transformers 5 are here."""
    try:
        import torch
        import transformers
    except ImportError as error:
        missing = error.name or "torch"
        raise ModelError(f"the transformers runtime needs {missing}; install it with {install_hint('torch')}") from None
    if int(transformers.__version__.split(".")[0]) < 5:
        found = transformers.__version__
        raise ModelError(f"transformers {found} is too old; install 5.0 or newer with {install_hint('torch')}")
    del torch


def require_supported(config: Any) -> None:
    """Raise UnsupportedError, naming model type and reason, for models that speculation cannot be exact for."""

    def refuse(why: str) -> None:
        raise UnsupportedError(f"the transformers target does not support model type {config.model_type!r}: {why}")

    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        refuse("it is an encoder-decoder; only causal decoders can be run")
    if getattr(text, "alibi", False) or text.model_type in ("bloom", "mpt"):
        refuse("its ALiBi biases follow the order of rows, so the nodes of a draft tree cannot be placed")
    kinds = [kind for name in ("layer_types", "layers_block_type", "block_types") for kind in _list(text, name)]
    odd = sorted(set(kinds) - POSITIONAL_LAYERS)
    if odd or _recurrent(config):
        refuse(f"its recurrent state cannot be rolled back ({', '.join(odd) or 'a recurrent or hybrid model'})")
    if "local" in _list(text, "attention_layers"):
        refuse("its local attention counts rows, not positions")


def _list(config: Any, name: str) -> list[str]:
    return [str(kind) for kind in getattr(config, name, None) or ()]


def _recurrent(config: Any) -> bool:
    from transformers import AutoModelForCausalLM

    mapping = AutoModelForCausalLM._model_mapping
    return type(config) in mapping and bool(getattr(mapping[type(config)], "_is_stateful", False))


def has_windows(config: Any) -> bool:
    """True when some layer sees only part of the context."""
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None)
    if kinds:
        return set(kinds) != {"full_attention"}
    unused = getattr(text, "use_sliding_window", True) is False
    return getattr(text, "sliding_window", None) is not None and not unused


def longest_context(config: Any) -> int:
    """Tokens up to which one rotation serves all positions; models without a limit of their own get 2**20."""
    text = config.get_text_config(decoder=True)
    longest = next(
        (int(value) for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
         if (value := getattr(text, name, None))),
        2**20,
    )  # fmt: skip
    rope = getattr(text, "rope_parameters", None) or {}
    for one in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if one.get("rope_type") in SWITCHING_ROPE:
            longest = min(longest, int(one.get("original_max_position_embeddings") or longest))
    return longest
