"""The life of a server: clients that go away, full queues, deadlines, draining, a dead engine, loading; its counts."""

from __future__ import annotations

import json
import logging
import signal
import socket
import threading
import time

import httpx
import pytest

import serve_beds as sb

pytest.importorskip("fastapi", reason="the server needs the extra `serve`")
COMPLETIONS = "/v1/completions"
LONG = {"prompt": "Hello", "max_tokens": 390, "ignore_eos": True}
SHORT = {"prompt": "Hello", "max_tokens": 3}


@pytest.fixture
def slow(monkeypatch):
    """The small model with passes of a few milliseconds."""
    return sb.small(monkeypatch, pause=0.004)


def raw_request(server, **body) -> socket.socket:
    """A request on a connection of its own, whose reply nobody has read yet."""
    data = json.dumps(body).encode()
    made = socket.create_connection(server.listener.getsockname(), timeout=20)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    made.sendall(head.encode() + b"\r\n\r\n" + data)
    return made


def quiet(server) -> bool:
    """True when nothing runs or waits any more."""
    return not server.service.jobs and server.served.worker.engine.idle


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_200_clients_that_are_cut_off_leave_nothing_behind(slow, stream):
    with sb.running(slow, worker={"max_waiting": 400}) as server:
        before = server.free()
        clients = [raw_request(server, stream=stream, n=1 + index % 2, **LONG) for index in range(200)]
        if stream:
            assert clients[0].recv(10).startswith(b"HTTP/1.1 2")
        sb.wait_for(lambda: len(server.service.jobs) == 200)
        for client in clients:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, as a crash sends
            client.close()
        started = time.monotonic()
        with server.client() as fresh:
            assert fresh.post(COMPLETIONS, json=SHORT).status_code == 200
        assert time.monotonic() - started < 3
        sb.wait_for(lambda: quiet(server))
        assert server.free() == before
        assert server.metric("slipstream_requests_running") == server.metric("slipstream_requests_waiting") == 0


def test_a_client_that_goes_away_ends_its_request_alone(slow):
    with sb.running(slow) as server, server.client() as client:
        expected = client.post(COMPLETIONS, json=LONG).json()["choices"][0]["text"]
        gone = raw_request(server, stream=True, **LONG)
        found = []
        other = threading.Thread(target=lambda: found.append(client.post(COMPLETIONS, json=LONG).json()))
        other.start()
        gone.recv(100)
        gone.close()
        sb.wait_for(lambda: server.metric("slipstream_choices_total") > 0 and len(server.service.jobs) == 1)
        other.join()
        assert found[0]["choices"][0]["text"] == expected


def started(server) -> int:
    """Requests that the engine has begun with."""
    return sum(request.started for job in list(server.service.jobs) for request in job.requests)


def test_a_full_queue_answers_at_once(slow):
    with sb.running(slow, worker={"max_waiting": 3}) as server, server.client() as client:
        clients = []
        for most in (3, 6, 8):
            clients += [raw_request(server, stream=True, **LONG) for _ in range(most - len(clients))]
            sb.wait_for(lambda most=most: started(server) == most)
        clients += [raw_request(server, stream=True, **LONG) for _ in range(3)]
        sb.wait_for(lambda: server.served.worker.waiting == 3)
        asked_at = time.monotonic()
        for stream in (False, True):
            refused = client.post(COMPLETIONS, json={**SHORT, "stream": stream})
            assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
            assert int(refused.headers["retry-after"]) >= 1
        assert client.get("/health").status_code == 200
        assert time.monotonic() - asked_at < 1
        assert len(server.service.jobs) == 11
        for each in clients:
            each.close()
        sb.wait_for(lambda: quiet(server))
        assert client.post(COMPLETIONS, json=SHORT).status_code == 200


