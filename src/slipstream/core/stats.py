"""What speculation did for one answer, or for several together; definitions in docs/statistics.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(slots=True)
class NodeCounts:
    """Draft nodes of one source by depth (entry 0: right after the anchor): offered, verified, accepted."""

    offered: list[int] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def as_dict(self) -> dict[str, list[int]]:
        """Plain data for JSON."""
        return {"offered": self.offered, "verified": self.verified, "accepted": self.accepted}


def tally(counts: list[int], depths: Iterable[int]) -> None:
    """Count nodes of these depths (1 is the first)."""
    for depth in depths:
        while len(counts) < depth:
            counts.append(0)
        counts[depth - 1] += 1


@dataclass(slots=True)
class Speculation:
    """Per-request statistics; definitions in docs/statistics.md. Rates are 0.0 when nothing was drafted, never NaN.

    predicted_accepted: drafted tokens the controller expected to stand. predicted_tokens, predicted_passes: tokens it
    expected of all steps, and the time it expected them to take, in plain steps.
    """

    num_steps: int = 0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    tokens_before_trimming: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    drafter_failures: int = 0
    near_ties: int = 0
    exact: bool = True
    speedup_estimate: float | None = None
    nodes: dict[str, NodeCounts] = field(default_factory=dict)
    predicted_accepted: float = 0.0
    predicted_tokens: float = 0.0
    predicted_passes: float = 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Emitted tokens before trimming per target pass after prefill."""
        return self.tokens_before_trimming / self.num_steps if self.num_steps else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted per step that had a draft, the bonus included; 1.0 without such steps."""
        return 1.0 + self.num_accepted_draft_tokens / self.num_spec_steps if self.num_spec_steps else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted / verified draft nodes, the bonus excluded."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def drafted_by_source(self) -> dict[str, int]:
        """Verified draft nodes by drafter."""
        return {source: made for source, counts in self.nodes.items() if (made := sum(counts.verified))}

    @property
    def accepted_by_source(self) -> dict[str, int]:
        """Accepted draft nodes by drafter."""
        return {source: kept for source, counts in self.nodes.items() if (kept := sum(counts.accepted))}

    @property
    def calibration_error(self) -> float:
        """(Expected - accepted) / verified draft nodes: above 0 when chances were too hopeful."""
        off = self.predicted_accepted - self.num_accepted_draft_tokens
        return off / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def predicted_gain(self) -> float:
        """Speed over plain decoding that the controller expected of its choices; 1.0 without any."""
        return self.predicted_tokens / self.predicted_passes if self.predicted_passes else 1.0

    def of(self, source: str) -> NodeCounts:
        """The nodes of one source."""
        counts = self.nodes.get(source)
        if counts is None:
            counts = self.nodes[source] = NodeCounts()
        return counts

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, the derived rates included."""
        names = [
            "num_steps", "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "tokens_per_pass",
            "mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "drafted_by_source",
            "accepted_by_source", "drafter_failures", "near_ties", "exact", "speedup_estimate", "predicted_accepted",
            "calibration_error", "predicted_gain",
        ]  # fmt: skip
        found = {name: getattr(self, name) for name in names}
        return found | {"nodes": {source: counts.as_dict() for source, counts in self.nodes.items()}}


def total(stats: Sequence[Speculation], tokens: Sequence[int]) -> Speculation:
    """Several answers together. tokens: emitted by each; they weigh the estimates of speed."""
    whole = Speculation(exact=all(one.exact for one in stats))
    numbers = [each.name for each in fields(Speculation) if isinstance(getattr(whole, each.name), (int, float))]
    for name in numbers:
        if name != "exact":
            setattr(whole, name, sum(getattr(one, name) for one in stats))
    for one in stats:
        _add(whole.acceptance_histogram, one.acceptance_histogram)
        for source, counts in one.nodes.items():
            for kind in ("offered", "verified", "accepted"):
                _add(getattr(whole.of(source), kind), getattr(counts, kind))
    known = [(count, one.speedup_estimate) for count, one in zip(tokens, stats, strict=True) if one.speedup_estimate]
    spent = sum(count / speed for count, speed in known)
    whole.speedup_estimate = sum(count for count, _ in known) / spent if spent else None
    return whole


def _add(counts: list[int], more: Sequence[int]) -> None:
    counts.extend([0] * (len(more) - len(counts)))
    for place, count in enumerate(more):
        counts[place] += count
