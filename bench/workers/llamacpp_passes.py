"""The time of one pass of llama.cpp over m new tokens, logits for all: the cost of verifying. See bench/passes.py."""

import json
import sys
import time

import llama_cpp as lib

CONTEXT = int(sys.argv[3])
THREADS = int(sys.argv[2])
lib.llama_backend_init()
settings = lib.llama_model_default_params()
model = lib.llama_model_load_from_file(sys.argv[1].encode(), settings)
options = lib.llama_context_default_params()
options.n_ctx, options.n_batch, options.n_ubatch = CONTEXT + 1024, 1024, 512
options.n_threads = options.n_threads_batch = THREADS
context = lib.llama_init_from_model(model, options)
memory = lib.llama_get_memory(context)


def decode(start: int, count: int, all_logits: bool) -> None:
    batch = lib.llama_batch_init(count, 0, 1)
    batch.n_tokens = count
    for index in range(count):
        batch.token[index] = 1 + index % 7
        batch.pos[index] = start + index
        batch.n_seq_id[index] = 1
        batch.seq_id[index][0] = 0
        batch.logits[index] = all_logits
    assert lib.llama_decode(context, batch) == 0
    lib.llama_synchronize(context)
    lib.llama_batch_free(batch)


decode(0, CONTEXT, False)
print(json.dumps({"version": lib.__version__}), flush=True)
for line in sys.stdin:
    rows = json.loads(line)["rows"]
    lib.llama_memory_seq_rm(memory, 0, CONTEXT, -1)
    started = time.perf_counter()
    decode(CONTEXT, rows, rows <= 64)
    print(json.dumps({"seconds": time.perf_counter() - started}), flush=True)
