"""Fault kinds about what is reported and refused: errors, log-probabilities, statistics, passes."""

from __future__ import annotations

import math

import numpy as np
import pytest

import beds
from slipstream.core.errors import InputError, UnsupportedError
from slipstream.core.params import SamplingParams
from slipstream.drafters.lookup import Lookup
from slipstream.engine import batch
from slipstream.verify import check_combination, make_verifier

SIZES = (1, 2, 3, 5, 8, 16)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("size", SIZES)
def test_fault_06_nan_ends_that_request_alone(size, bad):
    table = beds.cycle_table([0, 1, 2, 3, 4, 5], 8)
    table[4, 7] = bad
    target = beds.TableTarget(table)
    drafter = beds.Script(lambda row, limit: [(row.tokens[-1] + 1 + i) % 6 for i in range(limit.depth)])
    made = beds.engine(target, [drafter], size)
    doomed, fine = made.add([0], SamplingParams(max_tokens=20)), made.add([6], SamplingParams(max_tokens=1))
    results = made.run([doomed, fine])
    assert results[0].outputs[0].token_ids == [1, 2, 3, 4]
    assert results[0].outputs[0].finish_reason == "error"
    assert "position 5" in doomed.error
    assert results[1].outputs[0].finish_reason == "length"
    assert fine.error is None
    made.forget()
    assert len(target.free) == 8
    assert not drafter.rows


def test_fault_06_nan_at_a_node_that_is_not_visited_does_not_count():
    table = beds.cycle_table([0, 1, 2, 3], 8)
    table[7] = math.nan
    output = beds.answer(beds.engine(beds.TableTarget(table), [beds.given([7, 7, 7])], 3), [0], max_tokens=8)
    assert output.token_ids == [1, 2, 3, 0, 1, 2, 3, 0]


@pytest.mark.parametrize("size", SIZES)
def test_fault_19_logprobs_equal_a_teacher_forced_log_softmax(size):
    target = beds.TableTarget(beds.random_table(6, 9))
    for drafter in (beds.right(target), beds.random_tree(9, 1)):
        params = {"max_tokens": 20, "logprobs": 3, "temperature": 1.0, "seed": 1, "logit_bias": {2: 3.0}}
        output = beds.answer(beds.engine(target, [drafter], size, shape="tree"), [1], **params)
        check_logprobs(target.table, [1, *output.token_ids], output)


def check_logprobs(table, tokens, output) -> None:
    assert len(output.logprobs) == len(output.token_ids)
    for before, token, seen in zip(tokens, tokens[1:], output.logprobs, strict=False):
        expected = table[before] - np.log(np.sum(np.exp(table[before])))
        assert seen.token_id == token
        assert abs(seen.logprob - expected[token]) < 1e-5
        assert seen.logprob <= 0
        assert [i for i, _ in seen.top] == list(np.argsort(-expected)[:3])
        assert [value for _, value in seen.top] == sorted((value for _, value in seen.top), reverse=True)


def test_fault_19_logprobs_are_not_made_unless_asked_for():
    target = beds.TableTarget(beds.random_table(6, 9))
    assert beds.answer(beds.engine(target), [1], max_tokens=3).logprobs is None
    assert [seen.top for seen in beds.answer(beds.engine(target), [1], max_tokens=2, logprobs=0).logprobs] == [[], []]


def test_planted_logprob_fault_is_seen(monkeypatch):
    """Every token of a block gets the logits of the anchor."""
    real, first = batch.token_logprob, []

    def stale(logits, token, count):
        first.append(logits)
        return real(first[0], token, count)

    monkeypatch.setattr(batch, "token_logprob", stale)
    with pytest.raises(AssertionError):
        test_fault_19_logprobs_equal_a_teacher_forced_log_softmax(3)


def test_fault_21_a_lookup_draft_in_the_engine():
    table = beds.cycle_table([1, 2, 3, 4], 5)
    made = beds.engine(beds.TableTarget(table), [Lookup()], 3)
    output = beds.answer(made, [1, 2, 3, 4, 1, 2, 3], max_tokens=4)
    assert (output.token_ids, output.sources) == ([4, 1, 2, 3], ["lookup", "lookup", "lookup", ""])
    for prompt in ([1], [1, 2], [0]):
        plain = beds.answer(made, prompt, speculation=False, max_tokens=12)
        assert beds.answer(made, prompt, max_tokens=12).token_ids == plain.token_ids


