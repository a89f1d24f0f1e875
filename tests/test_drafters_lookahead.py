"""Lookahead: the window improves by Jacobi iteration, its n-grams are drafted, the answer is that of plain decoding."""

from __future__ import annotations

import pytest

import beds
from slipstream.core.params import SamplingParams
from slipstream.core.tree import Draft
from slipstream.core.types import Limit, Row
from slipstream.drafters.lookahead import COLUMNS, LEVELS, Lookahead

VOCAB = 12
CYCLE = [3, 7, 1, 9, 4, 8, 2, 6]


def row(tokens, ident=0):
    return Row(ident, list(tokens), len(tokens), SamplingParams(), 0, sampler=None)


@pytest.mark.parametrize("limit", [Limit(1, 1, 1), Limit(4, 2, 2), Limit(8, 8, 3), Limit(30, 8, 3), Limit(9, 9, 1)])
def test_offers_are_well_formed_and_within_their_limit(limit):
    drafter, one = Lookahead(), row([1, 2, 3, 1, 2, 4, 1, 2, 3])
    drafter.begin(one)
    offer = drafter.propose([one], [limit])[0]
    draft = Draft(offer.tokens, offer.parents)
    draft.check(VOCAB)
    assert 0 < len(draft) <= limit.nodes
    assert max(draft.depths()) <= limit.depth
    assert max(offer.parents.count(parent) for parent in offer.parents) <= limit.width


def test_an_n_gram_of_the_text_is_drafted():
    drafter, one = Lookahead(), row([5, 6, 7, 8, 5])
    drafter.begin(one)
    assert drafter.propose([one], [Limit(4, 4, 2)])[0].tokens[:2] == [6, 7]


def test_the_window_finds_n_grams_that_the_text_has_not_shown():
    """On a cycle that the prompt does not show, one round of it is slow and the rest is drafted; the window alone is
    what shortens the first round."""
    plain_target, target = (beds.TableTarget(beds.cycle_table(CYCLE, VOCAB)) for _ in range(2))
    plain = beds.answer(beds.engine(plain_target), [3], max_tokens=60)
    drafter = Lookahead()
    made = beds.answer(beds.engine(target, [drafter], 24, shape="tree"), [3], max_tokens=60)
    assert made.token_ids == plain.token_ids
    assert len(target.passes) < 30
    assert made.speculation.drafter_failures == 0


def test_every_pass_moves_the_window_on():
    drafter, seen = Lookahead(), []
    target = beds.TableTarget(beds.random_table(4, VOCAB, spread=3.0))
    engine = beds.engine(target, [drafter], 3 * COLUMNS * LEVELS, shape="tree")
    request = engine.add([1, 2, 3], SamplingParams(max_tokens=12))
    while not request.done:
        engine.step()
        for state in drafter._rows.values():
            seen.append([list(level) for level in state.levels])
            assert [len(level) for level in state.levels] == [COLUMNS] * LEVELS
    assert len({str(levels) for levels in seen}) > 1
    assert not drafter._rows


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 3}])
@pytest.mark.parametrize("prompt", [[1], [1, 2], [2, 2, 2, 2]])
def test_answers_are_those_of_plain_decoding(prompt, params, shape):
    table = beds.random_table(3, VOCAB, spread=3.0)
    plain = beds.answer(beds.engine(beds.TableTarget(table)), prompt, max_tokens=80, **params)
    made = beds.answer(
        beds.engine(beds.TableTarget(table), [Lookahead()], 10, shape=shape), prompt, max_tokens=80, **params
    )
    assert made.token_ids == plain.token_ids
    assert made.speculation.drafter_failures == 0
