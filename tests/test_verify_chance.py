"""Laws by counting, with the real keyed noise: two consecutive steps jointly, p unlike q, and faults that must show.

Uniforms of many seeds are made at once (the same bits as the sampler's), so that 100,000 runs take seconds.
"""

import numpy as np
import pytest

import verify_oracle as oracle
from slipstream.core.params import SamplingParams
from slipstream.core.tree import Draft, chain
from slipstream.core.types import Row
from slipstream.sampling import RowSampler, noise
from slipstream.verify import make_verifier, rules

P = np.array([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.1, 0.8, 0.1]])
Q = np.array([[0.1, 0.2, 0.7], [0.5, 0.4, 0.1], [0.6, 0.1, 0.3]])
RUNS, LENGTH = 100_000, 3
LIMIT = 5.5
"""Standard deviations of chi-square; a right law passes it but once in ten million."""


def chi_square(counts, expected):
    """(chi-square - its mean) / its standard deviation."""
    cells = expected > 0
    assert not counts[~cells].any()
    square = ((counts[cells] - expected[cells]) ** 2 / expected[cells]).sum()
    freedom = cells.sum() - 1
    return float((square - freedom) / np.sqrt(2 * freedom))


def mixed(h):
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


def uniforms_of_seeds(seeds, purpose, step, count):
    """Like noise.uniforms for every seed, [seeds, count]."""
    g = np.uint64(0x9E3779B97F4A7C15)
    stage = mixed(seeds.astype(np.uint64) + g) ^ np.uint64(noise.STREAMS[purpose])
    keys = mixed((mixed(stage + g) ^ np.uint64(step)) + g)
    h = mixed(keys[:, None] + np.arange(count, dtype=np.uint64)[None, :] * g)
    return ((h >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


class ManySeeds:
    """Stands for the sampler of one seed after the other; logits are the probabilities themselves."""

    def __init__(self, runs, rename=None):
        seeds = np.arange(runs)
        self.rename = rename or (lambda purpose, step, committed: (purpose, step))
        self.tables = {
            (purpose, step): uniforms_of_seeds(seeds, purpose, step, 4).tolist()
            for purpose in noise.STREAMS
            for step in range(3)
        }
        self.seed = self.committed = 0

    def distribution(self, logits, path):
        return logits

    def uniforms(self, purpose, step, count):
        return self.tables[self.rename(purpose, step, self.committed)][self.seed]

    def append(self, tokens):
        self.committed += len(tokens)


def quick_sample(weights, uniform):
    """rules.sample for three tokens, without numpy's overhead."""
    a, b, c = weights.tolist()
    goal = uniform * (a + b + c)
    return 0 if goal < a else 1 if goal < a + b else 2


def propose(row, width, depth):
    """A chain, or `width` candidates without replacement; drawn from Q with the draft stream of this step."""
    draft, last = Draft(q={}), row.tokens[-1]
    uniform = row.sampler.uniforms("draft", row.step, 4)
    for node in range(width * depth):
        parent = node - 1 if width == 1 else -1
        q = Q[last]
        draft.q[parent] = q
        if width > 1 and node:
            q = q.copy()
            q[draft.tokens] = 0.0
        token = quick_sample(q, uniform[node])
        draft.tokens.append(token)
        draft.parents.append(parent)
        last = token if width == 1 else last
    return draft


def counted(name, width, depth, runs, rename=None):
    verifier, sampler = make_verifier(name), ManySeeds(runs, rename)
    params, counts = SamplingParams(temperature=1.0), np.zeros((3,) * LENGTH)
    plain = np.random.default_rng(5).random((runs, LENGTH))
    for seed in range(runs):
        sampler.seed, sampler.committed = seed, 0
        row = Row(id=0, tokens=[0], prompt_length=1, params=params, seed=seed, sampler=sampler)
        for _ in range(2):
            draft = propose(row, width, depth)
            tokens = verifier(P[[row.tokens[-1], *draft.tokens]], draft, row).tokens
            row.tokens += tokens
            sampler.append(tokens)
            row.step += 1
        while len(row.tokens) <= LENGTH:
            row.tokens.append(quick_sample(P[row.tokens[-1]], plain[seed][len(row.tokens) - 2]))
        counts[tuple(row.tokens[1 : LENGTH + 1])] += 1
    return chi_square(counts, runs * oracle.joint(P.__getitem__, LENGTH))


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(rules, "sample", quick_sample)


def test_uniforms_of_many_seeds_are_the_samplers():
    for purpose in noise.STREAMS:
        table = uniforms_of_seeds(np.array([0, 7]), purpose, 2, 4)
        assert (table[1] == noise.uniforms(7, purpose, 2, 4)).all()


def test_quick_sample_is_the_rules_sample():
    rng = np.random.default_rng(0)
    for _ in range(3000):
        weights = rng.integers(0, 3, 3).astype(float)
        if weights.any():
            uniform = rng.random()
            assert quick_sample(weights, uniform) == oracle.real_sample(weights, uniform)


def test_inverse_distribution_at_its_edges():
    weights = np.array([0.0, 0.25, 0.0, 0.75, 0.0])
    for uniform, token in ((2.0**-53, 1), (0.25 - 2**-54, 1), (0.25, 3), (1 - 2**-53, 3)):
        assert oracle.real_sample(weights, uniform) == token
    assert oracle.real_sample(np.array([1e-300, 0.0]), 0.999) == 0


@pytest.mark.parametrize(("name", "width", "depth"), [("rejection", 1, 2), ("rejection", 2, 1), ("block", 1, 2)])
def test_fault_04_two_steps_by_counting(name, width, depth):
    assert counted(name, width, depth, RUNS) < LIMIT


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_planted_residual_from_the_draft_stream_by_counting(name):
    def shared(purpose, step, committed):
        return ("draft" if purpose == "residual" else purpose, step)

    assert counted(name, 1, 2, 10_000, shared) > LIMIT


@pytest.mark.parametrize("fault", ["not salted with the step", "accept is the draft's number"])
def test_planted_shared_numbers_by_counting(fault):
    def rename(purpose, step, committed):
        if fault.startswith("not"):
            return (purpose, 0)
        return ("draft" if purpose == "accept" else purpose, step)

    assert counted("rejection", 1, 2, 20_000, rename) > LIMIT


def real_row(seed, q=False):
    params = SamplingParams(temperature=1.0)
    return Row(id=0, tokens=[0], prompt_length=1, params=params, seed=seed, sampler=RowSampler(params, seed, 3, [0]))


LOG_P, LOG_Q = np.log(P).astype(np.float32), np.log(Q).astype(np.float32)


def test_coupled_draws_follow_the_law_over_two_positions():
    counts = np.zeros((3, 3))
    runs = 40_000
    for seed in range(runs):
        sampler = real_row(seed).sampler
        first = sampler.draw(LOG_P[0], [])
        counts[first, sampler.draw(LOG_P[first], [first])] += 1
    assert chi_square(counts, runs * oracle.joint(P.__getitem__, 2)) < LIMIT


def gumbel_agreement(p, q):
    """Probability that two Gumbel-max draws with shared noise agree."""
    return sum(1.0 / np.maximum(p / p[x], q / q[x]).sum() for x in range(len(p)))


def test_same_noise_drafting_agrees_as_often_as_the_formula_says():
    """p = (.6, .3, .1), q = (.1, .2, .7): one proposal .353846, two proposals much more."""
    p, q, runs = P[0], Q[0], 40_000
    assert gumbel_agreement(p, q) == pytest.approx(0.353846, abs=1e-6)
    distance = abs(p - q).sum() / 2
    assert (1 - distance) / (1 + distance) <= gumbel_agreement(p, q) <= 1 - distance
    hits = np.zeros(2)
    coupled = make_verifier("coupled")
    for seed in range(runs):
        row = real_row(seed)
        tokens, _ = row.sampler.top(LOG_Q[0], [], 2)
        assert row.sampler.draw(LOG_Q[0], []) == tokens[0]
        draft = Draft(tokens, [-1, -1])
        verdict = coupled(LOG_P[[0, *tokens]], draft, row)
        hits[0] += verdict.path == [0]
        hits[1] += bool(verdict.path)
    error = 4.5 * 0.5 / np.sqrt(runs)
    assert abs(hits[0] / runs - 0.353846) < error
    assert hits[1] / runs > 0.7


def test_planted_other_noise_for_the_draft_is_seen():
    """With noise of its own a drafter agrees with probability sum p q = .19 only."""
    runs, hits = 10_000, 0
    for seed in range(runs):
        other = real_row(seed + 10**6).sampler.top(LOG_Q[0], [], 1)[0]
        row = real_row(seed)
        hits += len(make_verifier("coupled")(LOG_P[[0, *other]], chain(other), row).path)
    assert hits / runs == pytest.approx(float(P[0] @ Q[0]), abs=0.02)
    assert abs(hits / runs - 0.353846) > 0.1


@pytest.mark.full
@pytest.mark.parametrize(("name", "width", "depth"), [("rejection", 1, 3), ("rejection", 3, 1), ("block", 1, 3)])
def test_fault_04_two_steps_by_counting_more(name, width, depth):
    assert counted(name, width, depth, 5 * RUNS) < LIMIT
