"""Heads at work: caches that hold the truth, drafts that do not depend on company, trees within their limits."""

from __future__ import annotations

import numpy as np
import pytest

import beds
import head_beds
import native_beds
from slipstream.core.params import SamplingParams
from slipstream.core.tree import Draft
from slipstream.core.types import Limit, Observation, Row, Verdict
from slipstream.drafters.heads.cache import LOOK_BACK
from slipstream.drafters.heads.eagle import Eagle
from slipstream.drafters.heads.medusa import Medusa, grow
from slipstream.drafters.heads.parts import parts_of
from slipstream.drafters.heads.probe import own_text
from slipstream.kernels.passes import BLOCK, KEY_TILE
from slipstream.sampling import RowSampler
from test_heads_probe import MODEL, PROMPT, trained

LAYERS = (1, 2, 3)
VOCAB = 101


@pytest.fixture(scope="module")
def fitting():
    """A head that is nearly always right on the bed's own text."""
    target = native_beds.target(**MODEL)
    return trained(target, own_text(target, PROMPT, 120))


def target_of(head_layers=LAYERS):
    return native_beds.target(features=head_layers, **MODEL)


def drafter_of(head):
    return Eagle(head, parts_of(native_beds.model(**MODEL)), VOCAB, 400)


def engine_of(drafter, nodes=4, shape="tree", target=None):
    return beds.engine(target or target_of(), [drafter], nodes, tokenizer=beds.letters(VOCAB), shape=shape)


def plain(prompt, **params):
    engine = beds.engine(target_of(), tokenizer=beds.letters(VOCAB))
    return beds.answer(engine, prompt, speculation=False, **params)


