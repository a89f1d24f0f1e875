"""SamplingParams: what is taken, what is refused by name, and that nothing changes afterwards."""

import dataclasses
import math

import numpy as np
import pytest

from slipstream.core.errors import InputError
from slipstream.core.params import SamplingParams


def test_defaults_are_greedy_and_short():
    params = SamplingParams()
    assert params.greedy
    assert (params.temperature, params.max_tokens, params.n, params.seed) == (0.0, 256, 1, None)
    assert (params.stop, params.stop_token_ids, params.logit_bias) == ((), (), {})


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-8, 1e-6, 9.9e-6])
def test_fault_07_small_temperatures_are_greedy(temperature):
    assert SamplingParams(temperature=temperature).greedy


def test_a_temperature_at_the_limit_samples():
    assert not SamplingParams(temperature=1e-5).greedy


NAN, INF = math.nan, math.inf
WRONG = [
    *[("n", value) for value in (0, -1, 1.0, True, "2", None, 10**9, [1])],
    *[("temperature", value) for value in (-0.1, -1e-9, NAN, INF, "0.5", None, True, 10**400, 1e300, [0.5], 1j)],
    *[("top_p", value) for value in (0, -0.1, 1.01, NAN, "1", None, True)],
    *[("top_k", value) for value in (-2, 1.5, 5.0, NAN, "5", None, True, np.float64(3))],
    *[("min_p", value) for value in (-0.1, 1.1, NAN, None, False)],
    *[("presence_penalty", value) for value in (-2.1, 2.1, NAN, "0")],
    *[("frequency_penalty", value) for value in (-2.1, 2.1, INF, None)],
    *[("repetition_penalty", value) for value in (0, -1, NAN, 1e9, 1e-300, True)],
    *[("logit_bias", value) for value in ([1, 2], "5", {"a": 1}, {1.5: 1.0}, {-1: 1.0}, {True: 1.0}, {1: NAN})],
    *[
        ("logit_bias", value)
        for value in ({1: "5"}, {1: None}, {1: True}, {1: 1e300}, {1: 10**400}, {"-1": 1}, {"²": 1})
    ],
    *[("min_tokens", value) for value in (-1, 257, 1.0, True, None)],
    *[("max_tokens", value) for value in (-1, 1.5, True, None, "9")],
    *[("ignore_eos", value) for value in (1, None, "no")],
    *[("stop", value) for value in ("", ["a", ""], [1], 5, {"a": 1}, b"ab", [None], [b"a"])],
    *[("stop_token_ids", value) for value in ("12", [1.0], [True], [-1], 5, [[1]], {1: 2}, ["1"])],
    *[("seed", value) for value in (-1, 2**64, 1.0, True, "1", NAN)],
    *[("logprobs", value) for value in (-1, 51, True, 2.0, "3")],
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda item: repr(item)[:30])
def test_wrong_values_are_refused_by_name(name, value):
    with pytest.raises(InputError, match=name) as caught:
        SamplingParams(**{name: value})
    assert "\n" not in str(caught.value)


RIGHT = [
    ("n", np.int64(3), 3),
    ("top_k", np.int32(-1), -1),
    ("top_k", 10**30, 10**30),
    ("temperature", 1, 1.0),
    ("temperature", np.float32(0.5), 0.5),
    ("temperature", np.float64(0.7), 0.7),
    ("top_p", np.int64(1), 1.0),
    ("logit_bias", {"7": -100, np.int64(8): np.float32(2)}, {7: -100.0, 8: 2.0}),
    ("logit_bias", None, {}),
    ("stop", "end", ("end",)),
    ("stop", ["a", "b"], ("a", "b")),
    ("stop", None, ()),
    ("stop_token_ids", np.array([3, 4]), (3, 4)),
    ("stop_token_ids", None, ()),
    ("seed", 2**64 - 1, 2**64 - 1),
    ("seed", np.uint64(2**64 - 1), 2**64 - 1),
    ("logprobs", np.int64(5), 5),
    ("logprobs", 0, 0),
]


@pytest.mark.parametrize(("name", "value", "stored"), RIGHT, ids=lambda item: repr(item)[:30])
def test_good_values_become_plain_python(name, value, stored):
    params = SamplingParams(**{name: value})
    assert getattr(params, name) == stored
    if isinstance(stored, (int, float)):
        assert type(getattr(params, name)) is type(stored)


def test_nothing_changes_after():
    bias, stops = {1: 2.0}, ["x"]
    params = SamplingParams(logit_bias=bias, stop=stops)
    bias[1] = 5.0
    stops.append("y")
    assert params.logit_bias == {1: 2.0}
    assert params.stop == ("x",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0
    assert dataclasses.replace(params, seed=3).logit_bias == {1: 2.0}


def test_min_tokens_may_reach_max_tokens():
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    assert SamplingParams(max_tokens=0).max_tokens == 0
