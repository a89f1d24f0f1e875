"""The loop on table models: what a step emits, keeps and counts."""

from __future__ import annotations

import numpy as np
import pytest

import beds
from slipstream.core.types import Piece


def greedy(table: np.ndarray, prompt: list[int], count: int) -> list[int]:
    """Plain greedy decoding, written down independently of the engine."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(np.argmax(table[tokens[-1]])))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("seed", range(5))
def test_plain_decoding_follows_the_table(seed):
    table = beds.random_table(seed, 12)
    output = beds.answer(beds.engine(beds.TableTarget(table)), [3, 1], max_tokens=20)
    assert output.token_ids == greedy(table, [3, 1], 20)
    assert output.finish_reason == "length"
    assert output.text == "".join(chr(97 + token) for token in output.token_ids)
    assert output.speculation.num_steps == 20
    assert output.sources == [""] * 20


def test_a_step_with_a_draft_keeps_what_stands():
    table = beds.cycle_table([0, 1, 2, 3, 4], 6)
    target = beds.TableTarget(table)
    output = beds.answer(beds.engine(target, [beds.given([1, 2, 5, 4])], 4), [0], max_tokens=6)
    assert output.token_ids == [1, 2, 3, 4, 0, 1]
    assert output.speculation.num_accepted_draft_tokens == 2
    assert output.speculation.acceptance_histogram == [2, 0, 1]  # the last token has no room for a draft
    assert output.sources == ["given", "given", "", "", "", ""]
    assert output.speculation.drafted_by_source == {"given": output.speculation.num_draft_tokens}
    assert output.speculation.accepted_by_source == {"given": 2}


def test_pieces_join_to_the_text_and_name_sources():
    table = beds.cycle_table([0, 1, 2, 3, 4], 6)
    target = beds.TableTarget(table)
    engine = beds.engine(target, [beds.right(target)], 3)
    pieces = list(engine.stream(engine.add([0])))
    assert all(isinstance(piece, Piece) for piece in pieces)
    assert sum(len(piece.token_ids) for piece in pieces) == 256
    assert "".join(piece.text for piece in pieces) == ("bcdea" * 60)[:256]
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert {tuple(set(piece.sources)) for piece in pieces} == {("right",), ("",)}


def test_slots_are_free_after_every_end():
    target = beds.TableTarget(beds.random_table(1, 8), slots=2)
    engine = beds.engine(target, max_batch=2)
    for _ in range(5):
        beds.answer(engine, [1, 2], max_tokens=3)
    engine.forget()
    assert len(target.free) == 2
    assert engine.idle
