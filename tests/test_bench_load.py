"""Load on a server: what the tool reports is what a fake server with known delays did."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from time import perf_counter, sleep

import pytest

from slipstream.bench.load import Call, Load
from slipstream.bench.load_report import as_text, page, percentiles, summary
from slipstream.cli import main
from slipstream.core.errors import InputError

httpx = pytest.importorskip("httpx", reason="needs httpx: pip install 'slipstream[bench]'")
from slipstream.bench.load import run  # noqa: E402

CHUNKS, TOKENS_PER_CHUNK = 5, 3
ROWS = [[{"role": "user", "content": text}] for text in ("one", "two", "three")]


class Fake(ThreadingHTTPServer):
    """Streams chunks of several tokens with known pauses and writes down when each one was sent."""

    daemon_threads = True

    def __init__(self, first: float = 0.05, pause: float = 0.04, usage: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.first, self.pause, self.usage = first, pause, usage
        self.sent: list[list[float]] = []
        self.bodies: list[dict] = []
        self.now = self.most = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Fake

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self):
        self._head("application/json")
        self.wfile.write(json.dumps({"data": [{"id": "fake"}]}).encode())

    def _head(self, kind: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Connection", "close")
        self.end_headers()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        words = body["messages"][0]["content"]
        fake = self.server
        with fake.lock:
            fake.bodies.append(body)
            fake.now += 1
            fake.most = max(fake.most, fake.now)
        done = self._answer(fake, words)
        with fake.lock:  # before the client can know that it is over
            fake.now -= 1
        if done:
            self.wfile.write(b"data: [DONE]\n\n")

    def _answer(self, fake: Fake, words: str) -> bool:
        if words == "refused":
            self._head("application/json", 429)
            return False
        self._head("text/event-stream")
        self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})  # no text yet
        times = []
        for number in range(CHUNKS):
            sleep(fake.first if number == 0 else fake.pause)
            times.append(perf_counter())
            self._event({"choices": [{"delta": {"content": "a b c "}}]})
            if words == "cut":
                return False
            if words == "broken":
                self._event({"error": {"message": "out of memory"}})
                return False
        fake.sent.append(times)
        if fake.usage:
            self._event({"choices": [], "usage": {"completion_tokens": CHUNKS * TOKENS_PER_CHUNK}})
        return True

    def _event(self, data: dict) -> None:
        self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")
        self.wfile.flush()


@contextmanager
def serving(**settings):
    with Fake(**settings) as fake:
        thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield fake
        finally:
            fake.shutdown()
            thread.join()


def measured(fake: Fake, **settings) -> list[Call]:
    async def everything():
        async with httpx.AsyncClient() as client:
            return await run(Load(fake.url, **{"rows": ROWS, "requests": 6, "concurrency": 2, **settings}), client)

    return asyncio.run(everything())


def differences(fake: Fake, calls: list[Call]) -> dict[str, float]:
    """How far what was reported lies from what the fake did, in seconds."""
    true = sorted((late[-1] - late[0]) / (CHUNKS * TOKENS_PER_CHUNK - 1) for late in fake.sent)
    gaps = [late - early for times in fake.sent for early, late in pairwise(times)]
    found = summary(calls)
    right = {"tpot_s": percentiles(true), "chunk_gap_s": percentiles(gaps)}
    return {f"{key} {name}": abs(found[key][name] - right[key][name]) for key in right for name in ("p50", "p90")}


def agrees(fake: Fake, calls: list[Call]) -> bool:
    """In the median to 10 ms; a busy machine may hold up single chunks for longer."""
    found = differences(fake, calls)
    return all(value < (0.01 if name.endswith("p50") else 0.2) for name, value in found.items())


def test_percentiles_are_what_the_server_did():
    with serving() as fake:
        calls = measured(fake)
    found = summary(calls)
    assert (found["completed"], found["errors"]) == (6, {})
    assert found["tokens"] == 6 * CHUNKS * TOKENS_PER_CHUNK
    assert agrees(fake, calls), differences(fake, calls)
    assert fake.first <= found["ttft_s"]["p50"] < fake.first + 0.5
    assert found["tokens_per_second"] == pytest.approx(found["tokens"] / found["duration_s"])
    assert {call.row for call in calls} == {0, 1, 2}
    assert {body["model"] for body in fake.bodies} == {"fake"}


def test_planted_counting_of_chunks_is_seen():
    """A server that does not say how many tokens there were: chunks stand in, and the report says so."""
    with serving(usage=False) as fake:
        calls = measured(fake)
    assert not agrees(fake, calls)
    assert summary(calls)["tokens"] == 6 * CHUNKS
    assert "chunks were counted instead of tokens" in as_text(summary(calls))


@pytest.mark.parametrize("number", [1, 3])
def test_closed_load_keeps_that_many_under_way(number):
    with serving() as fake:
        measured(fake, concurrency=number)
    assert fake.most == number


def test_poisson_load_arrives_by_its_seed_whatever_the_server_does():
    with serving(first=0.2) as fake:
        calls = measured(fake, rate=40.0, seed=3, requests=10)
    chance, due = random.Random(3), [0.0]
    for _ in range(9):
        due.append(due[-1] + chance.expovariate(40.0))
    assert [call.start for call in calls] == pytest.approx(due)
    assert all(call.ttft >= 0.2 for call in calls)
    assert fake.most > 2


def test_failures_are_counted_and_are_no_goodput():
    rows = [[{"role": "user", "content": text}] for text in ("refused", "cut", "broken", "fine")]
    with serving() as fake:
        calls = measured(fake, rows=rows, requests=8, extra={"speculation": False})
    found = summary(calls, ttft_s=10.0, tpot_s=10.0)
    assert found["completed"] == 2
    assert found["errors"] == {"HTTP 429": 2, "the stream was cut off": 2, "error in the stream": 2}
    assert found["goodput"]["share"] == 0.25
    assert all(body["speculation"] is False for body in fake.bodies)
    assert "2 x HTTP 429" in page(found, calls, {"url": fake.url})


def test_goodput_counts_both_objectives():
    quick, slow = Call(0.0, 0, [0.1, 0.2], 0.2, 11, True), Call(0.0, 0, [0.5, 2.5], 2.5, 11, True)
    for limits, share in (((None, None), 1.0), ((0.3, None), 0.5), ((None, 0.1), 0.5), ((0.05, 1.0), 0.0)):
        assert summary([quick, slow], *limits)["goodput"]["share"] == share
    assert quick.tpot == pytest.approx(0.01)
    assert Call(0.0, 0, [0.1], 0.1, 1, True).tpot is None


def test_the_command_writes_json_and_one_page_that_needs_nothing(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "one"}]}\n{"prompt": "two"}\n')
    with serving() as fake:
        words = ["--url", fake.url + "/", "--rows", str(rows), "--requests", "4", "--ttft-ms", "60000"]
        files = ["--json", str(tmp_path / "out" / "load.json"), "--html", str(tmp_path / "load.html")]
        assert main(["bench", "serve", *words, *files]) == 0
    shown = capsys.readouterr().out
    assert "4 of 4 requests" in shown
    assert "goodput" in shown
    found = json.loads((tmp_path / "out" / "load.json").read_text())
    assert found["goodput"]["share"] == 1.0
    assert len(found["calls"]) == 4
    text = (tmp_path / "load.html").read_text()
    assert text.count("<svg") == 4
    assert "src=" not in text
    assert "href=" not in text


def test_what_does_not_answer_is_one_line(tmp_path, capsys):
    assert main(["bench", "serve", "--url", "http://127.0.0.1:9/v1"]) == 2
    assert "does not answer" in capsys.readouterr().err
    assert main(["bench", "serve", "--extra", "[1]"]) == 2
    assert "--extra is '[1]'" in capsys.readouterr().err
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\nno\n')
    assert main(["bench", "serve", "--rows", str(rows)]) == 2
    assert "line 2 is not" in capsys.readouterr().err
    with pytest.raises(InputError, match="no row to ask"):
        asyncio.run(run(Load("http://x", [], 1), None))


@pytest.mark.parametrize("url", ["http://x:99999/v1", "http://x:y/v1", "x/v1", "ftp://x/v1", "http:///v1", ""])
def test_addresses_that_cannot_be_are_one_line(url, capsys):
    assert main(["bench", "serve", "--url", url, "-m", "x", "--requests", "1"]) == 2
    assert capsys.readouterr().err.startswith(f"error: --url is '{url}'")


def test_rows_that_are_no_text_are_one_line(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b"\xff\xfe")
    assert main(["bench", "serve", "--rows", str(rows)]) == 2
    assert "not UTF-8" in capsys.readouterr().err


def test_a_run_without_any_answer_is_no_success(capsys):
    assert main(["bench", "serve", "--url", "http://127.0.0.1:9/v1", "-m", "x", "--requests", "1"]) == 2
    assert "0 of 1 requests" in capsys.readouterr().out


def test_the_page_shows_foreign_text_as_text():
    found = summary([])
    text = page(found, [], {"url": "<script>alert(1)</script>"})
    assert "<script>" not in text
    assert found["ttft_s"] is None
