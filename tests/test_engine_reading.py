"""Prompts are read in chunks between passes: whose turn it is, how large chunks are, who waits to share."""

from __future__ import annotations

import pytest

import beds
from slipstream.core.params import SamplingParams
from slipstream.engine import engine as engine_module
from slipstream.engine import reader as reader_module
from slipstream.engine.reading import CHUNK_S, FEWEST_TOKENS, FIRST_TOKENS, MOST_TOKENS, Pace

ONE = SamplingParams(max_tokens=40)


TABLE = beds.random_table(1, 16, order=2)


class Clocked(beds.TableTarget):
    """A prompt token takes a millisecond and a pass ten; `now` is the clock, `log` says what happened when."""

    def __init__(self, **settings):
        super().__init__(TABLE, **settings)
        self.now, self.log = 0.0, []

    def prefill(self, slot, tokens, last=None):
        super().prefill(slot, tokens)
        self.now += 1e-3 * len(tokens)
        self.log.append((slot, len(tokens), self.now))

    def forward(self, rows, reads=()):
        self.now += 1e-2
        return super().forward(rows, reads)


@pytest.fixture
def clocked(monkeypatch):
    """A target and an engine that live by the target's clock."""
    target = Clocked(max_context=2000)

    class Clock:
        @staticmethod
        def perf_counter() -> float:
            return target.now

    for module in (engine_module, reader_module):
        monkeypatch.setattr(module, "time", Clock)
    return target, beds.engine(target, keep_prefixes=0)


def first_token(target, made, request) -> float:
    """Seconds until a request shows its first token."""
    began = target.now
    while not request.answers[0].count:
        made.step()
    return target.now - began


def test_pace_follows_the_clock_by_position():
    pace = Pace()
    assert pace.tokens(0, 1.0) == FIRST_TOKENS
    pace.took(0, 32, 0.032)
    assert pace.tokens(0, 0.06) == 60
    assert pace.tokens(4000, 0.06) == 60, "unknown positions are taken for the nearest known ones"
    pace.took(4000, 32, 0.32)
    assert pace.tokens(4000, 0.06) == 6
    assert pace.tokens(100, 0.06) == 60
    pace.took(0, 32, 0.064)
    assert pace.tokens(0, 0.06) == 30, "a slower pace counts at once"
    pace.took(0, 32, 0.032)
    assert pace.tokens(0, 0.06) == 40, "a faster one by and by"
    pace.took(0, FEWEST_TOKENS - 1, 5.0)
    assert pace.tokens(0, 0.06) == 40, "short chunks teach nothing"
    assert pace.chunk(0, 66, 0.06, 0.1) == 66, "the end of a prompt is read with the rest"
    assert pace.chunk(0, 67, 0.06, 0.1) == 40
    pace.took(0, 32, 1e-9)
    assert pace.tokens(0, 60.0) == MOST_TOKENS


def test_a_long_prompt_is_read_between_the_steps_of_others(clocked):
    target, made = clocked
    running = made.add([1], SamplingParams(max_tokens=200))
    made.step()
    long = made.add([2] * 1500, ONE)
    counts = []
    while not long.answers[0].count:
        before = target.now
        made.step()
        assert target.now - before <= 0.1 + 1e-9
        counts.append(running.answers[0].count)
    assert len(counts) > 10
    assert counts == list(range(counts[0], counts[0] + len(counts))), "a step without a token for the running row"
    made.run([running, long])
    for request, prompt in ((running, [1]), (long, [2] * 1500)):
        fresh = beds.engine(beds.TableTarget(TABLE, max_context=2000))
        alone = beds.answer(fresh, prompt, max_tokens=request.params.max_tokens)
        assert request.answers[0].row.output == alone.token_ids


def test_a_short_prompt_overtakes_long_ones_that_are_read(clocked):
    target, made = clocked
    longs = [made.add([first] * 1500, ONE) for first in range(1, 5)]
    for _ in range(6):
        made.step()
    assert not any(request.answers[0].count for request in longs)
    for first in (7, 8, 9):
        short = made.add([first, 1, 2], ONE)
        assert first_token(target, made, short) <= 2 * CHUNK_S + 0.02
    made.run(longs)


def test_a_prompt_that_fits_into_the_limit_is_read_in_one_turn_and_answers_at_once(clocked):
    target, made = clocked
    long = made.add([1] * 1500, ONE)
    for _ in range(4):
        made.step()
    short = made.add([7] * 85, ONE)
    made.step()  # the turn of the long one, or of the short one
    before = len(target.log)
    if not short.answers[0].count:
        made.step()
        assert [size for _, size, _ in target.log[before:]] == [84], "nothing else is read before it answers"
    assert short.answers[0].count == 1
    made.run([long, short])


def test_long_prompts_go_on_however_many_short_ones_come(clocked):
    target, made = clocked
    made = beds.engine(target, keep_prefixes=0, max_batch=3)
    long = made.add([1] * 1000, ONE)
    steps, shorts = 0, []
    while not long.answers[0].count:
        shorts.append(made.add([2 + steps % 10] * 60, SamplingParams(max_tokens=1)))
        made.step()
        steps += 1
        assert steps < 80
    made.run([long, *shorts])


def test_prompts_of_equal_length_take_turns_in_the_order_they_came(clocked):
    target, made = clocked
    requests = [made.add([first] * 400, ONE) for first in (1, 2, 3)]
    while not all(request.done for request in requests):
        made.step()
    slots = [slot for slot, _, _ in target.log]
    assert slots[:9] == [0, 1, 2] * 3
    last = {slot: when for slot, _, when in target.log}
    assert last[0] < last[1] < last[2]


