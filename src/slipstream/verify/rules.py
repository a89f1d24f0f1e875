"""The small pieces the classical verifiers are made of. p: target's distribution, q: what the draft was drawn from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from slipstream.core.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


def acceptance(p: Floats, q: Floats | None, token: int) -> float:
    """p(token) / q(token), accepted when a uniform lies below it; q None is one-hot at the token."""
    if q is None:
        return float(p[token])
    mass = float(q[token])
    if not mass > 0.0:
        raise InputError(f"drafted token {token} has probability {mass} under its own q; report what it was drawn from")
    return float(p[token]) / mass


def residual(p: Floats, q: Floats | None, token: int) -> Floats:
    """(p - q)+ not normalised; q None is one-hot at the token, which leaves p without it."""
    if q is not None:
        return np.maximum(p - q, 0.0)
    rest = p.copy()
    rest[token] = 0.0
    return rest


def without(q: Floats | None, token: int) -> Floats | None:
    """q for the next candidate drawn without replacement: token removed, renormalised; all zero when q is used up."""
    if q is None:
        return None
    rest = q.copy()
    rest[token] = 0.0
    mass = float(rest.sum())
    return rest / mass if mass > 0.0 else rest


def sample(weights: Floats, uniform: float) -> int:
    """A token by inverse distribution function from weights that need not sum to 1; never one of weight 0."""
    running = np.cumsum(weights)
    index = int(np.searchsorted(running, uniform * running[-1], side="right"))
    return index if index < len(weights) else int(np.flatnonzero(weights)[-1])
