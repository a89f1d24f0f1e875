"""The decoder in numpy: the slow readable twin of csrc/decoder, the same operations in the same order, bit for bit."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from slipstream.kernels.pack import unpack_rows
from slipstream.kernels.passes import BLOCK, KEY_TILE, LANES, SEGMENT, STRETCH, DecoderWeights, LayerWeights, Pass
from slipstream.kernels.reference import fma, linear

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slipstream.kernels.packed import Packed

    Floats = NDArray[np.float32]

# exp on [EXP_LOW, EXP_HIGH]: Cephes' expf (Moshier) with fused multiply-adds, at most 1 unit in the last place off.
EXP_LOW = np.float32(-87.33654)
EXP_HIGH = np.float32(88.37626)
LOG2_E = np.float32(1.44269504)
LN2_HIGH = np.float32(0.693359375)
LN2_LOW = np.float32(-2.12194440e-4)
EXP_TERMS = [
    np.float32(term)
    for term in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
]
ROUND = np.float32(12582912.0 + 127.0)
"""1.5 * 2^23 + 127: adding it rounds to a whole number and leaves number + 127, an exponent, in the lowest bits."""


def exp(x: Floats) -> Floats:
    """e^x; 0 below EXP_LOW, e^EXP_HIGH above it; NaN stays NaN."""
    low = np.where(x > EXP_HIGH, EXP_HIGH, x)
    held = np.where(low < EXP_LOW, EXP_LOW, low).astype(np.float32)
    shifted = fma(held, LOG2_E, ROUND)
    whole = shifted - ROUND
    rest = fma(whole, -LN2_LOW, fma(whole, -LN2_HIGH, held))
    poly = np.full_like(rest, EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        poly = fma(poly, rest, term)
    value = fma(poly, rest * rest, rest) + np.float32(1)
    power = (shifted.view(np.uint32) << np.uint32(23)).view(np.float32)
    result: Floats = np.where(x < EXP_LOW, np.float32(0), value * power)
    return result


def lane_sum(x: Floats, squares: bool = False) -> Floats:
    """Sum over the last axis: 16 running sums, one per lane, then a tree; with `squares`, of x * x."""
    padded = np.zeros((*x.shape[:-1], -(-x.shape[-1] // LANES) * LANES), np.float32)
    padded[..., : x.shape[-1]] = x
    lanes = np.zeros((*x.shape[:-1], LANES), np.float32)
    for start in range(0, padded.shape[-1], LANES):
        part = padded[..., start : start + LANES]
        lanes = fma(part, part, lanes) if squares else lanes + part
    width = LANES
    while width > 1:
        width //= 2
        lanes = lanes[..., :width] + lanes[..., width:]
    return lanes[..., 0]


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    mean = lane_sum(x, squares=True) / np.float32(x.shape[-1])
    scale = np.float32(1) / np.sqrt(mean + np.float32(eps))
    normed: Floats = x * scale[..., None] * weight
    return normed


def rotate(x: Floats, cos: Floats, sin: Floats) -> Floats:
    """Rotary position: halves (a, b) become (a cos - b sin, b cos + a sin). x [..., head_dim], tables [..., half]."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([fma(-b, sin, a * cos), fma(a, sin, b * cos)], axis=-1)


def silu_times(gate: Floats, up: Floats) -> Floats:
    """gate / (1 + e^-gate) * up."""
    return gate / (np.float32(1) + exp(-gate)) * up


def larger(a: Floats, b: Floats) -> Floats:
    """a where a > b, else b: the order of operands decides what becomes of NaN."""
    result: Floats = np.where(a > b, a, b)
    return result


def attend(q: Floats, keys: Floats, values: Floats) -> Floats:
    """Attention of one row. q [heads, d]; keys and values [n, kv_heads, d], in key order; returns [heads, d].

    Keys of a stretch form a softmax of their own (largest score, sum, weighted values), which takes up one segment
    after another; stretches merge in order.
    """
    state: tuple[Floats, Floats, Floats] | None = None
    short, long = STRETCH * SEGMENT, len(keys)
    edges = [*range(0, min(short, long), SEGMENT), *range(short, long, STRETCH * SEGMENT), long]
    for start, stop in itertools.pairwise(edges):
        part = attend_stretch(q, keys[start:stop], values[start:stop])
        state = part if state is None else merge(state, part)
    assert state is not None, "a row attends at least to itself"
    return state[2] * (np.float32(1) / state[1])[:, None]


