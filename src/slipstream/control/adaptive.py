"""The controller that drafts only what pays: calibrated chances against measured costs, 0 nodes included.

The most expected tokens per second, E(n) / T(n), with E(n) = rows + the summed probabilities of the n best paths and
T(n) = measured pass over rows + n token rows + drafting + verification. Speed depends on the clock; tokens never do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slipstream.control.asking import SLACK, START_DEPTH, Source
from slipstream.control.base import StepCost
from slipstream.control.calibrate import Calibrator, decided
from slipstream.control.cost import CostCurve
from slipstream.control.fixed import TREE_WIDTH, check_shape
from slipstream.control.merge import Ranked, best_chain, merge
from slipstream.core.tree import ANCHOR, Draft
from slipstream.core.types import Limit, Observation, Offers, Row

PASS_SLOPE = 0.03
"""Assumed cost of one more token row in a pass, in passes, until it is measured."""
AGREEMENT_WEIGHT = 12.0
"""As the calibrator's weight, for what agreement means: its kinds of nodes are more, and seen less often."""
BOOK_FREE_EVERY = 8
"""A source too cheap to be judged is timed only this often: booking it costs as much as asking it."""
QUIET_AFTER = 100
QUIET_EVERY = 4
"""After so many answers in a row of which nothing was worth verifying, cheap drafters are asked every so many steps."""
HOPE = 1.5
"""Chances may turn out so much better where only one source speaks; below that nothing is looked at closely."""
VERIFY_CHANGE = 0.25
"""Relative change of the time of verification that is taken up: it is short, and noisier than passes."""
REMEASURE = 128
"""A step at least this often is plain, because everything is judged against its cost."""


