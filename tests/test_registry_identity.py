"""Being registered is being tested: every drafter, and every pair of them, gives the tokens of plain decoding."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

import beds
import head_beds
import native_beds
from slipstream.control.adaptive import Adaptive
from slipstream.control.fixed import Fixed
from slipstream.core.params import SamplingParams
from slipstream.drafters import AVAILABLE, Materials, build, parse
from slipstream.drafters.heads.load import make_drafter
from slipstream.drafters.heads.parts import parts_of
from slipstream.drafters.recycling import Recycling

VOCAB = 26
CONFIG = {"vocab_size": VOCAB, "token_count": VOCAB}
HEADS = list(head_beds.KINDS)
"""Heads by kind, each as a drafter of its own: head:KIND."""
LAYERS = (0, 1, 2)
NAMES = [name for name in AVAILABLE if name not in ("none", "auto", "head:PATH")]
WITH_HEADS = [*(f"head:{kind}" for kind in HEADS), *(f"head:eagle3-ours,{name}" for name in NAMES)]
PAIRS = list(itertools.combinations(NAMES, 2))
SETTINGS = [",".join(names) for names in [*((name,) for name in NAMES), *PAIRS]]
PARAMS = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "seed": 7},
    "penalised": {"temperature": 1.1, "repetition_penalty": 1.2, "frequency_penalty": 0.2, "seed": 8},
}
PROMPTS = [[3], [1, 2, 3, 1, 2], [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]]


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    """What the names with an argument stand for."""
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "home"))
    (tmp_path / "corpus.txt").write_text("abcdefghijabcabdacbdbcaghighigh" * 3)
    return {"PATH": str(tmp_path / "corpus.txt"), "NAME": "small"}


def setting_of(names, arguments):
    for word, value in arguments.items():
        names = names.replace(f":{word}", f":{value}")
    assert not [word for word in names.split(",") if word.partition(":")[2] in ("PATH", "NAME")]
    return names


def load_head(kind):
    """A random head for the random native target, which gives all its layers' features."""
    wanted = (2,) if kind.startswith(("medusa", "eagle1")) else LAYERS
    changes = {"vocab": VOCAB, "draft_vocab": 20 if "eagle3" in kind else VOCAB}
    if kind == "eagle3-before":
        changes["feature_layers"] = LAYERS
    made = make_drafter(head_beds.head(kind, **changes), parts_of(native_beds.model(**CONFIG)), VOCAB, 400)
    return Cut(made, wanted)


class Cut:
    """A head that reads some of the features that its target gives."""

    def __init__(self, inner, layers):
        self.inner, self.name = inner, inner.name
        self.columns = np.concatenate([np.arange(48) + 48 * LAYERS.index(layer) for layer in layers])

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def prefilled(self, row, start, features):
        self.inner.prefilled(row, start, features[:, self.columns])

    def observe(self, observations):
        self.inner.observe([replace(seen, features=seen.features[:, self.columns]) for seen in observations])


def drafters(names, arguments, vocab_size, load_model, tokenizer):
    return build(
        parse(setting_of(names, arguments)), Materials(vocab_size, load_model, tokenizer=tokenizer, load_head=load_head)
    )


def table_target(**settings):
    return beds.TableTarget(beds.random_table(11, VOCAB, spread=3.0), **settings)


def answers(engine, params, together):
    """Token ids for all prompts, and failures of drafters."""
    given = [SamplingParams(max_tokens=24, ignore_eos=True, **params)] * len(PROMPTS)
    if together:
        results = engine.run([engine.add(prompt, one) for prompt, one in zip(PROMPTS, given, strict=True)])
    else:
        results = [engine.run([engine.add(prompt, one)])[0] for prompt, one in zip(PROMPTS, given, strict=True)]
    outputs = [result.outputs[0] for result in results]
    return [output.token_ids for output in outputs], sum(output.speculation.drafter_failures for output in outputs)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("names", SETTINGS)
def test_fault_02_every_drafter_and_pair_gives_plain_tokens(names, params, arguments):
    tokenizer = beds.letters(VOCAB)
    plain, _ = answers(beds.engine(table_target(), tokenizer=tokenizer), params, together=False)
    for controller in (Fixed(6, "tree"), Fixed(4, "chain"), Adaptive(8)):
        made = drafters(names, arguments, VOCAB, lambda _: table_target(), tokenizer)
        engine = beds.engine(table_target(), made, tokenizer=tokenizer, controller=controller)
        for together in (False, True):
            assert answers(engine, params, together) == (plain, 0)


@pytest.mark.parametrize("names", [*SETTINGS, *WITH_HEADS])
def test_fault_02_every_drafter_and_pair_gives_plain_tokens_on_the_native_runtime(names, arguments):
    tokenizer = beds.letters(VOCAB)
    load = lambda *_: native_beds.target(features=LAYERS if "head" in names else (), **CONFIG)  # noqa: E731
    for params in (PARAMS["greedy"], PARAMS["sampled"]):
        plain, _ = answers(beds.engine(load(), tokenizer=tokenizer), params, together=False)
        made = drafters(names, arguments, VOCAB, load, tokenizer)
        engine = beds.engine(load(), made, 6, tokenizer=tokenizer, shape="tree")
        for together in (False, True):
            assert answers(engine, params, together) == (plain, 0)


@pytest.mark.parametrize("name", NAMES)
def test_every_drafter_is_sometimes_right(name, arguments):
    """An identity that holds because nothing is drafted would show nothing."""
    tokenizer = beds.letters(VOCAB)
    table = beds.cycle_table([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], VOCAB)
    made = drafters(name, arguments, VOCAB, lambda _: beds.TableTarget(table), tokenizer)
    engine = beds.engine(beds.TableTarget(table), made, 8, tokenizer=tokenizer, shape="tree")
    output = beds.answer(engine, [0, 1, 2], max_tokens=60)
    assert output.speculation.num_accepted_draft_tokens > 5
    assert output.speculation.drafter_failures == 0


def test_planted_drafter_that_changes_the_row_is_seen(arguments, monkeypatch):
    tokenizer = beds.letters(VOCAB)
    plain, _ = answers(beds.engine(table_target(), tokenizer=tokenizer), {}, together=False)
    propose = Recycling.propose

    def meddling(self, rows, limits):
        rows[0].tokens[-1] = int(np.argmin(rows[0].tokens))
        return propose(self, rows, limits)

    monkeypatch.setattr(Recycling, "propose", meddling)
    made = drafters("recycling", arguments, VOCAB, None, tokenizer)
    assert answers(beds.engine(table_target(), made, tokenizer=tokenizer), {}, together=False)[0] != plain
