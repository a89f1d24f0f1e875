"""Fault kinds about rows and caches: rollback, shorter contexts, batches, seeds, state that leaks between requests."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import beds
from slipstream.core.params import SamplingParams
from slipstream.drafters.lookup import Lookup
from slipstream.drafters.small_model import SmallModel
from slipstream.drafters.suffix import Suffix
from slipstream.engine import engine as engine_module
from slipstream.targets import slots

SIZES = (1, 2, 3, 5, 8, 16)
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 5}


def fresh_rows(target: beds.TableTransformer, tokens: list[int]) -> np.ndarray:
    """The cache of a prefill of these tokens."""
    slot = target.open()
    target.prefill(slot, tokens)
    rows = target.rows(slot)
    target.close(slot)
    return rows


def assert_cache_is_that_of_the_tokens(target, made, request) -> None:
    row = request.answers[0].row
    if not request.done:
        assert target.cache[row.slot] == row.tokens[:-1]
        assert np.allclose(target.rows(row.slot), fresh_rows(target, row.tokens[:-1]), rtol=0, atol=1e-10)


CACHE_DRAFTERS = {
    "all accepted": beds.right_for,
    "none accepted": lambda target: beds.given([3] * 16),
    "trees": lambda target: beds.random_tree(16, 2),
    "empty": lambda target: beds.given([]),
    "a model": lambda target: SmallModel(beds.TableTransformer(seed=1), 16),
    "itself": lambda target: SmallModel(target.share(target.max_context, 8), 16),
}


def check_rollback(drafter, size, params) -> None:
    target = beds.TableTransformer()
    made = beds.engine(target, [drafter(target)], size, shape="tree")
    request = made.add([1, 2, 3], SamplingParams(max_tokens=24, **params))
    while not request.done:
        made.step()
        assert_cache_is_that_of_the_tokens(target, made, request)


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", CACHE_DRAFTERS.values(), ids=CACHE_DRAFTERS.keys())
def test_fault_15_rows_equal_a_fresh_prefill_after_each_step(drafter, params, size):
    check_rollback(drafter, size, params)


def test_planted_rollback_fault_is_seen(monkeypatch):
    commit = beds.TableTransformer.commit

    def keeps_the_wrong_branch(self, paths):
        for row, path, states in zip(self.pending, paths, self.aside, strict=True):
            if path and len(row.draft) > 1:
                states[path[-1] + 1] = states[1 + (path[-1] + 1) % len(row.draft)]
        commit(self, paths)

    monkeypatch.setattr(beds.TableTransformer, "commit", keeps_the_wrong_branch)
    with pytest.raises(AssertionError):
        check_rollback(CACHE_DRAFTERS["itself"], 8, {})


@pytest.mark.parametrize("size", [1, 4, 8])
@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_fault_15_the_target_as_its_own_drafter_is_always_right(params, size):
    """Also a test of the drafter's cache: one wrong row in it and the acceptance falls."""
    model = beds.TableTransformer()
    made = beds.engine(beds.TableTransformer(), [SmallModel(model, 16)], size)
    output = beds.answer(made, [1, 2, 3], max_tokens=300, **params)
    assert output.speculation.draft_acceptance_rate == 1.0
    assert output.speculation.num_steps == -(-300 // (size + 1))
    assert output.speculation.drafter_failures == 0
    made.forget()
    assert not model.cache, "the drafter's slots are free again"


@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_fault_13_a_drafter_with_a_shorter_context_goes_on_plain(params):
    made = beds.engine(beds.TableTransformer(), [SmallModel(beds.TableTransformer(max_context=24), 16)], 4)
    plain = beds.answer(made, [1, 2, 3], speculation=False, max_tokens=60, **params)
    output = beds.answer(made, [1, 2, 3], max_tokens=60, **params)
    assert plain.token_ids == output.token_ids
    assert 0 < output.speculation.num_spec_steps < output.speculation.num_steps
    assert output.speculation.drafter_failures == 0


class NoRollback(beds.TableTransformer):
    """A model whose cache cannot be cut."""

    def truncate(self, slot: int, length: int) -> None:
        raise NotImplementedError("this cache cannot roll back")


def test_fault_16_a_draft_cache_that_cannot_roll_back_is_never_used_silently():
    made = beds.engine(beds.TableTransformer(), [SmallModel(NoRollback(seed=1), 16)], 4)
    plain = beds.answer(made, [1, 2, 3], speculation=False, max_tokens=30)
    output = beds.answer(made, [1, 2, 3], max_tokens=30)
    assert plain.token_ids == output.token_ids
    assert output.speculation.drafter_failures > 0


MIXED = [
    ([1, 2, 3], {"max_tokens": 25}),
    ([4], {"max_tokens": 9, "temperature": 0.8, "seed": 1}),
    ([5, 6, 7, 8, 9, 1], {"max_tokens": 17, "temperature": 1.3, "top_p": 0.9, "seed": 2, "n": 3}),
    ([2, 2, 2, 2], {"max_tokens": 12, "frequency_penalty": 0.5, "repetition_penalty": 1.3}),
    ([1, 2, 3], {"max_tokens": 0}),
    ([9, 8], {"max_tokens": 21, "temperature": 0.7, "min_p": 0.1, "seed": 3, "stop": ["bc", "a"]}),
]
BATCH_DRAFTERS = {
    "lookup": lambda: [Lookup()],
    "suffix": lambda: [Suffix()],
    "model": lambda: [SmallModel(beds.TableTransformer(), 16)],
    "model and lookup": lambda: [SmallModel(beds.TableTransformer(seed=2), 16), Lookup()],
    "random": lambda: [beds.random_tree(16, 4)],
}


def alone(prompt, params):
    made = beds.engine(beds.TableTransformer())
    return made.run([made.add(prompt, SamplingParams(**params), speculation=False)])[0]


def run_mixed(drafters, max_batch):
    made = beds.engine(beds.TableTransformer(), drafters, 5, shape="tree", max_batch=max_batch)
    return made.run([made.add(prompt, SamplingParams(**params)) for prompt, params in MIXED])


def same(one, other) -> bool:
    return [(o.index, o.text, o.token_ids, o.finish_reason) for o in one.outputs] == [
        (o.index, o.text, o.token_ids, o.finish_reason) for o in other.outputs
    ]


@pytest.mark.parametrize("max_batch", [1, 3, 8])
@pytest.mark.parametrize("drafters", BATCH_DRAFTERS.values(), ids=BATCH_DRAFTERS.keys())
def test_fault_17_rows_of_a_batch_equal_the_same_requests_alone(drafters, max_batch):
    results = run_mixed(drafters(), max_batch)
    for (prompt, params), result in zip(MIXED, results, strict=True):
        assert result.prompt_token_ids == prompt
        assert len(result.outputs) == params.get("n", 1)
        assert same(result, alone(prompt, params))


def test_planted_batch_fault_is_seen(monkeypatch):
    """Every row draws with the noise of the first."""
    monkeypatch.setattr(engine_module, "choice_seed", lambda seed, index: seed % 2 + index % 2)
    results = run_mixed([Lookup()], 8)
    monkeypatch.undo()
    assert not all(same(result, alone(*one)) for one, result in zip(MIXED, results, strict=True))


def test_fault_18_seeds():
    made = beds.engine(beds.TableTarget(beds.random_table(1, 16, spread=1.0)), [Suffix()])
    params = {"temperature": 1.0, "max_tokens": 30}
    one, again, other = (beds.answer(made, [1], seed=seed, **params) for seed in (1, 1, 2))
    assert one.token_ids == again.token_ids != other.token_ids
    unseeded = [beds.answer(made, [1], **params) for _ in range(2)]
    assert unseeded[0].token_ids != unseeded[1].token_ids
    for output in unseeded:
        assert beds.answer(made, [1], seed=output.seed, **params).token_ids == output.token_ids
    request = made.add([1], SamplingParams(n=3, seed=1, **params))
    choices = made.run([request])[0].outputs
    assert choices[0].token_ids == one.token_ids
    assert len({tuple(choice.token_ids) for choice in choices}) == 3
    for choice in choices:
        assert beds.answer(made, [1], seed=choice.seed, speculation=False, **params).token_ids == choice.token_ids


@pytest.mark.parametrize("drafters", BATCH_DRAFTERS.values(), ids=BATCH_DRAFTERS.keys())
def test_fault_22_nothing_leaks_between_requests(drafters):
    made = beds.engine(beds.TableTransformer(), drafters(), 4)
    params = SamplingParams(max_tokens=20, logit_bias={3: 1.0}, stop=["zz"])
    before = copy.deepcopy(params)
    first = made.run([made.add([1, 2, 3], params)])[0].outputs[0]
    long = made.run([made.add([5, 6] * 40, SamplingParams(max_tokens=100))])[0].outputs[0]
    for _ in range(2):
        again = made.run([made.add([1, 2, 3], params)])[0].outputs[0]
        assert again.token_ids == first.token_ids
        if "random" not in first.speculation.drafted_by_source:
            assert again.speculation.acceptance_histogram == first.speculation.acceptance_histogram
    assert long.token_ids == alone([5, 6] * 40, {"max_tokens": 100}).outputs[0].token_ids
    assert params == before


def test_fault_22_a_later_unrelated_request_drafts_as_a_fresh_process():
    for make in (Lookup, Suffix):
        used = beds.engine(beds.TableTransformer(), [make()], 4)
        beds.answer(used, [1, 2, 3], max_tokens=50)
        fresh = beds.engine(beds.TableTransformer(), [make()], 4)
        one, other = (beds.answer(made, [7, 8, 9, 7], max_tokens=40) for made in (used, fresh))
        assert one.speculation.acceptance_histogram == other.speculation.acceptance_histogram
        assert one.speculation.num_draft_tokens == other.speculation.num_draft_tokens


def test_prefixes_are_reused_only_where_the_tokens_match():
    target = beds.TableTransformer()
    made = beds.engine(target, [Lookup()], 4)
    first = beds.answer(made, [1, 2, 3, 4], max_tokens=10)
    turn = [1, 2, 3, 4, *first.token_ids, 5, 6]
    read = target.prefilled
    request = made.add(turn, SamplingParams(max_tokens=10))
    result = made.run([request])[0]
    assert result.timing.reused_tokens == 13, "all of the first turn but its last token, which was never read"
    assert target.prefilled - read == len(turn) - 1 - 13
    assert result.outputs[0].token_ids == alone(turn, {"max_tokens": 10}).outputs[0].token_ids
    other = made.run([made.add([1, 2, 9, 9, 9], SamplingParams(max_tokens=10))])[0]
    assert other.timing.reused_tokens == 2
    assert other.outputs[0].token_ids == alone([1, 2, 9, 9, 9], {"max_tokens": 10}).outputs[0].token_ids


def test_choices_of_a_request_share_the_prompt():
    target = beds.TableTransformer()
    made = beds.engine(target, [Lookup()])
    prompt = list(range(10)) * 3
    result = made.run([made.add(prompt, SamplingParams(max_tokens=8, n=4, temperature=1.0, seed=1))])[0]
    assert target.prefilled == len(prompt) - 1
    assert same(result, alone(prompt, {"max_tokens": 8, "n": 4, "temperature": 1.0, "seed": 1}))


def test_planted_prefix_faults_are_seen(monkeypatch):
    """A prefix taken one token too long, and one taken past the end of an answer."""
    real = slots.common_prefix
    monkeypatch.setattr(slots, "common_prefix", lambda one, other: real(one, other) + 1)
    with pytest.raises(AssertionError):
        test_prefixes_are_reused_only_where_the_tokens_match()
