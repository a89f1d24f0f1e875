"""A draft model with another vocabulary: its text is drafted, in the target's tokens.

The target's tokens become text, the text becomes tokens of the draft model; what that model goes on to write becomes
text again and then tokens of the target. Wrong translations cost acceptance, never correctness.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slipstream.core.types import Limit, Observation, Offers, Row
from slipstream.drafters.base import Drafter
from slipstream.drafters.retokenize import Mirror, Words, whole_characters
from slipstream.drafters.small_model import KEPT, MOST_DEPTH, READ_IN_PASS, RIVALS, same_noise_chances
from slipstream.kernels import sampling as kernels
from slipstream.targets.base import Target, read_on
from slipstream.targets.slots import SlotPool

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

log = logging.getLogger(__name__)

CONTEXT_BYTES = 48
"""Text before the draft that is encoded with it, so that words are cut as the target would cut them."""
UNFINISHED = 0.7
"""Trust in the last target token: more text might have joined it."""


@dataclass(slots=True)
class _State:
    """One row: its text in the draft model's tokens, and what the model's cache holds.

    same: leading tokens in which both are known to agree.
    """

    slot: int
    mirror: Mirror
    cached: list[int]
    same: int


@dataclass(slots=True)
class _Plan:
    """One row's draft while it grows: tokens of the draft model, their chances, those its next pass reads."""

    row: Row
    state: _State
    limit: Limit
    offers: Offers
    pending: list[int]
    drafted: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    reach: float = 1.0


