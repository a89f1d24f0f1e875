"""Heads on disk: every format reads back what was written, value by value and flag by flag."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

import head_beds
from slipstream.core.errors import ModelError, UnsupportedError
from slipstream.models.heads.formats import read_head, write_head
from slipstream.models.heads.head import make_head, store
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


@pytest.mark.parametrize("value", [False, True])
@pytest.mark.parametrize(
    ("form", "nested"),
    [("speculators", "eagle_config"), ("speculators", "transformer_layer_config"), ("eagle3", "eagle_config")],
)
def test_a_norm_flag_said_twice_and_not_alike_is_a_notice(form, nested, value, tmp_path):
    def change(table):
        table["norm_before_residual"] = value
        table.setdefault(nested, {})["norm_before_residual"] = not value

    found = rewritten(tmp_path, form, change)
    first, second = json.dumps(value), json.dumps(not value)
    assert found.config.norm_before_residual is value
    assert [
        f"is {first} at the top and {second} inside {nested}: read as {first}" in each for each in found.notices
    ] == [True]


def test_layer_ids_said_twice_and_not_alike_are_a_notice(tmp_path):
    ids = "eagle_aux_hidden_state_layer_ids"
    found = rewritten(tmp_path, "eagle3", lambda table: table["eagle_config"].update({ids: [1, 2, 3]}))
    assert found.config.feature_layers == (1, 2, 3)
    assert "[1, 2, 3] at the top" in found.notices[0]
    assert "outputs (inputs [2, 3, 4])" in found.notices[0]
    (tmp_path / "other").mkdir()
    found = rewritten(tmp_path / "other", "speculators", lambda table: table.update({"eagle_config": {ids: [0, 1, 2]}}))
    assert found.config.feature_layers == (1, 2, 3)
    assert f"{ids} is [1, 2, 3] at the top and [0, 1, 2] inside eagle_config: read as [1, 2, 3]" in found.notices[0]


@pytest.mark.parametrize(
    ("name", "right", "wrong"), [("draft_vocab_size", 37, 36), ("target_hidden_size", 48, 64)], ids=["drafts", "width"]
)
@pytest.mark.parametrize("form", ["speculators", "eagle3"])
def test_sizes_said_twice_and_not_alike_are_settled_by_the_tensors(form, name, right, wrong, tmp_path):
    for index, (top, inside) in enumerate([(right, wrong), (wrong, right), (wrong, wrong + 1)]):
        (tmp_path / str(index)).mkdir()

        def change(table, top=top, inside=inside):
            table[name] = top
            table.setdefault("eagle_config", {})[name] = inside

        if wrong == top and inside != right:
            with pytest.raises(ModelError, match=rf"{name} is {top} at the top and {inside} inside .* fit neither"):
                rewritten(tmp_path / str(index), form, change)
        else:
            found = rewritten(tmp_path / str(index), form, change)
            assert (found.config.draft_vocab, found.config.target_hidden) == (37, 48)
            assert f"read as {right}" in found.notices[0]


def test_settings_said_twice_and_alike_are_no_notice(tmp_path):
    assert rewritten(tmp_path, "eagle3", lambda table: None).notices == []


@pytest.mark.parametrize("form", ["speculators", "eagle3"])
def test_an_architecture_said_twice_and_not_alike_is_refused_with_both(form, tmp_path):
    def change(table):
        table["norm_before_fc"] = False
        table.setdefault("eagle_config", {})["norm_before_fc"] = True

    with pytest.raises(UnsupportedError, match="norm_before_fc is false at the top and true inside eagle_config"):
        rewritten(tmp_path, form, change)


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


def damage(folder, change):
    """Change config.json of a head in place."""
    table = json.loads((folder / "config.json").read_text())
    change(table)
    (folder / "config.json").write_text(json.dumps(table))


@pytest.mark.parametrize(
    ("name", "form", "place", "value", "message"),
    [
        ("eagle3", "eagle3", ("eagle_config",), [1], "eagle_config is '.1.'; it must be a table"),
        ("eagle3", "eagle3", ("rope_parameters",), "x", "rope_parameters is 'x'; it must be a table"),
        ("eagle3", "eagle3", ("slipstream",), 5, "slipstream is '5'; it must be a table"),
        ("eagle3", "speculators", ("speculators_config",), 1.5, "speculators_config is '1.5'; it must be a table"),
        ("eagle3", "speculators", ("speculators_config", "verifier"), 3, "verifier is '3'; it must be a table"),
        ("medusa-shared", "medusa", ("vocab_size",), "many", "vocab_size is 'many'"),
        ("medusa-shared", "medusa", ("vocab_size",), 10**9, "a vocabulary of 1000000000 tokens"),
        ("medusa", "slipstream", ("head", "medusa_heads"), 10**9, "medusa_heads is 1000000000; it must be"),
        ("eagle3", "slipstream", ("head", "layers"), 10**9, "layers is 1000000000; it must be"),
        ("eagle3", "slipstream", ("head", "eps"), float("nan"), "eps is nan; it must be positive"),
        ("eagle3", "slipstream", ("head", "depth"), -1, "depth is -1; it must be"),
        ("eagle3", "slipstream", ("head", "rope_scaling"), {}, "rope_scaling is {}; it must be a table with a type"),
    ],
)
def test_fault_26_damaged_settings_are_named(name, form, place, value, message, tmp_path):
    write_head(tmp_path / "h", head_beds.head(name), form)

    def change(table):
        for step in place[:-1]:
            table = table[step]
        table[place[-1]] = value

    damage(tmp_path / "h", change)
    with pytest.raises(ModelError, match=message):
        read_head(tmp_path / "h")


@pytest.mark.parametrize(
    ("name", "lost", "message"),
    [
        ("medusa", "0.0.linear.weight", "tensors medusa.0.0.linear.weight are missing"),
        ("medusa", "1.0.linear.bias", "tensors medusa.1.0.linear.bias are missing"),
        ("eagle3", "draft_ids", "drafts 37 of 101 tokens but holds no draft_ids"),
    ],
)
def test_fault_26_lost_tensors_are_named(name, lost, message, tmp_path):
    write_head(tmp_path / "h", head_beds.head(name), "medusa" if name == "medusa" else "slipstream")
    path = next((tmp_path / "h").glob("*.safetensors"))
    weights = read_safetensors(path)
    for tensors in (weights.values, weights.numbers):
        tensors.pop(lost, None)
    write_safetensors(path, weights.values, weights.numbers)
    with pytest.raises(ModelError, match=message):
        read_head(tmp_path / "h")


def test_the_first_ids_as_a_reduced_vocabulary_are_written_out(tmp_path):
    head = head_beds.head("eagle3")
    first = make_head(head.config, head.arrays(), np.arange(37))
    write_head(tmp_path / "h", first)
    same(first, read_head(tmp_path / "h"))


def test_drafted_ids_too_large_for_their_type_do_not_become_others(tmp_path):
    write_head(tmp_path / "h", head_beds.head("eagle3"))
    path = tmp_path / "h" / "model.safetensors"
    weights = read_safetensors(path)
    ids = weights.numbers["draft_ids"].astype(np.int64)
    write_safetensors(path, weights.values, {"draft_ids": ids + 2**32})
    with pytest.raises(ModelError, match="sends draft id 0 to 2147483647"):
        read_head(tmp_path / "h")


def test_additions_of_ours_that_nothing_describes_are_not_passed_over(tmp_path):
    write_head(tmp_path / "h", head_beds.head("eagle3-ours"), "eagle3", rows)
    damage(tmp_path / "h", lambda table: table.pop("slipstream"))
    assert "markov_in.weight" in read_head(tmp_path / "h").unused
