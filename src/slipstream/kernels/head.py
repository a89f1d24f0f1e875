"""A drafting head of the EAGLE family behind plain data. Chooses the compiled core or its numpy twin."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from slipstream.kernels import native
from slipstream.kernels.decoder import plain_layer
from slipstream.kernels.head_weights import HeadWeights, Made
from slipstream.kernels.reference_head import ReferenceHead

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slipstream.kernels.passes import Pass

__all__ = ["CompiledHead", "EagleHead", "HeadWeights", "Made", "make_eagle_head"]


class EagleHead(Protocol):
    """What the compiled core and the numpy twin both are. One pass runs at a time.

    Built from weights and the KV pool (float32 [blocks, shape.block_floats]).
    """

    def rope(self, cos: NDArray[np.float32], sin: NDArray[np.float32]) -> None:
        """Use these tables, float32 [positions, head_dim / 2], from the next pass on."""

    def forward(
        self, rows: Pass, given: NDArray[np.float32], fresh: bool, store: bool, wanted: NDArray[np.int32]
    ) -> Made:
        """Run the pass; results of the rows `wanted`, [n, hidden], [n, hidden], [n, drafted tokens].

        given: features [m, width] when `fresh`, else hidden states of this head [m, hidden]. With `store` (all
        sequences are chains) keys and values go into the pool at prefix + depth; else they stay aside, where rows of
        later passes may have them as ancestors, until a pass that names no older rows.
        """

    def start(self, rows: Pass, given: NDArray[np.float32], wanted: NDArray[np.int32]) -> None:
        """Begin a pass over fresh features that are stored; an idle thread goes on with it.

        Until `finish` nothing else may be asked, and the sequences' blocks are not to be touched.
        """

    def finish(self) -> Made:
        """The results of the pass that was begun."""


class CompiledHead:
    """The head of the compiled core; see `EagleHead`."""

    def __init__(self, core: Any, weights: HeadWeights, pool: NDArray[np.float32]) -> None:
        self._shape = weights.shape
        plain = {name: getattr(value, "handle", value) for name, value in weights.plain().items()}
        plain["layers"] = [plain_layer(layer) for layer in weights.layers]
        self._core = core.Head(asdict(weights.shape), plain, pool)

    def rope(self, cos: NDArray[np.float32], sin: NDArray[np.float32]) -> None:
        """Use these tables from the next pass on."""
        self._core.rope(cos, sin)

    def forward(
        self, rows: Pass, given: NDArray[np.float32], fresh: bool, store: bool, wanted: NDArray[np.int32]
    ) -> Made:
        """Run the pass; see `EagleHead.forward`."""
        arrays, made = self._arrays(rows, len(wanted))
        self._core.forward(arrays, given, fresh, store, wanted, made)
        return Made(*made)

    def start(self, rows: Pass, given: NDArray[np.float32], wanted: NDArray[np.int32]) -> None:
        """Begin a pass; see `EagleHead.start`."""
        arrays, made = self._arrays(rows, len(wanted))
        self._core.start(arrays, given, wanted, made)
        self._begun = Made(*made)

    def finish(self) -> Made:
        """The results of the pass that was begun."""
        self._core.finish()
        return self._begun

    def _arrays(self, rows: Pass, count: int) -> tuple[Any, Any]:
        """What the core takes of a pass, and room for the results of so many rows."""
        widths = (self._shape.hidden, self._shape.hidden, self._shape.vocab)
        made = tuple(np.empty((count, width), np.float32) for width in widths)
        return (rows.tokens, rows.parents, rows.depths, rows.first, rows.prefix, rows.tables), made


def make_eagle_head(weights: HeadWeights, pool: NDArray[np.float32]) -> EagleHead:
    """The compiled head, or its numpy twin where the package was built without a compiler."""
    if native.core is None:
        return ReferenceHead(weights, pool)
    return CompiledHead(native.core, weights, pool)