class Translated(Drafter):
    """Drafts a chain with a model whose tokens differ from the target's.

    model: any target; its slots belong to this drafter, which keeps those of the last rows for texts that begin alike,
    such as the next turn of a chat. ours, theirs: tokenizers of the target and of the model. vocab_size: the target's.
    """

    name = "model"

    def __init__(self, model: Target, vocab_size: int, ours: Words, theirs: Words) -> None:
        self.model, self.vocab_size, self.ours, self.theirs = model, vocab_size, ours, theirs
        self._rows: dict[int, _State] = {}
        self._slots = SlotPool(model, KEPT)

    def begin(self, row: Row) -> None:
        """A row joins; its tokens are read when first asked for. Raises InputError when all slots are taken."""
        mirror = Mirror(self.ours, self.theirs)
        mirror.extend(row.tokens)
        cached = list(mirror.ids)  # the pool's list too: it follows the cache from here on
        slot, shared = self._slots.take(cached)
        del cached[shared:]
        self._rows[row.id] = _State(slot, mirror, cached, shared)

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[Offers]:
        """One chain per row; empty for rows that have outgrown the model's context."""
        offers = [Offers(self.name) for _ in rows]
        plans = [
            plan
            for row, limit, offer in zip(rows, limits, offers, strict=True)
            if row.id in self._rows and (plan := self._plan(row, limit, offer)) is not None
        ]
        growing = plans
        while growing:
            logits = self._pass(growing)
            growing = [plan for plan, given in zip(growing, logits, strict=True) if self._grow(plan, given)]
        for plan in plans:
            self._translate(plan)
        return offers

    def observe(self, observations: Sequence[Observation]) -> None:
        """Nothing yet: the cache is cut back to the text when the row is asked for next."""

    def end(self, row: Row) -> None:
        """The row leaves; its slot is kept for a while, unless a failure left it in an unknown state."""
        state = self._rows.pop(row.id, None)
        if state is None:
            return
        if self.model.length(state.slot) == len(state.cached):
            self._roll_back(row, state)
            self._slots.park(state.slot)
        else:
            self._slots.drop(state.slot)

    def forget(self) -> None:
        """Give back the slots that were kept."""
        self._slots.forget()

    def _roll_back(self, row: Row, state: _State) -> None:
        """Take in the row's new text, and drop what is cached beyond its last token, or is no longer its beginning."""
        stays, ids, cached = state.mirror.extend(row.tokens), state.mirror.ids, state.cached
        most = max(0, min(len(cached), len(ids) - 1))
        same = min(state.same, stays, most)
        while same < most and cached[same] == ids[same]:
            same += 1
        if same < len(cached):
            self.model.truncate(state.slot, same)
            del cached[same:]
        state.same = same

    def _plan(self, row: Row, limit: Limit, offers: Offers) -> _Plan | None:
        """The row's text in the model's tokens, read but for the end; None where there is no room for a draft."""
        state = self._rows[row.id]
        self._roll_back(row, state)
        ids = state.mirror.ids
        depth = min(limit.depth, limit.nodes, MOST_DEPTH)
        if not ids or depth < 1 or len(ids) + depth + 1 >= self.model.max_context:
            return None
        missing = ids[state.same :]
        if len(missing) > READ_IN_PASS:
            self.model.prefill(state.slot, missing[:-1])
            state.cached += missing[:-1]
            missing = missing[-1:]
        return _Plan(row, state, limit, offers, missing)

    def _pass(self, plans: Sequence[_Plan]) -> list[NDArray[np.float32]]:
        """Read each row's pending tokens; returns its logits after the last of them."""
        made = read_on(self.model, [plan.state.slot for plan in plans], [plan.pending for plan in plans])
        for plan in plans:
            plan.state.cached += plan.pending
        return made

    def _grow(self, plan: _Plan, logits: NDArray[np.float32]) -> bool:
        """Add the likeliest token; True while the draft should become longer."""
        ids, values = (found[0].tolist() for found in kernels.top(logits[None], RIVALS))
        if ids[0] < 0:
            return False
        chance = same_noise_chances([value for one, value in zip(ids, values, strict=True) if one >= 0], 0.0)[0]
        plan.drafted.append(ids[0])
        plan.chances.append(chance)
        plan.pending = [ids[0]]
        plan.reach *= chance
        ended = self.theirs.is_control(ids[0])
        deepest = min(plan.limit.depth, plan.limit.nodes, MOST_DEPTH)
        return not ended and len(plan.drafted) < deepest and plan.reach >= plan.limit.floor

    def _translate(self, plan: _Plan) -> None:
        """Offer the target tokens that the drafted text is made of."""
        data, ends, control = self._text(plan)
        pending = plan.state.mirror.pending
        if not data.startswith(pending[: len(data)]) or len(data) < len(pending):
            return  # the unfinished character goes on in another way
        data = data[: whole_characters(data)]
        tokens = self._cut(bytes(plan.state.mirror.data[-CONTEXT_BYTES - 4 :]), data[len(pending) :])
        offers, start, used = plan.offers, len(pending), 0
        most = min(plan.limit.depth, plan.limit.nodes)
        for token in tokens[:most]:
            start += len(self.ours.token_bytes(token))
            chance = 1.0
            while used < len(ends) and (used == 0 or ends[used - 1] < start):
                chance *= plan.chances[used]
                used += 1
            self._offer(offers, token, chance * (UNFINISHED if start >= len(data) and control is None else 1.0))
        if control is not None and len(offers) < most and len(offers) == len(tokens):
            self._offer(offers, control, plan.chances[-1])

    @staticmethod
    def _offer(offers: Offers, token: int, chance: float) -> None:
        offers.parents.append(len(offers) - 1)
        offers.tokens.append(token)
        offers.probs.append(chance)
        offers.features.append(chance)

    def _text(self, plan: _Plan) -> tuple[bytes, list[int], int | None]:
        """The drafted bytes, where each token ends in them, and the target's id of a control token at the end."""
        data = b""
        ends: list[int] = []
        for token in plan.drafted:
            raw = self.theirs.token_bytes(token)
            if self.theirs.is_control(token):
                return data, ends, self.ours.special_texts.get(raw.decode("utf-8", "replace"))
            data += raw
            ends.append(len(data))
        return data, ends, None

    def _cut(self, before: bytes, data: bytes) -> list[int]:
        """Target tokens of `data` where it follows `before`, cut together with it where that text ends in a token."""
        if not data:
            return []
        start = max(0, len(before) - CONTEXT_BYTES)
        while start < len(before) and before[start] & 0xC0 == 0x80:
            start += 1
        context = before[start:]
        size = len(context)
        try:
            tokens = self.ours.encode_parts([((context + data).decode("utf-8"), False)])
        except UnicodeDecodeError:
            tokens = []
        for place, token in enumerate(tokens):
            if size == 0:
                return tokens[place:]
            size -= len(self.ours.token_bytes(token))
            if size < 0:
                break
        try:
            return self.ours.encode_parts([(data.decode("utf-8"), False)])
        except UnicodeDecodeError:
            return []
