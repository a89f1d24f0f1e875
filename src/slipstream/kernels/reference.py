"""The numpy twin of packing and `linear`: the same operations in the same order, with an exact fused multiply-add."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.kernels import native
from slipstream.kernels.packed import BLOCKS, Packed

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

OUTPUTS_AT_ONCE = 2048
_TIE, _BELOW = 0x10000000, 0x1FFFFFFF  # the 29 bits of a float64 that a float32 has no room for


def fma(a: ArrayLike, b: ArrayLike, c: ArrayLike) -> NDArray[np.float32]:
    """a*b + c of float32 values with a single rounding, broadcast like numpy.

    The product is exact in float64. Rounding the sum to float64 and then to float32 is wrong only where the first
    rounding lands on a tie of the second (or below the normal range): there the sum is rounded to odd first.
    """
    with np.errstate(all="ignore"):
        product = np.multiply(a, b, dtype=np.float64)
        addend = np.asarray(c, np.float64)
        total = np.atleast_1d(product + addend)
        result = total.astype(np.float32)
        doubtful = (total.view(np.int64) & _BELOW) == _TIE
        doubtful |= np.abs(total) < 2.0**-125
        if doubtful.any():
            p = np.broadcast_to(product, total.shape)[doubtful]
            q = np.broadcast_to(addend, total.shape)[doubtful]
            result[doubtful] = _odd(p, q, total[doubtful]).astype(np.float32)
    return result.reshape(np.broadcast_shapes(product.shape, addend.shape))


def _odd(p: NDArray[Any], q: NDArray[Any], total: NDArray[Any]) -> NDArray[np.float64]:
    """p + q rounded to odd: where it is inexact, the neighbour with an odd last bit (Boldo and Melquiond)."""
    back = total - p
    error = (p - (total - back)) + (q - back)  # Knuth's TwoSum: exact
    bits = total.view(np.int64).copy()
    inexact = (error != 0) & np.isfinite(error) & (bits & 1 == 0)
    away = (error > 0) == (total > 0)
    bits[inexact] += np.where(away, 1, -1)[inexact]
    return bits.view(np.float64)


def _halves(raw: NDArray[np.uint8], at: int) -> NDArray[np.float32]:
    """The half at byte `at` of each block [blocks, bytes], as float32 [blocks, 1]."""
    return np.ascontiguousarray(raw[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """All low nibbles of each block, then all high ones."""
    return np.concatenate([raw & 15, raw >> 4], axis=1)


def _fifth_bits(raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Bits of each block's four bytes, lowest first, as 0 or 16: [blocks, 32]."""
    return np.unpackbits(raw, axis=1, bitorder="little") * np.uint8(16)


def _scales(raw: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The eight scales and eight minimums of Q4_K and Q5_K from their 12 bytes."""
    d, m, rest = raw[:, :4], raw[:, 4:8], raw[:, 8:]
    scale = np.concatenate([d & 63, (rest & 15) | (d >> 6) << 4], axis=1)
    return scale, np.concatenate([m & 63, rest >> 4 | (m >> 6) << 4], axis=1)


def _k_blocks(raw: NDArray[np.uint8], bits: int) -> NDArray[np.float32]:
    scale, least = _scales(raw[:, 4:16])
    d = (_halves(raw, 0) * scale)[:, :, None]
    m = (_halves(raw, 2) * least)[:, :, None]
    packed = raw[:, 16 if bits == 4 else 48 :].reshape(-1, 4, 1, 32)
    q = (packed >> np.array([0, 4], np.uint8).reshape(2, 1) & 15).reshape(-1, 8, 32)
    if bits == 5:
        q = q | (raw[:, 16:48].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(8, 1) & 1) << 4
    values: NDArray[np.float32] = d * q - m
    return values


def _q6_blocks(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)
    low = (raw[:, :128].reshape(-1, 2, 1, 64) >> shifts[::2] & 15).reshape(-1, 2, 4, 32)
    high = (raw[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3) << 4
    q = (low | high).astype(np.int8) - np.int8(32)
    d = _halves(raw, 208) * raw[:, 192:208].view(np.int8)
    values: NDArray[np.float32] = d[:, :, None] * q.reshape(-1, 16, 16)
    return values


def dequantise(type_name: str, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Weights as float32 [rows, in] from their bytes in the file, uint8 [rows, bytes]; equals gguf's."""
    raw = np.ascontiguousarray(raw)
    if type_name == "F32":
        return raw.view(np.float32)
    if type_name == "F16":
        return raw.view(np.float16).astype(np.float32)
    if type_name == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    b = raw.reshape(-1, BLOCKS[type_name][1])
    if type_name == "Q8_0":
        values = _halves(b, 0) * b[:, 2:].view(np.int8)
    elif type_name == "Q4_0":
        values = _halves(b, 0) * (_nibbles(b[:, 2:]).astype(np.int8) - np.int8(8))
    elif type_name == "Q4_1":
        values = _halves(b, 0) * _nibbles(b[:, 4:]) + _halves(b, 2)
    elif type_name == "Q5_0":
        q = _nibbles(b[:, 6:]) | _fifth_bits(b[:, 2:6])
        values = _halves(b, 0) * (q.astype(np.int8) - np.int8(16))
    elif type_name == "Q5_1":
        values = _halves(b, 0) * (_nibbles(b[:, 8:]) | _fifth_bits(b[:, 4:8])) + _halves(b, 2)
    elif type_name == "Q6_K":
        values = _q6_blocks(b)
    else:
        values = _k_blocks(b, 4 if type_name == "Q4_K" else 5)
    return np.asarray(values, np.float32).reshape(len(raw), -1)


def weights(packed: Packed, begin: int, end: int) -> NDArray[np.float32]:
    """Rows begin .. end of packed weights as float32 [rows, in]."""
    if packed.handle is None:
        return dequantise(packed.type, packed.data[begin:end])
    out = np.empty((end - begin, packed.shape[1]), np.float32)  # panels of the compiled core: it alone reads them
    native.core.unpack_rows(packed.handle, np.arange(begin, end), out)
    return out


def linear(x: NDArray[np.float32], packed: Packed, bias: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """x [m, in] times the weights' transpose, float32 [m, out]; see `pack.linear`."""
    outputs = []
    for begin in range(0, packed.shape[0], OUTPUTS_AT_ONCE):
        columns = weights(packed, begin, min(begin + OUTPUTS_AT_ONCE, packed.shape[0])).T.copy()
        outputs.append(multiply(x, columns))
    y: NDArray[np.float32] = np.concatenate(outputs, axis=1)
    if bias is not None:
        y += bias
    return y


def multiply(x: NDArray[np.float32], columns: NDArray[np.float32]) -> NDArray[np.float32]:
    """x [m, in] times `columns` [in, out], one chain of fused multiply-adds per result, inputs in order."""
    total = np.zeros((len(x), columns.shape[1]), np.float32)
    for i in range(columns.shape[0]):
        total = fma(x[:, i, None], columns[i], total)
    return total
