"""The sampler against the slow definition of every rule, and the fault kinds that belong to it."""

import math

import numpy as np
import pytest

import plain_sampling as plain
from slipstream.core.errors import InputError, NonFiniteError
from slipstream.core.params import SamplingParams
from slipstream.sampling import RowSampler, token_logprob

VOCABS = [3, 100, 8193, 151_936]
SETTINGS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.3, "top_k": 7},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.02},
    {"temperature": 1.0, "min_p": 0.02, "top_k": 30, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.3, "top_p": 0.8},
    {"temperature": 5.0, "top_p": 0.5},
    {"temperature": 100.0},
    {"temperature": 1.0, "top_k": 10**9},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 1.0, "top_p": 1.0 - 2**-53},
]
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.6}


def logits_of(vocab, seed=0, peak=4.0):
    rng = np.random.default_rng([seed, vocab])
    logits = rng.normal(0, 2.5, vocab)
    logits[rng.integers(0, vocab, 20)] += peak
    return logits.astype(np.float32)


def sampler(settings=(), vocab=100, seed=9, prompt=(1, 2), ends=(), grammar=None):
    return RowSampler(SamplingParams(**dict(settings)), seed, vocab, list(prompt), ends, grammar)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_fault_06_draws_equal_the_slow_definition(settings, vocab):
    params = SamplingParams(**settings)
    for seed in range(12 if vocab < 10_000 else 2):
        logits = logits_of(vocab, seed)
        row = sampler(settings, vocab, seed)
        want = plain.draw(plain.processed(logits, params, [], []), params, seed, 2, 5)
        assert row.draw(logits, []) == want[0]
        assert 0 <= want[0] < vocab
        tokens, scores = row.top(logits, [], 5)
        assert tokens == want
        assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_distribution_equals_the_slow_definition(settings, vocab):
    params = SamplingParams(**settings)
    logits = logits_of(vocab, 3)
    p = sampler(settings, vocab).distribution(logits, [])
    assert p.dtype == np.float64
    assert p == pytest.approx(plain.law(plain.processed(logits, params, [], []), params), rel=1e-12, abs=0)
    assert p.sum() == pytest.approx(1.0, abs=1e-12)


def random_case(rng):
    vocab = int(rng.integers(3, 60))
    settings = {
        "temperature": float(rng.choice([0.0, 0.3, 1.0, 2.0])),
        "top_k": int(rng.choice([0, 1, 2, 5, 100])),
        "top_p": float(rng.choice([1.0, 0.9, 0.4])),
        "min_p": float(rng.choice([0.0, 0.05, 0.5])),
        "repetition_penalty": float(rng.choice([1.0, 1.4, 0.7])),
        "frequency_penalty": float(rng.choice([0.0, 0.7, -0.5])),
        "presence_penalty": float(rng.choice([0.0, 0.9, -0.4])),
        "logit_bias": {int(token): float(rng.normal(0, 3)) for token in rng.integers(0, vocab, rng.integers(0, 4))},
        "min_tokens": int(rng.choice([0, 2, 6])),
        "stop_token_ids": [int(rng.integers(0, vocab))],
        "ignore_eos": bool(rng.integers(0, 2)),
    }
    lists = [[int(token) for token in rng.integers(0, vocab, rng.integers(0, 6))] for _ in range(4)]
    return vocab, settings, lists


