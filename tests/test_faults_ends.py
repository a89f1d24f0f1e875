"""Fault kinds about where answers end: end ids, stop strings, budgets, the context, streaming."""

from __future__ import annotations

import numpy as np
import pytest

import beds
from slipstream.core.errors import ContextLengthError, InputError
from slipstream.core.params import SamplingParams
from slipstream.engine.batch import Batch
from slipstream.engine.request import Answer
from slipstream.engine.stop import StopRules

SIZES = (1, 2, 3, 5, 8, 16)
END = 5
LINE = [0, 1, 2, 3, 4, END, 6, 7]


def line_target(**settings) -> beds.TableTarget:
    """0 1 2 3 4 END 6 7 0 1 ..., greedily."""
    return beds.TableTarget(beds.cycle_table(LINE, 8), **settings)


def pair(target, size, prompt=(0,), tokenizer=None, drafter=None, **params):
    """Plain and speculative answers to one prompt, and the target's cache at the end of both."""
    made = beds.engine(target, [drafter or beds.right(target)], size, tokenizer=tokenizer)
    plain = beds.answer(made, list(prompt), speculation=False, **params)
    return plain, beds.answer(made, list(prompt), **params)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ends", [[END], [2, END], [END, 7], []], ids=str)
def test_fault_09_an_end_id_inside_a_block_ends_the_answer(ends, size):
    target = line_target()
    tokenizer = beds.letters(8, end_ids=ends)
    plain, output = pair(target, size, tokenizer=tokenizer, max_tokens=14, logprobs=1)
    expected = [1, 2, 3, 4, END, 6, 7, 0, 1, 2, 3, 4, END, 6]
    stop = next((i + 1 for i, token in enumerate(expected) if token in ends), 14)
    for made in (plain, output):
        assert made.token_ids == expected[:stop]
        assert made.finish_reason == ("stop" if ends else "length")
        assert made.text == "".join(chr(97 + token) for token in expected[:stop] if token not in ends)
        assert len(made.logprobs) == len(made.sources) == stop
        assert made.stop_reason is None


@pytest.mark.parametrize("size", SIZES)
def test_fault_09_nothing_after_the_end_stays_in_the_cache(size):
    target = line_target()
    made = beds.engine(target, [beds.right(target)], size, tokenizer=beds.letters(8, end_ids=[END]))
    beds.answer(made, [0, 1])
    assert list(target.cache.values()) == [[0, 1, 2, 3, 4]], "all but the last token, which was never an input"


@pytest.mark.parametrize("size", SIZES)
def test_fault_09_ignored_and_early_ends_do_not_end(size):
    target = line_target()
    tokenizer = beds.letters(8, end_ids=[END])
    plain, output = pair(target, size, tokenizer=tokenizer, max_tokens=10, ignore_eos=True)
    assert plain.token_ids == output.token_ids == [1, 2, 3, 4, END, 6, 7, 0, 1, 2]
    plain, output = pair(target, size, tokenizer=tokenizer, max_tokens=20, min_tokens=7)
    assert plain.token_ids == output.token_ids
    assert END not in output.token_ids[:7]
    plain, output = pair(target, size, max_tokens=20, stop_token_ids=[3])
    assert plain.token_ids == output.token_ids == [1, 2, 3]
    assert (output.text, output.finish_reason, output.stop_reason) == ("bc", "stop", 3)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("stop", "tokens", "text", "cause"),
    [
        ("bc", 2, "", "bc"),
        ("cd", 3, "b", "cd"),
        ("de", 4, "bc", "de"),
        ("efg", 6, "bcd", "efg"),
        ("gh", 7, "bcdef", "gh"),
        ("habc", 10, "bcdefg", "habc"),
        (["fg", "efg"], 6, "bcd", "efg"),
        (["efg", "de"], 4, "bc", "de"),
        (["d", "cd"], 3, "b", "cd"),
        (["xyz", "e"], 4, "bcd", "e"),
    ],
    ids=str,
)
def test_fault_10_stop_strings(stop, tokens, text, cause, size):
    target = line_target()
    plain, output = pair(target, size, max_tokens=30, stop=stop)
    for made in (plain, output):
        assert made.token_ids == [1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3][:tokens]
        assert (made.text, made.finish_reason, made.stop_reason) == (text, "stop", cause)
    assert all(kept == [0, *output.token_ids[:-1]] for kept in target.cache.values())


@pytest.mark.parametrize("size", SIZES)
def test_fault_10_a_stop_at_the_last_allowed_token_is_a_stop(size):
    plain, output = pair(line_target(), size, max_tokens=4, stop="e")
    assert plain.finish_reason == output.finish_reason == "stop"
    plain, output = pair(line_target(), size, max_tokens=3, stop="e")
    assert plain.finish_reason == output.finish_reason == "length"


@pytest.mark.parametrize("size", SIZES)
def test_fault_10_stops_inside_tokens_and_characters(size):
    """Tokens that hold several letters, and the bytes of one character spread over tokens."""
    pieces = [b"x", b"one ", b"two;th", b"ree", b"\xe2\x82", b"\xac9", b"nd", b"!"]
    tokenizer = beds.Pieces(pieces)
    for stop, text, tokens in (
        (";", "one two", 2),
        ("two;three", "one ", 3),
        ("€", "one two;three", 5),
        ("e€", "one two;thre", 5),
        ("9n", "one two;three€", 6),
    ):
        plain, output = pair(line_target(), size, tokenizer=tokenizer, max_tokens=7, stop=stop)
        assert (plain.text, len(plain.token_ids)) == (output.text, len(output.token_ids)) == (text, tokens)


