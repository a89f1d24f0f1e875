"""Exact laws of verifiers on tiny vocabularies: every random decision is a branch, weighted by its probability.

A `Probe` stands for a uniform number of which only an interval is known. Comparing it splits the interval, so a number
that a fault uses twice is followed exactly too.
"""

import numpy as np

from slipstream.core.params import SamplingParams
from slipstream.core.tree import ANCHOR, Draft
from slipstream.core.types import Row
from slipstream.verify import rules

TINY = 1e-13


class Oracle:
    """Runs a function once for every way its decisions can fall."""

    def __init__(self):
        self.script = []

    def run(self, function):
        """Yields (weight, result) of every run; weights sum to 1."""
        while True:
            self.place, self.weight = 0, 1.0
            result = function()
            yield self.weight, result
            while self.script:
                self.script[-1].pop(0)
                if self.script[-1]:
                    break
                self.script.pop()
            if not self.script:
                return

    def branch(self, chances):
        """The index of one possible option; the others come in later runs."""
        if self.place == len(self.script):
            self.script.append([index for index, chance in enumerate(chances) if chance > TINY])
        choice = self.script[self.place][0]
        self.weight *= chances[choice]
        self.place += 1
        return choice


class Probe:
    """A uniform number known to lie in [low, high)."""

    def __init__(self, oracle):
        self.oracle, self.low, self.high = oracle, 0.0, 1.0

    def __lt__(self, threshold):
        cut = min(max(float(threshold), self.low), self.high)
        below = (cut - self.low) / (self.high - self.low)
        if self.oracle.branch([below, 1.0 - below]) == 0:
            self.high = cut
            return True
        self.low = cut
        return False

    def pick(self, weights):
        """The token the inverse distribution function gives."""
        edges = np.concatenate(([0.0], np.cumsum(weights))) / np.sum(weights)
        low, high = np.maximum(edges[:-1], self.low), np.minimum(edges[1:], self.high)
        token = self.oracle.branch((np.maximum(high - low, 0.0) / (self.high - self.low)).tolist())
        self.low, self.high = float(low[token]), float(high[token])
        return token


real_sample = rules.sample


def sample(weights, uniform):
    """rules.sample for probes (patched in by the tests) and for numbers."""
    return uniform.pick(weights) if isinstance(uniform, Probe) else real_sample(weights, uniform)


class OracleSampler:
    """A sampler whose logits are the probabilities themselves and whose uniforms are probes.

    rename: maps (purpose, step, index, committed tokens) to the key of the number, so that faults can share numbers.
    """

    def __init__(self, oracle, rename=None):
        self.oracle, self.rename, self.probes, self.committed = oracle, rename, {}, 0

    def distribution(self, logits, path):
        return logits

    def uniforms(self, purpose, step, count):
        keys = [(purpose, step, index) for index in range(count)]
        if self.rename:
            keys = [self.rename(*key, self.committed) for key in keys]
        return [key if isinstance(key, float) else self.probes.setdefault(key, Probe(self.oracle)) for key in keys]

    def append(self, tokens):
        self.committed += len(tokens)


def table_row(sampler, anchor=0):
    return Row(id=0, tokens=[anchor], prompt_length=1, params=SamplingParams(temperature=1.0), seed=0, sampler=sampler)


def drawn_draft(row, q_of, width, depth):
    """A tree whose children are drawn from q without replacement (width 1: a chain); q_of(last token) is a vector."""
    draft = Draft(q={})
    level, used = [(ANCHOR, row.tokens[-1])], 0
    uniform = row.sampler.uniforms("draft", row.step, 64)
    for _ in range(depth):
        below = []
        for parent, last in level:
            q = np.array(q_of(last), float)
            draft.q[parent] = q.copy()
            for _ in range(min(width, np.count_nonzero(q))):
                token = sample(q, uniform[used])
                used += 1
                draft.tokens.append(int(token))
                draft.parents.append(parent)
                below.append((len(draft) - 1, int(token)))
                q[token] = 0.0
        level = below
    return draft


def fixed_draft(q_of, width, depth, anchor):
    """A deterministic tree: the `width` likeliest tokens of q below every node, one-hot each."""
    draft, level = Draft(), [(ANCHOR, anchor)]
    for _ in range(depth):
        below = []
        for parent, last in level:
            for token in np.argsort(-np.array(q_of(last)), kind="stable")[:width].tolist():
                draft.tokens.append(token)
                draft.parents.append(parent)
                below.append((len(draft) - 1, token))
        level = below
    return draft


def rows_of(draft, anchor, p_of):
    """The "logits" [1 + nodes, vocab] of a table model: p after the anchor and after each node's token."""
    return np.array([p_of(anchor), *(p_of(token) for token in draft.tokens)])


def steps(verifier, row, p_of, propose, count):
    """`count` steps of draft and verification; the emitted tokens."""
    start = len(row.tokens)
    for _ in range(count):
        draft = propose(row)
        verdict = verifier(rows_of(draft, row.tokens[-1], p_of), draft, row)
        assert verdict.error is None
        assert len(verdict.tokens) == len(verdict.path) + 1
        row.tokens += verdict.tokens
        row.sampler.append(verdict.tokens)
        row.step += 1
    return row.tokens[start:]


def joint(p_of, length, anchor=0):
    """Target's law of `length` tokens after the anchor, as an array [vocab] * length."""
    if length == 0:
        return np.array(1.0)
    p = np.array(p_of(anchor))
    return np.array([p[token] * joint(p_of, length - 1, token) for token in range(len(p))])


def law(verifier, p_of, propose, count=1, length=3, rename=None):
    """Exact law of the first `length` tokens that `count` steps emit, completed by plain draws from p."""
    oracle, total = Oracle(), np.zeros((len(p_of(0)),) * length)
    ends = {token: [joint(p_of, left, token) for left in range(length + 1)] for token in range(len(p_of(0)))}
    mass, emitted = 0.0, 0.0

    def one():
        return steps(verifier, table_row(OracleSampler(oracle, rename)), p_of, propose, count)

    for weight, tokens in oracle.run(one):
        mass += weight
        emitted += weight * len(tokens)
        tokens = tokens[:length]
        total[tuple(tokens)] += weight * ends[tokens[-1]][length - len(tokens)]
    assert abs(mass - 1.0) < 1e-9
    return total, emitted
