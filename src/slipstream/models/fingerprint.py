"""Which weights these are, whatever they are called and wherever they lie."""

from __future__ import annotations

import hashlib
from pathlib import Path

WEIGHTS = ("*.gguf", "*.safetensors")
DIGITS = 12


def weights_fingerprint(path: Path) -> str:
    """Hash of the bytes of a model's weights (a file, or a folder of them), as 12 hexadecimal digits.

    Reads them all: about a second per gigabyte when they are in memory already.
    """
    files = sorted(found for kind in WEIGHTS for found in path.glob(kind)) if path.is_dir() else [path]
    whole = hashlib.blake2b()
    for file in files:
        with file.open("rb") as stream:
            whole.update(hashlib.file_digest(stream, "blake2b").digest())
    return whole.hexdigest()[:DIGITS]
