"""Which drafters are worth asking, and how deep: their time is spent before it is known what they offer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.control.cost import CostCurve

FREE_SHARE = 0.015
"""A drafter that takes less than this share of a plain step is always asked."""
PROBE_SHARE = 0.007
"""Share of the time that may go into asking a drafter that does not pay, to see whether it pays again."""
TRIALS = 3
"""Times a drafter is asked before it is judged."""
CHEAP_TRIALS, CHEAP_SHARE = 32, 0.25
"""The same for one that takes no more than this share of a plain step: its first times are those of a cold machine, and
what is judged by them would hardly be asked again."""
SHARED_GAIN = 0.98
"""A cheap one is asked for a batch down to this gain: what it brings there grows with what it has read of the rows."""
CHEAP_SMOOTHING = 0.97
"""It is judged by more steps: going on in vain for a while costs little, and giving up by bad luck much."""
START_DEPTH = 2
"""Depth of the first questions."""
PROBE_DEPTH = 2
OMIT_EVERY = 64
"""Every so many questions one is left out, to see what steps take without it."""
AROUND_CHANGE = 0.1
"""Relative change of what a step takes outside its pass that is taken up."""
DEEPER_EVERY = 16
"""Every so many questions go two levels deeper than pays, to see what is there."""
SMOOTHING = 0.9
PROBE_SMOOTHING = 0.5
"""Weight left of older steps; a probe counts for more, because little else is known about now."""
SLACK = 0.5
"""Part of a level's cost that its expected gain must reach for the drafter to go on; its own chances are rough."""
OUTLOOK = 6.0
"""Steps for which a drafter is expected to be of use at least."""
FADES = 0.75
"""Weight left of what was missed, with each step in which the others suffice."""
MANY = 32
"""Unread tokens from which on the time for them can be told from that of a draft."""
QUIET_AFTER = 16
"""Answers in a row of which nothing was worth verifying, after which cheap drafters rest for the row; divided by the
rows of the batch, but no fewer than FEWEST_ANSWERS: the more rows share a pass, the less one of them can win."""
FEWEST_ANSWERS = 2
LONGEST_REST = 16
"""Steps; rests double up to here. A text that turns into copying is noticed at most so many tokens late."""


@dataclass(frozen=True, slots=True)
class Beside:
    """What is offered without a source: nodes over all rows, and by depth the mean chance that one of them stands."""

    nodes: int = 0
    reach: Sequence[float] = ()


ALONE = Beside()


def many(unread: int, rows: int) -> bool:
    """Whether so many unread tokens of these rows take time beside a draft, which passes over rows as well."""
    return unread >= max(MANY, 2 * rows)


class Rest:
    """Whether a row for which nothing pays is left alone in this step."""

    def __init__(self) -> None:
        self._in_vain = 0
        self._length = self._left = 0

    @property
    def rested(self) -> bool:
        """Whether nothing has been worthwhile since the last rest."""
        return self._length > 0

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


