"""The adaptive controller with many rows in a pass: who rests, who is asked, and what probes may cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from control_beds import PASS, Guesser, World, flat, stairs, started, steep
from slipstream.control import asking
from slipstream.control.adaptive import Adaptive
from slipstream.control.base import StepCost
from slipstream.core.params import SamplingParams
from slipstream.core.tree import Draft
from slipstream.core.types import Observation, Offers, Row, Verdict


def test_batches_stop_drafting_when_rows_are_dear():
    alone = World([Guesser("g", 0.6, 0.00001)], stairs)
    alone.run(Adaptive(8, "chain"), 500)
    crowd = World([Guesser("g", 0.6, 0.00001)], steep, rows=8)
    speed = crowd.run(Adaptive(8, "chain"), 500)
    assert alone.drafted > 500
    assert crowd.drafted < 0.15 * 8 * 500
    assert speed > 0.93


def crowd_speed():
    """32 rows, and a drafter whose hits, had they cost nothing, would hardly pay for their rows in the pass."""
    return World([Guesser("g", 0.3, 0.0002, belief=0.3)], flat, rows=32).run(Adaptive(), 400)


def test_fault_25_hits_here_and_there_do_not_pay_for_asking_a_whole_batch():
    assert crowd_speed() > 0.97


def test_planted_probes_paid_by_every_row_are_seen(monkeypatch):
    def every_row(self, observations):
        for seen in observations:
            for name, surprise in self.merger.learn(seen.row, seen.verdict.tokens):
                self.sources[name].refund(surprise)

    monkeypatch.setattr(Adaptive, "_learn", every_row)
    # Rests and rare probes would keep it small.
    credit = asking.Source.pass_time
    monkeypatch.setattr(asking.Source, "pass_time", lambda self, seconds: credit(self, 4 * seconds))
    monkeypatch.setattr(asking.Rest, "now", lambda self: False)
    assert crowd_speed() < 0.9


def asked_per_row(rows):
    guesser = Guesser("useless", 0.0, 0.000001)
    World([guesser], flat, rows=rows).run(Adaptive(), 60)
    return guesser.asked / rows


def test_fault_25_rows_of_a_batch_are_left_alone_sooner(monkeypatch):
    assert asked_per_row(16) < 0.6 * asked_per_row(1)
    monkeypatch.setattr(asking, "FEWEST_ANSWERS", asking.QUIET_AFTER)
    assert asked_per_row(16) > 0.6 * asked_per_row(1), "and the same patience with every row would be seen"


@pytest.mark.parametrize("count", [1, 8])
def test_fault_25_a_source_that_no_row_wants_keeps_nobody_awake(count):
    """Each request names the drafter "useless"; "other" is loaded too and never asked."""
    controller = started(Adaptive(4), {size: flat(size) for size in range(1, 41)})
    rows = [Row(i, [0], 1, SamplingParams(), 0, sampler=None) for i in range(count)]
    asked = 0
    for _ in range(300):
        limits = [replace(limit, depths=limit.depths | {"other": 0}) for limit in controller.limits(rows)]
        asks = any(limit.nodes for limit in limits)
        asked += asks
        offers = [
            [Offers("useless", [1], [-1], [0.02], seconds=1e-6) if limit.nodes else Offers("useless"), Offers("other")]
            for limit in limits
        ]
        drafts = controller.choose(rows, offers, limits) if asks else [Draft() for _ in rows]
        seen = [Observation(row, draft, Verdict([0], []), None) for row, draft in zip(rows, drafts, strict=True)]
        nodes = count + sum(map(len, drafts))
        controller.observe(seen, StepCost(nodes, flat(nodes), 0.0, 1e-5))
    assert 0 < asked < 100


def asked_in_a_batch(chance):
    """Steps of 300 in which anybody is asked, and "dear". While the batch fills, "dear" reads prompts each time."""
    controller = started(Adaptive(4), {size: flat(size) for size in range(1, 41)})
    asked = {"anybody": 0, "dear": 0}
    for step in range(300):
        rows = [Row(min(step, 4) * 8 + i, [0] * 200, 1, SamplingParams(), 0, sampler=None) for i in range(8)]
        limits = controller.limits(rows)
        drafts = [Draft() for _ in rows]
        if any(limit.nodes for limit in limits):
            asked["anybody"] += 1
            cheap = [Offers("cheap", [1], [-1], [0.02], seconds=1e-6) for _ in rows]
            limits = controller.beside("dear", rows, limits, [cheap])
            asks = limits[0].asks("dear")
            asked["dear"] += asks
            took = 0.025 if step < 4 else 0.0002
            dear = [Offers("dear", [2], [-1], [chance], seconds=took) if asks else Offers("dear") for _ in rows]
            drafts = controller.choose(rows, list(zip(cheap, dear, strict=True)), limits)
        verdict = Verdict([2, 0], [0]) if chance > 0.5 else Verdict([0], [])
        seen = [
            Observation(row, draft, verdict if len(draft) else Verdict([0], []), None)
            for row, draft in zip(rows, drafts, strict=True)
        ]
        nodes = len(rows) + sum(map(len, drafts))
        controller.observe(seen, StepCost(nodes, flat(nodes), 0.0, 1e-5))
    return asked


def test_fault_25_a_source_that_would_have_to_read_for_all_keeps_nobody_awake():
    """What it takes when it has nothing to read never shows."""
    asked = asked_in_a_batch(0.02)
    assert 0 < asked["anybody"] < 100
    assert asked["dear"] < 10


def test_a_source_that_paid_reads_for_a_batch_that_wakes():
    assert asked_in_a_batch(0.9)["dear"] > 200


def test_rows_rest_on_their_own():
    """One row copies, the other does not: only the second one is left alone."""
    controller = started(Adaptive(4, "chain"), {size: flat(size) for size in (1, 2, 10)})
    rows = [Row(i, [0], 1, SamplingParams(), 0, sampler=None) for i in range(2)]
    asked = [0, 0]
    for _ in range(200):
        limits = controller.limits(rows)
        offers = [
            [Offers("g", [1, 2], [-1, 0], [belief, belief], seconds=1e-6) if limit.nodes else Offers("g")]
            for belief, limit in zip((0.7, 0.1), limits, strict=True)
        ]
        drafts = controller.choose(rows, offers, limits) if any(limit.nodes for limit in limits) else [Draft(), Draft()]
        for index, limit in enumerate(limits):
            asked[index] += limit.nodes > 0
        verdicts = [Verdict([1, 2, 3], [0, 1][: len(drafts[0])]), Verdict([9], [])]
        seen = [
            Observation(row, draft, verdict, None) for row, draft, verdict in zip(rows, drafts, verdicts, strict=True)
        ]
        count = 2 + sum(map(len, drafts))
        controller.observe(seen, StepCost(count, flat(count), 0.0))
    assert asked[0] > 190
    assert asked[1] < 60


def test_fault_25_nobody_is_asked_where_no_node_can_pay():
    """In a full batch each further row costs as much as a token is worth."""
    rows = [Row(i, [0], 1, SamplingParams(), 0, sampler=None) for i in range(32)]
    controller = started(Adaptive(8), {size: PASS * size for size in (1, 8, 16, 32, 64, 300)})
    assert not any(limit.nodes for limit in controller.limits(rows))
    cheap = started(Adaptive(8), {size: PASS * (1 + 0.01 * size) for size in (1, 8, 16, 32, 64, 300)})
    assert all(limit.nodes for limit in cheap.limits(rows))
