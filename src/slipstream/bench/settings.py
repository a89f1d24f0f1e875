"""Settings of speculation against plain decoding on one loaded model, interleaved."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.bench import paired
from slipstream.core.errors import NonFiniteError
from slipstream.core.params import SamplingParams
from slipstream.core.types import RequestOutput, speculation_of
from slipstream.engine.engine import Engine

PLAIN = "plain"
MINIMUM = 32
"""Answers with fewer tokens are left out."""
RANDOM_PROMPT, RESERVED = 64, 300
"""Tokens of a prompt of random tokens, and ids at the end of the vocabulary, many of them of control, it avoids."""
RANDOM, MIXED = "random", "mixed"
"""Categories of prompts of random tokens, and of tasks over several categories."""


@dataclass(frozen=True, slots=True)
class Task:
    """Prompts (token ids) that are answered side by side and timed as one, and the category they count in."""

    category: str
    prompts: Sequence[Sequence[int]]


Answers = tuple[Sequence[RequestOutput], float]
"""The answers to a task, and the seconds of all of it but for reading prompts."""
Ask = Callable[[str, int], Answers]
"""Answers one task (by number) under one setting (by name), from cold caches."""


@dataclass(frozen=True, slots=True)
class Run:
    """The answers to one task, in seconds; row: its number; prefill_s and tokens are sums over its prompts."""

    setting: str
    row: int
    category: str
    repeat: int
    answers: int
    tokens: int
    prefill_s: float
    decode_s: float
    tokens_per_pass: float
    same: bool
    """Whether its tokens are those of the first run of this task."""

    @property
    def total_s(self) -> float:
        """Prompts and answers."""
        return self.prefill_s + self.decode_s


def random_tasks(count: int, vocab_size: int) -> list[Task]:
    """Prompts of random tokens, always the same: text in which nothing repeats."""
    chance = random.Random(1)
    most = max(1, vocab_size - RESERVED)
    return [Task(RANDOM, [[chance.randrange(most) for _ in range(RANDOM_PROMPT)]]) for _ in range(count)]


def side_by_side(tasks: Sequence[Task], size: int) -> list[Task]:
    """Tasks of `size` prompts out of tasks of one, in order; the first ones fill up the last."""
    made = []
    for start in range(0, len(tasks), size):
        part = [tasks[place % len(tasks)] for place in range(start, start + size)]
        category = part[0].category if len({task.category for task in part}) == 1 else MIXED
        made.append(Task(category, [prompt for task in part for prompt in task.prompts]))
    return made


def asker(engines: Mapping[str, Engine], tasks: Sequence[Task], params: Sequence[SamplingParams]) -> Ask:
    """Asks the engine of a setting. params: prompts take them by turns. Raises NonFiniteError where an answer fails.

    tasks: all of one size.
    """

    def ask(setting: str, number: int) -> Answers:
        engine = engines[setting]
        started = time.perf_counter()
        prompts = tasks[number].prompts
        asked = enumerate(prompts, number * len(prompts))
        requests = [engine.add(prompt, params[place % len(params)]) for place, prompt in asked]
        results = engine.run(requests)
        spent = time.perf_counter() - started - sum(result.timing.prefill_s for result in results)
        engine.forget()  # the next setting needs the slots, and begins as cold
        failures = [request.error for request in requests if request.error]
        if failures:
            raise NonFiniteError(failures[0])
        return results, spent

    return ask


def measure(
    ask: Ask, settings: Sequence[str], categories: Sequence[str], repeats: int, progress: Callable[[int, int], None]
) -> list[Run]:
    """Every setting on every task, taking turns in changing order; Ctrl-C ends it early with what there is.

    categories: of the tasks, in their order. progress: called with (runs so far, runs in all).
    """
    runs: list[Run] = []
    first: dict[int, list[list[int]]] = {}
    try:
        for setting in settings:  # the first answer of a setting also pays for what is set up once
            ask(setting, 0)
        for repeat in range(repeats):
            for row, category in enumerate(categories):
                turn = (repeat + row) % len(settings)
                for setting in [*settings[turn:], *settings[:turn]]:
                    results, decode_s = ask(setting, row)
                    tokens = [result.outputs[0].token_ids for result in results]
                    prefill_s = sum(result.timing.prefill_s for result in results)
                    per_pass = speculation_of(results).tokens_per_pass
                    same = first.setdefault(row, tokens) == tokens
                    about = setting, row, category, repeat, len(results), sum(map(len, tokens))
                    runs.append(Run(*about, prefill_s, decode_s, per_pass, same))
                    progress(len(runs), repeats * len(categories) * len(settings))
    except KeyboardInterrupt:
        pass
    return runs


Timed = Mapping[tuple[int, int], Run]
"""Runs of one setting by task and repeat."""


def summary(runs: Sequence[Run], minimum: int = MINIMUM) -> list[dict[str, Any]]:
    """Per setting, over the tasks whose answers all had `minimum` tokens: medians, geometric means, ratios to plain.

    Ratios are paired within a repeat of a task; per task their median counts, over tasks the geometric mean. By
    category also against the fastest other setting there.
    """
    short = {run.row for run in runs if run.tokens < minimum * run.answers}
    found: dict[str, dict[tuple[int, int], Run]] = {}
    for run in runs:
        if run.row not in short:
            found.setdefault(run.setting, {})[run.row, run.repeat] = run
    names = sorted(found, key=lambda name: name != PLAIN)
    made = [_setting(name, found[name], found.get(PLAIN, {})) for name in names]
    for category in dict.fromkeys(run.category for run in runs if run.row not in short):
        within = {name: {key: run for key, run in found[name].items() if run.category == category} for name in names}
        for row in made:
            row["categories"][category] = _category(row["setting"], within)
    return made


def _setting(name: str, mine: Timed, plain: Timed) -> dict[str, Any]:
    rows: dict[int, list[Run]] = {}
    for run in mine.values():
        rows.setdefault(run.row, []).append(run)
    decode = [statistics.median(run.tokens / max(run.decode_s, 1e-9) for run in row) for row in rows.values()]
    whole = [statistics.median(run.tokens / max(run.total_s, 1e-9) for run in row) for row in rows.values()]
    return {
        "setting": name,
        "rows": len(rows),
        "repeats": max(map(len, rows.values())),
        "prefill_s": statistics.median(run.prefill_s for run in mine.values()),
        "decode_tokens_per_second": paired.geometric_mean(decode),
        "total_tokens_per_second": paired.geometric_mean(whole),
        "tokens_per_pass": statistics.fmean(run.tokens_per_pass for run in mine.values()),
        "same_tokens": all(run.same for run in mine.values()),
        "decode_ratio": _ratio(plain, mine, "decode_s"),
        "total_ratio": _ratio(plain, mine, "total_s"),
        "categories": {},
    }


def _category(name: str, within: Mapping[str, Timed]) -> dict[str, Any]:
    """One setting in one category. within: its runs, by setting."""
    mine, plain = within[name], within.get(PLAIN, {})
    others = {
        other: ratio
        for other, runs in within.items()
        if other != name and (ratio := _ratio(runs, mine, "decode_s")) is not None
    }
    best = min(others, key=lambda other: others[other], default=None)
    return {
        "rows": len({run.row for run in mine.values()}),
        "tokens_per_pass": statistics.fmean(run.tokens_per_pass for run in mine.values()) if mine else None,
        "decode_ratio": _ratio(plain, mine, "decode_s"),
        "best_other": best,
        "best_other_ratio": others[best] if best else None,
    }


def _ratio(base: Timed, mine: Timed, kind: str) -> list[float] | None:
    """How much faster `mine` is: the ratio and its interval; None where nothing is paired."""
    ratios: dict[str, list[float]] = {}
    for key in sorted(mine.keys() & base.keys()):
        ratios.setdefault(str(key[0]), []).append(getattr(base[key], kind) / max(getattr(mine[key], kind), 1e-9))
    if not ratios:
        return None
    estimate = paired.over_groups(ratios)
    return [estimate.value, estimate.low, estimate.high]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The summary for people."""
    head = f"{'setting':24}{'prefill s':>10}{'decode tok/s':>14}{'total tok/s':>13}{'tok/pass':>10}  decode / plain"
    return "\n".join([head, *map(_line, rows), *_by_category(rows)])


