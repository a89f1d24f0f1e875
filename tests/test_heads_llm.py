"""Heads as a setting: named by path or by name, added by auto, seen in what the model says of itself."""

from __future__ import annotations

import shutil

import pytest

import head_beds
from slipstream import LLM, SamplingParams
from slipstream.cli import main
from slipstream.cli.bench import Setting
from slipstream.core.errors import ModelError
from slipstream.drafters.heads import tried
from slipstream.models.files import open_model
from slipstream.models.heads import shipped
from slipstream.models.heads.formats import write_head
from slipstream.models.registry import ensure

pytestmark = pytest.mark.model

SIZES = {
    "hidden": 576, "target_hidden": 576, "vocab": 49152, "draft_vocab": 512, "intermediate": 64, "heads": 3,
    "kv_heads": 1, "head_dim": 32, "feature_layers": (2, 15, 27),
}  # fmt: skip
LONG = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture
def head(tmp_path, monkeypatch):
    """A random head in the place of those that are shipped, and no trial of it."""
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    monkeypatch.setattr(tried, "warn_if_useless", lambda *_: None)
    fingerprint = open_model(ensure("smollm2")).tokenizer().fingerprint()
    write_head(tmp_path / "smol", head_beds.head("eagle3-ours", storage="F16", fingerprint=fingerprint, **SIZES))
    return tmp_path / "smol"


def test_auto_takes_the_shipped_head_and_changes_no_token(head):
    llm = LLM("smollm2", controller="fixed")
    assert "draft suffix,recycling,head:smol," in llm.describe()
    assert "head eagle " in llm.describe()
    assert "256 bytes of cache per token" in llm.describe()
    with_head, plain = llm.generate("Once", LONG)[0], llm.generate("Once", LONG, speculation=False)[0]
    assert with_head.outputs[0].token_ids == plain.outputs[0].token_ids
    assert with_head.outputs[0].speculation.drafter_failures == 0


def test_a_head_is_read_anew_from_its_files(head):
    with LLM("smollm2", draft=f"head:{head}", controller="fixed") as llm:
        before = llm.generate("Once", LONG)[0].outputs[0]
        shutil.rmtree(head)
        with pytest.raises(ModelError, match="no such head"):
            llm.reload("eagle")
        assert llm.generate("Once", LONG)[0].outputs[0].token_ids == before.token_ids
        fingerprint = open_model(ensure("smollm2")).tokenizer().fingerprint()
        other = head_beds.head("eagle3-ours", seed=1, storage="F16", fingerprint=fingerprint, **SIZES)
        write_head(head, other)
        llm.reload("eagle")
        after = llm.generate("Once", LONG)[0].outputs[0]
        assert after.token_ids == before.token_ids
        assert after.speculation.drafter_failures == 0
        assert after.speculation.num_draft_tokens > 10


def test_bench_asks_the_head_where_a_setting_has_one(head):
    with LLM("smollm2") as llm:
        for setting, names in {
            "auto": ("suffix", "recycling", "eagle"),
            "auto@2t": ("suffix", "recycling", "eagle"),
            f"head:{head},suffix": ("suffix", "eagle"),
            "suffix,recycling": ("suffix", "recycling"),
            "none": (),
        }.items():
            assert Setting.of(setting).engine(llm, 8).drafting.names == names


def test_without_a_shipped_head_auto_is_what_it_was(head):
    shutil.rmtree(head)
    assert "draft suffix,recycling," in LLM("smollm2").describe()


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_classical_rules_take_heads_as_deterministic_drafters(verifier, head):
    llm = LLM("smollm2", draft=f"head:{head}", verifier=verifier, controller="fixed")
    output = llm.generate("Once", LONG)[0].outputs[0]
    assert output.speculation.num_draft_tokens > 10
    assert output.speculation.drafter_failures == 0


def test_a_head_of_another_model_is_refused_before_weights_are_read(head, tmp_path, capsys):
    write_head(tmp_path / "other", head_beds.head("eagle3"))
    with pytest.raises(ModelError, match="made for hidden states of 48"):
        LLM("smollm2", draft=f"head:{tmp_path / 'other'}")
    assert main(["generate", "--draft", f"head:{tmp_path / 'none'}", "Hi"]) == 2
    assert "no such head" in capsys.readouterr().err
