"""The decoder behind plain data: weights and one pass in, logits out. Chooses the compiled core or its numpy twin."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, Protocol

from slipstream.kernels import native
from slipstream.kernels.reference_decoder import ReferenceDecoder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from slipstream.kernels.passes import DecoderWeights, LayerWeights, Pass


class Decoder(Protocol):
    """What the compiled core and the numpy twin both are. One pass runs at a time per decoder.

    Built from weights and the KV pool (float32 [blocks, shape.block_floats]).
    """

    def rope(self, cos: NDArray[np.float32], sin: NDArray[np.float32]) -> None:
        """Use these tables, float32 [positions, head_dim / 2], from the next pass on."""

    def forward(
        self, rows: Pass, logits: NDArray[np.float32] | None, features: NDArray[np.float32] | None, stored: int
    ) -> None:
        """Run the pass.

        Keys and values of the last `stored` sequences, which must be chains, go straight into the pool, at prefix +
        depth, where other sequences of this pass may have them in their prefix already. Those of the m rows before them
        stay in the decoder's scratch memory until the next pass. Fills logits [m, vocab] and features [n,
        len(shape.features) * hidden], of these rows (n = m) or of all, where given.
        """

    def commit(self, rows: NDArray[np.int32], blocks: NDArray[np.int32], offsets: NDArray[np.int32]) -> None:
        """Copy keys and values of these rows of the last pass into the pool, each to its block and offset."""


class CompiledDecoder:
    """The decoder of the compiled core; see `Decoder`."""

    def __init__(self, core: Any, weights: DecoderWeights, pool: NDArray[np.float32]) -> None:
        layers = [plain_layer(layer) for layer in weights.layers]
        tensors = {
            "embedding": weights.embedding.handle,
            "head": weights.head.handle,
            "norm": weights.norm,
            "layers": layers,
        }
        self._core = core.Decoder(asdict(weights.shape), tensors, pool)

    def rope(self, cos: NDArray[np.float32], sin: NDArray[np.float32]) -> None:
        """Use these tables from the next pass on."""
        self._core.rope(cos, sin)

    def forward(
        self, rows: Pass, logits: NDArray[np.float32] | None, features: NDArray[np.float32] | None, stored: int
    ) -> None:
        """Run the pass; see `Decoder.forward`."""
        arrays = (rows.tokens, rows.parents, rows.depths, rows.first, rows.prefix, rows.tables)
        self._core.forward(arrays, logits, features, stored)

    def commit(self, rows: NDArray[np.int32], blocks: NDArray[np.int32], offsets: NDArray[np.int32]) -> None:
        """Copy keys and values of these rows of the last pass into the pool."""
        self._core.commit(rows, blocks, offsets)


def plain_layer(layer: LayerWeights) -> dict[str, Any]:
    """A layer as the compiled core takes it: handles of packed matrices, arrays, None."""
    plain: dict[str, Any] = {}
    for entry in fields(layer):
        value = getattr(layer, entry.name)
        if isinstance(value, list):
            plain[entry.name] = [part.handle for part in value]
        else:
            plain[entry.name] = getattr(value, "handle", value)
    return plain


def make_decoder(weights: DecoderWeights, pool: NDArray[np.float32]) -> Decoder:
    """The compiled decoder, or its numpy twin where the package was built without a compiler."""
    if native.core is None:
        return ReferenceDecoder(weights, pool)
    return CompiledDecoder(native.core, weights, pool)
