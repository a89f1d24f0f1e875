"""EAGLE-1/2 and EAGLE-3: one pass of the head per level of the tree, all rows of a step together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from slipstream.core.tree import ANCHOR
from slipstream.core.types import Limit, Observation, Offers, Row
from slipstream.drafters.heads.base import HeadDrafter
from slipstream.drafters.heads.cache import LOOK_BACK, Memories, Memory
from slipstream.drafters.heads.candidates import candidates
from slipstream.drafters.heads.tree import Growing
from slipstream.drafters.heads.weights import eagle_weights, rope_of
from slipstream.kernels.head import Made, make_eagle_head
from slipstream.kernels.pack import linear
from slipstream.kernels.passes import BLOCK, Pass

if TYPE_CHECKING:
    from slipstream.drafters.heads.parts import TargetParts
    from slipstream.kernels.packed import Packed
    from slipstream.models.heads.head import Head

MOST_DEPTH = 8
"""Deepest tree of a head that does not say how deep it was trained."""
READ_IN_PASS = 8
"""Features up to this many are read in the first pass of a draft; of more, all but the last before it."""
MOST_OWN = 1024
"""Most tokens of a prompt that join the drafted vocabulary of a head with frozen rows."""


@dataclass(slots=True)
class _Row:
    """One row. ids: target ids of all its logits; rows: the LM head of those that its prompt adds to the drafted ones.

    top: the result of the last committed token, for the tokens the row had then.
    """

    ids: NDArray[np.int32]
    rows: Packed | None = None
    top: Made | None = None
    length: int = -1


@dataclass(slots=True)
class _Plan:
    """A tree that grows. states: by node, the head's state that guessed it. aside: rows of expanded nodes."""

    tree: Growing
    memory: Memory
    own: _Row
    states: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    aside: dict[int, int] = field(default_factory=lambda: {ANCHOR: -1})


