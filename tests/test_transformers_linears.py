"""Packed linear layers of the transformers runtime: what they compute, what depends on what, what is refused."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from slipstream.kernels import native
from slipstream.targets.base import RowInput

torch_beds = pytest.importorskip("torch_beds", reason="needs torch: pip install 'slipstream[torch]'")
torch = torch_beds.torch

from slipstream.targets.transformers import linears  # noqa: E402
from slipstream.targets.transformers.model import TransformersTarget  # noqa: E402

needs_core = pytest.mark.skipif(native.core is None, reason="needs the compiled core")
KINDS = [
    pytest.param(linears.CoreLinear, torch.float32, marks=needs_core),
    pytest.param(linears.OneDnnLinear, torch.float32),
    pytest.param(linears.OneDnnLinear, torch.bfloat16),
]


def layer(bias: bool = True, inputs: int = 96, outputs: int = 200, dtype=torch.float32):
    torch.manual_seed(3)
    return torch.nn.Linear(inputs, outputs, bias=bias).to(dtype)


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_packed_linears_equal_the_layer(kind, dtype):
    if kind is linears.OneDnnLinear and dtype == torch.bfloat16 and linears.packer(dtype) is None:
        pytest.skip("this CPU has no bf16 instructions")
    for bias in (True, False):
        own = layer(bias, dtype=dtype)
        packed = kind(own.weight, own.bias)
        rows = torch.randn(2, 5, 96, dtype=dtype)
        with torch.inference_mode():
            right, found = own(rows).float(), packed(rows).float()
            strided = packed(rows.transpose(0, 1)).transpose(0, 1).float()
        assert found.shape == (2, 5, 200)
        assert float((found - right).abs().max() / right.abs().max()) < linears.AGREEMENT[dtype]
        assert torch.equal(strided, found)
        assert torch.equal(packed.weight, own.weight)


@needs_core
def test_rows_on_the_core_do_not_depend_on_their_number():
    own = layer()
    packed = linears.CoreLinear(own.weight, own.bias)
    rows = torch.randn(33, 96)
    with torch.inference_mode():
        whole = packed(rows)
        for count in (1, 2, 5, 8, 16):
            assert torch.equal(packed(rows[:count]), whole[:count])


def test_the_check_runs_on_the_packed_model():
    """What is proved at load is what runs: packed linears, our attention."""
    target = TransformersTarget(torch_beds.tiny("llama"))
    kinds = [type(module) for module in target.model.modules()]
    assert target.packed == sum(kind in linears.PACKED for kind in kinds) == 3 * 7 + 1
    assert torch.nn.Linear not in kinds
    assert target.on_core == (native.core is not None)
    assert target.weights_bytes == TransformersTarget(torch_beds.tiny("llama"), pack=False).weights_bytes


def test_planted_packing_that_computes_something_else_stays_out(monkeypatch, caplog):
    class Wrong(linears.packer(torch.float32)):
        def forward(self, rows):
            return super().forward(rows) * 1.01

    monkeypatch.setattr(linears, "packer", lambda dtype: Wrong)
    with caplog.at_level(logging.WARNING, logger="slipstream"):
        assert linears.pack_linears(torch_beds.tiny("llama")) == 0
    assert "packed results differ" in caplog.text


def test_without_a_compiled_core_onednn_serves(monkeypatch):
    plain = TransformersTarget(torch_beds.tiny("qwen2"))
    right = plain.forward([RowInput(plain.open(), 5)]).logits[0]
    monkeypatch.setattr(native, "core", None)
    assert linears.packer(torch.float32) is linears.OneDnnLinear
    target = TransformersTarget(torch_beds.tiny("qwen2"))
    assert target.packed == plain.packed
    assert not target.on_core
    assert "oneDNN" in target.kernels()
    found = target.forward([RowInput(target.open(), 5)]).logits[0]
    np.testing.assert_allclose(found, right, atol=1e-4 * np.abs(right).max())


def test_small_passes_leave_the_processors_to_the_core(monkeypatch):
    """Torch's threads are one during them, what they were after them, also after an error."""
    target = TransformersTarget(torch_beds.tiny("llama"))
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        target.model.register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
        slot = target.open()
        target.forward([RowInput(slot, 5)])
        assert seen == [1 if target.on_core else 2]
        target.on_core = False
        target.forward([RowInput(slot, 5)])
        assert seen[1] == torch.get_num_threads() == 2
        with pytest.raises(ValueError, match="inside"), linears.one_thread(True):
            raise ValueError("inside")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
