"""The thread that owns an engine: requests from many threads, cancelling, deadlines, draining, its death."""

from __future__ import annotations

import random
import threading
import time

import pytest

import beds
import native_beds
from slipstream.control.adaptive import Adaptive
from slipstream.core.errors import ContextLengthError, InputError, QueueFullError, StoppedError
from slipstream.core.params import SamplingParams, SpeculationSetting
from slipstream.drafters.lookup import Lookup
from slipstream.drafters.small_model import SmallModel
from slipstream.drafters.suffix import Suffix
from slipstream.engine.worker import Worker
from slipstream.targets.slots import SlotPool

PAUSE_S = 0.002


class Heard:
    """A listener that keeps everything and can be waited for."""

    def __init__(self) -> None:
        self.pieces, self.ended, self.times = [], threading.Event(), 0

    def __call__(self, request, pieces) -> None:
        assert not self.ended.is_set(), "told something after the end"
        if pieces is None:
            self.times += 1
            self.ended.set()
        else:
            assert pieces
            self.pieces += pieces

    @property
    def tokens(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.token_ids]

    def wait(self) -> Heard:
        assert self.ended.wait(20), "never told of the end"
        return self


@pytest.fixture
def worker(request):
    """A worker over a table; extra settings of the engine and the worker come from the mark."""
    settings = getattr(request, "param", {})
    target = beds.TableTarget(beds.random_table(1, 16), pause=settings.pop("pause", PAUSE_S))
    drafter = beds.right(target)
    made = beds.engine(target, [drafter], 4, max_batch=settings.pop("max_batch", 4))
    worker = Worker(made, **settings)
    worker.start()
    yield worker
    worker.stop()
    assert not worker.alive
    made.forget()
    assert made.idle
    assert sorted(target.free) == list(range(8))
    assert not drafter.rows


def alone(prompt, **params) -> list[int]:
    target = beds.TableTarget(beds.random_table(1, 16))
    return beds.answer(beds.engine(target), prompt, **params).token_ids


def test_answers_are_those_of_plain_decoding_alone(worker):
    heard = {first: Heard() for first in range(12)}
    requests = {}

    def send(first: int) -> None:
        params = SamplingParams(max_tokens=20, temperature=float(first % 2), seed=first)
        requests[first] = worker.submit([first, 1], params, listener=heard[first])

    threads = [threading.Thread(target=send, args=(first,)) for first in heard]
    for thread in threads:
        thread.start()
    for first, listener in heard.items():
        expected = alone([first, 1], max_tokens=20, temperature=float(first % 2), seed=first)
        assert listener.wait().tokens == expected
        assert requests[first].result().outputs[0].token_ids == expected
    stats = worker.stats()
    assert (stats.tokens, stats.prompt_tokens, stats.finished) == (240, 24, {"length": 12})
    assert stats.running == stats.waiting == stats.reading == 0
    assert stats.speculation.num_accepted_draft_tokens > 0
    assert stats.speculation.accepted_by_source == {"right": stats.speculation.num_accepted_draft_tokens}


def test_what_is_refused_is_refused_at_once(worker):
    with pytest.raises(ContextLengthError, match="600 tokens"):
        worker.submit([1] * 600, listener=Heard())
    with pytest.raises(InputError, match="token 99"):
        worker.submit([99], listener=Heard())
    with pytest.raises(InputError, match="drafter 'magic' is not loaded; loaded: right"):
        worker.submit([1], speculation=SpeculationSetting(drafters=["magic"]), listener=Heard())


@pytest.mark.parametrize("worker", [{"max_batch": 2, "max_waiting": 3, "pause": 0.01}], indirect=True)
def test_a_full_queue_refuses_and_takes_again_later(worker):
    heard: list[Heard] = []

    def send() -> None:
        listener = Heard()
        worker.submit([1], SamplingParams(max_tokens=30), speculation=False, listener=listener)
        heard.append(listener)

    def send_many() -> None:
        for _ in range(20):
            send()

    with pytest.raises(QueueFullError, match="3 answers wait already"):
        send_many()
    assert 3 <= len(heard) <= 5
    for listener in heard:
        assert len(listener.wait().tokens) == 30
    send()
    heard[-1].wait()


