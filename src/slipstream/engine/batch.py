"""The rows of one step: what each may draft, what it emitted, what that says about speculation."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from slipstream.core.stats import tally
from slipstream.core.tree import Draft, depths_of
from slipstream.core.types import Limit, Observation, Offers, Row, Verdict
from slipstream.engine.request import ERROR, Answer, Request
from slipstream.engine.stop import End
from slipstream.sampling import token_logprob
from slipstream.targets.base import PassOutput, RowInput

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

log = logging.getLogger("slipstream")


class Batch:
    """Running answers, in the order of their rows. max_nodes: draft nodes per row at most, 0 when none are wanted."""

    def __init__(self, answers: Sequence[Answer], max_context: int, max_nodes: int | None = None) -> None:
        self.answers = list(answers)
        self.rows: list[Row] = [answer.row for answer in answers]
        self._max_context, self._max_nodes = max_context, max_nodes

    def clip(self, limits: Sequence[Limit], drafters: Sequence[str]) -> list[Limit]:
        """The controller's limits, within the room each row has left and what is set for it. drafters: all names.

        A pass emits one token more than the depth of its draft, so the depth stays below the room; the nodes stay
        below the end of the context.
        """
        clipped = []
        for answer, limit in zip(self.answers, limits, strict=True):
            if limit.nodes <= 0 or self._max_nodes == 0 or not answer.row.speculate:
                clipped.append(Limit(0, 0))
                continue
            if self._max_nodes is not None or answer.row.max_nodes is not None or answer.row.drafters is not None:
                limit = narrowed(limit, answer.row, self._max_nodes, drafters)
            room, space = answer.room - 1, self._max_context - len(answer.row.tokens) - 1
            if limit.depth > room or limit.nodes > space:
                limit = limit.within(room)
                limit.nodes = min(limit.nodes, space)
            clipped.append(limit)
        return clipped

    def offered(self, offers: Sequence[Sequence[Offers]]) -> None:
        """Count what drafters offered, verified or not."""
        for answer, of_row in zip(self.answers, offers, strict=True):
            for offer in of_row:
                if offer.tokens:
                    tally(answer.stats.of(offer.source).offered, depths_of(offer.parents))

    def fit(self, drafts: Sequence[Draft], limits: Sequence[Limit]) -> list[Draft]:
        """The drafts as chosen; one that goes past its limit becomes empty and counts as a failure."""
        fitting = []
        for answer, draft, limit in zip(self.answers, drafts, limits, strict=True):
            if draft.tokens and (len(draft) > limit.nodes or max(draft.depths()) > limit.depth):
                log.warning("a draft of %d nodes was dropped: it goes past %s", len(draft), limit)
                answer.stats.drafter_failures += 1
                draft = Draft()
            fitting.append(draft)
        return fitting

    def inputs(self, drafts: Sequence[Draft]) -> list[RowInput]:
        """What the pass reads: each row's anchor and draft."""
        return [RowInput(row.slot, row.tokens[-1], draft) for row, draft in zip(self.rows, drafts, strict=True)]

    def append(self, drafts: Sequence[Draft], verdicts: Sequence[Verdict], output: PassOutput) -> list[Observation]:
        """Emit the verdicts' tokens up to where each answer ends; what was kept is in the returned verdicts."""
        seen = []
        for index, (answer, draft, verdict) in enumerate(zip(self.answers, drafts, verdicts, strict=True)):
            logits = output.logits[index]
            kept = emit(answer, draft, verdict, logits)
            features = output.features[index] if output.features else None
            ended = answer.finish_reason is not None
            seen.append(Observation(answer.row, draft, kept, logits, features, ended))
        return seen

    def charge(self, seconds: dict[str, float]) -> None:
        """Add the time of this step to every request that took part."""
        total = sum(seconds.values())
        charged: list[Request] = []
        for answer in self.answers:
            answer.decode_s += total
            if answer.request not in charged:
                charged.append(answer.request)
                answer.request.charge(seconds)


def narrowed(limit: Limit, row: Row, max_nodes: int | None, drafters: Sequence[str]) -> Limit:
    """A limit within the settings of the engine and of the row; the same object where they say nothing."""
    most = min(limit.nodes if each is None else each for each in (max_nodes, row.max_nodes))
    if most < limit.nodes:
        limit = replace(limit, nodes=most, depth=min(limit.depth, most))
    if row.drafters is not None:
        unasked = {name: 0 for name in drafters if name not in row.drafters}
        limit = replace(limit, depths=limit.depths | unasked)
    return limit


def emit(answer: Answer, draft: Draft, verdict: Verdict, logits: NDArray[np.float32]) -> Verdict:
    """Append a verdict's tokens to an answer, and return the part of the verdict that was kept."""
    count(answer, draft, verdict)
    kept = 0
    for token in verdict.tokens:
        source = draft.source(verdict.path[kept]) if kept < len(verdict.path) else ""
        going = answer.append(token, source)
        if answer.logprobs is not None:
            above = verdict.path[kept - 1] + 1 if kept else 0
            answer.logprobs.append(token_logprob(logits[above], token, answer.row.params.logprobs or 0))
        kept += 1
        if not going:
            break
    answer.row.sampler.append(verdict.tokens[:kept])
    if verdict.error is not None and answer.finish_reason is None:
        answer.finish(End(ERROR, verdict.error))
    if kept == len(verdict.tokens):
        return verdict
    return Verdict(verdict.tokens[:kept], verdict.path[: max(0, kept - 1)], verdict.near_ties)


def count(answer: Answer, draft: Draft, verdict: Verdict) -> None:
    """Statistics of one step of one row, before stop rules trim it; definitions in docs/statistics.md."""
    stats, accepted = answer.stats, len(verdict.path)
    answer.row.step += 1
    stats.num_steps += 1
    stats.tokens_before_trimming += len(verdict.tokens)
    stats.near_ties += verdict.near_ties
    stats.predicted_tokens += 1.0 + draft.expected
    stats.predicted_passes += (1.0 + draft.expected) / draft.gain
    if not draft.tokens:
        return
    stats.num_spec_steps += 1
    stats.num_draft_tokens += len(draft)
    stats.num_accepted_draft_tokens += accepted
    stats.predicted_accepted += draft.expected
    histogram = stats.acceptance_histogram
    histogram.extend([0] * (accepted + 1 - len(histogram)))
    histogram[accepted] += 1
    if not draft.sources:
        return
    for source, depth in zip(draft.sources, draft.depths(), strict=True):
        tally(stats.of(source).verified, (depth,))
    for depth, node in enumerate(verdict.path, 1):
        tally(stats.of(draft.sources[node]).accepted, (depth,))
