"""The adaptive controller in a world with known costs and acceptance: does it find what is fastest?"""

from __future__ import annotations

import random

import pytest

import beds
from control_beds import PASS, Guesser, World, flat, stairs, started, steep
from slipstream.control import asking
from slipstream.control.adaptive import Adaptive
from slipstream.control.asking import Source
from slipstream.control.base import StepCost
from slipstream.control.cost import CostCurve
from slipstream.control.fixed import Fixed
from slipstream.control.merge import Merger
from slipstream.core.params import SamplingParams
from slipstream.core.types import Limit, Offers, Row
from slipstream.drafters.lookup import Lookup
from slipstream.drafters.small_model import SmallModel
from slipstream.drafters.suffix import Suffix


class Steady(Adaptive):
    """Sees passes that cost what `flat` says, whatever else the machine does."""

    def observe(self, observations, cost):
        super().observe(observations, StepCost(cost.rows, flat(cost.rows), 0.0))


def best_fixed(make, **world):
    """The best of plain and all fixed chain lengths, drafting with all guessers."""
    rates = {n: World(make() if n else [], **world).run(Fixed(n), 700) for n in (0, 1, 2, 3, 5, 8, 16)}
    return max(rates.values())


@pytest.mark.parametrize("noise", [0.0, 1.0])
@pytest.mark.parametrize("pass_time", [flat, steep, stairs])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("seconds", [0.00001, 0.001, 0.004])
def test_one_source_comes_close_to_the_best_fixed_length(seconds, chance, pass_time, noise):
    def make():
        return [Guesser("g", chance, seconds)]

    found = World(make(), pass_time, noise=noise).run(Adaptive(16, "chain"), 1000)
    best = best_fixed(make, pass_time=pass_time, noise=noise)
    assert found >= (0.85 if noise else 0.93) * best, f"{found:.3f} of {best:.3f}"


@pytest.mark.parametrize("seconds", [0.00005, 0.001, 0.004, 0.02])
@pytest.mark.parametrize("pass_time", [flat, steep])
def test_fault_25_useless_drafts_cost_next_to_nothing(pass_time, seconds):
    world = World([Guesser("useless", 0.0, seconds, belief=0.95)], pass_time)
    assert world.run(Adaptive(), 1000) >= 0.97
    assert world.drafted < 30


def test_fault_25_a_useless_drafter_is_hardly_asked():
    dear = Guesser("dear", 0.0, 0.004)
    World([dear], flat).run(Adaptive(), 1000)
    assert dear.asked < 25
    cheap = Guesser("cheap", 0.0, 0.000001)
    World([cheap], flat).run(Adaptive(), 1000)
    assert 50 < cheap.asked < 200  # next to no cost, and it is there when it pays again


@pytest.mark.parametrize("seconds", [0.00001, 0.003])
def test_a_source_that_pays_again_is_found_again(seconds):
    world = World([Guesser("g", lambda step: 0.0 if step < 600 else 0.95, seconds)], flat)
    controller = Adaptive(16, "chain")
    world.run(controller, 600)
    before = world.drafted
    assert before < 60
    late = World([Guesser("g", 0.95, seconds)], flat)
    late.run(controller, 600)
    alone = World([Guesser("g", 0.95, seconds)], flat)
    alone.run(Adaptive(16, "chain"), 600)
    assert late.tokens / late.seconds > 0.8 * alone.tokens / alone.seconds


def test_a_dear_source_beside_a_cheap_one_is_asked_only_when_it_adds():
    def cheap():
        return Guesser("cheap", 0.9, 0.00002)

    def speed(guessers, seed):
        return World(guessers, flat).run(Adaptive(16, "chain"), 1500, seed)

    useless = [speed([cheap(), Guesser("dear", 0.1, 0.004)], seed) / speed([cheap()], seed) for seed in range(8)]
    assert sum(useless) / len(useless) >= 0.97
    good = Guesser("dear", 0.9, 0.002)
    rare = World([Guesser("cheap", 0.9, 0.00002, share=0.1)], flat).run(Adaptive(16, "chain"), 1500)
    joined = World([Guesser("cheap", 0.9, 0.00002, share=0.1), good], flat).run(Adaptive(16, "chain"), 1500)
    assert joined > 1.3 * rare


