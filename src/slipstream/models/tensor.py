"""One tensor of a model file as it lies on disk: its type, its shape and its bytes, row by row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.core.errors import UnsupportedError
from slipstream.kernels.packed import BLOCKS
from slipstream.kernels.reference import dequantise


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """type: a key of BLOCKS. shape: (columns,) or (rows, columns). raw: uint8 [rows, bytes], rows = 1 for vectors.

    `raw` usually lies in the mapped file: read-only, at any alignment.
    """

    type: str
    shape: tuple[int, ...]
    raw: NDArray[np.uint8]

    def float32(self) -> NDArray[np.float32]:
        """The values, unpacked to a new fp32 array of `shape`."""
        with np.errstate(all="ignore"):  # damaged blocks may hold NaN; that shows in the logits
            return np.array(dequantise(self.type, self.raw)).reshape(self.shape)

    def take_rows(self, order: NDArray[np.intp]) -> Tensor:
        """A copy with its rows (of a vector: its values) in another order; quantised blocks stay as they are."""
        if len(self.shape) > 1:
            return Tensor(self.type, self.shape, self.raw[order])
        values, size = BLOCKS[self.type]
        if values != 1:
            raise UnsupportedError(f"a vector of type {self.type} cannot be reordered; convert the model again")
        return Tensor(self.type, self.shape, self.raw.reshape(-1, size)[order].reshape(1, -1))
