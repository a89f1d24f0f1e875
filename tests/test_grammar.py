"""Structured outputs: what is refused, and what masks allow at every node of a draft tree."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import beds
import model_files
import test_tokenizer
from grammar_beds import (
    BOS,
    END,
    FORMS,
    OTHER_END,
    PERSON,
    TOKENIZER,
    WIDTH,
    engine,
    ids,
    needs_library,
    start,
)
from slipstream.core.errors import InputError, UnsupportedError
from slipstream.core.params import SamplingParams
from slipstream.core.structured import StructuredOutputs, structured
from slipstream.models.files import open_model
from slipstream.models.tokenizer import Tokenizer
from slipstream.sampling import grammar
from slipstream.sampling.grammar import Grammars

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
