"""Whether a head fits its target, as far as both can say without running: each misfit with its reason and remedy."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np

from slipstream.core.errors import ModelError
from slipstream.models.config import ModelConfig
from slipstream.models.heads.config import tensors
from slipstream.models.heads.head import Head, full_ids, names_of

log = logging.getLogger(__name__)


def fitted(head: Head, config: ModelConfig, fingerprint: str, source: str, target: str) -> Head:
    """The head with what its file left open settled by the target. Raises ModelError for the first misfit.

    fingerprint: of the target's tokenizer. source, target: how messages name the two.
    """
    _check_sizes(head, config, source, target)
    if head.config.fingerprint and head.config.fingerprint != fingerprint:
        raise ModelError(
            f"{source}: made for another tokenizer than that of {target}"
            f"{f' (for {head.config.target})' if head.config.target else ''}; use a head trained for {target}"
        )
    layers = head.config.layers_of(config.num_layers)
    for layer in layers:
        if not 0 <= layer <= config.num_layers:
            raise ModelError(
                f"{source}: reads the input of layer {layer}, {target} has layers 0 to {config.num_layers}; "
                "the head belongs to another model, or its layer ids are counted otherwise"
            )
    head = _complete(head, config)
    if head.unused:
        raise ModelError(
            f"{source}: nothing uses tensors {names_of(sorted(head.unused))}; the head has parts that are not known "
            "here and would draft badly without them"
        )
    head.check(source)
    _check_values(head, source)
    for notice in head.notices:
        log.warning("%s: %s", source, notice)
    return replace(head, config=replace(head.config, feature_layers=layers))


def _check_sizes(head: Head, config: ModelConfig, source: str, target: str) -> None:
    ours = head.config
    pairs = (("target_hidden", "hidden states", config.hidden_size), ("vocab", "vocabulary", config.vocab_size))
    for name, what, theirs in pairs:
        stated = getattr(ours, name)
        if stated and stated != theirs:
            raise ModelError(
                f"{source}: made for {what} of {stated}, {target} has {theirs}; use a head trained for {target}"
            )
    shared = [name for name, used in (("embedding", _shares_embedding(head)), ("LM head", ours.frozen_head)) if used]
    if shared and ours.hidden != config.hidden_size:
        raise ModelError(
            f"{source}: shares the {shared[0]} of {target}, but is {ours.hidden} wide and {target} "
            f"{config.hidden_size}; such a head must hold its own"
        )


def _shares_embedding(head: Head) -> bool:
    return head.config.kind != "medusa" and not head.config.own_embedding


def _complete(head: Head, config: ModelConfig) -> Head:
    """Vocabularies that the file did not state are the target's."""
    vocab = head.config.vocab or config.vocab_size
    draft_vocab = head.config.draft_vocab or vocab
    ids = head.ids if len(head.ids) or draft_vocab != vocab else full_ids(vocab)
    settled = replace(head.config, vocab=vocab, draft_vocab=draft_vocab)
    return replace(head, config=settled, ids=ids)


def _check_values(head: Head, source: str) -> None:
    """Raise ModelError for tensors that hold NaN or infinity, or nothing but zeros where that makes a head mute."""
    for name in tensors(head.config):
        values = head.tensors[name].float32()
        if not np.isfinite(values).all():
            raise ModelError(f"{source}: {name} holds NaN or infinity; the head is damaged, or training went astray")
        if name in ("fc.weight", "norm.weight") and not values.any():
            raise ModelError(f"{source}: {name} is all zeros; the head was never trained, or saved before it was")
