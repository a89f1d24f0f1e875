"""What a verifier is: logits and a draft in, a verdict out. Pure; all randomness comes from the row's sampler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from slipstream.core.tree import Draft
from slipstream.core.types import Row, Verdict

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Verifier(Protocol):
    """Decides which drafted tokens stand."""

    name: str
    exact: bool
    """False for lossy rules; marks every result they touch."""
    same_tokens: bool
    """True when the tokens emitted cannot depend on the draft (`coupled`), False when only their law cannot."""

    def __call__(self, logits: NDArray[np.float32], draft: Draft, row: Row) -> Verdict:
        """logits [1 + nodes, vocab]: row 0 for the anchor, row i + 1 for node i."""