@pytest.mark.parametrize("block", range(8))
def test_fault_08_processors_at_every_node_with_its_own_history(block):
    """Random settings, histories and paths: everything equals the slow definition, whatever was asked before."""
    rng = np.random.default_rng(block)
    for _ in range(40):
        vocab, settings, (prompt, first, second, path) = random_case(rng)
        end = [int(rng.integers(0, vocab))]
        params, seed = SamplingParams(**settings), int(rng.integers(0, 2**62))
        row = RowSampler(params, seed, vocab, prompt, end)
        row.append(first)
        row.draw(logits_of(vocab), path[::-1])  # another branch leaves no trace
        row.append(second)
        logits = (np.round(rng.normal(0, 2, vocab) * 4) / 4).astype(np.float32)  # many ties
        output = first + second + path
        x = plain.processed(logits, params, prompt, output, end)
        t = len(prompt) + len(output)
        before = logits.copy()
        assert row.top(logits, path, 3)[0] == plain.draw(x, params, seed, t, 3)
        assert row.draw(logits, path) == plain.draw(x, params, seed, t)[0]
        assert row.distribution(logits, path) == pytest.approx(plain.law(x, params), abs=1e-13)
        assert (logits == before).all()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_fault_08_long_histories_and_many_biased_tokens(temperature):
    """Hundreds of touched tokens: the prompt, the answer, the path and the bias each add some."""
    rng, vocab = np.random.default_rng(3), 2000
    bias = {int(token): float(rng.normal(0, 2)) for token in rng.permutation(vocab)[:300]}
    settings = {"temperature": temperature, "top_p": 0.9, "logit_bias": bias, **PENALTIES}
    params, prompt = SamplingParams(**settings), rng.integers(0, vocab, 500).tolist()
    row, output = RowSampler(params, 4, vocab, prompt), []
    for step in range(12):
        path = rng.integers(0, vocab, 40).tolist()
        logits = logits_of(vocab, step)
        x = plain.processed(logits, params, prompt, output + path)
        assert row.draw(logits, path) == plain.draw(x, params, 4, len(prompt) + len(output + path))[0]
        assert row.distribution(logits, path) == pytest.approx(plain.law(x, params), abs=1e-13)
        output += path[:30]
        row.append(path[:30])


def test_fault_08_bias_bans_in_drafted_positions_and_top_k_beyond_the_vocabulary():
    logits = logits_of(100)
    best = int(np.argmax(logits))
    row = sampler({"logit_bias": {best: -100}})
    assert best not in {row.draw(logits, path) for path in ([], [5], [5, 6, 7])}
    many, none = sampler({"temperature": 1.0, "top_k": 101}), sampler({"temperature": 1.0})
    assert [many.draw(logits, [1] * t) for t in range(50)] == [none.draw(logits, [1] * t) for t in range(50)]


def test_fault_08_penalties_count_drafted_ancestors():
    """[1, 1, 1] drafted: the fourth time token 1 has lost its lead."""
    logits = np.array([0.0, 2.5, 1.0], np.float32)
    row = sampler({"frequency_penalty": 0.6}, 3)
    assert [row.draw(logits, [1] * count) for count in range(4)] == [1, 1, 1, 2]
    row.append([1, 1, 1])
    assert row.draw(logits, []) == 2


def test_fault_08_min_tokens_bans_ends_at_each_depth():
    logits = np.array([0.0, 1.0, 9.0, 8.0], np.float32)
    row = sampler({"min_tokens": 3, "stop_token_ids": [3]}, 4, ends=[2])
    assert [row.draw(logits, [0] * depth) for depth in range(5)] == [1, 1, 1, 2, 2]
    row.append([0, 0])
    assert row.draw(logits, []) == 1
    assert row.draw(logits, [0]) == 2
    free = sampler({"min_tokens": 3, "ignore_eos": True}, 4, ends=[2])
    assert free.draw(logits, []) == 2


def test_planted_history_without_the_path_is_seen():
    params = SamplingParams(frequency_penalty=0.6)
    row = sampler({"frequency_penalty": 0.6}, 3)
    logits = np.array([0.0, 2.5, 1.0], np.float32)
    assert row.draw(logits, [1, 1, 1]) != plain.draw(plain.processed(logits, params, [], []), params, 0, 0)[0]


