"""The time of one pass of Slipstream over m new tokens, logits for all: the cost of verifying. See bench/passes.py."""

import json
import sys
import time

import slipstream
from slipstream import kernels
from slipstream.core.tree import chain
from slipstream.models.registry import ensure
from slipstream.targets.base import RowInput
from slipstream.targets.native.model import NativeTarget

CONTEXTS = [int(context) for context in sys.argv[3].split(",")]
kernels.set_threads(int(sys.argv[2]))
target = NativeTarget.load(ensure(sys.argv[1]), max_context=max(CONTEXTS) + 1024, slots=len(CONTEXTS))
slots = {}
for context in CONTEXTS:
    slots[context] = target.open()
    target.prefill(slots[context], [1 + index % 7 for index in range(context)])
ready = {"version": slipstream.__version__, "kernels": kernels.info()["kernels"]}
print(json.dumps({**ready, "kv_bytes_per_token": target.kv_bytes_per_token}), flush=True)
for line in sys.stdin:
    order = json.loads(line)
    if "rows" not in order:
        print(json.dumps({"bandwidth": kernels.read_bandwidth()}), flush=True)
        continue
    context = order.get("context", CONTEXTS[0])
    tokens = [1 + index % 7 for index in range(order["rows"])]
    started = time.perf_counter()
    if len(tokens) <= 64:
        target.forward([RowInput(slots[context], tokens[0], chain(tokens[1:]))])
    else:
        target.prefill(slots[context], tokens)
    seconds = time.perf_counter() - started
    target.truncate(slots[context], context)
    print(json.dumps({"seconds": seconds}), flush=True)
