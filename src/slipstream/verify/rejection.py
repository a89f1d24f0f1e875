"""Rejection: token rejection on chains, recursive rejection without replacement on trees (Leviathan, Chen, 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slipstream.core.errors import NonFiniteError
from slipstream.core.tree import ANCHOR, Draft
from slipstream.core.types import Row, Verdict
from slipstream.verify import rules

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Rejection:
    """Accepts a drawn token x with probability min(1, p(x) / q(x)); p: target's distribution, q: the draft's.

    Candidates of one node are tried in the order drawn: after each reject p becomes norm((p - q)+) and q loses the
    token. Candidates of a parent without q are deterministic: q is one-hot at each. A node must carry all the tokens
    drawn for it. Same distribution as plain decoding, not the same tokens. Uniforms are salted with the row's step.
    """

    name = "rejection"
    exact = True
    same_tokens = False

    def __call__(self, logits: NDArray[np.float32], draft: Draft, row: Row) -> Verdict:
        """logits [1 + nodes, vocab]: row 0 for the anchor, row i + 1 for node i."""
        verdict = Verdict([], [])
        accept = row.sampler.uniforms("accept", row.step, len(draft)) if len(draft) else ()
        parent = ANCHOR
        while True:
            try:
                p = row.sampler.distribution(logits[parent + 1], verdict.tokens)
            except NonFiniteError as error:
                verdict.error = str(error)
                return verdict
            candidates = draft.children(parent)
            q = draft.q.get(parent) if draft.q else None
            node, p = self._try(candidates, draft.tokens, accept, (p, q))
            if node is None:
                purpose = "residual" if candidates else "bonus"
                verdict.tokens.append(rules.sample(p, row.sampler.uniforms(purpose, row.step, 1)[0]))
                return verdict
            verdict.tokens.append(draft.tokens[node])
            verdict.path.append(node)
            parent = node

    @staticmethod
    def _try(
        candidates: Sequence[int],
        tokens: Sequence[int],
        accept: Sequence[float] | NDArray[np.float64],
        laws: tuple[NDArray[np.float64], NDArray[np.float64] | None],
    ) -> tuple[int | None, NDArray[np.float64]]:
        """The accepted node, or None and the distribution the emitted token comes from. Node i uses uniform i."""
        p, q = laws
        for node in candidates:
            token = tokens[node]
            if q is not None and not q.any():
                break
            if accept[node] < rules.acceptance(p, q, token):
                return node, p
            rest = rules.residual(p, q, token)
            mass = float(rest.sum())
            if mass <= 0.0:  # the ratio was 1, up to rounding
                return node, p
            p, q = rest / mass, rules.without(q, token)
        return None, p
