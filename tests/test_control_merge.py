"""Offers of several drafters as one tree, the fixed controller, cost curves and calibration."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

import beds
from slipstream.control.cost import STALE_AFTER, CostCurve
from slipstream.control.fixed import Fixed
from slipstream.control.merge import Merger, best_chain
from slipstream.core.errors import InputError
from slipstream.core.params import SamplingParams
from slipstream.core.tree import ANCHOR, Draft
from slipstream.core.types import Limit, Offers, Row
from slipstream.kernels import tree as tree_kernels
from slipstream.kernels.reference_tree import decided
from slipstream.kernels.sampling import gumbel
from slipstream.sampling import noise


def row(**params):
    return Row(0, [0], 1, SamplingParams(**params), 5, sampler=None)


def merge(offers):
    """One tree by somebody who knows nothing of these sources yet."""
    return Merger().tree(row(), offers)


def random_offers(rng, sources=3, vocab=4):
    offers = []
    for source in range(sources):
        made, depths = Offers(f"s{source}"), []
        for _ in range(rng.randrange(9)):
            parent, token = rng.randrange(ANCHOR, len(made)), rng.randrange(vocab)
            if (parent, token) in zip(made.parents, made.tokens, strict=True):
                continue
            made.tokens.append(token)
            made.parents.append(parent)
            made.probs.append(rng.random() ** 2)
            depths.append(1)
        offers.append(made)
    return offers


def paths(tokens, parents):
    draft = Draft(list(tokens), list(parents))
    return {tuple(draft.path_tokens(node)) for node in range(len(draft))}


def merge_faults(offers):
    """What is wrong with the merged tree of these offers, whatever the estimates."""
    tree, faults = merge(offers), []
    try:
        tree.draft(len(tree)).check(100)
    except InputError as error:
        return [str(error)]
    if paths(tree.tokens, tree.parents) != set().union(*(paths(o.tokens, o.parents) for o in offers)):
        faults.append("not the union of all paths")
    if any(later > earlier + 1e-12 for earlier, later in itertools.pairwise(tree.reach)):
        faults.append("not by falling probability of the path")
    for node, parent in enumerate(tree.parents):
        above = tree.reach[parent] if parent != ANCHOR else 1.0
        if abs(tree.reach[node] - above * tree.chances[node]) > 1e-12:
            faults.append("path probability is not the product of its chances")
    draft = tree.draft(len(tree))
    if any(sum(tree.chances[node] for node in draft.children(parent)) > 1.0 for parent in range(ANCHOR, len(tree))):
        faults.append("siblings sum to more than one")
    return faults


CASES = [random_offers(random.Random(seed)) for seed in range(200)]


def test_merged_trees_are_unions_by_falling_path_probability():
    for offers in CASES:
        assert merge_faults(offers) == []


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 50])
def test_every_beginning_of_a_merged_tree_is_a_tree(count):
    for offers in CASES:
        tree = merge(offers)
        draft = tree.draft(count)
        draft.check(100)
        assert len(draft) == len(draft.sources) == min(count, len(tree))


def test_planted_merge_without_duplicates_is_seen(monkeypatch):
    ranker = tree_kernels.reference.Ranker
    unite = ranker._unite

    def pile_up(self, offers):
        nodes = []
        for offer in offers:
            base = len(nodes)
            for node in unite(self, [offer]):
                node.parent += base if node.parent != ANCHOR else 0
                nodes.append(node)
        return nodes

    monkeypatch.setattr(ranker, "_unite", pile_up)
    monkeypatch.setattr(tree_kernels.native, "core", None)
    assert any(merge_faults(offers) for offers in CASES)


def test_duplicates_confirm_each_other_and_silence_raises_doubt():
    one, two = beds.offer_chain([1, 2], "one", 0.6), beds.offer_chain([1, 3], "two", 0.7)
    tree = merge([one, two])
    assert tree.tokens == [1, 3, 2]
    assert tree.chances[0] > 0.6
    assert tree.chances[1] < 0.7
    assert tree.sources == ["two", "two", "one"]
    assert merge([one]).chances == pytest.approx([0.6, 0.6])
    assert merge([one, Offers("two")]).chances[0] < 0.5


def test_known_noise_decides_between_candidates():
    """What will be drawn is known but for the logits: of two equal candidates the one with more noise is likelier."""
    offers, sampled = Offers("s", [1, 2, 3], [-1, -1, 0], [0.3, 0.3, 0.5]), row(temperature=1.0)
    chances = dict(
        zip(*[getattr(Merger().tree(sampled, [offers]), name) for name in ("tokens", "chances")], strict=True)
    )
    first = gumbel(noise.key(5, 1), np.array([1, 2]))
    assert (chances[1] > chances[2]) == (first[0] > first[1])
    second = gumbel(noise.key(5, 2), np.array([3]))[0]
    assert chances[3] == pytest.approx(1 / (1 + np.exp(-0.7 * (second - 0.6))))
    assert Merger().tree(row(), [offers]).chances == pytest.approx([0.3, 0.3, 0.5])


def test_rival_siblings_share_one():
    tree = merge([beds.offer_chain([1], "one", 0.9), beds.offer_chain([2], "two", 0.9)])
    assert sum(tree.chances) <= 1.0
    assert tree.chances[0] == pytest.approx(tree.chances[1])


def test_nothing_offered_is_an_empty_draft():
    assert len(merge([])) == len(merge([Offers("one"), Offers("two")])) == 0
    assert len(merge([]).draft(5)) == len(best_chain(merge([]))) == 0


def drawn_offer():
    q = {ANCHOR: np.array([0.5, 0.3, 0.2]), 0: np.array([0.1, 0.1, 0.8])}
    return Offers("model", [2, 0, 1], [-1, -1, 0], [0.2, 0.5, 0.1], q, drawn=True)


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_draws_are_passed_on_whole_and_in_order(shape):
    offer = drawn_offer()
    for others in ([], [Offers("suffix")]):
        draft = Fixed(1, shape).choose([row()], [[*others, offer]], [Limit(1, 1)])[0]
        assert (draft.tokens, draft.parents, draft.q) == (offer.tokens, offer.parents, offer.q)
        assert draft.sources == ["model"] * 3


def test_best_chain_is_the_path_with_most_expected_tokens():
    offers = Offers("s", [1, 2, 3, 4, 5], [-1, -1, 1, 2, 0], [0.5, 0.45, 0.9, 0.9, 0.1])
    assert best_chain(merge([offers])).tokens == [2, 3, 4]
    for case in CASES:
        tree = merge(case)
        chain = best_chain(tree)
        assert chain.draft(99).is_chain()
        if len(tree):
            draft = tree.draft(len(tree))
            best = max(sum(tree.reach[i] for i in draft.path(node)) for node in range(len(tree)))
            assert sum(chain.reach) == pytest.approx(best)


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_fixed_stays_within_every_limit(shape):
    controller = Fixed(6, shape)
    for offers in CASES:
        for room in (0, 1, 3, 9):
            limit = controller.limits([row()])[0].within(room)
            draft = controller.choose([row()], [offers], [limit])[0]
            assert len(draft) <= limit.nodes
            assert shape == "tree" or draft.is_chain()


@pytest.mark.parametrize(
    ("nodes", "shape", "word"),
    [(-1, "chain", "-1"), (2.5, "tree", "2.5"), (4, "star", "star"), (100_000, "tree", "up to 512")],
)
def test_impossible_settings_are_refused(nodes, shape, word):
    with pytest.raises(InputError, match=word):
        Fixed(nodes, shape)


def test_limits_are_cut_by_room_and_by_drafter():
    limit = Limit(8, 6, 2, {"slow": 2, "never": 0}, floor=0.1)
    assert limit.of("slow") == Limit(8, 2, 2, floor=0.1)
    assert limit.of("fast") == Limit(8, 6, 2, floor=0.1)
    assert limit.of("never").nodes == 0
    assert limit.within(3) == Limit(8, 3, 2, {"slow": 2, "never": 0}, floor=0.1)
    assert limit.within(0).nodes == limit.within(-4).nodes == 0


def test_cost_curve_finds_the_truth_under_noise():
    rng = random.Random(1)
    curve = CostCurve(0.03)
    assert (curve.known, curve.at(0), curve.at(5)) == (False, 0.0, 0.0)

    def truth(n):
        return 0.01 * (1 + -(-n // 4))

    for _ in range(12):
        for n in (1, 2, 3, 4, 5, 8, 9, 12, 16):
            curve.observe(n, truth(n) * (20 if rng.random() < 0.1 else 1 + 0.1 * rng.random()))
    for n in (1, 2, 4, 5, 8, 9, 16):
        assert truth(n) <= curve.at(n) < 1.15 * truth(n)
    table = curve.table(64)
    assert all(np.diff(table) >= 0)
    assert truth(16) * 2 < curve.at(64) < truth(64) * 1.2


def test_cost_curve_never_falls_and_forgets():
    curve = CostCurve(0.03)
    for seconds in (0.01, 0.011, 0.009):
        curve.observe(1, seconds)
        curve.observe(3, 0.008)
    assert curve.at(3) >= curve.at(2) >= curve.at(1) >= 0.008
    curve.observe(8, 9.0)  # one disturbed time
    assert curve.at(8) == pytest.approx(9.0)
    for _ in range(2 * STALE_AFTER):
        curve.observe(1, 0.01)
    assert curve.at(8) < 0.02
    assert not curve.measured(8)


def test_initial_costs_give_the_shape_and_measurements_the_scale():
    curve = CostCurve(0.03, {1: 1.0, 4: 1.0, 8: 2.0})
    assert [curve.at(n) for n in (1, 4, 8)] == pytest.approx([1.0, 1.0, 2.0])
    curve.observe(1, 0.01)
    assert [curve.at(n) for n in (1, 4, 8)] == pytest.approx([0.01, 0.01, 0.02])
    with pytest.raises(InputError, match="initial costs"):
        CostCurve(0.03, {0: 1.0})


def tell(ranker, source, belief, hit):
    """Show that a first-level node of this belief was right or wrong."""
    ranker.rank(0, [(source, [1], [-1], [belief])], [], 0.0, True)
    ranker.learn(0, [1 if hit else 2])


@pytest.mark.parametrize("make", [tree_kernels.make_ranker, tree_kernels.reference.Ranker])
def test_calibration_learns_the_source_then_the_belief(make):
    rng, ranker = random.Random(1), make()
    assert ranker.chance(0, 0.7, 1) == 0.7
    for _ in range(5):
        tell(ranker, 0, 0.9, False)
    assert ranker.chance(0, 0.9, 1) < 0.4
    assert ranker.chance(0, 0.5, 1) < 0.4  # the same source, another belief
    assert ranker.chance(1, 0.9, 1) == 0.9
    for _ in range(400):
        tell(ranker, 2, 0.95, rng.random() < 0.6)
        tell(ranker, 2, 0.15, rng.random() < 0.3)
    assert abs(ranker.chance(2, 0.95, 1) - 0.6) < 0.15
    assert abs(ranker.chance(2, 0.15, 1) - 0.3) < 0.15


def test_the_emitted_tokens_decide_every_node_whose_parent_stands():
    tokens, parents = [1, 2, 5, 6, 7], [-1, -1, 0, 1, 3]
    assert list(decided(tokens, parents, [2])) == [(0, 1, False), (1, 1, True)]
    path = [(0, 1, False), (1, 1, True), (3, 2, True), (4, 3, False)]
    assert list(decided(tokens, parents, [2, 6, 9])) == path


def test_a_hit_surprises_as_far_as_it_was_not_expected():
    merger, offers = Merger(), Offers("s", [1, 2], [-1, -1], [0.75, 0.2])
    for emitted, surprise in (([9], 0.0), ([2], 1.0)):
        merger.tree(row(), [offers], keep=True)
        assert merger.learn(row(), emitted) == [("s", surprise)]
    assert merger.learn(row(), [1]) == []  # once per tree
    merger.tree(row(), [offers], keep=True)
    merger.forget(row())
    assert merger.learn(row(), [1]) == []


def test_the_compiled_ranker_equals_its_twin():
    if tree_kernels.native.core is None:
        pytest.skip("there is no compiled core to compare")
    rng = random.Random(1)
    twin, compiled = tree_kernels.reference.Ranker(), tree_kernels.make_ranker()
    for step in range(600):
        made = random_offers(rng, 3)[: rng.randrange(1, 4)]
        offers = [(number, one.tokens, one.parents, one.probs) for number, one in enumerate(made)]
        keys = [rng.randrange(1 << 64) for _ in range(8)] if step % 2 else []
        assert twin.rank(7, offers, keys, 0.7, True) == compiled.rank(7, offers, keys, 0.7, True)
        emitted = [rng.randrange(4) for _ in range(rng.randrange(1, 5))]
        assert twin.learn(7, emitted) == compiled.learn(7, emitted)
        reaches = [sorted((rng.random() for _ in range(rng.randrange(6))), reverse=True) for _ in range(3)]
        given = (reaches, sorted(rng.random() for _ in range(30)), 3, 3.0, 0.1)
        assert tree_kernels.reference.spread(*given) == tree_kernels.spread(*given)


def test_the_compiled_ranker_equals_its_twin_where_a_source_repeats_itself():
    if tree_kernels.native.core is None:
        pytest.skip("there is no compiled core to compare")
    twin, compiled = tree_kernels.reference.Ranker(), tree_kernels.make_ranker()
    offers = [(0, [1, 1, 2], [-1, -1, 0], [0.3, 0.6, 0.5]), (0, [1], [-1], [0.9])]
    for emitted in ([1, 2], [3], [1]):
        assert twin.rank(7, offers, [], 0.0, True) == compiled.rank(7, offers, [], 0.0, True)
        assert twin.learn(7, emitted) == compiled.learn(7, emitted)


@pytest.mark.parametrize(
    "offer", [(0, [1], [0], [0.5]), (0, [1], [-1], [1.5]), (0, [1, 2], [-1], [0.5]), (-1, [], [], [])]
)
def test_offers_that_are_no_trees_are_refused_by_the_core(offer):
    if tree_kernels.native.core is None:
        pytest.skip("there is no compiled core")
    with pytest.raises(ValueError, match=r"offer|parents|beliefs"):
        tree_kernels.make_ranker().rank(0, [offer], [], 0.0, False)


@pytest.mark.parametrize("belief", [-0.1, 1.1, float("nan")])
def test_a_belief_that_is_no_probability_has_no_chance(belief):
    if tree_kernels.native.core is None:
        pytest.skip("there is no compiled core")
    ranker = tree_kernels.make_ranker()
    ranker.rank(0, [(0, [1], [-1], [0.5])], [], 0.0, True)
    ranker.learn(0, [1])
    with pytest.raises(ValueError, match="beliefs"):
        ranker.chance(0, belief, 1)
