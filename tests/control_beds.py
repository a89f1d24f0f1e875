"""A world with known costs and acceptance for controllers: simulated passes, and drafters that guess by chance."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from slipstream.control.base import StepCost
from slipstream.control.fixed import Fixed
from slipstream.core.params import SamplingParams
from slipstream.core.tree import ANCHOR
from slipstream.core.types import Limit, Observation, Offers, Row, Verdict

PASS = 0.010


def started(controller, costs):
    controller.start_from(costs)
    return controller


def flat(rows):
    """A pass that is bound by memory: more rows cost little."""
    return PASS * (1 + 0.03 * (rows - 1))


def steep(rows):
    """A pass in which every row costs as much as the first."""
    return PASS * rows


def stairs(rows):
    """Blocks of four rows: the next one is free until a block is full."""
    return PASS * (0.5 + 0.5 * -(-rows // 4))


@dataclass
class Guesser:
    """A drafter whose tokens are right with a chance that may change over time; the right token is the depth."""

    name: str
    chance: object
    seconds: float
    """Per level."""
    belief: float = 0.7
    share: float = 1.0
    """Share of steps in which there is anything to offer."""
    around: float = 0.0
    """Seconds of a step in which it is asked, beside its offer."""
    asked: int = 0

    def propose(self, limit: Limit, step: int, rng: random.Random) -> Offers:
        limit = limit.of(self.name)
        offers = Offers(self.name)
        if not limit.nodes:
            return offers
        self.asked += 1
        if rng.random() >= self.share:
            offers.seconds = self.seconds / 5
            return offers
        chance = self.chance(step) if callable(self.chance) else self.chance
        for depth in range(min(limit.depth, limit.nodes)):
            offers.tokens.append(depth if rng.random() < chance else 1000)
            offers.parents.append(depth - 1)
            offers.probs.append(self.belief)
        offers.seconds = self.seconds * len(offers)
        return offers


@dataclass
class World:
    """Simulated seconds and tokens of a controller."""

    guessers: list[Guesser]
    pass_time: object = flat
    rows: int = 1
    noise: float = 0.0
    seconds: float = 0.0
    tokens: int = 0
    drafted: int = 0
    log: list[tuple[int, int]] = field(default_factory=list)

    def run(self, controller, steps: int, seed: int = 1) -> float:
        """Tokens per plain step's time."""
        rng = random.Random(seed)
        rows = [Row(i, [0], 1, SamplingParams(), 0, sampler=None) for i in range(self.rows)]
        for step in range(steps):
            limits = controller.limits(rows)
            asked: list[list[Offers]] = []
            for guesser in self.guessers:
                limits = controller.beside(guesser.name, rows, limits, asked)
                asked.append([guesser.propose(limit, step, rng) for limit in limits])
            offers = list(zip(*asked, strict=True)) or [[] for _ in rows]
            drafts = controller.choose(rows, offers, limits) if any(limit.nodes for limit in limits) else None
            seen = []
            for index, row in enumerate(rows):
                draft = drafts[index] if drafts else Fixed(0).choose([row], [[]], [Limit(0, 0)])[0]
                assert len(draft) <= limits[index].nodes or not len(draft)
                node, path = ANCHOR, []
                while found := [n for n in draft.children(node) if draft.tokens[n] == len(path)]:
                    node = found[0]
                    path.append(node)
                seen.append(Observation(row, draft, Verdict([*range(len(path) + 1)], path), None))
            count = self.rows + sum(len(one.draft) for one in seen)
            spent = self.pass_time(count) * (1 + self.noise * rng.random() ** 4)
            drafting = sum(offer.seconds for of_row in offers for offer in of_row)
            cost = StepCost(count, spent, 0.0)
            around = sum(g.around for g, of_rows in zip(self.guessers, asked, strict=True) if any(of_rows))
            if any(guesser.around for guesser in self.guessers):
                cost.draft_s, cost.rest_s = drafting + 1e-4, around
            controller.observe(seen, cost)
            self.seconds += spent + drafting + around
            self.tokens += sum(len(one.verdict.tokens) for one in seen)
            self.drafted += count - self.rows
            self.log.append((step, count - self.rows))
        return self.tokens / self.seconds * self.pass_time(self.rows) / self.rows
