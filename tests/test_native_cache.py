"""The KV cache: what commit keeps, what rejection leaves alone, slots, forks, truncation, memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from native_beds import cache_of, logits_of, model, opened, random_tree, same_bits, target, tokens
from slipstream.core.errors import InputError
from slipstream.core.tree import Draft, chain
from slipstream.kernels.passes import BLOCK, KEY_TILE, SEGMENT, STRETCH
from slipstream.targets.base import RowInput
from slipstream.targets.native.kv import BlockPool, Slots
from slipstream.targets.native.model import NativeTarget


@pytest.fixture(autouse=True)
def _debug(monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_DEBUG", "1")


def fresh_cache(subject, prompt):
    slot = opened(subject, prompt)
    cache = cache_of(subject, slot)
    subject.close(slot)
    return cache


@pytest.mark.parametrize("family", ["llama", "qwen3", "odd"])
def test_fault_15_cache_after_commit_equals_a_fresh_prefill(family):
    """Thirty steps over two rows: all accepted, none accepted, part accepted, empty drafts; every step, every bit."""
    subject = target(family)
    rng = np.random.default_rng(0)
    committed = [tokens(30, 1), tokens(125, 2)]
    slots = [opened(subject, prompt) for prompt in committed]
    for step in range(30):
        anchors = rng.integers(0, 50, 2).tolist()
        drafts = [random_tree(int(rng.integers(0, 9)), 10 * step + i) for i in range(2)]
        nodes = [int(rng.integers(-1, len(draft))) if step % 3 else len(draft) - 1 for draft in drafts]
        paths = [draft.path(node) for draft, node in zip(drafts, nodes, strict=True)]
        subject.forward([RowInput(slot, a, d) for slot, a, d in zip(slots, anchors, drafts, strict=True)])
        subject.commit(paths)
        for i in range(2):
            committed[i] += [anchors[i], *(drafts[i].tokens[node] for node in paths[i])]
            assert subject.length(slots[i]) == len(committed[i])
            assert same_bits(cache_of(subject, slots[i]), fresh_cache(subject, committed[i]))


def test_rejected_rows_never_touch_the_cache():
    """The whole pool is unchanged by a forward pass, and by a commit except at the committed positions."""
    subject = target("llama")
    slot = opened(subject, tokens(40, 1))
    pool = subject._slots.pool.data
    before = pool[: subject._slots.pool.touched].copy()
    subject.forward([RowInput(slot, 3, random_tree(10, 2))])
    assert same_bits(pool[: len(before)], before)
    subject.commit([[]])
    changed = np.flatnonzero((pool[: len(before)] != before).any(axis=0))
    shape = subject._shape
    assert 0 < len(changed) <= 2 * shape.layers * shape.kv_width


def test_a_second_forward_replaces_the_first():
    """Without a commit between them only the last pass counts."""
    subject = target("llama")
    slot = opened(subject, tokens(10, 1))
    subject.forward([RowInput(slot, 3, chain([4, 5, 6]))])
    subject.forward([RowInput(slot, 7, chain([8]))])
    subject.commit([[0]])
    assert same_bits(cache_of(subject, slot), fresh_cache(subject, [*tokens(10, 1), 7, 8]))
    with pytest.raises(InputError, match="1 paths for a pass over 0 rows"):
        subject.commit([[]])


@pytest.mark.parametrize("keep", [0, 1, 32, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 58])
def test_truncate_then_go_on(keep):
    subject = target("qwen2")
    first, second = tokens(BLOCK + 58, 1), tokens(50, 2)
    slot = opened(subject, first)
    subject.truncate(slot, keep)
    subject.prefill(slot, second)
    assert same_bits(cache_of(subject, slot), fresh_cache(subject, first[:keep] + second))


@pytest.mark.parametrize("keep", [0, 5, 60, BLOCK, BLOCK + 4])
def test_forks_share_blocks_and_never_disturb_each_other(keep):
    subject = target("llama")
    prompt = tokens(BLOCK + 4, 1)
    slot = opened(subject, prompt)
    used = subject._slots.pool.used
    fork = subject.fork(slot, keep)
    assert subject._slots.pool.used == used
    subject.prefill(fork, tokens(40, 2))
    subject.truncate(slot, 60)
    subject.prefill(slot, tokens(20, 3))
    assert same_bits(cache_of(subject, slot), fresh_cache(subject, prompt[:60] + tokens(20, 3)))
    assert same_bits(cache_of(subject, fork), fresh_cache(subject, prompt[:keep] + tokens(40, 2)))
    subject.close(slot)
    assert same_bits(cache_of(subject, fork), fresh_cache(subject, prompt[:keep] + tokens(40, 2)))
    subject.close(fork)
    assert subject._slots.pool.used == 0


def test_fault_22_a_slot_used_before_leaves_no_trace():
    """Stale blocks of a long request, poisoned with NaN, do not reach a short one that gets them."""
    subject = target("llama")
    expected = logits_of(subject, tokens(20, 1), random_tree(5, 1))
    subject.close(opened(subject, tokens(300, 2)))
    subject._slots.pool.data[:] = np.nan
    assert same_bits(logits_of(subject, tokens(20, 1), random_tree(5, 1)), expected)


def test_slots_and_memory_come_back():
    subject = target("llama")
    slots = [opened(subject, tokens(70, i)) for i in range(8)]
    assert subject.free_slots == 0
    with pytest.raises(InputError, match="all 8 slots"):
        subject.open()
    memory = subject.memory_bytes()
    assert memory["kv_used"] == 8 * -(-70 // BLOCK) * BLOCK * subject.kv_bytes_per_token
    for slot in slots:
        subject.close(slot)
    assert subject.free_slots == 8
    assert subject.memory_bytes() == {**memory, "kv_used": 0, "kv_free": memory["kv_free"] + memory["kv_used"]}
    opened(subject, tokens(70, 9))
    assert subject.memory_bytes()["kv_touched"] == memory["kv_touched"]
    with pytest.raises(InputError, match="slot 0 is not open"):
        subject.length(0)


def test_results_that_are_held_are_never_overwritten():
    """Memory of logits is used again only when no view of them is left."""
    subject = target("llama")
    slot = opened(subject, tokens(10, 1))
    held = subject.forward([RowInput(slot, 3, chain([4, 5]))]).logits[0][1:]
    copy, address = held.copy(), held.ctypes.data
    other = subject.forward([RowInput(slot, 7, chain([8, 9]))]).logits[0][1:]
    assert same_bits(held, copy)
    assert not same_bits(other, copy)
    del held
    assert subject.forward([RowInput(slot, 3, chain([4, 5]))]).logits[0][1:].ctypes.data == address


def test_a_full_cache_is_one_clear_error():
    """More sequences than blocks: the request that asks is refused, the others go on."""
    pool = BlockPool(3, 8)
    slots = Slots(pool, 4, 2 * BLOCK)
    a, b = slots.open(), slots.open()
    slots.reserve(a, 2 * BLOCK)
    slots.reserve(b, BLOCK)
    slots.grow(b, BLOCK)
    with pytest.raises(InputError, match="KV cache is full"):
        slots.reserve(b, BLOCK + 1)
    slots.check()
    slots.close(a)
    slots.reserve(b, BLOCK + 1)
    assert pool.used == 2


def test_fault_12_the_context_end_is_an_error_not_an_overrun():
    subject = target("llama", max_context=64)
    slot = opened(subject, tokens(62, 1))
    subject.forward([RowInput(slot, 1, chain([2]))])
    with pytest.raises(InputError, match="over the context of 64"):
        subject.forward([RowInput(slot, 1, chain([2, 3]))])
    subject.forward([RowInput(slot, 1, Draft([2, 3], [-1, -1]))])
    subject.commit([[1]])
    with pytest.raises(InputError, match="over the context of 64"):
        subject.prefill(slot, [1])


@pytest.mark.parametrize("seed", range(8))
def test_random_traffic_keeps_every_slot_its_own(seed):
    """400 random openings, forks, truncations, writes and closings against plain lists; nothing leaks at the end."""
    rng = np.random.default_rng(seed)
    pool = BlockPool(24, BLOCK)
    slots = Slots(pool, 6, 5 * BLOCK)
    expected: dict[int, list[float]] = {}

    def write(slot: int, count: int) -> None:
        slots.reserve(slot, slots.lengths[slot] + count)
        blocks, offsets = slots.places(slot, count)
        values = rng.random(count, np.float32)
        pool.data[blocks, offsets] = values
        slots.grow(slot, count)
        expected[slot] += values.tolist()

    def act(action: int, slot: int) -> None:
        length = slots.lengths[slot]
        if action == 0:
            fork = slots.fork(slot, int(rng.integers(0, length + 1)))
            expected[fork] = expected[slot][: slots.lengths[fork]]
        elif action == 1:
            slots.truncate(slot, int(rng.integers(0, length + 1)))
            del expected[slot][slots.lengths[slot] :]
        elif action == 2:
            slots.close(slot)
            del expected[slot]
        else:
            write(slot, int(rng.integers(1, 40)))

    refused = 0
    for _ in range(400):
        try:
            if not expected or rng.random() < 0.1:
                expected[slots.open()] = []
            else:
                act(int(rng.integers(0, 8)), int(rng.choice(list(expected))))
        except InputError:
            refused += 1
        slots.check()
        for slot, values in expected.items():
            place = np.arange(len(values))
            assert pool.data[slots.tables[slot, place // BLOCK], place % BLOCK].tolist() == values
    assert refused < 300
    for slot in list(expected):
        slots.close(slot)
    assert pool.used == 0
    assert slots.free == 6


def test_planted_write_without_a_copy_is_seen(monkeypatch):
    """A fork that writes into a shared block changes the other's content."""
    monkeypatch.setattr(BlockPool, "own", lambda self, block: block)
    subject = target("llama")
    slot = opened(subject, tokens(40, 1))
    before = cache_of(subject, slot)
    subject.prefill(subject.fork(slot, 35), tokens(5, 2))
    assert not same_bits(cache_of(subject, slot), before)


