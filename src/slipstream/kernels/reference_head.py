"""A drafting head in numpy: the slow readable twin of csrc/head, the same operations in the same order, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from slipstream.kernels.head_weights import HeadWeights, Made
from slipstream.kernels.pack import unpack_rows
from slipstream.kernels.passes import DecoderWeights
from slipstream.kernels.reference import linear
from slipstream.kernels.reference_decoder import ReferenceDecoder, rms_norm, with_bias

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slipstream.kernels.passes import Pass

    Floats = NDArray[np.float32]


class ReferenceHead:
    """The numpy twin; see `EagleHead`."""

    def __init__(self, weights: HeadWeights, pool: Floats) -> None:
        self.weights = weights
        unused = np.ones(weights.shape.hidden, np.float32)
        decoder = DecoderWeights(
            shape=weights.shape, embedding=weights.embedding, layers=weights.layers, norm=unused, head=weights.head
        )
        self._decoder = ReferenceDecoder(decoder, pool)

    def rope(self, cos: Floats, sin: Floats) -> None:
        """Use these tables from the next pass on."""
        self._decoder.rope(cos, sin)

    def forward(self, rows: Pass, given: Floats, fresh: bool, store: bool, wanted: NDArray[np.int32]) -> Made:
        """Run the pass; see `EagleHead.forward`."""
        w = self.weights
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            embedded = unpack_rows(w.embedding, rows.tokens)
            x, normed = (self._enter_three if w.three else self._enter_one)(embedded, given, fresh)
            hidden = self._decoder.run(rows, x, normed)[wanted]
            if store:
                self._decoder.store_all(rows)
            seen = hidden if w.norm is None else rms_norm(hidden, w.norm, w.shape.eps)
            logits = linear(seen, w.head) if len(seen) else np.zeros((0, w.shape.vocab), np.float32)
            if w.markov_in is not None and w.markov_out is not None and len(seen):
                logits = logits + linear(unpack_rows(w.markov_in, rows.tokens[wanted]), w.markov_out)
        return Made(hidden, seen, logits)

    def start(self, rows: Pass, given: Floats, wanted: NDArray[np.int32]) -> None:
        """The whole pass at once; see `EagleHead.start`."""
        self._begun = self.forward(rows, given, True, True, wanted)

    def finish(self) -> Made:
        """The results of the pass that was begun."""
        return self._begun

    def _features(self, given: Floats) -> Floats:
        w = self.weights
        if w.feature_norm is None:
            return given
        parts = given.reshape(len(given), w.features, w.feature)
        return rms_norm(parts, w.feature_norm.reshape(w.features, w.feature), w.feature_eps).reshape(len(given), -1)

    def _enter_three(self, embedded: Floats, given: Floats, fresh: bool) -> tuple[Floats, Floats]:
        w, eps = self.weights, self.weights.shape.eps
        assert w.hidden_norm is not None
        h = with_bias(linear(self._features(given), w.fc), w.fc_bias) if fresh else given
        embedding = rms_norm(embedded, w.layers[0].attention_norm, eps)
        normed = rms_norm(h, w.hidden_norm, eps)
        x = normed if w.norm_before_residual else h
        if w.residual is not None:
            x = x + linear(embedding, w.residual)
        return x, np.concatenate([embedding, normed], axis=1)

    def _enter_one(self, embedded: Floats, given: Floats, fresh: bool) -> tuple[Floats, Floats]:
        feature = self._features(given) if fresh else given
        x = with_bias(linear(np.concatenate([embedded, feature], axis=1), self.weights.fc), self.weights.fc_bias)
        return x, x
