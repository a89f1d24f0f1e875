"""A smaller model of the same vocabulary as drafter: all rows of a step together, one pass per depth.

Its cache is rolled back to the committed tokens after every step. What the cache lacks (the last draft when all were
accepted, or tokens emitted while it was not asked) is read in the first pass of the next draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from slipstream.core.errors import InputError, NonFiniteError
from slipstream.core.tree import ANCHOR, reach_of
from slipstream.core.types import Limit, Observation, Offers, Row
from slipstream.drafters.base import Drafter
from slipstream.kernels import sampling as kernels
from slipstream.targets.base import Target, read_on
from slipstream.targets.slots import SlotPool
from slipstream.verify import rules

MOST_DEPTH = 16
"""Longest chain drafted, whatever the limit."""
KEPT = 4
"""Slots of rows that have left, whose tokens need not be read again."""
READ_IN_PASS = 8
"""Missing tokens up to this many ride along in the first pass; more are prefilled before it."""
RIVALS = 4
"""Scores compared to judge how sure the model is; at least two."""
MOST_CERTAIN = 0.98
UNRIVALLED = 0.9
"""Chance of a token that top_k, top_p or min_p left without a rival in the drafter's distribution."""


def same_noise_chances(scores: Sequence[float], temperature: float) -> list[float]:
    """Chance of each candidate to be the target's choice, from the gaps between the drafter's noisy scores.

    Both models choose by logit / T + G under the same G, so the target disagrees where their logits differ by more
    than the gap. With logistic differences this is the softmax of the scores in units of the logits.
    """
    if len(scores) == 1:
        return [UNRIVALLED]
    scale = temperature if 0.0 < temperature < 1.0 else 1.0
    weights = [float(np.exp(max(scale * (score - scores[0]), -50.0))) for score in scores]
    total = sum(weights)
    return [MOST_CERTAIN * weight / total for weight in weights]


@dataclass(slots=True)
class _State:
    """Cache of one row: `slot` holds the first `committed` tokens of the row, then `ahead` (drafted, unverified)."""

    slot: int
    committed: int = 0
    ahead: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Plan:
    """One row's draft while it grows. `pending` are the tokens its next pass reads; `path` is the chain so far."""

    row: Row
    state: _State
    limit: Limit
    depth: int
    offers: Offers
    pending: list[int]
    path: list[int] = field(default_factory=list)
    tail: int = ANCHOR
    reach: float = 1.0
    widths: list[int] = field(default_factory=list)
    uniforms: Sequence[float] | NDArray[np.float64] = ()


