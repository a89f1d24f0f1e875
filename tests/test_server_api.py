"""What the server answers: OpenAI's interface, equal to the model called directly."""

from __future__ import annotations

import pytest

import beds
import serve_beds as sb
from slipstream.server.reply import DONE

pytest.importorskip("fastapi", reason="the server needs the extra `serve`")
CHAT = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def world():
    """A running server and a plain model."""
    with pytest.MonkeyPatch.context() as patch:
        plain = sb.small(patch, draft="none")
        with sb.running(sb.small(patch), admin_key="admin") as server:
            yield server, plain


@pytest.fixture
def post(world):
    with world[0].client() as client:

        def send(path, status=200, **body):
            response = client.post(path, json=body)
            assert response.status_code == status, response.text
            return response

        yield send


def complete(post, **body):
    return post("/v1/completions", **body).json()


SHAPES = [
    {},
    {"temperature": 0.9, "seed": 5, "max_tokens": 40},
    {"temperature": 1.2, "seed": 5, "top_p": 0.8, "top_k": 20, "min_p": 0.02, "n": 3, "max_tokens": 30},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2, "max_tokens": 30},
    {"logit_bias": {"70": 5, "71": -100}, "max_tokens": 30},
    {"stop": ["e", "th"], "max_tokens": 60},
    {"stop_token_ids": [70, 71, 72], "min_tokens": 5, "max_tokens": 50},
    {"ignore_eos": True, "max_tokens": 80, "temperature": 1.5, "seed": 1},
    {"max_tokens": 0},
    {"max_tokens": 1},
    {"max_tokens": 5000},
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("fields", SHAPES, ids=lambda fields: "-".join(fields) or "nothing")
def test_answers_equal_the_model_called_directly_and_plainly(world, post, fields, stream):
    expected = world[1].generate("Hello Hello", sb.sampling(**fields))[0]
    asked = {"prompt": "Hello Hello", **fields}
    if stream:
        response = post("/v1/completions", stream=True, stream_options={"include_usage": True}, **asked)
        chunks = sb.events(response)
        found, usage = sb.texts(chunks[:-1]), chunks[-1]["usage"]
        reasons = {c["index"]: c["finish_reason"] for e in chunks for c in e["choices"] if c["finish_reason"]}
    else:
        answer = complete(post, **asked)
        found, usage = {c["index"]: c["text"] for c in answer["choices"]}, answer["usage"]
        reasons = {c["index"]: c["finish_reason"] for c in answer["choices"]}
    assert found == {output.index: output.text for output in expected.outputs}
    assert reasons == {output.index: output.finish_reason for output in expected.outputs}
    assert {name: usage[name] for name in expected.usage} == expected.usage


@pytest.mark.parametrize("fields", SHAPES[:4], ids=lambda fields: "-".join(fields) or "nothing")
def test_chat_equals_the_model_called_directly(world, post, fields):
    fields = {"max_tokens": 20, **fields}
    expected = world[1].chat(CHAT, sb.sampling(**fields))[0]
    answer = post("/v1/chat/completions", messages=CHAT, **fields).json()
    assert [c["message"]["content"] for c in answer["choices"]] == [output.text for output in expected.outputs]
    assert [c["seed"] for c in answer["choices"]] == [
        output.seed for output in expected.outputs
    ] or "seed" not in fields
    chunks = sb.events(post("/v1/chat/completions", messages=CHAT, stream=True, **fields))
    assert sb.texts(chunks) == {output.index: output.text for output in expected.outputs}


def test_the_shape_of_a_completion(world, post):
    answer = complete(post, prompt="Hello", model="small", max_tokens=4, user="me")
    assert set(answer) == {
        "id", "object", "created", "model", "system_fingerprint", "choices", "usage", "speculative_decoding",
    }  # fmt: skip
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", "small")
    assert answer["system_fingerprint"] == world[0].served.fingerprint
    choice = answer["choices"][0]
    assert set(choice) == {"index", "text", "logprobs", "finish_reason", "seed", "stop_reason"}
    assert answer["usage"] == {
        "prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9,
        "prompt_tokens_details": answer["usage"]["prompt_tokens_details"],
    }  # fmt: skip
    needed = {
        "mean_acceptance_length", "draft_acceptance_rate", "num_draft_tokens", "num_accepted_draft_tokens",
        "num_spec_steps", "acceptance_histogram", "speedup_estimate",
    }  # fmt: skip
    assert needed <= set(answer["speculative_decoding"])
    assert answer["speculative_decoding"]["decode_s"] > 0


