"""A draft model: rollback, catching up, contexts and heads that differ, draws that are what they say."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import beds
from slipstream.core.errors import InputError
from slipstream.core.params import SamplingParams
from slipstream.core.tree import ANCHOR, Draft
from slipstream.core.types import Limit, Row
from slipstream.drafters.guard import Guard
from slipstream.drafters.small_model import SmallModel, check_vocabulary, same_noise_chances
from slipstream.sampling import RowSampler
from slipstream.verify.rejection import Rejection

VOCAB = 16
SAMPLED = {"temperature": 0.8, "seed": 5, "top_p": 0.95}


def row_of(tokens, ident=0, vocab_size=VOCAB, **params):
    settings = SamplingParams(**params)
    sampler = RowSampler(settings, 7, vocab_size, tokens)
    return Row(ident, list(tokens), len(tokens), settings, 7, sampler)


def advance(drafter, row, tokens):
    """The row emits tokens, as a step would."""
    row.tokens += tokens
    row.sampler.append(tokens)
    row.step += 1


@pytest.mark.parametrize("params", [{}, SAMPLED, {"temperature": 1.3, "seed": 1}], ids=["greedy", "sampled", "hot"])
@pytest.mark.parametrize("nodes", [1, 2, 5, 16])
def test_fault_15_the_target_as_its_own_drafter_is_always_right(nodes, params):
    drafter = SmallModel(beds.TableTransformer(3), VOCAB)
    made = beds.engine(beds.TableTransformer(3), [drafter], nodes)
    output = beds.answer(made, [1, 2, 3], max_tokens=320, **params)
    seen = output.speculation
    assert len(output.token_ids) == 320
    assert seen.num_accepted_draft_tokens == seen.num_draft_tokens > 150
    assert seen.num_steps == -(-320 // (nodes + 1))
    assert seen.drafter_failures == 0


def drafter_cache_faults(draft_seed, shape, params):
    """After each step: is the drafter's cache a fresh prefill of committed tokens, nothing else and nearly all?"""
    target, model, faults = beds.TableTransformer(3), beds.TableTransformer(draft_seed), []
    drafter = SmallModel(model, VOCAB)
    made = beds.engine(target, [drafter], 5, shape=shape)
    requests = [made.add(prompt, SamplingParams(max_tokens=40, **params)) for prompt in ([1, 2, 3], [4], [5, 6] * 9)]
    while not all(request.done for request in requests):
        made.step()
        for request in requests:
            row = request.answers[0].row
            if row.id not in drafter._rows:
                continue
            slot = drafter._rows[row.id].slot
            length = model.length(slot)
            fresh = beds.TableTransformer(draft_seed)
            fresh.prefill(fresh.open(), row.tokens[:length])
            if not len(row.tokens) - 2 <= length <= len(row.tokens) - 1:
                faults.append(f"{length} of {len(row.tokens)} tokens")
            elif not np.allclose(model.rows(slot), fresh.rows(0), rtol=0, atol=1e-10):
                faults.append("rows differ")
    return faults


@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("draft_seed", [3, 4], ids=["right", "wrong"])
def test_fault_15_the_drafters_cache_holds_committed_tokens(draft_seed, shape, params):
    assert drafter_cache_faults(draft_seed, shape, params) == []


def test_planted_cache_not_truncated_is_seen(monkeypatch):
    def forget_nothing(self, row, state):
        state.committed, state.ahead = state.committed + len(state.ahead), []

    monkeypatch.setattr(SmallModel, "_roll_back", forget_nothing)
    assert drafter_cache_faults(4, "chain", {}) != []


@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("context", [8, 33])
def test_fault_13_a_shorter_context_ends_the_offers_only(context, params):
    model = beds.TableTransformer(3)
    model.max_context = context
    drafter = SmallModel(model, VOCAB)
    plain = beds.answer(beds.engine(beds.TableTransformer(3)), [1, 2, 3], max_tokens=80, **params)
    output = beds.answer(beds.engine(beds.TableTransformer(3), [drafter], 4), [1, 2, 3], max_tokens=80, **params)
    assert output.token_ids == plain.token_ids
    seen = output.speculation
    assert 0 < seen.num_draft_tokens == seen.num_accepted_draft_tokens < context
    assert seen.drafter_failures == 0


