"""Settings of speculation against plain decoding on one loaded model, interleaved."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.bench import paired
from slipstream.core.types import RequestOutput

PLAIN = "plain"
MINIMUM = 32
"""Answers with fewer tokens are left out."""

Ask = Callable[[str, int], RequestOutput]
"""Answers one row (by number) under one setting (by name), from cold caches."""


@dataclass(frozen=True, slots=True)
class Run:
    """One answer, in seconds."""

    setting: str
    row: int
    repeat: int
    tokens: int
    prefill_s: float
    decode_s: float
    tokens_per_pass: float
    same: bool
    """Whether its tokens are those of the first answer to this row."""

    @property
    def total_s(self) -> float:
        """Prompt and answer."""
        return self.prefill_s + self.decode_s


def measure(
    ask: Ask, settings: Sequence[str], rows: int, repeats: int, progress: Callable[[int, int], None]
) -> list[Run]:
    """Every setting on every row, taking turns in changing order; Ctrl-C ends it early with what there is.

    progress: called with (answers so far, answers in all).
    """
    runs: list[Run] = []
    first: dict[int, list[int]] = {}
    try:
        for setting in settings:  # the first answer of a setting also pays for what is set up once
            ask(setting, 0)
        for repeat in range(repeats):
            for row in range(rows):
                turn = (repeat + row) % len(settings)
                for setting in [*settings[turn:], *settings[:turn]]:
                    result = ask(setting, row)
                    runs.append(_run(result, setting, row, repeat, first))
                    progress(len(runs), repeats * rows * len(settings))
    except KeyboardInterrupt:
        pass
    return runs


def _run(result: RequestOutput, setting: str, row: int, repeat: int, first: dict[int, list[int]]) -> Run:
    output = result.outputs[0]
    same = first.setdefault(row, output.token_ids) == output.token_ids
    timing, per_pass = result.timing, output.speculation.tokens_per_pass
    return Run(setting, row, repeat, len(output.token_ids), timing.prefill_s, timing.decode_s, per_pass, same)


def summary(runs: Sequence[Run], minimum: int = MINIMUM) -> list[dict[str, Any]]:
    """Per setting, over the rows on which all wrote `minimum` tokens: medians, geometric means, ratios to plain.

    Ratios are paired within a repeat of a row; per row their median counts, over rows the geometric mean.
    """
    short = {run.row for run in runs if run.tokens < minimum}
    found: dict[str, dict[tuple[int, int], Run]] = {}
    for run in runs:
        if run.row not in short:
            found.setdefault(run.setting, {})[run.row, run.repeat] = run
    names = sorted(found, key=lambda name: name != PLAIN)
    return [_setting(name, found[name], found.get(PLAIN, {})) for name in names]


def _setting(name: str, mine: Mapping[tuple[int, int], Run], plain: Mapping[tuple[int, int], Run]) -> dict[str, Any]:
    rows: dict[int, list[Run]] = {}
    for run in mine.values():
        rows.setdefault(run.row, []).append(run)
    decode = [statistics.median((run.tokens - 1) / max(run.decode_s, 1e-9) for run in row) for row in rows.values()]
    total = [statistics.median(run.tokens / max(run.total_s, 1e-9) for run in row) for row in rows.values()]
    made: dict[str, Any] = {
        "setting": name,
        "rows": len(rows),
        "repeats": max(map(len, rows.values())),
        "prefill_s": statistics.median(run.prefill_s for run in mine.values()),
        "decode_tokens_per_second": paired.geometric_mean(decode),
        "total_tokens_per_second": paired.geometric_mean(total),
        "tokens_per_pass": statistics.fmean(run.tokens_per_pass for run in mine.values()),
        "same_tokens": all(run.same for run in mine.values()),
    }
    for kind in ("decode_s", "total_s"):
        ratios: dict[str, list[float]] = {}
        for key in mine.keys() & plain.keys():
            ratios.setdefault(str(key[0]), []).append(getattr(plain[key], kind) / max(getattr(mine[key], kind), 1e-9))
        if ratios:
            estimate = paired.over_groups(dict(sorted(ratios.items())))
            made[f"{kind.removesuffix('_s')}_ratio"] = [estimate.value, estimate.low, estimate.high]
    return made


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The summary for people."""
    lines = [f"{'setting':24}{'prefill s':>10}{'decode tok/s':>14}{'total tok/s':>13}{'tok/pass':>10}  decode / plain"]
    for row in rows:
        ratio = row.get("decode_ratio")
        gain = "{:.2f}x ({:.2f}-{:.2f})".format(*ratio) if ratio and row["setting"] != PLAIN else ""
        lines.append(
            f"{row['setting']:24}{row['prefill_s']:>10.3f}{row['decode_tokens_per_second']:>14.1f}"
            f"{row['total_tokens_per_second']:>13.1f}{row['tokens_per_pass']:>10.2f}  {gain}"
            + ("" if row["same_tokens"] else "  OTHER TOKENS")
        )
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """What it was measured on."""
    about = {"cores": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()}
    return {"cpu": cpu_name(), **about}


def cpu_name() -> str:
    """The processor, with family and model, because servers hide its full name, and the widest vectors it has."""
    known: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        key, _, value = line.partition(":")
        known.setdefault(key.strip(), value.strip())
    if "model name" not in known:
        return platform.processor() or platform.machine()
    flags = known.get("flags", "").split()
    vectors = "AVX-512" if "avx512f" in flags else "AVX2" if "avx2" in flags else "no AVX2"
    return f"{known['model name']} (family {known.get('cpu family')}, model {known.get('model')}, {vectors})"
