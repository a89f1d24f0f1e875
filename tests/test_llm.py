"""LLM on a small fake model: what it builds, accepts and refuses."""

from __future__ import annotations

import threading

import pytest

import beds
import slipstream
from slipstream import LLM, ContextLengthError, InputError, ModelError, NonFiniteError, SamplingParams, UnsupportedError
from slipstream import build as build_module


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Every model name is the small model; the list names the settings each target was loaded with."""
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "home"))
    loads = []

    def load(file, max_context, slots, threads, *_):
        loads.append({"max_context": max_context, "slots": slots, "threads": threads})
        return file.target(max_context=max_context or file.config.max_context, slots=slots)

    monkeypatch.setattr(build_module, "open_named", lambda name: beds.SmallFile())
    monkeypatch.setattr(build_module, "load_target", load)
    return loads


def test_prompts_of_every_kind(small):
    with LLM("small") as llm:
        one = llm.generate("Hello", SamplingParams(max_tokens=5))
        assert len(one) == 1
        assert one[0].prompt == "Hello"
        ids = llm.generate({"prompt_token_ids": llm.tokenizer.encode("Hello")}, SamplingParams(max_tokens=5))
        assert ids[0].outputs[0].text == one[0].outputs[0].text
        many = llm.generate(["Hello", "You", "Hello"], SamplingParams(max_tokens=5))
        assert [result.prompt for result in many] == ["Hello", "You", "Hello"]
        assert many[0].outputs[0].text == many[2].outputs[0].text == one[0].outputs[0].text
        each = llm.generate(["Hello", "Hello"], [SamplingParams(max_tokens=2), SamplingParams(max_tokens=3)])
        assert [len(result.outputs[0].token_ids) for result in each] == [2, 3]
        assert len(llm.generate("Hello")[0].outputs[0].token_ids) > 5
        assert llm.generate([]) == []
        assert "small (table, F32" in llm.describe()


def test_chat_uses_the_template_and_takes_lists(small):
    with LLM("small") as llm:
        messages = [{"role": "user", "content": "Hi <a> there"}]
        result = llm.chat(messages, SamplingParams(max_tokens=4))[0]
        assert result.prompt == "<s>user: Hi <a> there\n<a>"
        assert result.prompt_token_ids.count(97) == 1, "control text inside a message stays text"
        two = llm.chat([messages, messages], SamplingParams(max_tokens=4))
        assert [each.outputs[0].text for each in two] == [result.outputs[0].text] * 2


def test_streams_join_to_the_answer(small):
    with LLM("small", draft="lookup,suffix") as llm:
        params = SamplingParams(max_tokens=40, temperature=1.0, seed=3)
        for prompt in ("Hello", [{"role": "user", "content": "Hello"}], {"prompt_token_ids": [1, 2, 3]}):
            whole = (llm.chat if isinstance(prompt, list) else llm.generate)(prompt, params)[0].outputs[0]
            pieces = list(llm.stream(prompt, params))
            assert "".join(piece.text for piece in pieces) == whole.text
            assert "".join(text for index, text, token_ids, finish_reason in pieces) == whole.text
            plain = list(llm.stream(prompt, params, speculation=False))
            assert [t for piece in plain for t in piece.token_ids] == whole.token_ids
            assert {source for piece in plain for source in piece.sources} == {""}


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("controller", ["fixed", "adaptive"])
@pytest.mark.parametrize("draft", ["none", "auto", "lookup", "suffix", "model:small", "model:small,lookup"])
def test_settings_do_not_change_the_answer(small, draft, controller, shape):
    with LLM("small", draft="none") as llm:
        expected = llm.generate(["aaaa", "Hello Hello"], SamplingParams(max_tokens=60, temperature=0.6, seed=2))
    with LLM("small", draft=draft, controller=controller, shape=shape, max_nodes=5) as llm:
        found = llm.generate(["aaaa", "Hello Hello"], SamplingParams(max_tokens=60, temperature=0.6, seed=2))
        stats = [result.outputs[0].speculation for result in found]
    assert [r.outputs[0].token_ids for r in found] == [r.outputs[0].token_ids for r in expected]
    assert all(each.drafter_failures == 0 for each in stats)
    if draft == "model:small" and controller == "fixed" and shape == "chain":
        assert [each.draft_acceptance_rate for each in stats] == [1.0, 1.0]


def test_no_nodes_is_plain_decoding(small):
    for controller in ("fixed", "adaptive"):
        with LLM("small", max_nodes=0, controller=controller) as llm:
            stats = llm.generate("aaaa", SamplingParams(max_tokens=9))[0].outputs[0].speculation
        assert (stats.num_steps, stats.num_spec_steps) == (9, 0)


def test_settings_reach_the_runtime(small):
    LLM("small", draft="model:other", max_context=100, max_batch=2, threads=1).close()
    assert small == [{"max_context": 100, "slots": 6, "threads": 1}], "the same weights are loaded once"


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"draft": "magic"}, InputError, "unknown drafter 'magic'"),
        ({"draft": None}, InputError, "draft is None; it must be a text"),
        ({"draft": "head"}, InputError, "head:PATH"),
        ({"verifier": "magic"}, InputError, "unknown verifier 'magic'"),
        ({"controller": "magic"}, InputError, "unknown controller 'magic'"),
        ({"shape": "ring"}, InputError, "shape"),
        ({"max_nodes": -1}, InputError, "max_nodes is -1"),
        ({"threads": 0}, InputError, "threads is 0"),
        ({"max_batch": 0}, InputError, "max_batch is 0"),
        ({"verifier": "block", "shape": "tree"}, UnsupportedError, "chains only"),
        ({"verifier": "rejection", "draft": "lookup,model:x"}, UnsupportedError, "one drafter alone"),
        ({"draft": "suffix", "draft_model": "x"}, InputError, "draft_model is 'x'"),
    ],
)
def test_fault_24_wrong_settings_are_refused_before_anything_is_opened(monkeypatch, settings, error, message):
    def open_named(name):
        raise AssertionError("a model was opened")

    monkeypatch.setattr(build_module, "open_named", open_named)
    with pytest.raises(error, match=message):
        LLM("small", **settings)


def test_unknown_settings_are_refused(small):
    with pytest.raises(TypeError, match="speed"):
        LLM("small", speed=11)


def test_fault_24_a_bad_model_fails_at_start():
    with pytest.raises(ModelError, match="name is empty"):
        LLM("")
    with pytest.raises(ModelError, match="no such file"):
        LLM("./nowhere/model.gguf")
    with pytest.raises(ModelError, match="smollm3"):
        LLM("smollm3")


def test_fault_14_vocabularies_that_differ_are_refused_by_classical_verifiers(small, monkeypatch):
    other = beds.SmallFile()
    other.name = "other"
    other.tokenizer().pieces[5] = b"five"
    monkeypatch.setattr(build_module, "open_named", lambda name: other if name == "other" else beds.SmallFile())
    with pytest.raises(InputError, match=r"token 5 .*'five' in draft model other"):
        LLM("small", draft="model:other", verifier="rejection", shape="chain")
    assert small == [], "refused before weights are read"


def test_fault_14_vocabularies_that_differ_are_translated_with_a_notice(small, monkeypatch, caplog):
    other = beds.SmallFile()
    other.name = "other"
    other.tokenizer().pieces[5] = b"five"
    monkeypatch.setattr(build_module, "open_named", lambda name: other if name == "other" else beds.SmallFile())
    with LLM("small", draft="none") as llm:
        plain = llm.generate("hello there", SamplingParams(max_tokens=30))
    with LLM("small", draft="model:other", controller="fixed") as llm:
        drafted = llm.generate("hello there", SamplingParams(max_tokens=30))
    assert drafted[0].outputs[0].token_ids == plain[0].outputs[0].token_ids
    assert drafted[0].outputs[0].speculation.drafted_by_source["model"] > 0
    assert drafted[0].outputs[0].speculation.drafter_failures == 0
    assert "other and small have different vocabularies" in caplog.text


def test_the_recycling_table_is_kept_from_one_run_to_the_next(small, tmp_path):
    path = tmp_path / "table.npz"
    for _ in range(2):
        with LLM("small", draft="recycling", recycling_table=path) as llm:
            llm.generate("hello there", SamplingParams(max_tokens=30))
        assert path.exists()
    with pytest.raises(InputError, match="add recycling"):
        LLM("small", draft="suffix", recycling_table=path)


@pytest.mark.parametrize(
    ("prompt", "message"), [(3, "a prompt is 3"), ({"text": "x"}, "a prompt is"), ([1, 2], "a prompt is 1")]
)
def test_wrong_prompts(small, prompt, message):
    with LLM("small") as llm, pytest.raises(InputError, match=message):
        llm.generate(prompt)


def test_wrong_calls_leave_nothing_behind(small):
    with LLM("small") as llm:
        with pytest.raises(ContextLengthError, match="500 tokens"):
            llm.generate(["fine", "x" * 500])
        with pytest.raises(InputError, match="2 prompts came with 1"):
            llm.generate(["a", "b"], [SamplingParams()])
        with pytest.raises(InputError, match="must be SamplingParams"):
            llm.generate("a", {"max_tokens": 3})
        with pytest.raises(InputError, match="messages"):
            llm.chat([])
        with pytest.raises(InputError, match="messages must be a list"):
            llm.chat({"role": "user", "content": "a"})
        for wrong in (None, 5, "ab", [1.5], ["1"]):
            with pytest.raises(InputError, match="must be a list of whole numbers"):
                llm.generate({"prompt_token_ids": wrong})
        assert llm._engine.idle
    with pytest.raises(InputError, match="closed"):
        llm.generate("a")


def test_a_stream_that_is_dropped_cancels(small):
    """Before its first piece, after it, or closed; what is queued otherwise stays."""
    with LLM("small") as llm:
        for taken in range(3):
            stream = llm.stream("Hello")
            for _ in range(taken):
                next(stream)
            assert not llm._engine.idle
            del stream
            assert llm._engine.idle
        llm.stream("Hello").close()
        assert llm._engine.idle
        assert [piece.token_ids for piece in llm.stream("Hello", SamplingParams(max_tokens=0))] == [[]]


def test_a_failing_answer_raises_alone_and_is_marked_among_others(small, monkeypatch):
    whole = beds.SmallFile.target

    def broken(self, **settings):
        target = whole(self, **settings)
        target.table[self.tokenizer().encode("!")] = float("nan")
        return target

    monkeypatch.setattr(beds.SmallFile, "target", broken)
    with LLM("small") as llm:
        with pytest.raises(NonFiniteError, match="NaN"):
            llm.generate("wow!")
        with pytest.raises(NonFiniteError, match="NaN"):
            list(llm.stream("wow!"))
        results = llm.generate(["wow!", "wow"], SamplingParams(max_tokens=1))
        assert [result.outputs[0].finish_reason for result in results] == ["error", "length"]


def test_a_worker_answers_as_generate_does_and_drafters_can_be_loaded_anew(small):
    params = SamplingParams(max_tokens=30)
    with LLM("small", draft="suffix,model:small") as llm:
        assert llm.drafters == ("grammar", "suffix", "model")
        expected = llm.generate("Hello", params, speculation=False)[0].outputs[0].token_ids
        worker, ended = llm.worker(max_waiting=2), threading.Event()
        worker.start()
        request = worker.submit(llm.encode("Hello")[1], params, listener=lambda _, news: news is None and ended.set())
        llm.reload("model")
        assert ended.wait(20)
        assert request.answers[0].row.output == expected
        worker.stop()
        assert len(small) == 1, "the same weights are loaded once"
        assert llm.generate("Hello", params)[0].outputs[0].token_ids == expected
        with pytest.raises(InputError, match="drafter 'lookup' is not loaded; loaded: grammar, suffix, model"):
            llm.reload("lookup")


def test_public_names():
    assert set(slipstream.__all__) == {
        "LLM", "CompletionOutput", "ContextLengthError", "InputError", "ModelError", "NonFiniteError", "Piece",
        "RequestOutput", "SamplingParams", "SlipstreamError", "Speculation", "Timing", "TokenLogprob",
        "UnsupportedError", "__version__",
    }  # fmt: skip
    for name in slipstream.__all__:
        assert getattr(slipstream, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = slipstream.nothing
