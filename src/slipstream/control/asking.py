"""Which drafters are worth asking, and how deep: their time is spent before it is known what they offer."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.control.cost import CostCurve

FREE_SHARE = 0.015
"""A drafter that takes less than this share of a plain step is always asked."""
PROBE_SHARE = 0.007
"""Share of the time that may go into asking a drafter that does not pay, to see whether it pays again."""
TRIALS = 3
"""Times a drafter is asked before it is judged."""
START_DEPTH = 2
"""Depth of the first questions."""
PROBE_DEPTH = 2
DEEPER_EVERY = 16
"""Every so many questions go two levels deeper than pays, to see what is there."""
SMOOTHING = 0.9
PROBE_SMOOTHING = 0.5
"""Weight left of older steps; a probe counts for more, because little else is known about now."""
SLACK = 0.5
"""Part of a level's cost that its expected gain must reach for the drafter to go on; its own chances are rough."""
QUIET_AFTER = 16
"""Answers in a row of which nothing was worth verifying, after which cheap drafters rest for the row; divided by the
rows of the batch, but no fewer than FEWEST_ANSWERS: the more rows share a pass, the less one of them can win."""
FEWEST_ANSWERS = 2
LONGEST_REST = 16
"""Steps; rests double up to here. A text that turns into copying is noticed at most so many tokens late."""


