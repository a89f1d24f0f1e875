"""What packed weights are: their types and the object that holds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BLOCKS: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
"""Values and bytes of one block of each supported type, as files hold them; in the order of `enum class Type`."""
TYPES = list(BLOCKS)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Weights [out, in] of one type.

    data: the panels (uint8, 64-byte aligned) with the compiled core, else the rows as they lie in the file,
    uint8 [out, bytes]. handle: the compiled core's view of `data`, or None.
    """

    type: str
    shape: tuple[int, int]
    data: NDArray[np.uint8]
    handle: Any

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.data.nbytes
