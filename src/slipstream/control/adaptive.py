"""The controller that drafts only what pays: calibrated chances against measured costs, 0 nodes included.

The most expected tokens per second, E(n) / T(n), with E(n) = rows + the summed probabilities of the n best paths and
T(n) = measured pass over rows + n token rows + drafting + verification. Speed depends on the clock; tokens never do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from slipstream.control.asking import ALONE, SLACK, START_DEPTH, TRIALS, Beside, Rest, Source, many
from slipstream.control.base import StepCost
from slipstream.control.cost import CostCurve
from slipstream.control.fixed import TREE_WIDTH, check_shape
from slipstream.control.merge import Merger, Ranked, best_chain
from slipstream.core.tree import Draft, depths_of
from slipstream.core.types import Limit, Observation, Offers, Row
from slipstream.kernels.tree import spread

PASS_SLOPE = 0.03
"""Assumed cost of one more token row in a pass, in passes, until it is measured."""
LOOK_EVERY = 16
"""What hardly changes is looked at this often: the times of cheap drafters, and what may be asked of all of them."""
VERIFY_CHANGE = 0.25
"""Relative change of the time of verification that is taken up: it is short, and noisier than passes."""
REMEASURE = 128
"""A step at least this often is plain, because everything is judged against its cost."""
SURE = 0.97
"""Where even a node of this chance does not pay for its row in the pass, nobody is asked."""
WORTH = 1.02
"""Speed over plain decoding from which on a batch is worth a draft; less is what costs and chances are wrong by."""
RARER = 4
"""Times fewer probes in a batch than for a single row, at most, and rows for each time."""
NOTHING = Limit(0, 0)


class Adaptive:
    """Chooses per step how many nodes of which rows are verified, and which drafters are asked at all.

    max_nodes: most nodes per row. shape: as in Fixed. What is learned about costs and sources serves all rows.
    """

    def __init__(self, max_nodes: int = 16, shape: str = "tree"):
        check_shape(max_nodes, shape)
        self.max_nodes, self.shape = max_nodes, shape
        self.width = TREE_WIDTH if shape == "tree" else 1
        self.passes = CostCurve(PASS_SLOPE)
        self.merger = Merger()
        self.sources: dict[str, Source] = {}
        self._verify = CostCurve(slope=0.0, change=VERIFY_CHANGE)
        self._before_pass = CostCurve(slope=0.0, change=VERIFY_CHANGE)
        """All that a step takes before its pass when somebody is asked, by rows of the batch."""
        self._rests: dict[int, Rest] = {}
        self._pause = Rest()
        """Of a whole batch."""
        self._steps = self._since_plain = 0
        self._looks_left = 0
        self._rows = 0
        self._limit = NOTHING
        """What is asked for each row of a batch of `_rows` until the next look."""
        self._asking = self._reading = self._cheap = False
        self._judged_s = 0.0
        """Seconds that judged drafters took in this step."""
        self._spared: set[str] = set()
        """Sources that were not asked in the last step with drafts because others offered enough."""
        # Rows for which each source was asked, in the step before and in this one.
        self._before: dict[str, set[int]] = {}
        self._now: dict[str, set[int]] = {}
        self._read: dict[str, dict[int, int]] = {}
        """Length of each row when a source was last asked for it."""

    def start_from(self, pass_costs: Mapping[int, float]) -> None:
        """Begin with these seconds of a pass by token rows, until they are measured in steps."""
        self.passes = CostCurve(PASS_SLOPE, pass_costs)

    def limits(self, rows: Sequence[Row]) -> list[Limit]:
        """Full room for drafters whose time is worth it, none for the others, and none for rows that rest."""
        self._before, self._now = self._now, {}
        self._since_plain += 1
        self._asking = self._reading = False
        self._judged_s = 0.0
        # All else is judged against plain decoding, so its cost comes first.
        unmeasured = self._since_plain > REMEASURE or not self.passes.measured(len(rows))
        if not self.max_nodes or unmeasured or (len(rows) > 1 and self._pauses(rows)):
            return [NOTHING] * len(rows)
        self._look(len(rows))
        limit = self._limit
        if not limit.nodes:
            return [NOTHING] * len(rows)
        resting = self._cheap or (len(rows) > 1 and self._known())
        self._spared.clear()
        limits = [limit if row.speculate and not (resting and self._rest(row).now()) else NOTHING for row in rows]
        self._asking = any(one.nodes for one in limits)
        return limits

    def _pauses(self, rows: Sequence[Row]) -> bool:
        """Whether a batch for which nothing pays is left alone in this step; a newcomer ends its pause."""
        if not self._known() or any(row.speculate and row.id not in self._rests for row in rows):
            self._pause = Rest()
        if not self._pause.now():
            return False
        for rest in self._rests.values():
            rest.now()
        return True

    def _known(self) -> bool:
        """Whether it is known what asking takes: after a rest drafters have to catch up, so that is not the time.

        A source that is left to the others would not become known by going on.
        """
        return all(source.cost.known or source.name in self._spared for source in self._heard())

    def _heard(self) -> list[Source]:
        """Those that were ever asked: what one that no row wants would take says nothing."""
        return [source for source in self.sources.values() if source.asked]

    def _look(self, rows: int) -> None:
        """Settle what is asked of whom; while all drafters are cheap that stays for some steps."""
        self._looks_left -= 1
        if self._looks_left > 0 and self._rows == rows:
            return
        self._rows = rows
        depths = {name: source.depth_to_ask(self.max_nodes, rows, self.passes) for name, source in self.sources.items()}
        heard = self._heard()
        self._cheap = bool(heard) and all(source.free for source in heard if depths[source.name])
        worth = self._least_chance(rows) < SURE
        if not worth or (depths and not any(depths.values())):
            # A single row is looked at again at once: it has more to lose.
            self._limit, self._looks_left = NOTHING, LOOK_EVERY if rows > 1 else 0
            return
        depth = self.max_nodes if self.sources else min(self.max_nodes, START_DEPTH)
        floors = {name: self._floor(source, rows) for name, source in self.sources.items()}
        self._limit = Limit(self.max_nodes, depth, self.width, depths, floors=floors)
        self._looks_left = LOOK_EVERY if self._cheap and not any(source.omitted for source in heard) else 0

    def _rest(self, row: Row) -> Rest:
        return self._rests.setdefault(row.id, Rest())

    def beside(
        self, name: str, rows: Sequence[Row], limits: Sequence[Limit], offers: Sequence[Sequence[Offers]]
    ) -> Sequence[Limit]:
        """A drafter that takes time goes less deep, or is not asked, where others offer enough without it."""
        source = self.sources.get(name)
        if source is None or source.free or source.asked < TRIALS or (source.probing and len(rows) == 1):
            return limits
        asked = [row for row, limit in zip(rows, limits, strict=True) if limit.asks(name)]
        if not asked:
            return limits
        offered = self._offered(rows, limits, offers) if offers else ALONE
        depth, saved = source.best_depth(source.usual, len(rows), self.passes, offered)
        if not offered.nodes:
            depth = source.usual  # whether it pays alone is judged by its gain
        unread = self._unread(name, asked)
        if many(unread, len(asked)):
            # A batch that wakes to have a look will rest again before anything read for it is of use, unless it was
            # the source itself that paid.
            in_vain = len(rows) > 1 and self._pause.rested and source.gain() < WORTH
            # Of a new text nothing is known yet, and a look is cheap where a source looks back a few tokens only.
            new = len(rows) == 1 and source.looks_back is not None and rows[0].id not in self._read.get(name, {})
            if in_vain or not (new or source.worth_reading(unread, saved)):
                depth = 0
            else:
                self._reading = True
        if depth == source.usual:
            return limits
        if not depth:
            self._spared.add(name)
        return [replace(limit, depths=limit.depths | {name: min(depth, limit.of(name).depth)}) for limit in limits]

    def _unread(self, name: str, rows: Sequence[Row]) -> int:
        """Tokens of these rows that came while a source was not asked for them."""
        before, read, most = self._before.get(name, set()), self._read.get(name, {}), self._source(name).looks_back
        new = [len(row.tokens) - read.get(row.id, 0) for row in rows if row.id not in before]
        return sum(new if most is None else [min(tokens, most) for tokens in new])

    def _offered(self, rows: Sequence[Row], limits: Sequence[Limit], offers: Sequence[Sequence[Offers]]) -> Beside:
        """What of the offers so far is worth verifying."""
        trees = [self._tree(row, of_row) for row, of_row in zip(rows, zip(*offers, strict=True), strict=True)]
        counts, _, _ = self._best(trees, limits, 0.0)
        reach = [0.0] * self.max_nodes
        for tree, count in zip(trees, counts, strict=True):
            for depth, chance in zip(depths_of(tree.parents[:count]), tree.reach, strict=False):
                reach[depth - 1] += chance / len(rows)
        return Beside(sum(counts), reach)

    def choose(self, rows: Sequence[Row], offers: Sequence[Sequence[Offers]], limits: Sequence[Limit]) -> list[Draft]:
        """The n best nodes over all rows, n by the largest E(n) / T(n)."""
        given = [
            [offer for offer in of_row if limit.asks(offer.source)]
            for of_row, limit in zip(offers, limits, strict=True)
        ]
        drafting: dict[str, float] = {}
        depths: dict[str, int] = {}
        for name in dict.fromkeys(offer.source for of_row in given for offer in of_row):
            source = self._source(name)
            if not source.asked:
                self._looks_left = 0
            if not source.free:
                self._now[name] = {row.id for row, limit in zip(rows, limits, strict=True) if limit.asks(name)}
            if source.looks(LOOK_EVERY):
                depths[name] = self._saw(source, rows, given)
            drafting[name] = source.seconds(depths.get(name, 1))
        self._judged_s = sum(
            offer.seconds for of_row in given for offer in of_row if not self.sources[offer.source].free
        )
        trees = [self._tree(row, of_row, keep=True) for row, of_row in zip(rows, given, strict=True)]
        spent = sum(drafting.values())
        counts, tokens, seconds = self._best(trees, limits, spent)
        gain = self._gain(len(rows), tokens, seconds)
        if len(rows) > 1:
            more = max(0.0, self._before_pass.at(len(rows)) - spent)
            self._pause.answered(self._gain(len(rows), tokens, seconds + more) >= WORTH, len(rows))
        for row, of_row, count in zip(rows, given, counts, strict=True):
            if of_row:
                self._rest(row).answered(count > 0, len(rows))
        for offer in offers[0]:
            source = self._source(offer.source)
            if not (source.free or source.omitted or source.name in self._spared):
                found = tokens, seconds, depths.get(source.name, 0)
                self._judge(source, (rows, given, limits), drafting, found)
        drafts = [tree.draft(count) for tree, count in zip(trees, counts, strict=True)]
        for draft in drafts:
            draft.gain = gain
        return drafts

    def _plain(self, rows: int) -> float:
        """Seconds of a plain step, 0.0 while nothing is known."""
        return self.passes.at(rows) + self._verify.at(1)

    def _gain(self, rows: int, tokens: float, seconds: float) -> float:
        """Speed over plain steps, 1 while nothing is known."""
        plain = self._plain(rows)
        return tokens / rows * plain / seconds if plain > 0 and seconds > 0 else 1.0

    def observe(self, observations: Sequence[Observation], cost: StepCost) -> None:
        """Learn the costs of this step and which offers were right."""
        self.passes.observe(cost.rows, cost.pass_s)
        self._steps += 1
        if self._steps % LOOK_EVERY == 1:
            self._verify.observe(1, cost.verify_s)
        if cost.rows == len(observations) and cost.pass_s:
            self._since_plain = 0
        if self._asking and not self._reading and len(observations) > 1:
            self._before_pass.observe(len(observations), cost.draft_s)
        around = cost.draft_s + cost.rest_s - self._judged_s
        for source in self.sources.values():
            if (self._asking or source.omitted) and not source.free:
                source.took_around(source.name in self._now, len(observations), around)
            if not source.free and source.name not in self._now:
                # The more rows share a pass, the less a probe can win.
                source.pass_time(cost.pass_s / max(1, min(len(observations) // RARER, RARER)))
        if self._asking:
            self._learn(observations)

    def _learn(self, observations: Sequence[Observation]) -> None:
        """Learn which offers were right, and give back of a probe's price what its success was worth.

        A row's surprise pays for that row, not for all.
        """
        surprises: dict[str, list[float]] = {}
        for seen in observations:
            for name, surprise in self.merger.learn(seen.row, seen.verdict.tokens):
                if self.sources[name].probing:
                    surprises.setdefault(name, []).append(surprise)
        for name, of_rows in surprises.items():
            self.sources[name].refund(sum(of_rows) / len(of_rows))

    def end(self, row: Row) -> None:
        """The row leaves."""
        self.merger.forget(row)
        self._rests.pop(row.id, None)
        for lengths in self._read.values():
            lengths.pop(row.id, None)

    def gains(self) -> dict[str, float]:
        """Speed with each source over speed without it; 1 for those too cheap to make a step slower."""
        return {name: 1.0 if source.free else source.gain() for name, source in self.sources.items()}

    def _least_chance(self, rows: int) -> float:
        """Chance that nodes must have to pay.

        Chances c make (rows + n c) / T(rows + n) exceed rows / T(rows) where c > rows (T(rows + n) / T(rows) - 1) / n.
        """
        most = rows * self.max_nodes
        costs = self.passes.table(rows + most)
        plain = costs[rows] + self._verify.at(1)
        return rows * min((costs[rows + n] - costs[rows]) / n for n in range(1, most + 1)) / plain if plain > 0 else 0.0

    def _floor(self, source: Source, rows: int) -> float:
        """Path probability below which one more level costs more than its token is worth at the present speed."""
        plain = self.passes.at(rows)
        if source.free or plain <= 0:
            return 0.0
        level = source.seconds(2) - source.seconds(1)
        node = self.passes.at(rows + 1) - plain
        return min(0.5, SLACK * (level + rows * node) / plain)

    def _source(self, name: str) -> Source:
        source = self.sources.get(name)
        if source is None:
            source = self.sources[name] = Source(name)
            self._looks_left = 0
        return source

    def _saw(self, source: Source, rows: Sequence[Row], given: Sequence[Sequence[Offers]]) -> int:
        """Book what one source took and offered; returns the depth of its offers."""
        own = [offer for of_row in given for offer in of_row if offer.source == source.name]
        paths = [self.merger.path(offer) for offer in own]
        now = self._now.get(source.name, set())
        asked = [row for row in rows if row.id in now]
        source.looks_back = next((offer.looks_back for offer in own if offer.looks_back is not None), source.looks_back)
        source.saw(sum(offer.seconds for offer in own), paths, self._unread(source.name, asked))
        self._read.setdefault(source.name, {}).update((row.id, len(row.tokens)) for row in asked)
        return max(map(len, paths))

    def _judge(
        self,
        source: Source,
        given: tuple[Sequence[Row], Sequence[Sequence[Offers]], Sequence[Limit]],
        drafting: Mapping[str, float],
        all_of_it: tuple[float, float, int],
    ) -> None:
        """Compare this step with the best one without the source; free sources need no judgement."""
        tokens, seconds, depth = all_of_it
        own = drafting.get(source.name)
        if own is None:
            source.judge(False, (0.0, 0.0, 0), (tokens, seconds))
            return
        rows, offers, limits = given
        trees = [
            self._tree(row, [offer for offer in of_row if offer.source != source.name])
            for row, of_row in zip(rows, offers, strict=True)
        ]
        _, fewer, faster = self._best(trees, limits, sum(drafting.values()) - own)
        source.judge(True, (tokens, seconds - own, depth), (fewer, faster))

    def _tree(self, row: Row, offers: Sequence[Offers], keep: bool = False) -> Ranked:
        if not offers:
            return Ranked()
        tree = self.merger.tree(row, offers, keep)
        return best_chain(tree) if self.shape == "chain" else tree

    def _best(
        self, trees: Sequence[Ranked], limits: Sequence[Limit], drafting: float
    ) -> tuple[list[int], float, float]:
        """Nodes per row, the expected tokens and the expected seconds of the step; every n is looked at.

        A batch gets none where the best n promises too little.
        """
        whole = [tree for tree in trees if tree.drawn is not None]
        base = len(trees) + sum(map(len, whole))
        tokens = len(trees) + sum(sum(tree.reach) for tree in whole)
        reaches = [
            tree.reach[: limit.nodes] if tree.drawn is None else [] for tree, limit in zip(trees, limits, strict=True)
        ]
        costs = self.passes.table(base + sum(map(len, reaches)))
        counts, tokens, seconds = spread(reaches, costs, base, tokens, drafting + self._verify.at(1))
        rows = len(trees)
        if rows > 1 and not whole and self._gain(rows, tokens, seconds - drafting) < WORTH:
            return [0] * rows, float(rows), self._plain(rows) + drafting
        counts = [count if tree.drawn is None else len(tree) for tree, count in zip(trees, counts, strict=True)]
        return counts, tokens, seconds
