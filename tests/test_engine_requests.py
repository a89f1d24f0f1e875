"""Requests coming and going: cancelling, interrupts, failures of the runtime, progress, order."""

from __future__ import annotations

import signal
import threading

import numpy as np
import pytest

import beds
from slipstream.core.errors import InputError, ModelError
from slipstream.core.params import SamplingParams
from slipstream.drafters.lookup import Lookup


def make(**settings):
    target = beds.TableTransformer()
    drafter = beds.random_tree(16, 1)
    return target, drafter, beds.engine(target, [drafter], 4, **settings)


def assert_empty(target, drafter, made) -> None:
    made.forget()
    assert made.idle
    assert sorted(target.free) == list(range(8))
    assert not drafter.rows


def test_a_stream_left_early_frees_its_slot():
    target, drafter, made = make()
    stream = made.stream(made.add([1, 2]))
    next(stream)
    stream.close()
    assert_empty(target, drafter, made)


def test_cancelling_ends_running_and_waiting_rows_and_leaves_the_others_alone():
    target, drafter, made = make(max_batch=2)
    params = SamplingParams(max_tokens=12)
    doomed = made.add([1], SamplingParams(max_tokens=50, n=2, seed=1, temperature=1.0))
    kept, late = made.add([2], params), made.add([3], params)
    made.step()
    made.cancel(doomed)
    made.cancel(late)
    assert [answer.finish_reason for answer in doomed.answers] == ["cancelled", "cancelled"]
    assert doomed.answers[0].count > 0
    result = made.run([kept])[0]
    assert (
        result.outputs[0].token_ids == beds.answer(beds.engine(beds.TableTransformer()), [2], max_tokens=12).token_ids
    )
    made.cancel(doomed)
    assert_empty(target, drafter, made)


@pytest.mark.parametrize("where", ["prefill", "forward", "commit"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, ModelError])
def test_an_interrupt_inside_a_step_leaves_a_working_engine(monkeypatch, where, error):
    target, drafter, made = make()
    other = made.add([4, 5], SamplingParams(max_tokens=20))
    made.step()
    request = made.add([1, 2, 3], SamplingParams(max_tokens=20))
    real = getattr(target, where)

    def breaks(*args):
        raise error("stopped here")

    monkeypatch.setattr(target, where, breaks)
    if where == "prefill" and error is ModelError:
        made.step()  # a refusal of one prompt ends that request alone
        assert (request.error, other.error) == ("stopped here", None)
    else:
        with pytest.raises(error):
            made.run([request])
        assert request.done
        assert "stopped here" in (other.error or "")
    monkeypatch.setattr(target, where, real)
    made.run([other])
    again = beds.answer(made, [1, 2, 3], max_tokens=20)
    assert again.token_ids == beds.answer(beds.engine(beds.TableTransformer()), [1, 2, 3], max_tokens=20).token_ids
    assert_empty(target, drafter, made)


@pytest.mark.parametrize("where", ["open", "prefill", "forward", "commit", "close"])
def test_ctrl_c_waits_for_the_end_of_the_step(monkeypatch, where):
    """Whatever it falls into, nothing is torn: answers of other requests go on; the handler of before is back."""
    target, drafter, made = make(keep_prefixes=1)
    real, fired = getattr(target, where), []

    def struck(*given):
        if not fired:
            fired.append(signal.raise_signal(signal.SIGINT))
        return real(*given)

    before = signal.getsignal(signal.SIGINT)
    params = SamplingParams(max_tokens=20)
    other = made.add([4, 5], params)
    made.step()
    monkeypatch.setattr(target, where, struck)
    requests = [made.add([first, 2, 3], params) for first in (1, 6)]
    with pytest.raises(KeyboardInterrupt):
        made.run(requests)
    assert fired
    assert signal.getsignal(signal.SIGINT) is before
    assert {one.answers[0].finish_reason for one in requests} <= {"cancelled", "length"}
    alone = beds.answer(beds.engine(beds.TableTransformer()), [4, 5], max_tokens=20)
    assert made.run([other])[0].outputs[0].token_ids == alone.token_ids
    assert_empty(target, drafter, made)


