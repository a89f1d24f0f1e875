"""Random weights of every type as files hold them, for the kernel tests."""

import numpy as np

from slipstream.kernels.packed import BLOCKS

FLOATS = {"F32": np.float32, "F16": np.float16}
HALVES_AT = {"Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}


def raw_weights(rng, type_name, rows, columns):
    """uint8 [rows, bytes]: any block bytes are valid weights once the scales are finite halves (here of both signs)."""
    if type_name in FLOATS:
        return rng.standard_normal((rows, columns)).astype(FLOATS[type_name]).view(np.uint8)
    if type_name == "BF16":
        bits = rng.standard_normal((rows, columns)).astype(np.float32).view(np.uint32)
        return np.ascontiguousarray((bits >> 16).astype(np.uint16)).view(np.uint8)
    span, size = BLOCKS[type_name]
    raw = rng.integers(0, 256, (rows, columns // span, size), dtype=np.uint8)
    for at in HALVES_AT.get(type_name, (0,)):
        raw[:, :, at : at + 2] = rng.standard_normal((rows, columns // span, 1)).astype(np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


def bits(values):
    """The bits of float32 values: equality that tells -0 from +0 and knows NaN."""
    return np.ascontiguousarray(values, np.float32).view(np.uint32)
