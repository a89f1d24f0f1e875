"""Long lives of one engine over the native runtime: chunks, shared prefixes, cancelled rows, settings, batches."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

import beds
import native_beds
from slipstream.control.adaptive import Adaptive
from slipstream.control.fixed import Fixed
from slipstream.core.params import SamplingParams, SpeculationSetting
from slipstream.drafters.lookup import Lookup
from slipstream.drafters.small_model import SmallModel
from slipstream.drafters.suffix import Suffix
from slipstream.engine import reader as reader_module
from slipstream.engine.reading import Pace
from slipstream.targets.native import model
from slipstream.targets.native.kv import BlockPool

VOCABULARY = 101
CONTEXT = 160
"""Five cache blocks."""

tokens = st.integers(0, VOCABULARY - 1)
params = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 70), "temperature": st.sampled_from([0.0, 0.0, 0.7, 1.3])},
    optional={
        "top_p": st.sampled_from([0.5, 0.9]),
        "repetition_penalty": st.sampled_from([0.7, 1.2]),
        "stop_token_ids": st.lists(tokens, max_size=2),
        "n": st.integers(1, 3),
    },
)
NAMES = ["lookup", "suffix", "model", "random"]
some_names = st.none() | st.lists(st.sampled_from(NAMES), max_size=2, unique=True)
nodes = st.none() | st.integers(0, 6)
speculations = st.one_of(st.just(True), st.just(False), st.tuples(some_names, nodes))
settings_at_run_time = st.fixed_dictionaries(
    {}, optional={"speculation": st.booleans(), "drafters": some_names, "max_nodes": nodes}
)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("new"), st.lists(tokens, min_size=1, max_size=60), params, speculations),
        st.tuples(st.just("again"), st.integers(0, 9), st.integers(0, 120), st.lists(tokens, max_size=8), params),
        st.tuples(st.just("steps"), st.integers(1, 12)),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
        st.tuples(st.just("set"), settings_at_run_time),
        st.tuples(st.just("previous")),
        st.tuples(st.just("forget")),
    ),
    min_size=2,
    max_size=14,
)
cases = st.fixed_dictionaries(
    {
        "actions": actions,
        "drafters": st.lists(st.sampled_from(["lookup", "suffix", "self", "other", "random"]), max_size=2, unique=True),
        "shape": st.sampled_from(["chain", "tree"]),
        "nodes": st.integers(1, 9),
        "adaptive": st.booleans(),
        "max_batch": st.integers(1, 4),
        "chunk": st.sampled_from([1, 3, 16, 31, 200]),
        "blocks": st.sampled_from([5, 7, 11, 40]),
    }
)


def make_drafter(name: str):
    return {
        "lookup": Lookup,
        "suffix": Suffix,
        "self": lambda: SmallModel(native_beds.target(max_context=CONTEXT), VOCABULARY),
        "other": lambda: SmallModel(native_beds.target(max_context=64, num_layers=1), VOCABULARY),
        "random": lambda: beds.random_tree(VOCABULARY, 3),
    }[name]()


def said(speculation, names: list[str]):
    """What a call says about speculation, in terms of the drafters there are."""
    if isinstance(speculation, bool):
        return speculation
    wanted, most = speculation
    kept = None if wanted is None else [name for name in wanted if name in names]
    return SpeculationSetting(drafters=kept, max_nodes=most)


def live(case: dict) -> list:
    """Carry out the actions; returns the requests that ran to their end. Memory is for one full row, or more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "_pool_blocks", lambda *_: case["blocks"])
        target = native_beds.target(max_context=CONTEXT)
        # One chunk of a prompt in every step, so that they lie between passes and everything else that happens.
        patch.setattr(Pace, "chunk", lambda self, position, rest, seconds, most: case["chunk"] if seconds > 0 else 0)
        patch.setattr(reader_module, "CHUNK_S", 1e-9)
        patch.setattr(reader_module, "FEWEST_TOKENS", 1)
        return act(case, target)


def act(case: dict, target) -> list:
    controller = (Adaptive if case["adaptive"] else Fixed)(case["nodes"], case["shape"])
    used = [make_drafter(name) for name in case["drafters"]]
    made = beds.engine(target, used, controller=controller, max_batch=case["max_batch"], keep_prefixes=2)
    requests, names, changes = [], made.drafting.names, 0
    for index, (kind, *rest) in enumerate(case["actions"]):
        if kind == "new":
            requests.append(made.add(rest[0], SamplingParams(seed=index, **rest[1]), speculation=said(rest[2], names)))
        elif kind == "again" and requests:
            row = requests[rest[0] % len(requests)].answers[0].row
            prompt = ([*row.tokens[: 1 + rest[1]], *rest[2]])[: CONTEXT - 1]
            requests.append(made.add(prompt, SamplingParams(seed=index, **rest[3])))
        elif kind == "steps":
            for _ in range(rest[0]):
                made.step()
        elif kind == "cancel" and requests:
            made.cancel(requests[rest[0] % len(requests)])
        elif kind == "set":
            wanted = dict(rest[0])
            if wanted.get("drafters") is not None:
                wanted["drafters"] = [name for name in wanted["drafters"] if name in names]
            made.configure(**wanted)
            changes += 1
        elif kind == "previous" and changes:
            made.previous()
            changes -= 1
        elif kind == "forget":
            made.forget()
    made.run(requests)
    made.forget()
    assert target.free_slots == 8
    assert target.memory_bytes()["kv_used"] == 0
    return [request for request in requests if request.answers[-1].finish_reason != "cancelled"]


def check(case: dict) -> None:
    """Every answer equals the plain one of a fresh engine."""
    fresh = native_beds.target(max_context=CONTEXT)
    for request in live(case):
        plain = beds.engine(fresh, keep_prefixes=0)
        again = plain.run([plain.add(request.prompt_token_ids, request.params)])[0]
        for one, other in zip(request.answers, again.outputs, strict=True):
            if one.finish_reason != "cancelled":
                assert one.row.output == other.token_ids


@pytest.fixture(autouse=True, scope="module")
def checked():
    """The cache asserts its block counts around every pass."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPSTREAM_DEBUG", "1")
        yield


@seed(1)
@settings(max_examples=60)
@given(case=cases)
def test_a_long_life_changes_no_answer(case):
    check(case)


@pytest.mark.full
@seed(2)
@settings(max_examples=800)
@given(case=cases)
def test_a_long_life_changes_no_answer_many_times(case):
    check(case)


def test_a_model_that_drafts_for_itself_shares_its_weights():
    """Two targets over the same weights, each with its own cache: every draft stands."""
    target = native_beds.target(max_context=CONTEXT)
    own = target.share(100, 3)
    assert own._weights.layers is target._weights.layers
    assert (own.max_context, own.free_slots, target.free_slots) == (100, 3, 8)
    output = beds.answer(beds.engine(target, [SmallModel(own, VOCABULARY)], 4), [1, 2, 3], max_tokens=80)
    assert output.speculation.draft_acceptance_rate == 1.0
    plain = beds.answer(beds.engine(native_beds.target(max_context=CONTEXT)), [1, 2, 3], max_tokens=80)
    assert output.token_ids == plain.token_ids


def test_planted_sharing_fault_is_found(monkeypatch):
    """A shared block is written without being copied first."""
    monkeypatch.setattr(BlockPool, "own", lambda self, block: block)
    monkeypatch.delenv("SLIPSTREAM_DEBUG")
    without_shrinking = settings(max_examples=150, phases=[Phase.generate])
    with pytest.raises(AssertionError):
        without_shrinking(seed(1)(given(case=cases)(check)))()
