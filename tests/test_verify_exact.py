"""The classical verifiers' exact output law by enumeration, the check values, and planted faults that must show."""

import numpy as np
import pytest

import verify_oracle as oracle
from slipstream.verify import block as block_module
from slipstream.verify import make_verifier, rules

P3 = np.array([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.1, 0.8, 0.1]])
Q3 = np.array([[0.1, 0.2, 0.7], [0.5, 0.4, 0.1], [0.6, 0.1, 0.3]])
P4 = np.array([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.7, 0.0, 0.1, 0.2], [0.25, 0.25, 0.25, 0.25]])
Q4 = np.array([[0.1, 0.2, 0.3, 0.4], [0.4, 0.4, 0.1, 0.1], [0.0, 0.5, 0.4, 0.1], [0.7, 0.1, 0.1, 0.1]])
P2, Q2 = np.array([[1 / 3, 2 / 3]] * 2), np.array([[2 / 3, 1 / 3]] * 2)
EXACT, FAULTY = 1e-10, 0.01


@pytest.fixture(autouse=True)
def _probes_can_be_sampled(monkeypatch):
    monkeypatch.setattr(rules, "sample", oracle.sample)


def drawing(q, width=1, depth=2):
    return lambda row: oracle.drawn_draft(row, q.__getitem__, width, depth)


def fixed(q, width=1, depth=2):
    return lambda row: oracle.fixed_draft(q.__getitem__, width, depth, row.tokens[-1])


def deviation(name, p, propose, count=1, length=3, rename=None):
    """Largest error of the joint law of the first tokens."""
    found, _ = oracle.law(make_verifier(name), p.__getitem__, propose, count, length, rename)
    return float(abs(found - oracle.joint(p.__getitem__, length)).max())


def emitted(name, p, propose):
    return oracle.law(make_verifier(name), p.__getitem__, propose)[1]


CASES = [
    ("rejection", 1, 1),
    ("rejection", 1, 3),
    ("rejection", 2, 1),
    ("rejection", 3, 1),
    ("rejection", 4, 1),
    ("rejection", 2, 2),
    ("block", 1, 1),
    ("block", 1, 2),
    ("block", 1, 3),
]


@pytest.mark.parametrize(("name", "width", "depth"), CASES)
@pytest.mark.parametrize(("p", "q"), [(P3, Q3), (P4, Q4), (P3, P3), (Q3, P3)], ids=["3", "4", "equal", "swapped"])
def test_fault_04_one_step_has_exactly_the_target_law(name, width, depth, p, q):
    if width == depth == 2 and len(p) == 4:
        depth = 1
    assert deviation(name, p, drawing(q, width, depth), length=depth + 1) < EXACT
    assert deviation(name, p, fixed(q, width, depth), length=depth + 1) < EXACT


@pytest.mark.parametrize(
    ("name", "p", "q", "width", "depth"),
    [
        ("rejection", P3, Q3, 1, 2),
        ("block", P3, Q3, 1, 2),
        ("rejection", P3, Q3, 2, 1),
        ("rejection", P4, Q4, 3, 1),
        ("block", P2, Q2, 1, 3),
    ],
)
def test_fault_04_two_steps_jointly(name, p, q, width, depth):
    assert deviation(name, p, drawing(q, width, depth), 2, 4) < EXACT
    assert deviation(name, p, fixed(q, width, depth), 2, 4) < EXACT


def test_check_values_of_token_rejection():
    p, q = P3[0], Q3[0]
    assert sum(q[x] * min(1.0, rules.acceptance(p, q, x)) for x in range(3)) == pytest.approx(0.4)
    rest = rules.residual(p, q, 2)
    assert rest / rest.sum() == pytest.approx([5 / 6, 1 / 6, 0])
    assert emitted("rejection", P3, drawing(Q3, 1, 1)) == pytest.approx(1.4)


def test_check_values_of_two_drafted():
    assert emitted("rejection", P2, drawing(Q2, 1, 2)) == pytest.approx(1 + 10 / 9)
    assert emitted("block", P2, drawing(Q2, 1, 2)) == pytest.approx(1 + 11 / 9)


def test_block_never_accepts_less_than_token_rejection():
    for p, q in ((P3, Q3), (P4, Q4), (Q3, P3), (P3, P3)):
        for depth in (1, 2, 3):
            block, token = (emitted(name, p, drawing(q, 1, depth)) for name in ("block", "rejection"))
            assert block >= token - 1e-9
            assert depth > 1 or block == pytest.approx(token)


def test_fault_05_a_deterministic_draft_is_one_hot():
    """p = (.5, .3, .2), draft 0: accepted half the time, else (0, .6, .4)."""
    p = np.array([[0.5, 0.3, 0.2]] * 3)
    for name in ("rejection", "block"):
        assert emitted(name, p, fixed(np.array([[1.0, 0, 0]] * 3), 1, 1)) == pytest.approx(1.5)
    rest = rules.residual(p[0], None, 0)
    assert rest / rest.sum() == pytest.approx([0, 0.6, 0.4])


