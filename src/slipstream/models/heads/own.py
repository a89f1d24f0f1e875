"""Slipstream's own format: every setting in config.json, tensors by canonical name, any storage, plain drafted ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from slipstream.core.errors import ModelError
from slipstream.models.heads.config import HeadConfig
from slipstream.models.heads.head import Head, as_ids, full_ids
from slipstream.models.heads.layout import Written, assemble
from slipstream.models.heads.weights import Weights

NAME = "slipstream-head"
VERSION = 1


def matches(table: Mapping[str, Any]) -> bool:
    """True for config.json of this format."""
    return table.get("format") == NAME


def read(table: Mapping[str, Any], weights: Weights, source: str) -> Head:
    """A head of this format. Raises ModelError."""
    if table.get("version") != VERSION:
        raise ModelError(
            f"{source}: version {table.get('version')!r} of the head format; this slipstream reads {VERSION}"
        )
    settings = table.get("head")
    if not isinstance(settings, Mapping):
        raise ModelError(f"{source}: head is {settings!r}; it must be a table of settings")
    config = HeadConfig.from_dict(settings, source)
    ids = weights.numbers.pop("draft_ids", None)
    if ids is None and config.draft_vocab != config.vocab:
        raise ModelError(
            f"{source}: drafts {config.draft_vocab} of {config.vocab} tokens but holds no draft_ids; "
            "the head is incomplete, write it again"
        )
    return assemble(config, weights, full_ids(config.vocab) if ids is None else as_ids(ids), [])


def write(head: Head, provenance: Mapping[str, Any]) -> Written:
    """The head as this format wants it; provenance is kept as it is, for the reader's eyes."""
    table = {"format": NAME, "version": VERSION, "head": head.config.as_dict(), "provenance": dict(provenance)}
    config = head.config
    whole = config.draft_vocab == config.vocab and np.array_equal(head.ids, full_ids(config.vocab))
    return Written(table, dict(head.tensors), {} if whole else {"draft_ids": head.ids})