def test_the_shape_of_a_chat_stream(post):
    response = post("/v1/chat/completions", messages=CHAT, stream=True, n=2, seed=1, temperature=1, max_tokens=9)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.encode().endswith(DONE)
    chunks = sb.events(response)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    for index in (0, 1):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert (own[-1]["delta"], own[-1]["finish_reason"]) == ({}, "length")
        assert {choice["finish_reason"] for choice in own[:-1]} == {None}
        assert all(set(choice["delta"]) == {"content"} for choice in own[1:-1])
    assert not any("usage" in chunk for chunk in chunks)
    told = sb.events(post("/v1/chat/completions", messages=CHAT, stream=True, stream_options={"include_usage": True}))
    assert told[-1]["choices"] == []
    assert told[-1]["usage"]["completion_tokens"] > 0
    assert [chunk["usage"] for chunk in told[:-1]] == [None] * (len(told) - 1)


def test_several_prompts_of_every_kind(world, post):
    ids = [[1, 2, 3], [4, 5]]
    answer = complete(post, prompt=["Hello", "You"], n=2, seed=7, temperature=1.0)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    expected = world[1].generate(["Hello", "You"], sb.sampling(n=2, seed=7, temperature=1.0))
    assert [c["text"] for c in answer["choices"]] == [output.text for result in expected for output in result.outputs]
    by_ids = complete(post, prompt=ids)
    assert [c["text"] for c in by_ids["choices"]] == [complete(post, prompt=one)["choices"][0]["text"] for one in ids]
    streamed = sb.events(post("/v1/completions", prompt=["Hello", "You"], n=2, seed=7, temperature=1.0, stream=True))
    assert sb.texts(streamed) == {choice["index"]: choice["text"] for choice in answer["choices"]}


def test_null_means_default(post):
    fields = (
        "max_tokens", "temperature", "top_p", "n", "stream", "stream_options", "logprobs", "echo", "stop", "user",
        "presence_penalty", "frequency_penalty", "logit_bias", "seed", "top_k", "min_p", "repetition_penalty",
        "ignore_eos", "min_tokens", "stop_token_ids", "speculation", "response_format", "model", "best_of", "suffix",
    )  # fmt: skip
    plain = complete(post, prompt="Hello")["choices"][0]["text"]
    assert complete(post, prompt="Hello", **dict.fromkeys(fields))["choices"][0]["text"] == plain
    assert complete(post, prompt="Hello", logit_bias={}, stop=[])["choices"][0]["text"] == plain
    assert len(plain) <= 16
    chat = ("max_completion_tokens", "top_logprobs", "tools", "tool_choice", "functions", "chat_template_kwargs")
    post("/v1/chat/completions", messages=CHAT, tools=[], **dict.fromkeys(set(chat) - {"tools"}))


def test_whole_numbers_with_a_point_are_whole(post):
    ids = complete(post, prompt=[5, 6, 7], max_tokens=4)["choices"][0]["text"]
    assert complete(post, prompt=[5.0, 6, 7.0], max_tokens=4.0)["choices"][0]["text"] == ids


def test_min_tokens_beyond_max_tokens_is_a_full_answer(post):
    ends = {"stop": ["e", "a", "o"], "prompt": "Hello", "seed": 2, "temperature": 1.0}
    assert complete(post, max_tokens=10, **ends)["usage"]["completion_tokens"] < 10
    for fields in ({"max_tokens": 10, "min_tokens": 50}, {"max_tokens": 10, "min_tokens": 10}):
        assert complete(post, **fields, **ends)["usage"]["completion_tokens"] == 10