@pytest.mark.parametrize("size", SIZES)
def test_fault_10_stops_before_min_tokens_do_not_count(size):
    plain, output = pair(line_target(), size, max_tokens=30, min_tokens=5, stop="d")
    assert plain.token_ids == output.token_ids == [1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]
    assert output.text == "bcdefghabc"


@pytest.mark.parametrize("size", SIZES)
def test_fault_11_budgets_are_met_exactly(size):
    for budget in {0, 1, 2, 3, size, size + 1, size + 2, 2 * size + 2}:
        target = line_target()
        for drafter in (beds.right(target), beds.wrong(target)):
            plain, output = pair(target, size, drafter=drafter, max_tokens=budget)
            assert plain.token_ids == output.token_ids
            assert len(output.token_ids) == budget
            assert output.finish_reason == "length"
    empty = pair(line_target(), size, max_tokens=0)[1]
    assert (empty.text, empty.speculation.num_steps, empty.speculation.tokens_per_pass) == ("", 0, 0.0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", [56, 62, 63])
def test_fault_12_the_context_ends_the_answer(length, size):
    target = line_target(max_context=64)
    for drafter in (beds.right(target), beds.random_tree(8, 1)):
        plain, output = pair(target, size, prompt=[0, 1] * (length // 2) + [0] * (length % 2), drafter=drafter)
        assert plain.token_ids == output.token_ids
        assert len(output.token_ids) == 64 - length
        assert output.finish_reason == "length"


@pytest.mark.parametrize("length", [64, 65, 500])
def test_fault_12_a_prompt_at_the_limit_is_refused(length):
    target = line_target(max_context=64)
    engine = beds.engine(target)
    with pytest.raises(ContextLengthError, match=f"{length} tokens.*64"):
        engine.add([0] * length)
    assert engine.idle
    assert not target.passes


def test_an_empty_prompt_becomes_bos_or_is_refused():
    target = line_target()
    with_bos = beds.engine(target, tokenizer=beds.letters(8, bos_id=6))
    assert beds.answer(with_bos, "", max_tokens=2).token_ids == [7, 0]
    with pytest.raises(InputError, match="empty"):
        beds.engine(target).add("")
    with pytest.raises(InputError, match="token 99"):
        beds.engine(target).add([1, 99])


STREAMED = [b"x", b"one ", b"tw\xe2", b"\x82", b"\xac o", b"\xf0\x9f\x98", b"\x80 end", b"\xe2"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stop", [(), ("end",), ("o\U0001f600 end",), ("\u20ac o", "never"), ("one two",)], ids=str)
@pytest.mark.parametrize("budget", [1, 2, 3, 5, 6, 7, 40])
def test_fault_20_streamed_pieces_join_to_the_text(budget, stop, size):
    target = line_target()
    engine = beds.engine(target, [beds.right(target)], size, tokenizer=beds.Pieces(STREAMED))
    params = SamplingParams(max_tokens=budget, stop=stop)
    whole = engine.run([engine.add([0], params, speculation=False)])[0].outputs[0]
    pieces = list(engine.stream(engine.add([0], params)))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == [whole.finish_reason]
    shown = ""
    for piece in pieces[:-1]:
        shown += piece.text
        assert "\ufffd" not in piece.text or budget > 7
        assert whole.text.startswith(shown)


def test_fault_20_the_beginning_of_a_stop_is_held_back():
    target = line_target()
    engine = beds.engine(target, [beds.right(target)], 1)
    texts = [piece.text for piece in engine.stream(engine.add([0], SamplingParams(max_tokens=8, stop="cdex")))]
    assert texts[0] == "b"
    assert "cde" not in texts
    assert "".join(texts) == "bcdefgha"


def test_planted_stop_faults_are_seen(monkeypatch):
    """End ids that are not looked for, stops that are not held back, blocks that are not cut."""
    monkeypatch.setattr(StopRules, "by_token", lambda self, count, token: None)
    with pytest.raises(AssertionError):
        test_fault_09_an_end_id_inside_a_block_ends_the_answer([END], 5)
    monkeypatch.undo()
    monkeypatch.setattr(StopRules, "held_back", lambda self, text: 0)
    with pytest.raises(AssertionError):
        test_fault_20_streamed_pieces_join_to_the_text(40, ("o\U0001f600 end",), 1)
    monkeypatch.undo()
    append = Answer.append

    def late(self, token, source):
        going = append(self, token, source)
        return going or len(self.row.tokens) % 2 == 1  # sometimes goes on after the end

    monkeypatch.setattr(Answer, "append", late)
    with pytest.raises(AssertionError):
        test_fault_10_stop_strings("de", 4, "bc", "de", 8)
    assert np.isfinite(line_target().table).all()


def test_planted_budget_faults_are_seen(monkeypatch):
    """One token too many; drafts that reach the end of the context."""
    by_budget = StopRules.by_budget
    monkeypatch.setattr(StopRules, "by_budget", lambda self, count: by_budget(self, count - 1))
    with pytest.raises(AssertionError):
        test_fault_11_budgets_are_met_exactly(3)
    monkeypatch.undo()
    monkeypatch.setattr(Batch, "clip", lambda self, limits, drafters: list(limits))
    with pytest.raises(AssertionError):
        test_fault_12_the_context_ends_the_answer(56, 16)
