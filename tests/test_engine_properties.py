"""Plain equals speculative for anything drawn at random: tables, prompts, trees, parameters, stops, batches."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

import beds
from slipstream.core.params import SamplingParams
from slipstream.drafters.lookup import Lookup
from slipstream.drafters.small_model import SmallModel
from slipstream.drafters.suffix import Suffix
from slipstream.engine.batch import Batch

VOCABULARY = 7
TEXTS = [b"a", b"b ", b"\xe2\x82", b"\xac", b"cd", b"", b"\xf0\x9f"]

tokens = st.integers(0, VOCABULARY - 1)
some_params = st.fixed_dictionaries(
    {"max_tokens": st.integers(0, 30), "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0])},
    optional={
        "top_p": st.sampled_from([0.1, 0.5, 0.9]),
        "top_k": st.integers(1, VOCABULARY + 1),
        "min_p": st.sampled_from([0.05, 0.5]),
        "presence_penalty": st.sampled_from([-0.5, 0.7]),
        "frequency_penalty": st.sampled_from([-0.3, 0.9]),
        "repetition_penalty": st.sampled_from([0.8, 1.4]),
        "logit_bias": st.dictionaries(tokens, st.sampled_from([-100.0, -1.0, 2.0]), max_size=2),
        "stop": st.lists(st.sampled_from(["a", "cd", "b a", "€", "€c", "ab "]), max_size=2),
        "stop_token_ids": st.lists(tokens, max_size=2),
        "ignore_eos": st.booleans(),
        "logprobs": st.integers(0, 2),
        "n": st.integers(1, 3),
    },
)
drafters = st.lists(
    st.sampled_from(["lookup", "suffix", "model", "random", "wrong"]), min_size=1, max_size=3, unique=True
)
cases = st.fixed_dictionaries(
    {
        "table": st.integers(0, 50),
        "order": st.integers(1, 2),
        "spread": st.sampled_from([0.0, 1.0, 3.0]),
        "prompts": st.lists(st.lists(tokens, min_size=1, max_size=12), min_size=1, max_size=4),
        "params": st.lists(some_params, min_size=4, max_size=4),
        "drafters": drafters,
        "nodes": st.integers(1, 9),
        "shape": st.sampled_from(["chain", "tree"]),
        "max_batch": st.integers(1, 4),
        "context": st.sampled_from([16, 24, 200]),
    }
)


def make_drafter(name: str, target: beds.TableTarget):
    others = beds.random_table(99, VOCABULARY, target.order)
    return {
        "lookup": Lookup,
        "suffix": Suffix,
        "model": lambda: SmallModel(beds.TableTarget(0.7 * target.table + 0.3 * others, 20), VOCABULARY),
        "random": lambda: beds.random_tree(VOCABULARY, 5),
        "wrong": lambda: beds.wrong(target),
    }[name]()


def results(case: dict, speculation: bool) -> list[tuple]:
    """Everything a caller sees of the answers, but for statistics and times."""
    table = beds.random_table(case["table"], VOCABULARY, case["order"], case["spread"])
    target = beds.TableTarget(table, case["context"])
    used = [make_drafter(name, target) for name in case["drafters"]] if speculation else []
    tokenizer = beds.Pieces(TEXTS, end_ids=[5])
    batch = case["max_batch"] if speculation else 1
    made = beds.engine(target, used, case["nodes"], tokenizer=tokenizer, shape=case["shape"], max_batch=batch)
    requests = [
        made.add(prompt, SamplingParams(seed=index, **params))
        for index, (prompt, params) in enumerate(zip(case["prompts"], case["params"], strict=False))
    ]
    streamed = list(made.stream(requests[0]))
    outputs = [result.outputs for result in made.run(requests)]
    for index, output in enumerate(outputs[0]):
        assert "".join(piece.text for piece in streamed if piece.index == index) == output.text
        assert [t for piece in streamed if piece.index == index for t in piece.token_ids] == output.token_ids
    made.forget()
    assert sorted(target.free) == list(range(8))
    return [
        (o.index, o.text, o.token_ids, o.finish_reason, o.stop_reason, o.logprobs, o.seed)
        for row in outputs
        for o in row
    ]


def check(case: dict) -> None:
    assert results(case, speculation=True) == results(case, speculation=False)


@seed(1)
@settings(max_examples=150)
@given(case=cases)
def test_plain_equals_speculative(case):
    check(case)


@pytest.mark.full
@seed(2)
@settings(max_examples=2000)
@given(case=cases)
def test_plain_equals_speculative_many_times(case):
    check(case)


def test_planted_fault_is_found(monkeypatch):
    """The sampler's history runs ahead of the tokens after a long block."""
    emit = Batch.append

    def forgets_history(self, drafts, verdicts, output):
        for answer, verdict in zip(self.answers, verdicts, strict=True):
            if len(verdict.tokens) > 2:
                answer.row.sampler.append(verdict.tokens[:1])  # counted twice
        return emit(self, drafts, verdicts, output)

    monkeypatch.setattr(Batch, "append", forgets_history)
    without_shrinking = settings(max_examples=150, phases=[Phase.generate])
    with pytest.raises(AssertionError):
        without_shrinking(seed(1)(given(case=cases)(check)))()