def test_echo(post):
    plain = complete(post, prompt="Hello", n=2)["choices"]
    for prompt in ("Hello", [beds.SmallFile().tokenizer().encode("Hello")]):
        echoed = complete(post, prompt=prompt, echo=True, n=2)["choices"]
        assert [choice["text"] for choice in echoed] == ["Hello" + choice["text"] for choice in plain]
        chunks = sb.events(post("/v1/completions", prompt=prompt, echo=True, n=2, stream=True))
        assert list(sb.texts(chunks).values()) == [choice["text"] for choice in echoed]
    assert complete(post, prompt="Hello", echo=True, max_tokens=0)["choices"][0]["text"] == "Hello"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_logprobs_of_completions(world, post, stream):
    asked = {"prompt": "Hello", "logprobs": 2, "max_tokens": 25, "stream": stream, "temperature": 1.3, "seed": 4}
    response = post("/v1/completions", **asked)
    parts = sb.events(response) if stream else [response.json()]
    entries = [chunk["choices"][0]["logprobs"] for chunk in parts if chunk["choices"][0]["logprobs"]]
    found = {name: [value for entry in entries for value in entry[name]] for name in entries[0]}
    expected = world[1].generate("Hello", sb.sampling(logprobs=2, max_tokens=25, temperature=1.3, seed=4))[0].outputs[0]
    assert found["token_logprobs"] == [entry.logprob for entry in expected.logprobs]
    assert "".join(found["tokens"]).removesuffix("<e>") == expected.text
    assert all(token in top for token, top in zip(found["tokens"], found["top_logprobs"], strict=True))
    assert {len(top) for top in found["top_logprobs"]} <= {2, 3}
    ends = zip(found["text_offset"], found["tokens"], strict=True)
    assert all(expected.text[at : at + len(token)] == token for at, token in ends if token != "<e>")
    assert complete(post, prompt="Hello", logprobs=0)["choices"][0]["logprobs"]["top_logprobs"] is None


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_logprobs_of_chats(world, post, stream):
    response = post("/v1/chat/completions", messages=CHAT, logprobs=True, top_logprobs=3, max_tokens=12, stream=stream)
    parts = sb.events(response) if stream else [response.json()]
    found = [entry for chunk in parts for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    expected = world[1].chat(CHAT, sb.sampling(logprobs=3, max_tokens=12))[0].outputs[0]
    assert [entry["logprob"] for entry in found] == [entry.logprob for entry in expected.logprobs]
    assert bytes(byte for entry in found for byte in entry["bytes"]).decode() == "".join(e["token"] for e in found)
    for entry in found:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)


def test_the_seed_that_was_used_gives_the_answer_again(post):
    first = complete(post, prompt="Hello", temperature=1.0, n=2)["choices"]
    assert first[0]["seed"] != first[1]["seed"]
    for choice in first:
        again = complete(post, prompt="Hello", temperature=1.0, seed=choice["seed"])["choices"][0]
        assert again["text"] == choice["text"]
    assert complete(post, prompt="Hello", seed=-1)["choices"][0]["seed"] == 2**64 - 1


def test_speculation_can_be_set_by_request(world, post):
    asked = {"prompt": "aaaa", "max_tokens": 40, "ignore_eos": True}
    free = complete(post, **asked)
    settings = [
        (False, set()),
        ({"max_nodes": 0}, set()),
        ({"drafter": "none"}, set()),
        ({"drafter": "suffix", "max_nodes": 1}, {"suffix"}),
        ({"drafter": ["recycling"]}, {"recycling"}),
        ({"drafter": "auto"}, {"suffix", "recycling"}),
        ({"drafter": None, "max_nodes": None}, {"suffix", "recycling"}),
        (True, {"suffix", "recycling"}),
    ]
    for setting, drafters in settings:
        answer = complete(post, speculation=setting, **asked)
        assert answer["choices"][0]["text"] == free["choices"][0]["text"]
        assert set(answer["speculative_decoding"]["drafted_by_source"]) <= drafters, setting
        if "suffix" in drafters or not drafters:  # what the successor table knows depends on earlier requests
            assert bool(answer["speculative_decoding"]["num_draft_tokens"]) == bool(drafters), setting
    error = post("/v1/completions", 400, speculation={"drafter": "magic"}, **asked).json()["error"]
    assert error["param"] == "speculation"
    assert "loaded: grammar, suffix, recycling" in error["message"]


