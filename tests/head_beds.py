"""Tiny random heads of every kind, for tests of formats, drafting and training."""

from __future__ import annotations

from typing import Any

import numpy as np

from slipstream.models.heads.config import HeadConfig, tensors
from slipstream.models.heads.head import Head, make_head

PLAIN: dict[str, Any] = {
    "hidden": 48, "target_hidden": 48, "vocab": 101, "draft_vocab": 101, "heads": 4, "kv_heads": 2, "head_dim": 16,
    "intermediate": 72, "depth": 4, "target": "random",
}  # fmt: skip
OURS: dict[str, Any] = {"feature_norm": True, "embedding_residual": True, "markov_rank": 32}
KINDS: dict[str, dict[str, Any]] = {
    "eagle3": {"kind": "eagle3", "feature_layers": (0, 1, 2), "draft_vocab": 37},
    "eagle3-before": {"kind": "eagle3", "feature_layers": (1, 1, 2), "norm_before_residual": True},
    "eagle3-ours": {"kind": "eagle3", "feature_layers": (0, 1, 2), "draft_vocab": 40, "frozen_head": True, **OURS},
    "eagle3-two": {"kind": "eagle3", "feature_layers": (0, 1, 2), "draft_vocab": 37, "layers": 2,
                   "own_embedding": True, "attention_bias": True, "mlp_bias": True},
    "eagle1": {"kind": "eagle1", "frozen_head": True, "fc_bias": True, "own_embedding": True},
    "medusa": {"kind": "medusa", "medusa_heads": 3, "medusa_layers": 1, "depth": 3},
    "medusa-shared": {"kind": "medusa", "medusa_heads": 3, "medusa_layers": 2, "depth": 3, "frozen_head": True},
}  # fmt: skip


def config(name: str = "eagle3", **changes: Any) -> HeadConfig:
    settings = {**PLAIN, **KINDS[name], **changes}
    if settings["kind"] == "medusa":
        settings |= {"heads": 0, "kv_heads": 0, "head_dim": 0, "intermediate": 0}
    return HeadConfig(**settings)


def ids_of(one: HeadConfig, seed: int = 0) -> np.ndarray:
    """Ascending target ids, as training makes them."""
    chosen = np.random.default_rng(seed).choice(one.vocab, one.draft_vocab, replace=False)
    return np.sort(chosen).astype(np.int32)


def head(name: str = "eagle3", seed: int = 0, storage: str = "F32", **changes: Any) -> Head:
    """A head whose values are seeded by tensor name, as those of native_beds.RandomModel."""
    one = config(name, **changes)
    arrays = {}
    for tensor, shape in tensors(one).items():
        rng = np.random.default_rng([seed, *tensor.encode()])
        values = rng.standard_normal(shape, np.float32)
        if len(shape) == 1:
            arrays[tensor] = 1 + 0.3 * values if "norm" in tensor else 0.3 * values
        else:
            arrays[tensor] = values * np.float32(1.5 / np.sqrt(shape[1]))
    return make_head(one, arrays, ids_of(one, seed), storage)
