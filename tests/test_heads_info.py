"""`slipstream info` of a head: what it is, what it was made from, what is strange about it, how it does on a target."""

from __future__ import annotations

import json

import pytest

import head_beds
from slipstream.cli import main
from slipstream.models.heads.formats import is_head, write_head

FORMS = {"eagle1": "slipstream", "eagle3": "eagle3", "eagle3-ours": "slipstream", "eagle3-two": "speculators"}


def info(capsys, *arguments):
    code = main(["info", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("name", head_beds.KINDS)
def test_kind_sizes_target_flags_and_provenance_are_told(name, tmp_path, capsys):
    head, form = head_beds.head(name), FORMS.get(name, "medusa" if "medusa" in name else "speculators")
    write_head(tmp_path / "h", head, form, provenance={"answers": 12, "command": "slipstream train"})
    assert is_head(tmp_path / "h")
    code, text, _ = info(capsys, tmp_path / "h")
    assert code == 0
    kind = {"eagle1": "EAGLE-1/2", "eagle3": "EAGLE-3", "medusa": "Medusa"}[head.config.kind]
    before = str(head.config.norm_before_residual).lower()
    assert f"{kind}, " in text
    assert f"format {form})" in text
    assert "hidden states of 48, 101 tokens" in text
    assert f"{head.config.draft_vocab} tokens, " in text
    assert (f"norm_before_residual {before}" in text) == (kind == "EAGLE-3")
    assert "answers: 12" in text
    assert "command: slipstream train" in text


def test_as_json(tmp_path, capsys):
    write_head(tmp_path / "h", head_beds.head("eagle3-ours"), provenance={"answers": 12})
    found = json.loads(info(capsys, tmp_path / "h", "--json")[1])
    assert (found["kind"], found["format"], found["feature_layers"]) == ("eagle3", "slipstream", [0, 1, 2])
    assert found["provenance"] == {"answers": 12}
    assert found["notices"] == []
    assert found["markov_rank"] == 32


def test_what_is_strange_about_its_settings_is_told(tmp_path, capsys):
    write_head(tmp_path / "h", head_beds.head("eagle3"), "speculators")
    place = tmp_path / "h" / "config.json"
    table = json.loads(place.read_text())
    table["eagle_config"] = {"norm_before_residual": True}
    place.write_text(json.dumps(table))
    assert (
        "notice     norm_before_residual is false at the top and true inside eagle_config"
        in info(capsys, tmp_path / "h")[1]
    )


def test_folders_of_other_things_are_no_heads(tmp_path, capsys):
    assert not is_head(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert not is_head(tmp_path)
    code, _, error = info(capsys, tmp_path, "--target", "smollm2")
    assert code == 2
    assert "is no head's folder" in error


def test_pickled_heads_are_heads(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert is_head(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert not is_head(tmp_path)


@pytest.mark.model
def test_a_head_is_tried_on_a_target(tmp_path, capsys):
    code, text, _ = info(capsys, "head:smollm2", "--target", "smollm2", "--max-context", "512")
    assert code == 0
    assert "trial      of 160 guesses on the model's own text 2" in text
    assert "made from  answer_tokens: 582649" in text
    write_head(tmp_path / "h", head_beds.head("eagle3"))
    code, _, error = info(capsys, tmp_path / "h", "--target", "smollm2")
    assert code == 2
    assert "made for hidden states of 48" in error
