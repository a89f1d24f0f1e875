"""Decoding a finished request again, plainly, and comparing: the promise of same tokens, checked on live requests."""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from slipstream.core.errors import InputError
from slipstream.engine.engine import Engine
from slipstream.engine.request import Request
from slipstream.engine.stop import ENDED_WELL
from slipstream.targets.slots import common_prefix

log = logging.getLogger(__name__)

BACKLOG = 64
"""Requests that may wait for their replay; further ones are skipped and counted."""
URGENT = 4
"""With so many waiting, a replay queues up like any request; before, only when nobody else waits."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A request whose answer differs from plain decoding.

    request_id: as in `Request.id`; index: of its answer; place: of the first token that differs, from 0, or the number
    of tokens where only the ends differ. found, plain: the tokens there, None where there is no further one.
    """

    request_id: int
    index: int
    place: int
    found: int | None
    plain: int | None

    def __str__(self) -> str:
        where = f"request {self.request_id}, answer {self.index}, token {self.place}"
        return f"{where}: {self.found} with speculation, {self.plain} decoded plainly"


def plainly(engine: Engine, request: Request) -> Request:
    """The same prompt, parameters and seed, without speculation and without anything cached; made, not queued."""
    params = replace(request.params, seed=request.answers[0].row.seed)
    again = engine.make(request.prompt_token_ids, params, speculation=False)
    again.replay = True
    return again


def compare(request: Request, again: Request) -> Mismatch | None:
    """The first difference between a request and its replay, both at their ends.

    Answers that were cut off or failed say nothing; nor do those with near-ties, which only runtimes report whose
    arithmetic depends on the rows of a pass.
    """
    for one, plain in zip(request.answers, again.answers, strict=True):
        if one.finish_reason not in ENDED_WELL or plain.finish_reason not in ENDED_WELL:
            continue
        ours, theirs = one.row.output, plain.row.output
        same = ours == theirs and (one.text, one.finish_reason) == (plain.text, plain.finish_reason)
        if same or one.stats.near_ties or plain.stats.near_ties:
            continue
        place = common_prefix(ours, theirs)
        found, expected = (tokens[place] if place < len(tokens) else None for tokens in (ours, theirs))
        return Mismatch(request.id, one.index, place, found, expected)
    return None


def replay(engine: Engine, request: Request) -> Mismatch | None:
    """Decode a finished request again and compare; runs the engine until that is done."""
    again = plainly(engine, request)
    engine.queue(again)
    engine.run([again])
    return compare(request, again)


@dataclass(frozen=True, slots=True)
class ShadowCounts:
    """Requests decoded again, those among them that differed, and those picked but skipped for want of time."""

    checked: int = 0
    differed: int = 0
    skipped: int = 0


class Shadow:
    """Picks a share of finished requests by their ids and replays them one at a time, behind everybody else.

    share: 0 to 1. on_alarm: called with each mismatch, from the thread that runs the engine. Raises InputError for a
    share outside 0..1 and where the verifier does not promise the tokens of plain decoding.
    """

    def __init__(self, engine: Engine, share: float, on_alarm: Callable[[Mismatch], None] | None = None) -> None:
        if not 0 <= share <= 1:
            raise InputError(f"shadow_share is {share}; it must be from 0 (no check) to 1 (every request)")
        if share and not engine.verifier.same_tokens:
            name = type(engine.verifier).__name__.lower()
            raise InputError(f"the shadow check compares tokens, which verifier {name} does not promise; use coupled")
        self.counts = ShadowCounts()
        self._engine, self._share, self._on_alarm = engine, share, on_alarm
        self._backlog: deque[Request] = deque()
        self._now: tuple[Request, Request] | None = None

    @property
    def idle(self) -> bool:
        """True when nothing is to be replayed."""
        return not (self._backlog or self._now)

    def picks(self, request: Request) -> bool:
        """Whether a request is among those to be replayed; the same for the same id."""
        digest = hashlib.blake2b(request.id.to_bytes(8, "little"), digest_size=8).digest()
        return int.from_bytes(digest, "little") < self._share * 2**64

    def finished(self, request: Request) -> None:
        """A request has ended; it is replayed later if it is picked and there is anything to compare."""
        if not self._share or not self.picks(request):
            return
        if not any(answer.finish_reason in ENDED_WELL and answer.count for answer in request.answers):
            return
        if len(self._backlog) >= BACKLOG:
            self.counts = replace(self.counts, skipped=self.counts.skipped + 1)
        else:
            self._backlog.append(request)

    def attend(self, waiting: bool) -> None:
        """Between steps: compare a replay that is done, start the next one. waiting: requests wait for a place."""
        if self._now is not None:
            request, again = self._now
            if not again.done:
                return
            self._now = None
            self._judge(request, again)
        if self._backlog and (not waiting or len(self._backlog) >= URGENT):
            request = self._backlog.popleft()
            again = plainly(self._engine, request)
            self._now = request, again
            self._engine.queue(again)

    def _judge(self, request: Request, again: Request) -> None:
        mismatch = compare(request, again)
        differed = self.counts.differed + (mismatch is not None)
        self.counts = replace(self.counts, checked=self.counts.checked + 1, differed=differed)
        if mismatch is not None:
            log.error("speculation changed an answer: %s", mismatch)
            if self._on_alarm is not None:
                self._on_alarm(mismatch)

    def drop(self) -> None:
        """Give up what is to be replayed."""
        self._backlog.clear()
        if self._now is not None:
            self._engine.cancel(self._now[1])
            self._now = None
