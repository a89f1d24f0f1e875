"""Speculation against plain batching: tokens per second of many requests side by side in one engine.

    python bench/batches.py smollm2 --rows rows.jsonl --sizes 4,8,16,32 --out batches

Each repeat takes other rows, at temperatures 0, 0.7 and 1 by turns, and answers all of them at once, plainly and with
speculation, in changing order and from cold caches. Decoding alone is compared, and all of it with the prompts read;
the ratio is the median of paired runs. The tokens of both must be the same.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import date
from pathlib import Path
from typing import Any

from slipstream import LLM, SamplingParams
from slipstream.bench import paired
from slipstream.bench.machine import machine
from slipstream.cli.bench import kernels
from slipstream.core.rows import read_rows

TEMPERATURES = (0.0, 0.7, 1.0)


def answer(llm: LLM, prompts: list[Any], max_tokens: int, speculation: bool) -> tuple[dict[str, float], list[Any]]:
    """Seconds of decoding and in all, tokens per pass; and the tokens."""
    llm.forget()
    params = [
        SamplingParams(max_tokens=max_tokens, temperature=TEMPERATURES[place % 3], seed=place, ignore_eos=True)
        for place in range(len(prompts))
    ]
    started = time.perf_counter()
    results = llm.chat(prompts, params, speculation=speculation)
    seconds = time.perf_counter() - started
    reading = sum(result.timing.prefill_s for result in results)
    outputs = [result.outputs[0] for result in results]
    tokens, steps = sum(len(o.token_ids) for o in outputs), sum(o.speculation.num_steps for o in outputs)
    drafted = sum(o.speculation.num_draft_tokens for o in outputs)
    found = {"decode": tokens / (seconds - reading), "total": tokens / seconds}
    return found | {"tokens_per_pass": tokens / steps, "drafted": drafted / steps}, [o.token_ids for o in outputs]


def measure(llm: LLM, rows: list[Any], size: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Pairs of runs; the first pair warms up and is not counted."""
    pairs = []
    for repeat in range(args.repeats + 1):
        prompts = [rows[(repeat * size + place) % len(rows)] for place in range(size)]
        found, tokens = {}, {}
        for speculation in (False, True) if repeat % 2 else (True, False):
            name = "speculative" if speculation else "plain"
            found[name], tokens[name] = answer(llm, prompts, args.max_tokens, speculation)
        if tokens["plain"] != tokens["speculative"]:
            raise SystemExit(f"the tokens differ at {size} side by side, repeat {repeat}")
        if repeat:
            pairs.append(found)
            ratio = found["speculative"]["decode"] / found["plain"]["decode"]
            print(f"{size} side by side, repeat {repeat}: {ratio:.3f}", flush=True)
    return pairs


def line(size: int, pairs: list[dict[str, Any]]) -> str:
    """One row of the table."""

    def of(name: str, what: str) -> list[float]:
        return [pair[name][what] for pair in pairs]

    speeds = [paired.median(of(name, "decode")).value for name in ("plain", "speculative")]
    ratios = [paired.median(paired.paired(of("speculative", what), of("plain", what))) for what in ("decode", "total")]
    counts = [paired.median(of("speculative", what)).value for what in ("drafted", "tokens_per_pass")]
    cells = [size, *(f"{speed:.0f}" for speed in speeds), *ratios, *(f"{count:.2f}" for count in counts)]
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", type=Path, required=True, help="lines with messages or turns")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--sizes", default="1,4,8,16,32")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    sizes, rows = [int(word) for word in args.sizes.split(",")], [row.messages for row in read_rows(args.rows)]
    with LLM(args.model, args.draft, max_batch=max(sizes)) as llm:
        pairs = {size: measure(llm, rows, size, args) for size in sizes}
        about = {"machine": machine(), "date": date.today().isoformat(), "model": llm.name, "drafters": llm.drafters}
        about |= {"kernels": kernels(llm), "max_tokens": args.max_tokens}
    head = "| side by side | plain, tokens/s | speculative | decode | with prompts | drafted | tokens per pass |"
    table = "\n".join([head, "|---|---|---|---|---|---|---|", *(line(size, found) for size, found in pairs.items())])
    print(f"\n{table}")
    if args.out is not None:
        args.out.with_suffix(".json").write_text(json.dumps({**about, "pairs": pairs}, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(table + "\n")


if __name__ == "__main__":
    main()
