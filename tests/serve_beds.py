"""A server on a free port over the small table model, and its plain twin to compare with."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

import beds
from slipstream import LLM, ModelError, SamplingParams, build
from slipstream.cli.serve import served
from slipstream.models.registry import ensure
from slipstream.server.app import make_app
from slipstream.server.run import Server, bind, configure
from slipstream.server.service import Served, Service, Settings

__all__ = ["ModelError", "Settings"]
CONTEXT = 400


class Fingerprinted(LLM):
    """Without weights there is nothing to take the fingerprint of."""

    def fingerprint(self) -> str:
        return "small-numpy-noise1"


def small(monkeypatch: Any, pause: float = 0.0, **settings: Any) -> LLM:
    """The small model. pause: seconds that each pass takes longer."""

    def load(file: beds.SmallFile, max_context: int | None, slots: int, *_: object) -> Any:
        return file.target(max_context=max_context or CONTEXT, slots=slots, pause=pause)

    monkeypatch.setattr(build, "open_named", lambda name: beds.SmallFile())
    monkeypatch.setattr(build, "load_target", load)
    monkeypatch.setattr(build, "start_measured", lambda *_: None)
    settings.setdefault("controller", "fixed")
    return Fingerprinted("small", settings.pop("draft", "suffix,recycling"), **settings)


class Running:
    """A server in a thread; `llm` and `served` once it is ready."""

    def __init__(self, llm: LLM, settings: Settings, **worker: Any) -> None:
        self.llm, self.service = llm, Service(settings)
        self.served: Served | None = None
        self.go = threading.Event()
        """The model is there once this is set."""
        self.go.set()
        self.fault: BaseException | None = None

        def load(service: Service) -> Served:
            self.go.wait()
            self.served = served(llm, service, **worker)
            return self.served

        self.listener = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.server = Server(configure(make_app(self.service)), self.service, load)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.code: int | None = None

    def _run(self) -> None:
        try:
            self.code = self.server.run_until_told(self.listener)
        except BaseException as error:
            self.fault = error

    def start(self) -> Running:
        self.thread.start()
        wait_for(lambda: self.server.started)
        return self

    def ready(self) -> Running:
        wait_for(lambda: self.service.state == "ready")
        return self

    def stop(self) -> None:
        if self.thread.is_alive():
            self.server.handle_exit(signal.SIGTERM, None)
        self.thread.join(30)
        assert not self.thread.is_alive()

    def client(self, key: str | None = None, timeout: float = 30) -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=timeout, trust_env=False)

    def metric(self, name: str) -> float:
        """The sum over all labels of one metric."""
        lines = httpx.get(f"{self.url}/metrics", trust_env=False).text.splitlines()
        found = [float(line.rpartition(" ")[2]) for line in lines if line.partition(" ")[0].partition("{")[0] == name]
        assert found, name
        return sum(found)

    def free(self) -> int:
        """Bytes of the cache that nothing uses once kept prefixes are given back."""
        assert self.served is not None
        self.served.worker.between(self.llm._engine.forget)
        return self.llm.target.memory_bytes()["kv_free"]


@contextmanager
def running(llm: LLM, worker: dict[str, Any] | None = None, **settings: Any) -> Iterator[Running]:
    """A server that is ready. worker: options of its worker."""
    made = Running(llm, Settings(**settings), **(worker or {})).start().ready()
    try:
        yield made
    finally:
        made.stop()


class Process:
    """A server of its own; `lines` is what it has logged."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-m", "slipstream", "serve", "smollm2", "--port", "0", *words]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.lines: list[dict] = []
        self.reader = threading.Thread(target=self._read)
        self.reader.start()
        wait_for(lambda: self.said("listening"), 60)
        self.url = f"http://127.0.0.1:{self.said('listening')[0]['port']}"

    def _read(self) -> None:
        for line in self.process.stderr:
            self.lines.append(json.loads(line))

    def said(self, event: str) -> list[dict]:
        return [line for line in self.lines if line["event"] == event]

    def ready(self) -> Process:
        wait_for(lambda: httpx.get(f"{self.url}/health", trust_env=False).status_code == 200, 60)
        return self

    def end(self, seconds: float = 30) -> int:
        code = self.process.wait(seconds)
        self.reader.join()
        self.process.stdout.close()
        self.process.stderr.close()
        return code


@contextmanager
def process(*words: str) -> Iterator[Process]:
    ensure("smollm2", quiet=True)
    made = Process(*words)
    try:
        yield made.ready()
    finally:
        made.process.kill()
        made.end()


def wait_for(condition: Any, seconds: float = 60) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not come"
        time.sleep(0.005)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end as streams end."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines), lines
    assert lines[-1] == "data: [DONE]", lines
    return [json.loads(line[6:]) for line in lines[:-1]]


def texts(chunks: list[dict[str, Any]]) -> dict[int, str]:
    """The text of each choice of a stream, of either interface."""
    found: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            new = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            found[choice["index"]] = found.get(choice["index"], "") + new
    return found


def sampling(**fields: Any) -> SamplingParams:
    """What the server makes of the fields of a request."""
    return SamplingParams(**{"max_tokens": 16, **fields})
