"""Being registered is being tested: every drafter, and every pair of them, gives the tokens of plain decoding."""

from __future__ import annotations

import functools
import itertools
import tempfile

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
from slipstream.models.heads.check import fitted
from slipstream.models.heads.formats import read_head, write_head
from slipstream.verify.coupled import Coupled

VOCAB = 26
CONFIG = {"vocab_size": VOCAB, "token_count": VOCAB}
FORMS = {"eagle3": "eagle3", "eagle3-before": "speculators", "medusa": "medusa", "medusa-shared": "medusa"}
"""Heads by kind, each a drafter of its own, head:KIND, that was read from this format; the others from slipstream's."""
HEADS = list(head_beds.KINDS)
NAMES = [name for name in AVAILABLE if name not in ("none", "auto", "head:PATH")]
WITH_HEADS = [f"head:{kind}{other}" for kind in HEADS for other in ("", *(f",{name}" for name in NAMES))]
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


@functools.cache
def head_of(kind):
    """A random head for the random native target, as a drafter's loader reads it from a folder."""
    made = head_beds.head(kind, vocab=VOCAB, draft_vocab=20 if "eagle3" in kind else VOCAB)
    with tempfile.TemporaryDirectory() as place:
        write_head(f"{place}/head", made, FORMS.get(kind, "slipstream"))
        return fitted(read_head(f"{place}/head"), native_beds.model(**CONFIG).config, "", f"head {kind}", "random")


def load_head(kind):
    return make_drafter(head_of(kind), parts_of(native_beds.model(**CONFIG)), VOCAB, 400)


def native_target(names="", *_):
    """The random native target, with the features that the head among the drafters reads."""
    kinds = [name.removeprefix("head:") for name in names.split(",") if name.startswith("head:")]
    return native_beds.target(features=head_of(kinds[0]).config.feature_layers if kinds else (), **CONFIG)


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


@functools.cache
def plain_on_native(params):
    return answers(beds.engine(native_target(), tokenizer=beds.letters(VOCAB)), PARAMS[params], together=False)[0]


@pytest.mark.parametrize("names", [*SETTINGS, *WITH_HEADS])
def test_fault_02_every_drafter_and_pair_gives_plain_tokens_on_the_native_runtime(names, arguments):
    tokenizer = beds.letters(VOCAB)
    for params in ("greedy", "sampled"):
        made = drafters(names, arguments, VOCAB, native_target, tokenizer)
        engine = beds.engine(native_target(names), made, 6, tokenizer=tokenizer, shape="tree")
        for together in (False, True):
            assert answers(engine, PARAMS[params], together) == (plain_on_native(params), 0)


@pytest.mark.parametrize("kind", HEADS)
def test_fault_02_every_head_gives_plain_tokens_however_it_is_asked_and_is_sometimes_right(kind, arguments):
    tokenizer, accepted = beds.letters(VOCAB), 0
    for controller in (Fixed(3, "chain"), Adaptive(8), Fixed(8, "tree")):
        made = drafters(f"head:{kind}", arguments, VOCAB, native_target, tokenizer)
        engine = beds.engine(native_target(f"head:{kind}"), made, tokenizer=tokenizer, controller=controller)
        assert answers(engine, PARAMS["penalised"], together=True) == (plain_on_native("penalised"), 0)
        output = beds.answer(engine, PROMPTS[1], max_tokens=60, ignore_eos=True)
        accepted = output.speculation.num_accepted_draft_tokens
    assert accepted > 2, "an identity that holds because nothing is drafted would show nothing"


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


def meddling(propose):
    """A drafter's propose that changes the text of the row it drafts for."""

    def changed(self, rows, limits):
        rows[0].tokens[-1] = int(np.argmin(rows[0].tokens))
        return propose(self, rows, limits)

    return changed


def test_planted_drafter_that_changes_the_row_is_seen(arguments, monkeypatch):
    tokenizer = beds.letters(VOCAB)
    plain, _ = answers(beds.engine(table_target(), tokenizer=tokenizer), {}, together=False)
    monkeypatch.setattr(Recycling, "propose", meddling(Recycling.propose))
    made = drafters("recycling", arguments, VOCAB, None, tokenizer)
    assert answers(beds.engine(table_target(), made, tokenizer=tokenizer), {}, together=False)[0] != plain


@pytest.mark.parametrize("kind", HEADS)
def test_planted_head_that_changes_the_row_is_seen(kind, arguments, monkeypatch):
    tokenizer, names = beds.letters(VOCAB), f"head:{kind},lookup"
    drafter = type(load_head(kind))
    monkeypatch.setattr(drafter, "propose", meddling(drafter.propose))
    made = drafters(names, arguments, VOCAB, native_target, tokenizer)
    engine = beds.engine(native_target(names), made, 6, tokenizer=tokenizer, shape="tree")
    assert answers(engine, {}, together=False)[0] != plain_on_native("greedy")


class Trusting(Coupled):
    """Takes a first guess for the target's own token where no guess stands."""

    def __call__(self, logits, draft, row, drawn=None):
        verdict = super().__call__(logits, draft, row, drawn)
        if len(draft) and not verdict.path:
            verdict.tokens[0] = draft.tokens[0]
        return verdict


@pytest.mark.parametrize("kind", HEADS)
def test_planted_guesses_of_a_head_that_are_not_verified_are_seen(kind, arguments):
    tokenizer, names = beds.letters(VOCAB), f"head:{kind},suffix"
    made = drafters(names, arguments, VOCAB, native_target, tokenizer)
    engine = beds.engine(native_target(names), made, 6, tokenizer=tokenizer, shape="tree", verifier=Trusting())
    assert answers(engine, {}, together=False)[0] != plain_on_native("greedy")
