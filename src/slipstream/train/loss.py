"""The loss of a batch, over unrolled steps; and what the head learns from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  its name everywhere
from torch import Tensor

from slipstream.drafters.heads.modules import EagleHead, MedusaHead
from slipstream.train.objectives import Objective
from slipstream.train.unroll import Rows, guesses, unroll

DECAY = 0.8
"""Weight of each step relative to the one before."""


@dataclass(slots=True)
class Truth:
    """What turns the target's hidden states into its law over the draft vocabulary.

    norm [H], eps: the target's final norm. rows [draft_vocab, H]: of its LM head. drafted int64 [vocab]: the drafted id
    of each target id, -1 where there is none.
    """

    norm: Tensor
    eps: float
    rows: Tensor
    drafted: Tensor

    def log_p(self, hidden: Tensor) -> Tensor:
        """log p over the draft vocabulary, fp32 [positions, draft_vocab], of hidden [positions, H]."""
        with torch.no_grad():
            return F.linear(self.normed(hidden).to(self.rows.dtype), self.rows).float().log_softmax(-1)

    def normed(self, hidden: Tensor) -> Tensor:
        """Hidden states after the target's final norm, fp32."""
        return F.rms_norm(hidden.float(), self.norm.shape, self.norm, self.eps)


def batch_loss(
    module: EagleHead | MedusaHead, rows: Rows, truth: Truth, steps: int, objective: Objective
) -> tuple[Tensor, list[float]]:
    """Sum over steps of DECAY^step x mean loss of the step; and each step's share of right first guesses.

    Only positions whose token is in the draft vocabulary count.
    """
    total = torch.zeros((), device=rows.tokens.device)
    shares: list[float] = []
    for step, h in unroll(module, rows, steps):
        wanted = truth.drafted[rows.right(step)]
        where = rows.guessed(step) & (wanted >= 0)
        if not bool(where.any()):
            shares.append(0.0)
            continue
        logits = guesses(module, h, rows, step, where).float()
        log_p = truth.log_p(rows.truth(step)[where])
        total = total + DECAY**step * objective(logits.log_softmax(-1), log_p).mean()
        shares.append(float((logits.argmax(-1) == wanted[where]).float().mean()))
    return total, shares