def attend_stretch(q: Floats, keys: Floats, values: Floats) -> tuple[Floats, Floats, Floats]:
    """Largest score, sum of e^(score - largest) and values weighted by the same, over the keys of a stretch."""
    group = q.shape[0] // keys.shape[1]
    scale = np.float32(1.0 / np.sqrt(q.shape[1]))
    top, total, mixed = np.full(q.shape[0], -np.inf, np.float32), np.zeros(q.shape[0], np.float32), np.zeros_like(q)
    for start in range(0, len(keys), SEGMENT):
        k = np.repeat(keys[start : start + SEGMENT], group, axis=1)
        v = np.repeat(values[start : start + SEGMENT], group, axis=1)
        scores = np.zeros((q.shape[0], len(k)), np.float32)
        for i in range(q.shape[1]):
            scores = fma(q[:, i, None], k[:, :, i].T, scores)
        scores = scores * scale
        before = top
        for j in range(len(k)):
            top = larger(top, scores[:, j])
        shrink = exp(before - top)
        weights = exp(scores - top[:, None])
        total = fma(total, shrink, lane_sum(weights))
        mixed = mixed * shrink[:, None]
        for j in range(len(k)):
            mixed = fma(weights[:, j, None], v[j], mixed)
    return top, total, mixed


def merge(old: tuple[Floats, Floats, Floats], new: tuple[Floats, Floats, Floats]) -> tuple[Floats, Floats, Floats]:
    """Join two softmax parts (largest score, sum, weighted values), the earlier keys first."""
    top = larger(old[0], new[0])
    a, b = exp(old[0] - top), exp(new[0] - top)
    return top, fma(old[1], a, new[1] * b), fma(old[2], a[:, None], new[2] * b[:, None])


