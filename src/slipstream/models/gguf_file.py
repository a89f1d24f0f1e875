"""GGUF files: metadata parsed straight from the mapped file, tensors as views of it.

Layout (versions 2 and 3, little-endian): "GGUF", u32 version, u64 tensors, u64 keys; the keys, each a name, a u32 type
and a value; the tensor table, each a name, u32 dimensions, u64 sizes (columns first), u32 type, u64 offset; padding;
the data. Every length is checked against what is left of the file before it is believed.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from slipstream.core.errors import ModelError, UnsupportedError
from slipstream.kernels.packed import BLOCKS
from slipstream.models.mapped import map_file
from slipstream.models.tensor import Tensor

_SCALARS = {
    kind: struct.Struct(f"<{letter}")
    for kind, letter in {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}.items()
}
"""u8, i8, u16, i16, u32, i32, f32, u64, i64, f64."""
_BOOL, _STRING, _ARRAY = 7, 8, 9
_TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
_MAX_NAME = 65535


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """type: its GGUF name. shape: rows before columns. start: byte offset in the file. size: bytes, None if unknown."""

    type: str
    shape: tuple[int, ...]
    start: int
    size: int | None


class GGUFFile:
    """An open file. metadata: key to int, float, bool, str or list; tensors: name to TensorInfo, in file order.

    Raises ModelError when the file cannot be read, is cut off or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = map_file(path, "GGUF", header=24)
        reader = _Reader(self._map, path)
        self.version, tensor_count, key_count = reader.header()
        self.metadata: Mapping[str, Any] = reader.keys(key_count)
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 20:
            reader.fail(f"general.alignment is {alignment!r}, not a power of two")
        self.tensors: Mapping[str, TensorInfo] = reader.tensor_table(tensor_count, alignment)
        self._bytes: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)

    def tensor(self, name: str) -> Tensor:
        """A view of one tensor. Raises ModelError when it is absent, UnsupportedError when its type is unknown."""
        info = self.tensors.get(name)
        if info is None:
            raise ModelError(f"{self.path}: tensor {name} is missing; the file is incomplete, fetch it again")
        if info.type not in BLOCKS or info.size is None:
            raise UnsupportedError(
                f"{self.path}: tensor {name} has type {info.type}; supported types are {', '.join(BLOCKS)}"
            )
        rows = 1
        for size in info.shape[:-1]:
            rows *= size
        raw = self._bytes[info.start : info.start + info.size].reshape(rows, -1)
        return Tensor(info.type, info.shape, raw)