class Adaptive:
    """Chooses per step how many nodes of which rows are verified, and which drafters are asked at all.

    max_nodes: most nodes per row. shape, width: as in Fixed. pass_costs: seconds of a pass by token rows, when known
    from an earlier measurement. What is learned about costs and sources serves all rows.
    """

    def __init__(
        self,
        max_nodes: int = 16,
        shape: str = "tree",
        width: int = TREE_WIDTH,
        pass_costs: Mapping[int, float] | None = None,
    ):
        check_shape(max_nodes, shape)
        self.max_nodes, self.shape = max_nodes, shape
        self.width = width if shape == "tree" else 1
        self.passes = CostCurve(PASS_SLOPE, pass_costs)
        self.calibrator, self.agreement = Calibrator(), Calibrator(AGREEMENT_WEIGHT)
        self.sources: dict[str, Source] = {}
        self._verify = CostCurve(slope=0.0, change=VERIFY_CHANGE)
        self._asked: dict[str, int] = {}
        self._offers: dict[int, Sequence[Offers]] = {}
        self._trees: dict[int, Ranked] = {}
        self._since_plain = 0
        self._in_vain = 0
        # Rows for which each source was asked, in the step before and in this one.
        self._before: dict[str, set[int]] = {}
        self._now: dict[str, set[int]] = {}

    def start_from(self, pass_costs: Mapping[int, float]) -> None:
        """Begin with these seconds of a pass by token rows, until they are measured in steps."""
        self.passes = CostCurve(PASS_SLOPE, pass_costs)

    def limits(self, rows: Sequence[Row]) -> list[Limit]:
        """Full room for drafters whose time is worth it, none for the others."""
        self._offers, self._trees, self._asked = {}, {}, {}
        self._before, self._now = self._now, {}
        count = sum(row.speculate for row in rows)
        none = [Limit(0, 0) for _ in rows]
        self._since_plain += 1
        # All else is judged against plain decoding, so its cost comes first.
        unmeasured = self._since_plain > REMEASURE or not self.passes.measured(len(rows))
        if not count or not self.max_nodes or unmeasured:
            return none
        depths = {
            name: source.depth_to_ask(self.max_nodes, len(rows), self.passes) for name, source in self.sources.items()
        }
        self._asked = depths
        if depths and (not any(depths.values()) or self._rests()):
            self._asked = {}
            return none
        depth = self.max_nodes if self.sources else min(self.max_nodes, START_DEPTH)
        limit = Limit(self.max_nodes, depth, self.width, depths, self._floor(len(rows)))
        return [limit if row.speculate else none[index] for index, row in enumerate(rows)]

    def _rests(self) -> bool:
        """Whether cheap drafters, which are asked without judgement, have nothing worth their small time lately."""
        if self._in_vain < QUIET_AFTER or not all(source.free for source in self.sources.values()):
            return False
        self._in_vain += 1
        return self._in_vain % QUIET_EVERY != 0

    def choose(self, rows: Sequence[Row], offers: Sequence[Sequence[Offers]], limits: Sequence[Limit]) -> list[Draft]:
        """The n best nodes over all rows, n by the largest E(n) / T(n)."""
        self._offers = {row.id: of_row for row, of_row in zip(rows, offers, strict=True)}
        names = dict.fromkeys(offer.source for of_row in offers for offer in of_row)
        for name in names:
            self.sources.setdefault(name, Source(name))
        asked = [name for name in names if self._asked.get(name, 1) and any(limit.nodes for limit in limits)]
        chances = [[self.calibrator.chances(offer) for offer in of_row] for of_row in offers]
        for name in asked:
            self._now[name] = {row.id for row, limit in zip(rows, limits, strict=True) if limit.nodes}
        depths = {name: self._saw(name, offers, chances, limits) for name in asked if self._book(name)}
        if self._hopeless(offers, chances):
            self._in_vain += 1
            return [Draft() for _ in rows]
        best_first = sorted(asked, key=self.calibrator.loss)
        trees = [self._tree(*_of(best_first, *pair)) for pair in zip(offers, chances, strict=True)]
        self._trees = {row.id: tree for row, tree in zip(rows, trees, strict=True)}
        drafting = {name: self.sources[name].seconds(depths.get(name, 1)) for name in asked}
        counts, tokens, seconds = self._best(trees, limits, sum(drafting.values()))
        self._in_vain = 0 if any(counts) else self._in_vain + 1
        for name in names:
            if self.sources[name].free:
                continue
            self._judge(name, (offers, chances, limits), drafting, (tokens, seconds, depths.get(name, 0)))
        drafts = [tree.draft(count) for tree, count in zip(trees, counts, strict=True)]
        plain = self.passes.at(len(rows)) + self._verify.at(1)
        if plain > 0 and seconds > 0:
            gain = tokens / len(rows) * plain / seconds
            for draft in drafts:
                draft.gain = gain
        return drafts

    def _hopeless(self, offers: Sequence[Sequence[Offers]], chances: Sequence[Sequence[Sequence[float]]]) -> bool:
        """Whether no node can be worth its row in the pass, so that nothing needs merging: with chances up to c,

        (rows + n c) / T(rows + n) stays below rows / T(rows) for every n. Sources that are judged need the full look.
        """
        if any(offer.drawn for offer in offers[0]) or not all(source.free for source in self.sources.values()):
            return False
        rows = len(offers)
        best = max((chance for of_row in chances for found in of_row for chance in found), default=0.0)
        costs = self.passes.table(rows + self.max_nodes * rows)
        plain = costs[rows] + self._verify.at(1)
        rise = min((costs[rows + n] - costs[rows]) / n for n in range(1, self.max_nodes * rows + 1))
        return plain > 0 and HOPE * best * plain < rows * rise

    def observe(self, observations: Sequence[Observation], cost: StepCost) -> None:
        """Learn the costs of this step and which offers were right."""
        self.passes.observe(cost.rows, cost.pass_s)
        self._verify.observe(1, cost.verify_s)
        if cost.rows == len(observations):
            self._since_plain = 0
        for name, source in self.sources.items():
            if not self._asked.get(name):
                source.pass_time(cost.pass_s)
        for seen in observations:
            offers = self._offers.pop(seen.row.id, ())
            tree = self._trees.pop(seen.row.id, None)
            if tree is not None and not tree.whole and len(self._now) > 1:
                for node, depth, hit in decided(tree.tokens, tree.parents, seen.verdict.tokens):
                    if tree.labels[node]:
                        self.agreement.observe(tree.labels[node], tree.beliefs[node], depth, hit)
            self.calibrator.compare(offers, seen.verdict.tokens)
            for offer in offers:
                surprise = self.calibrator.learn(offer, seen.verdict.tokens)
                self.sources[offer.source].refund(surprise)

    def end(self, row: Row) -> None:
        """The row leaves."""
        self._offers.pop(row.id, None)
        self._trees.pop(row.id, None)

    def gains(self) -> dict[str, float]:
        """Speed with each source over speed without it; sources too cheap to be judged are left out."""
        return {name: source.gain() for name, source in self.sources.items() if not source.free}

    def _floor(self, rows: int) -> float:
        """Path probability below which one more level costs more than its token is worth at the present speed."""
        costs = [source.seconds(2) - source.seconds(1) for name, source in self.sources.items() if self._asked[name]]
        plain = self.passes.at(rows)
        if not costs or plain <= 0:
            return 0.0
        node = self.passes.at(rows + 1) - plain
        return min(0.5, SLACK * (max(costs) + rows * node) / plain)

    def _book(self, name: str) -> bool:
        """Whether this answer of a source is looked at closely."""
        source = self.sources[name]
        if not source.free:
            return True
        source.asked += 1
        return source.asked % BOOK_FREE_EVERY == 0

    def _saw(
        self,
        name: str,
        offers: Sequence[Sequence[Offers]],
        chances: Sequence[Sequence[Sequence[float]]],
        limits: Sequence[Limit],
    ) -> int:
        """Book what one source took and offered; returns the depth of its offers."""
        seconds, paths, asked_depth = 0.0, [], 0
        for of_row, beliefs, limit in zip(offers, chances, limits, strict=True):
            for offer, probs in zip(of_row, beliefs, strict=True):
                if offer.source == name and limit.nodes:
                    seconds += offer.seconds
                    paths.append(_best_path(offer, probs))
                    asked_depth = max(asked_depth, limit.of(name).depth)
        depth = max((len(path) for path in paths), default=0)
        mean = [sum(path[d] for path in paths if d < len(path)) / len(paths) for d in range(depth)]
        cold = not self._now[name] <= self._before.get(name, set())
        self.sources[name].saw(seconds, mean, asked_depth, cold)
        return depth

    def _judge(
        self,
        name: str,
        given: tuple[Sequence[Sequence[Offers]], Sequence[Sequence[Sequence[float]]], Sequence[Limit]],
        drafting: Mapping[str, float],
        all_of_it: tuple[float, float, int],
    ) -> None:
        """Compare this step with the best one without the source; free sources need no judgement."""
        source = self.sources[name]
        tokens, seconds, depth = all_of_it
        own = drafting.get(name)
        if own is None:
            source.judge(False, (0.0, 0.0, 0), (tokens, seconds))
            return
        offers, chances, limits = given
        best_first, trees = sorted(drafting, key=self.calibrator.loss), []
        for of_row, beliefs in zip(offers, chances, strict=True):
            others = [other for other in best_first if other != name]
            trees.append(self._tree(*_of(others, of_row, beliefs)) if others else Ranked())
        _, fewer, faster = self._best(trees, limits, sum(drafting.values()) - own)
        source.judge(True, (tokens, seconds - own, depth), (fewer, faster))

    def _tree(self, offers: Sequence[Offers], chances: Sequence[Sequence[float]]) -> Ranked:
        tree = merge(offers, chances, self.agreement.chance)
        return best_chain(tree) if self.shape == "chain" else tree

    def _best(
        self, trees: Sequence[Ranked], limits: Sequence[Limit], drafting: float
    ) -> tuple[list[int], float, float]:
        """Nodes per row, the expected tokens and the expected seconds of the step; every n is looked at."""
        counts = [len(tree) if tree.whole else 0 for tree in trees]
        tokens = len(trees) + sum(sum(tree.reach) for tree in trees if tree.whole)
        nodes = [
            (-reach, index, node)
            for index, (tree, limit) in enumerate(zip(trees, limits, strict=True))
            if not tree.whole
            for node, reach in enumerate(tree.reach[: limit.nodes])
        ]
        nodes.sort()
        base = len(trees) + sum(counts)
        passes = self.passes.table(base + len(nodes))
        fixed = drafting + self._verify.at(1)
        best, best_tokens, best_seconds = 0, tokens, passes[base] + fixed
        for n, (negative, _, _) in enumerate(nodes, 1):
            tokens -= negative
            seconds = passes[base + n] + fixed
            if tokens * best_seconds > best_tokens * seconds:
                best, best_tokens, best_seconds = n, tokens, seconds
        for _, index, _ in nodes[:best]:
            counts[index] += 1
        return counts, best_tokens, best_seconds


def _of(
    names: Sequence[str], offers: Sequence[Offers], chances: Sequence[Sequence[float]]
) -> tuple[list[Offers], list[Sequence[float]]]:
    """The offers of these sources in this order, and their chances."""
    pairs = [pair for name in names for pair in zip(offers, chances, strict=True) if pair[0].source == name]
    return [offer for offer, _ in pairs], [beliefs for _, beliefs in pairs]


def _best_path(offer: Offers, chances: Sequence[float]) -> list[float]:
    """Probability of being accepted by depth, following the most probable child of each node."""
    path: list[float] = []
    node, reach = ANCHOR, 1.0
    best: dict[int, int] = {}
    for index, parent in enumerate(offer.parents):
        if parent not in best or chances[index] > chances[best[parent]]:
            best[parent] = index
    while node in best:
        node = best[node]
        reach *= chances[node]
        path.append(reach)
    return path
