"""Being registered is being tested on the transformers runtime too: every drafter and pair gives plain tokens."""

from __future__ import annotations

import pytest

import beds
import test_registry_identity as registry

torch_beds = pytest.importorskip("torch_beds", reason="needs torch: pip install 'slipstream[torch]'")

from slipstream.targets.transformers.model import TransformersTarget  # noqa: E402

arguments = registry.arguments


def load(*_: object) -> TransformersTarget:
    return TransformersTarget(torch_beds.tiny("llama", vocab_size=registry.VOCAB), slots=len(registry.PROMPTS))


@pytest.mark.parametrize("names", registry.SETTINGS)
def test_fault_02_every_drafter_and_pair_gives_plain_tokens_on_transformers(names, arguments):
    tokenizer = beds.letters(registry.VOCAB)
    for params in (registry.PARAMS["greedy"], registry.PARAMS["sampled"]):
        plain, _ = registry.answers(beds.engine(load(), tokenizer=tokenizer), params, together=False)
        made = registry.drafters(names, arguments, registry.VOCAB, load, tokenizer)
        engine = beds.engine(load(), made, 6, tokenizer=tokenizer, shape="tree")
        for together in (False, True):
            assert registry.answers(engine, params, together) == (plain, 0)
