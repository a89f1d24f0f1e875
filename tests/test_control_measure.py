"""The measured cost of passes that a controller starts with, and where it is kept."""

from __future__ import annotations

import json

import pytest

import beds
from slipstream.control import measure
from slipstream.control.adaptive import Adaptive
from slipstream.control.measure import START_ROWS, fastest, start_costs
from slipstream.core.types import Limit


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path))
    return tmp_path / "costs"


def target(**settings):
    return beds.TableTarget(beds.random_table(1, 8), **settings)


def test_costs_are_kept_and_the_fastest_of_all_starts_counts(home):
    first, again, other = target(), target(), target()
    costs = start_costs(first, ("model", 2))
    assert tuple(costs) == START_ROWS
    assert all(0 < seconds < 1 for seconds in costs.values())
    assert len(first.free) == 8, "the slot is free again"
    later = start_costs(again, ("model", 2))
    assert all(later[size] <= costs[size] for size in costs), "the fastest of both starts"
    assert len(again.passes) < len(first.passes)
    start_costs(other, ("model", 4))
    assert other.passes != []
    assert len(list(home.iterdir())) == 2


@pytest.mark.parametrize("text", ["", "{", "[]", '{"seconds": 3}', '{"seconds": {"2": 1.0}}', '{"seconds": {"1": -1}}'])
def test_a_file_that_is_no_measurement_is_made_again(home, text):
    costs = start_costs(target(), ("model",))
    path = next(home.iterdir())
    path.write_text(text)
    assert tuple(start_costs(target(), ("model",))) == tuple(costs)
    assert json.loads(path.read_text())["seconds"].keys() == {str(size) for size in costs}


def test_a_busy_first_start_is_made_good_by_the_next(home):
    dear = start_costs(target(pause=0.02), ("model",))
    cheap = start_costs(target(), ("model",))
    assert all(cheap[size] < dear[size] for size in (1, 2, 3, 4))
    assert start_costs(target(pause=0.02), ("model",))[1] <= cheap[1]


def test_a_home_that_cannot_be_written_is_no_hindrance(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "file"))
    assert start_costs(target(), ("model",))


def test_a_slow_target_is_measured_briefly(monkeypatch):
    monkeypatch.setattr(measure, "START_S", 0.02)
    slow = target(pause=0.01)
    assert tuple(start_costs(slow, ("model",))) == (1, 2, 3, 4)
    assert len(slow.passes) == 4


def test_sizes_past_the_context_are_left_out():
    assert tuple(fastest(target(max_context=20), (1, 4, 9, 10, 30), 1, 16, 9.0)) == (1, 4, 9)


def test_a_controller_that_knows_the_costs_drafts_from_the_first_step():
    controller = Adaptive(4)
    rows = [beds.engine(target(), [beds.given([1])]).add([1]).answers[0].row]
    assert controller.limits(rows) == [Limit(0, 0)]
    controller.start_from({1: 0.01, 8: 0.011})
    assert controller.limits(rows)[0].nodes == 4
