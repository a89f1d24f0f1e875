"""Bars on real models: what speculation gains on copying, and what a small model's drafts are worth. Long."""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path

import pytest

from slipstream import LLM, SamplingParams
from slipstream.core.types import RequestOutput

pytestmark = [pytest.mark.model, pytest.mark.full]

COPIES = (
    'Repeat this JSON exactly, but set every "open" to true:\n\n'
    '{"shops": [{"id": 311, "city": "Turin", "hours": [{"day": "mon", "from": 8}, {"day": "tue", "from": 9}], '
    '"open": true}, {"id": 312, "city": "Porto", "hours": [{"day": "sat", "from": 10}], "open": false}, {"id": 313, '
    '"city": "Ghent", "hours": [{"day": "mon", "from": 8}, {"day": "wed", "from": 7}], "open": true}]}',
    "Correct the closing time on Friday to seven and give me back the whole text unchanged otherwise:\n\n"
    "The pool opens at seven in the morning and closes at nine in the evening from Monday to Thursday. On Friday it "
    "opens at eight and closes at six. It is closed on Sunday and on public holidays. Members may bring up to two "
    "guests, and each guest pays half the price of a day ticket. Children under ten need a parent in the water.",
)
FUNCTIONS = ("reverse_words", "count_vowels", "is_prime", "merge_sorted", "flatten", "gcd", "fibonacci", "rotate",
             "unique", "word_lengths")  # fmt: skip


def data_rows(name: str) -> list[dict] | None:
    """Rows of an evaluation set, None without the data folder."""
    folder = Path(os.environ.get("SLIPSTREAM_DATA", Path(__file__).parents[2] / "shared" / "data"))
    path = next((place for place in (folder / name, folder.parent / "peers" / name) if place.exists()), None)
    return None if path is None else [json.loads(line) for line in path.read_text().splitlines()]


def ask(llm: LLM, prompt: str, params: SamplingParams, speculation: bool = True) -> RequestOutput:
    llm.forget()
    return llm.chat([{"role": "user", "content": prompt}], params, speculation=speculation)[0]


def copy_prompts() -> list[str]:
    rows = data_rows("copy_rows.jsonl")
    return list(COPIES) if rows is None else [rows[place]["messages"][0]["content"] for place in (2, 5)]


@pytest.mark.parametrize("place", [0, 1])
def test_copying_with_a_small_edit_is_much_faster(place):
    params = SamplingParams(max_tokens=160)
    prompt = copy_prompts()[place]
    with LLM("smollm2") as llm:
        ask(llm, COPIES[0][:80], SamplingParams(max_tokens=16))  # warm-up, another prompt
        pairs = [(ask(llm, prompt, params, speculation=False), ask(llm, prompt, params)) for _ in range(5)]
    plain, speculative = zip(*pairs, strict=True)
    assert len({tuple(result.outputs[0].token_ids) for result in plain + speculative}) == 1
    gains = [one.timing.decode_s / other.timing.decode_s for one, other in pairs]
    assert speculative[0].outputs[0].speculation.tokens_per_pass >= 3.5
    assert statistics.median(gains) >= 1.8


def human_eval_prompts(count: int) -> list[str]:
    rows = data_rows("humaneval.jsonl")
    if rows is None:
        return [f"Write a Python function `{name}` with a docstring and two examples." for name in FUNCTIONS[:count]]
    return [f"Complete this Python function:\n\n```python\n{row['prompt']}```" for row in rows[:count]]


def acceptance(results: list[RequestOutput]) -> float:
    drafted = sum(result.outputs[0].speculation.num_draft_tokens for result in results)
    return sum(result.outputs[0].speculation.num_accepted_draft_tokens for result in results) / drafted


PAIR = {"draft": "model:qwen2.5-coder-0.5b", "controller": "fixed", "max_nodes": 4, "shape": "chain"}


def test_a_small_model_of_the_same_family_drafts_well():
    params = SamplingParams(max_tokens=96)
    prompts = human_eval_prompts(10)
    with LLM("qwen2.5-coder-1.5b", max_context=4096, **PAIR) as llm:
        results = [ask(llm, prompt, params) for prompt in prompts]
        plain = [ask(llm, prompt, params, speculation=False) for prompt in prompts[:3]]
    for one, other in zip(results, plain, strict=False):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
    assert acceptance(results) >= 0.85


def test_shared_noise_accepts_at_least_as_much_as_rejection(capsys):
    """At temperature .8, side by side."""
    params = SamplingParams(max_tokens=64, temperature=0.8, seed=5)
    found = {}
    for verifier in ("coupled", "rejection"):
        with LLM("qwen2.5-coder-1.5b", max_context=4096, verifier=verifier, **PAIR) as llm:
            found[verifier] = acceptance([ask(llm, prompt, params) for prompt in human_eval_prompts(5)])
    with capsys.disabled():
        print("\nacceptance at temperature .8: " + ", ".join(f"{name} {rate:.3f}" for name, rate in found.items()))
    assert found["coupled"] >= 0.6
    assert found["rejection"] >= 0.6
