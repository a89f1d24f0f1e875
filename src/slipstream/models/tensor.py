"""One tensor of a model file as it lies on disk: its type, its shape and its bytes, row by row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.core.errors import UnsupportedError

BLOCKS: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
"""Supported types: values per block, bytes per block. Blocks never cross a row."""


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
        return unpack(self.type, self.raw).reshape(self.shape)

    def take_rows(self, order: NDArray[np.intp]) -> Tensor:
        """A copy with its rows (of a vector: its values) in another order; quantised blocks stay as they are."""
        if len(self.shape) > 1:
            return Tensor(self.type, self.shape, self.raw[order])
        values, size = BLOCKS[self.type]
        if values != 1:
            raise UnsupportedError(f"a vector of type {self.type} cannot be reordered; convert the model again")
        return Tensor(self.type, self.shape, self.raw.reshape(-1, size)[order].reshape(1, -1))


def unpack(type_name: str, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """fp32 [rows, columns] from raw rows of a type in BLOCKS; F32, F16 and BF16 exactly, others by gguf.quants."""
    rows = np.ascontiguousarray(raw)
    if type_name == "F32":
        return rows.view(np.float32).copy()
    if type_name == "F16":
        return rows.view(np.float16).astype(np.float32)
    if type_name == "BF16":
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if type_name not in BLOCKS:
        raise UnsupportedError(f"tensor type {type_name} is not supported; use one of {', '.join(BLOCKS)}")
    from gguf import GGMLQuantizationType, quants  # takes a quarter of a second: only when needed

    with np.errstate(all="ignore"):  # damaged blocks may hold NaN; that shows in the logits
        values = quants.dequantize(rows, GGMLQuantizationType[type_name])
    return np.asarray(values, dtype=np.float32)
