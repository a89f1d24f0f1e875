"""THE LOOP. Greedy, sampled, chain, tree, no drafter, one row or many are data, never copies of this loop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.control.base import Controller, StepCost
from slipstream.core.tree import Draft
from slipstream.core.types import Limit, Offers
from slipstream.drafters.guard import Guard
from slipstream.engine.batch import Batch
from slipstream.targets.base import Target
from slipstream.verify import verify_rows
from slipstream.verify.base import Verifier


@dataclass(frozen=True, slots=True)
class Parts:
    """Who answers which question in a step."""

    target: Target
    verifier: Verifier
    controller: Controller
    drafters: Sequence[Guard] = ()


@dataclass(slots=True)
class Clock:
    """Seconds by part: draft, pass (forward and commit), verify (sampling included), rest."""

    seconds: dict[str, float] = field(default_factory=lambda: {"draft": 0.0, "pass": 0.0, "verify": 0.0, "rest": 0.0})
    last: float = field(default_factory=time.perf_counter)
    token_rows: int = 0
    """Anchors and nodes that the pass went over."""

    def lap(self, part: str) -> None:
        """Book the time since the last lap."""
        now = time.perf_counter()
        self.seconds[part] += now - self.last
        self.last = now

    def cost(self, drafts: Sequence[Draft]) -> StepCost:
        """The step so far, as controllers see it."""
        self.token_rows = len(drafts) + sum(map(len, drafts))
        spent = self.seconds
        return StepCost(self.token_rows, spent["pass"], spent["verify"], spent["draft"], spent["rest"])


def step(batch: Batch, parts: Parts, clock: Clock) -> None:
    """Draft, verify, commit once, for every row of the batch.

    Tokens are appended before cache rows are committed, because where an answer ends decides what is kept.
    """
    target, controller, rows = parts.target, parts.controller, batch.rows
    speculating = [row for row in rows if row.speculate]
    drafters = [drafter for drafter in parts.drafters if any(map(drafter.wants, speculating))]
    limits = batch.clip(controller.limits(rows), [drafter.name for drafter in drafters])
    drafts = batch.fit(choose(batch, controller, drafters, limits), limits)
    clock.lap("draft")
    output = target.forward(batch.inputs(drafts))
    clock.lap("pass")
    verdicts = verify_rows(parts.verifier, output.logits, drafts, rows, output.draw)
    # A device computes on while the host goes ahead; where the draw happens there, it is what waits for the pass.
    clock.lap("verify" if output.draw is None else "pass")
    observations = batch.append(drafts, verdicts, output)
    clock.lap("rest")
    target.commit([seen.verdict.path for seen in observations])
    clock.lap("pass")
    drafted = [seen for seen in observations if seen.row.speculate]
    # The last one first: a head, which then computes ahead while the others learn.
    for drafter in reversed(drafters):
        drafter.observe(drafted)
    clock.lap("rest")
    controller.observe(observations, clock.cost(drafts))
    clock.lap("rest")


def choose(batch: Batch, controller: Controller, drafters: Sequence[Guard], limits: Sequence[Limit]) -> list[Draft]:
    """What the controller takes out of all drafters' offers; without a limit above zero nobody is asked."""
    rows = batch.rows
    if not drafters or not any(limit.nodes > 0 for limit in limits):
        return [Draft() for _ in rows]
    asked: list[list[Offers]] = []
    for drafter in drafters:
        limits = controller.beside(drafter.name, rows, limits, asked)
        asked.append(drafter.propose(rows, limits))
    offers = list(zip(*asked, strict=True))
    batch.offered(offers)
    return controller.choose(rows, offers, limits)
