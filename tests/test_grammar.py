"""Structured outputs: what is refused, what masks allow at every node of a draft tree, and how answers end."""

from __future__ import annotations

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import beds
import model_files
import test_tokenizer
from slipstream.core.errors import InputError, UnsupportedError
from slipstream.core.params import SamplingParams
from slipstream.core.structured import StructuredOutputs, structured
from slipstream.models.files import open_model
from slipstream.models.tokenizer import Tokenizer
from slipstream.sampling import grammar
from slipstream.sampling.grammar import Grammars

needs_library = pytest.mark.skipif(find_spec("llguidance") is None, reason="llguidance (extra serve) is not installed")
PIECES = [b'{"', b'":', b', "', b'"}', b"name", b"age", b"na", b"me", b"true", b"12", b"  ", b"\n\n", b"red", b"blue"]
TOKENIZER = beds.Pieces([*(bytes([code]) for code in range(256)), *PIECES, b"<s>", b"<e>", b"<f>"], end_ids=[271, 272])
TOKENIZER.control.add(270)
BOS, END, OTHER_END, WIDTH = 270, 271, 272, 275
"""Ids 273 and 274 are padding: the logits are wider than the token list."""
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "blue", "grün"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMS = {
    "json": {"json": PERSON},
    "tight json": {"json": PERSON, "disable_any_whitespace": True},
    "regex": {"regex": r"(ab|c)+[0-9]{2,4}ü?"},
    "choice": {"choice": ["red", "redder", "blue", "grün", "日本"]},
    "grammar": {"grammar": 'start: "a" (start "b")? | /[xyz]{1,3}/'},
    "gbnf": {"grammar": 'root ::= "name" ("-" [0-9])*'},
}


def holds(form: dict, text: str) -> bool:
    """Whether a finished text has the form, judged without the library."""
    if "json" in form:
        found = json.loads(text)
        good = list(found) == ["name", "age", "tags"] and len(found["name"]) <= 5 and 0 <= found["age"] <= 120
        good = good and isinstance(found["age"], int) and len(found["tags"]) <= 3
        return good and set(found["tags"]) <= {"red", "blue", "grün"}
    if "choice" in form:
        return text in form["choice"]
    pattern = form.get("regex") or (r"a*(a|[xyz]{1,3})b*" if "start" in form["grammar"] else r"name(-[0-9])*")
    balanced = "start" not in form.get("grammar", "") or re.search(r"[xyz]b|b[axyz]", text) is not None
    return re.fullmatch(pattern, text) is not None and (balanced or text.strip("axyz") == "" or "b" in text)


def target(seed: int = 1, **settings: object) -> beds.TableTarget:
    """A table that knows nothing of any form, with logits for padding that would win if they were allowed."""
    table = beds.random_table(seed, WIDTH, spread=3.0)
    table[:, 273:] = 50.0
    return beds.TableTarget(table, **settings)


def engine(made: beds.TableTarget | None = None, drafters: tuple = (), **settings: object):
    return beds.engine(made or target(), drafters, tokenizer=TOKENIZER, **settings)


def start(form: dict) -> grammar.TokenGrammar:
    return Grammars(TOKENIZER, WIDTH).start(structured(form))


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


WRONG_FORMS = [
    5,
    "json",
    [],
    {},
    {"json": None},
    {"nope": 1},
    {"json": "{"},
    {"json": "[]"},
    {"json": 5},
    {"json": {"const": float("nan")}},
    {"json": {"a": object()}},
    {"json_object": 1},
    {"json_object": False},
    {"regex": ""},
    {"regex": 5},
    {"regex": "a\ud800"},
    {"regex": "a" * ((1 << 20) + 1)},
    {"choice": []},
    {"choice": "ab"},
    {"choice": ["a", ""]},
    {"choice": ["a", 1]},
    {"choice": {"a": 1}},
    {"grammar": ""},
    {"json_object": True, "regex": "a"},
    {"regex": "a", "whitespace_pattern": " "},
    {"regex": "a", "disable_any_whitespace": True},
    {"json_object": True, "whitespace_pattern": " ", "disable_any_whitespace": True},
    {"json_object": True, "disable_any_whitespace": "yes"},
]


@pytest.mark.parametrize("form", WRONG_FORMS, ids=lambda form: repr(form)[:40])
def test_wrong_forms_are_refused_when_made(form):
    with pytest.raises(InputError, match="structured_outputs") as caught:
        SamplingParams(structured_outputs=form)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_deeply_nested_schemas_are_refused_not_followed():
    deep: dict = {}
    for _ in range(100_000):
        deep = {"a": deep}
    with pytest.raises(InputError, match="structured_outputs"):
        SamplingParams(structured_outputs={"json": deep})
    with pytest.raises(InputError, match="structured_outputs"):
        SamplingParams(structured_outputs={"json": "[" * 100_000})