class SmallModel(Drafter):
    """Drafts a chain and, for wider limits, the runners-up beside it as leaves.

    model: any target; its slots belong to this drafter, which keeps those of the last rows for texts that begin alike,
    such as the next turn of a chat. vocab_size: the target's; heads of different padding are cut or filled up with
    probability 0. classical: draw at random from the model's own distribution and report it, as the rejection rules
    need; otherwise propose the best scores under the row's own noise, as `coupled` likes best.
    """

    name = "model"

    def __init__(self, model: Target, vocab_size: int, classical: bool = False):
        self.model, self.vocab_size, self.classical = model, vocab_size, classical
        self._rows: dict[int, _State] = {}
        self._slots = SlotPool(model, KEPT)

    def begin(self, row: Row) -> None:
        """A row joins; its tokens are read when first asked for. Raises InputError when all slots are taken."""
        slot, shared = self._slots.take(row.tokens)
        self._rows[row.id] = _State(slot, shared)

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[Offers]:
        """One tree per row; empty for rows that have outgrown this model's context."""
        offers = [Offers(self.name, drawn=self.classical) for _ in rows]
        plans = []
        for row, limit, offer in zip(rows, limits, offers, strict=True):
            room = self.model.max_context - len(row.tokens)
            depth = min(limit.depth, limit.nodes, MOST_DEPTH, room)
            if row.id in self._rows and depth > 0:
                plans.append(self._plan(row, limit, depth, offer))
        while plans:
            logits = self._pass(plans)
            plans = [plan for plan, given in zip(plans, logits, strict=True) if self._grow(plan, given)]
        for offer, limit in zip(offers, limits, strict=True):
            if not self.classical:
                prune(offer, limit.nodes)
        return offers

    def observe(self, observations: Sequence[Observation]) -> None:
        """Roll back what was not accepted."""
        for seen in observations:
            state = self._rows.get(seen.row.id)
            if state is not None:
                self._roll_back(seen.row, state)

    def end(self, row: Row) -> None:
        """The row leaves; its slot is kept for a while, unless a failure left it in an unknown state."""
        state = self._rows.pop(row.id, None)
        if state is None:
            return
        if self.model.length(state.slot) == state.committed + len(state.ahead):
            self._roll_back(row, state)
            self._slots.park(state.slot)
        else:
            self._slots.drop(state.slot)

    def forget(self) -> None:
        """Give back the slots that were kept."""
        self._slots.forget()

    def _roll_back(self, row: Row, state: _State) -> None:
        """Keep of the drafted cache rows those that became committed tokens; the anchor is not one of them."""
        last = len(row.tokens) - 1
        kept = 0
        while (
            kept < len(state.ahead)
            and state.committed + kept < last
            and state.ahead[kept] == row.tokens[state.committed + kept]
        ):
            kept += 1
        if kept < len(state.ahead):
            self.model.truncate(state.slot, state.committed + kept)
        state.committed += kept
        state.ahead = []

    def _plan(self, row: Row, limit: Limit, depth: int, offers: Offers) -> _Plan:
        state = self._rows[row.id]
        self._roll_back(row, state)
        missing = row.tokens[state.committed :]
        if len(missing) > READ_IN_PASS:
            self.model.prefill(state.slot, missing[:-1])
            state.committed += len(missing) - 1
            missing = missing[-1:]
        plan = _Plan(row, state, limit, depth, offers, missing)
        if self.classical:
            # How many draws a node gets is settled before the first one: it must not depend on what is drawn.
            spare = limit.nodes - depth
            for _ in range(depth):
                more = min(max(limit.width, 1) - 1, spare)
                plan.widths.append(1 + more)
                spare -= more
            plan.uniforms = row.sampler.uniforms("draft", row.step, sum(plan.widths))
        return plan

    def _pass(self, plans: Sequence[_Plan]) -> list[NDArray[np.float32]]:
        """Read each row's pending tokens; returns its logits after the last of them, float32 [vocab_size]."""
        made = read_on(self.model, [plan.state.slot for plan in plans], [plan.pending for plan in plans])
        for plan in plans:
            plan.state.ahead += plan.pending
        return [self._fit(logits) for logits in made]

    def _fit(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """The logits over the target's ids; ids this model's head lacks cannot be drawn."""
        missing = self.vocab_size - len(logits)
        if missing <= 0:
            return logits[: self.vocab_size]
        return np.concatenate((logits, np.full(missing, -np.inf, np.float32)))

    def _grow(self, plan: _Plan, logits: NDArray[np.float32]) -> bool:
        """Add the next level to the draft; True while it should become deeper."""
        try:
            tokens, chances, features = (self._draw if self.classical else self._best)(plan, logits)
        except NonFiniteError:
            if kernels.argmax(logits) < 0:
                raise
            return False  # all tokens are banned below this path, which is nobody's failure
        parent = plan.tail
        plan.tail = len(plan.offers)
        plan.offers.tokens += tokens
        plan.offers.parents += [parent] * len(tokens)
        plan.offers.probs += chances
        plan.offers.features += features
        plan.path.append(tokens[0])
        plan.pending = [tokens[0]]
        plan.reach *= chances[0]
        return len(plan.path) < plan.depth and (self.classical or plan.reach >= plan.limit.floor)

    def _best(self, plan: _Plan, logits: NDArray[np.float32]) -> tuple[list[int], list[float], list[float]]:
        """The model's own choices under the row's noise, the features are gaps: to the runner-up, or to the first."""
        width = max(plan.limit.width, 1)
        tokens, scores = plan.row.sampler.top(logits, plan.path, max(width, RIVALS))
        chances = same_noise_chances(scores, plan.row.params.temperature)
        gaps = [scores[0] - (scores[1] if len(scores) > 1 else scores[0])] + [score - scores[0] for score in scores[1:]]
        return tokens[:width], chances[:width], gaps[:width]

    def _draw(self, plan: _Plan, logits: NDArray[np.float32]) -> tuple[list[int], list[float], list[float]]:
        """Draws without replacement, in the order drawn, from the model's distribution; features are its chances."""
        first = plan.row.sampler.distribution(logits, plan.path)
        q: NDArray[np.float64] | None = first
        plan.offers.q = {**(plan.offers.q or {}), plan.tail: first}
        tokens: list[int] = []
        used = len(plan.offers)
        for index in range(plan.widths[len(plan.path)]):
            if q is None or not q.any():
                break
            token = rules.sample(q, float(plan.uniforms[used + index]))
            tokens.append(token)
            q = rules.without(q, token)
        masses = [float(first[token]) for token in tokens]
        return tokens, [min(mass, MOST_CERTAIN) for mass in masses], masses


def prune(offers: Offers, count: int) -> None:
    """Keep the `count` nodes most likely to be reached and accepted; parents outrank their children."""
    if len(offers) <= count:
        return
    reach = reach_of(offers.parents, offers.probs)
    kept = sorted(sorted(range(len(offers)), key=lambda node: (-reach[node], node))[:count])
    place = {ANCHOR: ANCHOR} | {node: index for index, node in enumerate(kept)}
    offers.parents = [place[offers.parents[node]] for node in kept]
    offers.tokens = [offers.tokens[node] for node in kept]
    offers.probs = [offers.probs[node] for node in kept]
    offers.features = [offers.features[node] for node in kept]


def check_vocabulary(target: Sequence[str], draft: Sequence[str], target_name: str, draft_name: str) -> None:
    """Raise InputError unless both models mean the same text by the same ids.

    target, draft: the texts of the tokens in id order, without padding at the end (heads may be padded differently).
    """
    if len(target) != len(draft):
        raise InputError(
            f"draft model {draft_name} has {len(draft)} tokens, target {target_name} has {len(target)}: "
            "their vocabularies differ; choose a draft model of the same family"
        )
    for index, (ours, theirs) in enumerate(zip(target, draft, strict=True)):
        if ours != theirs:
            raise InputError(
                f"token {index} is {theirs!r} in draft model {draft_name} and {ours!r} in target {target_name}: "
                "their vocabularies differ; choose a draft model of the same family"
            )
