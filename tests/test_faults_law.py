"""Fault kind 4 in the whole engine: the joint law of tokens over several steps, for every exact verifier."""

from __future__ import annotations

import math
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

import beds
from slipstream.control.adaptive import Adaptive
from slipstream.control.fixed import Fixed
from slipstream.core.params import SamplingParams
from slipstream.drafters import guard, small_model
from slipstream.drafters.small_model import SmallModel
from slipstream.engine import batch, step
from slipstream.verify import make_verifier

DRAWS = 5000
LENGTH = 3
# Target and drafter disagree strongly, so that every fault that mixes them up shows.
TARGET = np.log([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.45, 0.1, 0.45]])
DRAFTER = np.log([[0.1, 0.2, 0.7], [0.5, 0.4, 0.1], [0.1, 0.8, 0.1]])


def law() -> np.ndarray:
    """Probability of each answer of three tokens after token 0, [27]."""
    table = TARGET.astype(np.float32).astype(np.float64)
    p = np.exp(table) / np.exp(table).sum(1, keepdims=True)
    return np.array([p[0, a] * p[a, b] * p[b, c] for a, b, c in product(range(3), repeat=3)])


class Paced(beds.TableTarget):
    """Passes of a hundredth of a second each, by a clock of its own that nothing else takes much of."""

    now = 0.0

    def forward(self, rows, reads=()):
        self.now += 0.01
        return super().forward(rows, reads)

    def clock(self):
        self.now += 1e-5
        return self.now


def counts(
    verifier: str, shape: str, size: int, controller: type = Fixed, target: beds.TableTarget | None = None
) -> np.ndarray:
    """How often each answer came, [27]."""
    drafter = SmallModel(beds.TableTarget(DRAFTER, slots=64), 3, classical=verifier != "coupled")
    made = beds.engine(
        target or beds.TableTarget(TARGET, slots=64),
        [drafter],
        controller=controller(size, shape),
        verifier=make_verifier(verifier),
        max_batch=64,
        keep_prefixes=0,
        debug=False,
    )
    params = [SamplingParams(max_tokens=LENGTH, temperature=1.0, n=500, seed=seed) for seed in range(DRAWS // 500)]
    results = made.run([made.add([0], each) for each in params])
    outputs = [output for result in results for output in result.outputs]
    assert all(output.speculation.drafter_failures == 0 for output in outputs)
    assert sum(output.speculation.num_steps for output in outputs) > 1.5 * DRAWS, "several steps each"
    assert sum(output.speculation.num_draft_tokens for output in outputs) > 0.2 * DRAWS, "drafts were at work"
    found = np.zeros(27)
    for output in outputs:
        a, b, c = output.token_ids
        found[9 * a + 3 * b + c] += 1
    return found


def strangeness(found: np.ndarray) -> float:
    """Chi-square statistic in standard deviations above its mean (26 degrees of freedom)."""
    expected = law() * found.sum()
    chi = float(((found - expected) ** 2 / expected).sum())
    return (chi - 26) / math.sqrt(52)


CASES = [("coupled", "tree", 3), ("rejection", "chain", 2), ("rejection", "tree", 4), ("block", "chain", 2)]


@pytest.mark.parametrize(("verifier", "shape", "size"), CASES)
def test_fault_04_joint_law_over_steps(verifier, shape, size):
    assert strangeness(counts(verifier, shape, size)) < 4


@pytest.mark.parametrize(("verifier", "shape", "size"), CASES[1:])
def test_fault_04_joint_law_while_the_controller_learns(verifier, shape, size, monkeypatch):
    """The adaptive controller drafts now and then, by the clock; passes are made to cost what speculation can save."""
    target = Paced(TARGET, slots=64)
    monkeypatch.setattr(step, "time", SimpleNamespace(perf_counter=target.clock))
    monkeypatch.setattr(guard, "perf_counter", target.clock)
    assert strangeness(counts(verifier, shape, size, Adaptive, target)) < 4


def test_planted_law_faults_are_seen(monkeypatch):
    """Steps that reuse the randomness of the first; a draft whose q is not what was drawn from."""
    real = batch.count

    def no_step(answer, draft, verdict):
        real(answer, draft, verdict)
        answer.row.step = 0

    monkeypatch.setattr(batch, "count", no_step)
    assert strangeness(counts("rejection", "chain", 1)) > 6
    monkeypatch.undo()
    draw = small_model.SmallModel._draw

    def wrong_q(self, plan, logits):
        made = draw(self, plan, logits)
        plan.offers.q[plan.offers.parents[-1] if len(plan.offers) else -1] = np.full(3, 1 / 3)
        return made

    monkeypatch.setattr(small_model.SmallModel, "_draw", wrong_q)
    assert strangeness(counts("rejection", "chain", 2)) > 6
