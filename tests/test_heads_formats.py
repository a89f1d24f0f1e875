"""Heads on disk: every format reads back what was written, value by value and flag by flag."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

import head_beds
from slipstream.core.errors import ModelError, UnsupportedError
from slipstream.models.heads.formats import read_head, write_head
from slipstream.models.heads.head import store
from slipstream.models.heads.weights import read_safetensors, write_safetensors

FORMATS = {"eagle3": ("speculators", "eagle3"), "medusa": ("medusa",), "eagle1": ()}


def rows(ids):
    return np.random.default_rng(3).standard_normal((101, 48), np.float32)[ids]


def same(one, other):
    assert one.config == other.config
    assert np.array_equal(one.ids, other.ids)
    assert one.tensors.keys() == other.tensors.keys()
    for name, values in one.arrays().items():
        assert np.array_equal(values, other.arrays()[name]), name
    assert not other.unused


@pytest.mark.parametrize("storage", ["F32", "F16", "BF16", "Q8_0"])
@pytest.mark.parametrize("name", head_beds.KINDS)
def test_slipstream_format_keeps_everything(name, storage, tmp_path):
    head = head_beds.head(name, storage=storage)
    assert write_head(tmp_path / "head", head) == []
    same(head, read_head(tmp_path / "head"))


@pytest.mark.parametrize("name", head_beds.KINDS)
def test_foreign_formats_keep_everything(name, tmp_path):
    head = head_beds.head(name, storage="F16")
    for form in FORMATS[head.config.kind]:
        if form == "eagle3" and head.config.layers > 1:
            continue
        write_head(tmp_path / form, head, form, rows)
        same(head, read_head(tmp_path / form))


def rewritten(tmp_path, form, change, head=None):
    """A head written in a format, its config.json changed as other tools have it, and read."""
    head = head or head_beds.head("eagle3", feature_layers=(1, 2, 3))
    write_head(tmp_path / "head", head, form)
    place = tmp_path / "head" / "config.json"
    table = json.loads(place.read_text())
    table.pop("slipstream")
    change(table)
    place.write_text(json.dumps(table))
    return read_head(tmp_path / "head")


def test_specforge_layer_ids_name_outputs(tmp_path):
    def change(table):
        table.pop("eagle_aux_hidden_state_layer_ids")
        table.pop("norm_before_residual")

    found = rewritten(tmp_path, "eagle3", change)
    assert found.config.feature_layers == (1, 2, 3)
    assert "[0, 1, 2] inside eagle_config name outputs" in found.notices[0]


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("form", ["speculators", "eagle3"])
def test_flags_sit_at_the_top_or_inside_eagle_config(form, inside, tmp_path):
    def change(table):
        flag = table.pop("norm_before_residual")
        inner = table.setdefault("eagle_config", {})
        inner.pop("norm_before_residual", None)
        (inner if inside else table)["norm_before_residual"] = not flag

    assert rewritten(tmp_path, form, change).config.norm_before_residual is True


@pytest.mark.parametrize("form", ["speculators", "eagle3"])
def test_a_missing_norm_flag_is_said(form, tmp_path):
    def change(table):
        table.pop("norm_before_residual")
        table.pop("eagle_config", None)

    found = rewritten(tmp_path, form, change)
    assert found.config.norm_before_residual is False
    assert "norm_before_residual is not stated" in found.notices[0]


def test_missing_layer_ids_are_the_usual_ones(tmp_path):
    def change(table):
        table.pop("eagle_aux_hidden_state_layer_ids")
        table.pop("eagle_config")

    assert rewritten(tmp_path, "eagle3", change).config.layers_of(24) == (2, 12, 21)


@pytest.mark.parametrize(("flag", "value"), [("norm_before_fc", True), ("use_last_layernorm", False)])
def test_other_architectures_are_refused_by_name(flag, value, tmp_path):
    with pytest.raises(UnsupportedError, match=flag):
        rewritten(tmp_path, "speculators", lambda table: table.update({"eagle_config": {flag: value}}))


def test_medusa_as_vllm_names_it(tmp_path):
    head = head_beds.head("medusa", medusa_layers=2)
    write_head(tmp_path / "head", head, "medusa")
    weights = read_safetensors(tmp_path / "head" / "medusa_lm_head.safetensors")
    renamed = {}
    for name, tensor in weights.values.items():
        number, layer, *rest = name.split(".")
        if rest[0] == "weight":
            renamed[f"lm_heads.{number}.weight"] = tensor
        else:
            renamed[f"blocks.{number}.layers.{layer}.{rest[1]}"] = tensor
    write_safetensors(tmp_path / "head" / "medusa_lm_head.safetensors", renamed, {})
    same(head, read_head(tmp_path / "head"))


def test_a_medusa_head_that_lacks_a_block_is_refused(tmp_path):
    write_head(tmp_path / "head", head_beds.head("medusa"), "medusa")
    place = tmp_path / "head" / "config.json"
    place.write_text(place.read_text().replace('"medusa_num_heads": 3', '"medusa_num_heads": 4'))
    with pytest.raises(ModelError, match="medusa_num_heads is 4, its tensors hold 3"):
        read_head(tmp_path / "head")


def test_pickled_heads_need_torch_and_run_nothing(tmp_path, monkeypatch):
    head = head_beds.head("eagle1", storage="F16")
    settings = {
        "model_type": "llama", "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 16,
        "num_key_value_heads": 2, "intermediate_size": 72, "vocab_size": 101, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "pytorch_model.bin").write_bytes(b"no")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", None)
        with pytest.raises(ModelError, match=r"slipstream\[torch\]"):
            read_head(tmp_path)
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with pytest.raises(ModelError, match="cannot be read safely"):
        read_head(tmp_path)
    torch.save(
        {name: torch.from_numpy(values) for name, values in head.arrays().items()}, tmp_path / "pytorch_model.bin"
    )
    found = read_head(tmp_path)
    assert found.config.kind == "eagle1"
    assert found.config.fc_bias
    for name, values in head.arrays().items():
        assert np.array_equal(values, found.arrays()[name]), name


def test_folders_that_hold_no_head_are_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="holds no weights"):
        read_head(tmp_path)
    write_safetensors(tmp_path / "model.safetensors", {"x.weight": store(np.zeros((2, 2), np.float32), "F32")}, {})
    with pytest.raises(ModelError, match="is no EAGLE, EAGLE-3 or Medusa head"):
        read_head(tmp_path)
