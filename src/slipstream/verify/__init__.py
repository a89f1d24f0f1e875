"""Verifiers by name."""

from __future__ import annotations

from slipstream.core.errors import InputError
from slipstream.verify.base import Verifier
from slipstream.verify.coupled import Coupled

VERIFIERS: dict[str, type[Coupled]] = {"coupled": Coupled}
__all__ = ["VERIFIERS", "Verifier", "make_verifier"]


def make_verifier(name: str, count_near_ties: bool = False) -> Verifier:
    """The verifier of this name. count_near_ties: for targets that are not row-invariant. InputError when unknown."""
    if name not in VERIFIERS:
        raise InputError(f"unknown verifier {name!r}; choose one of: {', '.join(VERIFIERS)}")
    return VERIFIERS[name](count_near_ties)
