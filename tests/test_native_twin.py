"""The compiled decoder against its numpy twin, bit for bit, on tiny models of every family."""

from __future__ import annotations

import numpy as np
import pytest

from native_beds import FAMILIES, cache_of, core, opened, random_tree, same_bits, target, tokens, twin
from slipstream.core.tree import Draft
from slipstream.kernels import reference_decoder
from slipstream.targets.base import RowInput


@pytest.mark.parametrize("family", FAMILIES)
def test_core_and_twin_agree_in_every_bit(family, monkeypatch):
    """Prefill over a segment boundary, a tree and a plain row in one pass, commit, another pass: all results."""
    subjects = [target(family, (0, 1, 2)), twin(family, monkeypatch, (0, 1, 2))]
    prompt, other = tokens(130, 1), tokens(9, 2)
    tree = random_tree(7, 3)
    seen = []
    for subject in subjects:
        slots = [opened(subject, prompt[:-1]), opened(subject, other[:-1])]
        first = subject.forward([RowInput(slots[0], prompt[-1], tree), RowInput(slots[1], other[-1])])
        subject.commit([tree.path(len(tree) - 1), []])
        second = subject.forward([RowInput(slots[1], 5, random_tree(3, 4)), RowInput(slots[0], 6)])
        results = [*first.logits, *second.logits, *first.features, *second.features]
        seen.append(results + [cache_of(subject, slot) for slot in slots])
    for ours, theirs in zip(*seen, strict=True):
        assert same_bits(ours, theirs)
        assert np.isfinite(ours[:, :7]).all()


@pytest.mark.parametrize("length", [511, 512, 640, 1100])
def test_long_contexts_agree_with_the_twin(length, monkeypatch):
    """Stretches of one and of several segments, and how they merge; the twin takes the cache over, it is slow."""
    subject, slow = target("qwen2", max_context=1200), twin("qwen2", monkeypatch, max_context=1200)
    tree = random_tree(5, 3)
    slots = [opened(subject, tokens(length, 1)), slow.open()]
    slow._slots.reserve(slots[1], length)
    slow._slots.grow(slots[1], length)
    ours, theirs = (each._slots.tables[slot] for each, slot in zip((subject, slow), slots, strict=True))
    slow._slots.pool.data[theirs] = subject._slots.pool.data[ours]
    seen = [
        each.forward([RowInput(slot, 7, tree)]).logits[0] for each, slot in zip((subject, slow), slots, strict=True)
    ]
    assert same_bits(*seen)
    assert np.isfinite(seen[0]).all()


def test_twin_serves_where_the_core_is_missing(monkeypatch):
    """Without a compiler the same class of objects answers, with the same logits."""
    expected = target("llama")
    monkeypatch.setenv("SLIPSTREAM_KERNELS", "numpy")  # asked for: no warning
    monkeypatch.setattr("slipstream.kernels.native.core", None)
    fallback = target("llama")
    assert isinstance(fallback._decoder, reference_decoder.ReferenceDecoder)
    row = [RowInput(0, 3, Draft([4, 5], [-1, 0]))]
    for subject in (expected, fallback):
        assert subject.open() == 0
    assert same_bits(expected.forward(row).logits[0], fallback.forward(row).logits[0])


def test_exp_is_accurate_and_equals_its_twin():
    x = np.concatenate([
        np.linspace(-90, 90, 20011), np.linspace(-1, 1, 20011),
        [0.0, -0.0, np.inf, -np.inf, np.nan, -87.33654, 88.37626],
    ]).astype(np.float32)  # fmt: skip
    ours = np.empty_like(x)
    core().exp(x, ours)
    assert same_bits(ours, reference_decoder.exp(x))
    inside = (x > -87.3) & (x < 88.3)
    exact = np.exp(x[inside].astype(np.float64))
    assert (np.abs(ours[inside] - exact) <= 2 * np.spacing(exact.astype(np.float32))).all()
    assert ours[x == 0].tolist() == [1.0] * int((x == 0).sum())
    assert ours[np.isneginf(x)] == 0
    assert np.isnan(ours[np.isnan(x)]).all()


@pytest.mark.parametrize("kind", ["NaN", "infinity"])
def test_a_bad_number_stays_in_its_own_rows(kind):
    """A NaN or infinity in one token's embedding spoils that row and its descendants, not siblings or neighbours."""
    subject = target("llama")
    bad = subject.__class__.load(_spoiled(float("nan") if kind == "NaN" else float("inf"), token=3), slots=8)
    tree = Draft([3, 4, 5, 6], [-1, -1, 0, 1])
    prompts = [tokens(40, 1, vocab=60), tokens(20, 2, vocab=60)]
    prompts = [[token + 10 for token in prompt] for prompt in prompts]
    outs = []
    for one in (subject, bad):
        rows = [RowInput(opened(one, prompt[:-1]), prompt[-1], tree) for prompt in prompts]
        outs.append(one.forward(rows).logits)
    for good, spoiled in zip(*outs, strict=True):
        assert np.isnan(spoiled[[1, 3]]).any(axis=1).all()
        assert same_bits(good[[0, 2, 4]], spoiled[[0, 2, 4]])


def _spoiled(value, token):
    from native_beds import RandomModel, Tensor, model

    class Spoiled(RandomModel):
        def tensor(self, name):
            found = super().tensor(name)
            if name != "model.embed_tokens.weight":
                return found
            values = found.float32()
            values[token, 5] = value
            return Tensor("F32", values.shape, values.view(np.uint8))

    return Spoiled(model("llama").config)
