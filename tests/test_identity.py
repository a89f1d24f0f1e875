"""The promise on a real model: SmolLM2's tokens are the same however they are drafted, alone or in a batch."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

import beds
from native_beds import Recoded
from slipstream import SamplingParams
from slipstream.engine.engine import Engine
from slipstream.models.chat import chat_prompt
from slipstream.models.files import ModelFile, open_model
from slipstream.models.registry import ensure
from slipstream.targets.native.model import NativeTarget

pytestmark = pytest.mark.model

PARAMS = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_p": 0.95, "seed": 11},
    "penalised": {
        "temperature": 1.2,
        "seed": 12,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.2,
    },
}
DRAFTS = ("lookup", "suffix", "suffix tree", "model", "model tree", "lookup and model tree")
FALLBACK = (
    ("copy", "Repeat this twice, word for word: the quick brown fox jumps over the lazy dog, and the dog sleeps on."),
    ("chat", "Give me three tips for staying healthy."),
    ("code", "Write a Python function that adds two numbers, and show how it is called."),
    ("translation", "Translate to German: The weather is nice today, and we will go for a walk in the park."),
    ("math", "Tom has 3 apples and buys 4 more. How many apples does Tom have? Think step by step."),
    (
        "summary",
        "Summarise in one sentence: Bees visit flowers to collect nectar, and carry pollen from one to the next.",
    ),
    ("extraction", "List the names in this text: Anna met Ben and Carla at the station, where Ben bought a ticket."),
    ("open", "Write the beginning of a story about a lighthouse."),
)


def prompts(count: int) -> list[str]:
    """Prompts of all categories in turn, the shortest first; without the data folder a few of our own."""
    folder = Path(os.environ.get("SLIPSTREAM_DATA", Path(__file__).parents[2] / "shared" / "data"))
    path = folder / "spec_bench.jsonl"
    if not path.exists():
        return [text for _, text in FALLBACK][:count]
    groups: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        groups.setdefault(row["category"], []).append(row["turns"][0])
    ordered = [sorted(group, key=len) for group in groups.values()]
    rounds = [group[place] for place in range(max(map(len, ordered))) for group in ordered if place < len(group)]
    return rounds[:count]


def load(file: ModelFile):
    """File, tokenizer, target, and the same again to draft with."""
    targets = [NativeTarget.load(file, max_context=2048, slots=24) for _ in range(2)]
    return file, file.tokenizer(), *targets


@pytest.fixture(scope="module")
def model():
    return load(open_model(ensure("smollm2")))


def make_engine(model, draft: str = "", max_batch: int = 1) -> Engine:
    _, tokenizer, target, second = model
    shape = "tree" if "tree" in draft else "chain"
    drafters = beds.named(draft, target, second)
    return beds.engine(target, drafters, 6, tokenizer=tokenizer, shape=shape, max_batch=max_batch)


def answers(engine: Engine, texts: list[list[int]], params: SamplingParams, **options) -> list[list[int]]:
    results = engine.run([engine.add(tokens, params, **options) for tokens in texts])
    engine.forget()
    return [result.outputs[0].token_ids for result in results]


def check_identity(model, count: int, tokens: int, params_name: str, drafts: Sequence[str] = DRAFTS) -> None:
    params = SamplingParams(max_tokens=tokens, **PARAMS[params_name])
    texts = [chat_prompt(model[0], [{"role": "user", "content": text}]).token_ids for text in prompts(count)]
    expected = [answers(make_engine(model), [text], params)[0] for text in texts]
    assert answers(make_engine(model, max_batch=5), texts, params) == expected, "plain, in a batch"
    for draft in drafts:
        alone = make_engine(model, draft)
        assert [answers(alone, [text], params)[0] for text in texts] == expected, f"{draft}, alone"
        assert answers(make_engine(model, draft, max_batch=5), texts, params) == expected, f"{draft}, in a batch"


@pytest.mark.parametrize("params_name", PARAMS)
def test_identity_with_plain_decoding(model, params_name):
    check_identity(model, 8, 16, params_name)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("params_name", PARAMS)
def test_identity_with_plain_decoding_over_all_categories(model, params_name):
    check_identity(model, 30, 48, params_name)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0"])
def test_identity_for_other_weight_types(model, kind):
    recoded = load(Recoded(model[0], kind))
    for params_name in PARAMS:
        check_identity(recoded, 4, 16, params_name, ("suffix", "lookup and model tree"))
    if kind == "F32":  # quantised weights give the tokens of their unpacked copy
        texts = [chat_prompt(model[0], [{"role": "user", "content": text}]).token_ids for text in prompts(4)]
        params = SamplingParams(max_tokens=64, **PARAMS["sampled"])
        assert answers(make_engine(recoded), texts, params) == answers(make_engine(model), texts, params)


@pytest.mark.full
def test_identity_for_k_quants(model):
    qwen = load(open_model(ensure("qwen2.5-coder-1.5b")))
    for params_name in PARAMS:
        check_identity(qwen, 2, 12, params_name, ("suffix", "model tree"))


@pytest.mark.parametrize("params_name", PARAMS)
def test_a_target_as_its_own_drafter_is_always_right(model, params_name):
    engine = make_engine(model, "model")
    params = SamplingParams(max_tokens=200, ignore_eos=True, **PARAMS[params_name])
    tokens = chat_prompt(model[0], [{"role": "user", "content": FALLBACK[-1][1]}]).token_ids
    output = engine.run([engine.add(tokens, params)])[0].outputs[0]
    engine.forget()
    assert len(output.token_ids) == 200
    assert output.speculation.draft_acceptance_rate == 1.0
    assert output.speculation.num_steps == 1 + -(-199 // 7), "the pass that reads the prompt, and those with drafts"


def test_planted_commit_of_the_wrong_nodes_is_seen(model, monkeypatch):
    """The comparison can fail: a target that commits the wrong nodes gives itself away."""
    target, commit = model[2], model[2].commit

    def commit_first_nodes(paths):
        commit([[0] * len(path) for path in paths])

    params = SamplingParams(max_tokens=32)
    tokens = chat_prompt(model[0], [{"role": "user", "content": FALLBACK[0][1]}]).token_ids
    expected = answers(make_engine(model), [tokens], params)
    monkeypatch.setattr(target, "commit", commit_first_nodes)
    assert answers(make_engine(model, "model"), [tokens], params) != expected
