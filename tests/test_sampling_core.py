"""The compiled sampling kernels against their numpy twin: equal bits for every instruction set of this machine."""

import time

import numpy as np
import pytest

from slipstream.core.params import SamplingParams
from slipstream.kernels import reference_sampling as reference
from slipstream.kernels import sampling as kernels
from slipstream.kernels.reference_sampling import Rule
from slipstream.sampling import RowSampler

core = kernels.core
needs_core = pytest.mark.skipif(core is None, reason="installed without the compiled core")
SETS = core.available_kernels() if core is not None else []
RULES = [
    Rule(),
    Rule(1.0),
    Rule(100.0),
    Rule(0.05, 0.0, 0, 0.9),
    Rule(0.8, 0.0, 0, 0.95),
    Rule(5.0, 0.0, 0, 0.5),
    Rule(1.3, 0.0, 7, 1.0),
    Rule(0.7, 0.0, 40, 0.9),
    Rule(1.0, 0.02, 0, 1.0),
    Rule(1.0, 0.02, 30, 0.8),
    Rule(1.0, 0.3, 0, 0.8),
    Rule(1.0, 1.0, 0, 1.0),
    Rule(1.0, 0.0, 0, 1 - 2**-53),
    Rule(1.0, 0.0, 10**9, 0.9),
]


def case(vocab, kind):
    """Logits, and changed ids with their values: kind 1 has ties, 2 padding, 3 changes, 4 is flat, 5 has zeros."""
    rng = np.random.default_rng([vocab, kind])
    logits = (rng.standard_normal(vocab) * 3).astype(np.float32)
    ids, values = kernels.NO_IDS, kernels.NO_VALUES
    if kind == 1:
        logits = np.round(logits)
    elif kind == 2:
        logits[(vocab + 1) // 2 :] = -np.inf
    elif kind == 3:
        ids = rng.choice(vocab, min(7, vocab), replace=False).astype(np.int64)
        values = logits[ids] - 1.5 * np.arange(len(ids))
        values[1:][:1] = -np.inf
    elif kind == 4:
        logits[:] = 0.25
    elif kind == 5:
        logits = np.where(rng.random(vocab) < 0.5, np.float32(0.0), np.float32(-0.0))
    return logits, ids, values


@needs_core
@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("vocab", [1, 2, 3, 31, 64, 65, 100, 8193, 49_152])
@pytest.mark.parametrize("kind", range(6))
def test_every_bit_equals_the_numpy_twin(vocab, kind, isa):
    logits, ids, values = case(vocab, kind)
    assert core.argmax(logits, isa) == reference.argmax(logits)
    for count in (0, 1, 5, vocab + 1 if vocab < 10_000 else 50):
        assert core.logprobs(logits, vocab // 2, count, isa) == reference.logprobs(logits, vocab // 2, count)
    for rule in RULES if vocab < 10_000 else RULES[1:8]:
        z = reference.scores(logits, ids, values, rule.temperature)
        p = np.empty(vocab)
        for key, count in ((5, 1), (2**63 + 7, 2), (17, 8), (3, 0)):
            tokens, scores = reference.select(z, rule, key, count)
            assert core.select(logits, ids, values, *rule, key, count, isa) == (tokens, scores)
        assert core.probabilities(logits, ids, values, *rule, p, isa)
        assert (p == reference.probabilities(z, rule)).all()


@needs_core
@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 1000])
def test_bad_logits_are_seen_in_every_lane(vocab, isa):
    for place in sorted({0, vocab // 3, vocab - 1}):
        for bad in (np.nan, -np.nan, np.inf):
            logits = np.zeros(vocab, np.float32)
            logits[place] = bad
            assert core.argmax(logits, isa) == reference.argmax(logits) == -1
            assert core.select(logits, kernels.NO_IDS, kernels.NO_VALUES, *RULES[1], 1, 1, isa) == ([], [])
            assert core.logprobs(logits, 0, 1, isa) is reference.logprobs(logits, 0, 1) is None
    assert core.argmax(np.full(vocab, -np.inf, np.float32), isa) == -1
    assert core.argmax(np.full(vocab, -3.4e38, np.float32), isa) == 0
    ids = np.arange(vocab)
    banned = core.select(np.zeros(vocab, np.float32), ids, np.full(vocab, -np.inf), *RULES[1], 1, 1, isa)
    assert banned == ([], [])


@needs_core
def test_noise_and_uniforms_equal_the_twin():
    ids = np.random.default_rng(0).integers(0, 2**40, 5000)
    for key in (0, 9, 2**64 - 1):
        assert (kernels.gumbel(key, ids) == reference.gumbel(key, ids)).all()
        assert (kernels.uniforms(key, 100) == reference.uniforms(key, np.arange(100))).all()
    assert len(kernels.uniforms(1, 0)) == 0


@needs_core
def test_arguments_out_of_range_are_refused():
    logits = np.zeros(10, np.float32)
    with pytest.raises(ValueError, match="out of range"):
        core.select(logits, np.array([10]), np.zeros(1), *RULES[0], 1, 1)
    with pytest.raises(ValueError, match="out of range"):
        core.logprobs(logits, 10, 1)
    with pytest.raises(ValueError, match="length"):
        core.probabilities(logits, kernels.NO_IDS, kernels.NO_VALUES, *RULES[0], np.empty(9))
    with pytest.raises(ValueError, match="instruction set"):
        core.argmax(logits, "mmx")


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "top_p": 0.95, "presence_penalty": 0.5}])
def test_a_sampler_without_the_core_decides_the_same(settings, monkeypatch):
    def answer():
        row, tokens = RowSampler(SamplingParams(**settings), 3, 5000, [1, 2]), []
        for step in range(20):
            logits = case(5000, 0)[0] + np.float32(step % 3)
            tokens.append(row.draw(logits, []))
            row.append(tokens[-1:])
        return tokens, row.distribution(logits, [4]).tolist(), row.uniforms("accept", 3, 4).tolist()

    with_core = answer()
    monkeypatch.setattr(kernels, "core", None)
    assert answer() == with_core


