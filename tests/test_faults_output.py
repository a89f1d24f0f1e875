"""Fault kinds about which tokens come out: every drafter, every parameter, equal to plain decoding."""

from __future__ import annotations

import numpy as np
import pytest

import beds
from slipstream.core.tree import Draft
from slipstream.core.types import Row, Verdict
from slipstream.drafters.lookup import Lookup
from slipstream.verify.coupled import Coupled

SIZES = (1, 2, 3, 5, 8, 16)
DRAFTERS = {
    "right": beds.right,
    "wrong": beds.wrong,
    "random": lambda target: beds.random_tree(target.vocab_size, 3),
    "lookup": lambda target: Lookup(),
    "failing": lambda target: beds.failing(2),
}
PARAMS = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_p": 0.95, "seed": 7},
    "hot with penalties": {
        "temperature": 1.2,
        "seed": 8,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
    },
}


def both(target, drafter, size, shape="chain", prompt=(1, 2), **params):
    """The plain answer and the speculative one."""
    made = beds.engine(target, [drafter], size, shape=shape)
    plain = beds.answer(made, list(prompt), speculation=False, **params)
    return plain, beds.answer(made, list(prompt), **params)


def agree(target, drafter, size, shape="chain", **params) -> bool:
    plain, speculative = both(target, drafter, size, shape, **params)
    return plain.token_ids == speculative.token_ids and plain.text == speculative.text


def unverified_first(self, logits: np.ndarray, draft: Draft, row: Row) -> Verdict:
    """Planted: the first drafted token is taken as it is."""
    if not draft.tokens:
        return VERIFY(self, logits, draft, row)
    return Verdict([draft.tokens[0], row.sampler.draw(logits[1], draft.tokens[:1])], [0])


def stale_path(self, logits: np.ndarray, draft: Draft, row: Row) -> Verdict:
    """Planted: decisions at nodes forget the drafted ancestors (position, penalties, history)."""
    sampler = row.sampler
    draw, sampler.draw = sampler.draw, lambda here, path: draw(here, [])
    try:
        return VERIFY(self, logits, draft, row)
    finally:
        del sampler.draw


VERIFY = Coupled.__call__


@pytest.mark.parametrize("size", SIZES)
def test_fault_01_the_first_drafted_token_is_verified(size):
    table = np.zeros((4, 4))
    table[:, 2] = 5.0
    output = beds.answer(beds.engine(beds.TableTarget(table), [beds.given([1])], size), [0], max_tokens=2)
    assert output.token_ids == [2, 2]
    assert output.speculation.num_accepted_draft_tokens == 0
    assert output.speculation.num_draft_tokens == 1


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS.keys())
def test_fault_02_output_equals_plain(drafter, params, size, shape):
    target = beds.TableTarget(beds.random_table(size, 9))
    assert agree(target, drafter(target), size, shape, max_tokens=24, **params)


@pytest.mark.parametrize("params", [PARAMS["greedy"], PARAMS["sampled"]], ids=["greedy", "sampled"])
@pytest.mark.parametrize("size", SIZES)
def test_fault_02_an_always_right_drafter_needs_the_fewest_passes(size, params):
    target = beds.TableTarget(beds.random_table(4, 9))
    _, output = both(target, beds.right(target), size, max_tokens=30, **params)
    assert output.speculation.num_steps == -(-30 // (size + 1))
    assert output.speculation.draft_acceptance_rate == 1.0


@pytest.mark.parametrize("fault", [unverified_first, stale_path])
def test_planted_verification_faults_are_seen(monkeypatch, fault):
    monkeypatch.setattr(Coupled, "__call__", fault)
    target = beds.TableTarget(beds.random_table(3, 9))
    drafter = beds.wrong(target) if fault is unverified_first else beds.random_tree(9, 1)
    assert not all(agree(target, drafter, 3, "tree", max_tokens=24, **params) for params in PARAMS.values())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "top_k": 1, "seed": 3}], ids=["greedy", "top_k 1"])
def test_fault_03_ties_go_to_the_lowest_id(params, size):
    target = beds.TableTarget(np.tile([1.0, 1.0, 0.0], (3, 1)))
    for drafter in (beds.given([0] * 16), beds.given([1] * 16), beds.right(target)):
        plain, output = both(target, drafter, size, prompt=[2], max_tokens=10, **params)
        assert plain.token_ids == output.token_ids == [0] * 10
    assert output.speculation.draft_acceptance_rate == 1.0


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-6])
def test_fault_07_temperature_near_zero_is_greedy(temperature):
    target = beds.TableTarget(beds.random_table(5, 9))
    expected = beds.answer(beds.engine(target), [1], max_tokens=20).token_ids
    for seed in (1, 2):
        plain, output = both(
            target, beds.right(target), 4, prompt=[1], max_tokens=20, temperature=temperature, seed=seed
        )
        assert plain.token_ids == output.token_ids == expected


PROCESSORS = {
    "bias": {"logit_bias": {0: -100.0, 3: 2.0}},
    "bias sampled": {"logit_bias": {0: -100.0}, "temperature": 1.0, "seed": 1},
    "min_p": {"temperature": 1.5, "min_p": 0.2, "seed": 2},
    "top_k": {"temperature": 1.5, "top_k": 3, "seed": 3},
    "top_k above the vocabulary": {"temperature": 1.5, "top_k": 1000, "seed": 3},
    "top_p": {"temperature": 1.5, "top_p": 0.6, "seed": 4},
    "frequency": {"frequency_penalty": 1.5},
    "presence": {"presence_penalty": 2.0},
    "repetition": {"repetition_penalty": 1.8},
    "min_tokens": {"min_tokens": 11, "stop_token_ids": [2, 4, 5]},
    "everything": {
        "temperature": 1.1, "top_k": 6, "top_p": 0.9, "min_p": 0.02, "seed": 5, "repetition_penalty": 1.3,
        "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {1: 1.0}, "min_tokens": 5,
        "stop_token_ids": [7],
    },
}  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("params", PROCESSORS.values(), ids=PROCESSORS.keys())
def test_fault_08_processors_act_at_every_node(params, size):
    target = beds.TableTarget(beds.random_table(11, 9))
    for drafter, shape in ((beds.right(target), "chain"), (beds.random_tree(9, 2), "tree")):
        assert agree(target, drafter, size, shape, max_tokens=24, **params)


def test_fault_08_a_banned_token_never_comes_out_of_a_draft():
    table = np.tile([5.0, 1.0, 0.0], (3, 1))
    made = beds.engine(beds.TableTarget(table), [beds.given([0] * 8)], 8)
    assert beds.answer(made, [0], max_tokens=12, logit_bias={0: -100.0}).token_ids == [1] * 12


def test_fault_08_penalties_count_drafted_ancestors():
    target = beds.TableTarget(np.tile([0.0, 2.0, 1.0], (3, 1)))
    plain, output = both(target, beds.given([1, 1, 1]), 3, prompt=[0], max_tokens=6, frequency_penalty=0.6)
    assert plain.token_ids == output.token_ids
    assert output.token_ids[:3] == [1, 1, 2]
    assert output.speculation.acceptance_histogram[2] >= 1, "the first two of the draft stand, the third does not"


def test_fault_08_top_k_above_the_vocabulary_is_the_vocabulary():
    target = beds.TableTarget(beds.random_table(1, 9))
    some = [beds.answer(beds.engine(target), [1], temperature=1.0, seed=3, top_k=k).token_ids for k in (0, 9, 1000)]
    assert some[0] == some[1] == some[2]
