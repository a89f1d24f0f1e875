"""What the server refuses, and how: always JSON, always before any work, and never with harm to the next request."""

from __future__ import annotations

import json
import socket

import pytest

import serve_beds as sb

pytest.importorskip("fastapi", reason="the server needs the extra `serve`")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch, sb.running(sb.small(patch), max_body=20_000, max_tokens=300) as made:
        yield made


@pytest.fixture(scope="module")
def client(server):
    with server.client() as made:
        yield made


def error_of(response, status):
    """The error object, whose shape never differs."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


HUGE = 10**400
BAD = [
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, 2.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [99]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [HUGE]}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": ["x"] * 129}, "prompt"),
    ({"prompt": ["x"] * 65, "n": 2}, "n"),
    ({"model": 5}, "model"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 301}, "max_tokens"),
    ({"max_tokens": HUGE}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": HUGE}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"5": None}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"seed": "1"}, "seed"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": 5}, "stream_options"),
    ({"stream_options": {"include_usage": 1}}, "stream_options"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"echo": "x"}, "echo"),
    ({"echo": True, "logprobs": 1}, "echo"),
    ({"best_of": 3}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"user": 7}, "user"),
    ({"speculation": "on"}, "speculation"),
    ({"speculation": {"drafter": "magic"}}, "speculation"),
    ({"speculation": {"max_nodes": -1}}, "speculation"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
    ({"response_format": "json"}, "response_format"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json": True}, "response_format": {"type": "json_object"}}, "structured_outputs"),
]
BAD_CHATS = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [5]}, "messages"),
    ({"messages": [{"content": "Hi"}]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "king", "content": "Hi"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"logprobs": 2}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"max_completion_tokens": 301}, "max_completion_tokens"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [*((COMPLETIONS, *bad) for bad in BAD), *((CHAT, *bad) for bad in BAD_CHATS)],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else str(value).rpartition("/")[2],
)
def test_a_bad_field_is_a_400_that_names_it_and_the_next_request_is_answered(client, path, fields, param, stream):
    body = {"prompt": "Hi"} if path == COMPLETIONS else {"messages": HI}
    body |= {"max_tokens": 3} if not any("max" in name for name in fields) else {}
    sent = {**body, "stream": stream, **fields}
    data = json.dumps(sent).encode()
    error = error_of(client.post(path, content=data, headers={"content-type": "application/json"}), 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", param), error
    assert client.post(path, json=body).status_code == 200


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b'"x"', b"null", b"5", b"{}", b'{"prompt": "Hi", "temperature": NaN}', b"\xff\xfe",
        b'{"prompt": "Hi", "temperature": Infinity}', b'{"prompt": "Hi", "temperature": 1e999}',
        b'{"prompt":' + b"[" * 9000 + b"]" * 9000 + b"}", b'{"prompt": "Hi", "seed": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda data: data[:20].decode("latin-1"),
)  # fmt: skip
def test_bodies_that_are_no_requests(client, data):
    error = error_of(client.post(COMPLETIONS, content=data, headers={"content-type": "application/json"}), 400)
    assert error["type"] == "invalid_request_error"


def test_a_body_without_its_type_is_refused(client):
    """Pages of other sites can only send bodies of other types without asking first."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", None):
        headers = {} if kind is None else {"content-type": kind}
        error = error_of(client.post(COMPLETIONS, content=b'{"prompt": "Hi"}', headers=headers), 400)
        assert "Content-Type: application/json" in error["message"]


POST = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n".encode()
NO_HTTP = {
    "a line": b"nonsense\r\n\r\n",
    "endless headers": b"GET / HTTP/1.1\r\nHost: a\r\nA: " + b"b" * 100_000,
    "chunks": POST + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
    "behind a request": b"GET /health HTTP/1.1\r\nHost: a\r\n\r\nnonsense\r\n\r\n",
}


@pytest.mark.parametrize("sent", NO_HTTP.values(), ids=NO_HTTP)
def test_what_is_no_http_is_refused_in_json_too(server, client, sent):
    with socket.create_connection(server.listener.getsockname(), timeout=10) as line:
        line.sendall(sent)
        replies = b"".join(iter(lambda: line.recv(65536), b"")).split(b"HTTP/1.1 ")[1:]
    head, _, body = replies.pop().partition(b"\r\n\r\n")
    assert head.startswith(b"400 Bad Request\r\ncontent-type: application/json\r\n")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert [reply[:3] for reply in replies] == [b"200"] * sent.startswith(b"GET /health")
    assert client.get("/health").status_code == 200