def test_fault_13_a_prompt_longer_than_the_drafters_context():
    drafter = SmallModel(beds.TableTransformer(3, max_context=8), VOCAB)
    output = beds.answer(beds.engine(beds.TableTransformer(3), [drafter], 4), [1] * 20, max_tokens=10)
    assert len(output.token_ids) == 10
    assert output.speculation.num_draft_tokens == output.speculation.drafter_failures == 0


def test_fault_14_vocabularies_that_differ_are_refused_by_name():
    check_vocabulary(["a", "b"], ["a", "b"], "big", "small")
    with pytest.raises(InputError, match=r"small has 1 tokens, target big has 2"):
        check_vocabulary(["a", "b"], ["a"], "big", "small")
    with pytest.raises(InputError, match=r"token 1 is 'c' in draft model small and 'b' in target big"):
        check_vocabulary(["a", "b"], ["a", "c"], "big", "small")


@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("head", [10, 12, 15])
def test_fault_14_heads_padded_differently_draft_real_tokens(head, params):
    """Of 12 ids the last two are padding in the target; the drafter's head is as wide, narrower or wider."""
    table = beds.random_table(2, 12)
    table[:, 10:] = -np.inf
    narrow = beds.random_table(2, 12)[:10, :10]
    wide = np.full((15, 15), -np.inf)
    wide[:12, :10] = table[:, :10]
    model = beds.TableTarget({10: narrow, 12: table, 15: wide}[head])
    drafter = SmallModel(model, 12)
    output = beds.answer(beds.engine(beds.TableTarget(table), [drafter], 4), [1, 2], max_tokens=60, **params)
    plain = beds.answer(beds.engine(beds.TableTarget(table)), [1, 2], max_tokens=60, **params)
    assert output.token_ids == plain.token_ids
    seen = output.speculation
    assert seen.num_accepted_draft_tokens == seen.num_draft_tokens > 0
    assert seen.drafter_failures == 0


def test_all_rows_share_one_pass_per_depth():
    model = beds.TableTransformer(1)
    drafter = SmallModel(model, VOCAB)
    rows = [row_of(tokens, i) for i, tokens in enumerate(([1, 2], [3], [4, 5, 6]))]
    for row in rows:
        drafter.begin(row)
    offers = drafter.propose(rows, [Limit(4, 4), Limit(1, 1), Limit(2, 2)])
    assert [len(offer) for offer in offers] == [4, 1, 2]
    assert model.passes == [6, 2, 1, 1]  # pending prompts, then the rows that go deeper
    alone = SmallModel(beds.TableTransformer(1), VOCAB)
    for row, limit, offer in zip(rows, [4, 1, 2], offers, strict=True):
        alone.begin(row)
        assert alone.propose([row], [Limit(limit, limit)])[0].tokens == offer.tokens


def test_tokens_emitted_while_not_asked_are_read_later():
    model = beds.TableTransformer(1)
    drafter, row = SmallModel(model, VOCAB), row_of([1, 2, 3])
    drafter.begin(row)
    assert model.prefilled == 0  # nothing is read before it is needed
    drafter.propose([row], [Limit(3, 3)])
    advance(drafter, row, [9] * 5)
    drafter.propose([row], [Limit(3, 3)])
    advance(drafter, row, list(range(16)) * 2)
    offer = drafter.propose([row], [Limit(3, 3)])[0]
    fresh = SmallModel(beds.TableTransformer(1), VOCAB)
    fresh.begin(row)
    assert fresh.propose([row], [Limit(3, 3)])[0].tokens == offer.tokens
    drafter.end(row)
    drafter.forget()
    assert len(model.free) == 8


def test_a_conversation_is_not_read_anew_at_every_turn():
    """What a row of before left is taken up where the next one begins alike; what it drafts is what it would alone."""
    model = beds.TableTransformer(1)
    drafter, turn = SmallModel(model, VOCAB), row_of([1, 2, 3] * 10)
    drafter.begin(turn)
    drafter.propose([turn], [Limit(3, 3)])
    advance(drafter, turn, [7] * 12)
    drafter.propose([turn], [Limit(3, 3)])
    drafter.end(turn)
    read = model.prefilled
    again, other = row_of([*turn.tokens, 5, 6, 7]), row_of([4, 5])
    again.id, other.id = 11, 12
    for row in (again, other):
        drafter.begin(row)
        offer = drafter.propose([row], [Limit(3, 3)])[0]
        fresh = SmallModel(beds.TableTransformer(1), VOCAB)
        fresh.begin(row)
        assert fresh.propose([row], [Limit(3, 3)])[0].tokens == offer.tokens
    assert model.prefilled == read, "the few new tokens ride along in the first pass"


