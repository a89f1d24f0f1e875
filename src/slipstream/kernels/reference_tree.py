"""Offers of several drafters as one ranked tree, with chances learned online: the readable twin of csrc/tree.cpp.

A source's belief is corrected by what verification showed, coarse to fine: the source as a whole, tenths of its belief,
tenths and depth; each finer estimate starts from the coarser one. What several sources together mean is learned by a
logistic mix: the log-odds of the sources that offer a node, a bias for who offers it and who else was asked, and, when
the token is drawn, the position's own noise, which is known beforehand (Mahoney's mixing of predictions, 2005; the step
is diagonal Newton descent).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from slipstream.kernels import reference_sampling as sampling

ANCHOR = -1
BINS = 10
"""Beliefs are told apart in tenths."""
DEPTH_EDGES = (1, 2, 4, 8)
"""Depths 1, 2, 3-4, 5-8 and beyond are told apart."""
WEIGHT = 4.0
"""Observations that the coarser estimate counts for against a finer one."""
FORGET = 0.97
"""Weight left of old observations with each new one of the same kind: about the last thirty count."""
LEAST, MOST = 0.002, 0.99
MOST_CERTAIN = 0.995
"""Siblings exclude each other; beyond this sum their chances become shares."""
TOGETHER, MISS, NOISE = 0.7, -0.9, 0.7
"""First weights: of each of several sources, of every source that was asked and did not offer a node, of noise."""
NOISE_CENTRE = 0.6
"""About the mean of the noise, which leaves chances as they are."""
WEIGHT_PRECISION, BIAS_PRECISION, MOST_PRECISION = 8.0, 4.0, 150.0
"""Observations that first values count for, and the most that all earlier ones do."""
NOISE_WEIGHT, BIAS, DEEP, SAMPLED = 1 << 32, 1 << 63, 1 << 62, 1 << 61
MOST_SOURCES = 28
"""Sources told apart in a pattern, two bits each: 3 offers the node, 2 offers others there, 1 offers nothing there."""

Offer = tuple[int, Sequence[int], Sequence[int], Sequence[float]]
"""Source (a number), tokens, parents (-1 at the top), beliefs."""
Ranking = tuple[list[int], list[int], list[int], list[float], list[float]]
"""Tokens, parents, sources, chances given the parent, and chances of the whole path: never rising."""


@dataclass(slots=True)
class _Tally:
    """Decayed sums: observations, hits, and what was believed beforehand."""

    seen: float = 0.0
    hits: float = 0.0
    believed: float = 0.0

    def add(self, hit: bool, belief: float) -> None:
        self.seen = self.seen * FORGET + 1.0
        self.hits = self.hits * FORGET + hit
        self.believed = self.believed * FORGET + belief


class _Source:
    def __init__(self) -> None:
        self.whole = _Tally()
        self.bins = [_Tally() for _ in range(BINS + 1)]
        self.cells = [[_Tally() for _ in range(len(DEPTH_EDGES) + 1)] for _ in range(BINS + 1)]


@dataclass(slots=True)
class _Node:
    token: int
    parent: int
    depth: int
    source: int
    best: float = 0.0
    chance: float = 0.0
    misses: int = 0
    pattern: int = 0
    inputs: list[tuple[int, float]] = field(default_factory=list)
    """Name of the weight, value."""


class Ranker:
    """What is known of sources, by number, and the trees that wait for the outcome of their step, by row."""

    def __init__(self) -> None:
        self._sources: dict[int, _Source] = {}
        self._weights: dict[int, tuple[float, float]] = {}
        self._kept: dict[int, tuple[Sequence[Offer], list[_Node]]] = {}

    def chance(self, source: int, belief: float, depth: int) -> float:
        """Chance of a node of one source alone, given that its parent stands."""
        known = self._sources.get(source)
        if known is None:
            return min(max(belief, LEAST), MOST)
        whole, bin_ = known.whole, int(belief * BINS)
        expected = min(belief * (whole.hits + WEIGHT) / (whole.believed + WEIGHT), MOST)
        for tally in (known.bins[bin_], known.cells[bin_][bisect_left(DEPTH_EDGES, depth)]):
            expected = (tally.hits + WEIGHT * expected) / (tally.seen + WEIGHT)
        return min(max(expected, LEAST), MOST)

    def rank(self, row: int, offers: Sequence[Offer], keys: Sequence[int], scale: float, keep: bool) -> Ranking:
        """All offers as one tree, best paths first; every beginning of it is itself a tree.

        keys: of the noise of the next positions, none when greedy; scale: what one unit of it weighs in logits.
        keep: remember the tree for `learn`.
        """
        nodes = self._unite(offers)
        totals: dict[int, float] = {}
        odds: dict[int, float] = {}
        for node in nodes:
            if node.depth <= len(keys):
                noise = float(sampling.gumbel(keys[node.depth - 1], np.array([node.token], np.int64))[0])
                node.inputs.append((NOISE_WEIGHT, scale * (noise - NOISE_CENTRE)))
                node.pattern |= SAMPLED
            node.chance = min(max(self._mix(node), LEAST), MOST)
            totals[node.parent] = totals.get(node.parent, 0.0) + node.chance
        # A sure one of several hardly suffers from doubtful rivals, as it would if all were scaled alike.
        for node in nodes:
            odds[node.parent] = odds.get(node.parent, 1.0) + node.chance / (1.0 - node.chance)
        reach: list[float] = []
        for node in nodes:
            if totals[node.parent] > MOST_CERTAIN:
                node.chance = node.chance / (1.0 - node.chance) / odds[node.parent]
            reach.append(node.chance * (reach[node.parent] if node.parent != ANCHOR else 1.0))
        order = sorted(range(len(nodes)), key=lambda index: -reach[index])
        place = {ANCHOR: ANCHOR} | {index: rank for rank, index in enumerate(order)}
        if keep:
            self._kept[row] = (offers, nodes)
        best = [nodes[index] for index in order]
        return (
            [node.token for node in best],
            [place[node.parent] for node in best],
            [node.source for node in best],
            [node.chance for node in best],
            [reach[index] for index in order],
        )

    def learn(self, row: int, emitted: Sequence[int]) -> list[tuple[int, float]]:
        """Compare what was kept for a row with the tokens emitted, whether nodes were verified or not.

        The emitted tokens decide every node whose parent lies on their path: so even plain decoding tells at no cost
        which first-level nodes would have been accepted, and a source that stopped paying is seen to come back.
        Returns by source how surprising a right first token was: 1 up to an estimate of .5, falling to 0 at certainty.
        """
        offers, nodes = self._kept.pop(row, ((), []))
        for index, _, hit in decided([node.token for node in nodes], [node.parent for node in nodes], emitted):
            self._teach(nodes[index], hit)
        surprises = []
        for source, tokens, parents, beliefs in offers:
            surprise = 0.0
            for index, depth, hit in decided(tokens, parents, emitted):
                if hit and depth == 1:
                    surprise = min(1.0, 2.0 - 2.0 * self.chance(source, beliefs[index], 1))
                self._observe(source, beliefs[index], depth, hit)
            surprises.append((source, surprise))
        return surprises

    def forget(self, row: int) -> None:
        """Drop what was kept for a row."""
        self._kept.pop(row, None)

    def _observe(self, source: int, belief: float, depth: int, hit: bool) -> None:
        known, bin_ = self._sources.setdefault(source, _Source()), int(belief * BINS)
        for tally in (known.whole, known.bins[bin_], known.cells[bin_][bisect_left(DEPTH_EDGES, depth)]):
            tally.add(hit, belief)

    def _unite(self, offers: Sequence[Offer]) -> list[_Node]:
        """The same token below the same path is one node; its inputs are the chances that sources gave it."""
        nodes: list[_Node] = []
        known: dict[tuple[int, int], int] = {}
        speaks: list[set[int]] = []
        for source, tokens, parents, beliefs in offers:
            place: list[int] = []
            speaks.append(set())
            for token, parent, belief in zip(tokens, parents, beliefs, strict=True):
                above = ANCHOR if parent == ANCHOR else place[parent]
                depth = 1 if above == ANCHOR else nodes[above].depth + 1
                if (above, token) not in known:
                    known[above, token] = len(nodes)
                    nodes.append(_Node(token, above, depth, source))
                node, alone = nodes[known[above, token]], self.chance(source, belief, depth)
                if alone > node.best:
                    node.best, node.source = alone, source
                node.inputs.append((source * 2, _stretch(alone)))
                place.append(known[above, token])
                speaks[-1].add(above)
        for node in nodes:
            node.pattern = BIAS | (DEEP if node.depth > 1 else 0)
            offering = {name // 2 for name, _ in node.inputs}
            for (source, *_), spoken in zip(offers, speaks, strict=True):
                node.misses += source not in offering
                says = 3 if source in offering else 2 if node.parent in spoken else 1
                node.pattern |= says << (2 * (source % MOST_SOURCES))
            if len(node.inputs) > 1:
                node.inputs = [(name + 1, value) for name, value in node.inputs]
        return nodes

    def _weights_of(self, node: _Node) -> Iterator[tuple[int, float, tuple[float, float]]]:
        """(name, input, (value, precision)) of all that is summed for a node; the bias comes last.

        Each is looked up when its turn comes: a source may have offered a node twice.
        """
        for name, value in [*node.inputs, (node.pattern, 1.0)]:
            if name == node.pattern:
                first = (MISS * node.misses, BIAS_PRECISION)
            elif name == NOISE_WEIGHT:
                first = (NOISE, WEIGHT_PRECISION)
            else:
                first = (TOGETHER if name % 2 else 1.0, WEIGHT_PRECISION)
            yield name, value, self._weights.get(name, first)

    def _mix(self, node: _Node) -> float:
        total = 0.0
        for _, value, (weight, _) in self._weights_of(node):
            total += weight * value
        return _squash(total)

    def _teach(self, node: _Node, hit: bool) -> None:
        chance = self._mix(node)
        error, curve = hit - chance, chance * (1.0 - chance)
        for name, value, (weight, precision) in self._weights_of(node):
            precision = min(precision + curve * value * value, MOST_PRECISION)
            self._weights[name] = (weight + error * value / precision, precision)


def decided(tokens: Sequence[int], parents: Sequence[int], emitted: Sequence[int]) -> Iterator[tuple[int, int, bool]]:
    """(node, depth, right) of every node whose parent lies on the path of the emitted tokens."""
    standing = {ANCHOR: 0}
    for node, parent in enumerate(parents):
        depth = standing.get(parent)
        if depth is None or depth >= len(emitted):
            continue
        hit = tokens[node] == emitted[depth]
        if hit:
            standing[node] = depth + 1
        yield node, depth + 1, hit


def spread(
    reaches: Sequence[Sequence[float]], costs: Sequence[float], base: int, tokens: float, fixed: float
) -> tuple[list[int], float, float]:
    """Nodes worth verifying of each row's tree, expected tokens and seconds: every number of the best is looked at.

    reaches: of each row's nodes, falling. costs: seconds of a pass by token rows. base, tokens: rows and expected
    tokens without these nodes; fixed: seconds beside the pass.
    """
    nodes = sorted(((reach, row) for row, own in enumerate(reaches) for reach in own), key=lambda node: -node[0])
    best, best_tokens, best_seconds = 0, tokens, costs[base] + fixed
    for count, (reach, _) in enumerate(nodes[: len(costs) - base - 1], 1):
        tokens += reach
        seconds = costs[base + count] + fixed
        if tokens * best_seconds > best_tokens * seconds:
            best, best_tokens, best_seconds = count, tokens, seconds
    counts = [0] * len(reaches)
    for _, row in nodes[:best]:
        counts[row] += 1
    return counts, best_tokens, best_seconds


def _stretch(chance: float) -> float:
    return math.log(chance / (1.0 - chance))


def _squash(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-value))
