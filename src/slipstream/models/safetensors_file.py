"""safetensors files and sharded folders: the header read here (numpy knows no BF16), tensors as views of the map."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.core.errors import ModelError, UnsupportedError
from slipstream.kernels.packed import BLOCKS
from slipstream.models.mapped import map_file
from slipstream.models.tensor import Tensor

_SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
_PLAIN = ("F32", "F16", "BF16")
_NUMBERS = {"U8": np.uint8, "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64, "BOOL": np.bool_}
_MAX_HEADER = 100_000_000
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class SafetensorsFile:
    """One file: u64 header length, JSON header (name to dtype, shape, data_offsets), data. Raises ModelError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = map_file(path, "safetensors", header=10)
        length = int.from_bytes(self._map[:8], "little")
        if length > min(_MAX_HEADER, len(self._map) - 8):
            raise ModelError(f"{path}: damaged safetensors file (header of {length} bytes); fetch it again")
        self._base = 8 + length
        self.tensors = self._check(self._parse(self._map[8 : self._base]))
        self._bytes: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)

    def _parse(self, raw: bytes) -> dict[str, Any]:
        try:
            header = json.loads(raw)
        except (ValueError, RecursionError):
            raise ModelError(
                f"{self.path}: damaged safetensors file (its header is not JSON); fetch it again"
            ) from None
        if not isinstance(header, dict):
            raise ModelError(f"{self.path}: damaged safetensors file (its header is no table); fetch it again")
        header.pop("__metadata__", None)
        return header

    def _check(self, header: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
        """Name to (dtype, shape, start, size in bytes), every number checked."""
        found: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        for name, entry in header.items():
            try:
                kind, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
                sizes = [*shape, start, end]
                good = all(type(size) is int and size >= 0 for size in sizes) and isinstance(kind, str)
                count = int(np.prod(shape, dtype=object)) if good else 0
                good = good and start <= end and self._base + end <= len(self._map)
                good = good and (kind not in _SIZES or count * _SIZES[kind] == end - start)
            except (KeyError, TypeError, ValueError):
                good = False
            if not good:
                raise ModelError(f"{self.path}: damaged safetensors file (tensor {name!r}); fetch it again")
            found[name] = (kind, shape, self._base + start, end - start)
        return found

    def tensor(self, name: str) -> Tensor:
        """A view of one tensor. Raises UnsupportedError for types other than F32, F16 and BF16."""
        kind, shape, start, size = self.tensors[name]
        if kind not in _PLAIN:
            raise UnsupportedError(f"{self.path}: tensor {name} has type {kind}; supported are {', '.join(_PLAIN)}")
        if not shape or size == 0:
            raise ModelError(f"{self.path}: tensor {name} has shape {shape}; a weight has one value or more per row")
        raw = self._bytes[start : start + size].reshape(-1, shape[-1] * BLOCKS[kind][1])
        return Tensor(kind, shape, raw)

    def numbers(self, name: str) -> NDArray[Any]:
        """A copy of a tensor of whole numbers or truth values. Raises UnsupportedError for other types."""
        kind, shape, start, size = self.tensors[name]
        if kind not in _NUMBERS:
            raise UnsupportedError(f"{self.path}: tensor {name} has type {kind}; it must hold whole numbers")
        return self._bytes[start : start + size].copy().view(_NUMBERS[kind]).reshape(shape)


class SafetensorsFolder:
    """All shards of a folder: `model.safetensors`, or those named by the index; a missing shard is named."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._shards: dict[str, SafetensorsFile] = {}
        index = folder / INDEX
        if index.exists():
            self._owner = _read_index(index)
        elif (folder / SINGLE).exists():
            self._owner = dict.fromkeys(self._shard(SINGLE).tensors, SINGLE)
        else:
            raise ModelError(f"{folder}: holds no {SINGLE} and no {INDEX}; only safetensors weights are read")
        for file_name in sorted(set(self._owner.values())):
            self._shard(file_name)
        for name, file_name in self._owner.items():
            if name not in self._shards[file_name].tensors:
                raise ModelError(f"{folder / file_name}: tensor {name} is missing; fetch the file again")

    def _shard(self, file_name: str) -> SafetensorsFile:
        if file_name not in self._shards:
            path = self.folder / file_name
            if not path.exists():
                raise ModelError(f"{path}: this shard is missing; fetch the model again")
            self._shards[file_name] = SafetensorsFile(path)
        return self._shards[file_name]

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._owner)

    def sizes(self) -> list[tuple[str, int]]:
        """(type, bytes) of every tensor."""
        found = [self._shards[shard].tensors[name] for name, shard in self._owner.items()]
        return [(kind, size) for kind, _, _, size in found]

    def tensor(self, name: str) -> Tensor:
        """A view of one tensor. Raises ModelError when it is absent."""
        if name not in self._owner:
            raise ModelError(f"{self.folder}: tensor {name} is missing; the model is incomplete, fetch it again")
        return self._shards[self._owner[name]].tensor(name)


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name to shard; a shard outside the folder is refused."""
    try:
        owner = json.loads(path.read_bytes())["weight_map"]
        good = bool(owner) and all(_is_shard(file) for file in owner.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        good = False
    if not good:
        raise ModelError(f"{path}: damaged index (weight_map); fetch it again")
    return dict(owner)


def _is_shard(file: Any) -> bool:
    return isinstance(file, str) and Path(file).name == file and file.endswith(".safetensors")
