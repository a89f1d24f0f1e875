"""What a pass over m token rows costs, t(m), in Slipstream and in llama.cpp, interleaved on the same GGUF.

    python bench/passes.py MODEL.gguf --peer /path/llamacpp-venv/bin/python
    python bench/passes.py MODEL --contexts 200 4000

The second form asks what a long context costs: the extra time of passes over 1, 4 and 8 rows beside the time that
reading the extra keys and values takes at the bandwidth measured in the same run; the two contexts take turns.

Passes of 64 rows and fewer return logits for every row, larger ones are prefill. Prints milliseconds (medians) and
ratios, and t(m)/t(1).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

WORKERS = Path(__file__).parent / "workers"
ROWS = (1, 2, 4, 8, 16, 32, 850)
CONTEXT_ROWS = (1, 4, 8)


def start(python: str, script: str, arguments: list[str]) -> tuple[subprocess.Popen[str], dict]:
    worker = subprocess.Popen(
        [python, str(WORKERS / script), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    line = worker.stdout.readline()
    if not line:
        raise SystemExit(f"{script} stopped; run it by hand to see why")
    ready = json.loads(line)
    print(script, ready["version"], ready.get("kernels", ""))
    return worker, ready


def tell(worker: subprocess.Popen[str], order: dict) -> dict:
    worker.stdin.write(json.dumps(order) + "\n")
    worker.stdin.flush()
    return json.loads(worker.stdout.readline())


def ask(worker: subprocess.Popen[str], **order: int) -> float:
    return float(tell(worker, order)["seconds"]) * 1e3


def compare_contexts(args: argparse.Namespace) -> None:
    short, long = args.contexts
    arguments = [args.model, str(args.threads), f"{short},{long}"]
    worker, ready = start(sys.executable, "slipstream_passes.py", arguments)
    extra_bytes = (long - short) * ready["kv_bytes_per_token"]
    times: dict[tuple[int, int], list[float]] = {}
    bandwidths = []
    for _ in range(args.repeat + 1):
        bandwidths.append(tell(worker, {})["bandwidth"])
        for rows in CONTEXT_ROWS:
            for _ in range(4):
                for context in args.contexts:
                    times.setdefault((rows, context), []).append(ask(worker, rows=rows, context=context))
    bandwidth = statistics.median(bandwidths)
    explained = extra_bytes / bandwidth / 1e6
    print(
        f"{extra_bytes / 1e6:.0f} MB of keys and values more at {long} tokens than at {short}; read bandwidth "
        f"{bandwidth:.1f} GB/s ({min(bandwidths):.1f} to {max(bandwidths):.1f}), which explains {explained:.2f} ms"
    )
    print(
        f"{'rows':>5} {f'ms at {short}':>12} {f'ms at {long}':>12} {'extra ms':>10} {'fastest':>10} {'/ explained':>12}"
    )
    for rows in CONTEXT_ROWS:
        a, b = (times[rows, context][4:] for context in args.contexts)
        extra = statistics.median(b) - statistics.median(a)
        print(
            f"{rows:5d} {statistics.median(a):12.2f} {statistics.median(b):12.2f} {extra:10.2f} "
            f"{min(b) - min(a):10.2f} {extra / explained:12.2f}"
        )


def compare_rows(args: argparse.Namespace) -> None:
    arguments = [args.model, str(args.threads), str(args.context)]
    workers = {"slipstream": start(sys.executable, "slipstream_passes.py", arguments)[0]}
    if args.peer:
        workers["llama.cpp"] = start(args.peer, "llamacpp_passes.py", arguments)[0]
    times: dict[tuple[str, int], list[float]] = {}
    for turn in range(args.repeat + 1):
        for name, worker in workers.items():
            time.sleep(0.2)  # lets the other engine's threads go to sleep
            for rows in args.rows:
                if turn <= 3 or rows <= 64:
                    times.setdefault((name, rows), []).append(ask(worker, rows=rows))
    median = {key: statistics.median(values[1:]) for key, values in times.items()}
    print(f"{'rows':>5} " + " ".join(f"{name + ' ms':>14} {'t(m)/t(1)':>10}" for name in workers) + "   ratio")
    for rows in args.rows:
        cells = [
            f"{median[name, rows]:14.2f} {median[name, rows] / median[name, args.rows[0]]:10.2f}" for name in workers
        ]
        ratio = f"{median['slipstream', rows] / median['llama.cpp', rows]:8.2f}" if args.peer else ""
        print(f"{rows:5d} " + " ".join(cells) + ratio)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--peer", help="python of an environment with llama-cpp-python; without it Slipstream alone")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--contexts", type=int, nargs=2, metavar=("SHORT", "LONG"), help="what a long context costs")
    args = parser.parse_args()
    if args.contexts:
        compare_contexts(args)
    else:
        compare_rows(args)


if __name__ == "__main__":
    main()