def _line(row: Mapping[str, Any]) -> str:
    return (
        f"{row['setting']:24}{row['prefill_s']:>10.3f}{row['decode_tokens_per_second']:>14.1f}"
        f"{row['total_tokens_per_second']:>13.1f}{row['tokens_per_pass']:>10.2f}  "
        + (_shown(row["decode_ratio"]) if row["setting"] != PLAIN else "")
        + ("" if row["same_tokens"] else "  OTHER TOKENS")
    )


def _by_category(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Lines about each category, where there are several."""
    categories = list(rows[0]["categories"]) if rows else []
    for category in categories if len(categories) > 1 else ():
        yield f"\n{category or 'other':34}{'tok/pass':>10}  {'decode / plain':20}decode / fastest other"
        for row in rows:
            found = row["categories"][category]
            if not found["rows"]:
                continue
            against = f"{_shown(found['best_other_ratio'])} {found['best_other']}" if found["best_other"] else ""
            gain = _shown(found["decode_ratio"]) if row["setting"] != PLAIN else ""
            yield f"{row['setting']:34}{found['tokens_per_pass']:>10.2f}  {gain:20}{against}"


def _shown(ratio: Sequence[float] | None) -> str:
    return "{:.2f}x ({:.2f}-{:.2f})".format(*ratio) if ratio else ""
