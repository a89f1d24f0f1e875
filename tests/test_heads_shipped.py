"""The head that ships for SmolLM2 at work with suffix and recycling: tokens per pass, the same tokens as without."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from slipstream import LLM, SamplingParams
from slipstream.engine import watch

pytestmark = [pytest.mark.full, pytest.mark.model]

DATA = Path(os.environ.get("SLIPSTREAM_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
CHAT = 80
"""Rows of Spec-Bench before the first that is no chat."""


def test_six_nodes_save_half_of_the_passes(monkeypatch):
    """Spec-Bench, every fifth row, greedy: 1.9 tokens per pass on chat, 2.1 over all rows, at most six nodes."""
    if not DATA.exists():
        pytest.skip("the evaluation rows are not on this machine")
    monkeypatch.setattr(watch, "DRIFT", 0.0)  # always as many nodes, whatever the text
    llm = LLM("smollm2", controller="fixed", max_nodes=6)
    assert "head:smollm2" in llm.describe()
    texts = [json.loads(line)["turns"][0] for line in (DATA / "spec_bench.jsonl").read_text().splitlines()][::5]
    params = SamplingParams(max_tokens=64)
    chats = [[{"role": "user", "content": text}] for text in texts]
    found = [llm.chat(chat, params)[0].outputs[0] for chat in chats]
    for chat, answer in list(zip(chats, found, strict=True))[::8]:
        assert llm.chat(chat, params, speculation=False)[0].outputs[0].token_ids == answer.token_ids

    def per_pass(answers):
        steps = sum(answer.speculation.num_steps for answer in answers)
        assert sum(answer.speculation.num_draft_tokens for answer in answers) <= 6 * steps
        return sum(len(answer.token_ids) - 1 for answer in answers) / steps

    assert per_pass(found[: CHAT // 5]) >= 1.9
    assert per_pass(found) >= 2.1