@needs_core
def test_lane_sum_follows_its_order():
    values = np.random.default_rng(1).random(1000)
    lanes = [0.0] * reference.LANES
    for index, value in enumerate(values):
        lanes[index % reference.LANES] += value
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [lanes[j] + lanes[j + half] for j in range(half)]
    assert reference.lane_sum(values) == lanes[0]


@needs_core
def test_planted_other_order_of_sums_is_seen(monkeypatch):
    logits, ids, values = case(49_152, 0)
    p, rule = np.empty(49_152), Rule(1.0)
    core.probabilities(logits, ids, values, *rule, p)
    z = reference.scores(logits, ids, values, 1.0)
    assert (p == reference.probabilities(z, rule)).all()
    monkeypatch.setattr(reference, "LANES", 16)
    assert (p != reference.probabilities(z, rule)).any()


@needs_core
def test_a_draw_costs_little_beside_a_pass():
    """Generous limits (the goal is a third of them): a draw that sorts the vocabulary takes ten times longer."""
    logits = case(49_152, 0)[0]
    logits[:50] += 8
    for settings, limit in (({}, 0.1e-3), ({"temperature": 0.8, "top_p": 0.95}, 1e-3), ({"temperature": 1.0}, 1e-3)):
        row = RowSampler(SamplingParams(**settings), 1, 49_152, [1])
        best = 1.0
        for _ in range(50):
            start = time.perf_counter()
            row.draw(logits, [])
            best = min(best, time.perf_counter() - start)
        assert best < limit


@needs_core
@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("vocab", [1, 3, 64, 65, 8193, 49_152])
def test_the_likeliest_tokens_equal_the_numpy_twin(vocab, isa):
    logits = np.stack([case(vocab, kind)[0] for kind in range(6)])
    logits[0, vocab // 2] = np.nan
    for count in (1, 8):
        ids, values = np.empty((6, count), np.int32), np.empty((6, count), np.float32)
        core.top(logits, ids, values, isa)
        expected_ids, expected = reference.top(logits, count)
        assert (ids == expected_ids).all()
        assert (values == expected).all()
