"""Test beds of the native target: tiny random models of every family, built in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from slipstream.core.errors import ModelError
from slipstream.core.tree import Draft
from slipstream.kernels import native
from slipstream.kernels.passes import BLOCK, KEY_TILE
from slipstream.kernels.reference_decoder import ReferenceDecoder
from slipstream.models.config import ModelConfig
from slipstream.models.files import ModelFile
from slipstream.models.tensor import Tensor
from slipstream.targets.base import RowInput
from slipstream.targets.native.model import NativeTarget

PLAIN: dict[str, Any] = {
    "architecture": "llama", "hidden_size": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
    "intermediate_size": 72, "vocab_size": 101, "token_count": 101, "rms_eps": 1e-5, "max_context": 400,
}  # fmt: skip
LLAMA3 = {
    "type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama3": {"rope_scaling": LLAMA3, "num_heads": 6, "num_kv_heads": 1, "tie_embeddings": True},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}, "num_kv_heads": 4},
    "biases": {"attention_bias": True, "o_bias": True, "mlp_bias": True},
    "mistral": {"architecture": "mistral", "head_dim": 32, "rope_theta": 1e6},
    "qwen2": {"architecture": "qwen2", "attention_bias": True, "num_heads": 7, "num_kv_heads": 1,
              "tie_embeddings": True},
    "qwen3": {"architecture": "qwen3", "qk_norm": True, "head_dim": 24, "hidden_size": 40, "num_layers": 3},
    "odd": {"head_dim": 10, "hidden_size": 30, "intermediate_size": 37, "num_heads": 3, "num_kv_heads": 3,
            "vocab_size": 53, "token_count": 50, "unused_ids": (7,)},
}  # fmt: skip


class RandomModel(ModelFile):
    """A model of the given description with seeded random weights.

    kind: their type, or types by the name of the matrix ("" for all others).
    """

    def __init__(self, config: ModelConfig, seed: int = 0, kind: str | dict[str, str] = "F32") -> None:
        self.path, self.name, self.config = Path("random"), "random", config
        self._seed, self._kind = seed, kind
        self.read: list[str] = []

    def names(self) -> list[str]:
        raise NotImplementedError

    def tokenizer(self) -> Any:
        raise NotImplementedError

    def tensor(self, name: str) -> Tensor:
        self.read.append(name)
        shape = self._shape(name)
        if shape is None:
            raise ModelError(f"no tensor {name}")
        rng = np.random.default_rng([self._seed, *name.encode()])
        values = rng.standard_normal(shape, np.float32)
        if len(shape) == 1:
            values = 1 + 0.3 * values if "norm" in name else 0.3 * values
            return Tensor("F32", shape, values.reshape(1, -1).view(np.uint8))
        kind = self._kind if isinstance(self._kind, str) else self._kind.get(name.split(".")[-2], self._kind[""])
        return typed(values * np.float32(1.5 / np.sqrt(shape[1])), kind)

    def _shape(self, name: str) -> tuple[int, ...] | None:
        c = self.config
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        sizes: dict[str, tuple[int, int]] = {
            "embed_tokens": (c.vocab_size, c.hidden_size), "lm_head": (c.vocab_size, c.hidden_size),
            "q_proj": (q, c.hidden_size), "k_proj": (kv, c.hidden_size), "v_proj": (kv, c.hidden_size),
            "o_proj": (c.hidden_size, q), "gate_proj": (c.intermediate_size, c.hidden_size),
            "up_proj": (c.intermediate_size, c.hidden_size), "down_proj": (c.hidden_size, c.intermediate_size),
        }  # fmt: skip
        part = name.split(".")[-2]
        if name.endswith(".bias"):
            return sizes[part][:1]
        if part in ("q_norm", "k_norm"):
            return (c.head_dim,)
        return sizes.get(part, (c.hidden_size,))


class Recoded(ModelFile):
    """A model whose matrices are unpacked and stored as another type, as a converted copy holds them."""

    def __init__(self, file: ModelFile, kind: str) -> None:
        self._file, self._kind = file, kind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def names(self) -> list[str]:
        return self._file.names()

    def tokenizer(self) -> Any:
        return self._file.tokenizer()

    def tensor(self, name: str) -> Tensor:
        found = self._file.tensor(name)
        return typed(found.float32(), self._kind) if len(found.shape) > 1 else found


def typed(values: np.ndarray, kind: str) -> Tensor:
    """fp32 values as a tensor of this type."""
    if kind == "F32":
        return Tensor("F32", values.shape, np.ascontiguousarray(values).view(np.uint8))
    if kind == "BF16":
        bits = (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)
        return Tensor("BF16", values.shape, bits.view(np.uint8))
    from gguf import GGMLQuantizationType, quants

    return Tensor(kind, values.shape, quants.quantize(values, GGMLQuantizationType[kind]).view(np.uint8))


def model(family: str = "llama", seed: int = 0, kind: str | dict[str, str] = "F32", **changes: Any) -> RandomModel:
    return RandomModel(ModelConfig(**{**PLAIN, **FAMILIES[family], **changes}), seed, kind)


def target(family: str = "llama", features: tuple[int, ...] = (), kind: str = "F32", **changes: Any) -> NativeTarget:
    return NativeTarget.load(model(family, kind=kind, **changes), slots=8, features=features)


def twin(
    family: str,
    monkeypatch: Any,
    features: tuple[int, ...] = (),
    decoder: type[ReferenceDecoder] = ReferenceDecoder,
    **changes: Any,
) -> NativeTarget:
    """The same target on the numpy twin, or on a changed one."""
    with monkeypatch.context() as patch:
        patch.setattr("slipstream.targets.native.model.make_decoder", decoder)
        return target(family, features, **changes)


def core() -> Any:
    """The compiled module, which every machine that runs these tests has built."""
    assert native.core is not None
    return native.core


def tokens(count: int, seed: int = 0, vocab: int = 50) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, count).tolist()


def random_tree(nodes: int, seed: int, vocab: int = 50) -> Draft:
    """A tree whose siblings carry distinct tokens."""
    rng = np.random.default_rng(seed)
    draft = Draft()
    used: set[tuple[int, int]] = set()
    while len(draft) < nodes:
        parent, token = int(rng.integers(-1, len(draft))), int(rng.integers(0, vocab))
        if (parent, token) not in used:
            used.add((parent, token))
            draft.parents.append(parent)
            draft.tokens.append(token)
    return draft


def opened(subject: NativeTarget, prompt: list[int]) -> int:
    """A slot that holds the prompt."""
    slot = subject.open()
    subject.prefill(slot, prompt)
    return slot


def logits_of(subject: NativeTarget, prompt: list[int], draft: Draft | None = None) -> np.ndarray:
    """Logits of one pass: the last prompt token is the anchor. The slot is closed again."""
    slot = opened(subject, prompt[:-1])
    out = subject.forward([RowInput(slot, prompt[-1], draft or Draft())]).logits[0]
    subject.close(slot)
    return out


def tree_faults(subject: NativeTarget, prompt: list[int], tree: Draft) -> list[int]:
    """Nodes (-1: the anchor) whose logits differ from plain decoding of the same tokens."""
    logits = logits_of(subject, prompt, tree)
    nodes = range(-1, len(tree))
    return [
        node
        for node in nodes
        if not same_bits(logits[node + 1], logits_of(subject, prompt + tree.path_tokens(node))[0])
    ]


def cache_of(subject: NativeTarget, slot: int) -> np.ndarray:
    """Keys and values of a slot: [positions, layers, 2, kv_heads, head_dim]."""
    shape, slots = subject._shape, subject._slots
    rows = []
    for position in range(subject.length(slot)):
        block = slots.pool.data[slots.tables[slot, position // BLOCK]].reshape(shape.layers, shape.kv_heads, -1)
        split, place = shape.head_dim * BLOCK, position % BLOCK
        tiles = block[..., :split].reshape(shape.layers, shape.kv_heads, -1, shape.head_dim, KEY_TILE)
        keys = tiles[:, :, place // KEY_TILE, :, place % KEY_TILE]
        values = block[..., split:].reshape(shape.layers, shape.kv_heads, BLOCK, -1)[:, :, place, : shape.head_dim]
        rows.append(np.stack([keys, values], axis=1))
    return np.stack(rows) if rows else np.zeros((0,))


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.array_equal(a.view(np.uint32), b.view(np.uint32))