def test_fault_05_a_filtered_drafter_reports_the_filtered_law():
    top2 = np.where(np.argsort(np.argsort(Q3)) > 0, Q3, 0.0)
    top2 /= top2.sum(1, keepdims=True)
    for name in ("rejection", "block"):
        assert deviation(name, P3, drawing(top2)) < EXACT

        def reports_all(row):
            draft = oracle.drawn_draft(row, top2.__getitem__, 1, 2)
            draft.q = {parent: Q3[row.tokens[-1] if parent < 0 else draft.tokens[parent]] for parent in draft.q}
            return draft

        assert deviation(name, P3, reports_all) > FAULTY


def test_fault_06_equal_laws_accept_always():
    for name, width in (("rejection", 1), ("rejection", 2), ("block", 1)):
        assert emitted(name, P4, drawing(P4, width, 2)) == pytest.approx(3.0, abs=1e-12)


# Planted faults: each must show in the exact law.


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_planted_q_off_by_its_temperature(name):
    def propose(row):
        flat = Q3**0.5 / (Q3**0.5).sum(1, keepdims=True)
        draft = oracle.drawn_draft(row, flat.__getitem__, 1, 2)
        draft.q = {parent: Q3[row.tokens[-1] if parent < 0 else draft.tokens[parent]] for parent in draft.q}
        return draft

    assert deviation(name, P3, propose) > FAULTY


@pytest.mark.parametrize(("name", "width"), [("rejection", 1), ("rejection", 2), ("block", 1)])
def test_planted_residual_is_p(name, width, monkeypatch):
    assert deviation(name, P3, drawing(Q3, width)) < EXACT
    monkeypatch.setattr(rules, "residual", lambda p, q, token: p)
    assert deviation(name, P3, drawing(Q3, width)) > FAULTY


@pytest.mark.parametrize(("name", "width"), [("rejection", 1), ("rejection", 2), ("block", 1)])
def test_planted_accept_uniform_fixed_at_0(name, width):
    def zero(purpose, step, index, committed):
        return 0.0 if purpose == "accept" else (purpose, step, index)

    assert deviation(name, P3, drawing(Q3, width), rename=zero) > FAULTY


def test_planted_first_instead_of_last_index(monkeypatch):
    def first(uniform, chances):
        return next((i for i, chance in enumerate(chances, 1) if uniform[i - 1] < chance), 0)

    monkeypatch.setattr(block_module, "last_accepted", first)
    assert deviation("block", P3, drawing(Q3, 1, 3), length=4) > FAULTY


def test_planted_stop_at_the_first_reject(monkeypatch):
    def run(uniform, chances):
        return next((i for i, chance in enumerate(chances) if not uniform[i] < chance), len(chances))

    monkeypatch.setattr(block_module, "last_accepted", run)
    assert deviation("block", P3, drawing(Q3, 1, 3), length=4) > FAULTY


@pytest.mark.parametrize("width", [1, 2])
def test_planted_q_zeroed_before_the_residual(width, monkeypatch):
    real = rules.residual
    monkeypatch.setattr(rules, "residual", lambda p, q, token: real(p, rules.without(q, token), token))
    assert deviation("rejection", P3, drawing(Q3, width)) > FAULTY


def test_planted_q_kept_after_a_reject(monkeypatch):
    monkeypatch.setattr(rules, "without", lambda q, token: q)
    assert deviation("rejection", P3, drawing(Q3, 2, 1), length=2) > FAULTY


def test_planted_candidates_sorted_by_q():
    def propose(row):
        draft = oracle.drawn_draft(row, Q3.__getitem__, 2, 1)
        draft.tokens.sort(key=lambda token: -Q3[row.tokens[-1]][token])
        return draft

    assert deviation("rejection", P3, propose, length=2) > FAULTY


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_planted_residual_drawn_with_the_drafts_noise(name):
    def shared(purpose, step, index, committed):
        return ("draft" if purpose == "residual" else purpose, step, index)

    assert deviation(name, P3, drawing(Q3), rename=shared) > FAULTY


def test_planted_accept_uniforms_keyed_by_position_across_steps():
    """A number that decided about a position in one step decides about it again in the next: two steps show it."""

    def by_position(purpose, step, index, committed):
        return (purpose, committed + index) if purpose == "accept" else (purpose, step, index)

    p, q = np.array([[0.5, 0.5], [0.4, 0.6]]), np.array([[0.9, 0.1], [0.1, 0.9]])
    assert deviation("block", p, drawing(q), 2, 4) < EXACT
    assert deviation("block", p, drawing(q), 1, 3, by_position) < EXACT
    assert deviation("block", p, drawing(q), 2, 4, by_position) > 2 * FAULTY


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_planted_low_confidence_draft_dropped_after_drawing(name):
    def unsure(row, draft, keep):
        for node, token in enumerate(draft.tokens):
            q = draft.q[node - 1]
            if q[token] < 0.45:
                return cut(draft, node + keep)
        return draft

    def cut(draft, size):
        draft.tokens, draft.parents = draft.tokens[:size], draft.parents[:size]
        draft.q = {parent: q for parent, q in draft.q.items() if parent < size - 1}
        return draft

    for keep, wrong in ((0, True), (1, False)):  # stopping after the token is included is fine
        off = deviation(name, P3, lambda row, keep=keep: unsure(row, drawing(Q3)(row), keep))
        assert off > FAULTY if wrong else off < EXACT
