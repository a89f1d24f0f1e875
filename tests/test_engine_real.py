"""The worker on SmolLM2: the tokens of plain decoding, side by side and while settings change."""

from __future__ import annotations

import threading
import time

import pytest

from slipstream import LLM, SamplingParams
from slipstream.core.params import SpeculationSetting

pytestmark = pytest.mark.model
TEXT = "The river rises in the hills, runs past the old mill and the new bridge, and reaches the sea after a day. "


@pytest.fixture(scope="module")
def llm():
    with LLM("smollm2", max_context=4608) as made:
        yield made


def test_requests_side_by_side_have_the_tokens_of_plain_decoding_alone(llm):
    cases = [
        (f"{TEXT * (1 + index)} Once more, word by word:", SamplingParams(max_tokens=20, temperature=heat, seed=index))
        for index, heat in enumerate([0.0, 0.8, 0.0, 1.2])
    ]
    speculations = [True, SpeculationSetting(max_nodes=3), SpeculationSetting(drafters=["suffix"]), False]
    worker = llm.worker(shadow_share=1.0)
    worker.start()
    try:
        ended = threading.Semaphore(0)
        requests = [
            worker.submit(
                llm.encode(prompt)[1],
                params,
                speculation=speculation,
                listener=lambda request, pieces: pieces is None and ended.release(),
            )
            for (prompt, params), speculation in zip(cases, speculations, strict=True)
        ]
        for change in ({"speculation": False}, {"speculation": True}, {"max_nodes": 2}):
            time.sleep(0.2)
            worker.configure(**change)
        for _ in cases:
            assert ended.acquire(timeout=300)
        while not worker._shadow.idle:
            time.sleep(0.05)
    finally:
        worker.stop()
    llm._engine.drafting.configure(speculation=True, max_nodes=None)
    for (prompt, params), request in zip(cases, requests, strict=True):
        llm.forget()
        alone = llm.generate(prompt, params, speculation=False)[0].outputs[0]
        assert request.answers[0].row.output == alone.token_ids
    assert (worker.shadow.checked, worker.shadow.differed) == (len(cases), 0)
