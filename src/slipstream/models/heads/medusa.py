"""Medusa heads: residual blocks and an LM head each, or the target's LM head for all; vLLM's names are read too."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from slipstream.core.errors import ModelError, UnsupportedError
from slipstream.models.config import Keys
from slipstream.models.heads.config import HeadConfig
from slipstream.models.heads.head import Head, as_ids, full_ids, store
from slipstream.models.heads.layout import KEY, Written, assemble, foreign, our_settings, read_ours
from slipstream.models.heads.weights import Weights

FILE = "medusa_lm_head.safetensors"
_LINEAR = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_HEAD = re.compile(r"(\d+)\.(\d+)\.weight")
_VLLM_LINEAR = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_VLLM_HEAD = re.compile(r"lm_heads\.(\d+)\.weight")


def matches(table: Mapping[str, Any], names: Collection[str]) -> bool:
    """True for a Medusa head of either naming."""
    if "medusa_num_heads" in table or table.get("model_type") == "medusa":
        return True
    return any(_LINEAR.fullmatch(_plain(name)) for name in names)


def _plain(name: str) -> str:
    return name.removeprefix("medusa_head.")


def _canonical(weights: Weights) -> None:
    renamed = {}
    for name, tensor in weights.values.items():
        short = _plain(name)
        if found := _LINEAR.fullmatch(short) or _VLLM_LINEAR.fullmatch(short):
            short = f"medusa.{found[1]}.{found[2]}.linear.{found[3]}"
        elif found := _HEAD.fullmatch(short) or _VLLM_HEAD.fullmatch(short):
            short = f"medusa.{found[1]}.lm_head.weight"
        renamed[short] = tensor
    weights.values = renamed


def read(table: Mapping[str, Any], weights: Weights, source: str) -> Head:
    """A Medusa head. Raises ModelError where settings and tensors differ."""
    _canonical(weights)
    places = [re.match(r"medusa\.(\d+)\.(\d+)\.linear\.weight", name) for name in weights.values]
    found = [(int(place[1]), int(place[2])) for place in places if place]
    if not found:
        raise ModelError(f"{source}: holds no residual block of a Medusa head; the head is incomplete")
    heads, blocks = 1 + max(head for head, _ in found), 1 + max(block for _, block in found)
    for name, here in (("medusa_num_heads", heads), ("medusa_num_layers", blocks)):
        stated = table.get(name)
        if stated is not None and stated != here:
            raise ModelError(f"{source}: {name} is {stated!r}, its tensors hold {here}; the head is incomplete")
    first = weights.values.get("medusa.0.0.linear.weight")
    if first is None:
        raise ModelError(f"{source}: tensors medusa.0.0.linear.weight are missing; the head is incomplete")
    hidden = first.shape[-1]
    own = weights.values.get("medusa.0.lm_head.weight")
    stated_vocab = Keys(table, source).integer("vocab_size") if table.get("vocab_size") else 0
    vocab = own.shape[0] if own is not None else stated_vocab
    draft_vocab, ids = vocab, full_ids(vocab)
    reduced = weights.numbers.pop("token_map", None)
    if reduced is not None:
        ids = as_ids(reduced)
        draft_vocab, vocab = len(ids), stated_vocab
    if not any(name.endswith(".linear.bias") for name in weights.values):  # blocks without any, as vLLM allows
        zeros = store(np.zeros(hidden, np.float32), "F32")
        weights.values.update({f"medusa.{head}.{block}.linear.bias": zeros for head, block in found})
    config = HeadConfig(
        kind="medusa",
        hidden=hidden,
        target_hidden=hidden,
        vocab=vocab,
        draft_vocab=draft_vocab,
        medusa_heads=heads,
        medusa_layers=blocks,
        frozen_head=own is None,
        depth=heads,
        target=str(table.get("base_model_name_or_path") or ""),
    )
    return assemble(read_ours(config, table, weights, Weights({}, {}), source), weights, ids, [])


def write(head: Head) -> Written:
    """A Medusa head in its authors' layout. Raises UnsupportedError for other kinds and what the layout cannot hold."""
    config = head.config
    if config.kind != "medusa":
        raise UnsupportedError(f"format medusa holds Medusa heads, not {config.kind}; use format slipstream")
    reduced = config.draft_vocab != config.vocab
    if reduced and not config.frozen_head:
        raise UnsupportedError(
            f"format medusa has no reduced vocabulary; this head drafts {config.draft_vocab} of {config.vocab} tokens: "
            "use format slipstream"
        )
    values = {}
    for name, tensor in head.tensors.items():
        short = name.removeprefix("medusa.").replace(".lm_head.", f".{config.medusa_layers}.")
        values[short] = foreign(tensor)
    table = {
        "medusa_num_heads": config.medusa_heads,
        "medusa_num_layers": config.medusa_layers,
        "base_model_name_or_path": config.target,
        "version": "2",
        "hidden_size": config.hidden,
        "vocab_size": config.vocab,
        KEY: our_settings(config),
    }
    numbers, notices = {}, []
    if reduced:
        numbers["token_map"] = head.ids.astype(np.int64)
        notices.append("other readers draft from the target's whole vocabulary, this head from its own part of it")
    return Written(table, values, numbers, notices=notices)