def test_a_list_of_prompts_is_queued_as_a_whole_or_not_at_all(slow):
    with sb.running(slow, worker={"max_waiting": 5}) as server, server.client() as client:
        for count, n in ((6, 1), (100, 1), (4, 2), (2, 5)):
            never = client.post(COMPLETIONS, json={**SHORT, "prompt": ["a"] * count, "n": n})
            assert (never.status_code, never.json()["error"]["param"]) == (400, "prompt")
            assert "queue of 5 answers (--max-waiting)" in never.json()["error"]["message"]
        for count, n in ((5, 1), (3, 2), (1, 9)):
            some = client.post(COMPLETIONS, json={**SHORT, "prompt": ["a"] * count, "n": n})
            assert len(some.json()["choices"]) == count * n
        busy = [raw_request(server, stream=True, n=8, **LONG)]
        sb.wait_for(lambda: started(server) == 1)
        busy += [raw_request(server, stream=True, **LONG) for _ in range(3)]
        sb.wait_for(lambda: server.served.worker.waiting == 3)
        assert client.post(COMPLETIONS, json={**SHORT, "prompt": ["a"] * 4}).status_code == 429
        sb.wait_for(lambda: server.served.worker.waiting == 3)
        for each in busy:
            each.close()
        sb.wait_for(lambda: quiet(server))


def test_deadlines(slow):
    with sb.running(slow, deadline_s=0.15) as server, server.client() as client:
        late = client.post(COMPLETIONS, json=LONG)
        assert (late.status_code, late.json()["error"]["type"]) == (504, "timeout_error")
        chunks = client.post(COMPLETIONS, json={**LONG, "stream": True}).text.split("\n\n")
        assert chunks[-2] == "data: [DONE]"
        assert json.loads(chunks[-3][6:])["error"]["code"] == "deadline_exceeded"
        assert client.post(COMPLETIONS, json=SHORT).status_code == 200
        sb.wait_for(lambda: quiet(server))


def test_draining_lets_answers_end_and_takes_no_more(slow):
    with sb.running(slow, drain_s=20) as server, server.client() as client:
        running = raw_request(server, stream=True, **LONG)
        first = running.recv(2000)
        server.server.handle_exit(signal.SIGTERM, None)
        sb.wait_for(lambda: server.service.state == "draining")
        for response in (client.get("/health"), client.post(COMPLETIONS, json=SHORT)):
            assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")
            assert response.headers["retry-after"]
        data = first + read_to_end(running)
        assert b'"finish_reason":"length"' in data
        assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        server.thread.join(10)
        assert (server.code, server.fault) == (0, None)


def test_draining_has_its_bounds(slow):
    with sb.running(slow, drain_s=0.2) as server:
        streaming, whole = raw_request(server, stream=True, **LONG), raw_request(server, **LONG)
        first = streaming.recv(2000)
        started = time.monotonic()
        server.server.handle_exit(signal.SIGTERM, None)
        server.thread.join(10)
        assert time.monotonic() - started < 5
        assert server.code == 0
        data = first + read_to_end(streaming)
        assert b'"code":"draining"' in data
        assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert read_to_end(whole).startswith(b"HTTP/1.1 503")


def read_to_end(connection: socket.socket) -> bytes:
    data = b""
    with connection:
        while part := connection.recv(65536):
            data += part
    return data


def test_a_dead_engine_is_a_503_at_once(slow, monkeypatch, caplog):
    caplog.set_level(logging.CRITICAL)
    with sb.running(slow) as server, server.client() as client:
        streaming, whole = raw_request(server, stream=True, **LONG), raw_request(server, **LONG)
        first = streaming.recv(2000)

        def dies(*_: object) -> None:
            raise MemoryError("planted")

        monkeypatch.setattr(server.llm.target, "forward", dies)
        data = first
        while b"[DONE]" not in data:
            data += streaming.recv(65536)
        assert b'{"error":{"message":' in data
        assert whole.recv(2000).startswith(b"HTTP/1.1 50")
        sb.wait_for(lambda: server.service.state == "dead")
        for response in (client.get("/health"), client.post(COMPLETIONS, json=SHORT), client.get("/v1/models")):
            assert (response.status_code, response.json()["error"]["code"]) == (503, "dead")
        assert server.metric("slipstream_engine_up") == 0
        assert not server.service.jobs
        streaming.close()
        whole.close()


def test_an_engine_that_hangs_is_not_healthy(slow, monkeypatch):
    monkeypatch.setattr("slipstream.server.service.STALLED_S", 0.2)
    with sb.running(slow) as server, server.client() as client:
        hold = threading.Event()
        plain = server.llm.target.forward
        monkeypatch.setattr(server.llm.target, "forward", lambda *given: (hold.wait(20), plain(*given))[1])
        waiting = raw_request(server, **SHORT)
        sb.wait_for(lambda: client.get("/health").status_code == 503)
        hold.set()
        sb.wait_for(lambda: client.get("/health").status_code == 200)
        assert waiting.recv(100).startswith(b"HTTP/1.1 200")
        waiting.close()


