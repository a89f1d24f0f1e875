"""Arrays for the results of passes, in memory that is used again once nobody holds a result any more."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Buffers:
    """Hands out float32 arrays. Fresh memory costs a page fault every 1,024 floats, which a pass over several rows of
    a large vocabulary would pay each time.
    """

    def __init__(self) -> None:
        self._lent: list[tuple[bytearray, weakref.ref[NDArray[np.float32]]]] = []

    def take(self, rows: int, columns: int) -> NDArray[np.float32]:
        """An array [rows, columns] of any content; its memory is free again when it and all its views are gone."""
        size = 4 * rows * columns
        busy = [entry for entry in self._lent if entry[1]() is not None]
        spare = max((memory for memory, array in self._lent if array() is None), key=len, default=bytearray())
        memory = spare if len(spare) >= size else bytearray(size)
        # Views of an array that does not own its memory refer to that array, so it lives as long as any of them.
        array = np.frombuffer(memory, np.float32, rows * columns)
        self._lent = [*busy, (memory, weakref.ref(array))]
        return array.reshape(rows, columns)
