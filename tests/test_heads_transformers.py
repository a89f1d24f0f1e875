"""Heads on the transformers runtime: the tokens of plain decoding, whatever the model family."""

from __future__ import annotations

import pytest

import head_beds
from slipstream import LLM, SamplingParams
from slipstream.core.errors import UnsupportedError
from slipstream.drafters.heads import tried
from slipstream.drafters.heads.probe import own_text, reader_of
from slipstream.models.heads.formats import write_head

torch_beds = pytest.importorskip("torch_beds", reason="needs torch: pip install 'slipstream[torch]'")

SIZES = {
    "hidden": 32, "target_hidden": 32, "vocab": torch_beds.VOCAB, "head_dim": 8, "intermediate": 40, "target": "",
}  # fmt: skip
HEADS = {
    "eagle3": {"feature_layers": (0, 1, 3)},
    "eagle3-ours": {"feature_layers": (1, 2, 2)},
    "medusa": {"draft_vocab": torch_beds.VOCAB},
}
PROMPTS = [{"prompt_token_ids": [5, 6, 7, 8, 9, 5, 6]}, {"prompt_token_ids": [11, 12, 13]}]


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """No trial: that has a test of its own."""
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tried, "warn_if_useless", lambda *_: None)


def model_with_head(tmp_path, family, name, **settings):
    folder = torch_beds.save(torch_beds.tiny(family), tmp_path / family)
    write_head(tmp_path / "head", head_beds.head(name, **SIZES, **HEADS[name]))
    draft = f"head:{tmp_path / 'head'}"
    return LLM(folder, draft=draft, runtime="transformers", controller="fixed", max_nodes=5, **settings)


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", "eagle3"), ("llama", "eagle3-ours"), ("llama", "medusa"), ("qwen3-moe", "eagle3"), ("gpt2", "eagle3")],
)
def test_fault_02_tokens_are_those_of_plain_decoding(family, name, tmp_path, quick):
    llm = model_with_head(tmp_path, family, name)
    for params in (SamplingParams(max_tokens=20), SamplingParams(max_tokens=20, temperature=0.8, seed=3)):
        with_head, plain = llm.generate(PROMPTS, params), llm.generate(PROMPTS, params, speculation=False)
        for one, other in zip(with_head, plain, strict=True):
            assert one.outputs[0].token_ids == other.outputs[0].token_ids
            assert one.outputs[0].speculation.drafter_failures == 0
            assert one.outputs[0].speculation.num_draft_tokens > 10


def test_heads_that_want_a_norm_that_is_none_are_refused(tmp_path, quick):
    with pytest.raises(UnsupportedError, match="final norm"):
        model_with_head(tmp_path, "gpt2", "medusa")


def test_features_of_other_layers_can_be_read_for_a_trial(tmp_path, quick):
    target = model_with_head(tmp_path, "llama", "eagle3").target
    text = own_text(target, [5, 6, 7, 8], 10)
    assert len(text) == 14
    slot = target.open()
    features = target.prefill(slot, text)
    found = reader_of(target)((0, 1, 4), text)
    assert sorted(found) == [0, 1]  # what leaves the last layer is normed
    assert abs(found[1] - features[:, 32:64]).max() < 1e-4
