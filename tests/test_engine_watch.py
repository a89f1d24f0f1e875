"""The watch over drafters: drift is seen, acted on and taken back; the controller's decisions are visible."""

from __future__ import annotations

import numpy as np
import pytest

import beds
from slipstream.control.adaptive import Adaptive
from slipstream.core.params import SamplingParams
from slipstream.core.types import Limit, Row
from slipstream.drafters.base import Drafter
from slipstream.drafters.forced import Forced
from slipstream.engine import watch as watch_module
from slipstream.engine.drafting import Drafting
from slipstream.engine.watch import FIRST_PAUSE, LOOK_EVERY, WINDOW, Watch

SIZE = 16


class Bench:
    """A watch over one drafter whose counts the test makes up, look by look."""

    def __init__(self, drafter: Drafter | None = None) -> None:
        self.drafting = Drafting([drafter or beds.given([1])], SIZE)
        self.watch = Watch(self.drafting)
        self.verified = self.accepted = 0
        self.whats: list[str] = []

    def look(self, rate: float, nodes: int = WINDOW, gain: float | None = None, share: float = 1.0) -> list[str]:
        """One look after `nodes` nodes with this acceptance; returns what was decided."""
        guard = self.drafting.guards[0]
        for step in range(LOOK_EVERY):
            due = self.watch.due(True)
            guard.asked += bool(self.drafting.active) and step < share * LOOK_EVERY
        assert due
        if self.drafting.active:
            self.verified += nodes
            self.accepted += round(rate * nodes)
        seen = len(self.watch.events)
        gains = {} if gain is None else {guard.name: gain}
        self.watch.look({guard.name: self.verified}, {guard.name: self.accepted}, gains)
        return [event.what for event in list(self.watch.events)[seen:]]


def test_a_drafter_that_stays_as_it_is_is_left_alone():
    bench, rng = Bench(), np.random.default_rng(1)
    for _ in range(500):
        assert bench.look(rng.binomial(WINDOW, 0.3) / WINDOW) == []
    state = bench.watch.states()["given"]
    assert (state.active, state.working) == (True, True)
    assert abs(state.baseline - 0.3) < 0.05


def test_slow_change_is_no_drift():
    bench = Bench()
    for rate in np.linspace(0.8, 0.05, 60):
        assert bench.look(rate) == []


