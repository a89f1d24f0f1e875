"""EAGLE-1/2 and EAGLE-3 as their authors write them, and SpecForge's EAGLE-3; tensors are named `midlayer.*` there.

Inside `eagle_config` (SpecForge, SGLang) layer ids name layers whose *outputs* are read; at the top (vLLM) *inputs*.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from slipstream.core.errors import UnsupportedError
from slipstream.models.config import Keys
from slipstream.models.heads.config import HeadConfig
from slipstream.models.heads.head import Head, full_ids
from slipstream.models.heads.layout import (
    KEY,
    Rows,
    Written,
    assemble,
    contradiction,
    decoder_json,
    decoder_settings,
    drafted_ids,
    flag,
    inner,
    layer_ids,
    maps_of,
    our_settings,
    read_ours,
    size,
    split_ours,
    stated,
    with_head_rows,
)
from slipstream.models.heads.weights import Weights

LAYERS = "eagle_aux_hidden_state_layer_ids"
EXPECTED = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "parallel_drafting": False,
}
"""Flags of EAGLE-3 variants: what they must say, where they say anything, to be the architecture run here."""


def require_known(table: Mapping[str, Any], source: str) -> None:
    """Raise UnsupportedError where a flag asks for another architecture, even if another place says otherwise."""
    for name, expected in EXPECTED.items():
        found = stated(table, name, source)
        for given in found.values():
            if given != expected:
                said = contradiction(name, found) or f"{name} is {json.dumps(given)}"
                raise UnsupportedError(
                    f"{source}: {said}; heads with it are not run here, only those where it is {json.dumps(expected)}"
                )


def canonical(weights: Weights) -> None:
    """Rename tensors of all EAGLE layouts to canonical names, in place."""

    def rename(name: str) -> str:
        name = name.removeprefix("model.")
        return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name

    weights.values = {rename(name): tensor for name, tensor in weights.values.items()}


def stored_flags(weights: Weights) -> dict[str, Any]:
    """What the presence of tensors decides: biases of fc, an own embedding, rows of the LM head."""
    return {
        "fc_bias": "fc.bias" in weights.values,
        "own_embedding": "embed_tokens.weight" in weights.values,
        "frozen_head": "lm_head.weight" not in weights.values,
    }


def drafted(weights: Weights) -> set[int]:
    """How many tokens a head drafts, as its tensors have it."""
    rows = {weights.values[name].shape[0] for name in ("lm_head.weight",) if name in weights.values}
    return rows | {weights.numbers[name].size for name in ("d2t",) if name in weights.numbers}


def feature_widths(weights: Weights, layers: tuple[int, ...]) -> set[int]:
    """The width of each feature of EAGLE-3, as the columns of fc have it."""
    found = weights.values.get("fc.weight")
    return set() if found is None else {found.shape[-1] // (len(layers) or 3)}


def matches(names: Collection[str]) -> bool:
    """True for the names of an EAGLE head's tensors."""
    names = {name.removeprefix("model.") for name in names}
    return "fc.weight" in names and any(name.startswith(("midlayer.", "layers.0.")) for name in names)


def read(table: Mapping[str, Any], weights: Weights, extra: Weights, source: str) -> Head:
    """A head of EAGLE-1/2, EAGLE-3 or SpecForge. Raises ModelError, UnsupportedError."""
    canonical(weights)
    three = "layers.0.hidden_norm.weight" in weights.values
    return (_read_three if three else _read_one)(table, weights, extra, source)


def _read_one(table: Mapping[str, Any], weights: Weights, extra: Weights, source: str) -> Head:
    keys = Keys(table, source)
    hidden, vocab = keys.integer("hidden_size"), keys.integer("vocab_size")
    fc = weights.values["fc.weight"]
    config = HeadConfig(
        kind="eagle1",
        hidden=hidden,
        target_hidden=fc.shape[-1] - hidden,
        vocab=vocab,
        draft_vocab=vocab,
        **stored_flags(weights),
        **{**decoder_settings(table, source), "attention_bias": _has(weights, "q_proj.bias")},
    )
    config = read_ours(config, table, weights, extra, source)
    return assemble(config, weights, full_ids(vocab), [])


def _has(weights: Weights, ending: str) -> bool:
    return any(name.endswith(ending) for name in weights.values)


def _read_three(table: Mapping[str, Any], weights: Weights, extra: Weights, source: str) -> Head:
    require_known(table, source)
    notices: list[str] = []
    keys = Keys(table, source)
    before = flag(table, "norm_before_residual", source, notices)
    if before is None:
        notices.append("norm_before_residual is not stated: read as false, as EAGLE-3 and SpecForge do (vLLM: true)")
    layers = layer_ids(table, LAYERS, source)
    outputs = layer_ids(inner(table, "eagle_config", source), LAYERS, source)
    nested = tuple(layer + 1 for layer in outputs)
    if outputs and not layers:
        layers = nested
        notices.append(f"layer ids {list(outputs)} inside eagle_config name outputs: inputs of layers {list(layers)}")
    elif outputs and layers != nested:
        notices.append(
            f"{LAYERS} is {list(layers)} at the top, where it names inputs, and {list(outputs)} inside eagle_config, "
            f"where it names outputs (inputs {list(nested)}): the former is used; correct the wrong one"
        )
    hidden, vocab = keys.integer("hidden_size"), keys.integer("vocab_size")
    draft_vocab = size(table, "draft_vocab_size", vocab, source, notices, drafted(weights))
    ids, more = drafted_ids(weights, vocab, draft_vocab, source)
    width = size(table, "target_hidden_size", hidden, source, notices, feature_widths(weights, layers))
    config = HeadConfig(
        kind="eagle3",
        hidden=hidden,
        target_hidden=width,
        vocab=vocab,
        draft_vocab=draft_vocab,
        feature_layers=layers,
        norm_before_residual=bool(before),
        **stored_flags(weights),
        **decoder_settings(table, source),
    )
    config = read_ours(config, table, weights, extra, source)
    return assemble(config, weights, ids, notices + more)


def write(head: Head, rows: Rows | None) -> Written:
    """An EAGLE-3 head in the authors' layout, every flag written out. Raises UnsupportedError for other kinds."""
    config = head.config
    if config.kind != "eagle3":
        raise UnsupportedError(f"format eagle3 holds EAGLE-3 heads, not {config.kind}; use format slipstream")
    if config.layers != 1:
        raise UnsupportedError(f"format eagle3 has one layer, this head {config.layers}; use format speculators")
    values, extra, notices = split_ours(head)
    frozen, _ = with_head_rows(head, rows, "eagle3")
    if frozen is not None:
        values["lm_head.weight"] = frozen
    values = {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in values.items()}
    outputs = [layer - 1 for layer in config.feature_layers]
    nested: dict[str, Any] = {"use_aux_hidden_state": True, "norm_before_residual": config.norm_before_residual}
    if outputs and min(outputs) >= 0:
        nested[LAYERS] = outputs
    table = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **decoder_json(config),
        "vocab_size": config.vocab,
        "draft_vocab_size": config.draft_vocab,
        "target_hidden_size": config.target_hidden,
        "tie_word_embeddings": False,
        "norm_before_residual": config.norm_before_residual,
        LAYERS: list(config.feature_layers) or None,
        "eagle_config": nested,
        KEY: our_settings(config),
    }
    if config.norm_before_residual:
        notices.append("norm_before_residual is true: the authors' own code has no such flag and will draft badly")
    return Written(table, values, maps_of(head), extra, notices)
