"""What all answers of an engine took and brought together, and what one plain step costs."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slipstream.core.errors import CacheFullError
from slipstream.core.stats import Speculation, total
from slipstream.core.types import Row
from slipstream.engine.batch import Batch
from slipstream.engine.drafting import Drafting, RunSetting
from slipstream.engine.request import Answer, Request
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.step import Clock
from slipstream.engine.watch import DrafterState, Event, Watch
from slipstream.targets.base import RowInput, Target

PLAIN_STEPS = 64
"""Plain steps whose times are remembered by number of rows, to know what they cost without speculation."""
MEDIAN_EVERY = 8
"""Once there are some, every so many new times make new medians."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of an engine between two steps; counts are since it was made and never fall.

    running, reading, waiting: answers. tokens: generated; prompt_tokens: of all requests taken; reused_tokens: those
    among them that were in the cache already. finished: answers by finish reason. plain_step_s: seconds of a plain
    step of one row. speedup: tokens per second over what plain steps of as many rows would have brought. drafting:
    drafters in use now; drafters: how each does; setting: what was set at run time; events: decisions about drafters.
    """

    running: int
    reading: int
    waiting: int
    kv_used_bytes: int
    kv_free_bytes: int
    steps: int
    tokens: int
    prompt_tokens: int
    reused_tokens: int
    finished: dict[str, int]
    speculation: Speculation
    plain_step_s: float | None
    speedup: float | None
    drafting: tuple[str, ...] = ()
    setting: RunSetting = field(default_factory=RunSetting)
    drafters: dict[str, DrafterState] = field(default_factory=dict)
    events: tuple[Event, ...] = ()


class Ledger:
    """Counts steps and answers, but not replays. Plain steps are timed as they happen, by the number of their rows."""

    def __init__(self) -> None:
        self.steps = self.prompt_tokens = self.reused_tokens = 0
        self.finished: Counter[str] = Counter()
        self._tokens = 0
        self._speculation = Speculation()
        self._plain: dict[int, deque[float]] = {}
        self._typical: dict[int, float] = {}
        """Their medians."""
        self._seen: Counter[int] = Counter()
        """How many there were."""
        self._brought = self._took = 0.0
        """Seconds that plain steps would have taken for what steps brought, and seconds that these took."""

    def step(self, batch: Batch, clock: Clock, emitted: int) -> None:
        """One step: its rows, its clock, the tokens it brought. What reads prompts alone is none."""
        self.steps += bool(batch.rows)
        if clock.read_s:
            return
        rows, seconds = len(batch.rows), sum(clock.seconds.values())
        if clock.token_rows == rows:
            self.plain_step(rows, seconds)
        plain = self._typical.get(rows)
        if plain is not None:
            self._brought += emitted / rows * plain
            self._took += seconds

    def plain_step(self, rows: int, seconds: float) -> None:
        """A step of so many rows without any draft took so long."""
        times = self._plain.get(rows)
        if times is None:
            times = self._plain[rows] = deque(maxlen=PLAIN_STEPS)
        times.append(seconds)
        self._seen[rows] += 1
        if self._seen[rows] <= MEDIAN_EVERY or self._seen[rows] % MEDIAN_EVERY == 0:
            self._typical[rows] = statistics.median(times)

    def calibrate(self, target: Target, row: Row) -> None:
        """Measure one pass over an anchor alone; nothing of it is kept."""
        if target.length(row.slot) + 2 > target.max_context:
            return
        started = time.perf_counter()
        with contextlib.suppress(CacheFullError):
            output = target.forward([RowInput(row.slot, row.tokens[-1])])
            output.logits[0][0].max()  # reading it waits for devices that compute on while the host goes ahead
            self.plain_step(1, time.perf_counter() - started)

    @property
    def plain_step_s(self) -> float | None:
        """Seconds of a plain step of one row; None while none was seen."""
        return self._typical.get(1)

    @property
    def speedup(self) -> float | None:
        """Realised speed over plain decoding of the same batches; None while nothing is known."""
        return self._brought / self._took if self._took else None

    def queued(self, request: Request) -> None:
        """A request was taken; answers that may have no tokens have ended already."""
        self.prompt_tokens += 0 if request.replay else len(request.prompt_token_ids)
        for answer in request.answers:
            if answer.finish_reason:
                self.ended(answer)

    def started(self, answer: Answer, reused: int) -> None:
        """An answer's prompt is about to be read, but for `reused` tokens; those of further answers do not count."""
        if answer.index == 0 and answer.count == 0:
            answer.request.timing.reused_tokens += reused
            self.reused_tokens += reused

    def ended(self, answer: Answer) -> None:
        """An answer has ended, for whatever reason: how much faster it was than plain decoding, and its counts."""
        plain = self.plain_step_s
        if plain is not None and answer.decode_s > 0:
            # A busy moment can make the plain step look longer than steps of this answer, which it never is.
            estimate = answer.count * plain / answer.decode_s
            answer.stats.speedup_estimate = min(estimate, answer.count / max(1, answer.stats.num_steps))
        if answer.request.replay:
            return
        self._speculation = total([self._speculation, answer.stats], [self._tokens, answer.count])
        self._tokens += answer.count
        self.finished[answer.finish_reason or ""] += 1

    def totals(self, alive: Sequence[Answer]) -> tuple[Speculation, int]:
        """Statistics and tokens of all answers, those that are alive included."""
        counted = [answer for answer in alive if answer.stats.num_steps and not answer.request.replay]
        counts = [self._tokens, *(answer.count for answer in counted)]
        return total([self._speculation, *(answer.stats for answer in counted)], counts), sum(counts)

    def snapshot(self, scheduler: Scheduler, memory: Mapping[str, int], drafting: Drafting, watch: Watch) -> Snapshot:
        """All of it, with what waits and runs and the memory that it takes (as `Target.memory_bytes` says)."""
        speculation, tokens = self.totals([*scheduler.waiting, *scheduler.admitted])
        return Snapshot(
            running=len(scheduler.running),
            reading=len(scheduler.reading),
            waiting=len(scheduler.waiting),
            kv_used_bytes=memory["kv_used"],
            kv_free_bytes=memory["kv_free"],
            steps=self.steps,
            tokens=tokens,
            prompt_tokens=self.prompt_tokens,
            reused_tokens=self.reused_tokens,
            finished=dict(self.finished),
            speculation=speculation,
            plain_step_s=self.plain_step_s,
            speedup=self.speedup,
            drafting=tuple(guard.name for guard in drafting.active),
            setting=drafting.setting,
            drafters=watch.states(),
            events=tuple(watch.events),
        )