def test_what_is_not_there(client):
    for path in ("/", "/v1", "/v1/embeddings", "/v2/completions", "/admin/speculation", "/docs", "/v1/completions/"):
        if path == "/" and client.get(path).status_code == 200:
            continue
        error_of(client.get(path), 404)
    error = error_of(client.post(COMPLETIONS, json={"prompt": "Hi", "model": "gpt-5"}), 404)
    assert (error["type"], error["code"]) == ("invalid_request_error", "model_not_found")
    for method in ("GET", "PUT", "DELETE", "PATCH"):
        response = client.request(method, CHAT)
        assert error_of(response, 405)["code"] == "method_not_allowed"
        assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_has_its_own_code(client, stream):
    for path, body in (
        (COMPLETIONS, {"prompt": "x" * 400}),
        (COMPLETIONS, {"prompt": [[1], [5] * 400]}),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 400}]}),
    ):
        error = error_of(client.post(path, json={**body, "stream": stream}), 400)
        assert error["code"] == "context_length_exceeded"
        assert "400" in error["message"]
    assert client.post(COMPLETIONS, json={"prompt": "x" * 399}).json()["usage"]["completion_tokens"] == 1


def test_bodies_that_are_too_large(server, client):
    body = json.dumps({"prompt": "x" * 20_000}).encode()
    assert error_of(client.post(COMPLETIONS, content=body), 413)["code"] == "request_too_large"

    def in_chunks():
        for at in range(0, len(body), 1000):
            yield body[at : at + 1000]

    headers = {"content-type": "application/json"}
    assert error_of(client.post(COMPLETIONS, content=in_chunks(), headers=headers), 413)
    with socket.create_connection(server.listener.getsockname()) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
        assert raw.recv(1000).startswith(b"HTTP/1.1 413")
    small = json.dumps({"prompt": "x"}).encode()
    assert client.post(COMPLETIONS, content=iter([small[:5], small[5:]]), headers=headers).status_code == 200


def test_request_ids_are_taken_over_or_made(client):
    given = client.get("/health", headers={"x-request-id": "abc-123"})
    assert given.headers["x-request-id"] == "abc-123"
    made = {client.get("/nowhere").headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3
    for bad in ("a b", "x" * 200, ""):
        assert client.get("/health", headers={"x-request-id": bad}).headers["x-request-id"].startswith("req-")


@pytest.fixture(scope="module")
def guarded():
    with pytest.MonkeyPatch.context() as patch, sb.running(sb.small(patch), api_key="secret", admin_key="root") as made:
        yield made


def test_keys(guarded):
    body = {"prompt": "Hi", "max_tokens": 2}
    with guarded.client("secret") as client:
        assert client.post(COMPLETIONS, json=body).status_code == 200
        assert client.get("/v1/models").status_code == 200
        error_of(client.get("/admin/speculation"), 401)
    with guarded.client("root") as client:
        assert client.get("/admin/speculation").status_code == 200
        error_of(client.post(COMPLETIONS, json=body), 401)
    with guarded.client() as client:
        for path in ("/health", "/metrics"):
            assert client.get(path).status_code == 200
        for value in ("", "Bearer", "Bearer wrong", "Basic secret", "secret", "Bearer secret2", b"Bearer \xe9"):
            response = client.post(COMPLETIONS, json=body, headers={"authorization": value})
            assert error_of(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        error_of(client.get("/v1/nowhere"), 401)
        error_of(client.post(COMPLETIONS, content=b"{"), 401)


def test_admin_changes_what_is_drafted_and_goes_back(guarded):
    asked = {"prompt": "aaaa", "max_tokens": 30, "ignore_eos": True}
    with guarded.client("secret") as client, guarded.client("root") as admin:

        def drafted():
            answer = client.post(COMPLETIONS, json=asked).json()
            return answer["choices"][0]["text"], set(answer["speculative_decoding"]["drafted_by_source"])

        def change(status=200, **body):
            response = admin.post("/admin/speculation", json=body)
            return error_of(response, status) if status != 200 else response.json()

        text, sources = drafted()
        assert sources
        assert change(enabled=False)["in_use"] == []
        assert drafted() == (text, set())
        assert guarded.metric("slipstream_speculation_enabled") == 0
        assert change(rollback=True)["enabled"] is True
        assert change(drafters=["recycling"], max_nodes=2)["max_nodes"] == 2
        found, drafters = drafted()
        assert found == text
        assert drafters <= {"recycling"}
        assert change(reload="recycling")["drafters"] == ["recycling"]
        assert drafted()[0] == text
        change(rollback=True)
        assert change(rollback=True)["drafters"] is None
        assert drafted() == (text, sources)
        assert change(drafters=None, max_nodes=None, enabled=None)["enabled"] is True
        for bad, param in (
            ({"drafters": ["magic"]}, "drafters"),
            ({"reload": "magic"}, "reload"),
            ({"reload": ""}, "reload"),
            ({"enabled": 1}, "enabled"),
            ({"max_nodes": -1}, "max_nodes"),
            ({"rollback": True, "enabled": True}, "rollback"),
            ({"magic": 1}, "magic"),
        ):
            assert change(400, **bad)["param"] == param
        assert admin.get("/admin/speculation").json()["loaded"].keys() == {"suffix", "recycling", "grammar"}