class _Reader:
    """A cursor over the mapped file; every read is checked against the end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.end = len(data)
        self.at = 0

    def fail(self, reason: str) -> NoReturn:
        raise ModelError(f"{self.path}: damaged GGUF file ({reason}); fetch it again")

    def need(self, size: int, what: str) -> None:
        """Refuse to read past the end."""
        if size > self.end - self.at:
            self.fail(f"{what} at byte {self.at} goes past the end of the file")

    def number(self, kind: int) -> Any:
        """One scalar of a GGUF type."""
        form = _SCALARS[kind]
        self.need(form.size, "a number")
        value = form.unpack_from(self.data, self.at)[0]
        self.at += form.size
        return value

    def string(self, what: str, limit: int | None = None) -> str:
        """A u64 length and that many bytes of UTF-8."""
        length = self.number(10)
        if limit is not None and length > limit:
            self.fail(f"{what} is {length} bytes long")
        self.need(length, what)
        raw = self.data[self.at : self.at + length]
        self.at += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} before byte {self.at} is not UTF-8")

    def header(self) -> tuple[int, int, int]:
        """(version, tensors, keys)."""
        if self.data[:4] != b"GGUF":
            raise ModelError(f"{self.path}: not a GGUF file (it starts with {self.data[:4]!r})")
        self.at = 4
        version = self.number(4)
        if version not in (2, 3):
            if version & 0xFFFF == 0:
                raise UnsupportedError(f"{self.path}: big-endian GGUF is not supported; convert it to little-endian")
            raise UnsupportedError(f"{self.path}: GGUF version {version} is not supported; versions 2 and 3 are")
        tensors, keys = self.number(10), self.number(10)
        # The smallest key takes 13 bytes, the smallest tensor entry 24: larger counts cannot be true.
        self.need(keys * 13 + tensors * 24, f"a table of {keys} keys and {tensors} tensors")
        return version, tensors, keys

    def keys(self, count: int) -> dict[str, Any]:
        """The metadata."""
        found: dict[str, Any] = {}
        for _ in range(count):
            name = self.string("a key", _MAX_NAME)
            if name in found:
                self.fail(f"key {name!r} appears twice")
            found[name] = self.value(self.number(4), name)
        return found

    def value(self, kind: int, name: str) -> Any:
        """One metadata value; arrays become lists."""
        if kind in _SCALARS:
            return self.number(kind)
        if kind == _BOOL:
            return self.booleans(1, name)[0]
        if kind == _STRING:
            return self.string(f"the value of {name}")
        if kind != _ARRAY:
            self.fail(f"key {name!r} has unknown type {kind}")
        kind, count = self.number(4), self.number(10)
        if kind in _SCALARS:
            form = _SCALARS[kind]
            self.need(count * form.size, f"array {name}")
            numbers = np.frombuffer(self.data, dtype=f"<{form.format[1:]}", count=count, offset=self.at)
            self.at += count * form.size
            return numbers.tolist()
        if kind == _BOOL:
            return self.booleans(count, name)
        if kind != _STRING:
            self.fail(f"array {name!r} has unknown or nested type {kind}")
        return self.strings(count, name)

    def booleans(self, count: int, name: str) -> list[bool]:
        """Bytes that are 0 or 1."""
        self.need(count, f"the value of {name}")
        raw = self.data[self.at : self.at + count]
        self.at += count
        if raw.strip(b"\0\1"):
            self.fail(f"{name} is neither true nor false")
        return [byte == 1 for byte in raw]

    def strings(self, count: int, name: str) -> list[str]:
        """An array of strings; the vocabulary has hundreds of thousands, so the loop is kept bare."""
        self.need(count * 8, f"array {name}")
        data, at, end, length_at = self.data, self.at, self.end, _SCALARS[10].unpack_from
        pieces: list[bytes] = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + length_at(data, at)[0]
                if at > end:
                    self.fail(f"array {name} goes past the end of the file")
                pieces.append(data[start:at])
            self.at = at
            return [piece.decode("utf-8") for piece in pieces]
        except struct.error:
            self.fail(f"array {name} goes past the end of the file")
        except UnicodeDecodeError:
            self.fail(f"array {name} holds a string that is not UTF-8")

    def tensor_table(self, count: int, alignment: int) -> dict[str, TensorInfo]:
        """All tensors, checked to lie inside the file, aligned and apart from each other."""
        entries = [self.tensor_entry() for _ in range(count)]
        base = (self.at + alignment - 1) // alignment * alignment
        found: dict[str, TensorInfo] = {}
        for name, kind, shape, offset in entries:
            if name in found:
                self.fail(f"tensor {name!r} appears twice")
            type_name = _TYPE_NAMES.get(kind, f"number {kind}")
            size = self.tensor_bytes(name, type_name, shape)
            if offset % alignment:
                self.fail(f"tensor {name!r} is not aligned to {alignment} bytes")
            if base + offset + (size or 0) > self.end:
                self.fail(f"tensor {name!r} goes past the end of the file: it was cut off")
            found[name] = TensorInfo(type_name, shape, base + offset, size)
        end = base
        for name, info in sorted(found.items(), key=lambda item: item[1].start):
            if info.start < end:
                self.fail(f"tensor {name!r} overlaps another")
            end = info.start + (info.size or 0)
        return found

    def tensor_entry(self) -> tuple[str, int, tuple[int, ...], int]:
        """(name, type number, shape with rows first, offset) of one line of the table."""
        name = self.string("a tensor name", _MAX_NAME)
        dimensions = self.number(4)
        if not 1 <= dimensions <= 4:
            self.fail(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self.number(10) for _ in range(dimensions))[::-1]
        if 0 in shape:
            self.fail(f"tensor {name!r} has shape {shape}")
        return name, self.number(4), shape, self.number(10)

    def tensor_bytes(self, name: str, type_name: str, shape: tuple[int, ...]) -> int | None:
        """Size of a tensor of a supported type."""
        if type_name not in BLOCKS:
            return None
        values, size = BLOCKS[type_name]
        if shape[-1] % values:
            self.fail(f"tensor {name!r} has {shape[-1]} columns, not a multiple of {values} as {type_name} needs")
        total = shape[-1] // values * size
        for rows in shape[:-1]:
            total *= rows
        return total
