"""Verifiers on table models through the real sampler: plain equality, slow twins, refusals, errors."""

import numpy as np
import pytest

import verify_reference as slow
from slipstream.core.errors import InputError, UnsupportedError
from slipstream.core.params import SamplingParams
from slipstream.core.tree import ANCHOR, Draft, chain
from slipstream.core.types import Row
from slipstream.sampling import RowSampler
from slipstream.verify import VERIFIERS, check_combination, make_verifier
from slipstream.verify.typical import Typical

VOCAB = 12
ALL = list(VERIFIERS)
SETTINGS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 4, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "min_tokens": 6, "stop_token_ids": [2]},
    {"temperature": 0.9, "min_p": 0.1, "logit_bias": {3: 2.0, 4: -100.0}},
]


def table(seed=0, vocab=VOCAB, spread=1.5):
    return (np.random.default_rng(seed).standard_normal((vocab, vocab)) * spread).astype(np.float32)


def row_for(settings, seed=5, prompt=(1, 2)):
    params = SamplingParams(**settings)
    sampler = RowSampler(params, seed, VOCAB, prompt)
    return Row(id=0, tokens=list(prompt), prompt_length=len(prompt), params=params, seed=seed, sampler=sampler)


def random_tree(rng, nodes, anchor=None, likely=None):
    """A random tree with distinct siblings; with `likely` (a table) its tokens tend to be right."""
    draft, used = Draft(), {}
    for _ in range(nodes):
        parent = int(rng.integers(ANCHOR, len(draft)))
        last = anchor if parent == ANCHOR else draft.tokens[parent]
        token = int(rng.integers(VOCAB))
        if likely is not None and rng.random() < 0.8:
            token = int(np.argsort(-likely[last])[rng.integers(0, 3)])
        if token not in used.setdefault(parent, set()):
            used[parent].add(token)
            draft.tokens.append(token)
            draft.parents.append(parent)
    draft.check(VOCAB)
    return draft


def logits_for(draft, row, model):
    return model[[row.tokens[-1], *draft.tokens]]


def take(row, verdict):
    row.tokens += verdict.tokens
    row.sampler.append(verdict.tokens)
    row.step += 1


