"""The table of successors, and the drafts that token recycling makes of it."""

from __future__ import annotations

import numpy as np
import pytest

import beds
from slipstream.core.errors import InputError
from slipstream.core.params import SamplingParams
from slipstream.core.tree import ANCHOR, Draft
from slipstream.core.types import Limit, Observation, Row, Verdict
from slipstream.drafters.recycling import Recycling
from slipstream.kernels import native
from slipstream.kernels.successors import Successors

VOCAB = 20


def row(tokens, ident=0):
    return Row(ident, list(tokens), len(tokens), SamplingParams(), 0, sampler=None)


def one_hot(*tokens):
    logits = np.full((len(tokens), VOCAB), -9.0, np.float32)
    logits[range(len(tokens)), tokens] = 9.0
    return logits


def shown(drafter, before, emitted, logits, draft=None, path=()):
    """A step in which the drafter was asked: `before` and then `emitted` are the row's tokens."""
    one = row([*before, *emitted])
    drafter.propose([row(before)], [Limit(1, 1)])
    drafter.observe([Observation(one, draft or Draft(), Verdict(list(emitted), list(path)), logits)])


def offered(drafter, tokens, limit=None):
    return drafter.propose([row(tokens)], [limit or Limit(8, 4, 2)])[0]


def test_what_the_model_said_after_a_token_is_offered_after_it():
    drafter = Recycling(VOCAB)
    assert not offered(drafter, [1, 5]).tokens
    shown(drafter, [1, 5], [7], one_hot(7))
    shown(drafter, [1, 5, 7], [9], one_hot(9))
    offer = offered(drafter, [3, 5])
    assert offer.tokens[:2] == [7, 9]
    assert offer.parents[:2] == [ANCHOR, 0]
    assert offer.probs[0] > 0.9


def test_a_row_that_was_not_asked_about_costs_nothing_and_teaches_nothing():
    drafter = Recycling(VOCAB)
    one = row([1, 5, 7])
    drafter.observe([Observation(one, Draft(), Verdict([7], []), one_hot(7))])
    assert not offered(drafter, [3, 5]).tokens


def test_rejected_nodes_teach_too_and_emitted_ones_have_the_last_word():
    drafter = Recycling(VOCAB)
    draft = Draft([7, 8, 2], [ANCHOR, ANCHOR, 0])
    shown(drafter, [1, 5], [8, 3], one_hot(8, 11, 3, 12), draft, [1])
    assert offered(drafter, [4, 7]).tokens[0] == 11
    assert offered(drafter, [4, 8]).tokens[0] == 3
    assert offered(drafter, [4, 2]).tokens[0] == 12
    drafter = Recycling(VOCAB)
    shown(drafter, [1, 5], [5, 3], one_hot(5, 3), Draft([5], [ANCHOR]), [0])
    assert offered(drafter, [9, 5]).tokens[0] == 3


def test_two_tokens_of_context_decide_where_they_are_known():
    drafter = Recycling(VOCAB)
    drafter.begin(row([1, 2, 3, 9, 2, 4, 9, 2, 4]))
    assert offered(drafter, [1, 2], Limit(1, 1, 1)).tokens == [3]
    assert offered(drafter, [9, 2], Limit(1, 1, 1)).tokens == [4]
    assert offered(drafter, [8, 2], Limit(1, 1, 1)).tokens == [4]


def test_offers_keep_within_their_limit_and_are_well_formed():
    rng = np.random.default_rng(1)
    drafter = Recycling(VOCAB)
    drafter.begin(row(rng.integers(0, VOCAB, 400).tolist()))
    for nodes, depth, width in [(1, 1, 1), (8, 3, 2), (30, 8, 4), (5, 5, 1)]:
        offer = offered(drafter, [3, 4], Limit(nodes, depth, width))
        draft = Draft(offer.tokens, offer.parents)
        draft.check(VOCAB)
        assert 0 < len(draft) <= nodes
        assert max(draft.depths()) <= depth
        assert max(offer.parents.count(parent) for parent in offer.parents) <= width
        assert all(0 < prob < 1 for prob in offer.probs)


