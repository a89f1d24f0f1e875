"""What the commands say about an answer: the line of statistics, the JSON object, progress on a prompt."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from slipstream.core.stats import Speculation
from slipstream.core.types import CompletionOutput, RequestOutput, speculation_of

LONG_PROMPT = 512
"""Tokens from which on reading the prompt is shown."""


def statistics_line(result: RequestOutput, alone: bool = True) -> str:
    """Speed, and what speculation did, for people. alone: no other prompt shared the passes."""
    timing, stats = result.timing, speculation_of([result])
    made = result.usage["completion_tokens"]
    reused = f", {timing.reused_tokens} of them cached" if timing.reused_tokens else ""
    parts = [
        f"{made} tokens in {timing.decode_s:.2f} s, {timing.tokens_per_second:.1f} tokens/s",
        f"prompt {len(result.prompt_token_ids)} tokens{reused} in {timing.prefill_s:.2f} s",
    ]
    if stats.num_steps:
        parts.append(f"{stats.tokens_per_pass:.2f} tokens per pass")
    if stats.num_draft_tokens:
        parts.append(f"{stats.num_accepted_draft_tokens} of {stats.num_draft_tokens} drafted tokens accepted")
        if stats.speedup_estimate and alone and len(result.outputs) == 1:
            parts.append(f"about {stats.speedup_estimate:.2f}x plain decoding")
    if stats.near_ties:
        parts.append(f"{stats.near_ties} near-ties")
    if not stats.exact:
        parts.append("LOSSY verifier: not the output of plain decoding")
    if stats.drafter_failures:
        parts.append(f"{stats.drafter_failures} drafter failures")
    return "[" + "; ".join(parts) + "]"


def speculation_lines(stats: Speculation) -> list[str]:
    """What was drafted by whom and how deep, and how good the controller's estimates were, for people."""
    lines = [f"  steps by tokens accepted (0, 1, ...): {stats.acceptance_histogram}"]
    for source, counts in stats.nodes.items():
        depths = range(max(map(len, (counts.offered, counts.verified, counts.accepted))))
        by_depth = [
            "/".join(
                str(kind[depth] if depth < len(kind) else 0)
                for kind in (counts.accepted, counts.verified, counts.offered)
            )
            for depth in depths
        ]
        lines.append(f"  {source}, accepted/verified/offered by depth: {'  '.join(by_depth)}")
    realised = f"{stats.speedup_estimate:.2f}x" if stats.speedup_estimate else "not known"
    lines.append(
        f"  gain over plain decoding: {stats.predicted_gain:.2f}x predicted, {realised} realised; "
        f"calibration error {stats.calibration_error:+.3f} per node"
    )
    return lines


def as_json(result: RequestOutput, index: int, model: str) -> dict[str, Any]:
    """One JSON object per prompt: the first answer on top, all answers in `choices` when there are several."""
    found: dict[str, Any] = {"index": index, "model": model, **choice(result.outputs[0])}
    del found["choice"]
    if len(result.outputs) > 1:
        found["choices"] = [choice(output) for output in result.outputs]
    found["usage"] = result.usage
    found["timing"] = asdict(result.timing)
    return found


def choice(output: CompletionOutput) -> dict[str, Any]:
    """One answer as plain data."""
    found = {
        "choice": output.index,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "seed": output.seed,
        "speculation": output.speculation.as_dict(),
    }
    if output.logprobs is not None:
        found["logprobs"] = [asdict(entry) for entry in output.logprobs]
    return found


def prompt_progress(quiet: bool) -> Callable[[int, int], None] | None:
    """Shows on a terminal how far a long prompt has been read."""
    if quiet or not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        if total >= LONG_PROMPT:
            text = f"reading the prompt: {done} of {total} tokens" if done < total else ""
            sys.stderr.write(f"\r\033[K{text}")
            sys.stderr.flush()

    return show
