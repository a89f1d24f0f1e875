"""Rotary position tables: float64 angles, cast once to fp32. Variants: default, linear, llama3, and stored divisors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slipstream.models.config import ModelConfig

ROPE_TYPES = ("default", "linear", "llama3", "factors")


def unsupported_rope(config: ModelConfig) -> str | None:
    """What of the model's rotation is not supported; None when all is."""
    scaling, pairs = config.rope_scaling, config.head_dim // 2
    if scaling["type"] not in ROPE_TYPES:
        return f"rope scaling {scaling['type']!r} (supported: {', '.join(ROPE_TYPES[:3])})"
    divisors = len(scaling.get("factors", ()))
    if scaling["type"] == "factors" and divisors != pairs:
        return f"{divisors} frequency divisors for {pairs} pairs"
    return None


def frequencies(config: ModelConfig) -> NDArray[np.float64]:
    """Radians per position of each rotated pair, [head_dim / 2], scaling applied, which must be supported."""
    scaling = config.rope_scaling
    kind = scaling["type"]
    base = config.rope_theta ** -(np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    if kind == "default":
        return np.asarray(base)
    if kind == "linear":
        return np.asarray(base / scaling["factor"])
    if kind == "factors":
        return np.asarray(base / np.asarray(scaling["factors"], np.float64))
    return _llama3(base, scaling)


def _llama3(base: NDArray[np.float64], scaling: Mapping[str, Any]) -> NDArray[np.float64]:
    """Llama 3.1: long waves are slowed by `factor`, short ones stay, those between are blended linearly."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * base / (2 * np.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray((1 - keep) * base / factor + keep * base)


class RopeTables:
    """cos and sin, float32 [positions, head_dim / 2], grown on demand; a position's values never change."""

    def __init__(self, config: ModelConfig) -> None:
        self._frequencies = frequencies(config)
        self.cos, self.sin = self._make(min(1024, config.max_context))

    def _make(self, positions: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        angles = np.arange(positions, dtype=np.float64)[:, None] * self._frequencies
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def ensure(self, positions: int) -> bool:
        """Make the tables cover `positions`; True when they were replaced."""
        if positions <= len(self.cos):
            return False
        size = len(self.cos)
        while size < positions:
            size *= 2
        self.cos, self.sin = self._make(size)
        return True