def test_initial_costs_are_used_before_anything_is_measured():
    dear = {1: 0.01, 2: 0.0185, 17: 1.0}
    cheap = {1: 0.01, 2: 0.0101, 17: 0.0102}
    row = [Row(0, [0], 1, SamplingParams(), 0, sampler=None)]
    offer = Offers("g", [0, 1], [-1, 0], [0.7, 0.7])
    for costs, nodes in ((dear, 0), (cheap, 2)):
        controller = started(Adaptive(16, "chain"), costs)
        limits = controller.limits(row)
        assert limits[0].nodes == 16
        assert len(controller.choose(row, [[offer]], limits)[0]) == nodes


def test_rows_that_do_not_speculate_are_left_alone():
    rows = [Row(i, [0], 1, SamplingParams(), 0, sampler=None, speculate=i > 0) for i in range(3)]
    for controller in (started(Adaptive(), {1: 0.01, 3: 0.01}), Fixed(4)):
        assert [limit.nodes > 0 for limit in controller.limits(rows)] == [False, True, True]
    assert [limit.nodes for limit in Adaptive(0).limits(rows)] == [0, 0, 0]


def test_every_n_is_looked_at():
    """The first node does not pay, four do: stopping early would lose the gain."""
    controller = started(Adaptive(8, "chain"), {1: 0.01, 2: 0.0198, 3: 0.0198, 4: 0.0198, 5: 0.0198, 9: 0.04})
    row = [Row(0, [0], 1, SamplingParams(), 0, sampler=None)]
    offer = Offers("g", [0, 1, 2, 3, 4, 5], [-1, 0, 1, 2, 3, 4], [0.9] * 6)
    assert len(controller.choose(row, [[offer]], controller.limits(row))[0]) == 4


def useless_speed(seconds=0.004):
    return World([Guesser("useless", 0.0, seconds, belief=0.95)], flat).run(Adaptive(), 400)


def test_planted_blind_calibration_is_seen(monkeypatch):
    monkeypatch.setattr(Merger, "learn", lambda self, row, emitted: [])
    assert useless_speed() < 0.9


def test_planted_asking_always_is_seen(monkeypatch):
    monkeypatch.setattr(asking.Source, "depth_to_ask", lambda self, deepest, rows, curve: deepest)
    assert useless_speed() < 0.9


def test_planted_free_rows_are_seen(monkeypatch):
    """A curve that believes every row to be free drafts where each row costs a whole pass."""
    monkeypatch.setattr(CostCurve, "observe", lambda self, size, seconds: None)
    controller = started(Adaptive(8, "chain"), {1: PASS, 9: PASS})
    assert World([Guesser("g", 0.3, 0.00001)], steep).run(controller, 300) < 0.7


DRAFTERS = {
    "lookup": lambda: [Lookup()],
    "suffix": lambda: [Suffix()],
    "right model": lambda: [SmallModel(beds.TableTransformer(3), 16)],
    "wrong model and text": lambda: [SmallModel(beds.TableTransformer(4), 16), Suffix(), Lookup()],
    "failing": lambda: [beds.failing(3), Suffix()],
    "random trees": lambda: [beds.random_tree(16)],
}


