"""The official `openai` client against the server."""

from __future__ import annotations

import json

import httpx
import pytest

import serve_beds as sb

openai = pytest.importorskip("openai", reason="the official client is not installed")
pytest.importorskip("fastapi", reason="the server needs the extra `serve`")
HI = [{"role": "user", "content": "Hello"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch, sb.running(sb.small(patch), api_key="secret") as made:
        yield made


@pytest.fixture(scope="module")
def client(server):
    plain = httpx.Client(trust_env=False, timeout=30)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0, http_client=plain) as made:
        yield made


def test_chat(client):
    answer = client.chat.completions.create(
        model="small", messages=HI, max_completion_tokens=20, n=2, temperature=0.8, seed=3, logprobs=True,
        top_logprobs=2, stop=["zzz"], presence_penalty=0.1, frequency_penalty=0.1, logit_bias={"70": 1}, user="me",
    )  # fmt: skip
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    tokens = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in tokens).removesuffix("<e>") == answer.choices[0].message.content
    assert len(tokens[0].top_logprobs) == 2
    assert answer.system_fingerprint
    assert answer.model_extra["speculative_decoding"]["num_steps"] > 0


def test_chat_streams_as_it_answers(client):
    asked = {"model": "small", "messages": HI, "max_tokens": 40, "n": 2, "temperature": 1.0, "seed": 5}
    whole = client.chat.completions.create(**asked)
    texts, reasons = ["", ""], [None, None]
    stream = client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked)
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        usage = chunk.usage
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_the_streaming_helper_builds_the_same_answer(client):
    asked = {"model": "small", "messages": HI, "max_tokens": 300, "temperature": 1.0, "seed": 5, "stop": ["a", "e"]}
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        built = stream.get_final_completion()
    whole = client.chat.completions.create(**asked)
    assert built.choices[0].message.content == whole.choices[0].message.content
    assert built.choices[0].finish_reason == whole.choices[0].finish_reason


def test_completions(client):
    asked = {
        "model": "small",
        "prompt": ["Hello", "You"],
        "max_tokens": 20,
        "temperature": 1.0,
        "seed": 5,
        "echo": True,
    }
    whole = client.completions.create(**asked)
    texts = ["", ""]
    for chunk in client.completions.create(stream=True, **asked):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    assert texts[0].startswith("Hello")
    scored = client.completions.create(model="small", prompt="Hello", max_tokens=3, logprobs=2)
    assert len(scored.choices[0].logprobs.token_logprobs) == 3


def test_json_answers(client):
    pytest.importorskip("llguidance", reason="JSON answers need the extra `serve`")
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    for stream in (False, True):
        for format in (schema, {"type": "json_object"}):
            asked = {"model": "small", "messages": HI, "max_tokens": 300, "response_format": format, "seed": 2}
            answer = client.chat.completions.create(stream=stream, temperature=0.8, **asked)
            if stream:
                text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
            else:
                text = answer.choices[0].message.content
            found = json.loads(text)
            assert isinstance(found, dict)
            if format is schema:
                assert set(found) == {"name", "age"}
                assert isinstance(found["age"], int)


def test_models(client):
    assert [model.id for model in client.models.list()] == ["small"]
    assert client.models.retrieve("small").owned_by == "slipstream"


def test_errors_have_their_classes(server, client):
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-5", messages=HI)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="small", messages=HI, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="small", prompt="x" * 500, stream=True)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as schema:
        client.chat.completions.create(
            model="small", messages=HI,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "king"}}},
        )  # fmt: skip
    assert schema.value.param == "response_format"
    wrong = openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="x", max_retries=0, http_client=httpx.Client(trust_env=False)
    )
    with wrong, pytest.raises(openai.AuthenticationError):
        wrong.models.list()


def test_extra_fields_reach_the_server(client):
    raw = client.chat.completions.with_raw_response.create(
        model="small", messages=HI, max_tokens=20, extra_body={"speculation": False, "top_k": 5, "magic": 1}
    )
    assert raw.headers["x-slipstream-warning"].endswith(": magic")
    assert raw.parse().model_extra["speculative_decoding"]["num_draft_tokens"] == 0


def test_the_asynchronous_client(server):
    import asyncio

    async def ask() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
            asked = {"model": "small", "messages": HI, "max_tokens": 20}
            whole = await client.chat.completions.create(**asked)
            stream = await client.chat.completions.create(stream=True, **asked)
            parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return whole.choices[0].message.content, "".join(parts)

    whole, streamed = asyncio.run(ask())
    assert whole == streamed
