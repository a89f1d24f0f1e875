"""Verifiers by name, and which combinations of verifier, draft shape and drafters are refused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from slipstream.core.errors import InputError, UnsupportedError
from slipstream.verify.base import Verifier
from slipstream.verify.block import Block
from slipstream.verify.coupled import Coupled
from slipstream.verify.rejection import Rejection
from slipstream.verify.typical import Typical

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from slipstream.core.tree import Draft
    from slipstream.core.types import Drawn, Row, Verdict

__all__ = ["CLASSICAL", "VERIFIERS", "Verifier", "check_combination", "make_verifier", "verify_rows"]

VERIFIERS: dict[str, type[Verifier]] = {
    "coupled": Coupled,
    "rejection": Rejection,
    "block": Block,
    "typical": Typical,
}
CLASSICAL = ("rejection", "block")
"""Verifiers that want the drafter's random draws and their distribution."""


def _known(name: str) -> type[Verifier]:
    if name not in VERIFIERS:
        raise InputError(f"unknown verifier {name!r}; choose one of: {', '.join(VERIFIERS)}")
    return VERIFIERS[name]


def make_verifier(name: str, count_near_ties: bool = False) -> Verifier:
    """The verifier of this name; InputError when unknown.

    count_near_ties: for targets that are not row-invariant; only `coupled` promises tokens, so only it counts.
    """
    kind = _known(name)
    return Coupled(count_near_ties) if kind is Coupled else kind()


def verify_rows(
    verifier: Verifier,
    logits: Sequence[NDArray[np.float32]],
    drafts: Sequence[Draft],
    rows: Sequence[Row],
    draw: Callable[[Sequence[Row], Sequence[Draft]], list[Drawn] | None] | None = None,
) -> list[Verdict]:
    """A verdict per row.

    draw: draws the target's own tokens after all nodes at once, for logits that lie on a device; `coupled` needs
    nothing else of them, so that the logits stay there.
    """
    if draw is not None and isinstance(verifier, Coupled):
        drawn = draw(rows, drafts)
        if drawn is not None:
            return [verifier(*given) for given in zip(logits, drafts, rows, drawn, strict=True)]
    return [verifier(*given) for given in zip(logits, drafts, rows, strict=True)]


def check_combination(name: str, shape: str, drafters: Collection[str], drawing: Collection[str] = ()) -> None:
    """Refuse at load what a verifier cannot do exactly; UnsupportedError says why and what to choose instead.

    shape: "chain" or "tree". drafters: names of all drafters. drawing: those among them whose tokens are random draws
    from a reported q. `coupled` takes everything; the classical rules take one drafter's unpruned draws, or
    deterministic nodes of any number of drafters.
    """
    _known(name)
    if shape not in ("chain", "tree"):
        raise InputError(f"unknown draft shape {shape!r}; choose chain or tree")
    if name == "block" and shape == "tree":
        raise UnsupportedError("verifier block takes chains only; choose shape chain, or the verifier rejection")
    if name in CLASSICAL and drawing and len(drafters) > 1:
        names = ", ".join(sorted(drafters))
        raise UnsupportedError(
            f"verifier {name} takes the random draws of one drafter alone, not merged ({names}); "
            f"choose one drafter, or the verifier coupled"
        )
