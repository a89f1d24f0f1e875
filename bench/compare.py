"""Slipstream and its peers on the same rows and the same weights, interleaved in one run.

    python bench/compare.py --rows rows.jsonl --out bench/results/gguf \\
        slipstream:plain,auto=.venv/bin/python:MODEL.gguf \\
        llamacpp:plain,prompt_lookup=/path/venv/bin/python:MODEL.gguf

Each engine runs in a process and an environment of its own (their pins conflict) and answers one request at a time
from cold caches; within a repeat the settings take turns on each row, in rotating order. A one-token run stands for
the prefill; decode = total - prefill. Everything is greedy. OUT.json holds every run and is written after each row: the
same command goes on where an interrupted one stopped. OUT.md has medians, paired ratios and their intervals.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from slipstream.bench import paired
from slipstream.bench.machine import cpu_name
from slipstream.core.rows import read_rows

WORKERS = Path(__file__).parent / "workers"
PAUSE_S = 0.15  # lets the last engine's threads go to sleep
KINDS = ("total", "decode", "prefill")

Pair = tuple[str, str]
"""An engine and one of its settings."""
Run = dict[str, Any]
Messages = list[dict[str, str]]


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

    def ask(self, setting: str, messages: Messages, limit: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"setting": setting, "messages": messages, "max_tokens": limit}) + "\n")
        self.process.stdin.flush()
        return self._read()

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


class Comparison:
    """All runs so far, and the file they are kept in."""

    def __init__(self, args: argparse.Namespace, rows: list[Messages], engines: list[Engine]) -> None:
        self.args, self.rows, self.engines = args, rows, engines
        self.pairs: list[Pair] = [(engine.name, setting) for engine in engines for setting in engine.settings]
        self.path = Path(args.out).with_suffix(".json")
        self.conditions = {
            "machine": {"cpu": cpu_name(), "threads": args.threads, "cores": os.cpu_count()},
            "versions": {engine.name: engine.version for engine in engines},
            "models": {engine.name: Path(engine.model).name for engine in engines},
            "rows": [row[-1]["content"][:60] for row in rows],
            "max_tokens": args.max_tokens,
        }
        self.runs: list[Run] = []
        if self.path.exists():
            held = json.loads(self.path.read_text())
            if any(held.get(name) != value for name, value in self.conditions.items()):
                raise SystemExit(f"{self.path} was measured under other conditions; remove it or choose another --out")
            self.runs = held["runs"]

    def measure(self) -> None:
        """Run what is missing, repeat after repeat, for as long as --minutes allows."""
        known = {(run["engine"], run["setting"], run["row"], run["repeat"]) for run in self.runs}
        started, done = time.monotonic(), 0
        todo = len(self.pairs) * len(self.rows) * self.args.repeat - len(known)
        for engine in self.engines:  # load and warm up
            for setting in engine.settings:
                engine.ask(setting, self.rows[0], 4)
        for repeat in range(self.args.repeat):
            for index, row in enumerate(self.rows):
                for name, setting in self._order(repeat + index):
                    if (name, setting, index, repeat) in known:
                        continue
                    run = self._run(name, setting, row)
                    self.runs.append({"engine": name, "setting": setting, "row": index, "repeat": repeat, **run})
                    done += 1
                self.save()
                minutes = (time.monotonic() - started) / 60
                if done:
                    left = minutes / done * (todo - done)
                    print(
                        f"repeat {repeat + 1} row {index}: {done} of {todo} runs, {left:.0f} minutes left", flush=True
                    )
                if self.args.minutes and minutes > self.args.minutes:
                    print("stopped by --minutes; the same command goes on", flush=True)
                    return

    def _order(self, turn: int) -> list[Pair]:
        first = turn % len(self.pairs)
        return self.pairs[first:] + self.pairs[:first]

    def _run(self, name: str, setting: str, row: Messages) -> Run:
        engine = next(engine for engine in self.engines if engine.name == name)
        time.sleep(PAUSE_S)
        first = engine.ask(setting, row, 1)["seconds"]
        answer = engine.ask(setting, row, self.args.max_tokens)
        return {"prefill_s": first, "total_s": answer["seconds"], "tokens": answer["tokens"], "text": answer["text"]}

    def save(self) -> None:
        """Everything, whole or not at all."""
        result = {**self.conditions, "date": time.strftime("%Y-%m-%d"), **report(self.runs, self.args.minimum)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_suffix(".part")
        fresh.write_text(json.dumps({**result, "minimum": self.args.minimum, "runs": self.runs}, indent=1))
        fresh.replace(self.path)
        self.path.with_suffix(".md").write_text(table(result))


def speed(run: Run, kind: str) -> float:
    """Tokens per second: over everything, over decoding alone; for prefill prompts per second."""
    if kind == "prefill":
        return float(1 / run["prefill_s"])
    if kind == "total":
        return float(run["tokens"] / run["total_s"])
    return float((run["tokens"] - 1) / max(run["total_s"] - run["prefill_s"], 1e-6))


def by_row(runs: list[Run], pair: Pair, kind: str) -> dict[int, dict[int, float]]:
    """Speeds of one setting: by row and repeat."""
    found: dict[int, dict[int, float]] = {}
    for run in runs:
        if (run["engine"], run["setting"]) == pair:
            found.setdefault(run["row"], {})[run["repeat"]] = speed(run, kind)
    return found


def report(runs: list[Run], minimum: int) -> dict[str, Any]:
    """Medians per setting, and ratios, over the rows on which every engine wrote `minimum` tokens or more."""
    short = {run["row"] for run in runs if run["tokens"] < minimum}
    kept = [run for run in runs if run["row"] not in short]
    pairs: list[Pair] = list(dict.fromkeys((run["engine"], run["setting"]) for run in kept))
    summary = []
    for pair in pairs:
        speeds = {kind: by_row(kept, pair, kind) for kind in KINDS}
        medians = {kind: [statistics.median(row.values()) for row in rows.values()] for kind, rows in speeds.items()}
        spreads = [(max(row.values()) - min(row.values())) / min(row.values()) for row in speeds["total"].values()]
        summary.append(
            {
                "engine": pair[0],
                "setting": pair[1],
                "rows": len(medians["total"]),
                "repeats": max(len(row) for row in speeds["total"].values()),
                "prefill_s": statistics.median(1 / value for value in medians["prefill"]),
                "decode_tokens_per_second": paired.geometric_mean(medians["decode"]),
                "total_tokens_per_second": paired.geometric_mean(medians["total"]),
                "spread": statistics.median(spreads),
            }
        )
    ratios = {kind: compare(kept, pairs, kind) for kind in KINDS}
    return {"left_out": sorted(short), "summary": summary, "ratios": ratios}


def compare(runs: list[Run], pairs: list[Pair], kind: str) -> dict[str, dict[str, Any]]:
    """Slipstream's settings against every other setting, and against each peer's best one of every row.

    Ratios pair runs of the same repeat; per row their median counts, over rows the geometric mean.
    """
    found: dict[str, dict[str, Any]] = {}
    speeds = {pair: by_row(runs, pair, kind) for pair in pairs}
    peers = [name for name in dict.fromkeys(name for name, _ in pairs) if name != "slipstream"]
    for pair in pairs:
        if pair[0] != "slipstream":
            continue
        rivals = {f"{name} {setting}": [(name, setting)] for name, setting in pairs if (name, setting) != pair}
        rivals |= {f"{peer} best per row": [other for other in pairs if other[0] == peer] for peer in peers}
        for title, others in rivals.items():
            groups = {}
            for row, mine in speeds[pair].items():
                known = [speeds[other][row] for other in others if speeds[other].get(row)]
                theirs = max(known, key=lambda values: statistics.median(values.values()), default={})
                both = sorted(mine.keys() & theirs.keys())
                if both:
                    groups[str(row)] = [mine[repeat] / theirs[repeat] for repeat in both]
            if groups:
                estimate = paired.over_groups(groups)
                least = min(statistics.median(values) for values in groups.values())
                found[f"{pair[1]} / {title}"] = {
                    "ratio": estimate.value, "low": estimate.low, "high": estimate.high, "least_row": least,
                }  # fmt: skip
    return found


def table(result: dict[str, Any]) -> str:
    """The results for people."""
    machine, repeats = result["machine"], max((r["repeats"] for r in result["summary"]), default=0)
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = [
        f"{machine['cpu']}, {machine['threads']} threads, {result['date']}; {result['max_tokens']} tokens at most, "
        f"greedy, medians of {repeats} interleaved repeats; {versions}; rows left out: {len(result['left_out'])}",
        "",
        "| engine | setting | rows | prefill s | decode tokens/s | total tokens/s | spread |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['engine']} | {r['setting']} | {r['rows']} | {r['prefill_s']:.3f} "
        f"| {r['decode_tokens_per_second']:.1f} | {r['total_tokens_per_second']:.1f} | {r['spread']:.0%} |"
        for r in result["summary"]
    ]
    head = "| speed ratio, geometric mean over rows (95 % interval) | total | decode | prefill | least row, total |"
    lines += ["", head, "|---|---|---|---|---|"]
    for name, found in result["ratios"]["total"].items():
        cells = [result["ratios"][kind][name] for kind in KINDS]
        shown = " | ".join(f"{one['ratio']:.2f} ({one['low']:.2f}-{one['high']:.2f})" for one in cells)
        lines.append(f"| {name} | {shown} | {found['least_row']:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="+", help="NAME:SETTING[,SETTING]=PYTHON:MODEL")
    parser.add_argument("--rows", required=True, help='JSONL of {"messages": [...]}')
    parser.add_argument("--out", required=True, help="path of the results, without ending")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--minutes", type=float, help="stop after a row once this time has passed")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--limit", type=int, help="first N rows only")
    parser.add_argument("--minimum", type=int, default=32, help="rows with shorter answers are left out")
    args = parser.parse_args()
    rows = [row.messages for row in read_rows(Path(args.rows), args.limit)]
    engines = [Engine(spec, args.threads) for spec in args.engines]
    try:
        comparison = Comparison(args, rows, engines)
        comparison.measure()
    finally:
        for engine in engines:
            engine.close()
    print(comparison.path.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
