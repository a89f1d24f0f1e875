"""What a run of load showed: percentiles, throughput, goodput, and one HTML page with plots."""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slipstream.bench.load import Call

PERCENTILES = (50, 90, 99)
WIDTH, HEIGHT, LEFT, BELOW = 520, 240, 56, 34
COLOURS = {"line": "#2563eb", "axis": "#888", "mark": "#dc2626"}
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:1120px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:1em 0}td,th{padding:.25em .9em;text-align:right;border-bottom:1px solid #ddd}
th:first-child,td:first-child{text-align:left}figure{display:inline-block;margin:.6em}figcaption{text-align:center}
svg text{font:11px system-ui,sans-serif;fill:#555}pre{background:#f4f4f5;padding:1em;overflow-x:auto}"""


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, p50, p90, p99 (interpolated linearly); None without values."""
    if not values:
        return None
    found = np.percentile(values, PERCENTILES)
    named = {f"p{name}": float(value) for name, value in zip(PERCENTILES, found, strict=True)}
    return {"mean": float(np.mean(values)), **named}


def summary(calls: Sequence[Call], ttft_s: float | None = None, tpot_s: float | None = None) -> dict[str, Any]:
    """Everything in seconds and per second. ttft_s, tpot_s: the objectives that goodput counts; None for no limit.

    Goodput is what was finished without an error within both objectives, as requests per second and as a share of all.
    """
    done = [call for call in calls if call.error is None]
    length = max((call.end for call in calls), default=0.0)
    per_token = [value for call in done if (value := call.tpot) is not None]
    good = [call for call in done if _within(call, ttft_s, tpot_s)]
    span = length or 1.0
    return {
        "requests": len(calls),
        "completed": len(done),
        "errors": dict(Counter(call.error for call in calls if call.error)),
        "duration_s": length,
        "tokens": sum(call.tokens for call in done),
        "tokens_are_counted_by_the_server": all(call.counted for call in done),
        "ttft_s": percentiles([call.ttft for call in done]),
        "tpot_s": percentiles(per_token),
        "chunk_gap_s": percentiles([gap for call in done for gap in call.gaps]),
        "end_to_end_s": percentiles([call.end - call.start for call in done]),
        "tokens_per_second": sum(call.tokens for call in done) / span,
        "requests_per_second": len(done) / span,
        "goodput": {
            "ttft_s": ttft_s,
            "tpot_s": tpot_s,
            "requests_per_second": len(good) / span,
            "share": len(good) / len(calls) if calls else 0.0,
        },
    }


def _within(call: Call, ttft_s: float | None, tpot_s: float | None) -> bool:
    return (ttft_s is None or call.ttft <= ttft_s) and (tpot_s is None or (call.tpot or 0.0) <= tpot_s)


ROWS = (
    ("time to first token", "ttft_s"), ("time per token", "tpot_s"), ("between chunks", "chunk_gap_s"),
    ("end to end", "end_to_end_s"),
)  # fmt: skip


def as_text(found: Mapping[str, Any]) -> str:
    """The summary for a terminal."""
    lines = [f"{'milliseconds':22}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}"]
    for name, key in ROWS:
        if found[key]:
            lines.append(f"{name:22}" + "".join(f"{1e3 * value:>10.1f}" for value in found[key].values()))
    good = found["goodput"]
    lines.append(
        f"{found['completed']} of {found['requests']} requests in {found['duration_s']:.1f} s: "
        f"{found['tokens_per_second']:.1f} tokens/s, {found['requests_per_second']:.2f} requests/s; "
        f"goodput {good['requests_per_second']:.2f} requests/s ({good['share']:.0%})"
    )
    lines += [f"errors: {count} x {name}" for name, count in found["errors"].items()]
    if not found["tokens_are_counted_by_the_server"]:
        lines.append("the server sent no usage: chunks were counted instead of tokens")
    return "\n".join(lines)


def page(found: Mapping[str, Any], calls: Sequence[Call], settings: Mapping[str, Any]) -> str:
    """One HTML page that needs nothing else."""
    done = [call for call in calls if call.error is None]
    good = found["goodput"]
    cells = "".join(
        f"<tr><td>{name}</td>" + "".join(f"<td>{1e3 * value:.1f}</td>" for value in found[key].values()) + "</tr>"
        for name, key in ROWS
        if found[key]
    )
    errors = ", ".join(f"{count} x {html.escape(str(name))}" for name, count in found["errors"].items()) or "none"
    plots = [
        _cumulative("time to first token, ms", [1e3 * call.ttft for call in done], good["ttft_s"]),
        _cumulative("time per token, ms", [1e3 * value for call in done if (value := call.tpot)], good["tpot_s"]),
        _cumulative("end to end, ms", [1e3 * (call.end - call.start) for call in done], None),
        _running(calls),
    ]
    shown = html.escape(json.dumps(settings, indent=1, ensure_ascii=False))
    return f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>Load</title><style>{STYLE}</style>
<h1>Load on {html.escape(str(settings.get("url", "")))}</h1>
<p>{found["completed"]} of {found["requests"]} requests in {found["duration_s"]:.1f} s, errors: {errors}.
<b>{found["tokens_per_second"]:.1f} tokens/s</b>, {found["requests_per_second"]:.2f} requests/s, goodput
{good["requests_per_second"]:.2f} requests/s ({good["share"]:.0%} of all).</p>
<table><tr><th>milliseconds</th><th>mean</th><th>p50</th><th>p90</th><th>p99</th></tr>{cells}</table>
{"".join(plots)}<pre>{shown}</pre></html>
"""


def _cumulative(title: str, values: Sequence[float], objective_s: float | None) -> str:
    """Share of requests at or below each value; a line at the objective."""
    ordered = sorted(values)
    points = [(value, (place + 1) / len(ordered)) for place, value in enumerate(ordered)]
    mark = None if objective_s is None else 1e3 * objective_s
    return _plot(title, [(ordered[0], 0.0), *points] if ordered else [], 1.0, mark)


def _running(calls: Sequence[Call]) -> str:
    """Requests under way over time."""
    changes = sorted([(call.start, 1) for call in calls] + [(call.end, -1) for call in calls])
    level, points = 0, [(0.0, 0.0)]
    for moment, change in changes:
        points.append((moment, float(level)))
        level += change
        points.append((moment, float(level)))
    return _plot("requests under way, over seconds", points, max((y for _, y in points), default=1.0), None)


def _plot(title: str, points: Sequence[tuple[float, float]], top: float, mark: float | None) -> str:
    right = max([x for x, _ in points] + ([mark] if mark else []), default=1.0) or 1.0

    def place(x: float, y: float) -> str:
        across = LEFT + (WIDTH - LEFT - 30) * x / right
        return f"{across:.1f},{10 + (HEIGHT - BELOW - 10) * (1 - y / (top or 1.0)):.1f}"

    axis = f'stroke="{COLOURS["axis"]}"'
    parts = [f'<polyline fill="none" {axis} points="{place(0, top)} {place(0, 0)} {place(right, 0)}"/>']
    for step in range(5):
        x, y = place(right * step / 4, 0).split(","), place(0, top * step / 4).split(",")
        parts.append(f'<text x="{x[0]}" y="{HEIGHT - 14}" text-anchor="middle">{right * step / 4:.4g}</text>')
        parts.append(f'<text x="{LEFT - 6}" y="{y[1]}" text-anchor="end">{top * step / 4:.3g}</text>')
    line = " ".join(place(x, y) for x, y in points)
    parts.append(f'<polyline fill="none" stroke="{COLOURS["line"]}" stroke-width="2" points="{line}"/>')
    if mark is not None:
        ends = f"{place(mark, 0)} {place(mark, top)}"
        parts.append(f'<polyline stroke="{COLOURS["mark"]}" stroke-dasharray="4" points="{ends}"/>')
    body = "".join(parts)
    return (
        f'<figure><svg width="{WIDTH}" height="{HEIGHT}" role="img">{body}</svg>'
        f"<figcaption>{html.escape(title)}</figcaption></figure>"
    )
