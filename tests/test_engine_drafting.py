"""Settings of speculation: per request, at run time, back again; exchanged drafters. No token ever depends on them."""

from __future__ import annotations

import pytest

import beds
from slipstream.core.errors import InputError
from slipstream.core.params import SamplingParams, SpeculationSetting
from slipstream.engine.drafting import HISTORY

SIZE = 16
LONG = SamplingParams(max_tokens=120)


def make(**settings):
    """An engine with two drafters that are right, named one and two."""
    target = beds.TableTarget(beds.random_table(1, SIZE))
    drafters = [beds.right(target), beds.right(target)]
    for drafter, name in zip(drafters, ("one", "two"), strict=True):
        drafter.name = name
    return target, drafters, beds.engine(target, drafters, 4, **settings)


def plain(prompt, **params) -> list[int]:
    return beds.answer(beds.engine(beds.TableTarget(beds.random_table(1, SIZE))), prompt, **params).token_ids


@pytest.mark.parametrize(
    ("speculation", "sources", "most"),
    [
        (True, {"one", "two"}, 4),
        (False, set(), 0),
        (SpeculationSetting(), {"one", "two"}, 4),
        (SpeculationSetting(drafters=["two"]), {"two"}, 4),
        (SpeculationSetting(drafters=["two"], max_nodes=2), {"two"}, 2),
        (SpeculationSetting(drafters=[]), set(), 0),
        (SpeculationSetting(max_nodes=0), set(), 0),
        (SpeculationSetting(max_nodes=99), {"one", "two"}, 4),
    ],
)
def test_each_request_says_how_it_is_drafted_for(speculation, sources, most):
    _, drafters, made = make()
    request, other = made.add([1], LONG, speculation=speculation), made.add([2], LONG)
    made.run([request, other])
    stats = request.answers[0].stats
    assert {source for source, counts in stats.nodes.items() if counts.offered} == sources
    assert len(stats.acceptance_histogram) - 1 == most or (not most and not stats.num_spec_steps)
    assert other.answers[0].stats.num_spec_steps > 0
    assert request.answers[0].row.output == plain([1], max_tokens=120)
    assert not any(drafter.rows for drafter in drafters)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"drafters": ["x", 3]}, r"drafters is \['x', 3\]; it must be a list of names"),
        ({"drafters": "one"}, "drafters is 'one'; it must be a list"),
        ({"max_nodes": -1}, "max_nodes is -1; it must be 0 or more"),
        ({"max_nodes": True}, "max_nodes is True; it must be a whole number"),
    ],
)
def test_wrong_settings_are_refused(setting, message):
    with pytest.raises(InputError, match=message):
        SpeculationSetting(**setting)
    made = make()[2]
    with pytest.raises(InputError, match=message):
        made.configure(**setting)
    assert made.drafting.setting.speculation


def test_unknown_drafters_and_settings_are_refused_and_change_nothing():
    made = make()[2]
    for wrong in ({"drafters": ["three"]}, {"speculation": 1}, {"nodes": 3}):
        with pytest.raises(InputError):
            made.configure(**wrong)
    with pytest.raises(InputError, match="drafter 'three' is not loaded; loaded: one, two"):
        made.add([1], speculation=SpeculationSetting(drafters=["three"]))
    with pytest.raises(InputError, match="no earlier setting"):
        made.previous()
    assert made.idle


def test_settings_change_between_steps_and_go_back():
    target, drafters, made = make()
    requests = [made.add([first], LONG) for first in (1, 2)]
    seen: list[set[str]] = []

    def steps() -> None:
        for drafter in drafters:
            drafter.calls.clear()
        for _ in range(3):
            made.step()
        seen.append({drafter.name for drafter in drafters if "propose" in drafter.calls})

    steps()
    for change in ({"speculation": False}, {"speculation": True, "drafters": ["two"]}, {"max_nodes": 0}):
        made.configure(**change)
        steps()
    made.previous()
    steps()
    made.previous()
    steps()
    assert seen == [{"one", "two"}, set(), {"two"}, set(), {"two"}, set()]
    assert not any(drafter.rows for drafter in drafters), "a drafter that is not asked holds no rows"
    made.previous()
    made.run(requests)
    for first, request in zip((1, 2), requests, strict=True):
        assert request.answers[0].row.output == plain([first], max_tokens=120)
    assert {"one", "two"} >= set(requests[0].answers[0].stats.nodes) > set()
    made.forget()
    assert sorted(target.free) == list(range(8))


def test_as_many_settings_are_kept_as_anyone_wants_back():
    made = make()[2]
    for index in range(3 * HISTORY):
        made.configure(max_nodes=index)
    for _ in range(HISTORY):
        made.previous()
    with pytest.raises(InputError):
        made.previous()
    assert made.drafting.max_nodes == 2 * HISTORY - 1


def test_an_exchanged_drafter_takes_up_running_rows_and_can_be_taken_back():
    target, drafters, made = make()
    request = made.add([1], LONG)
    for _ in range(3):
        made.step()
    wrong = beds.wrong(target)
    wrong.name = "one"
    made.configure(drafters=["one"])
    made.exchange(wrong)
    accepted = request.answers[0].stats.num_accepted_draft_tokens
    for _ in range(3):
        made.step()
    assert request.answers[0].stats.num_accepted_draft_tokens == accepted
    assert wrong.rows
    assert not drafters[0].rows
    made.previous()
    for _ in range(3):
        made.step()
    assert request.answers[0].stats.num_accepted_draft_tokens > accepted
    assert not wrong.rows
    made.run([request])
    assert request.answers[0].row.output == plain([1], max_tokens=120)
    stranger = beds.wrong(target)
    stranger.name = "three"
    with pytest.raises(InputError, match="drafter 'three' is not loaded"):
        made.exchange(stranger)


def test_planted_setting_that_is_ignored_is_seen(monkeypatch):
    monkeypatch.setattr("slipstream.engine.batch.narrowed", lambda limit, *_: limit)
    with pytest.raises(AssertionError):
        test_each_request_says_how_it_is_drafted_for(SpeculationSetting(drafters=["two"]), {"two"}, 4)
