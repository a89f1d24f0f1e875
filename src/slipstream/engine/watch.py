"""Watches each drafter against its own recent past, and takes out one that drifts until a probe finds it well again.

Whether a drafter pays is the controller's judgement, step by step; here its decisions become visible, and what no
single step shows is added: acceptance that falls far below what it was.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.drafters.forced import Forced
from slipstream.drafters.guard import Guard
from slipstream.engine.drafting import Drafting

log = logging.getLogger(__name__)

LOOK_EVERY = 32
"""Steps between two looks."""
WINDOW = 200
"""Verified nodes of a drafter that make one reading of its acceptance."""
BASELINE = 0.8
"""Weight left of older readings in the baseline."""
DRIFT = 0.5
"""Part of its baseline below which acceptance has drifted, if chance does not explain it (by SIGMA deviations)."""
SIGMA = 4.0
FIRST_PAUSE, LONGEST_PAUSE = 512, 16384
"""Steps before the first probe of a drafter that was taken out; each probe that fails doubles them."""
PROBE_LOOKS = 16
"""A probe that has not verified enough nodes after so many looks ends: nothing speaks against the drafter."""
RARELY, OFTEN = 0.1, 0.5
"""Shares of steps in which a drafter is asked: below the first it rests, above the second it works."""
EVENTS = 200
"""Events that are remembered."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that was decided about a drafter.

    what: resting (the controller stopped asking it), working (it asks again), out (taken out because it drifted),
    probe (asked again to see), back (well again). at: seconds since the epoch. acceptance and baseline: accepted /
    verified nodes lately and before. gain: by the controller, None where it does not judge.
    """

    at: float
    drafter: str
    what: str
    acceptance: float
    baseline: float
    gain: float | None


@dataclass(frozen=True, slots=True)
class DrafterState:
    """active: in use, neither switched off nor taken out. working: the controller asks it. acceptance: accepted /
    verified nodes at the last reading; baseline: what is usual for it, None before the first reading. gain: speed with
    it over speed without it at the last look, None where the controller does not judge.
    """

    active: bool
    working: bool
    acceptance: float
    baseline: float | None
    gain: float | None


@dataclass(slots=True)
class Record:
    """What is known of one drafter. verified, accepted, asked: counts at the last reading, or look (asked)."""

    guard: Guard
    verified: int = 0
    accepted: int = 0
    asked: int = 0
    acceptance: float = 0.0
    baseline: float | None = None
    gain: float | None = None
    working: bool = True
    pause: int = FIRST_PAUSE
    wakes_at: int | None = None
    """Step of the next probe while it is out."""
    probe_looks: int = 0
    """Looks that are left of a probe; 0 while none is on."""


class Watch:
    """Looks at the drafters every few steps; `events` says what was decided, the newest last."""

    def __init__(self, drafting: Drafting) -> None:
        self.events: deque[Event] = deque(maxlen=EVENTS)
        self.records = {guard.name: Record(guard) for guard in drafting.guards}
        self._drafting = drafting
        self._steps = self._spoke = 0

    def due(self, speculating: bool) -> bool:
        """Count a step, in which some row could be drafted for or not; True when it is time to `look`."""
        self._steps += 1
        self._spoke += speculating
        return self._steps % LOOK_EVERY == 0

    def look(self, verified: Mapping[str, int], accepted: Mapping[str, int], gains: Mapping[str, float]) -> None:
        """Judge all drafters. verified, accepted: their nodes since the beginning; gains: as the controller says."""
        steps, self._spoke = self._spoke, 0
        for guard in self._drafting.guards:
            record = self.records[guard.name]
            if record.guard is not guard:  # exchanged: another past
                counts = verified.get(guard.name, 0), accepted.get(guard.name, 0)
                self.records[guard.name] = Record(guard, *counts, guard.asked)
                continue
            gain = record.gain = gains.get(guard.name)
            if record.wakes_at is not None:
                if self._steps >= record.wakes_at:
                    self._probe(record, verified, accepted, gain)
                continue
            # What a grammar forces is drafted wherever there is a grammar; its rest says nothing about what pays.
            if guard in self._drafting.active and steps and guard.asked and guard.name != Forced.name:
                self._see_asking(record, (guard.asked - record.asked) / steps, gain)
            record.asked = guard.asked
            self._see_acceptance(record, verified.get(guard.name, 0), accepted.get(guard.name, 0), gain)

    def _see_asking(self, record: Record, share: float, gain: float | None) -> None:
        if record.working and share < RARELY:
            record.working = False
            self._note(record, "resting", gain)
        elif not record.working and share > OFTEN:
            record.working = True
            self._note(record, "working", gain)

    def _see_acceptance(self, record: Record, verified: int, accepted: int, gain: float | None) -> None:
        count = verified - record.verified
        if count >= WINDOW:
            record.acceptance = (accepted - record.accepted) / count
            record.verified, record.accepted = verified, accepted
            if self._drifted(record, count, gain):
                self._take_out(record, gain)
                return
            usual = record.acceptance if record.baseline is None or record.probe_looks else record.baseline
            record.baseline = BASELINE * usual + (1.0 - BASELINE) * record.acceptance
        elif record.probe_looks != 1:
            record.probe_looks = max(0, record.probe_looks - 1)
            return
        if record.probe_looks:
            record.probe_looks, record.pause = 0, FIRST_PAUSE
            self._note(record, "back", gain)

    @staticmethod
    def _drifted(record: Record, count: int, gain: float | None) -> bool:
        usual = record.baseline
        if usual is None or record.acceptance >= DRIFT * usual:
            return False
        if gain is not None and gain >= 1.0:
            return False  # another kind of text: less is accepted than before, and no step is slower for it
        return usual - record.acceptance > SIGMA * math.sqrt(usual * (1.0 - usual) / count)

    def _take_out(self, record: Record, gain: float | None) -> None:
        """Out it goes, for longer each time in a row; what it shows now counts half of what is usual from here on."""
        self._note(record, "out", gain)
        record.baseline = ((record.baseline or 0.0) + record.acceptance) / 2
        record.wakes_at, record.probe_looks = self._steps + record.pause, 0
        record.pause = min(2 * record.pause, LONGEST_PAUSE)
        self._drafting.take_out(record.guard.name)

    def _probe(
        self, record: Record, verified: Mapping[str, int], accepted: Mapping[str, int], gain: float | None
    ) -> None:
        name = record.guard.name
        record.wakes_at, record.probe_looks = None, PROBE_LOOKS
        record.verified, record.accepted, record.asked = (
            verified.get(name, 0),
            accepted.get(name, 0),
            record.guard.asked,
        )
        self._note(record, "probe", gain)
        self._drafting.put_back(name)

    def _note(self, record: Record, what: str, gain: float | None) -> None:
        event = Event(time.time(), record.guard.name, what, record.acceptance, record.baseline or 0.0, gain)
        self.events.append(event)
        level = logging.WARNING if what == "out" else logging.INFO
        rates = f"acceptance {event.acceptance:.2f}, before {event.baseline:.2f}"
        log.log(level, "drafter %s: %s (%s)", event.drafter, what, rates)

    def states(self) -> dict[str, DrafterState]:
        """The drafters as they are now, by name."""
        active = {guard.name for guard in self._drafting.active}
        return {
            name: DrafterState(name in active, record.working, record.acceptance, record.baseline, record.gain)
            for name, record in self.records.items()
        }
