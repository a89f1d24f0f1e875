"""Structured outputs: answers have their form, and how they end."""

from __future__ import annotations

import re

import numpy as np
import pytest

import beds
from grammar_beds import (
    BOS,
    END,
    FORMS,
    OTHER_END,
    WIDTH,
    engine,
    holds,
    ids,
    needs_library,
    target,
)
from slipstream.core.params import SamplingParams
from slipstream.core.structured import StructuredOutputs


@needs_library
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_have_their_form(form, temperature):
    made = engine(max_batch=4)
    params = SamplingParams(structured_outputs=form, max_tokens=400, temperature=temperature, seed=5, n=4)
    for output in made.run([made.add([BOS], params)])[0].outputs:
        assert output.finish_reason == "stop", output.stop_reason
        assert output.token_ids[-1] in (END, OTHER_END)
        assert holds(form, output.text), output.text


@needs_library
def test_choices_are_taken_literally_and_may_be_many():
    odd = [
        "a.b",
        "a|b",
        "(",
        "[x]",
        "\\d",
        "/",
        '"',
        "'",
        "new\nline",
        "\x07",
        "<e>",
        "☃😀",
        " lead",
        "{2}",
        "^$",
        "#-&~",
    ]
    for text in odd:
        output = beds.answer(engine(), [BOS], structured_outputs={"choice": [text]})
        assert (output.text, output.finish_reason) == (text, "stop")
    many = [f"{place * 7919 % 10_000:05d}x" for place in range(5000)] * 2
    assert len(StructuredOutputs(choice=many).choice or ()) == 5000
    assert beds.answer(engine(), [BOS], structured_outputs={"choice": many}).text in many


@needs_library
def test_drafters_offer_only_what_fits():
    made = engine(drafters=[beds.given(ids("reddish")), beds.random_tree(WIDTH)], nodes=8, shape="tree")
    output = beds.answer(made, [BOS], structured_outputs={"choice": ["redder", "reds"]})
    offered = output.speculation.nodes["given"].offered
    assert offered[0] == 1, "the word itself at the beginning, nothing of it later"
    assert sum(output.speculation.nodes["given"].offered) < 4
    free = beds.answer(made, [BOS], max_tokens=4, logit_bias={273: -100, 274: -100})
    assert sum(free.speculation.nodes["given"].offered) >= 4


@needs_library
def test_the_budget_cuts():
    output = beds.answer(engine(), [BOS], structured_outputs={"regex": "[ab]{20}"}, max_tokens=7)
    assert (len(output.token_ids), output.finish_reason) == (7, "length")
    assert re.fullmatch("[ab]{7}", output.text)


@needs_library
def test_stops_count_inside_a_form():
    whole = beds.answer(engine(), [BOS], structured_outputs={"regex": "a{3}b{3}"})
    assert (whole.text, whole.finish_reason) == ("aaabbb", "stop")
    cut = beds.answer(engine(), [BOS], structured_outputs={"regex": "a{3}b{3}"}, stop=["ab"])
    assert (cut.text, cut.finish_reason, cut.stop_reason) == ("aa", "stop", "ab")


@needs_library
def test_end_tokens_are_banned_until_the_grammar_accepts():
    table = target().table
    table[:, END] = 40.0
    output = beds.answer(engine(beds.TableTarget(table)), [BOS], structured_outputs={"regex": "[ab]{5,9}"})
    assert len(output.text) == 5
    assert output.token_ids[-1] == END


@needs_library
def test_min_tokens_holds_the_end_back_and_says_so_where_nothing_else_is_left():
    table = target().table
    table[:, END] = 40.0
    made = engine(beds.TableTarget(table))
    output = beds.answer(made, [BOS], structured_outputs={"regex": "[ab]{5,9}"}, min_tokens=8)
    assert len(output.token_ids) == 9, "eight letters and the end"
    request = made.add([BOS], SamplingParams(structured_outputs={"regex": "[ab]{5}"}, min_tokens=9))
    other = made.add([BOS], SamplingParams(structured_outputs={"regex": "[ab]{20}"}))
    failed, fine = made.run([request, other])
    assert failed.outputs[0].finish_reason == "error"
    assert "min_tokens" in str(failed.outputs[0].stop_reason)
    assert len(fine.outputs[0].text) == 20


@needs_library
def test_ignored_ends_follow_a_complete_form_up_to_the_budget():
    output = beds.answer(engine(), [BOS], structured_outputs={"choice": ["red"]}, ignore_eos=True, max_tokens=9)
    assert (output.text, len(output.token_ids), output.finish_reason) == ("red", 9, "length")


@needs_library
def test_a_grammar_that_fails_ends_its_request_alone():
    made = engine(drafters=[beds.random_tree(WIDTH)], shape="tree")
    params = SamplingParams(structured_outputs={"regex": "[ab]{12}"}, temperature=1.0, seed=3)
    alone = made.run([made.add([BOS], params)])[0].outputs[0]
    requests = [made.add([BOS], params), made.add([BOS], params)]

    class Broken:
        def __init__(self, matcher):
            self.matcher, self.left = matcher, 4

        def __getattr__(self, name):
            return getattr(self.matcher, name)

        def compute_bitmask(self):
            self.left -= 1
            return self.matcher.compute_bitmask()

        def is_error(self):
            return self.left < 0

        def get_error(self):
            return "too complex"

    broken = requests[0].answers[0].row.sampler._grammar
    broken._matcher = Broken(broken._matcher)
    failed, fine = (result.outputs[0] for result in made.run(requests))
    assert failed.finish_reason == "error"
    assert "too complex" in str(failed.stop_reason)
    assert alone.token_ids[: len(failed.token_ids)] == failed.token_ids
    assert fine.token_ids == alone.token_ids


@needs_library
def test_broken_logits_are_named_behind_a_grammar():
    table = target().table
    table[BOS, 5] = np.nan
    output = engine(beds.TableTarget(table))
    result = output.run([output.add([BOS], SamplingParams(structured_outputs={"choice": ["red"]}))])[0].outputs[0]
    assert result.finish_reason == "error"
    assert "NaN" in str(result.stop_reason)
