"""Decoding a finished request again plainly: on demand, and as the shadow check of a running worker."""

from __future__ import annotations

import threading
import time

import pytest

import beds
import native_beds
from slipstream.core.errors import InputError
from slipstream.core.params import SamplingParams
from slipstream.core.types import Verdict
from slipstream.drafters.lookup import Lookup
from slipstream.engine.replay import Mismatch, Shadow, compare, plainly, replay
from slipstream.engine.worker import Worker
from slipstream.verify.coupled import Coupled
from slipstream.verify.rejection import Rejection


class Altering(Coupled):
    """Changes a token of every other row in steps with a draft."""

    def __call__(self, logits, draft, row, drawn=None):
        verdict = super().__call__(logits, draft, row, drawn)
        if draft.tokens and row.id % 2:
            return Verdict([(verdict.tokens[0] + 1) % len(logits[0])], [])
        return verdict


def make(verifier=None):
    target = beds.TableTarget(beds.random_table(1, 16))
    return target, beds.engine(target, [beds.right(target)], 4, verifier=verifier or Coupled())


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.0, "n": 3},
        {"temperature": 0.7, "seed": 5, "stop": ["ab", "c"], "repetition_penalty": 1.2},
        {"max_tokens": 0},
    ],
)
def test_a_right_answer_is_found_right_and_nothing_is_counted(params):
    target, made = make()
    request = made.add([1, 2, 3], SamplingParams(**{"max_tokens": 30} | params))
    made.run([request])
    before = made.snapshot()
    assert replay(made, request) is None
    after = made.snapshot()
    assert (after.tokens, after.prompt_tokens, after.finished) == (before.tokens, before.prompt_tokens, before.finished)
    assert after.speculation == before.speculation
    made.forget()
    assert sorted(target.free) == list(range(8))


def test_a_replay_reads_the_prompt_anew():
    """What a fault left in the cache must not be there to hide it."""
    target = native_beds.target(max_context=160)
    made = beds.engine(target, [Lookup()])
    request = made.add(list(range(40)), SamplingParams(max_tokens=20))
    made.run([request])
    again = plainly(made, request)
    made.queue(again)
    made.run([again])
    assert again.timing.reused_tokens == 0
    assert again.answers[0].stats.num_spec_steps == 0
    assert compare(request, again) is None


def test_the_first_difference_is_named():
    _, made = make()
    request = made.add([1, 2], SamplingParams(max_tokens=20))
    made.run([request])
    row = request.answers[0].row
    was = row.tokens[2 + 7]
    row.tokens[2 + 7] = (was + 1) % 16
    assert replay(made, request) == Mismatch(request.id, 0, 7, (was + 1) % 16, was)
    row.tokens[2 + 7] = was
    del row.tokens[-1]
    found = replay(made, request)
    assert (found.place, found.found) == (19, None)
    assert str(found).startswith(f"request {request.id}, answer 0, token 19: None with speculation, ")


def test_cut_off_answers_say_nothing():
    _, made = make()
    request = made.add([1, 2], SamplingParams(max_tokens=200))
    made.step()
    made.cancel(request)
    request.answers[0].row.tokens[-1] = 0
    assert replay(made, request) is None


def test_the_share_is_picked_by_id():
    _, made = make()
    shadow, other = Shadow(made, 0.1), Shadow(made, 0.1)
    requests = [made.make([1]) for _ in range(2000)]
    picked = [shadow.picks(request) for request in requests]
    assert picked == [other.picks(request) for request in requests]
    assert 150 < sum(picked) < 250
    assert all(Shadow(made, 1.0).picks(request) for request in requests)
    assert not any(Shadow(made, 0.0).picks(request) for request in requests)


def test_what_cannot_be_checked_is_refused():
    with pytest.raises(InputError, match=r"shadow_share is 1.5; it must be from 0"):
        Shadow(make()[1], 1.5)
    with pytest.raises(InputError, match="verifier rejection does not promise"):
        Shadow(make(Rejection())[1], 0.1)


def serve(verifier, share: float, count: int, **options):
    """Answers `count` requests through a worker; returns it, stopped, when all replays are done."""
    target, made = make(verifier)
    worker, ended = Worker(made, max_waiting=count, shadow_share=share, **options), threading.Semaphore(0)
    worker.start()
    for index in range(count):
        params = SamplingParams(max_tokens=8, temperature=index % 3 / 2, seed=index)
        worker.submit([index % 16], params, listener=lambda request, pieces: pieces is None and ended.release())
    for _ in range(count):
        assert ended.acquire(timeout=30)
    while not worker._shadow.idle:
        time.sleep(0.01)
    worker.stop()
    made.forget()
    assert sorted(target.free) == list(range(8))
    return worker


def test_the_shadow_check_stays_green_when_all_is_well():
    worker = serve(Coupled(), 0.3, 120)
    assert worker.shadow.checked > 20
    assert worker.shadow.differed == 0
    assert worker.stats().tokens == 8 * 120, "replays are not counted"


def test_planted_fault_in_half_the_answers_is_seen_within_200_requests(caplog):
    alarms: list[Mismatch] = []
    worker = serve(Altering(), 0.1, 200, on_alarm=alarms.append, alarm_stops=True)
    assert worker.shadow.differed == len(alarms) >= 1
    assert "speculation changed an answer: request" in caplog.text
    assert not worker.engine.drafting.setting.speculation
    assert worker.alive is False
