"""Files of tensors: safetensors read and written without other packages, pickled checkpoints through torch."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.core.errors import ModelError, UnsupportedError, install_hint
from slipstream.models.heads.head import Q8_BLOCK
from slipstream.models.safetensors_file import SINGLE, SafetensorsFile
from slipstream.models.tensor import Tensor

FILES = (SINGLE, "medusa_lm_head.safetensors")
PICKLED = ("pytorch_model.bin", "medusa_lm_head.pt")
_TYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_KINDS = {"int64": "I64", "int32": "I32", "bool": "BOOL", "uint8": "U8"}
_Q8_BYTES = Q8_BLOCK + 2


class Weights:
    """All tensors of a head: values as Tensor, whole numbers (d2t, t2d) as arrays."""

    def __init__(self, values: dict[str, Tensor], numbers: dict[str, NDArray[Any]]) -> None:
        self.values, self.numbers = values, numbers

    def names(self) -> list[str]:
        """Names of both."""
        return [*self.values, *self.numbers]


def read_weights(folder: Path) -> Weights:
    """The tensors in a head's folder. Raises ModelError when there are none, or none that can be read."""
    for name in FILES:
        if (folder / name).exists():
            return read_safetensors(folder / name)
    others = sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return read_safetensors(others[0])
    for name in PICKLED:
        if (folder / name).exists():
            return _read_pickled(folder / name)
    raise ModelError(f"{folder}: holds no weights ({', '.join((*FILES, *PICKLED))}); name the folder of a head")


def read_safetensors(path: Path) -> Weights:
    """All tensors of one file; uint8 matrices named `*:Q8_0` are quantised blocks."""
    file = SafetensorsFile(path)
    values: dict[str, Tensor] = {}
    numbers: dict[str, NDArray[Any]] = {}
    for name, (kind, shape, _, _) in file.tensors.items():
        if name.endswith(":Q8_0"):
            raw = file.numbers(name)
            if raw.ndim != 2 or raw.dtype != np.uint8 or raw.shape[1] % _Q8_BYTES:
                raise ModelError(f"{path}: {name} is no matrix of Q8_0 blocks; the head is damaged")
            values[name.removesuffix(":Q8_0")] = Tensor("Q8_0", (len(raw), raw.shape[1] // _Q8_BYTES * Q8_BLOCK), raw)
        elif kind in _TYPES:
            values[name] = file.tensor(name)
        else:
            numbers[name] = file.numbers(name)
        del shape
    return Weights(values, numbers)


def write_safetensors(path: Path, values: Mapping[str, Tensor], numbers: Mapping[str, NDArray[Any]]) -> None:
    """Write tensors in the order given; Q8_0 ones as bytes under `name:Q8_0`, which only slipstream reads."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts: list[bytes] = []
    offset = 0

    def add(name: str, kind: str, shape: tuple[int, ...], data: bytes) -> None:
        nonlocal offset
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        parts.append(data)
        offset += len(data)

    for name, tensor in values.items():
        raw = np.ascontiguousarray(tensor.raw)
        if tensor.type == "Q8_0":
            add(f"{name}:Q8_0", "U8", raw.shape, raw.tobytes())
        else:
            add(name, tensor.type, tensor.shape, raw.tobytes())
    for name, array in numbers.items():
        add(name, _KINDS[str(array.dtype)], array.shape, np.ascontiguousarray(array).tobytes())
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(b"".join([len(text).to_bytes(8, "little"), text, *parts]))


def _read_pickled(path: Path) -> Weights:
    """A checkpoint of torch, values only: nothing in it is executed. Raises ModelError without torch."""
    try:
        import torch
    except ImportError:
        raise ModelError(
            f"{path}: pickled weights are read by torch, which is not installed; save the head as safetensors, or "
            f"{install_hint('torch')}"
        ) from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise ModelError(f"{path}: cannot be read safely ({reason}); save the head as safetensors") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path}: holds no table of tensors; save the head as safetensors")
    values: dict[str, Tensor] = {}
    numbers: dict[str, NDArray[Any]] = {}
    for name, tensor in found.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor.is_floating_point():
            values[str(name)] = _of_torch(tensor.contiguous(), torch)
        else:
            numbers[str(name)] = tensor.numpy().copy()
    return Weights(values, numbers)


def _of_torch(tensor: Any, torch: Any) -> Tensor:
    kinds = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    if tensor.dtype not in kinds or tensor.ndim not in (1, 2):
        raise UnsupportedError(f"a tensor of type {tensor.dtype} and shape {list(tensor.shape)} cannot be read")
    kind = kinds[tensor.dtype]
    plain = tensor.view(torch.int16) if kind == "BF16" else tensor
    rows = plain.numpy().reshape(-1, tensor.shape[-1])
    return Tensor(kind, tuple(tensor.shape), np.ascontiguousarray(rows).view(np.uint8))
