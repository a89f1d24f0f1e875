"""Servers on the same rows and the same weights, interleaved in one run: tokens per second at a given concurrency.

    python bench/serve_peers.py --rows rows.jsonl --out bench/results/serve \\
        'slipstream=.venv/bin/slipstream serve MODEL --port {port}' \\
        'vllm=/path/venv/bin/vllm serve MODEL --port {port} --dtype float32 --max-model-len 2048'

Each server is started once and asked as `slipstream bench serve` asks, all greedy. They take turns, in rotating order;
whoever is not asked is stopped (SIGSTOP), so that an idle one that spins takes nothing. The first round warms up and is
not counted. The first server named is compared with each of the others by the median of paired ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx

from slipstream.bench import paired
from slipstream.bench.load import Load
from slipstream.bench.load_report import summary
from slipstream.cli.bench import read_rows, run_load

START_S = 900
"""Seconds that a server may take to be ready; some compile first."""
PAUSE_S = 0.5


class Server:
    """One server in a process group of its own."""

    def __init__(self, spec: str) -> None:
        self.name, _, command = spec.partition("=")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = Path(f"/tmp/serve_peers_{self.name}.log").open("w")  # noqa: SIM115  open to the end
        words = shlex.split(command.replace("{port}", str(port)))
        self.process = subprocess.Popen(words, stdout=self.log, stderr=self.log, start_new_session=True)
        self._wait()

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


def measure(server: Server, rows: list[Any], options: argparse.Namespace) -> dict[str, Any]:
    """One round over all rows."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="NAME=COMMAND")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = read_rows(options.rows, options.limit)
    servers: list[Server] = []
    rounds: dict[str, list[dict[str, Any]]] = {}
    try:
        for spec in options.servers:
            servers.append(Server(spec))
            servers[-1].signal(signal.SIGSTOP)
        for number in range(options.repeats + 1):
            order = servers[number % len(servers) :] + servers[: number % len(servers)]
            for server in order:
                found = measure(server, rows, options)
                if number:
                    rounds.setdefault(server.name, []).append(found)
                print(f"round {number} {server.name}: {found['tokens_per_second']:.1f} tokens/s", flush=True)
        rounds = {server.name: rounds[server.name] for server in servers}
        options.out.with_suffix(".json").write_text(json.dumps(rounds, indent=1))
        options.out.with_suffix(".md").write_text(report(rounds, options))
        print(report(rounds, options))
    finally:
        for server in servers:
            server.end()


if __name__ == "__main__":
    main()