def test_a_slot_in_an_unknown_state_is_not_kept():
    model = beds.TableTransformer(1)
    drafter, row = SmallModel(model, VOCAB), row_of([1, 2, 3])
    drafter.begin(row)
    drafter.propose([row], [Limit(3, 3)])
    model.truncate(drafter._rows[row.id].slot, 1)
    drafter.end(row)
    assert len(model.free) == 8


def test_trees_hold_the_chain_and_its_runners_up():
    drafter, row = SmallModel(beds.TableTransformer(1), VOCAB), row_of([1, 2, 3])
    drafter.begin(row)
    chain = drafter.propose([row], [Limit(4, 4)])[0]
    for nodes in range(1, 13):
        tree = drafter.propose([row], [Limit(nodes, 4, 3)])[0]
        draft = Draft(tree.tokens, tree.parents)
        draft.check(VOCAB)
        assert len(tree) == len(tree.probs) == len(tree.features) == min(nodes, 12)
        assert all(len(draft.children(parent)) <= 3 for parent in range(ANCHOR, len(tree)))
        node, path = ANCHOR, []
        while children := draft.children(node):
            node = children[0]
            path.append(tree.tokens[node])
        assert path == chain.tokens[: len(path)]


def test_floor_stops_the_chain_where_the_model_is_unsure():
    drafter, row = SmallModel(beds.TableTransformer(1), VOCAB), row_of([1, 2, 3])
    drafter.begin(row)
    full = drafter.propose([row], [Limit(8, 8)])[0]
    reach = np.cumprod(full.probs)
    cut = drafter.propose([row], [Limit(8, 8, floor=float(reach[3]) + 1e-9)])[0]
    assert cut.tokens == full.tokens[:4]


def test_chances_follow_the_gap():
    chances = [same_noise_chances([gap, 0.0], 0.0)[0] for gap in (0.0, 0.5, 1, 2, 4, 9)]
    assert chances == sorted(chances)
    assert 0.4 < chances[0] < 0.6 < 0.95 < chances[-1] < 1
    assert same_noise_chances([3.0], 1.0) == [0.9]
    assert sum(same_noise_chances([3.0, 2.0, 1.0, -80.0], 0.5)) < 1


class Uniforms:
    """A sampler whose uniforms are set by the test; the rest is the row's own."""

    def __init__(self, own, values):
        self.own, self.values = own, values

    def uniforms(self, purpose, step, count):
        assert purpose == "draft"
        return np.resize(self.values, count)

    def __getattr__(self, name):
        return getattr(self.own, name)


def drawn(table, limit, values, **params):
    params.setdefault("temperature", 1.0)
    row = row_of([1], vocab_size=len(table), **params)
    if values is not None:
        row.sampler = Uniforms(row.sampler, values)
    drafter = SmallModel(beds.TableTarget(table), len(table), classical=True)
    drafter.begin(row)
    return drafter.propose([row], [limit])[0], row


def test_fault_05_reported_q_is_what_was_drawn_from():
    table = np.log(np.array([[0.1, 0.2, 0.7], [0.5, 0.3, 0.2], [0.3, 0.3, 0.4]]))
    grid = (np.arange(1000) + 0.5) / 1000
    first, pairs = Counter(), Counter()
    for u in grid:
        offer, _ = drawn(table, Limit(1, 1), [u])
        assert offer.drawn
        assert np.allclose(offer.q[ANCHOR], [0.5, 0.3, 0.2])
        first[offer.tokens[0]] += 1
    assert [first[token] for token in range(3)] == [500, 300, 200]
    for u in grid[::10]:
        for v in grid[::10]:
            offer, _ = drawn(table, Limit(2, 1, 2), [u, v])
            pairs[tuple(offer.tokens)] += 1
    for (one, two), seen in pairs.items():
        q = [0.5, 0.3, 0.2]
        assert one != two
        assert abs(seen / 10_000 - q[one] * q[two] / (1 - q[one])) < 0.01


