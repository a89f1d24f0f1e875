"""Keyed noise: the Gumbel noise of (seed, position, token) and the separate streams of the classical rules.

Everything is modulo 2**64; g = 0x9E3779B97F4A7C15, mix = the splitmix64 finaliser.
key = mix((mix((mix(seed + g) ^ stream) + g) ^ t) + g); h = mix(key + token * g); u = ((h >> 12) + 0.5) / 2**52;
G = -log(-log(u)), from -3.61 to 36.74. In float32 u could round to 1, and G to infinity.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from slipstream.core.errors import InputError
from slipstream.kernels import sampling as kernels

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NOISE_VERSION = 1
"""Changes with every change of what is hashed or how: answers of two versions with the same seed may differ."""

POSITION_STREAM = 0
"""The noise of absolute positions; only the draw and same-noise drafting use it."""
STREAMS = {"draft": 1, "accept": 2, "residual": 3, "bonus": 4}
"""Streams of the classical rules, salted with the step number instead of the position."""
_CHOICE_STREAM = 5


def key(seed: int, t: int, stream: int = POSITION_STREAM) -> int:
    """Key of position (or step) t of one stream, hashed in stages: seed + 1 does not get this seed's noise shifted."""
    return kernels.keys(seed, t, 1, stream)[0]


def keys(seed: int, begin: int, count: int) -> list[int]:
    """Keys of `count` positions from `begin` on."""
    return kernels.keys(seed, begin, count, POSITION_STREAM)


def uniforms(seed: int, purpose: str, step: int, count: int) -> NDArray[np.float64]:
    """`count` uniforms strictly inside (0, 1) for one purpose of one step; InputError for an unknown purpose."""
    if purpose not in STREAMS:
        raise InputError(f"unknown purpose {purpose!r} of random numbers; known: {', '.join(STREAMS)}")
    return kernels.uniforms(key(seed, step, STREAMS[purpose]), count)


def fresh_seed() -> int:
    """64 bits from the system, for requests without a seed."""
    return secrets.randbits(64)


def choice_seed(seed: int, index: int) -> int:
    """Seed of choice `index` of a request: its own seed for the first, a hash of both for the others."""
    return seed if index == 0 else key(seed, index, _CHOICE_STREAM)
