"""Row invariance as a law: a row's logits are the same bits whatever else is in the pass and however it was reached."""

from __future__ import annotations

import numpy as np
import pytest

from native_beds import cache_of, core, logits_of, opened, random_tree, same_bits, target, tokens, tree_faults, twin
from slipstream.core.tree import chain
from slipstream.targets.base import Read, RowInput

PROMPT = tokens(150, 11)
ALIGNED = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_heads": 4}


def stepwise(subject, prompt, count, start=1):
    """Logits after each of the last `count` tokens of the prompt, one row per pass, nothing but plain decoding."""
    slot = opened(subject, prompt[:start])
    if len(prompt) - count > start:
        subject.prefill(slot, prompt[start : len(prompt) - count])
    rows = []
    for token in prompt[len(prompt) - count :]:
        rows.append(subject.forward([RowInput(slot, token)]).logits[0][0])
        subject.commit([[]])
    subject.close(slot)
    return np.stack(rows)


@pytest.mark.parametrize("family", ["llama", "llama3", "qwen2", "qwen3", "odd"])
def test_a_chain_equals_plain_decoding(family):
    """Every number of rows from 1 to 40, over block (32) and segment (128) boundaries."""
    subject = target(family)
    expected = stepwise(subject, PROMPT, 40)
    for rows in [*range(1, 41)]:
        start = len(PROMPT) - 40
        out = logits_of(subject, PROMPT[: start + 1], chain(PROMPT[start + 1 : start + rows]))
        assert same_bits(out, expected[:rows]), rows


def test_many_rows_equal_plain_decoding():
    """512 rows in one pass; the context crosses four segment boundaries."""
    subject = target("llama", max_context=600)
    prompt = tokens(540, 5)
    expected = stepwise(subject, prompt, 539)
    out = logits_of(subject, prompt[:1], chain(prompt[1:512]))
    assert same_bits(out[1:], expected[:511])


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 120, 127, 128, 129, 150])
def test_every_node_of_a_tree_equals_plain_decoding(length):
    assert tree_faults(target("llama"), PROMPT[:length], random_tree(14, length)) == []


@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3", "odd"])
def test_trees_of_other_families(family):
    assert tree_faults(target(family), PROMPT[:125], random_tree(9, 1)) == []


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q4_1"])
def test_batches_of_ragged_rows_and_trees(kind):
    """Five sequences of unlike lengths and trees in one pass equal each of them alone, in any order."""
    subject = target("llama", kind=kind, **ALIGNED)
    rows = [
        (tokens(length, length), random_tree(nodes, nodes))
        for length, nodes in [(1, 0), (33, 3), (150, 11), (64, 1), (130, 6)]
    ]
    alone = [logits_of(subject, prompt, draft) for prompt, draft in rows]
    slots = [opened(subject, prompt[:-1]) for prompt, _ in rows]
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1], [2, 1]):
        inputs = [RowInput(slots[i], rows[i][0][-1], rows[i][1]) for i in order]
        for i, logits in zip(order, subject.forward(inputs).logits, strict=True):
            assert same_bits(logits, alone[i])


def test_prefill_in_any_chunks_fills_the_cache_alike():
    subject = target("qwen2")
    slots = []
    for size in (150, 1, 7, 31, 32, 33, 100):
        slot = subject.open()
        for start in range(0, len(PROMPT), size):
            subject.prefill(slot, PROMPT[start : start + size])
        slots.append(slot)
        assert same_bits(cache_of(subject, slot), cache_of(subject, slots[0])), size


def test_prefill_passes_of_any_size_fill_the_cache_alike(monkeypatch):
    """The cut inside one call: 1, 7, 32 or 256 rows per pass."""
    results = []
    for size in (1, 7, 32, 256):
        monkeypatch.setattr("slipstream.targets.native.model.PREFILL_ROWS", size)
        subject = target("llama", features=(1, 2))
        slot = subject.open()
        features = subject.prefill(slot, tokens(300, 3))
        results.append((features, cache_of(subject, slot)))
    for features, cache in results[1:]:
        assert same_bits(features, results[0][0])
        assert same_bits(cache, results[0][1])


