"""Files of weights are mapped, not read: what is never looked at costs neither time nor memory."""

from __future__ import annotations

import mmap
from pathlib import Path

from slipstream.core.errors import ModelError


def map_file(path: Path, kind: str, header: int) -> mmap.mmap:
    """The file's bytes, read-only. Raises ModelError when it cannot be read or is shorter than its kind's header."""
    try:
        with path.open("rb") as file:
            if path.stat().st_size < header:
                raise ModelError(f"{path}: not a {kind} file (shorter than its header); fetch it again")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error})") from None
