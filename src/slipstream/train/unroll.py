"""Examples as tensors, and a head unrolled over them: the first guess of every position, then guesses on guesses.

Position s holds the features of token s and the embedding of token s + 1; step j there guesses token s + 2 + j. Rows
are shifted so that answers begin in one column: everything before it is context, everything from it on is guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.drafters.heads.modules import EagleHead, MedusaHead
from slipstream.train.data import Example
from slipstream.train.features import sequence_key

Reader = Callable[[str], NDArray[np.float16]]


@dataclass(slots=True)
class Rows:
    """A batch. T columns of positions, J more for the tokens that later steps need; Q = T - start are guessed.

    features [B, T, width]; tokens [B, T + J]: token s + 1; hidden [B, Q + J, target_hidden]: last hidden state, before
    the final norm, of token s + 1; valid bool [B, T + J]: token s + 2 exists. start: the first guessing column.
    """

    features: Tensor
    tokens: Tensor
    hidden: Tensor
    valid: Tensor
    start: int

    @property
    def columns(self) -> int:
        """Columns that guess."""
        return self.features.shape[1] - self.start

    def guessed(self, step: int) -> Tensor:
        """bool [B, Q]: where step `step` has a token to guess."""
        return self.valid[:, self.start + step :][:, : self.columns]

    def entering(self, step: int) -> Tensor:
        """Tokens [B, Q] that step `step` is fed."""
        return self.tokens[:, self.start + step :][:, : self.columns]

    def right(self, step: int) -> Tensor:
        """Tokens [B, Q] that step `step` should guess (where `guessed`)."""
        return self.tokens[:, self.start + step + 1 :][:, : self.columns]

    def truth(self, step: int) -> Tensor:
        """The target's hidden states [B, Q, target_hidden] whose logits step `step` should come near."""
        return self.hidden[:, step:][:, : self.columns]


def collate(examples: Sequence[Example], read: Reader, steps: int, width: int, device: torch.device) -> Rows:
    """A batch of examples, for `steps` steps. width: columns of the stored features that the head reads.

    The last columns stored are the last hidden state.
    """
    starts = [example.prompt - 2 for example in examples]
    first = max(starts)
    shifts = [first - start for start in starts]
    size = max(shift + len(example.tokens) - 2 for shift, example in zip(shifts, examples, strict=True))
    tokens = np.zeros((len(examples), size + steps), np.int64)
    valid = np.zeros((len(examples), size + steps), bool)
    stored = [read(sequence_key(example.tokens.tolist())) for example in examples]
    hidden_width = stored[0].shape[1] - width
    features = np.zeros((len(examples), size, width), np.float16)
    hidden = np.zeros((len(examples), size - first + steps, hidden_width), np.float16)
    for row, (shift, example, kept) in enumerate(zip(shifts, examples, stored, strict=True)):
        count = len(example.tokens) - 2
        features[row, shift : shift + count] = kept[:count, :width]
        tokens[row, shift : shift + count + 1] = example.tokens[1:]
        valid[row, shift : shift + count] = True
        hidden[row, : count + shift - first] = kept[1 + first - shift :, width:][: count + shift - first]
    return Rows(
        torch.from_numpy(features).to(device),
        torch.from_numpy(tokens).to(device),
        torch.from_numpy(hidden).to(device),
        torch.from_numpy(valid).to(device),
        first,
    )


def unroll(module: EagleHead | MedusaHead, rows: Rows, steps: int) -> Iterator[tuple[int, Tensor]]:
    """(step, output [B, Q, H]) of each step; for Medusa, whose heads are its steps, the states they read."""
    if isinstance(module, MedusaHead):
        for step in range(steps):
            yield step, rows.features[:, rows.start :].float()
        return
    size = rows.features.shape[1]
    h, context = module.read(rows.features, rows.tokens[:, :size], rows.valid[:, :size], rows.start)
    yield 0, h
    for step in range(1, steps):
        h = module.step(h, rows.entering(step), context, step, rows.start)
        yield step, h


def guesses(module: EagleHead | MedusaHead, h: Tensor, rows: Rows, step: int, where: Tensor) -> Tensor:
    """Logits [positions, draft_vocab] of a step at the positions `where` (bool [B, Q])."""
    if isinstance(module, MedusaHead):
        return module.logits(h[where], step)
    return module.logits(h[where], rows.entering(step)[where])
