"""Block verification (Sun et al., 2024): a chain is accepted as a whole, never less than by token rejection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slipstream.core.errors import InputError, NonFiniteError
from slipstream.core.tree import Draft
from slipstream.core.types import Row, Verdict
from slipstream.verify import rules

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def last_accepted(uniform: Sequence[float] | NDArray[np.float64], chances: Sequence[float]) -> int:
    """The last i (from 1) whose uniform lies below its chance h_i; 0 when none does."""
    return max((i for i, chance in enumerate(chances, 1) if uniform[i - 1] < chance), default=0)


class Block:
    """Accepts up to the last i with u_i < h_i; p: target's distributions, q: the draft's.

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
        chances, weights, error = self._chances(logits, draft, row)
        uniform = row.sampler.uniforms("accept", row.step, len(draft)) if len(draft) else ()
        accepted = last_accepted(uniform, chances)
        tokens, path = draft.tokens[:accepted], list(range(accepted))
        if accepted == len(weights):
            return Verdict(tokens, path, error=error)
        purpose = "bonus" if accepted == len(draft) else "residual"
        emitted = rules.sample(weights[accepted], row.sampler.uniforms(purpose, row.step, 1)[0])
        return Verdict([*tokens, emitted], path)

    @staticmethod
    def _chances(
        logits: NDArray[np.float32], draft: Draft, row: Row
    ) -> tuple[list[float], list[NDArray[np.float64]], str | None]:
        """h_1, h_2, ... up to the first P_i of 0, and weights of the token emitted after 0, 1, 2, ... accepted.

        A node with bad logits ends the chain there, as if no more had been drafted; its weights are missing and the
        error comes third.
        """
        size, all_q = len(draft), draft.q or {}
        chances: list[float] = []
        weights: list[NDArray[np.float64]] = []
        joint = 1.0  # P_i
        for length in range(size + 1):
            try:
                p = row.sampler.distribution(logits[length], draft.tokens[:length])
            except NonFiniteError as error:
                return chances, weights, str(error)
            if length == size:
                weights.append(p)
                break
            token, q = draft.tokens[length], all_q.get(length - 1)
            rest = rules.residual(joint * p, q, token)
            mass = float(rest.sum())
            weights.append(rest if mass > 0.0 else p)
            if length:
                chances[-1] = mass / (mass + (1.0 - joint)) if mass + (1.0 - joint) > 0.0 else 1.0
            joint = min(1.0, joint * rules.acceptance(p, q, token))
            if joint <= 0.0:
                break
            chances.append(joint)
        return chances, weights, None