def test_fault_05_filters_apply_to_q():
    table = np.log(np.array([[0.5, 0.3, 0.2]] * 3))
    offer, row = drawn(table, Limit(3, 1, 3), None, top_k=2)
    assert np.allclose(offer.q[ANCHOR], [0.625, 0.375, 0])
    assert sorted(offer.tokens) == [0, 1]  # the third candidate does not exist
    greedy, _ = drawn(table, Limit(3, 3, 1), None, temperature=0.0)
    assert greedy.tokens == [0, 0, 0]
    assert all(np.array_equal(q, [1, 0, 0]) for q in greedy.q.values())
    assert Rejection()(
        np.log([[0.6, 0.3, 0.1]] * 4).astype(np.float32), Draft(offer.tokens, offer.parents, offer.q), row
    )


def test_the_shape_of_a_drawn_tree_does_not_depend_on_the_draws():
    table = beds.random_table(1, VOCAB)
    shapes = {
        tuple(drawn(table, Limit(7, 4, 3, floor=0.5), [u, 1 - u])[0].parents) for u in np.linspace(0.01, 0.99, 60)
    }
    assert shapes == {(-1, -1, -1, 0, 0, 3, 5)}


def test_draws_of_two_steps_differ_and_are_repeatable():
    table = np.zeros((VOCAB, VOCAB))
    row = row_of([1], temperature=1.0)
    drafter = SmallModel(beds.TableTarget(table), VOCAB, classical=True)
    drafter.begin(row)
    first = drafter.propose([row], [Limit(8, 8)])[0].tokens
    assert drafter.propose([row], [Limit(8, 8)])[0].tokens == first
    advance(drafter, row, [1])
    assert drafter.propose([row], [Limit(8, 8)])[0].tokens != first


def test_a_broken_draft_model_is_counted_and_harmless():
    model = beds.TableTransformer(4)
    made = beds.engine(beds.TableTransformer(3), [SmallModel(model, VOCAB)], 4)
    healthy, calls = model.forward, []

    def every_third(rows):
        calls.append(rows)
        if len(calls) % 3 == 0:
            raise RuntimeError("out of memory")
        return healthy(rows)

    model.forward = every_third
    output = beds.answer(made, [1, 2, 3], max_tokens=60)
    assert output.token_ids == beds.answer(beds.engine(beds.TableTransformer(3)), [1, 2, 3], max_tokens=60).token_ids
    assert 0 < output.speculation.drafter_failures < len(calls)


class DeadEnd:
    """A grammar below whose second token nothing may follow."""

    error = ""

    def allowed(self, path):
        return np.full(VOCAB, len(path) < 2)

    def fitting(self, tokens, parents):
        return [True] * len(tokens)


@pytest.mark.parametrize("classical", [False, True])
def test_fault_17_a_path_on_which_all_is_banned_ends_that_draft_alone(classical):
    rows = [row_of([1, 2], 0), row_of([3, 4], 1)]
    rows[1].sampler = RowSampler(rows[1].params, 7, VOCAB, [3, 4], (), DeadEnd())
    guard = Guard(SmallModel(beds.TableTransformer(1), VOCAB, classical), VOCAB)
    offers = guard.propose(rows, [Limit(5, 5)] * 2)
    assert [len(offer) for offer in offers] == [5, 2]
    assert [guard.failures(row) for row in rows] == [0, 0]


@pytest.mark.parametrize("classical", [False, True])
def test_fault_06_a_draft_model_without_sense_is_a_failure(classical):
    row = row_of([1, 2])
    guard = Guard(SmallModel(beds.TableTarget(np.full((VOCAB, VOCAB), np.nan)), VOCAB, classical), VOCAB)
    assert len(guard.propose([row], [Limit(5, 5)])[0]) == 0
    assert guard.failures(row) == 1


def test_rows_beyond_the_slots_are_not_drafted_for():
    drafter = Guard(SmallModel(beds.TableTransformer(1, slots=1), VOCAB), VOCAB)
    rows = [row_of([1, 2], 0), row_of([3, 4], 1)]
    for row in rows:
        drafter.begin(row)
    offers = drafter.propose(rows, [Limit(2, 2)] * 2)
    assert [len(offer) for offer in offers] == [2, 0]
    assert [drafter.failures(row) for row in rows] == [0, 1]
