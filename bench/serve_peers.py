"""Servers on the same rows and the same weights, interleaved in one run: tokens per second at a given concurrency.

    python bench/serve_peers.py --rows rows.jsonl --out serve \\
        'slipstream=.venv/bin/slipstream serve MODEL --port {port}' \\
        'vllm=env VLLM_CPU_KVCACHE_SPACE=2 /path/bin/vllm serve MODEL --port {port} --dtype float32'

Each server is started once and asked as `slipstream bench serve` asks, all greedy. They take turns, in rotating order;
whoever is not asked is stopped (SIGSTOP), so that an idle one that spins takes nothing. The rows are dealt to the
rounds, every category alike, so that no server ever sees a row twice: what caches and drafters keep of answers does
not help. The first round warms up and is not counted. The first server named is compared with each of the others by
the median of paired ratios. Logs of the servers go to a new temporary directory.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from collections import defaultdict
from datetime import date
from itertools import zip_longest
from pathlib import Path
from typing import Any

import httpx

from slipstream.bench import paired
from slipstream.bench.load import Load
from slipstream.bench.load_report import summary
from slipstream.bench.machine import machine
from slipstream.cli.bench import run_load
from slipstream.core.rows import read_rows

START_S = 900
"""Seconds that a server may take to be ready; some compile first."""
PAUSE_S = 0.5


class Server:
    """One server in a process group of its own."""

    def __init__(self, spec: str, logs: Path) -> None:
        self.name, _, self.command = spec.partition("=")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = (logs / f"{self.name}.log").open("w")
        words = shlex.split(self.command.replace("{port}", str(port)))
        self.process = subprocess.Popen(words, stdout=self.log, stderr=self.log, start_new_session=True)
        self._wait()
        self.version_found = self._version()

    def _wait(self) -> None:
        limit = time.monotonic() + START_S
        while True:
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            if self.process.poll() is not None or time.monotonic() > limit:
                raise SystemExit(f"{self.name} did not start; see {self.log.name}")
            time.sleep(1)

    def _version(self) -> str:
        """What the server calls itself: vLLM has a path for it, others name it with their answers."""
        found = httpx.get(f"{self.url}/version", timeout=60)
        if found.status_code == 200:
            return str(found.json()["version"])
        body = {"prompt": "Hello", "max_tokens": 1}
        return str(httpx.post(f"{self.url}/v1/completions", json=body, timeout=60).json().get("system_fingerprint"))

    def signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def end(self) -> None:
        for number in (signal.SIGCONT, signal.SIGTERM):
            self.signal(number)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
        self.log.close()


def deal(path: Path, rounds: int, size: int, only: list[str]) -> list[list[Any]]:
    """Conversations for so many rounds, none in two of them, all categories (or `only` these) as far as they go."""
    categories = defaultdict(list)
    for row in read_rows(path):
        if not only or row.category in only:
            categories[row.category].append(row.messages)
    order = [row for rows in zip_longest(*categories.values()) for row in rows if row is not None]
    if len(order) < rounds * size:
        raise SystemExit(f"{path} has {len(order)} rows; {rounds} rounds of {size} need {rounds * size}")
    return [order[number * size : (number + 1) * size] for number in range(rounds)]


def measure(server: Server, rows: list[Any], options: argparse.Namespace) -> dict[str, Any]:
    """One round over its rows."""
    server.signal(signal.SIGCONT)
    time.sleep(PAUSE_S)
    load = Load(f"{server.url}/v1", rows, len(rows), options.concurrency, max_tokens=options.max_tokens)
    found = summary(run_load(load, lambda done: None))
    server.signal(signal.SIGSTOP)
    if found["errors"]:
        raise SystemExit(f"{server.name} failed: {found['errors']}; see {server.log.name}")
    return found


def report(rounds: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> str:
    """Medians and paired ratios as a table."""
    first = next(iter(rounds))
    lines = [
        f"{options.concurrency} at a time, {options.max_tokens} tokens at most, {len(rounds[first])} rounds each.",
        "",
        "| server | tokens/s | to first token, p50 | per token, p50 | against |",
        "|---|---|---|---|---|",
    ]
    for name, found in rounds.items():
        speeds = speed_of(found)
        first_s, token_s = ([each[kind]["p50"] for each in found] for kind in ("ttft_s", "tpot_s"))
        against = "" if name == first else str(paired.median(paired.paired(speed_of(rounds[first]), speeds)))
        middle = [paired.median(values).value for values in (speeds, first_s, token_s)]
        lines.append(f"| {name} | {middle[0]:.1f} | {1e3 * middle[1]:.0f} ms | {1e3 * middle[2]:.1f} ms | {against} |")
    return "\n".join(
        [*lines, "", f"against: {first}'s tokens/s over this one's; median of paired rounds, 95 % interval.", ""]
    )


def speed_of(found: list[dict[str, Any]]) -> list[float]:
    return [each["tokens_per_second"] for each in found]


def save(servers: list[Server], rounds: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> None:
    """Every number, and what it was measured on and with, beside the table."""
    first = next(iter(rounds))
    ratios = {name: paired.paired(speed_of(rounds[first]), speed_of(found)) for name, found in rounds.items()}
    whole = {
        "machine": machine(),
        "date": date.today().isoformat(),
        "versions": {server.name: server.version_found for server in servers},
        "commands": {server.name: server.command for server in servers},
        "concurrency": options.concurrency,
        "max_tokens": options.max_tokens,
        "rows_per_round": options.limit,
        "only": options.only,
        "ratios": {name: values for name, values in ratios.items() if name != first},
        "rounds": rounds,
    }
    options.out.with_suffix(".json").write_text(json.dumps(whole, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(report(rounds, options))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="NAME=COMMAND")
    parser.add_argument("--rows", type=Path, required=True, help="lines with messages or turns, and a category")
    parser.add_argument("--only", default="", help="these categories, with commas")
    parser.add_argument("--limit", type=int, default=24, help="rows of a round")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    dealt = deal(options.rows, options.repeats + 1, options.limit, options.only.split(",") if options.only else [])
    logs = Path(tempfile.mkdtemp(prefix="serve_peers_"))
    print(f"logs: {logs}", flush=True)
    servers: list[Server] = []
    rounds: dict[str, list[dict[str, Any]]] = {}
    try:
        for spec in options.servers:
            servers.append(Server(spec, logs))
            servers[-1].signal(signal.SIGSTOP)
        for number, rows in enumerate(dealt):
            turn = number % len(servers)
            for server in servers[turn:] + servers[:turn]:
                found = measure(server, rows, options)
                if number:
                    rounds.setdefault(server.name, []).append(found)
                print(f"round {number} {server.name}: {found['tokens_per_second']:.1f} tokens/s", flush=True)
        rounds = {server.name: rounds[server.name] for server in servers}
        save(servers, rounds, options)
        print(report(rounds, options))
    finally:
        for server in servers:
            server.end()


if __name__ == "__main__":
    main()
