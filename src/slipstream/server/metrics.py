"""Metrics in Prometheus' format, under the names that other engines use too; docs/serving.md lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from slipstream.core.stats import Speculation
    from slipstream.engine.ledger import Snapshot
    from slipstream.engine.replay import ShadowCounts

_FIRST = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10, 30, 60)
_BETWEEN = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1)
_WHOLE = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)


class Meter:
    """Counts what the server sees; what the engine counts is read from it. Methods may be called from any thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "slipstream_requests", "HTTP requests answered", ("endpoint", "status"), registry=self.registry
        )
        self.first = self._histogram("time_to_first_token_seconds", "arrival to first token", _FIRST)
        self.between = self._histogram("time_per_output_token_seconds", "between tokens of one answer", _BETWEEN)
        self.whole = self._histogram("request_duration_seconds", "arrival to the end", _WHOLE)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"slipstream_{name}", text, buckets=buckets, registry=self.registry)

    def answered(self, endpoint: str, status: int) -> None:
        """An HTTP request has got its status."""
        self.requests.labels(endpoint, str(status)).inc()

    def first_token(self, seconds: float) -> None:
        """A request has got its first token."""
        self.first.observe(seconds)

    def ended(self, tokens: int, first_s: float | None, whole_s: float) -> None:
        """A request has ended. tokens: of its longest answer; seconds since its arrival."""
        self.whole.observe(whole_s)
        if first_s is not None and tokens > 1:
            self.between.observe((whole_s - first_s) / (tokens - 1))

    def watch(self, read: Callable[[], Iterable[Metric]]) -> None:
        """Add metrics that are read when somebody asks for them."""

        class Reader:
            def collect(self) -> Iterable[Metric]:
                return read()

        self.registry.register(Reader())

    def render(self) -> bytes:
        """All metrics as text."""
        return generate_latest(self.registry)


def engine_metrics(seen: Snapshot, shadow: ShadowCounts) -> Iterable[Metric]:
    """What the engine and its shadow check count."""
    stats, used = seen.speculation, seen.kv_used_bytes
    size = used + seen.kv_free_bytes
    yield _counter("choices", "answers ended", seen.finished, "finish_reason")
    yield _counter("prompt_tokens", "prompt tokens", seen.prompt_tokens)
    yield _counter("cached_prompt_tokens", "prompt tokens that were still in the cache", seen.reused_tokens)
    yield _counter("generation_tokens", "tokens generated", seen.tokens)
    yield _counter("engine_steps", "steps of the engine, each one pass over all running answers", seen.steps)
    yield _counter("decode_steps", "target passes, summed over answers", stats.num_steps)
    yield gauge("requests_running", "answers being read or decoded", seen.running + seen.reading)
    yield gauge("requests_waiting", "answers in the queue", seen.waiting)
    yield gauge("kv_cache_usage_ratio", "share of the cache in use", used / size if size else 0.0)
    yield _counter("spec_decode_num_drafts", "verified drafts, summed over answers", stats.num_spec_steps)
    yield _counter("spec_decode_num_draft_tokens", "draft nodes verified", stats.num_draft_tokens)
    yield _counter("spec_decode_num_accepted_tokens", "drafted tokens that stood", stats.num_accepted_draft_tokens)
    places: dict[str, int] = {}
    for counts in stats.nodes.values():
        for place, count in enumerate(counts.accepted):
            places[str(place)] = places.get(str(place), 0) + count
    yield _counter("spec_decode_num_accepted_tokens_per_pos", "the same by place in the draft", places, "position")
    yield _nodes(stats)
    yield gauge("speedup_estimate", "realised speed over plain decoding of the same batches", seen.speedup or 1.0)
    yield gauge("speculation_enabled", "1 when speculation is switched on", float(seen.setting.speculation))
    states = seen.drafters.items()
    yield gauge("drafter_active", "0 when switched off or taken out", {name: float(one.active) for name, one in states})
    yield gauge("drafter_working", "1 while it pays", {name: float(one.working) for name, one in states})
    yield gauge("drafter_acceptance", "accepted / verified nodes", {name: one.acceptance for name, one in states})
    yield _counter("shadow_checks", "requests decoded again plainly", shadow.checked)
    yield _counter("shadow_alarms", "requests that differed from plain decoding", shadow.differed)
    yield _counter("shadow_skipped", "requests that were to be decoded again but were not", shadow.skipped)


def _nodes(stats: Speculation) -> Metric:
    found = CounterMetricFamily(
        "slipstream_spec_decode_nodes", "draft nodes by drafter and outcome", labels=["source", "outcome"]
    )
    for source, counts in stats.nodes.items():
        for outcome, numbers in counts.as_dict().items():
            found.add_metric([source, outcome], sum(numbers))
    return found


def gauge(name: str, text: str, value: float | Mapping[str, float]) -> Metric:
    """One gauge, or one per drafter."""
    return _fill(GaugeMetricFamily, name, text, value, "drafter")


def _counter(name: str, text: str, value: float | Mapping[str, float], label: str = "") -> Metric:
    return _fill(CounterMetricFamily, name, text, value, label)


def _fill(kind: Any, name: str, text: str, value: float | Mapping[str, float], label: str) -> Metric:
    if not isinstance(value, Mapping):
        made: Metric = kind(f"slipstream_{name}", text, value=value)
        return made
    family = kind(f"slipstream_{name}", text, labels=[label])
    for key, number in value.items():
        family.add_metric([key], number)
    return family  # type: ignore[no-any-return]  # prometheus_client's families are built by their class