def plain(settings, model, length, seed=5):
    row = row_for(settings, seed)
    for _ in range(length):
        token = row.sampler.draw(model[row.tokens[-1]], [])
        row.tokens.append(token)
        row.sampler.append([token])
    return row.output


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", ["random", "likely", "right", "wrong", "empty"])
def test_fault_02_coupled_equals_plain_whatever_was_drafted(settings, kind):
    model, rng = table(), np.random.default_rng(1)
    want = plain(settings, model, 60)
    verify, row, accepted = make_verifier("coupled"), row_for(settings), 0
    while len(row.output) < 50:
        done = len(row.output)
        if kind == "right":
            draft = chain(want[done : done + 4])
        elif kind == "wrong":
            draft = chain([(want[done] + 1) % VOCAB, 0, 1])
        else:
            nodes = {"random": 8, "likely": 12, "empty": 0}[kind]
            draft = random_tree(rng, nodes, row.tokens[-1], model if kind == "likely" else None)
        verdict = verify(logits_for(draft, row, model), draft, row)
        assert verdict.tokens[:-1] == [draft.tokens[node] for node in verdict.path]
        assert [draft.parents[node] for node in verdict.path] == [ANCHOR, *verdict.path][: len(verdict.path)]
        accepted += len(verdict.path)
        take(row, verdict)
    assert row.output == want[: len(row.output)]
    assert row.step == -(-len(row.output) // 5) if kind == "right" else True
    assert (accepted == 0) == (kind in ("wrong", "empty"))


def test_planted_position_noise_shared_by_all_nodes_is_seen(monkeypatch):
    """Noise that ignores the path's length gives other tokens than plain decoding."""
    settings, model = {"temperature": 1.0}, table()
    want = plain(settings, model, 30)
    real = RowSampler.draw
    monkeypatch.setattr(RowSampler, "draw", lambda self, logits, path: real(self, logits, []))
    row = row_for(settings)
    while len(row.output) < 25:
        draft = chain(want[len(row.output) :][:4])
        take(row, make_verifier("coupled")(logits_for(draft, row, model), draft, row))
    assert row.output != want[: len(row.output)]


@pytest.mark.parametrize("name", ALL)
def test_fault_01_the_first_drafted_token_is_verified(name):
    model = np.zeros((VOCAB, VOCAB), np.float32)
    model[:, 2] = 5.0
    row = row_for({})
    verdict = make_verifier(name)(logits_for(chain([1]), row, model), chain([1]), row)
    assert (verdict.tokens, verdict.path) == ([2], [])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("settings", [{}, {"temperature": 1e-8}, {"temperature": 1e-6, "top_p": 0.5}, SETTINGS[4]])
def test_fault_02_and_07_greedy_rows_accept_the_argmax_only(name, settings):
    model, rng = table(3), np.random.default_rng(2)
    want, row = plain(settings, model, 60), row_for(settings)
    while len(row.output) < 50:
        draft = random_tree(rng, 10, row.tokens[-1], model)
        if name == "block" or rng.random() < 0.3:
            draft = chain(want[len(row.output) :][: int(rng.integers(0, 6))])
            if len(draft) > 2 and rng.random() < 0.5:
                draft.tokens[2] = (draft.tokens[2] + 1) % VOCAB
        best = slow.walk(draft, lambda path: row.sampler.draw(model[[row.tokens[-1], *path][-1]], path))
        verdict = make_verifier(name)(logits_for(draft, row, model), draft, row)
        assert (verdict.tokens, verdict.path) == best
        take(row, verdict)
    assert row.output == want[: len(row.output)]


@pytest.mark.parametrize("name", ALL)
def test_fault_03_ties_in_drafted_positions(name):
    model = np.zeros((VOCAB, VOCAB), np.float32)
    model[:, :2] = 1.0
    for settings in ({}, {"temperature": 1.0, "top_k": 1}):
        for draft, tokens in ((chain([0, 0]), [0, 0, 0]), (chain([1, 0]), [0]), (chain([0, 1]), [0, 0])):
            row = row_for(settings)
            assert make_verifier(name)(logits_for(draft, row, model), draft, row).tokens == tokens


def random_law(rng, kind):
    if kind == "equal":
        return None
    q = rng.dirichlet(np.full(VOCAB, 0.5))
    if kind == "sparse":
        q[rng.random(VOCAB) < 0.5] = 0.0
        q[int(rng.integers(VOCAB))] += 0.1
    return q / q.sum()


def drawn_tree(rng, row, model, width, depth, kind):
    draft, level = Draft(q={}), [(ANCHOR, [])]
    for _ in range(depth):
        below = []
        for parent, path in level:
            q = random_law(rng, kind)
            if q is None:
                q = row.sampler.distribution(model[[row.tokens[-1], *path][-1]], path)
            draft.q[parent] = q
            size = min(int(rng.integers(1, width + 1)), np.count_nonzero(q))
            for token in rng.choice(VOCAB, size, replace=False, p=q / q.sum()).tolist():
                draft.tokens.append(token)
                draft.parents.append(parent)
                below.append((len(draft) - 1, [*path, token]))
        level = below
    return draft


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", ["wide", "sparse", "equal", "fixed"])
@pytest.mark.parametrize("name", ["rejection", "block"])
def test_classical_rules_equal_their_slow_twins(name, kind, settings):
    rng = np.random.default_rng(7)
    for seed in range(25):
        model = table(seed)
        row = row_for(settings, seed)
        row.step = int(rng.integers(0, 1000))
        width = 3 if name == "rejection" else 1
        if kind == "fixed":
            draft = (
                random_tree(rng, 6, row.tokens[-1], model) if width > 1 else chain(rng.integers(0, VOCAB, 4).tolist())
            )
        else:
            draft = drawn_tree(rng, row, model, width, int(rng.integers(1, 4)), kind)
        sampler = row.sampler

        def p_of(path, row=row, model=model):
            return row.sampler.distribution(model[[row.tokens[-1], *path][-1]], path)

        u = [sampler.uniforms("accept", row.step, len(draft))]
        u += [sampler.uniforms(purpose, row.step, 1)[0] for purpose in ("residual", "bonus")]
        want = getattr(slow, name)(draft, p_of, *u)
        verdict = make_verifier(name)(logits_for(draft, row, model), draft, row)
        assert (verdict.tokens, verdict.path) == want
        if kind == "equal":
            assert len(verdict.path) == max(draft.depths()) if name == "block" else verdict.path


def test_fault_06_equal_laws_accept_every_chain_without_nan():
    for name in ("rejection", "block"):
        for seed in range(30):
            row, model = row_for({"temperature": 1.0, "top_p": 0.95}, seed), table(seed)
            draft = drawn_tree(np.random.default_rng(seed), row, model, 1, 5, "equal")
            verdict = make_verifier(name)(logits_for(draft, row, model), draft, row)
            assert verdict.path == [0, 1, 2, 3, 4]
            assert all(0 <= token < VOCAB for token in verdict.tokens)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_fault_06_bad_logits_count_only_where_the_walk_goes(name, settings, bad):
    model = np.full((VOCAB, VOCAB), -50.0, np.float32)
    model[range(VOCAB), [(token + 1) % VOCAB for token in range(VOCAB)]] = 50.0  # 2 is followed by 3, 4, ...
    verify, row = make_verifier(name), row_for(settings)
    wrong = chain([7, 8, 9])
    logits = logits_for(wrong, row, model)
    logits[2:] = bad
    verdict = verify(logits, wrong, row)
    assert (verdict.tokens, verdict.path, verdict.error) == ([3], [], None)
    right = chain([3, 4, 5])
    logits = logits_for(right, row, model)
    logits[2, 0] = bad
    verdict = verify(logits, right, row)
    assert "position 4 are NaN or infinite" in verdict.error
    assert len(verdict.tokens) == len(verdict.path)
    assert verdict.tokens == ([] if name == "typical" else [3, 4])


def test_near_ties_are_counted_when_asked():
    model = np.zeros((VOCAB, VOCAB), np.float32)
    model[:, 3] = 1e-4
    row, draft = row_for({}), chain([3, 3, 4])
    assert make_verifier("coupled", True)(logits_for(draft, row, model), draft, row).near_ties == 3
    assert make_verifier("coupled")(logits_for(draft, row, model), draft, row).near_ties == 0


def test_typical_is_lossy_and_says_so():
    assert {name: make_verifier(name).exact for name in ALL} == {
        "coupled": True,
        "rejection": True,
        "block": True,
        "typical": False,
    }
    assert [name for name in ALL if make_verifier(name).same_tokens] == ["coupled"]
    with pytest.raises(InputError, match="threshold"):
        Typical(threshold=0.0)


def test_typical_takes_the_longest_typical_path():
    model = np.log(np.full((VOCAB, VOCAB), 1e-9, np.float32))
    model[:, :3] = np.log(np.array([0.6, 0.3, 0.1], np.float32))
    row = row_for({"temperature": 1.0})
    draft = Draft([0, 1, 1, 5, 0], [ANCHOR, ANCHOR, 1, 2, 2])  # 0 | 1 - 1 - (5 | 0)
    verdict = make_verifier("typical")(logits_for(draft, row, model), draft, row)
    assert verdict.path == [1, 2, 4]
    assert verdict.tokens[:3] == [1, 1, 0]
    # min(.09, .3 exp(-H)) = .09 with H = .898: a token of probability .1 passes, one of .08 does not
    row = row_for({"temperature": 1.0})
    assert make_verifier("typical")(logits_for(chain([2]), row, model), chain([2]), row).path == [0]
    model[:, :3] = np.log(np.array([0.61, 0.31, 0.08], np.float32))
    assert make_verifier("typical")(logits_for(chain([2]), row, model), chain([2]), row).path == []


def test_fault_24_unknown_and_unsupported_are_refused_with_the_reason():
    with pytest.raises(InputError, match="choose one of: coupled, rejection, block, typical"):
        make_verifier("bogus")
    with pytest.raises(InputError, match="bogus"):
        check_combination("bogus", "chain", [])
    with pytest.raises(InputError, match="star"):
        check_combination("coupled", "star", [])
    with pytest.raises(UnsupportedError, match="chains only"):
        check_combination("block", "tree", ["lookup"])
    for name in ("rejection", "block"):
        with pytest.raises(UnsupportedError, match="one drafter alone, not merged \\(lookup, model:x\\)"):
            check_combination(name, "chain", ["lookup", "model:x"], ["model:x"])
        check_combination(name, "chain", ["model:x"], ["model:x"])
        check_combination(name, "chain", ["lookup", "suffix"])
    check_combination("rejection", "tree", ["model:x"], ["model:x"])
    check_combination("coupled", "tree", ["lookup", "model:x"], ["model:x"])
    row = row_for({})
    with pytest.raises(InputError, match="chains only"):
        make_verifier("block")(table()[[2, 0, 1]], Draft([0, 1], [ANCHOR, ANCHOR]), row)


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_fault_05_a_token_that_q_cannot_give_is_refused(name):
    row, q = row_for({"temperature": 1.0}), np.zeros(VOCAB)
    q[0] = 1.0
    draft = Draft([1], [ANCHOR], q={ANCHOR: q})
    with pytest.raises(InputError, match="drafted token 1 has probability 0"):
        make_verifier(name)(logits_for(draft, row, table()), draft, row)


def test_a_used_up_q_and_a_residual_without_mass():
    """Candidates beyond q's support are not tried; no residual mass means the ratio was 1 up to rounding: accept."""
    row, q = row_for({"temperature": 1.0}), np.zeros(VOCAB)
    q[0] = 1.0
    model = np.zeros((VOCAB, VOCAB), np.float32)
    model[:, 0] = -60.0
    draft = Draft([0, 1], [ANCHOR, ANCHOR], q={ANCHOR: q})
    verdict = make_verifier("rejection")(logits_for(draft, row, model), draft, row)
    assert verdict.path == []
    assert verdict.tokens[0] != 0
    above = np.full(VOCAB, 1 / VOCAB) * (1 + 1e-12)
    draft = Draft([3], [ANCHOR], q={ANCHOR: above})
    row.sampler.uniforms = lambda purpose, step, count: np.full(count, 1 - 1e-15)
    verdict = make_verifier("rejection")(np.zeros((2, VOCAB), np.float32), draft, row)
    assert verdict.path == [0]
