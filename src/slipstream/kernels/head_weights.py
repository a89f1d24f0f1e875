"""What a drafting head of the EAGLE family is made of, and what it gives: shared by the compiled core and its twin."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from slipstream.kernels.packed import Packed
    from slipstream.kernels.passes import DecoderShape, LayerWeights


@dataclass(slots=True, kw_only=True)
class HeadWeights:
    """All weights of a head; those it does not have are None.

    shape: of its layers; vocab counts the tokens it can draft, features is (layers,). three: EAGLE-3, whose fc takes
    all features of a row and whose first layer's queries, keys and values take norm(embedding) beside norm(h); else
    EAGLE-1, whose fc takes embedding and feature. The norm of the embedding is attention_norm of the first layer.
    feature: floats of one feature. feature_norm [features * feature]. residual [hidden, hidden]. markov_in [rows of the
    embedding, rank], markov_out [vocab, rank]. norm: None for EAGLE-1.
    """

    shape: DecoderShape
    three: bool
    norm_before_residual: bool
    feature: int
    features: int
    feature_eps: float
    embedding: Packed
    head: Packed
    fc: Packed
    layers: list[LayerWeights]
    norm: NDArray[np.float32] | None = None
    fc_bias: NDArray[np.float32] | None = None
    feature_norm: NDArray[np.float32] | None = None
    hidden_norm: NDArray[np.float32] | None = None
    residual: Packed | None = None
    markov_in: Packed | None = None
    markov_out: Packed | None = None

    def plain(self) -> dict[str, Any]:
        """Everything but shape and layers, by name."""
        return {name.name: getattr(self, name.name) for name in fields(self) if name.name not in ("shape", "layers")}


@dataclass(frozen=True, slots=True)
class Made:
    """Of the rows asked for: hidden states as they leave the last layer, the same as the LM head sees them, logits."""

    hidden: NDArray[np.float32]
    normed: NDArray[np.float32]
    logits: NDArray[np.float32]