def test_drift_takes_a_drafter_out_and_a_probe_brings_it_back():
    bench = Bench()
    for _ in range(5):
        assert bench.look(0.6) == []
    assert bench.look(0.1) == ["out"]
    assert bench.drafting.active == ()
    assert not bench.watch.states()["given"].active
    assert bench.watch.events[-1].acceptance == pytest.approx(0.1)
    assert bench.watch.events[-1].baseline == pytest.approx(0.6)
    looks = FIRST_PAUSE // LOOK_EVERY
    for _ in range(looks - 1):
        assert bench.look(0.0) == []
    assert bench.look(0.0) == ["probe"]
    assert bench.drafting.active
    assert bench.look(0.6, WINDOW // 2) == []
    assert bench.look(0.6, WINDOW // 2) == ["back"]
    assert bench.look(0.6) == []


def test_a_probe_that_fails_waits_longer_and_what_lasts_becomes_usual():
    bench, pauses, since = Bench(), [], 0
    bench.look(0.6)
    decided = bench.look(0.0)
    for _ in range(2000):
        since += 1
        if "probe" in decided:
            pauses.append(since)
        if "out" in decided:
            since = 0
        if "back" in decided:
            break
        decided = bench.look(0.05)
    assert "back" in decided
    assert len(pauses) > 1
    assert pauses == sorted(pauses)


def test_another_kind_of_text_is_no_drift_where_no_step_is_slower_for_it():
    bench = Bench()
    bench.look(0.6)
    assert bench.look(0.2, gain=1.0) == []
    bench = Bench()
    bench.look(0.6)
    assert bench.look(0.2, gain=0.9) == ["out"]


def test_a_probe_without_nodes_ends():
    bench = Bench()
    bench.look(0.6)
    decided = bench.look(0.0)
    while "probe" not in decided:
        decided = bench.look(0.0)
    for _ in range(watch_module.PROBE_LOOKS - 1):
        assert bench.look(0.0, nodes=0) == []
    assert bench.look(0.0, nodes=0) == ["back"]


def test_an_exchanged_drafter_has_a_clean_record():
    bench = Bench()
    bench.look(0.6)
    assert bench.look(0.0) == ["out"]
    bench.drafting.exchange(beds.given([1]))
    assert bench.drafting.active
    for _ in range(3):
        assert bench.look(0.1) == []
    assert bench.watch.states()["given"].baseline == pytest.approx(0.1)
    bench.drafting.previous()
    assert bench.drafting.active
    assert bench.look(0.6) == []


def test_the_controllers_decisions_are_visible():
    bench = Bench()
    assert bench.look(0.5, gain=0.9, share=0.05) == ["resting"]
    assert bench.watch.events[-1].gain == 0.9
    assert bench.look(0.5, share=0.3) == []
    assert bench.look(0.5, share=0.9) == ["working"]


def test_a_grammar_that_no_row_has_is_no_drafter_that_rests():
    bench = Bench(Forced())
    bench.look(0.5)
    assert bench.look(0.5, nodes=0, share=0.0) == []
    assert bench.watch.states()["grammar"].working


class Turning:
    """Guesses right until told to guess wrong."""

    def __init__(self, target: beds.TableTarget) -> None:
        self.target, self.wrong = target, False

    def __call__(self, row: Row, limit: Limit) -> list[int]:
        tokens = list(row.tokens)
        for _ in range(min(limit.nodes, limit.depth)):
            best = int(np.argmax(self.target.after(tokens)))
            tokens.append((best + self.wrong) % SIZE)
        return tokens[len(row.tokens) :]


@pytest.mark.parametrize("watched", [True, False])
def test_planted_drift_is_seen_in_an_engine_and_no_token_changes(monkeypatch, watched):
    monkeypatch.setattr(watch_module, "FIRST_PAUSE", 64)
    target = beds.TableTarget(beds.random_table(1, SIZE))
    turning = Turning(target)
    made = beds.engine(target, [beds.Script(turning, "turning")], 4)
    if not watched:
        monkeypatch.setattr(made.watch, "look", lambda *_: None)
    plain = beds.answer(beds.engine(beds.TableTarget(beds.random_table(1, SIZE))), [1], max_tokens=400).token_ids

    def steps(count: int) -> None:
        for _ in range(count):
            assert beds.answer(made, [1], max_tokens=400).token_ids == plain

    steps(5)
    assert not made.watch.events
    turning.wrong = True
    steps(1)
    turning.wrong = False
    steps(4)
    whats = [event.what for event in made.snapshot().events]
    assert whats == (["out", "probe", "back"] if watched else [])


def test_an_adaptive_controllers_rest_shows_in_an_engine():
    target = beds.TableTarget(beds.random_table(1, SIZE), pause=0.001)

    def slow_and_wrong(row: Row, limit: Limit) -> list[int]:
        beds.time.sleep(0.002)
        return [(int(np.argmax(target.after(row.tokens))) + 1) % SIZE]

    made = beds.engine(target, [beds.Script(slow_and_wrong, "useless")], controller=Adaptive(4))
    made.run([made.add([1], SamplingParams(max_tokens=300))])
    assert [event.what for event in made.snapshot().events] == ["resting"]
    assert not made.snapshot().drafters["useless"].working


def test_a_long_prompt_that_is_read_beside_the_rows_sends_no_drafter_to_rest(monkeypatch):
    monkeypatch.setattr("slipstream.engine.reading.Pace.tokens", lambda *_: 4)
    monkeypatch.setattr("slipstream.engine.reader.FEWEST_TOKENS", 4)
    target = beds.TableTarget(beds.random_table(1, SIZE), max_context=2000)
    target.reads_along = True
    made = beds.engine(target, [beds.given([1])])
    running = made.add([1], SamplingParams(max_tokens=1000))
    for _ in range(LOOK_EVERY):
        made.step()
    asked, steps = made.drafting.guards[0].asked, made.snapshot().steps
    long = made.add([2] * (4 * 3 * LOOK_EVERY), SamplingParams(max_tokens=1))
    for _ in range(2 * LOOK_EVERY):
        made.step()
    more = 2 * LOOK_EVERY
    assert (made.drafting.guards[0].asked, made.snapshot().steps) == (asked + more, steps + more)
    assert not made.snapshot().events
    made.cancel(running)
    made.step()
    assert made.snapshot().steps == steps + 2 * LOOK_EVERY, "a pass over a prompt alone"
    made.run([long])
