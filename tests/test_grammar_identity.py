"""Structured outputs under speculation: the tokens are those of plain decoding, whatever was drafted."""

from __future__ import annotations

import contextlib
import json
import re

import numpy as np
import pytest

import beds
from grammar_beds import BOS, FORMS, PERSON, TOKENIZER, WIDTH, holds, needs_library, target
from slipstream.control.adaptive import Adaptive
from slipstream.control.fixed import Fixed
from slipstream.core.errors import NonFiniteError
from slipstream.core.params import SamplingParams
from slipstream.core.types import Row
from slipstream.drafters.forced import Forced
from slipstream.drafters.lookahead import Lookahead
from slipstream.drafters.lookup import Lookup
from slipstream.drafters.recycling import Recycling
from slipstream.drafters.small_model import SmallModel
from slipstream.drafters.suffix import Suffix
from slipstream.engine.engine import Engine
from slipstream.models.chat import chat_prompt
from slipstream.models.files import open_model
from slipstream.models.registry import ensure
from slipstream.sampling.grammar import TokenGrammar
from slipstream.targets.native.model import NativeTarget
from slipstream.targets.runtime import choose, load
from slipstream.verify import make_verifier

pytestmark = needs_library
PROMPTS = ([BOS], [BOS, 65, 66], TOKENIZER.encode("name: red"))
PARAMS = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 7},
    "cut": {"temperature": 1.3, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 8},
    "penalised": {"temperature": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "seed": 9},
    "biased": {"logit_bias": {97: 3.0, 271: -2.0}, "min_tokens": 3},
}
CONTROLLERS = (Fixed(6, "tree"), Fixed(5, "chain"))
DRAFTERS = {
    "forced": lambda: [Forced()],
    "lookup": lambda: [Lookup()],
    "suffix and forced": lambda: [Suffix(), Forced()],
    "recycling": lambda: [Recycling(WIDTH)],
    "lookahead": lambda: [Lookahead()],
    "model": lambda: [SmallModel(target(), WIDTH)],
    "other model": lambda: [SmallModel(target(2), WIDTH), Forced()],
    "right": lambda: [beds.right(target())],
    "random tree": lambda: [beds.random_tree(WIDTH)],
    "probable tree": lambda: [probable_tree()],
}


def probable_tree(seed: int = 0) -> beds.Script:
    """Trees that stay inside the grammar now and then, so that the walk goes down their branches."""
    rng, made = np.random.default_rng(seed), target()

    def guess(row: Row, limit):
        offers = beds.Offers("probable")
        paths: list[list[int]] = [[]]
        for _ in range(limit.nodes):
            above = paths[int(rng.integers(len(paths)))]
            tokens = [int(rng.integers(WIDTH))]
            with contextlib.suppress(NonFiniteError):  # below a token that the grammar forbids
                tokens, _ = row.sampler.top(made.after(row.tokens + above), above, 3)
            token = int(rng.choice(tokens)) if rng.random() < 0.9 else int(rng.integers(WIDTH))
            if [*above, token] not in paths and len(above) < limit.depth:
                offers.tokens.append(token)
                offers.parents.append(paths.index(above) - 1)
                offers.probs.append(0.5)
                paths.append([*above, token])
        return offers

    return beds.Script(guess, "probable")


def answers(engine: Engine, form: dict, params: dict, together: bool) -> list[tuple[list[int], str | None]]:
    given = SamplingParams(structured_outputs=form, max_tokens=60, **params)
    if together:
        results = engine.run([engine.add(prompt, given) for prompt in PROMPTS])
    else:
        results = [engine.run([engine.add(prompt, given)])[0] for prompt in PROMPTS]
    outputs = [result.outputs[0] for result in results]
    assert all(output.speculation.drafter_failures == 0 for output in outputs)
    return [(output.token_ids, output.finish_reason) for output in outputs]


def engine(drafters=(), controller=None, **settings) -> Engine:
    return beds.engine(
        target(), drafters, tokenizer=TOKENIZER, controller=controller or Fixed(6, "tree"), max_batch=4, **settings
    )


def check(form: dict, params: dict, drafters, controllers=CONTROLLERS) -> None:
    plain = answers(engine(), form, params, together=False)
    for controller in controllers:
        made = engine(drafters(), controller)
        for together in (False, True):
            assert answers(made, form, params, together) == plain