@pytest.mark.parametrize("vocab", [3, 100, 8193])
def test_fault_03_ties_go_to_the_lowest_id(vocab):
    logits = np.zeros(vocab, np.float32)
    logits[[0, 1]] = 1.0
    assert sampler({}, vocab).draw(logits, []) == 0
    assert sampler({}, vocab).top(logits, [], 3)[0] == [0, 1, 2]
    for top_k in (1, 2):
        p = sampler({"temperature": 1.0, "top_k": top_k}, vocab).distribution(logits, [])
        assert np.flatnonzero(p).tolist() == list(range(top_k))
    for seed in range(30):
        one = sampler({"temperature": 1.0, "top_k": 1}, vocab, seed)
        assert one.draw(logits, []) == 0
    flat = sampler({"temperature": 1.0, "top_k": vocab - 1}, vocab).distribution(np.ones(vocab, np.float32), [])
    assert np.flatnonzero(flat).tolist() == list(range(vocab - 1))
    half = sampler({"temperature": 1.0, "top_p": 0.5}, vocab).distribution(np.ones(vocab, np.float32), [])
    assert np.flatnonzero(half).tolist() == list(range(math.ceil(vocab / 2)))


def test_planted_highest_id_on_ties_is_seen(monkeypatch):
    from slipstream.kernels import sampling as kernels

    monkeypatch.setattr(kernels, "argmax", lambda logits: len(logits) - 1 - int(np.argmax(logits[::-1])))
    assert sampler({}, 3).draw(np.array([1, 1, 0], np.float32), []) != 0


@pytest.mark.parametrize("temperature", [0, 1e-8, 1e-6])
def test_fault_07_greedy_near_zero_whatever_the_seed(temperature):
    logits = logits_of(100) * np.float32(1e30)
    draws = {sampler({"temperature": temperature, "top_p": 0.5}, seed=seed).draw(logits, []) for seed in range(5)}
    assert draws == {int(np.argmax(logits))}
    p = sampler({"temperature": temperature}).distribution(logits, [])
    assert p.max() == p.sum() == 1.0


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}, {"logit_bias": {3: 1}}]
)
@pytest.mark.parametrize("place", [0, 3, 57, 99])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.nan])
def test_fault_06_nan_and_infinity_end_the_request_with_a_clear_error(settings, place, bad):
    logits = logits_of(100)
    logits[place] = bad
    row = sampler(settings)
    for decide in (row.draw, row.distribution, row.near_tie):
        with pytest.raises(NonFiniteError, match="position 4 are NaN or infinite"):
            decide(logits, [5, 6])
    with pytest.raises(NonFiniteError):
        row.top(logits, [], 3)


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 50, "top_p": 0.99}])
def test_fault_14_padding_has_probability_0(settings):
    logits = logits_of(100)
    logits[10:] = -np.inf
    row = sampler(settings)
    p = row.distribution(logits, [])
    assert not p[10:].any()
    assert all(row.draw(logits, [0] * t) < 10 for t in range(200))
    assert max(row.top(logits, [], 50)[0]) < 10
    with pytest.raises(NonFiniteError, match="NaN or infinite"):
        row.draw(np.full(100, -np.inf, np.float32), [])


def test_everything_banned_is_an_error_of_its_own():
    row = sampler({"min_tokens": 2, "stop_token_ids": [0, 1, 2]}, 3)
    with pytest.raises(NonFiniteError, match="every token is banned"):
        row.draw(np.zeros(3, np.float32), [])


def test_ids_outside_the_vocabulary_are_refused():
    with pytest.raises(InputError, match="logit_bias names token 100"):
        sampler({"logit_bias": {100: 1}})
    with pytest.raises(InputError, match="stop_token_ids names token 500"):
        sampler({"stop_token_ids": [500]})
    assert sampler({"min_tokens": 1}, ends=[500]).draw(logits_of(100), []) < 100


