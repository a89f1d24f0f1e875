"""Block verification (Sun et al., 2024): a chain is accepted as a whole, never less than by token rejection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.core.errors import InputError, NonFiniteError
from slipstream.core.tree import Draft
from slipstream.core.types import Row, Verdict
from slipstream.verify import rules

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Block:
    """Accepts the longest prefix i with u_i < h_i; p: target's distributions, q: the draft's (formulas below).

    P_0 = 1, P_i = min(1, P_(i-1) p_i(x_i) / q_i(x_i)); Z_i = sum (P_i p_(i+1) - q_(i+1))+; h_i = Z_i / (Z_i + 1 - P_i),
    0/0 is 1; h_n = P_n. After all n the bonus comes from p, else the token from (P_a p_(a+1) - q_(a+1))+.
    Chains only. Same distribution as plain decoding, not the same tokens. Uniforms are salted with the row's step.
    """

    name = "block"
    exact = True
    same_tokens = False

    def __call__(self, logits: NDArray[np.float32], draft: Draft, row: Row) -> Verdict:
        """logits [1 + nodes, vocab]: row 0 for the anchor, row i + 1 for node i."""
        if not draft.is_chain():
            raise InputError("block verification takes chains only; use shape chain, or the verifier rejection")
        try:
            accepted, weights = self._longest(logits, draft, row)
        except NonFiniteError as error:
            return Verdict([], [], error=str(error))
        purpose = "bonus" if accepted == len(draft) else "residual"
        emitted = rules.sample(weights, row.sampler.uniforms(purpose, row.step, 1)[0])
        return Verdict([*draft.tokens[:accepted], emitted], list(range(accepted)))

    @staticmethod
    def _longest(logits: NDArray[np.float32], draft: Draft, row: Row) -> tuple[int, NDArray[np.float64]]:
        """The accepted length, and weights of the token emitted after it."""
        size, all_q = len(draft), draft.q or {}
        uniform = row.sampler.uniforms("accept", row.step, size) if size else ()
        p = row.sampler.distribution(logits[0], ())
        accepted, weights, joint = 0, p, 1.0  # joint is P_i
        for length in range(size + 1):
            if length:
                token, q = draft.tokens[length - 1], all_q.get(length - 2)
                joint = min(1.0, joint * rules.acceptance(p, q, token))
                if joint <= 0.0:
                    break
                p = row.sampler.distribution(logits[length], draft.tokens[:length])
            if length == size:
                rest, chance = p, joint
            else:
                rest = rules.residual(joint * p, all_q.get(length - 1), draft.tokens[length])
                mass = float(rest.sum())
                chance = mass / (mass + (1.0 - joint)) if mass + (1.0 - joint) > 0.0 else 1.0
                rest = rest if mass > 0.0 else p
            if length == 0 or uniform[length - 1] < chance:
                accepted, weights = length, rest
        return accepted, weights