@pytest.mark.parametrize("drafters", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.parametrize("params", ["greedy", "sampled"])
def test_fault_08_the_grammar_acts_at_every_node(params, drafters):
    for form in FORMS.values():
        check(form, PARAMS[params], drafters)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_fault_08_the_grammar_comes_before_all_other_processors(params):
    for name in ("json", "regex"):
        for drafters in ("probable tree", "suffix and forced"):
            check(FORMS[name], params, DRAFTERS[drafters], (Fixed(6, "tree"), Adaptive(8)))


def test_fault_17_forms_are_mixed_in_a_batch():
    made = engine(DRAFTERS["suffix and forced"]() + DRAFTERS["probable tree"]())
    bans = {273: -100.0, 274: -100.0}
    forms = [*FORMS.values(), None]
    params = [
        SamplingParams(structured_outputs=form, max_tokens=40, temperature=1.0, seed=4, logit_bias=bans)
        for form in forms
    ]
    plain = engine()
    alone = [plain.run([plain.add([BOS], one)])[0].outputs[0].token_ids for one in params]
    together = made.run([made.add([BOS], one) for one in params])
    assert [result.outputs[0].token_ids for result in together] == alone


def test_what_a_grammar_forces_is_drafted_and_stands():
    form = {"json": PERSON, "disable_any_whitespace": True}
    output = beds.answer(engine([Forced()]), [BOS], structured_outputs=form, max_tokens=80)
    stats = output.speculation
    assert stats.accepted_by_source["grammar"] >= 6
    assert stats.draft_acceptance_rate == 1.0
    assert holds(form, output.text)
    assert "grammar" in output.sources
    free = beds.answer(engine([Forced()]), [BOS], max_tokens=10, logit_bias={273: -100.0, 274: -100.0})
    assert free.speculation.num_draft_tokens == 0


@pytest.mark.parametrize("verifier", ["rejection", "block", "typical"])
def test_other_verifiers_keep_to_the_form(verifier):
    shape = "chain" if verifier == "block" else "tree"
    model = SmallModel(target(2), WIDTH, classical=verifier in ("rejection", "block"))
    for drafter in (model, probable_tree(), beds.random_tree(WIDTH)):
        made = engine([drafter], Fixed(5, shape), verifier=make_verifier(verifier))
        for form in FORMS.values():
            params = SamplingParams(structured_outputs=form, max_tokens=400, temperature=1.0, seed=6, n=3)
            for output in made.run([made.add([BOS], params)])[0].outputs:
                assert output.finish_reason == "stop", output.stop_reason
                assert holds(form, output.text)


@pytest.mark.parametrize("verifier", ["coupled", "rejection", "block"])
def test_fault_04_two_tokens_have_the_law_of_the_masked_distribution(verifier):
    table = beds.random_table(3, WIDTH, spread=1.0)
    model = SmallModel(
        beds.TableTarget(beds.random_table(4, WIDTH, spread=1.0)), WIDTH, classical=verifier != "coupled"
    )
    made = beds.engine(
        beds.TableTarget(table, slots=64),
        [model],
        3,
        tokenizer=TOKENIZER,
        verifier=make_verifier(verifier),
        max_batch=64,
        keep_prefixes=0,
        debug=False,
    )
    words = ["ax", "ay", "bx", "by", "bz"]

    def share(above: int, tokens: str) -> dict[str, float]:
        weights = np.exp([table[above, ord(token)] for token in tokens])
        return dict(zip(tokens, weights / weights.sum(), strict=True))

    first, second = share(BOS, "ab"), {"a": share(97, "xy"), "b": share(98, "xyz")}
    params = [
        SamplingParams(structured_outputs={"choice": words}, temperature=1.0, n=500, seed=seed) for seed in range(4)
    ]
    results = made.run([made.add([BOS], one) for one in params])
    texts = [output.text for result in results for output in result.outputs]
    assert sum(output.speculation.num_draft_tokens for result in results for output in result.outputs) > 500
    for word in words:
        wanted = first[word[0]] * second[word[0]][word[1]]
        assert abs(texts.count(word) / len(texts) - wanted) < 0.045  # four standard deviations


@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "top_p": 0.95, "seed": 3}], ids=["greedy", "sampled"])
def test_fault_08_the_grammar_acts_where_torch_draws(params, tmp_path):
    torch_beds = pytest.importorskip("torch_beds", reason="needs torch: pip install 'slipstream[torch]'")
    file = open_model(torch_beds.save(torch_beds.tiny("llama"), tmp_path / "llama"))
    letters = beds.Pieces([bytes([65 + token % 26]) for token in range(torch_beds.VOCAB)], end_ids=[2])
    given = SamplingParams(structured_outputs={"regex": "([A-F][G-Z])+(XYZ)?"}, max_tokens=40, **params)
    found = {}
    for runtime in ("native", "transformers"):
        model = load(file, choose(file, runtime), 100, 4, None)
        for drafters in ([], [Suffix(), Recycling(torch_beds.VOCAB), beds.random_tree(torch_beds.VOCAB), Forced()]):
            verifier = make_verifier("coupled", count_near_ties=not model.row_invariant)
            made = beds.engine(model, drafters, 8, tokenizer=letters, shape="tree", verifier=verifier)
            results = made.run([made.add(tokens, given) for tokens in ([3, 4, 5] * 5, [9, 8])])
            made.forget()
            outputs = [result.outputs[0] for result in results]
            for output in outputs:
                assert re.fullmatch("([A-F][G-Z])*([A-F]|XY?Z?)?", output.text)
            found[runtime, bool(drafters)] = [output.token_ids for output in outputs]
        assert sum(output.speculation.num_accepted_draft_tokens for output in outputs) > 0
    assert len({str(ids) for ids in found.values()}) == 1


