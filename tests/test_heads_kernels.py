"""The compiled head against its numpy twin, bit for bit; and no result depends on what else is in the pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import head_beds
import native_beds
from slipstream.drafters.heads.parts import parts_of
from slipstream.drafters.heads.weights import eagle_weights
from slipstream.kernels.head import CompiledHead
from slipstream.kernels.passes import Pass
from slipstream.kernels.reference_head import ReferenceHead
from slipstream.models.config import ModelConfig
from slipstream.targets.native.kv import BlockPool
from slipstream.targets.native.rope import RopeTables

EAGLES = [name for name in head_beds.KINDS if name.startswith("eagle")]
WIDTH = 48


class Bed:
    """A head with a cache of two sequences; compiled, or the twin."""

    def __init__(self, name, make=None, storage="F32", **changes):
        head = head_beds.head(name, storage=storage, **changes)
        self.weights = eagle_weights(head, parts_of(native_beds.model()))
        self.pool = BlockPool(16, self.weights.shape.block_floats)
        make = make or (lambda weights, pool: CompiledHead(native_beds.core(), weights, pool))
        self.head = make(self.weights, self.pool.data)
        rope = RopeTables(ModelConfig(**native_beds.PLAIN))
        self.head.rope(rope.cos, rope.sin)
        self.tables = np.arange(16, dtype=np.int32).reshape(2, 8)

    def features(self, rows, seed=0):
        width = self.weights.features * self.weights.feature
        return np.random.default_rng(seed).standard_normal((rows, width), np.float32)

    def rows(self, tokens, parents, first=None, prefix=(0,), sequences=(0,)):
        return Pass(
            tokens=np.asarray(tokens, np.int32),
            parents=np.asarray(parents, np.int32),
            first=np.asarray(first or [0, len(tokens)], np.int32),
            prefix=np.asarray(prefix, np.int32),
            tables=self.tables[list(sequences)],
        )

    def run(self, tokens, parents, given, *, fresh, store, wanted=None, **how):
        wanted = np.arange(len(tokens)) if wanted is None else wanted
        rows = self.rows(tokens, parents, **how)
        return self.head.forward(rows, given, fresh, store, np.asarray(wanted, np.int32))

    def start(self, tokens, parents, given, wanted, **how):
        self.head.start(self.rows(tokens, parents, **how), given, np.asarray(wanted, np.int32))

    def draft(self, length=40, rest=3):
        """A text in two parts, then a tree of two levels below it; all that was made."""
        tokens, features = native_beds.tokens(length), self.features(length)
        chain = lambda n: range(-1, n - 1)  # noqa: E731
        ahead = length - rest
        self.run(tokens[:ahead], chain(ahead), features[:ahead], wanted=(), fresh=True, store=True)
        top = self.run(tokens[ahead:], chain(rest), features[ahead:], prefix=[ahead], fresh=True, store=True)
        given = np.repeat(top.hidden[-1:], 3, axis=0)
        one = self.run([7, 8, 9], [-1, -1, -1], given, prefix=[length], fresh=False, store=False)
        two = self.run([5, 6], [-1, -1, -1, 0, 2], one.hidden[[0, 2]], prefix=[length], fresh=False, store=False)
        three = self.run([3], [-1, -1, -1, 0, 2, 4], two.hidden[1:], prefix=[length], fresh=False, store=False)
        return [top, one, two, three]


@pytest.fixture
def threads_of_before():
    before = native_beds.core().threads()
    yield
    native_beds.core().set_threads(before)


def bits(made):
    return [array for part in made for array in (part.hidden, part.normed, part.logits)]


def equal(one, other):
    return all(native_beds.same_bits(a, b) for a, b in zip(bits(one), bits(other), strict=True))


@pytest.mark.parametrize("storage", ["F32", "F16"])
@pytest.mark.parametrize("name", EAGLES)
def test_core_and_twin_agree_in_every_bit(name, storage):
    assert equal(Bed(name, storage=storage).draft(), Bed(name, ReferenceHead, storage=storage).draft())


def test_quantised_heads_agree_with_their_twin():
    sizes = {"hidden": 64, "target_hidden": 48, "intermediate": 96, "own_embedding": True, "frozen_head": False}
    beds = [Bed("eagle3-ours", make, storage="Q8_0", **sizes) for make in (None, ReferenceHead)]
    assert equal(*(bed.draft() for bed in beds))


@pytest.mark.parametrize("name", ["eagle3-ours", "eagle1"])
def test_drafts_do_not_depend_on_the_batch(name):
    alone, both = Bed(name), Bed(name)
    tokens, features = native_beds.tokens(9), alone.features(9)
    other, others = native_beds.tokens(5, seed=1), alone.features(5, seed=1)
    one = alone.run(tokens, range(-1, 8), features, fresh=True, store=True)
    two = both.run(
        [*other, *tokens], [*range(-1, 4), -1, *range(5, 13)], np.concatenate([others, features]), first=[0, 5, 14],
        prefix=[0, 0], sequences=(1, 0), fresh=True, store=True,
    )  # fmt: skip
    assert native_beds.same_bits(one.logits, two.logits[5:])
    later = alone.run([4], [-1], one.hidden[-1:], prefix=[9], fresh=False, store=False)
    pair = both.run(
        [2, 4], [-1, -1], two.hidden[[4, 13]], first=[0, 1, 2], prefix=[5, 9], sequences=(1, 0), fresh=False,
        store=False,
    )  # fmt: skip
    assert native_beds.same_bits(later.logits, pair.logits[1:])


@pytest.mark.parametrize("make", [None, ReferenceHead])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_pass_left_to_an_idle_thread_gives_the_same(make, threads, threads_of_before):
    native_beds.core().set_threads(threads)
    at_once, aside = Bed("eagle3-ours", make), Bed("eagle3-ours", make)
    tokens, features = native_beds.tokens(60), at_once.features(60)
    for begin in range(0, 60, 3):
        part, given = tokens[begin : begin + 3], features[begin : begin + 3]
        made = at_once.run(part, [-1, 0, 1], given, prefix=[begin], wanted=[2], fresh=True, store=True)
        aside.start(part, [-1, 0, 1], given, prefix=[begin], wanted=[2])
        native_beds.core().exp(given[0], np.empty_like(given[0]))  # the caller goes on
        assert equal([made], [aside.head.finish()])
    assert native_beds.same_bits(at_once.pool.data, aside.pool.data)


FORK = """
import os, sys
import numpy as np
import native_beds
from test_heads_kernels import Bed, bits
native_beds.core().set_threads(2)
tokens, expected, bed = native_beds.tokens(60), Bed("eagle3-ours"), Bed("eagle3-ours")
features = bed.features(60)
made = expected.run(tokens, range(-1, 59), features, wanted=[59], fresh=True, store=True)
bed.start(tokens, range(-1, 59), features, wanted=[59])
child = os.fork()
found = bed.head.finish()
same = all(map(np.array_equal, bits([found]), bits([made])))
os._exit(not same) if child == 0 else sys.exit(not same or os.waitpid(child, 0)[1] != 0)
"""


def test_what_was_begun_before_a_fork_is_finished_on_both_sides():
    done = subprocess.run(
        [sys.executable, "-c", FORK], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_nothing_else_is_asked_of_a_head_until_what_was_begun_is_finished():
    bed = Bed("eagle3")
    bed.start([1], [-1], bed.features(1), wanted=[0])
    with pytest.raises(ValueError, match="not been finished"):
        bed.start([2], [-1], bed.features(1), wanted=[0])
    with pytest.raises(ValueError, match="not been finished"):
        bed.run([2], [-1], bed.features(1), fresh=True, store=True)
    assert bed.head.finish().logits.shape[0] == 1
    with pytest.raises(ValueError, match="no pass was begun"):
        bed.head.finish()
    bed.start([2], [-1], bed.features(1), prefix=[1], wanted=[0])  # a head that goes waits for its thread


def test_planted_siblings_that_see_each_other_are_seen():
    right, wrong = Bed("eagle3"), Bed("eagle3")
    given = right.features(6)
    for bed in (right, wrong):
        bed.run(range(6), range(-1, 5), given, fresh=True, store=True)
    state = np.ones((2, WIDTH), np.float32)
    apart = right.run([1, 2], [-1, -1], state, prefix=[6], fresh=False, store=False)
    below = wrong.run([1, 2], [-1, 0], state, prefix=[6], fresh=False, store=False)
    assert native_beds.same_bits(apart.logits[0], below.logits[0])
    assert not native_beds.same_bits(apart.logits[1], below.logits[1])


def test_passes_that_do_not_fit_are_refused():
    bed = Bed("eagle3")
    bed.run(range(4), range(-1, 3), bed.features(4), fresh=True, store=True)
    state = np.ones((1, WIDTH), np.float32)
    with pytest.raises(ValueError, match="older rows"):
        bed.run([1], [-1, 0], state, prefix=[4], fresh=False, store=False)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        bed.run([101], [-1], state, prefix=[4], fresh=False, store=False)
    with pytest.raises(ValueError, match="wrong width"):
        bed.run([1], [-1], bed.features(1), prefix=[4], fresh=False, store=False)
