"""Drafts from the user's own texts: the suffix array, its index on disk, the drafter."""

from __future__ import annotations

import json
import os
import shutil
import sys

import numpy as np
import pytest

import beds
from slipstream.core.errors import InputError
from slipstream.core.params import SamplingParams
from slipstream.core.tree import Draft
from slipstream.core.types import Limit, Row
from slipstream.drafters import corpus_store
from slipstream.drafters.corpus import LONGEST, Corpus
from slipstream.drafters.corpus_store import open_corpus
from slipstream.drafters.suffix_array import SORTED_DEPTH, SuffixArray, suffix_array


def words(tokens):
    return np.array(tokens, ">u4")


def array(tokens):
    return SuffixArray(words(tokens), suffix_array(np.array(tokens, np.uint32)))


def pattern(tokens):
    return words(tokens).tobytes()


def row(tokens, ident=0):
    return Row(ident, list(tokens), len(tokens), SamplingParams(), 0, sampler=None)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("alphabet", [1, 2, 5, 300])
@pytest.mark.parametrize("size", [0, 1, 2, 50, 700])
def test_suffixes_are_in_order(size, alphabet):
    tokens = np.random.default_rng([size, alphabet]).integers(0, alphabet, size)
    order = suffix_array(tokens.astype(np.uint32)).tolist()
    assert sorted(order) == list(range(size))
    cut = [tokens[place : place + SORTED_DEPTH].tolist() for place in order]
    assert cut == sorted(cut)


@pytest.mark.parametrize("alphabet", [1, 2, 5, 70_000])
def test_every_occurrence_is_found(alphabet):
    rng = np.random.default_rng(alphabet)
    tokens = rng.integers(0, alphabet, 250).tolist()
    text = array(tokens)
    for _ in range(100):
        place, size = int(rng.integers(0, 250)), int(rng.integers(1, 6))
        wanted = tokens[place : place + size] if rng.random() < 0.8 else rng.integers(0, alphabet, size).tolist()
        expected = {at for at in range(250) if tokens[at : at + len(wanted)] == wanted}
        low, high = text.find(pattern(wanted))
        assert set(text.places[low:high].tolist()) == expected
        if expected:
            after = [tokens[at + len(wanted)] for at in expected if at + len(wanted) < 250]
            assert dict(text.followers(low, high, len(wanted))) == {one: after.count(one) for one in set(after)}


def test_the_longest_match_is_kept_up_token_by_token():
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 4, 2000).tolist()
    drafter = Corpus(array(tokens), 4)
    one = row([0])
    drafter.begin(one)
    for step in range(400):
        one.tokens += (
            rng.integers(0, 4, int(rng.integers(1, 4))).tolist() if step % 40 < 30 else tokens[step : step + 9]
        )
        low, high, length = drafter.match(one)
        fresh = Corpus(drafter.text, 4)
        fresh.begin(one)
        assert fresh.match(one) == (low, high, length)
        assert length <= LONGEST
        assert drafter.text.find(pattern(one.tokens[-length:])) == (low, high)
        if length < min(LONGEST, len(one.tokens)):
            longer = drafter.text.find(pattern(one.tokens[-length - 1 :]))
            assert longer[0] == longer[1]


def test_the_most_frequent_continuation_is_offered_first_and_separators_never():
    drafter = Corpus(array([1, 2, 3, 9, 1, 2, 3, 9, 1, 2, 4, 9, 5, 6, 9]), 9)
    one = row([7, 1, 2])
    drafter.begin(one)
    offer = drafter.propose([one], [Limit(8, 4, 3)])[0]
    assert offer.tokens[:2] == [3, 4]
    assert offer.probs[0] > offer.probs[1]
    assert 9 not in offer.tokens
    other = row([5, 6], 1)
    drafter.begin(other)
    assert drafter.propose([other], [Limit(8, 4, 3)])[0].tokens == []


def test_offers_keep_within_their_limit():
    rng = np.random.default_rng(5)
    drafter = Corpus(array(rng.integers(0, 6, 3000).tolist()), 6)
    one = row([1, 2, 3])
    drafter.begin(one)
    for nodes, depth, width in [(1, 1, 1), (8, 3, 2), (20, 6, 4), (5, 5, 1)]:
        offer = drafter.propose([one], [Limit(nodes, depth, width)])[0]
        draft = Draft(offer.tokens, offer.parents)
        draft.check(6)
        assert 0 < len(draft) <= nodes
        assert max(draft.depths()) <= depth
        assert max(offer.parents.count(parent) for parent in offer.parents) <= width


def folder_of_texts(tmp_path):
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("abcabcabd")
    (folder / "deep" / "b.txt").write_text("bcdbcd")
    (folder / "binary").write_bytes(b"\x00\x01\xff")
    (folder / "empty").write_text("")
    (folder / ".hidden").write_text("hhh")
    return folder


