"""Rotary position tables: float64 angles, cast once to fp32. Variants: default, linear, llama3, and stored divisors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from slipstream.core.errors import UnsupportedError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slipstream.models.config import ModelConfig

ROPE_TYPES = ("default", "linear", "llama3", "factors")


def frequencies(config: ModelConfig) -> NDArray[np.float64]:
    """Radians per position of each rotated pair, [head_dim / 2], scaling applied. Raises UnsupportedError by name."""
    scaling = config.rope_scaling
    kind = scaling["type"]
    base = config.rope_theta ** -(np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    if kind == "default":
        return np.asarray(base)
    if kind == "linear":
        return np.asarray(base / scaling["factor"])
    if kind == "factors":
        divisors = np.asarray(scaling["factors"], np.float64)
        if divisors.shape != base.shape:
            raise UnsupportedError(f"rope has {divisors.size} frequency divisors for {base.size} pairs")
        return np.asarray(base / divisors)
    if kind == "llama3":
        return _llama3(base, scaling)
    raise UnsupportedError(f"rope scaling {kind!r} is not supported; supported are {', '.join(ROPE_TYPES[:3])}")


def _llama3(base: NDArray[np.float64], scaling: object) -> NDArray[np.float64]:
    """Llama 3.1: long waves are slowed by `factor`, short ones stay, those between are blended linearly."""
    assert isinstance(scaling, dict)
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
