"""Times of the server with SmolLM2. Bars are for two free cores; each takes the best of several tries."""

from __future__ import annotations

import statistics
import threading
import time

import httpx
import pytest

import serve_beds as sb
from slipstream import LLM, SamplingParams
from slipstream.models.registry import ensure

pytest.importorskip("fastapi", reason="the server needs the extra `serve`")
pytestmark = [pytest.mark.full, pytest.mark.model]
COMPLETIONS = "/v1/completions"
PATIENCE_S = 0.3
"""To the first token of a short request while a long prompt is read."""
OVERHEAD = 1.05
"""A single stream over HTTP, against the same model called directly."""


@pytest.fixture(scope="module")
def server():
    ensure("smollm2", quiet=True)
    with sb.running(LLM("smollm2")) as made:
        yield made


def first_chunk_s(server: sb.Running, **body: object) -> float:
    """Seconds to the first chunk of a stream; the rest is cut off."""
    started = time.perf_counter()
    url = f"{server.url}{COMPLETIONS}"
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=120, trust_env=False) as response:
        next(response.iter_lines())
        return time.perf_counter() - started


def test_a_short_request_does_not_wait_for_a_long_prompt(server):
    found = []
    for attempt in range(2):
        long = [500 + (index * 7 + attempt * 13) % 20000 for index in range(4000)]
        times: list[float] = []
        reader = threading.Thread(
            target=lambda long=long, times=times: times.append(first_chunk_s(server, prompt=long, max_tokens=2))
        )
        reader.start()
        sb.wait_for(lambda: server.served.worker.stats().reading > 0)
        while reader.is_alive() and len(found) < 12:
            short = f"{attempt} {len(found)}: the weather in spring"
            seconds = first_chunk_s(server, prompt=short, max_tokens=4)
            if reader.is_alive():
                found.append(seconds)
        reader.join()
    assert found, "the long prompt was read before anything else could be asked"
    print(f"first token of a short request beside a long prompt: {sorted(round(each, 3) for each in found)}")
    assert statistics.median(found) < PATIENCE_S


def test_a_single_stream_is_as_fast_as_the_model_itself(server):
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    body = {"max_tokens": 64, "ignore_eos": True, "speculation": False, "stream": True}
    ratios = []
    with LLM("smollm2", max_batch=1) as direct, server.client(timeout=120) as client:
        for attempt in range(9):
            prompt = f"Chapter {attempt}. The lighthouse keeper found a bottle and"
            started = time.perf_counter()
            list(direct.stream(prompt, params, speculation=False))
            plain = time.perf_counter() - started
            started = time.perf_counter()
            with client.stream("POST", COMPLETIONS, json={"prompt": prompt, **body}) as response:
                for _ in response.iter_lines():
                    pass
            ratios.append((time.perf_counter() - started) / plain)
    print(f"server / direct: {sorted(round(ratio, 3) for ratio in ratios)}")
    assert statistics.median(sorted(ratios)[:5]) < OVERHEAD
