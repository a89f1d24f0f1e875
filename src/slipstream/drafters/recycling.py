"""Token recycling: drafts from what the model itself found likely when it last came by.

After Luo et al. (2024), "Turning Trash into Treasure". The logits of every verified row, of rejected nodes too, refresh
a table of successors; the draft is the tree of most probable paths through it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from slipstream.core.tree import ANCHOR
from slipstream.core.types import Limit, Observation, Offers, Row
from slipstream.drafters.successors import KEPT, NO_TOKEN, Successors
from slipstream.kernels import sampling as kernels

WIDTH = 4
"""Most children of a node, within the limit's width."""
MOST_DEPTH = 8
LEAST = 0.03
"""Paths less probable than this are not offered."""
MOST_CERTAIN = 0.98


class Recycling:
    """One table for all rows and requests: what one answer showed may help the next. It never changes tokens.

    saved: file the table is read from, when it exists, and written to by `close`. model: fingerprint of the vocabulary.
    Raises InputError when the file is not such a table.
    """

    name = "recycling"

    def __init__(self, vocab_size: int, saved: Path | None = None, model: str = "") -> None:
        self.table = Successors(vocab_size)
        self._saved, self._model = saved, model
        if saved is not None and saved.exists():
            self.table.load(saved, model)

    def begin(self, row: Row) -> None:
        """A row joins; its text shows which token follows which."""
        self.table.read(row.tokens)

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[Offers]:
        """One tree per row, nodes by falling probability of their path."""
        return [self._tree(row.tokens, limit) for row, limit in zip(rows, limits, strict=True)]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Refresh the successors of every verified token."""
        for seen in observations:
            count = len(seen.row.tokens) - len(seen.verdict.tokens)
            if count < 1:
                continue
            text, draft = seen.row.tokens, seen.draft
            anchor = text[count - 1]
            tokens = [anchor, *draft.tokens]
            before = [text[count - 2] if count > 1 else NO_TOKEN]
            before += [tokens[parent + 1] for parent in draft.parents]
            ids, logits = kernels.top(seen.logits, KEPT)
            good = (ids[:, 0] >= 0) & (logits[:, 0] < np.inf)
            ids, logits = ids[good], logits[good]
            weights = np.exp(logits - logits[:, :1])
            weights /= weights.sum(1, keepdims=True)
            # The rows of the emitted tokens come last: of equal contexts in one call the last counts.
            kept = {ANCHOR, *seen.verdict.path}
            nodes = np.flatnonzero(good)
            order = sorted(range(len(nodes)), key=lambda place: int(nodes[place]) - 1 in kept)
            if order:
                of_node = nodes[order]
                self.table.learn(np.array(before)[of_node], np.array(tokens)[of_node], ids[order], weights[order])

    def end(self, row: Row) -> None:
        """The row leaves; what it showed stays."""

    def close(self) -> None:
        """Save the table where it shall be kept. Raises InputError when it cannot be written."""
        if self._saved is not None:
            self.table.save(self._saved, self._model)

    def _tree(self, tokens: Sequence[int], limit: Limit) -> Offers:
        offers = Offers(self.name)
        width, deepest = min(limit.width, WIDTH), min(limit.depth, MOST_DEPTH)
        waiting: list[tuple[float, int, float, int, int, int, int]] = []
        order = 0
        before, token = (tokens[-2] if len(tokens) > 1 else NO_TOKEN), tokens[-1]
        parent, depth, reach = ANCHOR, 0, 1.0
        while len(offers) < limit.nodes:
            if depth < deepest:
                for follower, weight in self.table.after(before, token)[:width]:
                    chance = min(weight, MOST_CERTAIN)
                    if reach * chance < LEAST:
                        break
                    order += 1
                    heapq.heappush(waiting, (-reach * chance, order, chance, token, follower, parent, depth + 1))
            if not waiting:
                break
            negative, _, chance, before, token, parent, depth = heapq.heappop(waiting)
            offers.tokens.append(token)
            offers.parents.append(parent)
            offers.probs.append(chance)
            parent, reach = len(offers) - 1, -negative
        return offers