def test_loading(monkeypatch):
    made = sb.Running(sb.small(monkeypatch), sb.Settings())
    made.go.clear()
    made.start()
    with made.client() as client:
        for response in (client.get("/health"), client.post(COMPLETIONS, json=SHORT), client.get("/v1/models")):
            assert (response.status_code, response.json()["error"]["code"]) == (503, "loading")
            assert response.headers["retry-after"]
        assert client.post(COMPLETIONS, json={"prompt": 5}).status_code == 400
        made.go.set()
        made.ready()
        assert client.post(COMPLETIONS, json=SHORT).status_code == 200
    made.stop()


def test_a_model_that_cannot_be_loaded_ends_the_server(monkeypatch):
    made = sb.Running(sb.small(monkeypatch), sb.Settings())

    def fails(service: object) -> None:
        raise sb.ModelError("no such model")

    made.server._load = fails
    made.thread.start()
    made.thread.join(10)
    assert isinstance(made.fault, sb.ModelError)


def test_one_request_that_fails_is_alone(slow, monkeypatch):
    """NaN among the logits of one request; the requests beside it do not notice."""
    with sb.running(slow, worker={"max_waiting": 20}) as server, server.client() as client:
        expected = client.post(COMPLETIONS, json=LONG).json()["choices"][0]["text"]
        table = server.llm.target.table
        bad = server.llm.tokenizer.encode("~")[0]
        assert "~" not in expected
        table[bad] = float("nan")
        beside = raw_request(server, **LONG)
        failed = client.post(COMPLETIONS, json={"prompt": "~", "max_tokens": 5})
        assert (failed.status_code, failed.json()["error"]["type"]) == (500, "server_error")
        streamed = client.post(COMPLETIONS, json={"prompt": "~", "max_tokens": 5, "stream": True})
        assert streamed.status_code == 500, "what fails before the first byte has its status"
        head, _, body = read_reply(beside).partition(b"\r\n\r\n")
        assert json.loads(body)["choices"][0]["text"] == expected, head
        sb.wait_for(lambda: quiet(server))


