"""Lookahead decoding: guesses that the model itself improves, and the n-grams that fall off them.

After Fu et al. (2024), "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding". A window of guesses
rides along as nodes of the draft; what the pass predicts after them (Jacobi iteration) makes n-grams, and n-grams that
begin with the last token are drafted. Window nodes are nodes like any other: nothing is emitted unless it is verified.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.core.tree import ANCHOR, Draft
from slipstream.core.types import Limit, Observation, Offers, Row
from slipstream.drafters.base import Drafter
from slipstream.kernels import sampling as kernels

COLUMNS = 5
"""Positions ahead that the window guesses."""
LEVELS = 2
"""Guesses per column that follow each other; with the prediction after them they make n-grams of LEVELS + 1 tokens."""
FROM_POOL = 4
"""N-grams drafted per step."""
PER_TOKEN = 8
"""N-grams kept per first token, the latest ones."""
POOL = 4096
"""First tokens kept per row, the latest ones."""
POOL_CHANCES = (0.45, 0.25, 0.15, 0.1)
"""Prior chance by rank among the n-grams that fit, the latest first; later tokens of one are a little more certain."""
LATER_CHANCE = 0.6
WINDOW_CHANCE = 0.05
"""Prior chance of a window node: it is there for what the model says after it."""


@dataclass(slots=True)
class _State:
    """levels[k][i] guesses the token i + k + 1 places after the anchor. pool: continuations by first token."""

    levels: list[list[int]]
    pool: OrderedDict[int, list[tuple[int, ...]]] = field(default_factory=OrderedDict)
    pooled: int = 0
    """Tokens of the text whose n-grams are in the pool."""


class Lookahead(Drafter):
    """One window and one pool per row. Half of the nodes go to the window, the rest to n-grams from the pool."""

    name = "lookahead"

    def __init__(self) -> None:
        self._rows: dict[int, _State] = {}

    def begin(self, row: Row) -> None:
        """A row joins; its window starts with tokens of its own text."""
        levels = [[_filler(row.tokens, level, column) for column in range(COLUMNS)] for level in range(LEVELS)]
        self._rows[row.id] = state = _State(levels)
        _pool_text(state, row.tokens)

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[Offers]:
        """One tree per row: n-grams that begin with the anchor, and the window."""
        return [self._tree(row, limit) for row, limit in zip(rows, limits, strict=True)]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Move every window on by the emitted tokens, with what the model said after the nodes that were verified."""
        for seen in observations:
            state = self._rows.get(seen.row.id)
            if state is not None:
                self._advance(state, seen)
                _pool_text(state, seen.row.tokens)

    def end(self, row: Row) -> None:
        """The row leaves."""
        self._rows.pop(row.id, None)

    def _tree(self, row: Row, limit: Limit) -> Offers:
        state, tree = self._rows[row.id], _Trie(Offers(self.name), limit)
        window = limit.nodes // 2 if limit.nodes > 1 else 0
        for rank, gram in enumerate(state.pool.get(row.tokens[-1], ())[:FROM_POOL]):
            chances = [POOL_CHANCES[rank], *(LATER_CHANCE for _ in gram[1:])]
            tree.add(gram, chances, limit.nodes - window)
        for column in range(COLUMNS):
            path = _path(state, column)
            tree.add(path, [WINDOW_CHANCE] * len(path), limit.nodes)
        return tree.offers

    def _advance(self, state: _State, seen: Observation) -> None:
        """One Jacobi iteration: level k becomes level k - 1, which is one place further on; predictions are the last.

        A column whose nodes were not all verified keeps its last guess.
        """
        predicted: list[int] = []
        for column in range(COLUMNS):
            path = _path(state, column)
            node = _find(seen.draft, path)
            token = -1 if node is None else kernels.argmax(seen.logits[node + 1])
            if token >= 0:
                gram = [levels[column] for levels in state.levels]
                _remember(state, gram[0], (*gram[1:], token))
            predicted.append(token if token >= 0 else state.levels[-1][column])
        state.levels = [*state.levels[1:], predicted]
        gone = len(seen.verdict.tokens) - 1
        for level, guesses in enumerate(state.levels):
            del guesses[:gone]
            while len(guesses) < COLUMNS:
                guesses.append(_filler(seen.row.tokens, level, len(guesses)))


class _Trie:
    """Offers under construction: paths share their beginnings, siblings are distinct, limits hold."""

    def __init__(self, offers: Offers, limit: Limit) -> None:
        self.offers, self._limit = offers, limit
        self._at: dict[tuple[int, int], int] = {}
        self._children: dict[int, int] = {}

    def add(self, path: Sequence[int], chances: Sequence[float], most: int) -> None:
        """Add a path from the anchor, as far as it fits and the tree has fewer than `most` nodes."""
        parent, offers = ANCHOR, self.offers
        for token, chance in zip(path[: self._limit.depth], chances, strict=False):
            node = self._at.get((parent, token))
            if node is None:
                if len(offers) >= most or self._children.get(parent, 0) >= max(1, self._limit.width):
                    return
                node = self._at[parent, token] = len(offers)
                self._children[parent] = self._children.get(parent, 0) + 1
                offers.tokens.append(token)
                offers.parents.append(parent)
                offers.probs.append(chance)
            parent = node


def _path(state: _State, column: int) -> list[int]:
    """Tokens from the anchor down to the last level of a column: the first level up to it, then its own levels."""
    return [*state.levels[0][: column + 1], *(level[column] for level in state.levels[1:])]


def _find(draft: Draft, path: Sequence[int]) -> int | None:
    """The node at the end of a path of tokens; None when it was not verified."""
    children = {
        (parent, token): node for node, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True))
    }
    node = ANCHOR
    for token in path:
        below = children.get((node, token))
        if below is None:
            return None
        node = below
    return node


def _filler(tokens: Sequence[int], level: int, column: int) -> int:
    """A first guess where there is none: some token of the text, a different one for each place."""
    return tokens[-1 - (level * COLUMNS + column) * 7 % len(tokens)]


def _pool_text(state: _State, tokens: Sequence[int]) -> None:
    """The n-grams of the text itself, as far as they are new."""
    for start in range(max(0, state.pooled - LEVELS), len(tokens) - LEVELS):
        _remember(state, tokens[start], tuple(tokens[start + 1 : start + 1 + LEVELS]))
    state.pooled = len(tokens)


def _remember(state: _State, first: int, rest: tuple[int, ...]) -> None:
    grams = state.pool.setdefault(first, [])
    if rest in grams:
        grams.remove(rest)
    grams.insert(0, rest)
    del grams[PER_TOKEN:]
    state.pool.move_to_end(first)
    if len(state.pool) > POOL:
        state.pool.popitem(last=False)
