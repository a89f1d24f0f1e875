"""The worker side of `bench/compare.py`: one engine per process, one JSON request per line in, one answer per line out.

A request is {"setting", "messages", "max_tokens"}; the answer {"seconds", "tokens", "text"} times the whole call from
cold caches. A request of one token stands for the prefill. Workers import nothing of Slipstream but their own engine.
"""

import json
import sys
import time
from collections.abc import Callable

Generate = Callable[[list[dict], int], tuple[int, str]]


def serve(version: str, load: Callable[[str], Generate]) -> None:
    """Answer requests until stdin closes. `load(setting)` returns generate(messages, max_tokens) -> (tokens, text)."""
    out, sys.stdout = sys.stdout, sys.stderr  # engines may print what they like
    loaded: dict[str, Generate] = {}
    print(json.dumps({"version": version}), file=out, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        setting = request["setting"]
        try:
            if setting not in loaded:
                loaded[setting] = load(setting)
            start = time.perf_counter()
            tokens, text = loaded[setting](request["messages"], request["max_tokens"])
            answer = {"seconds": time.perf_counter() - start, "tokens": tokens, "text": text}
        except Exception as error:  # the coordinator reports it beside the row
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out, flush=True)
