"""The measured tables of README.md and docs/speed.md, out of bench/results.

    python bench/tables.py

A page holds `<!-- results: NAME -->`, a table and `<!-- end -->`; what is between becomes bench/results/NAME.md, or the
README's overview for the name `overview`. Prose around the tables is written by hand.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "speed.md")
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


def filled(text: str) -> str:
    """A page with its tables as bench/results has them."""

    def table(name: str) -> str:
        return overview() if name == "overview" else (RESULTS / f"{name}.md").read_text()

    return BLOCK.sub(lambda found: found[1] + "\n" + table(found[2]) + "\n" + found[3], text)


def main() -> None:
    """Write the pages."""
    for page in PAGES:
        page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main()
