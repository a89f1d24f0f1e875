"""The measured tables of README.md, docs/speed.md and docs/heads.md, out of bench/results.

    python bench/tables.py

A page holds `<!-- results: NAME -->`, a table and `<!-- end -->`; what is between becomes the table that is made here
under this name (`MADE`), or bench/results/NAME.md. Prose around the tables is written by hand.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slipstream.bench import paired

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "speed.md", ROOT / "docs" / "heads.md")
BLOCK = re.compile(r"(<!-- results: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
OVERVIEW = (
    ("**Slipstream, Q4_1 GGUF, `auto`**", "gguf", "slipstream", "auto"),
    ("Slipstream, Q4_1 GGUF, no speculation", "gguf", "slipstream", "plain"),
    ("llama.cpp, same file", "gguf", "llamacpp", "plain"),
    ("llama.cpp, same file, prompt lookup", "gguf", "llamacpp", "prompt_lookup"),
    ("**Slipstream, fp32, `auto`**", "fp32", "slipstream", "auto"),
    ("Slipstream, fp32, no speculation", "fp32", "slipstream", "plain"),
    ("OpenVINO GenAI, fp32", "fp32", "openvino", "plain_f32"),
    ("OpenVINO GenAI, fp32, prompt lookup", "fp32", "openvino", "prompt_lookup_f32"),
)
"""A line of the overview: what it is called, results (mixed rows; `-copy` holds the copying ones), engine, setting."""
CATEGORIES = ("chat", "translation", "summaries", "questions", "arithmetic", "retrieval")
"""Of the mixed rows, in their order, equally many rows of each."""
SUFFIX, RECYCLING, BOTH, AUTO = "suffix", "recycling", "suffix+recycling", "auto"
BY_CATEGORY = (
    *(("Q4_1", "gguf", setting) for setting in (SUFFIX, RECYCLING, BOTH, AUTO)),
    *(("fp32", "fp32", setting) for setting in (BOTH, AUTO)),
)
"""A line of the table by category: the weights, results, setting."""
SERVING = (
    ("chat, questions, arithmetic", "serve-chat"),
    ("all, with translation, summaries and retrieval", "serve"),
)
"""What rows the servers were asked, and the results."""
SERVERS = {"slipstream": "`slipstream serve`, speculation on", "vllm": "vLLM {version}, CPU, float32"}


def load(name: str) -> dict[str, Any]:
    """The results of one comparison."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def overview() -> str:
    """The README's table, with the conditions it was measured under."""
    known = {name: load(name) for base in ("gguf", "fp32") for name in (base, f"{base}-copy")}
    first, copying = known["gguf"], known["gguf-copy"]
    versions = {**first["versions"], **known["fp32"]["versions"]}
    dates = sorted({result["date"] for result in known.values()})
    repeats = sorted({row["repeats"] for result in known.values() for row in result["summary"]})
    lines = [
        f"{first['machine']['cpu']}, {first['machine']['threads']} threads, {' and '.join(dates)}; slipstream "
        f"{versions['slipstream']}, llama-cpp-python {versions['llamacpp']}, OpenVINO GenAI {versions['openvino']};",
        f"{' to '.join(map(str, dict.fromkeys((repeats[0], repeats[-1]))))} interleaved repeats; geometric means over "
        f"{first['summary'][0]['rows']} mixed and {copying['summary'][0]['rows']} copying rows.",
        "",
        "| SmolLM2-135M, greedy, tokens per second | mixed: decode | with prefill | copying: decode | with prefill |",
        "|---|---|---|---|---|",
    ]
    for title, base, engine, setting in OVERVIEW:
        cells = []
        for name in (base, f"{base}-copy"):
            row = next(r for r in known[name]["summary"] if (r["engine"], r["setting"]) == (engine, setting))
            cells += [row["decode_tokens_per_second"], row["total_tokens_per_second"]]
        lines.append(f"| {title} | {' | '.join(f'{cell:.0f}' for cell in cells)} |")
    return "\n".join(lines) + "\n"


def by_category(*wanted: str) -> str:
    """Decode speed of settings (those `wanted`) over plain decoding: geometric means over the rows of a category."""
    lines = [f"| | {' | '.join(CATEGORIES)} |", "|---" * (1 + len(CATEGORIES)) + "|"]
    for weights, name, setting in BY_CATEGORY:
        if setting in wanted:
            result = load(name)
            plain, mine = decode_s(result, "plain"), decode_s(result, setting)
            ratios: dict[str, list[float]] = {category: [] for category in CATEGORIES}
            for row, seconds in mine.items():
                ratios[CATEGORIES[row * len(CATEGORIES) // len(result["rows"])]].append(plain[row] / seconds)
            cells = [f"{paired.geometric_mean(values):.2f}" for values in ratios.values()]
            lines.append(f"| {weights}, {setting} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def decode_s(result: Mapping[str, Any], setting: str) -> dict[int, float]:
    """Seconds of decoding by row, medians over the repeats, of one of Slipstream's settings; without rows left out."""
    found = defaultdict(list)
    for run in result["runs"]:
        if (run["engine"], run["setting"]) == ("slipstream", setting) and run["row"] not in result["left_out"]:
            found[run["row"]].append(run["total_s"] - run["prefill_s"])
    return {row: statistics.median(seconds) for row, seconds in found.items()}


def serving() -> str:
    """Servers beside each other: medians over the rounds, and the first one's tokens/s over the other's."""
    lines = [
        "| rows | server | tokens/s, median | to the first token, p50 | per token, p50 | ratio of rounds |",
        "|---|---|---|---|---|---|",
    ]
    for rows, name in SERVING:
        result = load(name)
        [ratios] = result["ratios"].values()
        ratio = paired.median(ratios)
        before, behind = f" {rows} ", f" {ratio.value:.2f} ({ratio.low:.2f}-{ratio.high:.2f}) "
        for server, rounds in result["rounds"].items():
            title = SERVERS[server].format(version=result["versions"][server])
            speed = statistics.median(one["tokens_per_second"] for one in rounds)
            first_s, token_s = (statistics.median(one[kind]["p50"] for one in rounds) for kind in ("ttft_s", "tpot_s"))
            cells = f"{title} | {speed:.0f} | {1e3 * first_s:.0f} ms | {1e3 * token_s:.1f} ms"
            lines.append(f"|{before}| {cells} |{behind}|")
            before = behind = " "
    return "\n".join(lines) + "\n"


MADE: dict[str, Callable[[], str]] = {
    "overview": overview,
    "categories": lambda: by_category(SUFFIX, RECYCLING, BOTH, AUTO),
    "categories-head": lambda: by_category(BOTH, AUTO),
    "serving": serving,
}


def filled(text: str) -> str:
    """A page with its tables as bench/results has them."""

    def table(name: str) -> str:
        return MADE[name]() if name in MADE else (RESULTS / f"{name}.md").read_text()

    return BLOCK.sub(lambda found: found[1] + "\n" + table(found[2]) + "\n" + found[3], text)


def main() -> None:
    """Write the pages."""
    for page in PAGES:
        page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main()
