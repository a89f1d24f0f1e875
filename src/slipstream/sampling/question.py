"""All that decides the token after one node, but for its logits: what a twin of the sampler on a device needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(slots=True)
class Touched:
    """Tokens whose logit the bias or a penalty changes: ids int64, and per id the bias, seen, and the count so far."""

    ids: NDArray[np.int64]
    bias: NDArray[np.float64]
    seen: NDArray[np.bool_]
    count: NDArray[np.float64]


@dataclass(slots=True)
class Question:
    """key: of the noise at this position (0 when greedy). allowed: the grammar's mask [vocab], None for all.

    touched: see there, None for none. banned: ids that cannot be drawn. repetition, frequency, presence: penalties.
    """

    key: int
    allowed: NDArray[np.bool_] | None = None
    touched: Touched | None = None
    banned: NDArray[np.int64] | None = None
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0

    @property
    def counts(self) -> bool:
        """True when frequency or presence penalties are on."""
        return self.frequency != 0.0 or self.presence != 0.0
