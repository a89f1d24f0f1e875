"""`slipstream convert`: the same drafts in every format, token for token; half a folder is never left."""

from __future__ import annotations

import numpy as np
import pytest

import head_beds
from slipstream.cli import main
from slipstream.drafters.heads.same import drafts, made_up_parts, same_drafts
from slipstream.models.heads import formats
from slipstream.models.heads.formats import read_head, write_head


def written(tmp_path, name="eagle3", **changes):
    head = head_beds.head(name, **changes)
    write_head(tmp_path / "in", head)
    return head


@pytest.mark.parametrize("form", ["speculators", "eagle3"])
@pytest.mark.parametrize("name", ["eagle3", "eagle3-before"])
def test_round_trip_drafts_the_same_token_for_token(name, form, tmp_path, capsys):
    head = written(tmp_path, name)
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--to", form]) == 0
    assert main(["convert", str(tmp_path / "out"), str(tmp_path / "back")]) == 0
    parts = made_up_parts(head)
    for one, other in zip(drafts(head, parts), drafts(read_head(tmp_path / "back"), parts), strict=True):
        assert np.array_equal(one.argsort(1), other.argsort(1))
    assert form in capsys.readouterr().out


@pytest.mark.parametrize("name", ["medusa", "medusa-shared"])
def test_medusa_round_trip(name, tmp_path):
    head = written(tmp_path, name)
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "medusa"]) == 0
    assert same_drafts(head, read_head(tmp_path / "out"))


def test_compact_storage(tmp_path):
    head = written(tmp_path, "eagle3-ours", hidden=64, intermediate=96, own_embedding=True, frozen_head=False)
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--storage", "Q8_0"]) == 0
    small = read_head(tmp_path / "out")
    assert small.nbytes < 0.35 * head.nbytes
    assert not same_drafts(head, small)  # rounded, and seen to be


def test_flags_are_always_written_out(tmp_path):
    written(tmp_path)
    for form in ("speculators", "eagle3"):
        assert main(["convert", str(tmp_path / "in"), str(tmp_path / form), "--to", form]) == 0
        text = (tmp_path / form / "config.json").read_text()
        assert '"norm_before_residual": false' in text
        assert "eagle_aux_hidden_state_layer_ids" in text


@pytest.mark.parametrize(
    ("name", "form"), [("eagle3", "speculators"), ("eagle3", "eagle3"), ("medusa", "medusa"), ("eagle1", "slipstream")]
)
def test_what_a_head_was_made_from_survives_every_format(name, form, tmp_path):
    facts = {"target": "random", "answers": 12, "options": {"seed": 3}}
    write_head(tmp_path / "in", head_beds.head(name), provenance=facts)
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--to", form, "--storage", "F16"]) == 0
    assert read_head(tmp_path / "out").provenance == {**facts, "converted_from": "in"}
    assert main(["convert", str(tmp_path / "out"), str(tmp_path / "back")]) == 0
    assert read_head(tmp_path / "back").provenance == {**facts, "converted_from": "out"}


def test_what_others_ignore_is_said(tmp_path, capsys):
    written(tmp_path, "eagle3-ours", frozen_head=False)
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "speculators"]) == 0
    assert "feature_norm, embedding_residual, markov_rank" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "name", "message"),
    [
        (["--to", "gguf"], "eagle3", "choose one of"),
        (["--to", "medusa"], "eagle3", "use format slipstream"),
        (["--to", "speculators"], "eagle1", "use format slipstream"),
        (["--to", "speculators"], "eagle3-ours", "--target"),
        (["--storage", "Q2"], "eagle3", "choose one of"),
    ],
)
def test_refusals_leave_nothing_behind(arguments, name, message, tmp_path, capsys):
    written(tmp_path, name)
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert sorted(place.name for place in tmp_path.iterdir()) == ["in"]


def test_an_existing_folder_is_not_touched(tmp_path, capsys):
    written(tmp_path)
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "in")]) == 2
    assert "is there already" in capsys.readouterr().err
    read_head(tmp_path / "in")


def test_planted_damage_while_writing_is_seen(tmp_path, capsys, monkeypatch):
    written(tmp_path)
    write = formats.write_safetensors

    def damaged(path, values, numbers):
        write(path, values, numbers)
        raw = bytearray(path.read_bytes())
        raw[-1500:-1000] = bytes(500)
        path.write_bytes(raw)

    monkeypatch.setattr(formats, "write_safetensors", damaged)
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out")]) == 2
    assert "nothing was kept" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
