"""The features of several files of answers as one: each folder may hold more layers than are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from slipstream.train.features import FeatureStore, compute_missing, header_of, sequence_key

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slipstream.targets.base import Target

Reader = Callable[[str], "NDArray[np.float16]"]


class Shelf:
    """Folders of features of one target. layers: those wanted, in the order in which they are read.

    weights: fingerprint of the target; hidden: its width.
    """

    def __init__(self, folders: Sequence[Path], weights: str, layers: Sequence[int], hidden: int) -> None:
        """Open the folders, the first of them made when it is not there. Raises InputError for other weights."""
        self.layers, self._hidden = tuple(layers), hidden
        there = [folder for folder in folders[1:] if header_of(folder)]
        self._stores = [self._open(folder, weights) for folder in (folders[0], *there)]

    def _open(self, folder: Path, weights: str) -> tuple[FeatureStore, tuple[int, ...]]:
        found = header_of(folder)
        kept = tuple(found.get("layers", ())) if found.get("weights") == weights else ()
        layers = kept if set(self.layers) <= set(kept) else self.layers
        header = {"weights": weights, "layers": list(layers)}
        return FeatureStore(folder, header, len(layers) * self._hidden), layers

    def __contains__(self, key: str) -> bool:
        return any(key in store for store, _ in self._stores)

    def fill(
        self,
        sequences: Sequence[Sequence[int]],
        load: Callable[[Sequence[int]], Target],
        report: Callable[[int, int], None],
    ) -> None:
        """Compute what no folder has into the first. load: the target with features of the layers given."""
        missing = [tokens for tokens in sequences if sequence_key(tokens) not in self]
        if missing:
            store, layers = self._stores[0]
            compute_missing(store, load(layers), missing, report)

    def reader(self, layers: Sequence[int]) -> Reader:
        """From a key to the features of these layers, side by side, [tokens, len(layers) x hidden]."""
        readers = [(store, store.reader(), self._columns(kept, layers)) for store, kept in self._stores]

        def read(key: str) -> NDArray[np.float16]:
            for store, rows, columns in readers:
                if key in store:
                    return rows(key)[:, columns]
            raise KeyError(key)

        return read

    def _columns(self, kept: Sequence[int], layers: Sequence[int]) -> slice | NDArray[np.intp]:
        if tuple(kept) == tuple(layers):
            return slice(None)
        spans = [np.arange(self._hidden) + kept.index(layer) * self._hidden for layer in layers]
        return np.concatenate(spans)

    def close(self) -> None:
        """Write what waits."""
        for store, _ in self._stores:
            store.close()