def test_ctrl_c_interrupts_the_reading_of_a_prompt_between_steps_and_twice_at_once(monkeypatch):
    target, drafter, made = make()
    monkeypatch.setattr("slipstream.engine.reading.Pace.tokens", lambda *_: 4)
    monkeypatch.setattr("slipstream.engine.reader.FEWEST_TOKENS", 4)
    real, read = target.prefill, []

    def struck(slot, tokens, *last):
        read.append(len(tokens))
        for _ in range(len(read)):
            signal.raise_signal(signal.SIGINT)
        return real(slot, tokens, *last)

    monkeypatch.setattr(target, "prefill", struck)
    for prefilled in (4, 4):
        with pytest.raises(KeyboardInterrupt):
            made.run([made.add([1] * 30)])
        assert target.prefilled == prefilled
    assert_empty(target, drafter, made)


def test_progress_counts_the_prompt_up(monkeypatch):
    target = beds.TableTarget(beds.random_table(1, 16), max_context=3000)
    seen = []
    monkeypatch.setattr("slipstream.engine.reading.Pace.tokens", lambda *_: 512)
    made = beds.engine(target, [Lookup()])
    prompt = [index % 16 for index in range(1500)]
    made.run([made.add(prompt, SamplingParams(max_tokens=2), progress=lambda done, total: seen.append((done, total)))])
    assert seen == [(0, 1499), (512, 1499), (1024, 1499), (1499, 1499)]


def test_results_keep_the_order_of_requests():
    _, _, made = make(max_batch=3)
    requests = [made.add([index], SamplingParams(max_tokens=20 - index)) for index in range(12)]
    results = made.run(requests[::-1])
    assert [result.prompt_token_ids for result in results] == [[index] for index in reversed(range(12))]
    assert [len(result.outputs[0].token_ids) for result in results] == [20 - index for index in reversed(range(12))]


def test_a_bad_prompt_among_good_ones_leaves_the_queue_as_it_was():
    target, drafter, made = make()
    with pytest.raises(InputError):
        made.add([1, -1])
    with pytest.raises(InputError):
        made.add([1], SamplingParams(stop_token_ids=[16]))
    assert_empty(target, drafter, made)


def test_fewer_slots_than_kept_prefixes():
    """Kept prefixes give way to rows that need a slot, also when the prompt matches a slot that must go."""
    for slots in (1, 2, 3):
        target = beds.TableTransformer(slots=slots)
        made = beds.engine(target, max_batch=1)
        for prompt in ([1, 2, 3], [1, 2, 4], [5, 6], [1, 2, 3, 4], [1, 2], [5, 6]):
            expected = beds.answer(beds.engine(beds.TableTransformer()), prompt, max_tokens=6).token_ids
            assert beds.answer(made, prompt, max_tokens=6).token_ids == expected


def test_kept_prefixes_hold_no_more_than_one_context():
    target = beds.TableTransformer(max_context=64)
    made = beds.engine(target)
    for first in range(4):
        beds.answer(made, [first] * 20, max_tokens=11)
        assert sum(map(len, target.cache.values())) <= 64
    assert len(target.cache) == 2
    beds.answer(made, [5] * 60, max_tokens=4)
    assert [len(kept) for kept in target.cache.values()] == [63]


@pytest.mark.parametrize("capacity", [40, 45, 60, 90, 200])
def test_a_full_cache_makes_rows_wait_and_changes_no_answer(capacity):
    target = beds.TableTransformer()
    target.capacity = capacity
    drafter = beds.random_tree(16, 1)
    made = beds.engine(target, [drafter], 6, shape="tree", max_batch=4)
    prompts = [[1, 2, 3], [4] * 10, [5, 6] * 9, [7], [1, 2, 3, 4], [8, 9]]
    results = made.run([made.add(prompt, SamplingParams(max_tokens=20)) for prompt in prompts])
    for prompt, result in zip(prompts, results, strict=True):
        expected = beds.answer(beds.engine(beds.TableTransformer()), prompt, max_tokens=20)
        assert result.outputs[0].token_ids == expected.token_ids
        assert result.outputs[0].finish_reason == "length"
    assert_empty(target, drafter, made)


