"""Settings of speculation against each other on one model, interleaved: which is fastest, and is any slower than plain?

    python bench/settings.py smollm2 plain auto suffix recycling --rows rows.jsonl
    python bench/settings.py qwen2.5-coder-1.5b plain suffix model model,suffix --draft-model qwen2.5-coder-0.5b \
        --rows humaneval.jsonl --limit 8
    python bench/settings.py smollm2 plain auto --random-tokens 8 --temperature 1.5

A setting is a value of --draft ("auto" with the head that comes with the package, "model" for the one of --draft-model)
under the adaptive controller; with @N behind it always N nodes in a chain, with @Nt in a tree. All settings share one
loaded target and one measurement of its passes, run on the same row one after the other in changing order from cold
caches, and must give the same tokens. Times are those of decoding: the whole call but for reading prompts. Ratios are
paired within a repeat of a row.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slipstream import LLM, SamplingParams
from slipstream.bench import paired
from slipstream.build import load_target, open_named, with_shipped_head
from slipstream.control.adaptive import Adaptive
from slipstream.control.base import Controller
from slipstream.control.fixed import Fixed
from slipstream.control.measure import START_CONTEXT, START_ROWS, fastest
from slipstream.core.params import SamplingParams as Params
from slipstream.core.stats import total
from slipstream.drafters import build, parse
from slipstream.engine.engine import Engine
from slipstream.targets.base import Target
from slipstream.verify import make_verifier

Prompts = list[list[int]]
RANDOM_PROMPT = 64
"""Tokens of a prompt of random tokens."""


@dataclass
class Task:
    """Prompts that are answered together, timed as one, and the category they count in."""

    category: str
    prompts: Prompts


@dataclass
class Runs:
    """One setting: its engine, and seconds per token by task."""

    name: str
    engine: Engine
    drafters: list[Any]
    seconds: dict[int, list[float]] = field(default_factory=dict)
    passes: dict[int, float] = field(default_factory=dict)

    def ask(self, prompts: Prompts, params: Params) -> tuple[list[list[int]], float, float]:
        """Answers, seconds of decoding per token, tokens per pass."""
        started = time.perf_counter()
        results = self.engine.run([self.engine.add(prompt, params) for prompt in prompts])
        spent = time.perf_counter() - started - sum(result.timing.prefill_s for result in results)
        outputs = [result.outputs[0] for result in results]
        counts = [len(output.token_ids) for output in outputs]
        stats = total([output.speculation for output in outputs], counts)
        self.engine.forget()  # the next setting needs the slots, and begins as cold
        for drafter in self.drafters:
            drafter.forget()
        return [output.token_ids for output in outputs], spent / sum(counts), stats.tokens_per_pass


class Bench:
    """One loaded model and an engine per setting."""

    def __init__(self, args: argparse.Namespace) -> None:
        words = [word for name in args.settings for word in name.partition("@")[0].split(",")]
        heads = [word for word in words if word == "auto" or word.startswith("head:")]
        # The target hands out what a head reads.
        draft = heads[0] if heads else "none"
        self.llm = LLM(args.model, draft, max_batch=args.concurrent, max_context=args.max_context)
        self.args, self._drafts = args, dict[str, Target]()
        self._costs = fastest(self.llm.target, START_ROWS, 9, START_CONTEXT, 5.0)
        print("pass by rows, ms:", {size: round(1e3 * seconds, 2) for size, seconds in self._costs.items()}, flush=True)
        self.settings = [self._runs(name) for name in args.settings]

    def _runs(self, name: str) -> Runs:
        words, _, nodes = name.partition("@")
        draft = "none" if words == "plain" else words.replace("model", f"model:{self.args.draft_model}")
        built = self.llm._built
        specs = with_shipped_head(draft, parse(draft), built.file, built.runtime)
        drafters = build(specs, replace(built.materials, load_model=self._load))
        adaptive = Adaptive(self.args.max_nodes)
        adaptive.start_from(self._costs)
        controller: Controller = adaptive
        if nodes:
            controller = Fixed(int(nodes.rstrip("t")), "tree" if nodes.endswith("t") else "chain")
        verifier, batch = make_verifier("coupled"), self.args.concurrent
        engine = Engine(self.llm.target, self.llm.tokenizer, verifier, controller, drafters, max_batch=batch)
        return Runs(name, engine, drafters)

    def _load(self, name: str) -> Target:
        if name not in self._drafts:
            slots = (self.args.concurrent + 4) * len(self.args.settings)
            self._drafts[name] = load_target(open_named(name), self.llm.max_context, slots, None)
        return self._drafts[name]

    def measure(self, tasks: list[Task]) -> None:
        """Time every setting on every task, in turns. Raises SystemExit when their tokens differ."""
        args = self.args
        for runs in self.settings:
            runs.ask(tasks[0].prompts, SamplingParams(max_tokens=8))
        for number, task in enumerate(tasks):
            params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=number)
            answers: list[list[int]] = []
            for turn in range(args.repeats):
                for step in range(len(self.settings)):
                    runs = self.settings[(turn + number + step) % len(self.settings)]
                    found, seconds, per_pass = runs.ask(task.prompts, params)
                    if answers and found != answers:
                        sys.exit(f"{runs.name} gives other tokens on task {number} ({task.category})")
                    answers = found
                    if sum(map(len, found)) >= args.minimum:
                        runs.seconds.setdefault(number, []).append(seconds)
                        runs.passes[number] = per_pass

    def report(self, tasks: list[Task]) -> dict[str, Any]:
        """Ratios of speed by category: against the first setting, and against the best of the others."""
        table: dict[str, Any] = {}
        known = set(self.settings[0].seconds)
        categories = dict.fromkeys(task.category for number, task in enumerate(tasks) if number in known)
        members = {name: [n for n in sorted(known) if tasks[n].category == name] for name in categories}
        print(f"speed against {self.settings[0].name}: median of paired ratios (95 % interval), tokens per pass")
        for runs in self.settings:
            ratios = {name: _ratios(self.settings[0], runs, numbers) for name, numbers in members.items()}
            table[runs.name] = {"overall": paired.over_groups(ratios)}
            cells = []
            for name, values in ratios.items():
                table[runs.name][name] = estimate = paired.median(values)
                per_pass = sum(runs.passes[n] for n in members[name]) / len(members[name])
                cells.append(f"{name} {estimate} {per_pass:.2f}")
            print(f"{runs.name:16} {table[runs.name]['overall']} | " + " | ".join(cells))
        print("speed against the best other setting of the category")
        for runs in self.settings:
            cells = []
            for name, numbers in members.items():
                others = [other for other in self.settings if other is not runs]
                best = max(others, key=lambda other, name=name: table[other.name][name].value, default=runs)
                cells.append(f"{name} {paired.median(_ratios(best, runs, numbers))} of {best.name}")
            print(f"{runs.name:16} " + " | ".join(cells))
        return {name: {key: str(value) for key, value in row.items()} for name, row in table.items()}


def _ratios(base: Runs, ours: Runs, numbers: list[int]) -> list[float]:
    return [ratio for n in numbers for ratio in paired.paired(base.seconds[n], ours.seconds[n])]


def read_tasks(args: argparse.Namespace, llm: LLM) -> list[Task]:
    """Rows of chat messages or raw prompts, or random tokens; `concurrent` of one category at a time."""
    tasks: list[Task] = []
    if args.random_tokens:
        rng = random.Random(1)
        tokens = [
            [rng.randrange(llm.target.vocab_size - 300) for _ in range(RANDOM_PROMPT)]
            for _ in range(args.random_tokens)
        ]
        tasks += [Task("random", [prompt]) for prompt in tokens]
    for line in Path(args.rows).read_text().splitlines() if args.rows else ():
        row = json.loads(line)
        messages = row.get("messages") or [{"role": "user", "content": "Complete this function.\n" + row["prompt"]}]
        tasks.append(Task(row.get("category", "rows"), [llm._conversation(messages)[1]]))
    tasks = [task for task in tasks if args.category in (None, task.category)][: args.limit]
    if args.concurrent > 1:
        prompts = [task.prompts[0] for task in tasks]
        tasks = [Task("batch", (prompts * args.concurrent)[: args.concurrent])]
    return tasks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("settings", nargs="+", help="the first one is what the others are compared with")
    parser.add_argument("--rows", help='JSONL of {"messages": [...], "category"} or {"prompt"}')
    parser.add_argument("--random-tokens", type=int, default=0, metavar="N", help="N prompts of random tokens")
    parser.add_argument("--category")
    parser.add_argument("--limit", type=int, help="first N rows only")
    parser.add_argument("--draft-model")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--concurrent", type=int, default=1, help="rows decoded side by side")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-nodes", type=int, default=8)
    parser.add_argument("--max-context", type=int, default=2048)
    parser.add_argument("--minimum", type=int, default=32, help="shorter answers are left out")
    parser.add_argument("--out", help="write the table as JSON")
    args = parser.parse_args()
    bench = Bench(args)
    tasks = read_tasks(args, bench.llm)
    bench.measure(tasks)
    table = bench.report(tasks)
    if args.out:
        Path(args.out).write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
