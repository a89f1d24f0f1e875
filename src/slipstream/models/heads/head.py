"""A head in memory: description, tensors by canonical name, the target ids it can draft; and how values are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.core.errors import InputError, ModelError
from slipstream.models.heads.config import MOST_VOCAB, HeadConfig, tensors
from slipstream.models.tensor import Tensor

STORAGE = ("F32", "F16", "BF16", "Q8_0")
"""How matrices may be stored. In Q8_0 heads vectors stay F32, and matrices whose rows 32 does not divide F16."""
Q8_BLOCK = 32
MOST_NAMES = 4
"""Names that a message lists."""


@dataclass(slots=True, eq=False)
class Head:
    """One head. ids: int32 [draft_vocab], the target id of each drafted id, ascending or not, all different.

    notices: what a reader should be told about how the file was understood. unused: tensors of the file that no part of
    the description needs. format, provenance: of the file it was read from, and what that says it was made from.
    """

    config: HeadConfig
    tensors: dict[str, Tensor]
    ids: NDArray[np.int32]
    notices: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    format: str = ""
    provenance: dict[str, Any] = field(default_factory=dict)

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """All tensors unpacked to fp32, by canonical name."""
        return {name: tensor.float32() for name, tensor in self.tensors.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(tensor.raw.nbytes for tensor in self.tensors.values())

    def check(self, source: str) -> None:
        """Raise ModelError unless names, shapes and drafted ids are those of the description."""
        wanted = tensors(self.config)
        missing = sorted(set(wanted) - set(self.tensors))
        if missing:
            raise ModelError(f"{source}: tensors {names_of(missing)} are missing; the head is incomplete")
        for name, shape in wanted.items():
            if self.tensors[name].shape != shape:
                raise ModelError(
                    f"{source}: {name} is {list(self.tensors[name].shape)}, its settings make it {list(shape)}; "
                    "the settings belong to another head"
                )
        extra = sorted(set(self.tensors) - set(wanted))
        if extra:
            raise ModelError(f"{source}: nothing uses tensor {extra[0]}; a flag of the head is wrong or not known here")
        check_ids(self.ids, self.config, source)


def check_ids(ids: NDArray[np.int32], config: HeadConfig, source: str) -> None:
    """Raise ModelError unless there is one valid target id for each drafted id, none of them twice."""
    if len(ids) != config.draft_vocab:
        raise ModelError(
            f"{source}: d2t maps {len(ids)} ids, the head drafts {config.draft_vocab}; "
            "the map is truncated or of another head: take both from one training run"
        )
    wrong = np.flatnonzero((ids < 0) | (ids >= config.vocab))
    if len(wrong):
        raise ModelError(
            f"{source}: d2t sends draft id {wrong[0]} to {ids[wrong[0]]}, outside 0 to {config.vocab - 1}; "
            "d2t holds differences (target id - draft id): it may have been written as target ids"
        )
    if len(np.unique(ids)) != len(ids):
        raise ModelError(
            f"{source}: d2t sends several draft ids to one target id; "
            "it is damaged, or was written as target ids instead of differences"
        )


def make_head(
    config: HeadConfig,
    arrays: Mapping[str, NDArray[np.float32]],
    ids: NDArray[np.int32] | None = None,
    storage: str = "F32",
) -> Head:
    """A head from fp32 arrays; ids None: every target id. Raises InputError for an unknown storage, ModelError."""
    ids = np.arange(config.draft_vocab, dtype=np.int32) if ids is None else np.asarray(ids, np.int32)
    head = Head(config, {name: store(np.asarray(array), storage) for name, array in arrays.items()}, ids)
    head.check("head")
    return head


def restore(head: Head, storage: str) -> Head:
    """The same head with its matrices stored in another way."""
    kept = {name: store(tensor.float32(), storage) for name, tensor in head.tensors.items()}
    return replace(head, tensors=kept)


def store(values: NDArray[np.float32], storage: str) -> Tensor:
    """Values as a tensor of this storage. Raises InputError for an unknown one."""
    if storage not in STORAGE:
        raise InputError(f"storage is {storage!r}; choose one of {', '.join(STORAGE)}")
    values = np.ascontiguousarray(values, np.float32)
    if storage == "Q8_0" and (values.ndim == 1 or values.shape[-1] % Q8_BLOCK):
        storage = "F32" if values.ndim == 1 else "F16"
    rows = values.reshape(1, -1) if values.ndim == 1 else values
    if storage == "Q8_0":
        raw = _q8_0(rows)
    elif storage == "BF16":
        raw = _bf16(rows).view(np.uint8)
    else:
        raw = np.ascontiguousarray(rows.astype(np.float16 if storage == "F16" else np.float32)).view(np.uint8)
    return Tensor(storage, values.shape, raw)


def _bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest, ties to even."""
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _q8_0(rows: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Blocks of 32: a half d = largest magnitude / 127, then 32 signed bytes round(x / d). uint8 [rows, bytes]."""
    blocks = rows.reshape(len(rows), -1, Q8_BLOCK)
    scale = np.abs(blocks).max(axis=2, keepdims=True) / np.float32(127)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    quantised = np.rint(blocks * inverse).astype(np.int8)
    return np.concatenate([scale.astype(np.float16).view(np.uint8), quantised.view(np.uint8)], axis=2).reshape(
        len(rows), -1
    )


def as_ids(numbers: NDArray[Any]) -> NDArray[np.int32]:
    """Target ids out of a file; those that int32 cannot hold stay out of range instead of becoming others."""
    return np.asarray(np.clip(numbers.reshape(-1).astype(np.int64), -(2**31), 2**31 - 1), np.int32)


def full_ids(vocab: int) -> NDArray[np.int32]:
    """The identity map of a vocabulary that is not reduced. Raises ModelError for more tokens than any has."""
    if vocab > MOST_VOCAB:
        raise ModelError(
            f"head: a vocabulary of {vocab} tokens; at most {MOST_VOCAB} are possible, the head is damaged"
        )
    return np.arange(vocab, dtype=np.int32)


def names_of(items: Sequence[str]) -> str:
    """A list of names for a message, cut short."""
    more = f" and {len(items) - MOST_NAMES} more" if len(items) > MOST_NAMES else ""
    return ", ".join(items[:MOST_NAMES]) + more