def test_a_row_that_the_empty_cache_cannot_hold_ends_with_an_error():
    target = beds.TableTransformer()
    target.capacity = 30
    drafter = beds.random_tree(16, 1)
    made = beds.engine(target, [drafter], 6)
    small, growing, large = (
        made.add([1] * size, SamplingParams(max_tokens=count)) for size, count in ((5, 6), (20, 30), (40, 3))
    )
    made.run([small, growing, large])
    assert [request.answers[0].finish_reason for request in (small, growing, large)] == ["length", "error", "error"]
    assert (
        growing.answers[0].row.output
        == beds.answer(beds.engine(beds.TableTransformer()), [1] * 20, max_tokens=growing.answers[0].count).token_ids
    )
    assert growing.answers[0].count > 5
    assert "30 tokens is full" in growing.error
    assert_empty(target, drafter, made)


def test_nothing_is_reused_of_targets_that_are_not_row_invariant():
    target, _, made = make()
    target.row_invariant = False
    for _ in range(2):
        result = made.run([made.add([1, 2, 3], SamplingParams(max_tokens=3))])[0]
        assert result.timing.reused_tokens == 0


def test_many_tokens_under_penalties_and_biases():
    """More distinct tokens than any table of theirs starts with: in the prompt, the output, drafts and biases."""
    target = beds.TableTarget(beds.random_table(1, 300, spread=1.0))
    made = beds.engine(target, [beds.right(target)], 8)
    params = {"max_tokens": 150, "temperature": 1.0, "seed": 1, "repetition_penalty": 1.3, "frequency_penalty": 0.2}
    for prompt, bias in ((list(range(90)), {}), ([1], {}), ([1], dict.fromkeys(range(100, 200), 0.5))):
        plain = beds.answer(made, prompt, speculation=False, logit_bias=bias, **params)
        assert beds.answer(made, prompt, logit_bias=bias, **params).token_ids == plain.token_ids


def test_several_threads_take_turns():
    """Each gets the answer it would get alone; streams among them."""
    target, drafter, made = make()
    params = SamplingParams(max_tokens=30)
    found: dict[int, list[int]] = {}

    def ask(first: int) -> None:
        request = made.add([first], params)
        if first % 2:
            found[first] = [token for piece in made.stream(request) for token in piece.token_ids]
        else:
            found[first] = made.run([request])[0].outputs[0].token_ids

    threads = [threading.Thread(target=ask, args=(first,)) for first in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = beds.engine(beds.TableTransformer())
    assert found == {first: beds.answer(alone, [first], max_tokens=30).token_ids for first in range(6)}
    assert_empty(target, drafter, made)


def test_what_a_progress_call_may_do():
    """It may cancel, which takes effect after the step; it may not start another step."""
    target, drafter, made = make()
    other = made.add([4, 5], SamplingParams(max_tokens=20))
    made.step()

    def cancel(done: int, total: int) -> None:
        made.cancel(other)
        made.cancel(request)

    request = made.add([1, 2, 3], SamplingParams(max_tokens=20), progress=cancel)
    made.run([other, request])
    assert [one.answers[0].finish_reason for one in (other, request)] == ["cancelled", "cancelled"]
    nested = made.add([1, 2, 3], progress=lambda done, total: made.step())
    assert "in the middle of a step" in (made.run([nested])[0].outputs[0].stop_reason or "")
    assert_empty(target, drafter, made)


@pytest.mark.parametrize("prompt", [None, 5, [1.0], [True], ["1"], [[1]], b"ab", np.array([1.0, 2.0])])
def test_prompt_ids_are_whole_numbers(prompt):
    made = make()[2]
    with pytest.raises(InputError, match=r"prompt token ids are .*; they must be a list of whole numbers"):
        made.add(prompt)
    assert made.idle
    assert made.add(np.array([1, 2])).prompt_token_ids == made.add((1, 2)).prompt_token_ids == [1, 2]
