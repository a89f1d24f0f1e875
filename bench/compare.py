"""Slipstream and its peers on the same rows and the same weights, interleaved in one run.

    python bench/compare.py --rows rows.jsonl --out bench/results/gguf \\
        slipstream:plain,auto=.venv/bin/python:MODEL.gguf \\
        llamacpp:plain,prompt_lookup=/path/venv/bin/python:MODEL.gguf

Each engine runs in a process and an environment of its own (their pins conflict) and answers one request at a time;
for every row the settings take turns, in rotating order, `--repeat` times. A one-token run stands for the prefill;
decode = total - prefill. Everything is greedy. Writes OUT.json (every number) and OUT.md (medians, ratios, machine).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

WORKERS = Path(__file__).parent / "workers"
PAUSE_S = 0.15  # lets the last engine's threads go to sleep


class Engine:
    """One worker process."""

    def __init__(self, spec: str, threads: int) -> None:
        head, _, rest = spec.partition("=")
        self.name, _, settings = head.partition(":")
        python, _, self.model = rest.partition(":")
        self.settings = settings.split(",")
        script = WORKERS / f"{self.name}_worker.py"
        if not script.exists():
            known = ", ".join(sorted(path.stem.removesuffix("_worker") for path in WORKERS.glob("*_worker.py")))
            raise SystemExit(f"unknown engine {self.name!r}; known: {known}")
        self.process = subprocess.Popen(
            [python, str(script), self.model, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.version = self._read()["version"]

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} stopped; run its worker by hand to see why")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise SystemExit(f"{self.name}: {answer['error']}")
        return answer

    def ask(self, setting: str, messages: list[dict[str, str]], limit: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        time.sleep(PAUSE_S)
        self.process.stdin.write(json.dumps({"setting": setting, "messages": messages, "max_tokens": limit}) + "\n")
        self.process.stdin.flush()
        return self._read()


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def measure(engines: list[Engine], rows: list[dict[str, Any]], limit: int, repeat: int) -> list[dict[str, Any]]:
    """One record per row and setting: medians over the repeats, prefill and decode apart."""
    pairs = [(engine, setting) for engine in engines for setting in engine.settings]
    for engine, setting in pairs:  # load and warm up
        engine.ask(setting, rows[0]["messages"], 4)
    records = []
    for index, row in enumerate(rows):
        runs: dict[int, list[tuple[float, float]]] = {number: [] for number in range(len(pairs))}
        texts: dict[int, tuple[int, str]] = {}
        for turn in range(repeat):
            for step in range(len(pairs)):
                number = (turn + index + step) % len(pairs)
                engine, setting = pairs[number]
                first = engine.ask(setting, row["messages"], 1)["seconds"]
                answer = engine.ask(setting, row["messages"], limit)
                runs[number].append((first, answer["seconds"]))
                texts[number] = (answer["tokens"], answer["text"])
        for number, (engine, setting) in enumerate(pairs):
            prefill = statistics.median(first for first, _ in runs[number])
            totals = [total for _, total in runs[number]]
            total = statistics.median(totals)
            records.append(
                {
                    "engine": engine.name,
                    "setting": setting,
                    "row": index,
                    "category": row.get("category", ""),
                    "tokens": texts[number][0],
                    "prefill_s": prefill,
                    "decode_s": max(total - prefill, 1e-9),
                    "total_s": total,
                    "spread": (max(totals) - min(totals)) / total,
                    "text": texts[number][1],
                }
            )
            print(f"row {index} {engine.name}:{setting} {texts[number][0]} tokens {total:.2f} s", flush=True)
    return records


def rate(record: dict[str, Any], kind: str) -> float:
    """Tokens per second: over everything, or over decoding alone."""
    if kind == "total":
        return float(record["tokens"] / record["total_s"])
    return float((record["tokens"] - 1) / record["decode_s"])


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values))) if values else float("nan")


def summary(records: list[dict[str, Any]], minimum: int) -> list[dict[str, Any]]:
    """Per setting: medians and geometric means over the rows where every engine wrote `minimum` tokens or more."""
    rows = {record["row"] for record in records}
    rows -= {record["row"] for record in records if record["tokens"] < minimum}
    table = []
    for key in dict.fromkeys((record["engine"], record["setting"]) for record in records):
        mine = [r for r in records if (r["engine"], r["setting"]) == key and r["row"] in rows]
        table.append(
            {
                "engine": key[0],
                "setting": key[1],
                "rows": len(mine),
                "prefill_s": statistics.median(r["prefill_s"] for r in mine),
                "decode_tokens_per_second": geometric_mean([rate(r, "decode") for r in mine]),
                "total_tokens_per_second": geometric_mean([rate(r, "total") for r in mine]),
                "spread": statistics.median(r["spread"] for r in mine),
            }
        )
    return table


def ratios(records: list[dict[str, Any]], minimum: int, kind: str) -> dict[str, float]:
    """Geometric mean over rows of Slipstream's best setting against each peer's plain and best setting per row."""
    skipped = {record["row"] for record in records if record["tokens"] < minimum}
    rates: dict[tuple[str, int], dict[str, float]] = {}
    for record in records:
        if record["row"] not in skipped:
            rates.setdefault((record["engine"], record["row"]), {})[record["setting"]] = rate(record, kind)
    ours = {row: values for (engine, row), values in rates.items() if engine == "slipstream"}
    found: dict[str, float] = {}
    for peer in dict.fromkeys(engine for engine, _ in rates):
        rows = [row for engine, row in rates if engine == peer and row in ours]
        for our in next(iter(ours.values()), {}):
            if peer != "slipstream":
                best = [ours[row][our] / max(rates[peer, row].values()) for row in rows]
                found[f"{our} / {peer} best per row"] = geometric_mean(best)
            for setting in rates[peer, rows[0]] if rows else ():
                if (peer, setting) != ("slipstream", our):
                    each = [ours[row][our] / rates[peer, row][setting] for row in rows]
                    found[f"{our} / {peer} {setting}"] = geometric_mean(each)
    return found


def write(args: argparse.Namespace, engines: list[Engine], records: list[dict[str, Any]]) -> None:
    machine = {"cpu": cpu_name(), "threads": args.threads, "cores": os.cpu_count(), "date": time.strftime("%Y-%m-%d")}
    versions = {engine.name: engine.version for engine in engines}
    result = {
        "machine": machine,
        "versions": versions,
        "max_tokens": args.max_tokens,
        "repeat": args.repeat,
        "summary": summary(records, args.minimum),
        "ratios": {kind: ratios(records, args.minimum, kind) for kind in ("total", "decode")},
        "records": records,
    }
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(result, indent=1))
    lines = [
        f"{machine['cpu']}, {args.threads} threads, {machine['date']}; {args.max_tokens} tokens at most, greedy, "
        f"medians of {args.repeat} interleaved runs; "
        + ", ".join(f"{name} {version}" for name, version in versions.items()),
        "",
        "| engine | setting | rows | prefill s | decode tokens/s | total tokens/s | spread |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['engine']} | {r['setting']} | {r['rows']} | {r['prefill_s']:.3f} "
        f"| {r['decode_tokens_per_second']:.1f} | {r['total_tokens_per_second']:.1f} | {r['spread']:.0%} |"
        for r in result["summary"]
    ]
    lines += ["", "| ratio (geometric mean over rows) | total time | decode time |", "|---|---|---|"]
    decode = result["ratios"]["decode"]
    lines += [f"| {name} | {value:.2f}x | {decode[name]:.2f}x |" for name, value in result["ratios"]["total"].items()]
    out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print(out.with_suffix(".md").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="+", help="NAME:SETTING[,SETTING]=PYTHON:MODEL")
    parser.add_argument("--rows", required=True, help='JSONL of {"messages": [...]}')
    parser.add_argument("--out", required=True, help="path of the results, without ending")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--limit", type=int, help="first N rows only")
    parser.add_argument("--minimum", type=int, default=32, help="rows with shorter answers are left out")
    args = parser.parse_args()
    rows = [json.loads(line) for line in Path(args.rows).read_text().splitlines() if line.strip()][: args.limit]
    engines = [Engine(spec, args.threads) for spec in args.engines]
    write(args, engines, measure(engines, rows, args.max_tokens, args.repeat))


if __name__ == "__main__":
    main()
