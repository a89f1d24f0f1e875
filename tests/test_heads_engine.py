"""Features on their way from the target to drafters: every token that enters the cache is shown once, in order."""

from __future__ import annotations

import numpy as np
import pytest

import beds
import native_beds
from slipstream.core.types import Offers
from slipstream.drafters.base import Drafter

LAYERS = (0, 2)


class Watcher(Drafter):
    """A drafter that offers nothing and writes down what it is shown."""

    name = "watcher"

    def __init__(self):
        self.parts: dict[int, list[tuple[int, np.ndarray]]] = {}
        self.begun: list[int] = []
        self.ended: list[int] = []

    def prefilled(self, row, start, features):
        assert row.id not in self.begun
        self.parts.setdefault(row.id, []).append((start, features.copy()))

    def begin(self, row):
        self.begun.append(row.id)

    def propose(self, rows, limits):
        return [Offers(self.name) for _ in rows]

    def observe(self, observations):
        for seen in observations:
            kept = [0, *(node + 1 for node in seen.verdict.path)]
            start = len(seen.row.tokens) - len(seen.verdict.tokens) - 1
            self.parts[seen.row.id].append((start, seen.features[kept]))

    def end(self, row):
        self.ended.append(row.id)


def shown(parts):
    """Features by position, each shown once and without gaps."""
    found = []
    for start, features in parts:
        if found:
            assert start == parts[0][0] + len(found)
        found += list(features)
    return parts[0][0], np.array(found)


def test_drafters_see_the_features_of_every_committed_token():
    watcher = Watcher()
    engine = beds.engine(native_beds.target(features=LAYERS), [watcher], tokenizer=beds.letters(101))
    prompt = native_beds.tokens(30)
    answer = beds.answer(engine, prompt, max_tokens=6, ignore_eos=True)
    start, found = shown(watcher.parts[0])
    committed = [*prompt, *answer.token_ids[:-1]]
    subject = native_beds.target(features=LAYERS)
    wanted = subject.prefill(subject.open(), committed)
    assert start == 0
    assert native_beds.same_bits(found, wanted)
    assert watcher.begun == watcher.ended == [0]


@pytest.mark.parametrize("pace", [4, 300])
def test_of_a_prompt_the_features_are_shown_that_a_drafter_looks_back_to(pace, monkeypatch):
    monkeypatch.setattr("slipstream.engine.reading.Pace.chunk", lambda *_: pace)
    monkeypatch.setattr("slipstream.engine.reader.FEWEST_TOKENS", pace)
    watcher, whole = Watcher(), Watcher()
    watcher.looks_back = 6
    for each in (watcher, whole):
        engine = beds.engine(native_beds.target(features=LAYERS), [each], tokenizer=beds.letters(101))
        beds.answer(engine, native_beds.tokens(290), max_tokens=3, ignore_eos=True)
    start, found = shown(watcher.parts[0])
    assert start == 289 - 6
    assert native_beds.same_bits(found, shown(whole.parts[0])[1][start:])


def test_a_reused_prefix_is_not_shown_again():
    watcher = Watcher()
    engine = beds.engine(native_beds.target(features=LAYERS), [watcher], tokenizer=beds.letters(101))
    prompt = native_beds.tokens(30)
    beds.answer(engine, prompt, max_tokens=4, ignore_eos=True)
    beds.answer(engine, [*prompt, 1, 2, 3], max_tokens=4, ignore_eos=True)
    start, found = shown(watcher.parts[1])
    assert start >= 29
    assert start + len(found) == 33 + 3


def test_targets_without_features_show_nothing():
    watcher = Watcher()
    watcher.observe = lambda _: None
    engine = beds.engine(native_beds.target(), [watcher], tokenizer=beds.letters(101))
    beds.answer(engine, native_beds.tokens(30), max_tokens=4, ignore_eos=True)
    assert not watcher.parts
    assert watcher.begun == [0]