@pytest.mark.parametrize("worker", [{"max_batch": 2, "max_waiting": 3, "pause": 0.01}], indirect=True)
def test_every_answer_of_a_request_counts_in_the_queue(worker):
    """A request may go past the limit by its own answers, so that none is too large for an empty queue."""
    many, one = Heard(), Heard()
    worker.submit([1], SamplingParams(max_tokens=30, n=7), listener=many)
    while worker.waiting != 5:
        time.sleep(0.001)
    with pytest.raises(QueueFullError, match="3 answers wait already"):
        worker.submit([1], SamplingParams(max_tokens=2), listener=one)
    assert len(many.wait().tokens) == 7 * 30
    assert worker.waiting == 0
    worker.submit([1], SamplingParams(max_tokens=2), listener=one)
    assert len(one.wait().tokens) == 2


def test_cancelling_ends_running_and_waiting_requests(worker):
    heard = [Heard() for _ in range(10)]
    requests = [worker.submit([1], SamplingParams(max_tokens=400), listener=each) for each in heard]
    for request in requests:
        worker.cancel(request)
        worker.cancel(request)
    for listener, request in zip(heard, requests, strict=True):
        assert listener.wait().pieces[-1].finish_reason == "cancelled"
        assert request.answers[0].finish_reason == "cancelled"


def test_a_deadline_ends_a_request(worker):
    heard, other = Heard(), Heard()
    request = worker.submit([1], SamplingParams(max_tokens=400), speculation=False, deadline_s=0.1, listener=heard)
    worker.submit([1], SamplingParams(max_tokens=3), deadline_s=30, listener=other)
    assert heard.wait().pieces[-1].finish_reason == "deadline"
    assert 0 < request.answers[0].count < 400
    assert other.wait().pieces[-1].finish_reason == "length"


def test_a_listener_that_fails_cancels_its_request_only(worker, caplog):
    def fails(request, pieces):
        raise RuntimeError("gone away")

    other = Heard()
    request = worker.submit([1], SamplingParams(max_tokens=400), listener=fails)
    worker.submit([2], SamplingParams(max_tokens=30), listener=other)
    assert other.wait().tokens == alone([2], max_tokens=30)
    while not request.done:
        time.sleep(0.01)
    assert request.answers[0].finish_reason == "cancelled"
    assert worker.alive


def test_draining_lets_requests_end(worker):
    heard = [Heard() for _ in range(6)]
    for listener in heard:
        worker.submit([1], SamplingParams(max_tokens=20), listener=listener)
    assert worker.drain(20)
    assert all(listener.ended.is_set() for listener in heard)
    assert [len(listener.tokens) for listener in heard] == [20] * 6
    with pytest.raises(StoppedError, match="about to stop"):
        worker.submit([1], listener=Heard())


def test_draining_is_bounded(worker):
    heard = [Heard() for _ in range(6)]
    for listener in heard:
        worker.submit([1], SamplingParams(max_tokens=450), speculation=False, listener=listener)
    began = time.monotonic()
    assert not worker.drain(0.1)
    assert time.monotonic() - began < 5
    assert {listener.wait().pieces[-1].finish_reason for listener in heard} == {"cancelled"}


def test_stopping_ends_what_runs(worker):
    heard = Heard()
    worker.submit([1], SamplingParams(max_tokens=450), listener=heard)
    worker.stop()
    assert heard.ended.is_set()
    assert not worker.alive


def test_settings_change_between_steps_without_a_dropped_request(worker):
    heard = [Heard() for _ in range(4)]
    for first, listener in enumerate(heard):
        worker.submit([first], SamplingParams(max_tokens=200), listener=listener)
    changes = [{"speculation": False}, {"speculation": True, "max_nodes": 1}, {"drafters": []}, {"drafters": None}]
    for change in changes:
        worker.configure(**change)
        time.sleep(5 * PAUSE_S)
    worker.previous()
    assert worker.engine.drafting.setting.limits.drafters == ()
    with pytest.raises(InputError, match="unknown setting 'speed'"):
        worker.configure(speed=3)
    for first, listener in enumerate(heard):
        assert listener.wait().tokens == alone([first], max_tokens=200)


def test_progress_goes_on_while_idle(worker):
    seen = worker.last_progress
    time.sleep(0.6)
    assert worker.last_progress > seen
    assert worker.alive


