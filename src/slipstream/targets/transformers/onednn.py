"""Linear layers on the CPU, packed once for oneDNN: a pass over a few rows then costs about what one row costs."""

from __future__ import annotations

import logging
from typing import Any

import torch

log = logging.getLogger("slipstream")

ROWS = 8
"""Rows of a pass that the packing is laid out for; other numbers work too."""
LIKE_LINEAR = ("Linear", "FalconLinear", "Conv1D")
"""Module classes that compute x W + b and nothing else."""
AGREEMENT = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Types that are packed, with the relative difference from the module's own result that is allowed."""


class PackedLinear(torch.nn.Module):
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


def available(dtype: Any) -> bool:
    """True when this torch has the operations for this type."""
    if dtype not in AGREEMENT or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def pack_linears(model: Any) -> int:
    """Replace the linear layers of a model on the CPU; returns how many. A shape that does not agree stays as it is."""
    replaced = 0
    agreed: dict[tuple[int, ...], bool] = {}
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if type(module).__name__ not in LIKE_LINEAR or not available(module.weight.dtype):
                continue
            weight = module.weight.t().contiguous() if type(module).__name__ == "Conv1D" else module.weight
            shape = tuple(weight.shape)
            if weight.ndim != 2 or min(shape) < 2 or agreed.get(shape) is False or _hooked(module):
                continue
            packed = PackedLinear(weight, module.bias)
            if shape not in agreed:
                agreed[shape] = _agrees(module, packed)
                if not agreed[shape]:
                    log.warning("linear layers of shape %s stay unpacked: oneDNN's results differ", shape)
                    continue
            setattr(parent, name, packed)
            replaced += 1
    return replaced


def _hooked(module: Any) -> bool:
    """True for modules that accelerate moves about or that others listen to."""
    return hasattr(module, "_hf_hook") or bool(module._forward_hooks or module._forward_pre_hooks)


def _agrees(module: Any, packed: PackedLinear) -> bool:
    rows = torch.linspace(-1, 1, 3 * packed.in_features).reshape(1, 3, -1).to(packed.dtype)
    expected, found = module(rows).float(), packed(rows).float()
    return bool((expected - found).abs().max() <= AGREEMENT[packed.dtype] * expected.abs().max().clamp_min(1e-6))