class Rest:
    """Whether a row for which nothing pays is left alone in this step."""

    def __init__(self) -> None:
        self._in_vain = 0
        self._length = self._left = 0

    def now(self) -> bool:
        """One step passes: does the row rest in it?"""
        if self._left:
            self._left -= 1
            return True
        return False

    def answered(self, worthwhile: bool, rows: int) -> None:
        """The row's drafters were asked, and something of what they offered was verified or nothing."""
        patience = max(FEWEST_ANSWERS, QUIET_AFTER // rows)
        self._in_vain = 0 if worthwhile else self._in_vain + 1
        self._length = min(max(1, 2 * self._length), LONGEST_REST) if self._in_vain >= patience else 0
        self._left = self._length


class Rate:
    """Decayed sums of expected tokens and seconds over steps."""

    def __init__(self) -> None:
        self.steps = self.tokens = self.seconds = self.depth = 0.0

    def add(self, tokens: float, seconds: float, depth: int, smoothing: float) -> None:
        """One step: expected tokens, seconds (those of the drafter in question left out), depth of its offers."""
        self.steps = self.steps * smoothing + 1.0
        self.tokens = self.tokens * smoothing + tokens
        self.seconds = self.seconds * smoothing + seconds
        self.depth = self.depth * smoothing + depth


class Source:
    """One drafter as the controller sees it: what asking costs by depth, how far its offers reach, whether it pays.

    It pays when (expected tokens) / (seconds) of the steps in which it was asked, its own time included, exceeds that
    of the same steps and of those without it, had its offers not been there.
    """

    def __init__(self, name: str):
        self.name = name
        self.cost = CostCurve(slope=1.0)
        self.asked = 0
        self.reach: list[float] = []
        """Mean probability, by depth, that the best path is accepted that far."""
        self.with_it, self.without = Rate(), Rate()
        self.credit = 0.0
        """Seconds that probes may spend."""
        self.price = 0.0
        self.pair = False
        self.probing = False
        self.free = False
        """Too cheap to be judged."""

    def looks(self, every: int) -> bool:
        """Whether this answer is looked at closely: booking one of a cheap source costs as much as asking for it."""
        if not self.free:
            return True
        self.asked += 1
        return self.asked % every == 0

    def seconds(self, depth: int) -> float:
        """What asking for an offer of this depth takes; an empty one still takes a look."""
        return self.cost.at(max(depth, 1))

    def gain(self) -> float:
        """Speed with it over speed without it, as far as known; 1 while it is unknown."""
        ours, others = self.with_it, self.without
        if not (ours.steps and others.steps and others.tokens):
            return 1.0
        mean_depth = round(ours.depth / ours.steps)
        spent = ours.seconds + ours.steps * self.seconds(mean_depth)
        if spent <= 0 or others.seconds <= 0:
            return 1.0
        return (ours.tokens / spent) / (others.tokens / others.seconds)

    def best_depth(self, deepest: int, rows: int, curve: CostCurve) -> int:
        """The chain depth with the largest expected tokens per second if this source drafts alone, at least 1."""
        if not (self.reach and self.cost.known):
            return min(deepest, START_DEPTH)
        passes = curve.table(rows * (deepest + 1))
        best, best_rate, tokens = 1, 0.0, 1.0
        reach = self._reach(deepest)
        for depth in range(1, deepest + 1):
            tokens += reach[depth - 1]
            rate = tokens / (passes[rows * (depth + 1)] + self.seconds(depth))
            if rate > best_rate:
                best, best_rate = depth, rate
        return best

    def _reach(self, deepest: int) -> list[float]:
        """Reach by depth; beyond what was seen it goes on falling as it did at the end."""
        reach = list(self.reach)
        ratio = min(reach[-1] / reach[-2], 1.0) if len(reach) > 1 and reach[-2] > 0 else reach[-1]
        while len(reach) < deepest:
            reach.append(reach[-1] * ratio)
        return reach

    def depth_to_ask(self, deepest: int, rows: int, curve: CostCurve) -> int:
        """Depth for the coming step, 0 for not at all."""
        self.probing = False
        # Beyond the depths it has shown the cost is a guess; a source that is cheap so far may show what it has.
        shown = min(deepest, self.cost.largest)
        self.free = self.cost.known and self.seconds(shown) <= FREE_SHARE * curve.at(rows)
        if self.free:
            return deepest
        depth = self.best_depth(deepest, rows, curve)
        if self.asked < TRIALS or self.gain() >= 1.0:
            return min(deepest, depth + 2) if self.asked % DEEPER_EVERY == DEEPER_EVERY - 1 else depth
        return self._probe(depth)

    def _probe(self, depth: int) -> int:
        """Depth of a probe if one is due. After a pause a drafter first catches up, so probes come in pairs."""
        if self.seconds(depth) > self.credit:
            depth = min(depth, PROBE_DEPTH)
        if self.pair:
            self.pair = False
        elif self.credit >= self.seconds(depth):
            self.pair = True
        else:
            return 0
        self.probing = True
        return depth

    def saw(self, seconds: float, path: Sequence[float], asked_depth: int, cold: bool) -> None:
        """An answer: the time it took for all rows, and the mean reach by depth of what was offered.

        cold: the drafter had to read tokens of rows it was not asked for in the step before; such a time says nothing
        about the next one.
        """
        self.asked += 1
        if not cold:
            self.cost.observe(max(len(path), 1), seconds)
        if self.probing:
            self.price = seconds
            self.credit -= seconds
        keep = PROBE_SMOOTHING if self.probing else SMOOTHING
        for depth in range(asked_depth):
            reach = path[depth] if depth < len(path) else 0.0
            if depth == len(self.reach):
                self.reach.append(reach)
            else:
                self.reach[depth] += (1.0 - keep) * (reach - self.reach[depth])

    def judge(self, asked: bool, ours: tuple[float, float, int], without: tuple[float, float]) -> None:
        """One step: (expected tokens, seconds, depth) with this source if it was asked, and without it."""
        keep = PROBE_SMOOTHING if self.probing else SMOOTHING
        self.without.add(*without, 0, keep)
        if asked:
            self.with_it.add(*ours, keep)

    def refund(self, surprise: float) -> None:
        """Give back the price of a probe as far as its success was a surprise: it goes on while there is news."""
        self.credit += surprise * self.price
        self.price *= 1.0 - surprise

    def pass_time(self, seconds: float) -> None:
        """Credit for probes while it is not asked."""
        self.credit = min(self.credit + PROBE_SHARE * seconds, self.seconds(START_DEPTH))
