"""Keyed noise: the published vectors, quality of the numbers, and independence of seeds, positions and streams."""

import math

import numpy as np
import pytest

import plain_sampling as plain
from slipstream.core.errors import InputError
from slipstream.kernels import reference_sampling as reference
from slipstream.kernels import sampling as kernels
from slipstream.sampling import choice_seed, fresh_seed, noise

IDS = np.arange(200_000)


def test_published_vectors():
    assert noise.key(1, 5) == 0x22C738AC89B32DAE
    assert [int(h) for h in reference.hashes(noise.key(1, 5), np.array([0, 7]))] == [
        0x9F11FD1D431CA1C1,
        0x1D2CDBFD151E1AA8,
    ]


@pytest.mark.parametrize(("seed", "t"), [(0, 0), (1, 5), (2**64 - 1, 131071), (12345, 7)])
def test_noise_is_its_formula(seed, t):
    ids = np.array([0, 1, 2, 8192, 151935])
    assert kernels.gumbel(noise.key(seed, t), ids) == pytest.approx(
        [plain.noise(seed, t, int(v)) for v in ids], rel=1e-14
    )


def test_u_is_never_0_or_1_and_noise_is_finite_at_the_extremes():
    u = (np.array([0, 2**52 - 1], np.float64) + 0.5) * 2.0**-52
    assert 0.0 < u[0] == 2.0**-53
    assert u[1] == 1.0 - 2.0**-53 < 1.0
    low, high = -reference.log(-reference.log(u))
    assert (low, high) == pytest.approx((-math.log(53 * math.log(2)), 53 * math.log(2)), rel=1e-15)
    assert low > -3.61
    assert high < reference.MAX_NOISE


def test_planted_32_bit_noise_is_infinite():
    """Why the noise is float64: in float32 the largest u rounds to 1."""
    u = np.float32((2**52 - 0.5) * 2.0**-52)
    with np.errstate(divide="ignore"):
        assert np.isinf(-np.log(-np.log(u)))


def test_own_log_and_exp_are_accurate():
    rng = np.random.default_rng(0)
    x = np.concatenate(
        (rng.random(100_000), 10.0 ** rng.uniform(-300, 300, 100_000), 1.0 - 10.0 ** -rng.uniform(1, 16, 9999))
    )
    want = np.log(x)
    assert (abs(reference.log(x) - want) <= 4e-16 * abs(want)).all()
    y = -rng.random(100_000) * 700
    assert reference.exp(y) == pytest.approx(np.exp(y), rel=1e-15)
    assert reference.exp(np.array([0.0, -0.0, -700.5, -np.inf])).tolist() == [1.0, 1.0, 0.0, 0.0]


def uniformity(u, bins=256):
    """Chi-square of u over equal bins, in standard deviations from its mean."""
    counts = np.bincount((u * bins).astype(int), minlength=bins)
    square = ((counts - len(u) / bins) ** 2).sum() / (len(u) / bins)
    return (square - (bins - 1)) / math.sqrt(2 * (bins - 1))


def dependence(u, v, bins=16):
    """Chi-square of pairs over a grid, in standard deviations from its mean."""
    pair = (u * bins).astype(int) * bins + (v * bins).astype(int)
    counts = np.bincount(pair, minlength=bins * bins)
    square = ((counts - len(u) / bins**2) ** 2).sum() / (len(u) / bins**2)
    return (square - (bins**2 - 1)) / math.sqrt(2 * (bins**2 - 1))


def u_of(seed, t, stream=0, ids=IDS):
    return reference.uniforms(noise.key(seed, t, stream), ids)


@pytest.mark.parametrize("seed", [0, 1, 2, 42, 2**63, 2**64 - 1])
def test_uniform_over_tokens_and_over_positions(seed):
    assert abs(uniformity(u_of(seed, 100))) < 5
    over_t = np.array([u_of(seed, t, ids=np.array([17]))[0] for t in range(20_000)])
    assert abs(uniformity(over_t, 64)) < 5


@pytest.mark.parametrize(
    "other", [(1, 101, 0), (2, 100, 0), (0, 100, 0), (1, 100, 1), (1, 100, 2), (100, 1, 0), (1 + (1 << 32), 100, 0)]
)
def test_neighbouring_seeds_positions_and_streams_are_independent(other):
    assert abs(dependence(u_of(1, 100), u_of(*other))) < 5


def test_neighbouring_tokens_are_independent():
    u = u_of(3, 9)
    for shift in (1, 2, 3, 64):
        assert abs(dependence(u[shift:], u[:-shift])) < 5


def test_no_seed_has_the_noise_of_its_neighbour_shifted():
    here = {int(h) for h in reference.hashes(noise.key(7, 50), np.arange(2000))}
    for seed in (6, 8):
        for t in range(45, 56):
            assert not here & {int(h) for h in reference.hashes(noise.key(seed, t), np.arange(2000))}


def test_planted_sum_of_seed_and_position_is_seen():
    """A key of seed + t repeats the neighbour's noise one position later."""

    def weak(seed, t):
        return reference.mix_number((seed + t + 0x9E3779B97F4A7C15) & ((1 << 64) - 1))

    assert weak(7, 50) == weak(8, 49)
    same = reference.uniforms(weak(7, 50), IDS)
    assert dependence(same, reference.uniforms(weak(8, 49), IDS)) > 5


def test_the_maximum_of_score_plus_noise_follows_the_softmax():
    p = np.array([0.5, 0.25, 0.15, 0.07, 0.03])
    ids = np.arange(5)
    hits = np.zeros(5)
    for t in range(20_000):
        hits[np.argmax(np.log(p) + kernels.gumbel(noise.key(11, t), ids))] += 1
    assert ((hits - 20_000 * p) ** 2 / (20_000 * p)).sum() < 23.5  # 4 degrees of freedom, 1e-4


def test_classical_streams_differ_by_purpose_and_step():
    rows = [noise.uniforms(5, purpose, step, 8) for purpose in noise.STREAMS for step in range(20)]
    rows += [u_of(5, step, ids=np.arange(8)) for step in range(20)]
    assert len({value for row in rows for value in row}) == 8 * len(rows)
    assert len(noise.uniforms(5, "accept", 0, 0)) == 0
    with pytest.raises(InputError, match="bogus"):
        noise.uniforms(5, "bogus", 0, 1)


def test_fault_18_choices_and_fresh_seeds_differ():
    seeds = [choice_seed(seed, index) for seed in (0, 1, 2, 2**64 - 1) for index in range(100)]
    assert len(set(seeds)) == 400
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert choice_seed(123, 0) == 123
    assert choice_seed(123, 4) == choice_seed(123, 4)
    assert len({fresh_seed() for _ in range(50)}) == 50


def test_compiled_keys_are_those_of_the_reference():
    for seed, begin, stream in ((0, 0, 0), (7, 50, 0), (2**64 - 1, 2**40, 4)):
        assert kernels.keys(seed, begin, 5, stream) == [reference.key(seed, begin + i, stream) for i in range(5)]
        assert noise.key(seed, begin, stream) == reference.key(seed, begin, stream)
