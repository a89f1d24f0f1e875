"""Linear layers on the CPU, packed once at load: a pass over a few rows then costs about what one row costs.

float32 runs on our compiled core, whose rows do not depend on each other and whose threads sleep between calls;
bfloat16 on oneDNN, which has the CPU's bf16 instructions. oneDNN also serves float32 where there is no compiled core.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from slipstream.kernels import native, pack, unpack_rows
from slipstream.kernels.memory import together

log = logging.getLogger("slipstream")

ROWS = 8
"""Rows of a pass that oneDNN's packing is laid out for; other numbers work too."""
LIKE_LINEAR = ("Linear", "FalconLinear", "Conv1D")
"""Module classes that compute x W + b and nothing else."""
AGREEMENT = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Types that are packed, with the relative difference from the module's own result that is allowed."""
SMALL_WORK = 1 << 14
"""Rows times keys up to which torch's own part of a pass gains nothing from further threads."""


class CoreLinear(torch.nn.Module):
    """x W + b in float32 on the compiled core. The original weight is not kept."""

    def __init__(self, weight: Any, bias: Any) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.dtype = weight.dtype
        raw = weight.detach().contiguous().numpy().view(np.uint8).reshape(self.out_features, -1)
        self.packed = pack("F32", raw, self.in_features)
        self._bias = None if bias is None else bias.detach().contiguous().numpy()

    @property
    def weight(self) -> Any:
        """The weight [out, in], unpacked: for code that asks a module for it."""
        return torch.from_numpy(unpack_rows(self.packed, range(self.out_features)))

    def forward(self, rows: Any) -> Any:
        """rows [..., in] to [..., out]."""
        flat = rows.reshape(-1, self.in_features).contiguous()
        made = torch.empty((flat.shape[0], self.out_features))
        native.core.linear(flat.numpy(), self.packed.handle, made.numpy(), self._bias)
        return made.view(*rows.shape[:-1], self.out_features)


class OneDnnLinear(torch.nn.Module):
    """x W + b over a weight that only oneDNN can read. The original weight is not kept."""

    def __init__(self, weight: Any, bias: Any) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.dtype = weight.dtype
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)

    @property
    def weight(self) -> Any:
        """The weight [out, in], unpacked: for code that asks a module for it."""
        return self.packed.to_dense()

    def forward(self, rows: Any) -> Any:
        """rows [..., in] to [..., out]."""
        return torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")


PACKED = (CoreLinear, OneDnnLinear)


def packer(dtype: Any) -> Any:
    """The class that packs weights of this type here; None when there is none."""
    if dtype == torch.float32 and native.core is not None:
        return CoreLinear
    if dtype not in AGREEMENT or not torch.backends.mkldnn.is_available():
        return None
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    there = hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return OneDnnLinear if there else None


@together()
def pack_linears(model: Any) -> int:
    """Replace the linear layers of a model on the CPU; returns how many. A shape that does not agree stays as it is."""
    replaced = 0
    agreed: dict[tuple[int, ...], bool] = {}
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if type(module).__name__ not in LIKE_LINEAR or packer(module.weight.dtype) is None:
                continue
            weight = module.weight.t().contiguous() if type(module).__name__ == "Conv1D" else module.weight
            shape = tuple(weight.shape)
            if weight.ndim != 2 or min(shape) < 2 or agreed.get(shape) is False or _hooked(module):
                continue
            packed = packer(weight.dtype)(weight, module.bias)
            if shape not in agreed:
                agreed[shape] = _agrees(module, packed)
                if not agreed[shape]:
                    log.warning("linear layers of shape %s stay unpacked: packed results differ", shape)
                    continue
            setattr(parent, name, packed)
            replaced += 1
    return replaced


def on_core(model: Any) -> bool:
    """True when linear layers of the model run on the compiled core."""
    return any(isinstance(module, CoreLinear) for module in model.modules())


@contextmanager
def one_thread(wanted: bool) -> Iterator[None]:
    """While this lasts, torch computes on one thread if `wanted`.

    For small passes of models on the core: torch's threads spin for a while after each operation and would take the
    core's processors.
    """
    before = torch.get_num_threads()
    if wanted:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if wanted:
            torch.set_num_threads(before)


def _hooked(module: Any) -> bool:
    """True for modules that accelerate moves about or that others listen to."""
    return hasattr(module, "_hf_hook") or bool(module._forward_hooks or module._forward_pre_hooks)


def _agrees(module: Any, packed: Any) -> bool:
    with torch.inference_mode():
        rows = torch.linspace(-1, 1, 3 * packed.in_features).reshape(1, 3, -1).to(packed.dtype)
        expected, found = module(rows).float(), packed(rows).float()
    return bool((expected - found).abs().max() <= AGREEMENT[packed.dtype] * expected.abs().max().clamp_min(1e-6))
