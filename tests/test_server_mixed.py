"""Mixed requests, 16 at a time, some cut off: each that is finished equals itself alone and plainly decoded."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import resource
from typing import Any

import httpx
import pytest

import beds
import native_beds
import serve_beds as sb
from slipstream import LLM
from slipstream.core.types import RequestOutput
from slipstream.targets.native.model import NativeTarget

pytest.importorskip("fastapi", reason="the server needs the extra `serve`")
pytest.importorskip("llguidance", reason="JSON answers need the extra `serve`")
AT_ONCE = 16
CUT = 0.3
WORDS = ["the", "a", "sea", "river", "stone", "Hello", "name", "12", "345", "{", "}", "[", "(", ".", ";", "?"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def request(rng: random.Random, most: int, words: int) -> dict[str, Any]:
    """A request of random length, parameters and kind, with its path."""
    text = " ".join(rng.choices(WORDS, k=rng.randint(1, words)))
    body: dict[str, Any] = {"max_tokens": rng.randint(1, most), "seed": rng.randrange(2**32)}
    if rng.random() < 0.7:
        body["temperature"] = rng.choice([0.3, 0.8, 1.0, 1.4])
    options: dict[str, Any] = {
        "n": rng.randint(2, 3),
        "top_p": rng.choice([0.7, 0.95]),
        "top_k": rng.choice([5, 40]),
        "min_p": 0.05,
        "stop": rng.sample(["e", "the", "\\n", "qu"], 2),
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
        "logit_bias": {"40": 2, "41": -100},
        "speculation": rng.choice([False, {"max_nodes": 2}, {"drafter": "suffix"}]),
    }
    body |= {name: options[name] for name in rng.sample(list(options), rng.randint(0, 4))}
    if rng.random() < 0.15:
        schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
        body["response_format"] = rng.choice([schema, {"type": "json_object"}])
    if rng.random() < 0.5:
        return {"path": "/v1/chat/completions", "messages": [{"role": "user", "content": text}], **body}
    return {"path": "/v1/completions", "prompt": text, **body}


def alone(plain: LLM, body: dict[str, Any]) -> RequestOutput:
    """The same request asked of the model itself, without speculation."""
    fields = {name: value for name, value in body.items() if name not in ("path", "prompt", "messages", "speculation")}
    wanted = fields.pop("response_format", None)
    if wanted is not None:
        json_object = wanted["type"] == "json_object"
        fields["structured_outputs"] = {"json_object": True} if json_object else {"json": SCHEMA}
    ask = plain.chat if "messages" in body else plain.generate
    return ask(body.get("messages", body.get("prompt")), sb.sampling(**fields), speculation=False)[0]


async def ask(client: httpx.AsyncClient, body: dict[str, Any], cut: int | None) -> dict[int, str] | None:
    """The texts by index; None when it was cut off after that many chunks."""
    fields = {name: value for name, value in body.items() if name != "path"}
    if cut is None and fields["seed"] % 2:
        response = await client.post(body["path"], json=fields)
        assert response.status_code == 200, (body, response.text)
        choices = response.json()["choices"]
        return {c["index"]: c["text"] if "text" in c else c["message"]["content"] for c in choices}
    chunks = []
    async with client.stream("POST", body["path"], json={**fields, "stream": True}) as response:
        assert response.status_code == 200, body
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return sb.texts(chunks)
            if line:
                chunks.append(json.loads(line[6:]))
            if cut is not None and len(chunks) > cut:
                return None
    raise AssertionError("the stream ended before its end")


async def ask_all(url: str, bodies: list[dict[str, Any]], rng: random.Random) -> list[dict[int, str] | None]:
    """All answers, so many at a time."""
    free = asyncio.Semaphore(AT_ONCE)
    cuts = [rng.randint(0, 8) if rng.random() < CUT else None for _ in bodies]

    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as client:

        async def one(body: dict[str, Any], cut: int | None) -> dict[int, str] | None:
            async with free:
                return await ask(client, body, cut)

        return await asyncio.gather(*(one(body, cut) for body, cut in zip(bodies, cuts, strict=True)))


def check(server: sb.Running, plain: LLM, bodies: list[dict[str, Any]], found: list[dict[int, str] | None]) -> int:
    """Compare what was finished with the same request alone; returns how many those were."""
    compared = 0
    for body, texts in zip(bodies, found, strict=True):
        if texts is not None:
            expected = {output.index: output.text for output in alone(plain, body).outputs}
            assert texts == expected, body
            compared += 1
    sb.wait_for(lambda: not server.service.jobs)
    return compared


def mixed(server: sb.Running, plain: LLM, count: int, most: int = 48, words: int = 12, seed: int = 0) -> None:
    before = server.free()
    rng = random.Random(seed)
    bodies = [request(rng, most, words) for _ in range(count)]
    found = asyncio.run(ask_all(server.url, bodies, rng))
    compared = check(server, plain, bodies, found)
    assert compared > count // 2
    assert compared < count
    assert server.free() == before
    assert server.metric("slipstream_requests_running") == 0


def test_60_mixed_requests(monkeypatch):
    plain = sb.small(monkeypatch, draft="none")
    with sb.running(sb.small(monkeypatch, max_batch=6)) as server:
        mixed(server, plain, 60)


@pytest.mark.parametrize("fault", ["a token lost at the edge of a chunk", "choices mixed up", "the seed ignored"])
def test_planted_faults_of_the_server_are_seen(monkeypatch, fault):
    from slipstream.server import job, params

    def loses(self, place, answer, piece, plain=job.Job._part):
        part = plain(self, place, answer, piece)
        piece.text = piece.text[:-1] if len(piece.token_ids) > 1 and not piece.finish_reason else piece.text
        return part

    def mixes(self, place, answer, piece, plain=job.Job._part):
        part = plain(self, place, answer, piece)
        return job.Part(part.index ^ 1 if self.task.params.n > 1 else part.index, part.piece, part.logprobs)

    def ignores(asked, limits, plain=params.sampling_params):
        return plain(asked.model_copy(update={"seed": 7}), limits)

    plain = sb.small(monkeypatch, draft="none")
    if fault == "the seed ignored":
        monkeypatch.setattr("slipstream.server.call.sampling_params", ignores)
    else:
        monkeypatch.setattr(job.Job, "_part", loses if "lost" in fault else mixes)
    with sb.running(sb.small(monkeypatch, max_batch=6)) as server, pytest.raises(AssertionError):
        mixed(server, plain, 40)


class NativeFile(beds.SmallFile):
    """The vocabulary of the small model over a tiny random native one."""

    def target(self, seed: int = 3, max_context: int = 400, slots: int = 8, **_: object) -> NativeTarget:
        file = native_beds.model("llama", seed, vocab_size=99, token_count=99, max_context=max_context)
        return NativeTarget.load(file, slots=slots, features=())


@pytest.fixture
def native(monkeypatch):
    """Two LLMs over the compiled kernels: to be served, and plain."""
    monkeypatch.setattr(beds, "SmallFile", NativeFile)
    return sb.small(monkeypatch, max_batch=8, controller="adaptive"), sb.small(monkeypatch, draft="none")


@pytest.mark.full
def test_500_mixed_requests_on_compiled_kernels(native):
    llm, plain = native
    with sb.running(llm) as server:
        mixed(server, plain, 500, most=64, words=30)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_memory_stays_flat_over_5000_requests(native):
    """Of the last 3,000 requests nothing is left: after the first ones all pools and tables have their size."""
    llm, _ = native
    rng = random.Random(1)

    def some(count: int) -> int:
        bodies = [request(rng, 12, 6) for _ in range(count)]
        asyncio.run(ask_all(server.url, bodies, rng))
        sb.wait_for(lambda: not server.service.jobs)
        gc.collect()
        return resource_kilobytes()

    with sb.running(llm) as server:
        before = some(2000)
        after = some(3000)
        assert after - before < 8_000, f"{before} kB grew to {after} kB"
        assert server.metric("slipstream_requests_total") >= 5000


def resource_kilobytes() -> int:
    """Memory of this process that is resident now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() // 1024


@pytest.mark.full
@pytest.mark.model
@pytest.mark.timeout(1800)
def test_mixed_requests_on_smollm2():
    from slipstream.models.registry import ensure

    ensure("smollm2", quiet=True)
    llm = LLM("smollm2", max_batch=8)
    with LLM("smollm2", draft="none", max_batch=1) as plain, sb.running(llm) as server:
        rng = random.Random(2)
        bodies = [request(rng, 40, 60) for _ in range(100)]
        found = asyncio.run(ask_all(server.url, bodies, rng))
        assert check(server, plain, bodies, found) > 50
