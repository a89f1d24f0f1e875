"""The description of the interface, and schemathesis trying it out: what it allows is answered, all else refused."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

import beds
import serve_beds as sb

pytest.importorskip("fastapi", reason="the server needs the extra `serve`")
from slipstream.server.openapi import below


class AnyText(beds.SmallFile):
    """The small model, whose tokenizer takes any text: what it has no token for is a question mark.

    How many tokens a text has is the one limit that the description cannot state: all that is tried fits in here.
    """

    def tokenizer(self) -> beds.Pieces:
        plain = self._tokenizer
        if not hasattr(plain, "strict"):
            plain.strict = plain.encode
            plain.encode = lambda text, add_special=False: plain.strict(re.sub(r"[^\n -~]", "?", text), add_special)
        return plain


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch, sb.running(sb.small(patch)) as made:
        yield made


def test_the_description_knows_the_model(server):
    with server.client() as client:
        schemas = client.get("/openapi.json").json()["components"]["schemas"]
    tokens = schemas["CompletionRequest"]["properties"]["stop_token_ids"]["anyOf"][0]["items"]
    assert tokens["maximum"] == 98
    names = schemas["SpeculationOption"]["properties"]["drafter"]["anyOf"][0]["enum"]
    assert names == ["grammar", "suffix", "recycling"]
    assert "HTTPValidationError" not in schemas


def test_the_description_knows_how_long_prompts_and_answers_may_be(monkeypatch):
    with sb.running(sb.small(monkeypatch), max_tokens=20) as server, server.client() as client:
        found = client.get("/openapi.json").json()
        schema = found["components"]["schemas"]
        ids = {"prompt": [5] * (sb.CONTEXT - 1)}
        assert client.post("/v1/completions", json=ids).status_code == 200
        assert client.post("/v1/completions", json={"prompt": [5] * sb.CONTEXT}).status_code == 400
        for path, name in (("completions", "max_tokens"), ("chat/completions", "max_completion_tokens")):
            prompt = {"prompt": "Hello", "messages": [{"role": "user", "content": "Hello"}]}
            for count, status in ((20, 200), (21, 400)):
                body = {**prompt, "max_tokens": 3, name: count}
                assert client.post(f"/v1/{path}", json=body).status_code == status, body
    prompts = schema["CompletionRequest"]["properties"]["prompt"]["anyOf"]
    lists = [each for each in prompts if each.get("title") == "PromptTokens"]
    lists += [each["items"] for each in prompts if each.get("items", {}).get("title") == "PromptTokens"]
    assert [each["maxItems"] for each in lists] == [sb.CONTEXT - 1] * 2
    for name in ("max_tokens", "max_completion_tokens"):
        assert schema["ChatRequest"]["properties"][name]["anyOf"][0]["maximum"] == 20
    said = found["paths"]["/v1/chat/completions"]["post"]["responses"]["400"]["description"]
    assert f"more than {sb.CONTEXT - 1} tokens" in said


@pytest.mark.parametrize("size", [1, 2, 9, 10, 11, 20, 99, 100, 101, 256, 1000, 4567])
def test_a_pattern_of_the_numbers_below(size):
    pattern = re.compile(below(size))
    assert [bool(pattern.search(str(number))) for number in range(3 * size + 5)] == [True] * size + [False] * (
        2 * size + 5
    )


@pytest.mark.full
@pytest.mark.skipif(find_spec("schemathesis") is None, reason="schemathesis is not installed (extra `reference`)")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("key", [None, "secret"])
def test_schemathesis_finds_nothing(monkeypatch, key, tmp_path):
    monkeypatch.setattr(beds, "SmallFile", AnyText)
    monkeypatch.setattr(sb, "CONTEXT", 100_000)
    with sb.running(sb.small(monkeypatch), api_key=key, max_tokens=40) as server:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "-n", "60"]
        header = ["-H", f"Authorization: Bearer {key}"] if key else []
        result = subprocess.run([*command, *header], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
        with server.client(key) as client:
            assert client.post("/v1/completions", json={"prompt": "Hello"}).status_code == 200