def test_fault_06_logits_without_sense_teach_nothing():
    drafter = Recycling(VOCAB)
    for value in (np.nan, -np.inf, np.inf):
        logits = one_hot(7)
        logits[0] = value
        shown(drafter, [1, 5], [7], logits)
    assert not offered(drafter, [1, 5]).tokens


def taught(seed=2, rounds=40):
    """A table that has seen a text and random logits."""
    rng = np.random.default_rng(seed)
    table = Successors(VOCAB)
    table.read(rng.integers(0, VOCAB, 300).tolist())
    for _ in range(rounds):
        logits = np.round(rng.normal(size=(5, VOCAB)) * 3, 1).astype(np.float32)
        logits[0, rng.integers(VOCAB, size=15)] = -np.inf
        before, tokens = rng.integers(-1, VOCAB, 5).tolist(), rng.integers(0, VOCAB, 5).tolist()
        table.learn(before, tokens, logits, rng.permutation(5).tolist())
    return table


def test_a_table_is_a_distribution_over_distinct_tokens():
    table = taught()
    for ids, weights in zip(table.ids, table.weights, strict=True):
        kept = ids[ids >= 0].tolist()
        assert len(set(kept)) == len(kept)
        assert weights.sum() < 1 + 1e-5
        assert (np.diff(weights) <= 0).all()
        assert ((ids >= 0) == (weights > 0)).all()


@pytest.mark.skipif(native.core is None, reason="installed without the compiled core")
def test_the_compiled_table_equals_its_numpy_twin(monkeypatch):
    def trees(table):
        contexts = [(before, token) for before in range(-1, VOCAB) for token in range(VOCAB)]
        return [table.tree(*context, (12, 5, 3), (0.01, 0.98)) for context in contexts]

    compiled = taught()
    drawn = trees(compiled)
    monkeypatch.setattr(native, "core", None)
    twin = taught()
    for name in ("ids", "weights", "owner"):
        assert np.array_equal(getattr(compiled, name), getattr(twin, name)), name
    assert drawn == trees(twin)
    assert any(len(tokens) == 12 for tokens, _, _ in drawn)


def test_a_saved_table_drafts_as_before(tmp_path):
    path = tmp_path / "deep" / "table.npz"
    first = Recycling(VOCAB, path, "vocabulary")
    first.begin(row([1, 2, 3, 1, 2, 4]))
    first.close()
    second = Recycling(VOCAB, path, "vocabulary")
    assert offered(second, [1, 2]) == offered(first, [1, 2])
    assert [entry.name for entry in path.parent.iterdir()] == ["table.npz"]


def test_fault_24_a_table_that_does_not_fit_is_refused_at_load(tmp_path):
    path = tmp_path / "table.npz"
    Recycling(VOCAB, path, "one").close()
    with pytest.raises(InputError, match="another model"):
        Recycling(VOCAB, path, "two")
    with pytest.raises(InputError, match="does not fit a vocabulary of 21"):
        Recycling(VOCAB + 1, path, "one")
    whole = path.read_bytes()
    np.save(tmp_path / "array.npy", np.zeros(3))
    directory = whole.rfind(b"PK\x01\x02")
    unknown_version = whole[: directory + 6] + b"\xff" + whole[directory + 7 :]
    plain_array = (tmp_path / "array.npy").read_bytes()
    for damaged in (b"", b"something else", whole[:500], whole[:-700], unknown_version, plain_array):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match="cannot be read"):
            Recycling(VOCAB, path, "one")


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 5}])
def test_answers_are_those_of_plain_decoding_and_come_in_fewer_passes(params):
    plain_target, target = (beds.TableTarget(beds.random_table(3, 12, spread=3.0)) for _ in range(2))
    plain = beds.answer(beds.engine(plain_target), [1, 2], max_tokens=120, **params)
    made = beds.engine(target, [Recycling(12)], 8, shape="tree")
    for _ in range(2):
        assert beds.answer(made, [1, 2], max_tokens=120, **params).token_ids == plain.token_ids
    assert len(target.passes) < 1.8 * len(plain_target.passes)


def test_forgetting_leaves_a_new_drafter():
    drafter = Recycling(VOCAB)
    shown(drafter, [3], [4], one_hot(4))
    assert offered(drafter, [1, 3]).tokens
    drafter.forget()
    assert not offered(drafter, [1, 3]).tokens