@pytest.mark.parametrize("size", SIZES)
def test_fault_23_statistics_add_up(size):
    target = beds.TableTarget(beds.random_table(6, 9))
    for drafter in (beds.right(target), beds.wrong(target), beds.random_tree(9, 1), beds.given([]), beds.failing()):
        made = beds.engine(target, [drafter], size, shape="tree")
        result = made.run([made.add([1], SamplingParams(max_tokens=25))])[0]
        output, stats = result.outputs[0], result.outputs[0].speculation
        assert stats.num_accepted_draft_tokens <= stats.num_draft_tokens
        assert stats.tokens_before_trimming == stats.num_accepted_draft_tokens + stats.num_steps
        assert sum(stats.acceptance_histogram) == stats.num_spec_steps <= stats.num_steps
        weighed = sum(count * times for count, times in enumerate(stats.acceptance_histogram))
        assert weighed == stats.num_accepted_draft_tokens == sum(stats.accepted_by_source.values())
        assert sum(stats.drafted_by_source.values()) == stats.num_draft_tokens
        assert 0.0 <= stats.draft_acceptance_rate <= 1.0
        assert stats.mean_acceptance_length >= 1.0
        assert result.usage == {"prompt_tokens": 1, "completion_tokens": 25, "total_tokens": 26}
        assert len(output.sources) == 25
        assert all(math.isfinite(value) for value in stats.as_dict().values() if isinstance(value, float))
        split = result.timing.split
        assert set(split) == {"draft", "pass", "verify", "rest"}
        assert sum(split.values()) == pytest.approx(result.timing.decode_s)
        assert stats.speedup_estimate > 0


def test_fault_23_nothing_drafted_gives_rate_zero():
    output = beds.answer(beds.engine(beds.TableTarget(beds.random_table(6, 9))), [1], max_tokens=5)
    stats = output.speculation
    assert (stats.draft_acceptance_rate, stats.mean_acceptance_length, stats.tokens_per_pass) == (0.0, 1.0, 1.0)


def test_lossy_verifiers_mark_their_results():
    target = beds.TableTarget(beds.random_table(6, 9))
    lossy = beds.answer(beds.engine(target, verifier=make_verifier("typical")), [1], max_tokens=2)
    exact = beds.answer(beds.engine(target, verifier=make_verifier("rejection")), [1], max_tokens=2)
    assert (lossy.speculation.exact, exact.speculation.exact) == (False, True)


def test_fault_24_a_failing_drafter_is_counted_and_harmless():
    target = beds.TableTarget(beds.random_table(6, 9))
    drafter = beds.failing(after=3)
    made = beds.engine(target, [drafter, Lookup()], 3)
    plain = beds.answer(made, [1], speculation=False, max_tokens=30)
    output = beds.answer(made, [1], max_tokens=30)
    assert plain.token_ids == output.token_ids
    assert output.speculation.drafter_failures > 0
    assert output.speculation.drafted_by_source["lookup"] > 0


def test_fault_24_a_draft_past_its_limit_is_dropped_and_counted():
    target = beds.TableTarget(beds.random_table(6, 9))
    greedy_of_room = beds.Script(lambda row, limit: [0] * 50)
    made = beds.engine(target, [greedy_of_room], 60)
    output = beds.answer(made, [1], max_tokens=20)
    assert len(output.token_ids) == 20
    assert output.speculation.drafter_failures > 0


def test_fault_24_unsupported_combinations_are_refused():
    with pytest.raises(UnsupportedError, match="block takes chains only"):
        check_combination("block", "tree", ["lookup"])
    with pytest.raises(InputError, match="max_batch is 0"):
        beds.engine(beds.TableTarget(beds.random_table(6, 9)), max_batch=0)
    made = beds.engine(beds.TableTarget(beds.random_table(6, 9)))
    with pytest.raises(InputError, match="token 99"):
        made.add([1], SamplingParams(logit_bias={99: 1.0}))
    assert made.idle


@pytest.mark.parametrize("size", SIZES)
def test_fault_25_useless_drafts_cost_no_passes(size):
    target = beds.TableTarget(beds.random_table(6, 9))
    made = beds.engine(target, [beds.wrong(target)], size)
    plain = beds.answer(made, [1], speculation=False, max_tokens=40)
    output = beds.answer(made, [1], max_tokens=40)
    assert plain.speculation.num_steps == output.speculation.num_steps == 40
    assert len(target.passes) == 80


def test_fault_25_no_draft_means_no_drafting_work():
    target = beds.TableTarget(beds.random_table(6, 9))
    drafter = beds.given([1])
    made = beds.engine(target, [drafter], 3)
    beds.answer(made, [1], speculation=False, max_tokens=5)
    assert drafter.calls == []
    assert target.passes == [1] * 5


def test_planted_report_faults_are_seen(monkeypatch):
    """Statistics after trimming; a pass for every draft that did not stand."""
    real = batch.count

    def trimmed(answer, draft, verdict):
        real(answer, draft, verdict)
        answer.stats.tokens_before_trimming -= len(verdict.path) > 0

    monkeypatch.setattr(batch, "count", trimmed)
    with pytest.raises(AssertionError):
        test_fault_23_statistics_add_up(5)
    monkeypatch.undo()
    forward = beds.TableTarget.forward

    def twice(self, rows, reads=()):
        if any(len(row.draft) for row in rows):
            forward(self, rows)
        return forward(self, rows, reads)

    monkeypatch.setattr(beds.TableTarget, "forward", twice)
    with pytest.raises(AssertionError):
        test_fault_25_useless_drafts_cost_no_passes(5)
