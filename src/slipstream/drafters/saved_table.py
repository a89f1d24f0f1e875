"""Keeping a table of successors from one run to the next: one file, written beside its place and moved there."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import numpy as np

from slipstream.core.errors import InputError
from slipstream.kernels.successors import Successors

FORMAT = 1
ARRAYS = ("ids", "weights", "owner")


def save(table: Successors, path: Path, model: str) -> None:
    """Write the table; model: fingerprint of the vocabulary it belongs to. Raises InputError when that fails."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as file:
            np.savez(
                file, format=FORMAT, model=model, ids=table.ids, weights=table.weights, owner=table.owner,
                check=checksum(table),
            )  # fmt: skip
        aside.replace(path)
    except OSError as error:
        raise InputError(
            f"recycling table {path} cannot be written ({error.strerror or error}); choose another path"
        ) from None
    finally:
        aside.unlink(missing_ok=True)


def load(table: Successors, path: Path, model: str) -> None:
    """Fill the table with a saved one. Raises InputError when it is none, damaged, or of another vocabulary."""
    remedy = "choose another path, or delete the file"
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as saved:
            found = {name: saved[name] for name in ("format", "model", "check", *ARRAYS)}
        belongs = (int(found["format"]), str(found["model"])) == (FORMAT, model)
        check = int(found["check"])
    except Exception as error:  # a damaged archive makes its reader raise nearly anything
        raise InputError(f"recycling table {path} cannot be read ({error}); {remedy}") from None
    if not belongs:
        raise InputError(f"recycling table {path} belongs to another model or version; {remedy}")
    for name in ARRAYS:
        array, own = found[name], getattr(table, name)
        if (array.shape, array.dtype) != (own.shape, own.dtype):
            raise InputError(f"recycling table {path} does not fit a vocabulary of {table.vocab_size}; {remedy}")
        own[...] = array
    if check != checksum(table) or table.ids.max() >= table.vocab_size or table.ids.min() < -1:
        raise InputError(f"recycling table {path} is damaged; {remedy}")


def checksum(table: Successors) -> int:
    """CRC of what drafts are made of."""
    return zlib.crc32(table.owner.tobytes(), zlib.crc32(table.weights.tobytes(), zlib.crc32(table.ids.tobytes())))