def read_along(subject, together=True):
    """Rows with drafts and parts of prompts, one of them before its row, in one pass or one after the other."""
    slots = [opened(subject, tokens(length, length)) for length in (33, 150, 20, 40, 127)]
    reads = [Read(slots[2], tokens(9, 1), 4), Read(slots[3], tokens(90, 2), 0), Read(slots[4], tokens(40, 3))]
    rows = [RowInput(slots[0], 3, random_tree(6, 1)), RowInput(slots[1], 4), RowInput(slots[2], 5, random_tree(4, 2))]
    if together:
        output = subject.forward(rows, reads)
    else:
        read = [subject.prefill(part.slot, part.tokens, part.last) for part in reads]
        output = subject.forward(rows)
        output.read = read
    subject.commit([[], [], [0]])
    found = [*output.logits, *(output.features or []), *(part for part in output.read if part is not None)]
    return [*found, *(cache_of(subject, slot) for slot in slots)]


@pytest.mark.parametrize("features", [(), (1,), (0, 2)], ids=str)
@pytest.mark.parametrize("kind", ["F32", "Q4_1"])
def test_prompts_read_along_with_rows_change_no_bit(kind, features, monkeypatch):
    """Nor does it matter how much of them one pass holds; features = 2 are those of the last output."""
    expected = read_along(target("llama", features=features, kind=kind, **ALIGNED), together=False)
    for room in (1, 50, 256):
        monkeypatch.setattr("slipstream.targets.native.model.PREFILL_ROWS", room)
        found = read_along(target("llama", features=features, kind=kind, **ALIGNED))
        assert len(found) == len(expected)
        assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True)), room


@pytest.mark.parametrize("features", [(), (0, 2)], ids=str)
def test_the_twin_reads_along_alike(features, monkeypatch):
    one, other = twin("llama", monkeypatch, features=features), target("llama", features=features)
    assert all(same_bits(a, b) for a, b in zip(read_along(one), read_along(other), strict=True))


def test_planted_rows_that_miss_what_is_read_before_them_are_seen(monkeypatch):
    """The row's own part of the prompt is left out of its prefix."""
    subject = target("llama")
    expected = read_along(subject, together=False)
    plan = type(subject)._plan

    def forgets(self, rows, chains=()):
        made = plan(self, rows, chains)
        if len(rows) == 3:
            made.prefix[2] = 20
        return made

    monkeypatch.setattr(type(subject), "_plan", forgets)
    assert not same_bits(read_along(target("llama"))[2], expected[2])


def _everything(subject):
    """Logits of a batch with a long prefill, trees and chains."""
    rows = [
        (tokens(300, 1), random_tree(12, 1)),
        (tokens(40, 2), chain(tokens(5, 3))),
        (tokens(128, 4), random_tree(3, 2)),
    ]
    inputs = [RowInput(opened(subject, prompt[:-1]), prompt[-1], draft) for prompt, draft in rows]
    out = np.concatenate(subject.forward(inputs).logits)
    subject.commit([[] for _ in rows])
    for row in inputs:
        subject.close(row.slot)
    return out


@pytest.fixture
def restored():
    threads = core().threads()
    yield
    core().set_threads(threads)
    core().select_kernels("auto")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "odd"])
@pytest.mark.usefixtures("restored")
def test_threads_do_not_matter(family):
    """One long row makes attention split by segments, several make it split by rows; both on 1 to 5 threads."""
    subject = target(family)
    results = []
    for threads in (1, 2, 3, 5):
        core().set_threads(threads)
        results.append(np.concatenate([_everything(subject), logits_of(subject, tokens(399, 7))]))
    assert all(same_bits(result, results[0]) for result in results[1:])


@pytest.mark.parametrize("family", ["llama", "qwen3", "odd"])
@pytest.mark.usefixtures("restored")
def test_instruction_sets_do_not_matter(family):
    subject = target(family)
    results = []
    for name in core().available_kernels():
        assert core().select_kernels(name)
        results.append(_everything(subject))
    assert len(results) >= 2
    assert all(same_bits(result, results[0]) for result in results[1:])