def test_equal_forms_are_one_form():
    as_text, as_object = (StructuredOutputs(json=given) for given in ('{"type": "object"}', {"type": "object"}))
    assert as_text == as_object
    assert hash(as_text) == hash(as_object)
    assert as_text.kind == "json"
    assert SamplingParams(structured_outputs={"json_object": True, "regex": None}).structured_outputs == (
        StructuredOutputs(json_object=True)
    )


BAD = {
    "unknown type": {"json": {"type": "nope"}},
    "type of a type": {"json": {"type": 3}},
    "keyword that is not supported": {"json": {"type": "array", "uniqueItems": True}},
    "pattern inside": {"json": {"type": "string", "pattern": "("}},
    "nothing fits": {"json": {"type": "integer", "minimum": 5, "maximum": 3}},
    "a circle": {"json": {"$ref": "#"}},
    "no such reference": {"json": {"$ref": "#/nope"}},
    "reference elsewhere": {"json": {"$ref": "http://localhost/schema.json"}},
    "open group": {"regex": "("},
    "look-around": {"regex": "(?=x)y"},
    "too large": {"regex": "(a{1000}){1000}"},
    "unknown rule": {"grammar": "start: nope"},
    "no grammar": {"grammar": "nonsense"},
    "bad blanks": {"json_object": True, "whitespace_pattern": "("},
}


@needs_library
@pytest.mark.parametrize("form", BAD.values(), ids=BAD)
def test_bad_grammars_are_refused_before_any_work(form):
    made = engine()
    with pytest.raises(InputError, match=f"structured_outputs {structured(form).kind}") as caught:
        made.add([BOS], SamplingParams(structured_outputs=form))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert made.idle
    assert made.target.prefilled == 0
    assert beds.answer(made, [BOS], structured_outputs={"choice": ["red"]}).text == "red"


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UnsupportedError, match=r"slipstream\[serve\]"):
        start({"regex": "a"})


@needs_library
def test_a_model_without_an_end_is_refused():
    with pytest.raises(UnsupportedError, match="end token"):
        Grammars(beds.letters(5), 5).start(structured({"regex": "a"}))


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
def test_masks_allow_exactly_what_can_still_become_a_choice():
    found = start({"choice": ["red", "redder", "grün"]})

    def allowed(*path: int) -> set[bytes | int]:
        listed = np.flatnonzero(found.allowed(path)).tolist()
        return {token if token in (END, OTHER_END) else TOKENIZER.pieces[token] for token in listed}

    red, umlaut = TOKENIZER.pieces.index(b"red"), "ü".encode()
    assert allowed() == {b"r", b"red", b"g"}
    assert allowed(red) == {b"d", END, OTHER_END}
    assert allowed(*b"gr") == {umlaut[:1]}, "half a character, not another half"
    assert allowed(*b"gr", umlaut[0]) == {umlaut[1:]}
    assert allowed(*b"redder") == {END, OTHER_END}
    assert allowed(*b"redx") == set(), "below a forbidden token nothing is allowed"
    assert allowed(ord("g"), END) == set(), "it did not accept there"
    assert allowed(red, END) == {END, OTHER_END}, "after the end only ends"
    assert allowed(red) == {b"d", END, OTHER_END}, "and back again"
    assert found.error == ""


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
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_masks_at_nodes_equal_those_of_a_fresh_grammar_after_the_same_tokens(form):
    """Whatever was asked before, in whatever order, and however much was committed."""
    rng, made = np.random.default_rng(3), Grammars(TOKENIZER, WIDTH)
    rows = [made.start(structured(form)) for _ in range(3)]
    committed: list[list[int]] = [[] for _ in rows]
    for _ in range(60):
        place = int(rng.integers(len(rows)))
        row, path = rows[place], []
        for _ in range(int(rng.integers(1, 7))):
            options = np.flatnonzero(row.allowed(path))
            wild = not len(options) or rng.random() < 0.1
            path.append(int(rng.integers(WIDTH)) if wild else int(rng.choice(options)))
        for size in rng.permutation(len(path) + 1):
            fresh = made.start(structured(form))
            fresh.append([*committed[place], *path[:size]])
            alive = not fresh.error
            expected = fresh.allowed(()) if alive else np.zeros(WIDTH, bool)
            assert np.array_equal(row.allowed(path[:size]), expected)
        step, kept = row.allowed(()), []
        for token in path[: int(rng.integers(1, 4))]:
            if not step[token] or token in (END, OTHER_END):
                break
            kept.append(token)
            step = row.allowed(kept)
        row.append(kept)
        committed[place] += kept