@pytest.mark.parametrize("params", [{}, {"temperature": 0.7, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_fault_02_tokens_do_not_depend_on_the_controller(kind, shape, params):
    prompts = ([1, 2, 3], [5, 6] * 6, [9])
    plain = beds.engine(beds.TableTransformer(3))
    wanted = [beds.answer(plain, prompt, max_tokens=48, **params).token_ids for prompt in prompts]
    made = beds.engine(beds.TableTransformer(3), DRAFTERS[kind](), controller=Steady(6, shape))
    alone = [beds.answer(made, prompt, max_tokens=48, **params) for prompt in prompts]
    requests = [made.add(prompt, SamplingParams(max_tokens=48, **params)) for prompt in prompts]
    together = [result.outputs[0] for result in made.run(requests)]
    assert [one.token_ids for one in alone] == [one.token_ids for one in together] == wanted
    assert sum(one.speculation.num_draft_tokens for one in alone) > 0


def test_fault_25_passes_are_never_more_than_tokens():
    for drafters in ([beds.wrong(beds.TableTarget(beds.random_table(1, 9)))], [Suffix(), Lookup()]):
        target = beds.TableTarget(beds.random_table(1, 9))
        made = beds.engine(target, drafters, controller=Adaptive(8))
        output = beds.answer(made, [1, 2], max_tokens=200, temperature=1.0, seed=4)
        assert output.speculation.num_steps <= len(output.token_ids) == 200


def test_sources_that_always_agree_are_not_believed_twice():
    """Two drafters with the same guesses, right half of the time: the chance of their common node stays a half."""

    class Same(Guesser):
        def propose(self, limit, step, rng):
            return super().propose(limit, step, random.Random(step))

    seen = watched(Adaptive(4, "chain"), [Same("a", 0.5, 1e-6), Same("b", 0.5, 1e-6)])
    assert sum(chances[0] for chances in seen[-200:]) / 200 == pytest.approx(0.5, abs=0.1)


def test_a_row_that_a_source_is_not_asked_for_is_not_read_by_it():
    """Another source was asked for it in the same step; what came meanwhile is still to be read."""
    controller = started(Adaptive(4, "chain"), {1: 0.01, 2: 0.01, 10: 0.01})
    rows = [Row(i, [0] * 9, 9, SamplingParams(), 0, sampler=None) for i in range(2)]
    limits = [Limit(4, 2), Limit(4, 2, depths={"dear": 0})]
    offers = [[Offers("dear", [1], [-1], [0.5], seconds=1.0), Offers("cheap", [1], [-1], [0.5])] for _ in rows]
    controller.choose(rows, offers, limits)
    controller.limits(rows)
    assert controller._unread("dear", rows) == 9


def watched(controller, guessers):
    """The chances of all trees that were ranked, a list per step."""
    seen, tree = [], controller.merger.tree

    def watch(row, offers, keep=False):
        ranked = tree(row, offers, keep)
        seen.append(ranked.chances)
        return ranked

    controller.merger.tree = watch
    World(guessers).run(controller, 600)
    return [chances for chances in seen if chances]


def test_what_a_source_offers_when_the_others_are_silent_is_judged_apart():
    """The second drafter is right where the first one speaks, and wrong where it is silent."""

    class Sometimes(Guesser):
        def propose(self, limit, step, rng):
            return super().propose(limit, step, rng) if step % 2 else Offers(self.name)

    guessers = [Sometimes("a", 1.0, 1e-6), Guesser("b", lambda step: float(step % 2), 1e-6)]
    seen = watched(Adaptive(4, "chain"), guessers)[-60:]
    assert sum(chances[0] > 0.8 for chances in seen) > 20
    assert sum(chances[0] < 0.35 for chances in seen) > 20


def turning(seconds=0.00001, turn=700):
    """Nothing of what it offers is right until the text turns into copying."""
    return Guesser("g", lambda step: 0.95 if step >= turn else 0.0, seconds, belief=0.6)


@pytest.mark.parametrize("turn", [100, 700, 1000, 1013])
def test_a_text_that_turns_into_copying_is_noticed_in_time(turn):
    """A row that rests wakes up within its longest rest and a few answers; what that costs is bounded."""
    world = World([turning(turn=turn)])
    world.run(Adaptive(8, "chain"), turn + 100)
    woken = next(step for step, nodes in world.log if step >= turn and nodes)
    assert woken - turn <= 2 * asking.LONGEST_REST
    assert sum(nodes > 0 for step, nodes in world.log if step >= woken + 8) > 0.8 * (turn + 100 - woken - 8)


def test_planted_rest_without_end_is_seen(monkeypatch):
    monkeypatch.setattr(asking, "LONGEST_REST", 10**6)
    world = World([turning()])
    world.run(Adaptive(8, "chain"), 800)
    assert not any(nodes for step, nodes in world.log if step >= 732)


def test_fault_25_a_row_for_which_nothing_pays_is_hardly_asked():
    guesser = turning(turn=10**9)
    World([guesser]).run(Adaptive(8), 1000)
    assert guesser.asked < 100


def copier(share=1.0):
    return Guesser("copier", 0.98, 1e-6, belief=0.9, share=share)


def model():
    return Guesser("model", 0.95, 0.0015, belief=0.9)


def asks_of_one_that_costs_more_than_its_offers(monkeypatch=None):
    """Beginning the next offer and judging this one take more than a right guess in five is worth."""
    guesser = Guesser("dear", 0.2, 0.0003, belief=0.2, around=0.003)
    if monkeypatch is not None:
        monkeypatch.setattr(Source, "took_around", lambda *_: None)
    speed = World([guesser], lambda rows: PASS * (1 + 0.01 * (rows - 1))).run(Adaptive(4, "chain"), 1500)
    return guesser.asked, speed


def test_a_drafter_is_charged_with_all_that_a_step_takes_when_it_is_asked():
    asked, speed = asks_of_one_that_costs_more_than_its_offers()
    assert asked < 250
    assert speed > 0.97


def test_planted_judging_by_the_time_of_offers_alone_is_seen(monkeypatch):
    asked, speed = asks_of_one_that_costs_more_than_its_offers(monkeypatch)
    assert asked > 1000
    assert speed < 0.97


def test_a_drafter_that_takes_time_is_spared_where_others_suffice():
    dear = model()
    beside = World([copier(), dear]).run(Adaptive(8, "chain"), 1000)
    assert beside >= 0.97 * World([copier()]).run(Adaptive(8, "chain"), 1000)
    assert dear.asked < 100


def test_a_drafter_that_takes_time_is_asked_where_others_have_nothing():
    dear = model()
    beside = World([copier(0.5), dear]).run(Adaptive(8, "chain"), 1000)
    parts = [World([part]).run(Adaptive(8, "chain"), 1000) for part in (copier(0.5), model())]
    assert beside > max(parts)
    assert 300 < dear.asked < 700


def test_planted_asking_whatever_the_others_offer_is_seen(monkeypatch):
    monkeypatch.setattr(Adaptive, "beside", lambda self, name, rows, limits, offers: limits)
    asking_always = World([copier(0.5), model()]).run(Adaptive(8, "chain"), 1000)
    assert asking_always < World([copier(0.5)]).run(Adaptive(8, "chain"), 1000)


def test_where_a_source_stopped_by_itself_nothing_is_held_against_it():
    source = asking.Source("g")
    for path in ([0.9, 0.9 * 0.8, 0.9 * 0.8 * 0.5], [0.1], []):
        source.saw(0.001, [path], 0)
    assert [mean.value for mean in source.chances] == pytest.approx([(0.9 + 0.1) / 3, 0.8, 0.5])


def test_what_would_have_to_be_read_first_is_weighed():
    """A long text is read when it would have paid for long enough, a short one and one that pays much at once."""
    source = asking.Source("g")
    source.saw(0.2, [[0.9]], 100)
    assert source.reading == pytest.approx(0.002)
    assert source.worth_reading(0, 0.001)
    assert source.worth_reading(20, 0.01)
    waited = next(step for step in range(100) if source.worth_reading(100, 0.01))
    assert 10 < waited * 1.0 + asking.OUTLOOK < 22
    assert not source.worth_reading(100, 0.01), "what was missed counts once"