def test_planted_double_free_and_leak_are_seen():
    subject = target("llama")
    slot = opened(subject, tokens(40, 1))
    subject._slots.check()
    block = int(subject._slots.tables[slot, 0])
    subject._slots.pool.drop(block)
    with pytest.raises(AssertionError, match="block counts differ"):
        subject._slots.check()


def test_debug_runs_refuse_a_path_that_skips_a_node():
    subject = target("llama")
    slot = opened(subject, tokens(4, 1))
    subject.forward([RowInput(slot, 1, chain([2, 3, 4]))])
    with pytest.raises(AssertionError, match="skips a node"):
        subject.commit([[0, 2]])


def test_a_slot_that_changed_since_the_pass_cannot_be_committed():
    """Its blocks may belong to another request by then."""
    subject = target("llama")
    slot = opened(subject, tokens(BLOCK, 1))
    subject.forward([RowInput(slot, 1, chain([2, 3]))])
    subject.truncate(slot, BLOCK)
    with pytest.raises(InputError, match="truncated or closed"):
        subject.commit([[0, 1]])
    subject.forward([RowInput(slot, 1)])
    subject.close(slot)
    with pytest.raises(InputError, match="not open"):
        subject.commit([[]])
    for wrong in (slot, 99, -1):
        with pytest.raises(InputError, match="not open"):
            subject.forward([RowInput(wrong, 1)])


def test_bad_rows_are_refused():
    subject = target("llama")
    slot = opened(subject, [1, 2])
    with pytest.raises(InputError, match="token id 101 is outside"):
        subject.prefill(slot, [4, 101])
    with pytest.raises(InputError, match="token id -1 is outside"):
        subject.forward([RowInput(slot, 3, chain([-1]))])
    with pytest.raises(InputError, match="distinct slots"):
        subject.forward([RowInput(slot, 3), RowInput(slot, 4)])
    with pytest.raises(InputError, match="distinct slots"):
        subject.forward([])
    assert subject.length(slot) == 2


def test_block_sizes_agree():
    constants = (Path(__file__).parent.parent / "csrc" / "ops.h").read_text()
    assert f"kKvBlock = {BLOCK};" in constants
    assert f"kSegment = {SEGMENT};" in constants
    assert f"kKeyTile = {KEY_TILE};" in constants
    assert f"kStretch = {STRETCH};" in constants
    small = NativeTarget.load(model("llama"), max_context=50, slots=2)
    assert small._slots.tables.shape == (2, 1)
    assert small.kv_bytes_per_token == 4 * 2 * 2 * 2 * 16
