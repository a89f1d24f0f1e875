"""Packed weights: panels of 32 output rows made once at load (layout: csrc/linear.h), and `linear` over them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.core.errors import InputError
from slipstream.kernels import native, reference
from slipstream.kernels.memory import aligned
from slipstream.kernels.packed import BLOCKS, TYPES, Packed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["BLOCKS", "TYPES", "Packed", "from_panels", "linear", "pack", "pack_stacked", "unpack_rows"]


def _check(type_name: str, parts: Sequence[NDArray[np.uint8]], in_features: int) -> None:
    if type_name not in BLOCKS:
        raise InputError(f"weight type {type_name!r} is not supported; use one of {', '.join(TYPES)}")
    span, size = BLOCKS[type_name]
    if in_features < 1 or in_features % span:
        raise InputError(f"{type_name} weights need a multiple of {span} inputs, not {in_features}")
    for part in parts:
        if part.ndim != 2 or part.dtype != np.uint8 or part.shape[1] != in_features // span * size:
            raise InputError(
                f"{type_name} weights of {in_features} inputs are uint8 [rows, {in_features // span * size}], "
                f"not {part.dtype} {list(part.shape)}"
            )


def pack(
    type_name: str, raw: NDArray[np.uint8], in_features: int, order: NDArray[np.integer[Any]] | None = None
) -> Packed:
    """Pack weights from their bytes in the file, uint8 [out, bytes per row]; `raw` may be a read-only memory map.

    order: rows of the result, as row numbers of `raw` (quantised blocks stay as they are). Raises InputError.
    """
    return pack_stacked(type_name, [raw], in_features, order)


def pack_stacked(
    type_name: str,
    parts: Sequence[NDArray[np.uint8]],
    in_features: int,
    order: NDArray[np.integer[Any]] | None = None,
) -> Packed:
    """Pack several weights of one type and the same inputs as one, rows after rows; no copy of `parts` is made."""
    _check(type_name, parts, in_features)
    native.warn_if_slow()
    total = sum(len(part) for part in parts)
    rows = np.zeros(0, np.int64) if order is None else np.ascontiguousarray(order, np.int64)
    if rows.size and not (rows.min() >= 0 and rows.max() < total):
        raise InputError(f"row order names rows outside 0 .. {total - 1}")
    if native.core is None:
        data = np.concatenate(parts) if order is None else np.concatenate(parts)[rows]
        return Packed(type_name, (len(data), in_features), data, None)
    out, number = (total if order is None else len(rows)), TYPES.index(type_name)
    data = aligned(native.core.packed_bytes(number, out, in_features))
    native.core.pack(number, in_features, [np.ascontiguousarray(part) for part in parts], rows, data)
    return from_panels(type_name, (out, in_features), data)


def from_panels(type_name: str, shape: tuple[int, int], data: NDArray[np.uint8]) -> Packed:
    """Weights packed before (`Packed.data` of the same `info()["layout_version"]`), for instance a memory-mapped cache.

    `data` must begin on a multiple of 64 bytes. Raises InputError when it does not fit; needs the compiled core.
    """
    if native.core is None:
        raise InputError("packed panels need the compiled kernels; pack from the file instead")
    try:
        handle = native.core.PackedHandle(TYPES.index(type_name), *shape, data)
    except ValueError as error:
        raise InputError(f"packed {type_name} weights {list(shape)}: {error}; pack them again") from None
    return Packed(type_name, shape, data, handle)


def linear(
    x: NDArray[np.float32],
    packed: Packed,
    out: NDArray[np.float32] | None = None,
    bias: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """x [m, in] times the weights' transpose, float32 [m, out].

    Each result is a chain of fused multiply-adds over the inputs in order, from +0, then one addition of `bias` [out]
    if given: the same bits for any number of rows or threads, and for the unpacked weights. Raises InputError.
    """
    if x.ndim != 2 or x.shape[1] != packed.shape[1]:
        raise InputError(f"linear: x is {list(x.shape)}, the weights take [rows, {packed.shape[1]}]")
    x = np.ascontiguousarray(x, np.float32)
    out = np.empty((len(x), packed.shape[0]), np.float32) if out is None else out
    if out.shape != (len(x), packed.shape[0]) or out.dtype != np.float32 or not out.flags.c_contiguous:
        raise InputError(f"linear: out must be contiguous float32 {[len(x), packed.shape[0]]}")
    if native.core is None or packed.handle is None:
        out[:] = reference.linear(x, packed, bias)
    else:
        native.core.linear(x, packed.handle, out, bias)
    return out


def unpack_rows(packed: Packed, ids: Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[np.float32]:
    """These rows of the weights as float32 [n, in]. Raises InputError for a row that does not exist."""
    rows = np.ascontiguousarray(ids, np.int64).reshape(-1)
    if rows.size and not (rows.min() >= 0 and rows.max() < packed.shape[0]):
        raise InputError(f"unpack_rows: rows must lie in 0 .. {packed.shape[0] - 1}")
    if packed.handle is None:
        return reference.dequantise(packed.type, packed.data[rows])
    out = np.empty((len(rows), packed.shape[1]), np.float32)
    native.core.unpack_rows(packed.handle, rows, out)
    return out
