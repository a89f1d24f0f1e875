"""The command `slipstream serve` as a process, with SmolLM2: signals, warnings, and the lines of the documentation."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

import serve_beds as sb
from slipstream import LLM
from slipstream.cli import main
from slipstream.kernels import native
from slipstream.models.fingerprint import weights_fingerprint
from slipstream.sampling import noise

pytest.importorskip("fastapi", reason="the server needs the extra `serve`")
pytestmark = pytest.mark.model
DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "serving.md"
STORY = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True}


def test_sigterm_lets_a_stream_end():
    with sb.process() as server, httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        with client.stream("POST", "/v1/completions", json={**STORY, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            sb.wait_for(lambda: server.said("draining"))
            assert client.get("/health").json()["error"]["code"] == "draining"
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.end() == 0
        assert server.said("request")[-1]["completion_tokens"] == 400


def test_a_second_sigterm_does_not_wait():
    endless = {**STORY, "max_tokens": 4000, "stream": True}
    with sb.process() as server, httpx.stream("POST", f"{server.url}/v1/completions", json=endless) as response:
        next(response.iter_lines())
        server.process.send_signal(signal.SIGTERM)
        sb.wait_for(lambda: server.said("draining"))
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 128 + signal.SIGTERM
        assert time.monotonic() - started < 5


def test_where_it_listens(capsys):
    with sb.process("--host", "0.0.0.0") as server:
        assert "no --api-key" in server.said("warning")[0]["message"]
    with sb.process("--host", "0.0.0.0", "--api-key", "x") as server:
        assert not server.said("warning")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for host, port in (("127.0.0.1", taken.getsockname()[1]), ("256.1.1.1", 0)):
            assert main(["serve", "--host", host, "--port", str(port)]) == 2
            assert "choose another --host or --port" in capsys.readouterr().err.splitlines()[-1]


def test_what_is_wrong_is_said_in_one_line():
    for words, message in (
        (["nowhere.gguf"], "nowhere.gguf"),
        (["smollm2", "--draft", "magic"], "unknown drafter 'magic'"),
        (["smollm2", "--log-level", "loud"], "log-level"),
    ):
        command = [sys.executable, "-m", "slipstream", "serve", *words, "--port", "0"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert result.returncode == 2, result.stderr
        assert message in result.stderr.splitlines()[-1]
        assert result.stderr.splitlines()[-1].startswith("error: ")


def test_without_the_extra_its_name_is_said(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "slipstream.server.run", None)
    assert main(["serve"]) == 2
    assert f"{sys.executable} -m pip install 'slipstream[serve]'" in capsys.readouterr().err


@pytest.fixture(scope="module")
def server():
    with sb.process("--admin-key", "admin-secret") as made:
        yield made


def test_it_listens_to_this_machine_alone_and_says_what_answers_depend_on(server, monkeypatch, tmp_path):
    assert server.said("listening")[0]["host"] == "127.0.0.1"
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "Hi"}, trust_env=False).json()
    with LLM("smollm2") as llm:
        own = llm.fingerprint()
        assert answer["system_fingerprint"] == own
        monkeypatch.setattr(noise, "NOISE_VERSION", 99)
        assert llm.fingerprint() == re.sub(r"noise\d+$", "noise99", own)
        monkeypatch.setattr(native, "active", lambda: "other")
        assert llm.fingerprint().endswith("-other-noise99")
    weights = tmp_path / "a.gguf"
    weights.write_bytes(b"weights")
    first = weights_fingerprint(weights)
    assert weights_fingerprint(tmp_path) == first
    weights.write_bytes(b"Weights")
    assert weights_fingerprint(weights) != first


def test_the_lines_of_the_documentation_work(server):
    lines = re.findall(r"^curl .*(?:\n  .*)*", DOCUMENT.read_text(), re.M)
    assert len(lines) > 5
    for line in lines:
        command = line.replace("http://127.0.0.1:8000", server.url)
        result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
        assert result.returncode == 0, (line, result.stderr)
        assert '"error"' not in result.stdout, (line, result.stdout)
        assert result.stdout.strip(), line


def test_a_lone_surrogate_is_refused(server):
    headers = {"content-type": "application/json"}
    for data in (b'{"prompt": "\\ud800"}', b'{"messages": [{"role": "user", "content": "\\ud800"}]}'):
        path = "/v1/completions" if b"prompt" in data else "/v1/chat/completions"
        response = httpx.post(server.url + path, content=data, headers=headers, trust_env=False)
        assert response.status_code == 400, response.text
        assert "surrogate" in response.json()["error"]["message"]
