"""Token recycling: drafts from what the model itself found likely when it last came by.

After Luo et al. (2024), "Turning Trash into Treasure". The logits of every verified row, of rejected nodes too, refresh
a table of successors; the draft is the tree of most probable paths through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slipstream.core.types import Limit, Observation, Offers, Row
from slipstream.drafters.base import Drafter
from slipstream.drafters.saved_table import load, save
from slipstream.kernels.successors import NO_TOKEN, Successors

WIDTH = 4
"""Most children of a node, within the limit's width."""
MOST_DEPTH = 8
LEAST = 0.03
"""Paths less probable than this, or than the limit's floor, are not offered."""
MOST_CERTAIN = 0.98
DOUBT = 0.6
"""What is rarely said after a token is even rarer elsewhere: chances c are offered as c x (DOUBT + (1 - DOUBT) c)."""


class Recycling(Drafter):
    """One table for all rows and requests: what one answer showed may help the next. It never changes tokens.

    saved: file the table is read from, when it exists, and written to by `close`. model: fingerprint of the vocabulary.
    Raises InputError when the file is not such a table.
    """

    name = "recycling"

    def __init__(self, vocab_size: int, saved: Path | None = None, model: str = "") -> None:
        self._vocab_size, self._saved, self._model = vocab_size, saved, model
        self._asked: set[int] = set()
        self.forget()

    def begin(self, row: Row) -> None:
        """A row joins; its text shows which token follows which."""
        self.table.read(row.tokens)

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[Offers]:
        """One tree per row, nodes by falling probability of their path."""
        self._asked.update(row.id for row in rows)
        return [self._tree(row.tokens, limit) for row, limit in zip(rows, limits, strict=True)]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Refresh the successors of every verified token; those of the emitted ones come last and count most.

        Reading logits takes time, so rows for which nobody asked, because nothing pays there, teach nothing.
        """
        for seen in observations:
            if seen.row.id not in self._asked:
                continue
            text, draft = seen.row.tokens, seen.draft
            count = len(text) - len(seen.verdict.tokens)
            if count < 1:
                continue
            tokens = [text[count - 1], *draft.tokens]
            before = [text[count - 2] if count > 1 else NO_TOKEN]
            before += [tokens[parent + 1] for parent in draft.parents]
            path = seen.verdict.path
            order = [node + 1 for node in range(len(draft)) if node not in path]
            self.table.learn(before, tokens, seen.logits, [*order, 0, *(node + 1 for node in path)])
        self._asked.clear()

    def end(self, row: Row) -> None:
        """The row leaves; what it showed stays."""

    def forget(self) -> None:
        """Start anew, from the saved table where there is one."""
        self.table = Successors(self._vocab_size)
        if self._saved is not None and self._saved.exists():
            load(self.table, self._saved, self._model)

    def close(self) -> None:
        """Save the table where it shall be kept. Raises InputError when it cannot be written."""
        if self._saved is not None:
            save(self.table, self._saved, self._model)

    def _tree(self, tokens: Sequence[int], limit: Limit) -> Offers:
        before = tokens[-2] if len(tokens) > 1 else NO_TOKEN
        room = (limit.nodes, min(limit.depth, MOST_DEPTH), min(limit.width, WIDTH))
        drafted, parents, chances = self.table.tree(before, tokens[-1], room, (max(LEAST, limit.floor), MOST_CERTAIN))
        return Offers(self.name, drafted, parents, [chance * (DOUBT + (1.0 - DOUBT) * chance) for chance in chances])
