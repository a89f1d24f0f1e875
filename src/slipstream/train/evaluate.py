"""How often a head's guesses are right, on answers the target wrote greedily; as drafting would make them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  its name everywhere
from numpy.typing import NDArray
from torch import Tensor

from slipstream.drafters.heads.modules import EagleHead, MedusaHead
from slipstream.train.data import Example
from slipstream.train.loss import Truth
from slipstream.train.unroll import Rows, guesses, unroll

TargetRows = Callable[[NDArray[np.int32]], NDArray[np.float32]]
ROWS = 8
"""Answers in one batch."""


class OwnTokens:
    """Tokens of each row's prompt that the draft vocabulary lacks; heads with the target's rows can draft them too.

    ids int64 [U], rows [U, H], allowed bool [B, U].
    """

    def __init__(self, examples: Sequence[Example], truth: Truth, target_rows: TargetRows | None) -> None:
        known = (truth.drafted >= 0).cpu().numpy()
        own = [np.unique(example.tokens[: example.prompt]) for example in examples]
        own = [ids[~known[ids]] for ids in own]
        union = np.unique(np.concatenate(own)).astype(np.int32) if target_rows is not None else np.zeros(0, np.int32)
        device, dtype = truth.rows.device, truth.rows.dtype
        self.ids = torch.from_numpy(union.astype(np.int64)).to(device)
        found = target_rows(union) if target_rows is not None and len(union) else np.zeros((0, truth.rows.shape[1]))
        self.rows = torch.from_numpy(found).to(device, dtype)
        self.allowed = torch.from_numpy(np.stack([np.isin(union, ids) for ids in own])).to(device)

    def extend(self, logits: Tensor, normed: Tensor, where: Tensor) -> Tensor:
        """Logits of the own tokens after those given; logits [positions, V], normed [positions, H], where [B, Q]."""
        more = F.linear(normed.to(self.rows.dtype), self.rows).float()
        row = where.nonzero()[:, 0]
        return torch.cat([logits.float(), more.masked_fill(~self.allowed[row], float("-inf"))], -1)


def count_right(
    module: EagleHead | MedusaHead, rows: Rows, truth: Truth, steps: int, own: OwnTokens | None = None
) -> Tensor:
    """int64 [steps, 2]: of the positions whose earlier guesses were all right, how many there are and are right.

    The guess is the likeliest token, right when it is the answer's next one; so first positions all count, and later
    ones as often as a greedy chain would come that far.
    """
    counts = torch.zeros(steps, 2, dtype=torch.int64)
    ids = torch.full((len(truth.rows),), -1, dtype=torch.int64, device=truth.rows.device)
    there = (truth.drafted >= 0).nonzero().squeeze(-1)
    ids[truth.drafted[there]] = there
    alive: Tensor | None = None
    for step, h in unroll(module, rows, steps):
        where = rows.guessed(step) if alive is None else rows.guessed(step) & alive
        if not bool(where.any()):
            break
        logits = guesses(module, h, rows, step, where)
        if own is not None and isinstance(module, EagleHead):
            logits = own.extend(logits, module.normed(h[where]), where)
            best = torch.cat([ids, own.ids])[logits.argmax(-1)]
        else:
            best = ids[logits.argmax(-1)]
        hit = best == rows.right(step)[where]
        counts[step] += torch.tensor([int(hit.numel()), int(hit.sum())])
        alive = torch.zeros_like(where)
        alive[where] = hit
    return counts


def measured(examples: Sequence[Example], tokens: int | None) -> Iterator[list[Example]]:
    """Batches of greedy answers (of all when none is), of like prompt lengths; about `tokens` answer tokens of them."""
    chosen: list[Example] = []
    total = 0
    for example in [each for each in examples if each.greedy] or examples:
        if tokens is not None and total >= tokens:
            break
        chosen.append(example)
        total += example.answer
    chosen.sort(key=lambda example: example.prompt)
    for start in range(0, len(chosen), ROWS):
        yield chosen[start : start + ROWS]
