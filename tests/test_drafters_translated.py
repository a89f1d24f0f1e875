"""A draft model with another vocabulary: the text is kept in step, its proposals become whole target tokens."""

from __future__ import annotations

import numpy as np
import pytest

import beds
from slipstream.drafters.retokenize import LOOK_BACK, Mirror, whole_characters
from slipstream.drafters.translated import Translated

TEXT = "the caf\u00e9 \u2014 \u65e5\u672c\u8a9e \U0001f469\u200d\U0001f680 end\n"
SINGLE = [bytes([code]) for code in range(256)]
OURS = beds.Pieces([*SINGLE, b"the", b" end", "\u65e5".encode(), b"<s>", b"<e>"], end_ids=[260])
OURS.control = {259, 260}
OURS.special_texts = {"<s>": 259, "<e>": 260}
THEIRS = beds.Pieces([*SINGLE, b"th", b"e ", "\u672c\u8a9e".encode(), b"<e>"], end_ids=[259])


def tokens_of(text, seed=0):
    """A text as target tokens in any legal cut, whole characters or not."""
    rng, data, ids = np.random.default_rng(seed), text.encode(), []
    while data:
        fitting = [i for i, piece in enumerate(OURS.pieces[:259]) if data.startswith(piece)]
        ids.append(int(rng.choice(fitting)))
        data = data[len(OURS.pieces[ids[-1]]) :]
    return ids


def test_whole_characters_end_before_an_unfinished_one():
    data = TEXT.encode()
    ends = {len(TEXT[:count].encode()) for count in range(len(TEXT) + 1)}
    for size in range(len(data) + 1):
        assert whole_characters(data[:size]) == max(end for end in ends if end <= size)


@pytest.mark.parametrize("seed", range(6))
def test_the_text_is_kept_in_step_token_by_token(seed):
    tokens = [259, *tokens_of(TEXT * 3, seed), 260, 259, *tokens_of(TEXT, seed), 255, 200, *tokens_of("the end", seed)]
    mirror = Mirror(OURS, THEIRS)
    for count in range(1, len(tokens) + 1):
        mirror.extend(tokens[:count])
        assert len(mirror.ids) == len(mirror.ends)
        assert mirror.ends == sorted(mirror.ends)
        data = b"".join(OURS.token_bytes(token) for token in tokens[:count])
        assert bytes(mirror.data) == data
        if max(tokens[:count]) < 261 and 255 not in tokens[:count]:
            assert b"".join(map(THEIRS.token_bytes, mirror.ids)) + mirror.pending == data
            assert len(mirror.pending) <= 3
    assert mirror.ids.count(259) == 1, "a control token that both know is one token; one that only we know is text"


def test_only_the_end_of_the_text_is_encoded_again(monkeypatch):
    mirror, sizes = Mirror(OURS, THEIRS), []
    encode = THEIRS.encode_parts
    monkeypatch.setattr(THEIRS, "encode_parts", lambda parts: sizes.append(len(parts[0][0])) or encode(parts))
    tokens = tokens_of("the end of it " * 100)
    mirror.extend(tokens[:-50])
    sizes.clear()
    for count in range(len(tokens) - 49, len(tokens) + 1):
        mirror.extend(tokens[:count])
    assert max(sizes) < 6 * LOOK_BACK


def pair(seed=2):
    """A target over bytes and words, and a draft model over other pieces that says nearly the same text."""
    table = beds.random_table(seed, 261, spread=3.0)
    text = "the end of the day and the end of the night "
    for here, then in zip(text, text[1:] + text[0], strict=True):
        table[ord(here), ord(then)] += 14.0
    table[:, 256:] -= 30.0
    theirs = table[:260, :260].copy()
    return table, theirs


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 4}])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_answers_are_those_of_plain_decoding_and_drafts_stand(params, shape):
    table, theirs = pair()
    prompt = [259, *tokens_of("the e")]
    plain = beds.answer(beds.engine(beds.TableTarget(table), tokenizer=OURS), prompt, max_tokens=100, **params)
    model = beds.TableTarget(theirs)
    made = beds.engine(beds.TableTarget(table), [Translated(model, 261, OURS, THEIRS)], 5, shape=shape, tokenizer=OURS)
    for _ in range(2):
        output = beds.answer(made, prompt, max_tokens=100, **params)
        assert output.token_ids == plain.token_ids
        assert output.speculation.drafter_failures == 0
        if not params:
            assert output.speculation.draft_acceptance_rate > 0.5
    made.forget()
    assert len(model.free) == 8, "its slots are free again"