class Mean:
    """A moving mean, of which the first values count alike: one of them alone says little."""

    def __init__(self) -> None:
        self.value, self._count = 0.0, 0

    def add(self, value: float, keep: float) -> None:
        """keep: weight left of older values."""
        self._count += 1
        self.value += max(1.0 - keep, 1.0 / self._count) * (value - self.value)


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
        self.chances: list[Mean] = []
        """By depth, the chance of the best path's node given its parent, where the source went on to that depth."""
        self.usual = START_DEPTH
        """Depth that pays when it drafts alone."""
        self.looks_back: int | None = None
        """Most tokens that it reads of a row after a pause."""
        self.reading = 0.0
        """Seconds for a token that it has not read."""
        self.missed = 0.0
        """Seconds that would have been saved in the steps since it was left out for all it had to read."""
        self.with_it, self.without = Rate(), Rate()
        self.credit = 0.0
        """Seconds that probes may spend."""
        self.price = 0.0
        """Seconds that the last probe took, as far as its success has not paid for them."""
        self.pair = False
        """Whether the second of two probes is due."""
        self.probing = False
        self.free = False
        """Too cheap to be judged."""
        self._cheap = False
        self.omitted = False
        """Left out in this step to see what it takes then."""
        self._omit_at = OMIT_EVERY // 4
        self._with, self._without = (CostCurve(slope=0.0, change=AROUND_CHANGE) for _ in range(2))
        """What steps take outside the pass, offers left out, when it is asked and when it is not; by rows."""
        self.around = 0.0
        """Seconds that asking takes beside the offer: beginning the next one, and judging this one."""

    def looks(self, every: int) -> bool:
        """Whether this answer is looked at closely: booking one of a cheap source costs as much as asking for it."""
        if not self.free:
            return True
        self.asked += 1
        return self.asked % every == 0

    def seconds(self, depth: int) -> float:
        """What asking for an offer of this depth takes; an empty one still takes a look."""
        return self.cost.at(max(depth, 1)) + self.around

    def took_around(self, asked: bool, rows: int, seconds: float) -> None:
        """What a step took outside its pass, without the offers of drafters that are judged."""
        (self._with if asked else self._without).observe(rows, seconds)

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

    def best_depth(self, deepest: int, rows: int, curve: CostCurve, beside: Beside = ALONE) -> tuple[int, float]:
        """The chain depth with the most expected tokens per second, 0 where others offer enough without this source;
        and the seconds that it saves against the same tokens without it.
        """
        if not self.cost.known:
            deepest = min(deepest, START_DEPTH)
        if not self.chances:
            return deepest, 0.0
        others = rows + beside.nodes
        passes = curve.table(max(rows * (deepest + 1), others))
        tokens, reach = 1.0 + sum(beside.reach), 1.0
        without = rate = tokens / passes[others]
        best = 0
        saved = 0.0
        for depth in range(1, deepest + 1):
            reach *= self.chances[min(depth, len(self.chances)) - 1].value
            tokens += reach * (1.0 - (beside.reach[depth - 1] if depth <= len(beside.reach) else 0.0))
            seconds = passes[max(rows * (depth + 1), others)] + self.seconds(depth)
            if tokens / seconds > rate:
                best, rate, saved = depth, tokens / seconds, tokens / without - seconds
        return best, saved

    def depth_to_ask(self, deepest: int, rows: int, curve: CostCurve) -> int:
        """Depth for the coming step, 0 for not at all."""
        self.probing = self.omitted = False
        if self._with.known and self._without.known:
            self.around = max(0.0, self._with.at(rows) - self._without.at(rows))
        # Beyond the depths it has shown the cost is a guess; a source that is cheap so far may show what it has.
        shown = min(deepest, self.cost.largest)
        takes = self.cost.at(max(shown, 1))
        if rows > 1:  # batches rest, and who is asked again has to catch up
            takes = max(takes, MANY * self.reading)
        self.free = self.cost.known and takes <= FREE_SHARE * curve.at(rows)
        if self.free:
            return deepest
        self.usual = depth = max(1, self.best_depth(deepest, rows, curve)[0])
        self._cheap = self.seconds(depth) <= CHEAP_SHARE * curve.at(rows)
        enough = SHARED_GAIN if self._cheap and rows > 1 else 1.0
        if self.asked < (CHEAP_TRIALS if self._cheap else TRIALS) or self.gain() >= enough:
            if rows == 1 and self.asked >= self._omit_at:
                self._omit_at, self.omitted = self.asked + OMIT_EVERY, True
                return 0
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

    def worth_reading(self, tokens: int, saved: float) -> bool:
        """Whether so many tokens are read for a step in which the source would save these seconds.

        How long it will be of use nobody knows. It is taken to go on for as long as it would have been of use so far,
        and a little longer: so what is read in vain is never much more than what waiting has cost. Where that is too
        little the credit for probes may pay: what it offered last may have been long ago.
        """
        self.missed = self.missed + saved if saved else FADES * self.missed
        if self.missed + OUTLOOK * saved < tokens * self.reading:
            if self.credit < tokens * self.reading:
                return False
            self.credit -= tokens * self.reading
        self.missed = 0.0
        return True

    def saw(self, seconds: float, paths: Sequence[Sequence[float]], unread: int) -> None:
        """An answer: the time it took for all rows, and by row the chance that the best path stands, by depth.

        unread: tokens of rows that it was not asked for in the step before, and had to read first; where they are many
        such a time says nothing about the next one.
        """
        self.asked += 1
        deepest = max(1, *map(len, paths))
        if not many(unread, len(paths)):
            # The first of two probes has more to do than it would have had without the pause.
            if not (unread and self.probing and self.cost.known):
                self.cost.observe(deepest, seconds)
        else:
            if not self.cost.known and self.asked > TRIALS:  # it always has to catch up: a share must do
                self.cost.observe(deepest, seconds * len(paths) / unread)
            took = max(0.0, seconds - self.cost.at(deepest)) / unread
            self.reading += (took - self.reading) * (0.5 if self.reading else 1.0)
        if self.probing:
            self.price = seconds + self.around
            self.credit -= self.price
        keep = PROBE_SMOOTHING if self.probing else SMOOTHING
        for depth in range(deepest):
            # Where it stopped by itself nothing is known of what would have come, and nothing was spent on it.
            going = [path for path in paths if len(path) > depth]
            above = sum(path[depth - 1] for path in going) if depth else len(paths)
            chance = sum(path[depth] for path in going) / above if above else 0.0
            if depth == len(self.chances):
                self.chances.append(Mean())
            self.chances[depth].add(chance, keep)

    def judge(self, asked: bool, ours: tuple[float, float, int], without: tuple[float, float]) -> None:
        """One step: (expected tokens, seconds, depth) with this source if it was asked, and without it."""
        keep = PROBE_SMOOTHING if self.probing else CHEAP_SMOOTHING if self._cheap else SMOOTHING
        self.without.add(*without, 0, keep)
        if asked:
            self.with_it.add(*ours, keep)

    def refund(self, surprise: float) -> None:
        """Give back the price of a probe as far as its success was a surprise: it goes on while there is news."""
        self.credit += surprise * self.price
        self.price *= 1.0 - surprise

    def pass_time(self, seconds: float) -> None:
        """Credit for probes while it is not asked."""
        look = (self.looks_back or 0) * self.reading
        self.credit = min(self.credit + PROBE_SHARE * seconds, max(look, self.seconds(START_DEPTH)))
