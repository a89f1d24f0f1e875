"""What a pass over m token rows costs, t(m), in Slipstream and in llama.cpp, interleaved on the same GGUF.

    python bench/passes.py MODEL.gguf --peer /path/llamacpp-venv/bin/python

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


def start(python: str, script: str, arguments: list[str]) -> subprocess.Popen[str]:
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
    print(script, json.loads(line)["version"])
    return worker


def ask(worker: subprocess.Popen[str], rows: int) -> float:
    worker.stdin.write(json.dumps({"rows": rows}) + "\n")
    worker.stdin.flush()
    return float(json.loads(worker.stdout.readline())["seconds"]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--peer", help="python of an environment with llama-cpp-python; without it Slipstream alone")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    args = parser.parse_args()
    arguments = [args.model, str(args.threads), str(args.context)]
    workers = {"slipstream": start(sys.executable, "slipstream_passes.py", arguments)}
    if args.peer:
        workers["llama.cpp"] = start(args.peer, "llamacpp_passes.py", arguments)
    times: dict[tuple[str, int], list[float]] = {}
    for turn in range(args.repeat + 1):
        for name, worker in workers.items():
            time.sleep(0.2)  # lets the other engine's threads go to sleep
            for rows in args.rows:
                if turn <= 3 or rows <= 64:
                    times.setdefault((name, rows), []).append(ask(worker, rows))
    median = {key: statistics.median(values[1:]) for key, values in times.items()}
    print(f"{'rows':>5} " + " ".join(f"{name + ' ms':>14} {'t(m)/t(1)':>10}" for name in workers) + "   ratio")
    for rows in args.rows:
        cells = [
            f"{median[name, rows]:14.2f} {median[name, rows] / median[name, args.rows[0]]:10.2f}" for name in workers
        ]
        ratio = f"{median['slipstream', rows] / median['llama.cpp', rows]:8.2f}" if args.peer else ""
        print(f"{rows:5d} " + " ".join(cells) + ratio)


if __name__ == "__main__":
    main()