# Planted faults


def test_planted_mask_of_the_parent_at_the_child_is_seen(monkeypatch):
    original = TokenGrammar.allowed
    monkeypatch.setattr(TokenGrammar, "allowed", lambda self, path: original(self, path[:-1]))
    with pytest.raises(AssertionError):
        check(FORMS["regex"], PARAMS["sampled"], DRAFTERS["probable tree"])


def test_planted_missing_rollback_is_seen(monkeypatch):
    class Forward:
        def __init__(self, matcher):
            self.matcher = matcher

        def __getattr__(self, name):
            return getattr(self.matcher, name)

        def rollback(self, count):
            return True

    original = TokenGrammar.__init__
    monkeypatch.setattr(TokenGrammar, "__init__", lambda self, matcher, *rest: original(self, Forward(matcher), *rest))
    with pytest.raises(AssertionError):
        check(FORMS["regex"], PARAMS["sampled"], DRAFTERS["probable tree"])


def test_wrong_guesses_of_forced_text_change_nothing(monkeypatch):
    original = TokenGrammar.forced
    monkeypatch.setattr(TokenGrammar, "forced", lambda self: [token + 1 for token in original(self)])
    check(FORMS["tight json"], PARAMS["greedy"], DRAFTERS["forced"])


# A real model


@pytest.fixture(scope="module")
def smollm2():
    file = open_model(ensure("smollm2"))
    return file, [NativeTarget.load(file, max_context=1024, slots=12) for _ in range(2)]


ASKED = (
    "Describe a person as JSON with name, age, hobbies and level.",
    "Give an example of a user record, please.",
)
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "hobbies": {"type": "array", "items": {"type": "string", "maxLength": 15}, "minItems": 1, "maxItems": 3},
        "level": {"enum": ["beginner", "advanced", "naïve"]},
    },
    "required": ["name", "age", "hobbies", "level"],
    "additionalProperties": False,
}


@pytest.mark.model
@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 21}], ids=["greedy", "sampled"])
def test_json_of_a_real_model_parses_and_does_not_depend_on_the_draft(smollm2, params):
    file, (model, second) = smollm2
    tokenizer = file.tokenizer()
    prompts = [chat_prompt(file, [{"role": "user", "content": text}]).token_ids for text in ASKED]
    given = SamplingParams(structured_outputs={"json": RECORD}, max_tokens=150, **params)

    def run(drafters, controller, together=True):
        made = beds.engine(model, drafters, tokenizer=tokenizer, controller=controller, max_batch=4)
        groups = [prompts] if together else [[prompt] for prompt in prompts]
        outputs = [out.outputs[0] for group in groups for out in made.run([made.add(each, given) for each in group])]
        made.forget()
        return outputs

    plain = run([], Fixed(0), together=False)
    for output in plain:
        record = json.loads(output.text)
        assert output.finish_reason == "stop"
        assert list(record) == ["name", "age", "hobbies", "level"]
        assert isinstance(record["age"], int)
        assert record["level"] in ("beginner", "advanced", "naïve")
        assert 1 <= len(record["hobbies"]) <= 3
    expected = [output.token_ids for output in plain]
    drafted = 0
    for drafters, controller, together in (
        ([Suffix(), Recycling(model.vocab_size), Forced()], Adaptive(8), True),
        ([Suffix(), Recycling(model.vocab_size), Forced()], Adaptive(8), False),
        ([Lookup(), Forced()], Fixed(6, "chain"), True),
        ([SmallModel(second, model.vocab_size), Forced()], Fixed(6, "tree"), True),
    ):
        outputs = run(drafters, controller, together)
        assert [output.token_ids for output in outputs] == expected
        drafted += sum(output.speculation.num_accepted_draft_tokens for output in outputs)
    assert drafted > 60