def test_alone_chunks_are_larger(clocked):
    target, made = clocked
    made.run([made.add([1] * 1500, ONE)])
    sizes = [size for _, size, _ in target.log]
    assert sizes[0] == FIRST_TOKENS
    assert max(sizes) > 1e3 * CHUNK_S
    assert sum(sizes) == 1499


def test_choices_of_a_prompt_read_it_once_and_prompts_alike_share_what_is_being_read():
    target = beds.TableTransformer()
    made = beds.engine(target)
    system = [3, 1, 4, 1, 5, 9, 2, 6] * 8
    same = made.add(system, SamplingParams(max_tokens=5, n=3, seed=1, temperature=1.0))
    other = made.add([*system, 7, 7], SamplingParams(max_tokens=5))
    unlike = made.add([8, 8], SamplingParams(max_tokens=5))
    made.run([same, other, unlike])
    assert target.prefilled <= 63 + 2 + 1
    assert other.timing.reused_tokens >= 63
    for request, prompt in ((other, [*system, 7, 7]), (unlike, [8, 8])):
        assert (
            request.answers[0].row.output
            == beds.answer(beds.engine(beds.TableTransformer()), prompt, max_tokens=5).token_ids
        )


def test_a_prompt_that_shares_with_one_that_is_cancelled_goes_on_alone(monkeypatch):
    target = beds.TableTransformer()
    made = beds.engine(target, keep_prefixes=0)
    monkeypatch.setattr("slipstream.engine.reading.Pace.tokens", lambda *_: 1)
    leader, follower = made.add([1, 2] * 50, ONE), made.add([1, 2] * 50 + [3], ONE)
    made.step()
    made.cancel(leader)
    assert leader.answers[0].finish_reason == "cancelled"
    assert len(target.free) == 8, "cancelling frees at once, also while the prompt is read"
    expected = beds.answer(beds.engine(beds.TableTransformer()), [1, 2] * 50 + [3], max_tokens=40).token_ids
    assert made.run([follower])[0].outputs[0].token_ids == expected


def test_prompts_wait_for_memory_instead_of_driving_each_other_out():
    target = beds.TableTransformer()
    target.capacity = 100
    made = beds.engine(target, keep_prefixes=0)
    requests = [made.add([first] * 60, SamplingParams(max_tokens=10)) for first in range(1, 5)]
    made.run(requests)
    assert target.prefilled == 4 * 59, "no prompt was read twice"


@pytest.mark.parametrize("ends_after", range(27, 34))
def test_prompts_that_share_never_wait_for_each_other(ends_after, monkeypatch):
    """Memory runs out while one reads what another waits to share, and a third answer ends at that moment."""
    monkeypatch.setattr("slipstream.engine.reading.Pace.chunk", lambda *_: 0)
    monkeypatch.setattr(reader_module, "FEWEST_TOKENS", 500)
    target = beds.TableTarget(TABLE)
    target.capacity = 215
    made = beds.engine(target)
    growing = made.add([1] * 40, SamplingParams(max_tokens=120))
    ending = made.add([2] * 90, SamplingParams(max_tokens=ends_after))
    while not ending.answers[0].count:
        made.step()
    monkeypatch.setattr(reader_module, "FEWEST_TOKENS", 1)
    alike = [made.add([3] * 60 + [last] * 10, SamplingParams(max_tokens=3)) for last in (4, 5)]
    requests = [growing, ending, *alike]
    for _ in range(500):
        made.step()
    assert [request.done for request in requests] == [True] * 4


def test_planted_turns_by_arrival_alone_are_seen(clocked, monkeypatch):
    monkeypatch.setattr("slipstream.engine.scheduler.Scheduler.turn", lambda self, answer: None)
    with pytest.raises(AssertionError):
        test_prompts_of_equal_length_take_turns_in_the_order_they_came(clocked)


def test_a_pass_reads_along_and_a_prompt_that_ends_in_it_answers_in_it():
    target = beds.TableTarget(TABLE, max_context=2000)
    target.reads_along = True
    made = beds.engine(target)
    running = made.add([1], SamplingParams(max_tokens=20))
    made.step()
    short = made.add([7] * 20, SamplingParams(max_tokens=5, logprobs=1))
    made.step()
    assert (running.answers[0].count, short.answers[0].count) == (2, 1)
    assert target.passes == [1, 2]
    made.run([running, short])
    for request, prompt in ((running, [1]), (short, [7] * 20)):
        alone = beds.answer(beds.engine(beds.TableTarget(TABLE)), prompt, max_tokens=request.params.max_tokens)
        assert request.answers[0].row.output == alone.token_ids
    assert short.timing.prefill_s > 0
    assert len(short.answers[0].logprobs) == 5


def test_what_is_refused_to_the_last_progress_call_ends_its_request_alone():
    target = beds.TableTarget(TABLE, max_context=2000)
    target.reads_along = True
    made = beds.engine(target)
    running = made.add([1], SamplingParams(max_tokens=20))
    made.step()
    last = made.add([7] * 20, SamplingParams(max_tokens=5), progress=lambda done, total: done < total or made.step())
    made.run([running, last])
    assert "in the middle of a step" in (last.error or "")
    alone = beds.answer(beds.engine(beds.TableTarget(TABLE)), [1], max_tokens=20)
    assert running.answers[0].row.output == alone.token_ids
    assert len(target.free) == 8 - len(made._slots._idle)