def test_the_next_turn_of_a_chat_reads_only_what_is_new():
    table, theirs = pair()
    model = beds.TableTarget(theirs)
    made = beds.engine(beds.TableTarget(table), [Translated(model, 261, OURS, THEIRS)], 5, tokenizer=OURS)
    first = tokens_of("the end of the day " * 10)
    answer = beds.answer(made, first, max_tokens=30)
    read = model.prefilled
    second = [*first, *answer.token_ids, *tokens_of(" and the e")]
    output = beds.answer(made, second, max_tokens=30)
    plain = beds.answer(beds.engine(beds.TableTarget(table), tokenizer=OURS), second, max_tokens=30)
    assert output.token_ids == plain.token_ids
    assert output.speculation.num_accepted_draft_tokens > 0
    assert read > 100
    assert model.prefilled - read < 40, "the new text and the end of the old"


def test_an_unfinished_character_is_finished_in_target_tokens():
    """The target writes byte by byte; a draft that begins inside a character goes on inside it."""
    text = "\u00e9\u00e8\u00e9\u00e8"
    table = np.full((261, 261), -9.0)
    data = text.encode()
    for here, then in [(0xC3, 0xA9), (0xA9, 0xC3), (0xA8, 0xC3)]:
        table[here, then] = 9.0
    theirs = np.full((260, 260), -9.0)
    theirs[0xA9, 0xC3] = theirs[0xC3, 0xA9] = 9.0
    drafter = Translated(beds.TableTarget(theirs), 261, OURS, THEIRS)
    made = beds.engine(beds.TableTarget(table), [drafter], 4, tokenizer=OURS)
    for size in range(1, len(data) + 1):
        output = beds.answer(made, list(data[:size]), max_tokens=12)
        plain = beds.answer(beds.engine(beds.TableTarget(table), tokenizer=OURS), list(data[:size]), max_tokens=12)
        assert output.token_ids == plain.token_ids
        assert output.speculation.drafter_failures == 0
    assert output.speculation.num_accepted_draft_tokens > 0


def test_fault_13_a_drafter_with_a_shorter_context_stops_drafting():
    table, theirs = pair()
    prompt = tokens_of("the end")
    plain = beds.answer(beds.engine(beds.TableTarget(table), tokenizer=OURS), prompt, max_tokens=90)
    drafter = Translated(beds.TableTarget(theirs, max_context=40), 261, OURS, THEIRS)
    made = beds.engine(beds.TableTarget(table), [drafter], 5, tokenizer=OURS)
    output = beds.answer(made, prompt, max_tokens=90)
    assert output.token_ids == plain.token_ids
    assert output.speculation.drafter_failures == 0
    assert output.speculation.num_draft_tokens > 0


def test_fault_15_the_cache_of_the_draft_model_holds_the_text_and_nothing_else(monkeypatch):
    table, theirs = pair()
    model = beds.TableTarget(theirs)
    drafter = Translated(model, 261, OURS, THEIRS)
    plan = drafter._plan

    def checked(row, limit, offers):
        made = plan(row, limit, offers)
        state = drafter._rows[row.id]
        assert model.cache[state.slot] == state.cached
        assert made is None or [*state.cached, *made.pending] == state.mirror.ids
        return made

    monkeypatch.setattr(drafter, "_plan", checked)
    made = beds.engine(beds.TableTarget(table), [drafter], 5, tokenizer=OURS)
    output = beds.answer(made, tokens_of("the end"), max_tokens=150, temperature=1.0, seed=2)
    assert output.speculation.drafter_failures == 0
    assert output.speculation.num_draft_tokens > 50