@needs_library
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_nodes_that_cannot_be_accepted_are_named_and_no_others(form):
    rng, row = np.random.default_rng(4), start(form)
    dropped = kept = 0
    for _ in range(40):
        tokens, parents, paths = [], [], [()]
        for _ in range(12):
            above = int(rng.integers(len(paths)))
            options = np.flatnonzero(row.allowed(paths[above]))
            token = int(rng.choice(options)) if len(options) and rng.random() < 0.8 else int(rng.integers(WIDTH))
            if (*paths[above], token) not in paths:
                tokens.append(token)
                parents.append(above - 1)
                paths.append((*paths[above], token))
        fits = row.fitting(tokens, parents)
        for node, good in enumerate(fits):
            path = paths[node + 1]
            alive = all(row.allowed(path[:depth])[path[depth]] for depth in range(len(path)))
            alive = alive and not {END, OTHER_END} & set(path[:-1])  # nothing is worth drafting after an end
            assert good or not alive, "nothing that may be accepted is dropped"
            assert alive or not good or len(path) > 1, "at the first level it is exact"
            assert not good or parents[node] < 0 or fits[parents[node]], "what is left is a tree"
        dropped, kept = dropped + fits.count(False), kept + fits.count(True)
    assert dropped > 20
    assert kept > 20


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
def test_padding_and_control_tokens_are_never_allowed():
    for form in ({"regex": r"(?s:.)*"}, {"json_object": True}, {"regex": "<s>[a-z]*"}):
        allowed = start(form).allowed(())
        assert not allowed[[BOS, 273, 274]].any()
        assert len(allowed) == WIDTH


@needs_library
def test_forced_text_is_the_tokenizers_own_cut():
    assert start({"json": PERSON, "disable_any_whitespace": True}).forced() == ids('{"name":')
    found = start({"choice": ["redder", "redness"]})
    assert found.forced() == ids("red")
    found.append(ids("redd"))
    assert found.forced() == ids("er")
    found.append(ids("er"))
    assert found.forced() == []
    found.append([END])
    assert found.forced() == []


@needs_library
def test_a_tokenizer_that_puts_a_space_before_texts_still_spells_what_is_forced():
    class Spaced(beds.Pieces):
        def encode_parts(self, parts):
            return [32, *super().encode_parts(parts)]

    spaced = Spaced(TOKENIZER.pieces, end_ids=[END])
    found = Grammars(spaced, WIDTH).start(structured({"choice": ["redder"]})).forced()
    assert b"".join(TOKENIZER.pieces[token] for token in found) == b"redder"


@needs_library
def test_grammars_are_compiled_once_and_forgotten_in_time(monkeypatch):
    made, compiled = Grammars(TOKENIZER, WIDTH), []
    original = Grammars._compile
    monkeypatch.setattr(Grammars, "_compile", lambda self, form: compiled.append(form) or original(self, form))
    form = structured({"choice": ["red", "rot"]})
    made.start(form).append(ids("ro"))
    assert made.start(form).allowed(())[ord("r")], "rows do not share their place"
    assert len(compiled) == 1
    for count in range(grammar.KEPT):
        made.start(structured({"choice": [f"x{count}"]}))
    assert len(made._matchers) == grammar.KEPT
    made.start(form)
    assert len(compiled) == grammar.KEPT + 2


# How answers end


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


# Every kind of tokenizer


def kinds(folder: Path) -> dict[str, Tokenizer]:
    """Byte-level BPE and SentencePiece from GGUF, and both from Hugging Face folders."""
    byte_level, pieces = folder / "byte-level.gguf", folder / "pieces.gguf"
    model_files.write_gguf(byte_level)
    made = {
        "gguf bpe": open_model(byte_level).tokenizer(),
        "gguf sentencepiece": open_model(test_tokenizer.write_sentencepiece(pieces)).tokenizer(),
        "folder bpe": open_model(model_files.write_folder(folder / "bpe")).tokenizer(),
    }
    style = model_files.write_folder(folder / "sentencepiece")
    made["folder sentencepiece"] = test_tokenizer.rewrite(style, **test_tokenizer.sentencepiece_json())
    return made


@needs_library
def test_every_kind_of_tokenizer_spells_what_a_form_allows(tmp_path):
    text = '{"name": "zoë", "tags": ["red"]}'
    for kind, tokenizer in kinds(tmp_path).items():
        width = tokenizer.vocab_size + 3
        made = Grammars(tokenizer, width)
        row = made.start(structured({"choice": [text, "another"]}))
        ids: list[int] = []
        while tokenizer.decode(ids) != text:
            allowed = row.allowed(ids)
            assert allowed.any(), (kind, tokenizer.decode(ids))
            assert not allowed[tokenizer.vocab_size :].any(), kind
            fitting = [
                token
                for token in np.flatnonzero(allowed).tolist()
                if text.encode().startswith(b"".join(map(tokenizer.token_bytes, [*ids, token])))
            ]
            ids.append(max(fitting, key=lambda token: len(tokenizer.token_bytes(token))))
        assert set(np.flatnonzero(row.allowed(ids))) == set(tokenizer.end_ids), kind
        forced = made.start(structured({"choice": [text]})).forced()
        spelled = b"".join(map(tokenizer.token_bytes, forced))
        assert text.encode().startswith(spelled), kind
        assert spelled, kind