class Counting(type(beds.letters(8))):
    def __init__(self):
        super().__init__([chr(97 + i).encode() for i in range(8)])
        self.texts = []

    def encode(self, text, add_special=False):
        self.texts.append(text)
        return super().encode(text, add_special)


def test_a_folder_is_read_once_and_again_only_where_it_changed(tmp_path, home):
    folder, tokenizer = folder_of_texts(tmp_path), Counting()
    text = open_corpus(str(folder), tokenizer, 8)
    assert text.words.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 3, 8, 1, 2, 3, 1, 2, 3, 8]
    assert tokenizer.texts == ["abcabcabd", "bcdbcd"]
    tokenizer.texts.clear()
    assert open_corpus(str(folder), tokenizer, 8).places.tolist() == text.places.tolist()
    assert tokenizer.texts == []
    (folder / "deep" / "b.txt").write_text("bcd")
    changed = open_corpus(str(folder), tokenizer, 8)
    assert tokenizer.texts == ["bcd"]
    assert changed.words.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 3, 8, 1, 2, 3, 8]
    assert changed.places.tolist() == suffix_array(np.array(changed.words, np.uint32)).tolist()
    (folder / "a.txt").unlink()
    assert open_corpus(str(folder), tokenizer, 8).words.tolist() == [1, 2, 3, 8]
    assert len(list((home / "corpus").iterdir())) == 1
    one = open_corpus(str(folder / "deep" / "b.txt"), tokenizer, 8)
    assert one.words.tolist() == [1, 2, 3, 8]


def test_an_index_that_is_not_whole_is_made_again(tmp_path, home):
    folder, tokenizer = folder_of_texts(tmp_path), Counting()
    whole = open_corpus(str(folder), tokenizer, 8).words.tolist()
    index = next((home / "corpus").iterdir())
    for damage in (
        lambda: (index / "suffixes.bin").write_bytes(b"1234"),
        lambda: (index / "tokens.bin").unlink(),
        lambda: (index / "manifest.json").write_text("{"),
        lambda: (index / "manifest.json").write_text(json.dumps({"files": [], "spans": 3})),
        lambda: shutil.rmtree(index),
    ):
        damage()
        assert open_corpus(str(folder), tokenizer, 8).words.tolist() == whole


def test_a_build_that_is_interrupted_leaves_the_old_index(tmp_path, home, monkeypatch):
    folder, tokenizer = folder_of_texts(tmp_path), Counting()
    before = open_corpus(str(folder), tokenizer, 8).words.tolist()
    (folder / "a.txt").write_text("hhhh")

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(corpus_store, "suffix_array", stop)
        with pytest.raises(KeyboardInterrupt):
            open_corpus(str(folder), tokenizer, 8)
    index = next(path for path in (home / "corpus").iterdir())
    assert corpus_store.load(index).words.tolist() == before
    assert open_corpus(str(folder), tokenizer, 8).words.tolist()[:5] == [7, 7, 7, 7, 8]


def test_fault_24_a_bad_path_fails_at_start(tmp_path, monkeypatch):
    tokenizer = Counting()
    with pytest.raises(InputError, match="nowhere does not exist"):
        open_corpus(str(tmp_path / "nowhere"), tokenizer, 8)
    with pytest.raises(InputError, match="does not exist"):
        open_corpus("~nobody-of-this-name/texts", tokenizer, 8)
    with pytest.raises(InputError, match="cannot be read"):
        open_corpus(str(tmp_path / ("long" * 100)), tokenizer, 8)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(InputError, match="holds no text"):
        open_corpus(str(tmp_path / "nothing"), tokenizer, 8)
    (tmp_path / "nothing" / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="holds no text"):
        open_corpus(str(tmp_path / "nothing"), tokenizer, 8)
    monkeypatch.setattr(corpus_store, "MOST_BYTES", 2)
    with pytest.raises(InputError, match="at most 0 MB"):
        open_corpus(str(tmp_path / "nothing"), tokenizer, 8)


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are text on this system")
def test_a_name_that_is_no_text_names_a_corpus(tmp_path, home):
    path = os.fsdecode(os.fsencode(tmp_path / "name") + b"\xff.txt")
    with open(path, "w") as file:
        file.write("abcabc")
    assert len(open_corpus(path, Counting(), 8).words)


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="permissions do not bind this user")
def test_a_home_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    monkeypatch.setenv("SLIPSTREAM_HOME", str(locked / "home"))
    with pytest.raises(InputError, match="SLIPSTREAM_HOME"):
        open_corpus(str(folder_of_texts(tmp_path)), Counting(), 8)


def test_long_texts_are_read_in_pieces_at_line_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_store, "PIECE", 8)
    path = tmp_path / "long.txt"
    path.write_text("abc\nabc\nabcabcabcabc\n")
    assert list(corpus_store._pieces(path.read_text())) == ["abc\nabc\n", "abcabcab", "cabc\n"]
