"""The speculators format (vLLM): EAGLE-3 heads with nested settings; layer ids name inputs of the target's layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.core.errors import ModelError, UnsupportedError
from slipstream.models.config import Keys
from slipstream.models.heads.config import HeadConfig
from slipstream.models.heads.eagle import LAYERS, canonical, drafted, feature_widths, require_known, stored_flags
from slipstream.models.heads.head import Head
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


def matches(table: Mapping[str, Any]) -> bool:
    """True for config.json of this format."""
    return "speculators_model_type" in table or "speculators_config" in table


def read(table: Mapping[str, Any], weights: Weights, extra: Weights, source: str) -> Head:
    """A head of this format. Raises ModelError, UnsupportedError for algorithms other than EAGLE-3."""
    kind = table.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise UnsupportedError(f"{source}: speculators_model_type is {kind!r}; only eagle3 is read in this format")
    layer = table.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        raise ModelError(f"{source}: transformer_layer_config is missing; the head's configuration is damaged")
    require_known(table, source)
    notices: list[str] = []
    before = flag(table, "norm_before_residual", source, notices)
    if before is None:
        notices.append("norm_before_residual is not stated: read as false, as speculators does (vLLM reads true)")
    decoder = decoder_settings(layer, source)
    hidden, vocab = Keys(layer, source).integer("hidden_size"), Keys(layer, source).integer("vocab_size")
    canonical(weights)
    draft_vocab = size(table, "draft_vocab_size", vocab, source, notices, drafted(weights))
    ids, more = drafted_ids(weights, vocab, draft_vocab, source)
    said = stated(table, LAYERS, source)
    layers = layer_ids({LAYERS: next(iter(said.values()), None)}, LAYERS, source)
    if both := contradiction(LAYERS, said):
        notices.append(f"{both}: read as {list(layers)}; correct the one that is wrong")
    around = inner(table, "speculators_config", source)
    verifier = inner(around, "verifier", source)
    config = HeadConfig(
        kind="eagle3",
        hidden=hidden,
        target_hidden=size(table, "target_hidden_size", hidden, source, notices, feature_widths(weights, layers)),
        vocab=vocab,
        draft_vocab=draft_vocab,
        feature_layers=layers,
        norm_before_residual=bool(before),
        target=str(verifier.get("name_or_path") or ""),
        depth=_speculative_tokens(around),
        **stored_flags(weights),
        **decoder,
    )
    config = read_ours(config, table, weights, extra, source)
    return assemble(config, weights, ids, notices + more)


def _speculative_tokens(around: Mapping[str, Any]) -> int:
    methods = around.get("proposal_methods") or [{}]
    first = methods[0] if isinstance(methods, list) and isinstance(methods[0], Mapping) else {}
    value = first.get("speculative_tokens", 0)
    return value if type(value) is int and value > 0 else 0


def write(head: Head, rows: Rows | None) -> Written:
    """An EAGLE-3 head in this format, every flag written out. Raises UnsupportedError for other kinds."""
    config = head.config
    if config.kind != "eagle3":
        raise UnsupportedError(f"format speculators holds EAGLE-3 heads, not {config.kind}; use format slipstream")
    values, extra, notices = split_ours(head)
    frozen, target = with_head_rows(head, rows, "speculators")
    if frozen is not None:
        values["lm_head.weight"] = frozen
    layer = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **decoder_json(config)}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": config.depth or 5,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    table = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "draft_vocab_size": config.draft_vocab,
        "target_hidden_size": config.target_hidden,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": False,
        LAYERS: list(config.feature_layers) or None,
        "tie_word_embeddings": False,
        "transformer_layer_config": {**layer, "vocab_size": config.vocab},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target, "architectures": []},
        },
        KEY: our_settings(config),
    }
    if not config.feature_layers:
        notices.append("the head does not say which layers it reads; readers will take (2, n / 2, n - 3)")
    return Written(table, values, maps_of(head), extra, notices)
