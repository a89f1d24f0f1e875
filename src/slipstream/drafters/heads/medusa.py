"""Medusa: independent guesses for each distance, all from one hidden state, joined to a tree by joint probability."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from slipstream.core.tree import ANCHOR
from slipstream.core.types import Limit, Observation, Offers, Row
from slipstream.drafters.heads.base import HeadDrafter
from slipstream.drafters.heads.candidates import Candidates, candidates
from slipstream.drafters.heads.parts import packed
from slipstream.drafters.heads.tree import LEAST
from slipstream.kernels.memory import together
from slipstream.kernels.pack import linear
from slipstream.kernels.packed import Packed

if TYPE_CHECKING:
    from slipstream.drafters.heads.parts import TargetParts
    from slipstream.models.heads.head import Head

Floats = NDArray[np.float32]


@dataclass(slots=True)
class _Seen:
    """The newest feature of a row, before the final norm, and how many tokens the row has when it is of use."""

    feature: Floats
    length: int


class Medusa(HeadDrafter):
    """Drafts by Medusa heads. The target must give the features that leave its last layer."""

    name, looks_back = "medusa", 1

    @together()
    def __init__(self, head: Head, target: TargetParts, vocab_size: int) -> None:
        self.config, self.vocab_size = head.config, vocab_size
        self._norm, self._eps, self._ids = target.final_norm(), np.float32(target.eps), head.ids
        self._blocks: list[list[tuple[Packed, Floats]]] = []
        self._heads: list[Packed] = []
        if head.config.frozen_head:
            self._heads = [target.packed_head(head.ids)] * head.config.medusa_heads
        for number in range(head.config.medusa_heads):
            names = [f"medusa.{number}.{block}.linear." for block in range(head.config.medusa_layers)]
            self._blocks.append(
                [(packed(head.tensors[f"{n}weight"]), head.tensors[f"{n}bias"].float32().reshape(-1)) for n in names]
            )
            if not head.config.frozen_head:
                self._heads.append(packed(head.tensors[f"medusa.{number}.lm_head.weight"]))
        self._rows: dict[int, _Seen] = {}
        self.weights_bytes, self.kv_bytes_per_token = head.nbytes, 0

    def prefilled(self, row: Row, start: int, features: Floats) -> None:
        """Part of a prompt: its last token is what counts."""
        self._rows[row.id] = _Seen(np.array(features[-1], np.float32), start + len(features) + 1)

    def begin(self, row: Row) -> None:
        """A row joins; without features it is drafted for after its first step."""

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[Offers]:
        """One tree per row; empty for rows of which no feature is known."""
        offers = [Offers(self.name) for _ in rows]
        known = [index for index, row in enumerate(rows) if self._current(row) and limits[index].depth > 0]
        if not known:
            return offers
        states = self.normed(np.stack([self._rows[rows[index].id].feature for index in known]))
        depth = min(max(limits[index].depth for index in known), self.config.medusa_heads)
        logits = [self.logits(number, states) for number in range(depth)]
        for place, index in enumerate(known):
            levels = self._levels(rows[index], limits[index], [level[place] for level in logits])
            grow(offers[index], levels, limits[index])
        return offers

    def observe(self, observations: Sequence[Observation]) -> None:
        """The feature that gave the row its newest token is the one the heads read next."""
        for seen in observations:
            if seen.features is not None and seen.verdict.tokens:
                last = [0, *(node + 1 for node in seen.verdict.path)][: len(seen.verdict.tokens)][-1]
                self._rows[seen.row.id] = _Seen(np.array(seen.features[last], np.float32), len(seen.row.tokens))

    def end(self, row: Row) -> None:
        """The row leaves."""
        self._rows.pop(row.id, None)

    def _current(self, row: Row) -> bool:
        seen = self._rows.get(row.id)
        return seen is not None and seen.length == len(row.tokens)

    def normed(self, features: Floats) -> Floats:
        """Hidden states as the heads read them: after the target's final norm."""
        mean = np.mean(features * features, axis=1, keepdims=True, dtype=np.float32)
        return np.asarray(features / np.sqrt(mean + self._eps) * self._norm, np.float32)

    def logits(self, number: int, states: Floats) -> Floats:
        """What one head says: residual blocks x + SiLU(W x + b), then its LM head. states [rows, hidden], normed."""
        for weight, bias in self._blocks[number]:
            x = linear(states, weight, bias=bias)
            with np.errstate(over="ignore"):
                states = np.asarray(states + x / (np.float32(1) + np.exp(-x)), np.float32)
        return linear(states, self._heads[number])

    def _levels(self, row: Row, limit: Limit, logits: Sequence[Floats]) -> list[Candidates]:
        """Candidates by distance, along the most probable path where processors want to know it."""
        levels: list[Candidates] = []
        path: list[int] = []
        for level in logits[: limit.depth]:
            ids = self._ids if len(self._ids) else np.arange(len(level), dtype=np.int32)
            found = candidates(row, path, level, ids, max(limit.width, 1), self.vocab_size)
            if not found[0]:
                break
            levels.append(found)
            path.append(found[0][0])
        return levels


def grow(offers: Offers, levels: Sequence[Candidates], limit: Limit) -> None:
    """The most probable paths through the levels, best first, until the limit's nodes are reached."""
    waiting: list[tuple[float, int, int, int, int]] = []
    order = 0

    def wait(parent: int, depth: int, reach: float) -> None:
        nonlocal order
        for place, chance in enumerate(levels[depth][1]):
            if reach * chance >= max(LEAST, limit.floor) or not offers.tokens:
                heapq.heappush(waiting, (-reach * chance, order, parent, depth, place))
                order += 1

    if levels:
        wait(ANCHOR, 0, 1.0)
    while waiting and len(offers) < limit.nodes:
        reach, _, parent, depth, place = heapq.heappop(waiting)
        tokens, chances, features = levels[depth]
        offers.tokens.append(tokens[place])
        offers.parents.append(parent)
        offers.probs.append(chances[place])
        offers.features.append(features[place])
        if depth + 1 < len(levels):
            wait(len(offers) - 1, depth + 1, -reach)
