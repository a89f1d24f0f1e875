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

CONTEXT = int(sys.argv[3])
kernels.set_threads(int(sys.argv[2]))
target = NativeTarget.load(ensure(sys.argv[1]), max_context=CONTEXT + 1024, slots=1)
slot = target.open()
target.prefill(slot, [1 + index % 7 for index in range(CONTEXT)])
print(json.dumps({"version": slipstream.__version__}), flush=True)
for line in sys.stdin:
    rows = json.loads(line)["rows"]
    tokens = [1 + index % 7 for index in range(rows)]
    started = time.perf_counter()
    if rows <= 64:
        target.forward([RowInput(slot, tokens[0], chain(tokens[1:]))])
    else:
        target.prefill(slot, tokens)
    seconds = time.perf_counter() - started
    target.truncate(slot, CONTEXT)
    print(json.dumps({"seconds": seconds}), flush=True)
