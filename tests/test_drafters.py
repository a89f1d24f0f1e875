"""Draft settings, and the guard that keeps every drafter's faults inside."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

import beds
from slipstream.core.errors import InputError, ModelError
from slipstream.core.params import SamplingParams
from slipstream.core.types import Limit, Offers, Row
from slipstream.drafters import DraftSpec, Materials, build, drawing, parse
from slipstream.drafters.guard import PATIENCE, Guard
from slipstream.models.heads.formats import read_head
from slipstream.models.heads.shipped import place_of


@pytest.mark.parametrize(
    ("setting", "specs"),
    [
        ("none", []),
        ("auto", [("suffix", ""), ("recycling", "")]),
        ("lookup", [("lookup", "")]),
        (" suffix , model:a/b:c ", [("suffix", ""), ("model", "a/b:c")]),
        ("model:C:\\x.gguf", [("model", "C:\\x.gguf")]),
        ("auto,lookup", [("suffix", ""), ("recycling", ""), ("lookup", "")]),
        ("model:m,head:a/b,suffix", [("suffix", ""), ("head", "a/b"), ("model", "m")]),
        ("lookahead,corpus:my texts", [("lookahead", ""), ("corpus", "my texts")]),
    ],
)
def test_settings_are_read(setting, specs):
    assert parse(setting) == [DraftSpec(*spec) for spec in specs]


def test_auto_adds_the_draft_model_that_is_given():
    assert parse("auto", "small") == [DraftSpec("suffix"), DraftSpec("recycling"), DraftSpec("model", "small")]
    assert parse("lookup", "small") == [DraftSpec("lookup")]
    assert drawing(parse("auto", "small"), classical=True) == ["model"]
    assert drawing(parse("auto", "small"), classical=False) == []


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("medusa", ["'medusa'", "none, auto, lookup, suffix, recycling, lookahead, corpus:PATH, model:NAME"]),
        ("", ["''", "choose from"]),
        ("lookup,,suffix", ["''"]),
        ("lookup:3", ["'lookup:3'"]),
        ("model", ["model:NAME"]),
        ("model:", ["model:NAME"]),
        ("corpus", ["corpus:PATH"]),
        ("auto,recycling", ["recycling twice"]),
        ("none,lookup", ["none cannot be combined"]),
        ("lookup,lookup", ["lookup twice"]),
        ("auto,suffix", ["suffix twice"]),
    ],
)
def test_settings_that_mean_nothing_are_refused(setting, words):
    with pytest.raises(InputError) as error:
        parse(setting)
    assert all(word in str(error.value) for word in words)


def test_fault_24_a_head_without_a_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match="head:PATH"):
        parse("lookup,head")
    with pytest.raises(InputError, match="needs a target that gives its hidden states"):
        build(parse("head:x"), Materials(vocab_size=16, load_model=None))
    with pytest.raises(ModelError, match="no such head"):
        place_of(str(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"config.json: missing; a head is a folder"):
        read_head(place_of(str(tmp_path / "empty")))


def test_settings_become_drafters():
    loaded = []

    def load(name):
        loaded.append(name)
        return beds.TableTransformer()

    made = build(parse("lookup,auto,lookahead,model:small"), Materials(vocab_size=16, load_model=load))
    assert [drafter.name for drafter in made] == ["grammar", "lookup", "suffix", "recycling", "lookahead", "model"]
    assert loaded == ["small"]


def test_settings_are_read_without_heavy_imports():
    code = "import sys, slipstream.drafters; print([m for m in ('numpy', 'torch', 'tokenizers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def row(ident=0, speculate=True):
    return Row(ident, [1, 2], 2, SamplingParams(), 0, sampler=None, speculate=speculate)


@pytest.mark.parametrize(
    "made",
    [
        Offers("s", [1, 2], [-1], [0.5, 0.5]),
        Offers("s", [99], [-1], [0.5]),
        Offers("s", [-1], [-1], [0.5]),
        Offers("s", [1], [0], [0.5]),
        Offers("s", [1, 1], [-1, -1], [0.5, 0.5]),
        Offers("s", [1], [-1], []),
        Offers("s", [1], [-1], [1.5]),
        Offers("s", [1], [-1], [float("nan")]),
        Offers("s", [1.0], [-1], [0.5]),
        Offers("s", [1, 2], [-1, 0.0], [0.5, 0.5]),
        Offers("other", [1], [-1], [0.5]),
        Offers("s", [1], [-1], [0.5], features=[1.0, 2.0]),
    ],
)
def test_malformed_offers_count_as_failures(made, caplog):
    guard = Guard(beds.Script(lambda row, limit: made, "s"), 10)
    one = row()
    guard.begin(one)
    assert len(guard.propose([one], [Limit(4, 4)])[0]) == 0
    assert guard.failures(one) == 1


def test_failures_are_counted_logged_once_and_end_in_silence(caplog):
    guard = Guard(beds.failing(), 10)
    one = row()
    guard.begin(one)
    with caplog.at_level(logging.WARNING):
        for _ in range(3 * PATIENCE):
            assert len(guard.propose([one], [Limit(4, 4)])[0]) == 0
    assert guard.failures(one) == PATIENCE
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    guard.end(one)
    assert guard.failures(one) == 0


def test_a_drafter_that_fails_to_say_what_it_wants_stops_no_answer():
    class Unsure(beds.Script):
        def wants(self, row):
            raise ValueError("who knows")

    table = beds.random_table(1, 9)
    plain = beds.answer(beds.engine(beds.TableTarget(table)), [1, 2], max_tokens=9)
    made = beds.engine(beds.TableTarget(table), [Unsure(lambda row, limit: [1])])
    output = beds.answer(made, [1, 2], max_tokens=9)
    assert output.token_ids == plain.token_ids
    assert output.speculation.drafter_failures > 0
    # A row that does not speculate is not even asked about; nothing of it stays.
    first, second = (made.add([1, 2], SamplingParams(max_tokens=9), speculation=said) for said in (True, False))
    made.run([first, second])
    assert made.drafting.guards[0]._failures == {}


def test_a_drafter_that_recovers_is_asked_on():
    calls = []

    def guess(row, limit):
        calls.append(row)
        if len(calls) % 3:
            raise ValueError("not now")
        return [1]

    guard, one = Guard(beds.Script(guess), 10), row()
    guard.begin(one)
    made = [len(guard.propose([one], [Limit(1, 1)])[0]) for _ in range(30)]
    assert made == [0, 0, 1] * 10
    assert guard.failures(one) == 20


def test_only_rows_with_a_limit_are_asked():
    asked = []
    script = beds.Script(lambda row, limit: asked.append((row.id, limit.depth)) or [1] * limit.depth, "s")
    guard = Guard(script, 10)
    rows = [row(0), row(1), row(2, speculate=False), row(3), row(4)]
    for one in rows:
        guard.begin(one)
    limits = [Limit(4, 4), Limit(0, 0), Limit(4, 4), Limit(4, 4, depths={"s": 0}), Limit(4, 4, depths={"s": 2})]
    offers = guard.propose(rows, limits)
    assert asked == [(0, 4), (4, 2)]
    assert [len(offer) for offer in offers] == [4, 0, 0, 0, 2]
    assert [offer.seconds > 0 for offer in offers] == [True, False, False, False, True]
    guard.propose(rows[1:3], limits[1:3])
    assert script.calls.count("propose") == 1  # nobody to ask: the drafter is not called at all


@pytest.mark.parametrize("verb", ["begin", "observe", "end"])
def test_every_verb_is_guarded(verb):
    script = beds.Script(lambda row, limit: [1])

    def fail(*_):
        raise RuntimeError(verb)

    setattr(script, verb, fail)
    output = beds.answer(beds.engine(beds.TableTarget(beds.random_table(1, 8)), [script]), [1], max_tokens=9)
    assert len(output.token_ids) == 9
    assert (output.speculation.drafter_failures > 0) == (verb != "end")