def read_reply(connection: socket.socket) -> bytes:
    data = connection.recv(65536)
    length = int(data.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
    while len(data.partition(b"\r\n\r\n")[2]) < length:
        data += connection.recv(65536)
    connection.close()
    return data


def test_counters_add_up(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "slipstream")
    with sb.running(sb.small(monkeypatch), log_prompts=False) as server, server.client() as client:
        usage = []
        for index in range(12):
            body = {"prompt": "aaaa secret", "max_tokens": 5 + index, "n": 1 + index % 3, "temperature": 1.0}
            if index % 2:
                chunks = sb.events(
                    client.post(COMPLETIONS, json={**body, "stream": True, "stream_options": {"include_usage": True}})
                )
                usage.append(chunks[-1])
            else:
                usage.append(client.post(COMPLETIONS, json=body).json())
        client.post(COMPLETIONS, json={"prompt": 5})
        counts = [answer["usage"] for answer in usage]
        stats = [answer["speculative_decoding"] for answer in usage]
        assert server.metric("slipstream_generation_tokens_total") == sum(c["completion_tokens"] for c in counts)
        assert server.metric("slipstream_choices_total") == sum(1 + index % 3 for index in range(12))
        for metric, name in (
            ("num_drafts", "num_spec_steps"),
            ("num_draft_tokens", "num_draft_tokens"),
            ("num_accepted_tokens", "num_accepted_draft_tokens"),
        ):
            expected = sum(each[name] for each in stats)
            assert server.metric(f"slipstream_spec_decode_{metric}_total") == expected
        assert server.metric("slipstream_spec_decode_num_accepted_tokens_per_pos_total") == expected
        assert server.metric("slipstream_decode_steps_total") == sum(each["num_steps"] for each in stats)
        assert server.metric("slipstream_time_to_first_token_seconds_count") == 12
        assert server.metric("slipstream_request_duration_seconds_count") == 12
        requests = client.get("/metrics").text
        assert 'slipstream_requests_total{endpoint="/v1/completions",status="200"} 12.0' in requests
        assert 'slipstream_requests_total{endpoint="/v1/completions",status="400"} 1.0' in requests
    lines = [record for record in caplog.records if record.getMessage() == "request"]
    answered = [record.fields for record in lines if record.fields.get("completion_tokens")]
    assert sum(fields["completion_tokens"] for fields in answered) == sum(c["completion_tokens"] for c in counts)
    assert "secret" not in str([record.fields for record in lines])


def test_prompts_are_logged_when_that_is_asked_for(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "slipstream")
    with sb.running(sb.small(monkeypatch), log_prompts=True) as server, server.client() as client:
        answer = client.post(COMPLETIONS, json=SHORT, headers={"x-request-id": "mine"}).json()
    fields = next(record.fields for record in caplog.records if record.getMessage() == "request")
    assert fields["id"] == "mine"
    assert (fields["prompts"], fields["answers"]) == (["Hello"], [answer["choices"][0]["text"]])


def test_health_does_not_wait_for_work(monkeypatch):
    with sb.running(sb.small(monkeypatch, pause=0.03)) as server, server.client() as client:
        busy = [raw_request(server, stream=True, **LONG) for _ in range(16)]
        sb.wait_for(lambda: len(server.service.jobs) == 16)
        for _ in range(20):
            assert client.get("/health").status_code == 200
        assert len(server.service.jobs) == 16, "all were answered while nothing else was"
        for each in busy:
            each.close()


def test_switching_speculation_under_load_drops_nothing_and_changes_nothing(monkeypatch):
    llm = sb.small(monkeypatch, pause=0.001, max_batch=4)
    with sb.running(llm, admin_key="root") as server, server.client("root") as admin:
        bodies = [{"prompt": "aaaa"[: 1 + k % 4], "max_tokens": 120, "temperature": 0.7, "seed": k} for k in range(12)]
        expected = [admin.post(COMPLETIONS, json=body).json()["choices"][0]["text"] for body in bodies]
        found: dict[int, str] = {}

        def ask(index: int) -> None:
            found[index] = httpx.post(f"{server.url}{COMPLETIONS}", json=bodies[index], timeout=60).json()["choices"][
                0
            ]["text"]

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(12)]
        for thread in threads:
            thread.start()
        changes = [
            {"enabled": False},
            {"enabled": True},
            {"drafters": ["suffix"]},
            {"max_nodes": 1},
            {"rollback": True},
        ]
        count = 0
        while any(thread.is_alive() for thread in threads):
            assert admin.post("/admin/speculation", json=changes[count % len(changes)]).status_code == 200
            count += 1
        assert count > 5
        assert [found[index] for index in range(12)] == expected


def test_the_shadow_check_turns_red_when_speculation_changes_a_token(monkeypatch):
    """A share of 10 %, and a fault planted that alters a token in half the answers that were drafted for."""
    from slipstream.engine import batch

    plain = batch.emit

    def alters(answer, draft, verdict, logits):
        if draft.tokens and answer.row.id % 2:
            verdict.tokens[0] = (verdict.tokens[0] + 1) % 90
        return plain(answer, draft, verdict, logits)

    for fault in (False, True):
        if fault:
            monkeypatch.setattr(batch, "emit", alters)
        worker = {"shadow_share": 0.1, "alarm_stops": True}
        llm = sb.small(monkeypatch, draft="suffix,recycling", max_batch=4)
        with sb.running(llm, worker, admin_key="root") as server, server.client("root") as client:
            count = 0
            while count < (200 if fault else 40) and not server.served.worker.shadow.differed:
                body = {"prompt": "aaaa", "max_tokens": 12, "ignore_eos": True, "seed": count, "temperature": 0.4}
                assert client.post(COMPLETIONS, json=body).status_code == 200
                count += 1
            sb.wait_for(lambda: server.metric("slipstream_shadow_checks_total") > 0)
            assert bool(server.metric("slipstream_shadow_alarms_total")) == fault
            assert client.get("/admin/speculation").json()["enabled"] != fault
            assert server.metric("slipstream_choices_total") == count, "replays are no requests of anybody"
