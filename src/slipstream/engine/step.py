"""THE LOOP. Greedy, sampled, chain, tree, no drafter, one row or many are data, never copies of this loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slipstream.control.base import Controller, StepCost
from slipstream.core.tree import Draft
from slipstream.core.types import Limit, Offers
from slipstream.drafters.guard import Guard
from slipstream.engine.batch import Batch
from slipstream.targets.base import Read, Target
from slipstream.verify import verify_rows
from slipstream.verify.base import Verifier

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Parts:
    """Who answers which question in a step."""

    target: Target
    verifier: Verifier
    controller: Controller
    drafters: Sequence[Guard] = ()


@dataclass(frozen=True, slots=True)
class Along:
    """What a pass reads of prompts beside its rows.

    done: called with the features and the seconds that were theirs. new: rows, the last ones, whose prompt it ends.
    """

    reads: Sequence[Read] = ()
    done: Callable[[Sequence[NDArray[np.float32] | None], float], None] | None = None
    new: int = 0


@dataclass(slots=True)
class Clock:
    """Seconds by part: draft, pass (forward and commit), verify (sampling included), rest."""

    seconds: dict[str, float] = field(default_factory=lambda: {"draft": 0.0, "pass": 0.0, "verify": 0.0, "rest": 0.0})
    last: float = field(default_factory=time.perf_counter)
    token_rows: int = 0
    """Anchors and nodes that the pass went over."""
    read_s: float = 0.0
    """What went into prompts that were read along; the time of such a pass says nothing about one over rows alone."""

    def lap(self, part: str) -> None:
        """Book the time since the last lap."""
        now = time.perf_counter()
        self.seconds[part] += now - self.last
        self.last = now

    def part_with(self, rows: int, tokens: int) -> float:
        """Take so many tokens of prompts out of a pass over so many rows besides; returns their part of its time."""
        self.read_s = self.seconds["pass"] * tokens / (rows + tokens)
        self.seconds["pass"] -= self.read_s
        return self.read_s

    def cost(self, drafts: Sequence[Draft]) -> StepCost:
        """The step so far, as controllers see it."""
        self.token_rows = len(drafts) + sum(map(len, drafts))
        spent = self.seconds
        alone_s = 0.0 if self.read_s else spent["pass"]
        return StepCost(self.token_rows, alone_s, spent["verify"], spent["draft"], spent["rest"])


NOTHING = Along()


def step(batch: Batch, parts: Parts, clock: Clock, along: Along = NOTHING) -> None:
    """Draft, verify, commit once, for every row of the batch.

    Tokens are appended before cache rows are committed, because where an answer ends decides what is kept.
    """
    target, controller, rows = parts.target, parts.controller, batch.rows
    speculating = [row for row in rows if row.speculate]
    drafters = [drafter for drafter in parts.drafters if any(map(drafter.wants, speculating))]
    limits = batch.clip(controller.limits(rows), [drafter.name for drafter in drafters])
    limits[len(rows) - along.new :] = [Limit(0, 0)] * along.new  # their drafters have not begun
    drafts = batch.fit(choose(batch, controller, drafters, limits), limits)
    clock.lap("draft")
    output = target.forward(batch.inputs(drafts), along.reads)
    clock.lap("pass")
    if along.done is not None and along.reads:
        token_rows = len(drafts) + sum(map(len, drafts))
        along.done(output.read, clock.part_with(token_rows, sum(len(read.tokens) for read in along.reads)))
        clock.last = time.perf_counter()
    if not rows:
        return
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
