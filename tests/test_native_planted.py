"""Faults planted in the twin: each check of the native target must turn red."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from native_beds import cache_of, opened, random_tree, same_bits, target, tokens, tree_faults, twin
from slipstream.core.tree import Draft
from slipstream.kernels import reference_decoder
from slipstream.kernels.passes import Pass
from slipstream.kernels.reference_decoder import ReferenceDecoder
from slipstream.targets.base import RowInput

TREE = Draft([1, 2, 3, 4, 5], [-1, -1, 0, 1, 3])


def changed(rows: Pass, **values: np.ndarray) -> Pass:
    """The rows of a pass with other values in some of their arrays."""
    other = copy.copy(rows)
    for name, value in values.items():
        setattr(other, name, value.astype(np.int32))
    return other


class SeesSiblings(ReferenceDecoder):
    """Attends to every earlier row of the pass instead of its ancestors."""

    def _attend_row(self, layer, row, q, rows):
        return super()._attend_row(layer, row, q, changed(rows, parents=np.arange(-1, rows.rows - 1)))


class PositionByIndex(ReferenceDecoder):
    """Rotates a node by its index in the pass instead of its depth."""

    def _layer(self, index, layer, x, rows):
        return super()._layer(index, layer, x, changed(rows, depths=np.arange(rows.rows)))


class ForgetsAncestors(ReferenceDecoder):
    """Attends to the prefix and itself only."""

    def _attend_row(self, layer, row, q, rows):
        return super()._attend_row(layer, row, q, changed(rows, parents=np.full(rows.rows, -1)))


class SegmentsByPass(ReferenceDecoder):
    """Cuts the softmax where the pass begins instead of at fixed positions."""

    def _attend_row(self, layer, row, q, rows):
        prefix = int(rows.prefix[0])

        def attend(q, keys, values):
            parts = [(0, prefix), (prefix, len(keys))] if prefix else [(0, len(keys))]
            state = None
            for begin, end in parts:
                scores = np.einsum("hd,nhd->hn", q, np.repeat(keys[begin:end], len(q) // keys.shape[1], 1)) / np.sqrt(
                    np.float32(q.shape[1])
                )
                top = scores.max(axis=1)
                weights = reference_decoder.exp(scores - top[:, None])
                mixed = np.einsum("hn,nhd->hd", weights, np.repeat(values[begin:end], len(q) // keys.shape[1], 1))
                part = (top, weights.sum(axis=1), mixed)
                state = part if state is None else reference_decoder.merge(state, part)
            return state[2] / state[1][:, None]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference_decoder, "attend", attend)
            return super()._attend_row(layer, row, q, rows)


class CommitsInOrder(ReferenceDecoder):
    """Copies the first rows of the pass instead of the accepted ones."""

    def commit(self, rows, blocks, offsets):
        super().commit(np.arange(len(rows), dtype=np.int32), blocks, offsets)


def test_the_true_twin_passes_the_tree_check(monkeypatch):
    assert tree_faults(twin("llama", monkeypatch), tokens(20, 1), TREE) == []


@pytest.mark.parametrize("fault", [SeesSiblings, PositionByIndex, ForgetsAncestors, SegmentsByPass])
def test_planted_tree_faults_are_seen(fault, monkeypatch):
    wrong = tree_faults(twin("llama", monkeypatch, decoder=fault), tokens(20, 1), TREE)
    assert 4 in wrong


def test_planted_chunk_dependence_is_seen(monkeypatch):
    """The softmax cut at the chunk's start gives another cache for another chunking."""
    for decoder, alike in ((ReferenceDecoder, True), (SegmentsByPass, False)):
        subject = twin("llama", monkeypatch, decoder=decoder)
        whole, chunked = opened(subject, tokens(24, 1)), subject.open()
        for start in range(0, 24, 7):
            subject.prefill(chunked, tokens(24, 1)[start : start + 7])
        assert same_bits(cache_of(subject, whole), cache_of(subject, chunked)) == alike


def test_planted_commit_of_the_wrong_rows_is_seen(monkeypatch):
    for decoder, alike in ((ReferenceDecoder, True), (CommitsInOrder, False)):
        subject = twin("llama", monkeypatch, decoder=decoder)
        slot = opened(subject, [9, 8])
        subject.forward([RowInput(slot, 7, TREE)])
        subject.commit([[1, 3, 4]])
        fresh = opened(subject, [9, 8, 7, 2, 4, 5])
        assert same_bits(cache_of(subject, slot), cache_of(subject, fresh)) == alike


def test_planted_row_order_in_the_core_is_refused():
    """The compiled core refuses depths that do not fit the parents, and rows before their parents."""
    subject = target("llama")
    slot = opened(subject, [1, 2])
    plan = subject._plan([RowInput(slot, 3, random_tree(4, 1))])
    logits = np.empty((5, 101), np.float32)
    subject._decoder.forward(plan, logits, None, 0)
    parents, plan.parents = plan.parents, np.asarray([-1, 2, 0, 0, 0], np.int32)
    with pytest.raises(ValueError, match="parent is not before it"):
        subject._decoder.forward(plan, logits, None, 0)
    plan.parents, plan.depths = parents, np.arange(5, dtype=np.int32) + 1
    with pytest.raises(ValueError, match="depth does not fit"):
        subject._decoder.forward(plan, logits, None, 0)