class Eagle(HeadDrafter):
    """Drafts by a head of the EAGLE family. The target must give the features of the head's layers."""

    name, looks_back = "eagle", LOOK_BACK

    def __init__(self, head: Head, target: TargetParts, vocab_size: int, max_context: int) -> None:
        self.config, self.vocab_size = head.config, vocab_size
        weights = eagle_weights(head, target, compact=True)
        self.memories = Memories(weights.shape.block_floats, max_context)
        self._target, self._ids = target, head.ids
        self._drafted = frozenset(head.ids.tolist()) | target.padding
        self._rope = rope_of(head.config)
        self._head = make_eagle_head(weights, self.memories.pool.data)
        self._head.rope(self._rope.cos, self._rope.sin)
        self._rows: dict[int, _Row] = {}
        self._asked: set[int] = set()
        """Rows asked for in this step."""
        self._begun: list[tuple[_Row, int]] = []
        """Rows whose results are on their way, and the length of each."""
        self.weights_bytes = head.nbytes
        self.kv_bytes_per_token = 4 * weights.shape.block_floats // BLOCK

    def prefilled(self, row: Row, start: int, features: NDArray[np.float32]) -> None:
        """Part of a prompt: its last features wait until the head is asked."""
        self._settle()
        memory = self.memories.get(row.id)
        if memory is None or memory.next != start:
            memory = self.memories.join(row.id, row.tokens, start)
        memory.add(start, features)

    def begin(self, row: Row) -> None:
        """A row joins, with the features of its prompt, with those of others' or with none."""
        self._settle()
        if self.memories.get(row.id) is None:
            self.memories.join(row.id, row.tokens, len(row.tokens) - 1)
        self._rows[row.id] = _Row(*self._own_tokens(row))

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[Offers]:
        """One tree per row; empty for rows of which no feature is known."""
        self._settle()
        self._asked = {row.id for row in rows}
        offers = [Offers(self.name) for _ in rows]
        most = self.config.drafts or MOST_DEPTH
        plans = []
        for row, limit, offer in zip(rows, limits, offers, strict=True):
            memory, own = self.memories.get(row.id), self._rows.get(row.id)
            depth = min(limit.depth, limit.nodes, most)
            if memory is not None and own is not None and depth > 0:
                plans.append(_Plan(Growing(row, limit, depth, offer), memory, own))
        for plan, made in self._top(plans):
            self._add(plan, [ANCHOR], made, 0)
        older: list[int] = []
        while expanding := [(plan, nodes) for plan in plans if (nodes := plan.tree.to_expand())]:
            self._expand(expanding, older)
        for plan in plans:
            plan.tree.done()
        return offers

    def observe(self, observations: Sequence[Observation]) -> None:
        """Features of the committed tokens wait for the next draft; those of the head's own guesses are gone.

        Rows asked for in this step will be in the next one, if they go on: their first level is begun, an idle thread
        goes on with it.
        """
        self._settle()
        for seen in observations:
            memory = self.memories.get(seen.row.id)
            if memory is not None and seen.features is not None and seen.verdict.tokens:
                path, count = seen.verdict.path, len(seen.verdict.tokens)
                kept = seen.features[[0, *(node + 1 for node in path)][:count]] if path else seen.features[:1].copy()
                memory.add(len(seen.row.tokens) - count - 1, kept)
        asked, self._asked = self._asked, set()
        if asked:
            self._begin([seen.row for seen in observations if seen.row.id in asked and not seen.ended])

    def end(self, row: Row) -> None:
        """The row leaves; what was read of it stays for prompts that begin alike."""
        self._settle()
        self._rows.pop(row.id, None)
        self.memories.leave(row.id, keep=True)

    def forget(self) -> None:
        """Drop the texts of earlier rows."""
        self._settle()
        self.memories.forget()

    def _own_tokens(self, row: Row) -> tuple[NDArray[np.int32], Packed | None]:
        """Ids of all logits of a row: the drafted vocabulary, and the tokens of its prompt when rows can be had."""
        if not self.config.frozen_head or self.config.draft_vocab >= self.vocab_size:
            return self._ids, None
        own = sorted(set(row.tokens[-MOST_OWN:]) - self._drafted)
        if not own:
            return self._ids, None
        ids = np.asarray(own, np.int32)
        return np.concatenate([self._ids, ids]), self._target.packed_head(ids, compact=True)

    def _top(self, plans: Sequence[_Plan]) -> list[tuple[_Plan, Made]]:
        """What follows the anchor of each row, from the features of the token before it."""
        reading = [(plan.tree.row, plan.memory, plan.own) for plan in plans if _complete(plan.tree.row, plan.memory)]
        for _, memory, _ in reading:
            if memory.unread > READ_IN_PASS:
                self._pass([(memory, memory.unread - 1)], last=False)
        if reading:
            made = self._pass([(memory, memory.unread) for _, memory, _ in reading], last=True)
            _keep(made, [(own, len(row.tokens)) for row, _, own in reading])
        known = [plan for plan in plans if plan.own.length == len(plan.tree.row.tokens)]
        return [(plan, plan.own.top) for plan in known if plan.own.top is not None]

    def _begin(self, rows: Sequence[Row]) -> None:
        """Begin the first level of rows that have little to read."""
        parts, begun = [], []
        for row in rows:
            memory, own = self.memories.get(row.id), self._rows.get(row.id)
            if memory is not None and own is not None and _complete(row, memory) and memory.unread <= READ_IN_PASS:
                parts.append((memory, memory.unread))
                begun.append((own, len(row.tokens)))
        if parts:
            self._head.start(*self._reading(parts))
            self._begun = begun  # what did not start has no results to wait for

    def _settle(self) -> None:
        """Keep the results of what was begun; until then nothing may touch the head or its cache."""
        if self._begun:
            begun, self._begun = self._begun, []
            _keep(self._head.finish(), begun)

    def _pass(self, parts: Sequence[tuple[Memory, int]], last: bool) -> Made:
        """Read so many waiting features of each text into its cache; results of the last one of each, if asked for."""
        rows, features, wanted = self._reading(parts)
        return self._head.forward(rows, features, True, True, wanted if last else wanted[:0])

    def _reading(self, parts: Sequence[tuple[Memory, int]]) -> tuple[Pass, NDArray[np.float32], NDArray[np.int32]]:
        """A pass that reads so many waiting features of each text: rows, features, the last row of each."""
        slots = self.memories.slots
        tokens: list[int] = []
        given, parents, first = [], [], [0]
        prefix = [len(memory.places) for memory, _ in parts]
        self._reach(max(before + count for before, (_, count) in zip(prefix, parts, strict=True)))
        for memory, count in parts:
            slots.reserve(memory.slot, len(memory.places) + count)
            features, following = memory.take(count)
            given.append(features)
            parents += [-1, *range(len(tokens), len(tokens) + count - 1)]
            tokens += following
            first.append(len(tokens))
            slots.grow(memory.slot, count)
        rows = self._rows_of(tokens, parents, first, prefix, [memory.slot for memory, _ in parts])
        return rows, given[0] if len(given) == 1 else np.concatenate(given), rows.first[1:] - 1

    def _expand(self, expanding: Sequence[tuple[_Plan, list[int]]], older: list[int]) -> None:
        """One level: the children of these nodes. older: parents of all rows kept aside so far, which it extends."""
        tokens: list[int] = []
        parents, first, given = [], [0], []
        before = len(older)
        end = 0
        for plan, nodes in expanding:
            end = max(end, len(plan.memory.places) + plan.tree.depths[nodes[0]])
            for node in nodes:
                parents.append(plan.aside[plan.tree.offers.parents[node]])
                plan.aside[node] = before + len(tokens)
                tokens.append(plan.tree.offers.tokens[node])
                given.append(plan.states[node])
            first.append(len(tokens))
        older += parents
        prefix = [len(plan.memory.places) for plan, _ in expanding]
        rows = self._rows_of(tokens, older, first, prefix, [plan.memory.slot for plan, _ in expanding])
        states = np.empty((len(given), self.config.hidden), np.float32)
        for place, state in enumerate(given):
            states[place] = state
        self._reach(end)
        made = self._head.forward(rows, states, False, False, np.arange(len(tokens), dtype=np.int32))
        for index, (plan, nodes) in enumerate(expanding):
            plan.tree.level = []
            self._add(plan, nodes, made, first[index])

    def _reach(self, end: int) -> None:
        """Have rotary tables for the positions before `end`."""
        if self._rope.ensure(end):
            self._head.rope(self._rope.cos, self._rope.sin)

    def _add(self, plan: _Plan, nodes: Sequence[int], made: Made, first: int) -> None:
        """Children of the nodes of a level, from what the head said after them: rows of `made` from `first` on."""
        tree, own = plan.tree, plan.own
        width = max(tree.limit.width, 1)
        logits = made.logits[first : first + len(nodes)]
        if own.rows is not None:
            logits = np.concatenate([logits, linear(made.normed[first : first + len(nodes)], own.rows)], axis=1)
        for index, node in enumerate(nodes):
            found = candidates(tree.row, tree.path(node), logits[index], own.ids, width, self.vocab_size)
            children = tree.add(node, found)
            plan.states.update(dict.fromkeys(children, made.hidden[first + index]))
            tree.level += children

    def _rows_of(
        self, tokens: Sequence[int], parents: Sequence[int], first: Sequence[int], prefix: Sequence[int], of: list[int]
    ) -> Pass:
        """The rows of a pass; of: the slot of each text."""
        tables = self.memories.slots.tables
        return Pass(
            tokens=np.asarray(tokens, np.int32),
            parents=np.asarray(parents, np.int32),
            first=np.asarray(first, np.int32),
            prefix=np.asarray(prefix, np.int32),
            tables=tables[of[0] : of[0] + 1] if len(of) == 1 else tables[of],
        )


def _complete(row: Row, memory: Memory) -> bool:
    """Whether features wait, and they are all that come before the row's anchor."""
    return memory.unread > 0 and memory.next == len(row.tokens) - 1


def _keep(made: Made, rows: Sequence[tuple[_Row, int]]) -> None:
    """Give each row its own result, for the text of this length."""
    for index, (own, length) in enumerate(rows):
        at = slice(index, index + 1)
        own.top, own.length = Made(made.hidden[at], made.normed[at], made.logits[at]), length