def test_fault_18_same_seed_same_tokens_and_two_seeds_differ():
    logits = logits_of(1000)

    def answer(seed):
        row, tokens = sampler({"temperature": 1.0}, 1000, seed), []
        for _ in range(40):
            tokens.append(row.draw(logits, []))
            row.append(tokens[-1:])
        return tokens

    assert answer(1) == answer(1)
    assert answer(1) != answer(2)


def test_a_path_equals_the_same_tokens_committed():
    settings = {"temperature": 0.9, "top_p": 0.9, **PENALTIES}
    ahead, behind = sampler(settings, 1000), sampler(settings, 1000)
    tokens = [5, 9, 5, 700]
    behind.append(tokens)
    for t in range(30):
        logits = logits_of(1000, t)
        assert ahead.draw(logits, tokens) == behind.draw(logits, [])
        assert (ahead.distribution(logits, tokens) == behind.distribution(logits, [])).all()


def test_near_ties():
    row = sampler({}, 3)
    assert row.near_tie(np.array([1.0, 1.0005, 0], np.float32), [])
    assert not row.near_tie(np.array([1.0, 1.002, 0], np.float32), [])
    only = sampler({"temperature": 1.0, "top_k": 1}, 3)
    assert not only.near_tie(np.array([1.0, 1.0, 0], np.float32), [])


class OnlyEven:
    """A grammar: even ids, and nothing twice."""

    error = ""

    def __init__(self, vocab):
        self.vocab, self.done = vocab, []

    def allowed(self, path):
        mask = np.arange(self.vocab) % 2 == 0
        mask[[*self.done, *path]] = False
        return mask

    def append(self, tokens):
        self.done += tokens


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "top_p": 0.9}, {"logit_bias": {1: 50}, "min_tokens": 2}])
def test_a_grammar_masks_first_and_follows_the_path(settings):
    params, logits = SamplingParams(**settings), logits_of(100)
    row = sampler(settings, ends=[4], grammar=OnlyEven(100))
    row.append([2])
    for path in ([], [8], [8, 10]):
        mask = OnlyEven(100)
        mask.append([2])
        x = plain.processed(logits, params, [1, 2], [2, *path], [4], mask.allowed(path))
        assert row.draw(logits, path) == plain.draw(x, params, 9, 3 + len(path))[0]
        assert row.distribution(logits, path) == pytest.approx(plain.law(x, params), abs=1e-13)


@pytest.mark.parametrize("vocab", [3, 100, 8193])
def test_fault_19_logprobs_are_the_log_softmax_of_raw_logits(vocab):
    logits = logits_of(vocab, 1)
    logits[-1] = -np.inf
    x = logits.astype(np.float64)
    want = x - x.max() - math.log(np.exp(x - x.max()).sum())
    for token in (0, 1, int(np.argmax(x))):
        entry = token_logprob(logits, token, 5)
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(want[token], abs=1e-10)
        assert entry.logprob <= 0
        assert len(entry.top) == min(5, vocab - 1)
        assert [token for token, _ in entry.top] == sorted(range(vocab), key=lambda v: (-want[v], v))[: len(entry.top)]
        assert all(value == pytest.approx(want[other], abs=1e-10) for other, value in entry.top)
    assert token_logprob(logits, 0, 0).top == []


def test_fault_06_bad_logits_behind_a_grammar_and_in_logprobs():
    logits = logits_of(100)
    logits[3] = np.nan  # odd: masked, but the model is broken all the same
    with pytest.raises(NonFiniteError, match="NaN or infinite"):
        sampler(grammar=OnlyEven(100)).draw(logits, [])
    with pytest.raises(NonFiniteError, match="log-probabilities"):
        token_logprob(logits, 0, 3)


def test_logprob_of_a_certain_token_is_not_above_0():
    logits = np.full(8193, -500.0, np.float32)
    logits[7] = 500.0
    entry = token_logprob(logits, 7, 2)
    assert entry.logprob == 0.0
    assert entry.top == [(7, 0.0), (0, -1000.0)]