def test_a_dead_thread_fails_all_requests_and_takes_nothing_new(caplog):
    target = beds.TableTarget(beds.random_table(1, 16), pause=PAUSE_S)
    faults = []
    worker = Worker(beds.engine(target, max_batch=1), on_fault=faults.append)
    heard = [Heard() for _ in range(3)]
    requests = [worker.submit([1], SamplingParams(max_tokens=400), listener=each) for each in heard]
    assert not worker.alive
    worker.start()
    while not requests[0].answers[0].count:
        time.sleep(0.001)

    def breaks(*_):
        raise MemoryError("no more")

    target.forward = breaks
    for listener, request in zip(heard, requests, strict=True):
        assert listener.wait().pieces[-1].finish_reason == "error"
        assert "MemoryError: no more" in request.error
    worker.stop()
    assert not worker.alive
    assert [str(fault) for fault in faults] == ["no more"]
    with pytest.raises(StoppedError, match="has failed"):
        worker.submit([1], listener=Heard())
    assert worker.drain(1)


def serve_many(count: int, max_batch: int, rng: random.Random) -> None:
    """Requests of all kinds, 16 at a time, a third cut off, while settings change; each that ended equals it alone."""
    target = native_beds.target(max_context=160)
    drafters = [Lookup(), Suffix(), SmallModel(native_beds.target(max_context=160, num_layers=1), target.vocab_size)]
    made = beds.engine(target, drafters, controller=Adaptive(6), max_batch=max_batch, keep_prefixes=2)
    worker = Worker(made, max_waiting=32, shadow_share=0.1)
    places, ended = threading.Semaphore(16), []
    worker.start()
    for index in range(count):
        places.acquire()
        prompt = [rng.randrange(target.vocab_size) for _ in range(rng.choice([1, 5, 30, 120]))]
        params = SamplingParams(
            max_tokens=rng.randrange(1, 35), temperature=rng.choice([0.0, 0.8]), seed=index, n=rng.choice([1, 1, 2])
        )
        cut = rng.random() < 0.3

        def hear(request, pieces, cut=cut):
            if pieces is None:
                ended.append(request)
                places.release()
            elif cut:
                worker.cancel(request)

        how = rng.choice([True, True, False, SpeculationSetting(drafters=["suffix"]), SpeculationSetting(max_nodes=2)])
        worker.submit(prompt, params, speculation=how, listener=hear)
        if index % 20 == 0:
            worker.configure(speculation=rng.random() < 0.7, max_nodes=rng.choice([None, 1, 4]))
    assert worker.drain(60)
    worker.stop()
    made.forget()
    assert (len(ended), target.free_slots, target.memory_bytes()["kv_used"]) == (count, 8, 0)
    assert worker.shadow.differed == 0
    fresh = beds.engine(native_beds.target(max_context=160), keep_prefixes=0)
    for request in ended:
        if all(answer.finish_reason == "length" for answer in request.answers):
            again = fresh.run([fresh.add(request.prompt_token_ids, request.params)])[0]
            assert [answer.row.output for answer in request.answers] == [one.token_ids for one in again.outputs]


@pytest.mark.parametrize("max_batch", [2, 6])
def test_fault_17_many_requests_of_a_worker_equal_the_same_alone(max_batch):
    serve_many(80, max_batch, random.Random(max_batch))


@pytest.mark.full
def test_fault_17_very_many_requests_of_a_worker_equal_the_same_alone():
    serve_many(1500, 6, random.Random(0))


def test_planted_chunk_in_the_wrong_order_is_seen(monkeypatch):
    """The first chunk of a long prompt is read in the wrong order."""
    take = SlotPool.take

    def skips(self, tokens, reuse=True):
        slot, shared = take(self, tokens, reuse)
        if self._keep and not shared and len(tokens) > 40:  # not in the engine it is compared with
            self._target.prefill(slot, tokens[32::-1])
        return slot, shared

    monkeypatch.setattr(SlotPool, "take", skips)
    with pytest.raises(AssertionError):
        serve_many(20, 2, random.Random(1))


def test_news_are_gathered_but_for_the_first_and_the_last():
    calls, ended = [], threading.Event()
    worker = Worker(beds.engine(beds.TableTarget(beds.random_table(1, 9))), gather_s=3600.0)
    worker._told_at = time.monotonic()
    worker.start()
    worker.submit(
        [1, 2],
        SamplingParams(max_tokens=40, ignore_eos=True),
        listener=lambda request, pieces: ended.set() if pieces is None else calls.append(pieces),
    )
    assert ended.wait(20)
    worker.stop()
    assert [sum(len(piece.token_ids) for piece in pieces) for pieces in calls] == [1, 39]