def entries(drafter, memory):
    """Keys and values of a memory: [entries, floats]; every head of the beds has two key-value heads of 16 values."""
    found = []
    for place in range(len(memory.places)):
        block = drafter.memories.pool.data[drafter.memories.slots.tables[memory.slot, place // BLOCK]]
        halves, at = block.reshape(-1, 2, 16 * BLOCK), place % BLOCK  # per layer and head: keys, then values
        keys, values = halves[:, 0].reshape(-1, BLOCK // KEY_TILE, 16, KEY_TILE), halves[:, 1].reshape(-1, BLOCK, 16)
        found.append(np.concatenate([keys[:, at // KEY_TILE, :, at % KEY_TILE].reshape(-1), values[:, at].reshape(-1)]))
    return np.array(found)


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_a_head_that_fits_saves_passes(fitting, shape):
    answer = beds.answer(engine_of(drafter_of(fitting), shape=shape), PROMPT, max_tokens=60, ignore_eos=True)
    assert answer.token_ids == plain(PROMPT, max_tokens=60, ignore_eos=True).token_ids
    assert answer.speculation.num_accepted_draft_tokens > 15
    assert answer.speculation.drafter_failures == 0
    assert answer.sources.count("eagle") == answer.speculation.num_accepted_draft_tokens


@pytest.mark.parametrize("name", ["eagle3", "eagle3-ours", "eagle3-two", "eagle1"])
def test_fault_15_the_cache_of_a_head_holds_the_targets_features(name, fitting, monkeypatch):
    """After an answer full of drafts it equals that of a head which read the whole text at once."""
    monkeypatch.setattr("slipstream.drafters.heads.cache.LOOK_BACK", 400)
    head = fitting if name == "eagle3" else head_beds.head(name)
    layers = LAYERS if name == "eagle3" else (0, 1, 2) if "eagle3" in name else (4,)
    drafter, target = drafter_of(head), target_of(layers)
    answer = beds.answer(engine_of(drafter, target=target), PROMPT, max_tokens=50, ignore_eos=True)
    memory = drafter.memories._kept[-1]
    text = [*PROMPT, *answer.token_ids]
    # The last token has no room for drafts, so nobody asks what follows those of the step before.
    assert memory.places == list(range(len(memory.places)))
    assert len(memory.places) > len(text) - 6
    fresh, row = drafter_of(head), row_of(text)
    fresh.propose([joined(fresh, row, layers)], [Limit(1, 1)])
    fresh.end(row)
    whole = entries(fresh, fresh.memories._kept[-1])
    assert np.array_equal(entries(drafter, memory), whole[: len(memory.places)])


def test_a_head_reads_the_end_of_a_prompt_and_nothing_before_it_is_asked(fitting):
    drafter, row = drafter_of(fitting), row_of(native_beds.tokens(3 * LOOK_BACK))
    memory = drafter.memories.get(joined(drafter, row).id)
    assert memory.places == []
    first = len(row.tokens) - 1 - LOOK_BACK
    offer = drafter.propose([row], [Limit(4, 2, 2)])[0]
    assert memory.places == list(range(first, first + LOOK_BACK))
    assert memory.waiting == []
    alone = drafter_of(fitting)
    target = target_of()
    features = target.prefill(target.open(), row.tokens[:-1])
    alone.prefilled(row, first, features[first:])  # parts of a prompt, of which the first was in the cache
    alone.begin(row)
    assert alone.propose([row], [Limit(4, 2, 2)])[0] == offer
    for _ in range(3):  # asked in the first step, not in the others
        row.tokens.append(4)
        seen = Observation(row, Draft(), Verdict([4], []), np.zeros((1, VOCAB), np.float32), features[-1:])
        drafter.observe([seen])
    assert len(memory.places) == LOOK_BACK + 1
    assert memory.unread == 2


@pytest.mark.parametrize("ended", [False, True])
def test_the_first_level_is_begun_for_rows_that_go_on(fitting, ended):
    drafter, row = drafter_of(fitting), row_of(PROMPT)
    joined(drafter, row)
    drafter.propose([row], [Limit(4, 2, 2)])
    row.tokens.append(4)
    target = target_of()
    features = target.prefill(target.open(), row.tokens[-2:-1])
    drafter.observe([Observation(row, Draft(), Verdict([4], []), np.zeros((1, VOCAB), np.float32), features, ended)])
    assert len(drafter._begun) == (not ended)
    drafter.end(row)


def test_planted_features_of_the_wrong_rows_are_seen(fitting):
    class Wrong(Eagle):
        def observe(self, observations):
            for seen in observations:
                seen.features = np.roll(seen.features, 1, axis=0)
            super().observe(observations)

    caches = []
    for kind in (Eagle, Wrong):
        drafter = kind(fitting, parts_of(native_beds.model(**MODEL)), VOCAB, 400)
        beds.answer(engine_of(drafter), PROMPT, max_tokens=50, ignore_eos=True)
        caches.append(entries(drafter, drafter.memories._kept[-1]))
    assert not np.array_equal(*caches)


def row_of(tokens, index=0, **params):
    params = SamplingParams(**params)
    return Row(index, list(tokens), len(tokens), params, 7, RowSampler(params, 7, VOCAB, tokens))


def joined(drafter, row, layers=LAYERS):
    target = target_of(layers)
    drafter.prefilled(row, 0, target.prefill(target.open(), row.tokens[:-1]))
    drafter.begin(row)
    return row


@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 7}, {"repetition_penalty": 1.3}])
def test_fault_17_drafts_do_not_depend_on_the_batch(fitting, params):
    limit = Limit(6, 3, 3)
    rows = [row_of(PROMPT, 0, **params), row_of(PROMPT[:7], 1, **params), row_of(PROMPT[3:], 2, **params)]
    together = drafter_of(fitting)
    for row in rows:
        joined(together, row)
    offers = together.propose(rows, [limit] * 3)
    for row, offer in zip(rows, offers, strict=True):
        alone = drafter_of(fitting)
        joined(alone, row)
        assert alone.propose([row], [limit])[0] == offer
        assert len(offer)
    assert together.propose(rows, [limit] * 3) == offers  # asked again without a step in between


@pytest.mark.parametrize("limit", [Limit(1, 1), Limit(3, 3), Limit(5, 2, 4), Limit(8, 4, 3, floor=0.3), Limit(2, 8, 2)])
def test_trees_stay_within_their_limits(fitting, limit):
    drafter = drafter_of(fitting)
    offer = drafter.propose([joined(drafter, row_of(PROMPT))], [limit])[0]
    assert 0 < len(offer) <= limit.nodes
    depths = []
    for parent in offer.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
        assert offer.parents.count(parent) <= max(1, limit.width)
    assert max(depths) <= min(limit.depth, fitting.config.depth)
    assert all(0 < chance < 1 for chance in offer.probs)


def test_a_reused_prefix_is_remembered(fitting):
    drafter = drafter_of(fitting)
    engine = engine_of(drafter)
    first = beds.answer(engine, PROMPT, max_tokens=20, ignore_eos=True)
    longer = [*PROMPT, *first.token_ids, 4, 9, 1]
    second = beds.answer(engine, longer, max_tokens=20, ignore_eos=True)
    assert second.token_ids == plain(longer, max_tokens=20, ignore_eos=True).token_ids
    memory = drafter.memories._kept[-1]
    assert memory.places[:25] == list(range(25))
    assert len(memory.places) > len(longer)


def test_fault_22_a_prefix_of_which_nothing_is_known_harms_nothing(fitting):
    drafter = drafter_of(fitting)
    engine = engine_of(drafter)
    beds.answer(engine, PROMPT, max_tokens=20, ignore_eos=True)
    drafter.forget()
    again = beds.answer(engine, PROMPT, max_tokens=20, ignore_eos=True)
    assert again.token_ids == plain(PROMPT, max_tokens=20, ignore_eos=True).token_ids
    assert again.speculation.drafter_failures == 0


def test_memory_comes_back(fitting):
    drafter = drafter_of(fitting)
    engine = engine_of(drafter)
    for index in range(70):
        beds.answer(engine, [index, *PROMPT], max_tokens=3, ignore_eos=True)
    assert drafter.memories.slots.free >= 60
    drafter.forget()
    assert drafter.memories.pool.used == 0


def test_medusa_reads_the_newest_feature():
    head = head_beds.head("medusa")
    drafter = Medusa(head, parts_of(native_beds.model(**MODEL)), VOCAB)
    row = joined(drafter, row_of(PROMPT), (4,))
    offer = drafter.propose([row], [Limit(8, 3, 3)])[0]
    assert 3 < len(offer) <= 8
    row.tokens.append(3)
    assert not len(drafter.propose([row], [Limit(8, 3, 3)])[0])  # its feature is not known yet


def test_medusa_trees_take_the_most_probable_paths_first():
    from slipstream.core.types import Offers

    levels = [([1, 2], [0.6, 0.3], [0, 0]), ([3, 4], [0.5, 0.4], [0, 0])]
    offer = Offers("medusa")
    grow(offer, levels, Limit(5, 2, 2))
    assert offer.tokens == [1, 2, 3, 4, 3]
    assert offer.parents == [-1, -1, 0, 0, 1]


def test_observations_without_features_are_passed_over(fitting):
    drafter = drafter_of(fitting)
    row = joined(drafter, row_of(PROMPT))
    drafter.observe([Observation(row, None, None, None)])
    assert len(drafter.propose([row], [Limit(4, 2, 2)])[0])
