"""Decisions are visible: nodes by source and depth, estimates beside outcomes, for one answer and for several."""

from __future__ import annotations

import json

import pytest

import beds
from slipstream.cli.report import speculation_lines
from slipstream.control.adaptive import Adaptive
from slipstream.core.stats import Speculation, tally, total
from slipstream.core.types import CompletionOutput, Offers, RequestOutput, speculation_of
from slipstream.drafters.lookup import Lookup
from slipstream.drafters.recycling import Recycling

VOCAB = 10


def cycle():
    """Passes take long enough for drafts to pay."""
    return beds.TableTarget(beds.cycle_table(range(VOCAB), VOCAB), pause=0.002)


def answer(controller=None, drafters=None, **params):
    made = beds.engine(cycle(), drafters or [Lookup(), Recycling(VOCAB)], 6, **controller or {"shape": "tree"})
    return beds.answer(made, [1, 2, 3], max_tokens=80, **params).speculation


@pytest.mark.parametrize("controller", [{"shape": "tree"}, {"shape": "chain"}, {"controller": Adaptive(6)}])
def test_fault_23_counts_by_source_and_depth_agree_with_the_totals(controller):
    stats = answer(controller)
    assert sum(sum(counts.verified) for counts in stats.nodes.values()) == stats.num_draft_tokens > 0
    assert sum(sum(counts.accepted) for counts in stats.nodes.values()) == stats.num_accepted_draft_tokens > 0
    for source, counts in stats.nodes.items():
        assert sum(counts.verified) == stats.drafted_by_source.get(source, 0)
        assert sum(counts.accepted) == stats.accepted_by_source.get(source, 0)
        for depth, accepted in enumerate(counts.accepted):
            assert accepted <= counts.verified[depth] <= counts.offered[depth]
    deep = [
        sum(counts.accepted[depth] for counts in stats.nodes.values() if depth < len(counts.accepted))
        for depth in range(6)
    ]
    histogram = stats.acceptance_histogram + [0] * 7
    assert deep == [sum(histogram[depth + 1 :]) for depth in range(6)]


def test_an_offer_that_is_not_verified_is_counted_as_offered():
    offers = Offers("a", [1, 2, 3], [-1, 0, -1], [0.5, 0.5, 0.5])
    made = beds.engine(cycle(), [beds.Script(lambda row, limit: offers, "a")], 1, shape="tree")
    stats = beds.answer(made, [1], max_tokens=2).speculation
    assert stats.of("a").offered == [2, 1]
    assert stats.of("a").verified == [1]


def test_estimates_are_the_sums_of_what_was_believed():
    made = beds.engine(
        cycle(), [beds.Script(lambda row, limit: beds.offer_chain([9, 9][: limit.depth], "s", 0.5), "s")], 2
    )
    stats = beds.answer(made, [1], max_tokens=9).speculation
    full = sum(1 for depth in range(stats.num_spec_steps) if depth < stats.num_draft_tokens - stats.num_spec_steps)
    assert stats.predicted_accepted == pytest.approx(0.5 * stats.num_spec_steps + 0.25 * full)
    off = stats.predicted_accepted - stats.num_accepted_draft_tokens
    assert stats.calibration_error == pytest.approx(off / stats.num_draft_tokens)
    assert stats.predicted_tokens == pytest.approx(stats.num_steps + stats.predicted_accepted)


def test_a_controller_that_knows_costs_predicts_a_gain():
    controller = Adaptive(6)
    controller.start_from({1: 0.002, 7: 0.0021})
    stats = answer({"controller": controller})
    assert 1.0 < stats.predicted_gain < 7.0
    assert answer({"controller": Adaptive(0)}).predicted_gain == 1.0


def test_several_answers_together_are_their_sums():
    one, two = answer(), answer(temperature=1.0, seed=3)
    one.speedup_estimate, two.speedup_estimate = 2.0, 1.0
    whole = total([one, two, Speculation()], [80, 40, 0])
    assert whole.num_steps == one.num_steps + two.num_steps
    assert whole.num_draft_tokens == one.num_draft_tokens + two.num_draft_tokens
    assert sum(whole.acceptance_histogram) == whole.num_spec_steps
    assert whole.speedup_estimate == pytest.approx(120 / 80)
    assert whole.exact
    assert sum(whole.of("recycling").offered) == sum(one.of("recycling").offered) + sum(two.of("recycling").offered)
    assert total([], []).speedup_estimate is None
    one.exact = False
    assert not total([one, two], [1, 1]).exact


def test_all_of_it_is_json_and_can_be_read_by_people():
    stats = answer()
    found = json.loads(json.dumps(stats.as_dict()))
    assert found["nodes"]["lookup"]["verified"] == stats.of("lookup").verified
    assert {"calibration_error", "predicted_gain", "predicted_accepted"} <= set(found)
    lines = "\n".join(speculation_lines(stats))
    assert "lookup, accepted/verified/offered by depth: " in lines
    assert "x predicted, " in lines
    assert speculation_lines(Speculation())


def test_tally_counts_by_depth():
    counts = [1]
    tally(counts, [1, 3, 3])
    assert counts == [2, 0, 2]


def test_all_answers_of_several_prompts_together():
    def answer(steps: int, tokens: int) -> CompletionOutput:
        stats = Speculation(num_steps=steps, tokens_before_trimming=tokens + 1, speedup_estimate=2.0)
        return CompletionOutput(0, "", [7] * tokens, "length", speculation=stats)

    whole = speculation_of(
        [RequestOutput(None, [1], [answer(2, 7), answer(3, 9)]), RequestOutput(None, [1], [answer(5, 11)])]
    )
    assert (whole.num_steps, whole.tokens_before_trimming, whole.tokens_per_pass) == (10, 30, 3.0)
    assert whole.speedup_estimate == pytest.approx(2.0)
    assert speculation_of([]).num_steps == 0