def test_sources_of_a_stream_tell_who_drafted(world, post):
    asked = {"prompt": "aaaa", "max_tokens": 60, "ignore_eos": True, "include_sources": True}
    chunks = [chunk["choices"][0] for chunk in sb.events(post("/v1/completions", stream=True, **asked))]
    whole = complete(post, **asked)["choices"][0]
    assert [token for chunk in chunks for token in chunk["token_ids"]] == whole["token_ids"]
    assert len(whole["sources"]) == len(whole["token_ids"])
    assert {chunk["source"] for chunk in chunks if chunk["token_ids"]} > {""}
    text = "".join(chunk["text"] for chunk in chunks)
    assert text == whole["text"] == world[1].tokenizer.decode(whole["token_ids"])


def test_unknown_fields_are_accepted_and_named(post):
    response = post("/v1/completions", prompt="Hello", metadata={"a": 1}, **{"bänk\n": 2})
    assert response.headers["x-slipstream-warning"].endswith(": 'b\\xe4nk\\n', metadata")
    for name in ("", " ", "a b", "\x00", "😀", "x" * 500):
        response = post("/v1/completions", prompt="Hello", **{name: 2})
        assert response.headers["x-slipstream-warning"]
    assert "x-slipstream-warning" not in post("/v1/completions", prompt="Hello", user="me").headers
    stream = post("/v1/chat/completions", messages=CHAT, stream=True, store=True)
    assert stream.headers["x-slipstream-warning"].endswith(": store")


def test_messages_in_parts_and_the_developer_role(world, post):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    by_parts = post("/v1/chat/completions", messages=[{"role": "user", "content": parts}], max_tokens=9).json()
    whole = post("/v1/chat/completions", messages=CHAT, max_tokens=9).json()
    assert by_parts["choices"] == [{**whole["choices"][0], "seed": by_parts["choices"][0]["seed"]}]
    answers = [
        post("/v1/chat/completions", messages=[{"role": role, "content": "Be brief"}, *CHAT], max_tokens=9).json()
        for role in ("system", "developer", "user")
    ]
    contents = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert contents[0] == contents[1]
    assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]
    assert answers[1]["usage"]["prompt_tokens"] != answers[2]["usage"]["prompt_tokens"]
    empty = [{"role": "assistant", "content": None}, {"role": "assistant"}, *CHAT]
    assert post("/v1/chat/completions", messages=empty, max_tokens=9).status_code == 200


def test_the_next_turn_of_a_chat_reads_only_what_is_new(world, post):
    talk = [{"role": "system", "content": "Be very brief and say nothing twice."}, *CHAT]
    first = post("/v1/chat/completions", messages=talk, max_tokens=9).json()
    before = world[0].metric("slipstream_cached_prompt_tokens_total")
    talk += [first["choices"][0]["message"], {"role": "user", "content": "And then?"}]
    second = post("/v1/chat/completions", messages=talk, max_tokens=9).json()
    kept = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert kept >= first["usage"]["prompt_tokens"] - 1, "the last token of a prompt is read by the first pass"
    assert second["usage"]["prompt_tokens"] > kept
    assert world[0].metric("slipstream_cached_prompt_tokens_total") == before + kept
    expected = world[1].chat(talk, sb.sampling(max_tokens=9))[0].outputs[0].text
    assert second["choices"][0]["message"]["content"] == expected


def test_models(world, post):
    with world[0].client() as client:
        listed = client.get("/v1/models").json()
        assert listed["object"] == "list"
        assert client.get("/v1/models/small").json() == listed["data"][0]
        assert listed["data"][0]["id"] == "small"
        missing = client.get("/v1/models/other/one")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