class ReferenceDecoder:
    """The numpy twin; see `Decoder`."""

    def __init__(self, weights: DecoderWeights, pool: Floats) -> None:
        self.weights = weights
        self.shape = weights.shape
        self.pool = pool
        self._cos = self._sin = np.zeros((0, 0), np.float32)
        self._keys = self._values = np.zeros((0, 0, 0, 0), np.float32)

    def rope(self, cos: Floats, sin: Floats) -> None:
        """Use these tables from the next pass on."""
        self._cos, self._sin = cos, sin

    def forward(self, rows: Pass, logits: Floats | None, features: Floats | None, stored: int) -> None:
        """Run the pass; see `Decoder.forward`. What is stored goes first: it may be in the prefixes of the others."""
        sequences = len(rows.prefix)
        if 0 < stored < sequences:
            aside = int(rows.first[sequences - stored])
            theirs = features[aside:] if features is not None and len(features) > aside else None
            self.forward(rows.part(sequences - stored, sequences), None, theirs, stored)
            self.forward(rows.part(0, sequences - stored), logits, None if features is None else features[:aside], 0)
            return
        x = unpack_rows(self.weights.embedding, rows.tokens)
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            x = self.run(rows, x, rms_norm(x, self.weights.layers[0].attention_norm, self.shape.eps), features)
            if logits is not None:
                logits[:] = linear(rms_norm(x, self.weights.norm, self.shape.eps), self.weights.head)
        if stored:
            self.store_all(rows)

    def run(self, rows: Pass, x: Floats, normed: Floats, features: Floats | None = None) -> Floats:
        """All layers over rows that enter as x, and as `normed` into the queries, keys and values of the first one."""
        shape = self.shape
        room = np.zeros((shape.layers, rows.rows, shape.kv_heads, shape.head_dim), np.float32)
        self._keys = np.concatenate([self._keys[:, : rows.older], room], axis=1) if rows.older else room
        self._values = np.concatenate([self._values[:, : rows.older], room], axis=1) if rows.older else room.copy()
        for index, layer in enumerate(self.weights.layers):
            self._keep_features(features, index, x)
            x = self._layer(index, normed if index == 0 else rms_norm(x, layer.attention_norm, shape.eps), x, rows)
        self._keep_features(features, shape.layers, x)
        return x

    def commit(self, rows: NDArray[np.int32], blocks: NDArray[np.int32], offsets: NDArray[np.int32]) -> None:
        """Copy keys and values of these rows of the last pass into the pool."""
        for row, block, offset in zip(rows.tolist(), blocks.tolist(), offsets.tolist(), strict=True):
            for layer in range(self.shape.layers):
                keys, values = self._tiles(block, layer)
                keys[:, offset // KEY_TILE, :, offset % KEY_TILE] = self._keys[layer, row]
                values[:, offset, : self.shape.head_dim] = self._values[layer, row]

    def store_all(self, rows: Pass) -> None:
        """Keys and values of the last pass, which was over chains, go into the pool."""
        for sequence, prefix in enumerate(rows.prefix.tolist()):
            span = np.arange(rows.first[sequence], rows.first[sequence + 1], dtype=np.int32)
            positions = prefix + rows.depths[span]
            self.commit(span, rows.tables[sequence, positions // BLOCK], positions % BLOCK)

    def _keep_features(self, features: Floats | None, layer: int, x: Floats) -> None:
        width = self.shape.hidden
        if features is not None:
            for place, wanted in enumerate(self.shape.features):
                if wanted == layer:
                    features[:, place * width : (place + 1) * width] = x

    def _layer(self, index: int, normed: Floats, x: Floats, rows: Pass) -> Floats:
        shape, layer = self.shape, self.weights.layers[index]
        q, k, v = self._project(layer, normed)
        positions = np.repeat(rows.prefix, np.diff(rows.first)) + rows.depths
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        q = rotate(q, cos, sin)
        self._keys[index, rows.older :] = rotate(k, cos, sin)
        self._values[index, rows.older :] = v
        mixed = np.stack([self._attend_row(index, row, q[row], rows) for row in range(rows.rows)])
        x = x + linear(mixed.reshape(rows.rows, shape.q_width), layer.output, layer.output_bias)
        normed = rms_norm(x, layer.mlp_norm, shape.eps)
        both = with_bias(stacked(layer.gate_up, normed), layer.gate_up_bias)
        hidden = silu_times(both[:, : shape.intermediate], both[:, shape.intermediate :])
        return x + linear(hidden, layer.down, layer.down_bias)

    def _project(self, layer: LayerWeights, x: Floats) -> tuple[Floats, Floats, Floats]:
        shape = self.shape
        both = with_bias(stacked(layer.qkv, x), layer.qkv_bias).reshape(len(x), -1, shape.head_dim)
        q = both[:, : shape.heads]
        k = both[:, shape.heads : shape.heads + shape.kv_heads]
        v = both[:, shape.heads + shape.kv_heads :]
        if layer.q_norm is not None:
            q = rms_norm(q, layer.q_norm, shape.eps)
        if layer.k_norm is not None:
            k = rms_norm(k, layer.k_norm, shape.eps)
        return q, k, v

    def _attend_row(self, layer: int, row: int, q: Floats, rows: Pass) -> Floats:
        """Attention of one row over its committed prefix, then its ancestors in depth order and itself."""
        sequence = int(np.searchsorted(rows.first, row, side="right")) - 1
        prefix = int(rows.prefix[sequence])
        path = [rows.older + row]
        while rows.parents[path[-1]] >= 0:
            path.append(int(rows.parents[path[-1]]))
        path.reverse()
        tiles = [self._tiles(int(block), layer) for block in rows.tables[sequence, : -(-prefix // BLOCK)]]
        width = self.shape.head_dim
        keys = [keys.transpose(1, 3, 0, 2).reshape(BLOCK, *keys.shape[::2]) for keys, _ in tiles]
        values = [values.transpose(1, 0, 2)[:, :, :width] for _, values in tiles]
        empty = np.zeros((0, self.shape.kv_heads, width), np.float32)
        cached_keys = np.concatenate([*keys, empty])[:prefix]
        cached_values = np.concatenate([*values, empty])[:prefix]
        all_keys = np.concatenate([cached_keys, self._keys[layer, path]])
        all_values = np.concatenate([cached_values, self._values[layer, path]])
        return attend(q, all_keys, all_values)

    def _tiles(self, block: int, layer: int) -> tuple[Floats, Floats]:
        """Views of one layer of a block: keys [kv_heads, n, head_dim, KEY_TILE], values [kv_heads, BLOCK, stride]."""
        shape = self.shape
        part = self.pool[block, layer * shape.layer_floats : (layer + 1) * shape.layer_floats]
        heads, split = part.reshape(shape.kv_heads, -1), shape.head_dim * BLOCK
        keys = heads[:, :split].reshape(shape.kv_heads, -1, shape.head_dim, KEY_TILE)
        return keys, heads[:, split:].reshape(shape.kv_heads, BLOCK, shape.value_stride)


def stacked(parts: list[Packed], x: Floats) -> Floats:
    """Products with matrices that share their input, side by side."""
    return np.concatenate([linear(x, part) for part in parts], axis=1)


def with_bias(x: Floats, bias: Floats | None) -> Floats:
    """x plus the bias of its layer, if it has one."""
    return x if bias is None else x + bias
