"""Logits that stay on their device until somebody reads them, and the target's own tokens drawn where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from slipstream.core.types import Drawn, Row
from slipstream.sampling.device import draw
from slipstream.sampling.sampler import RowSampler

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slipstream.core.tree import Draft


class OnDevice:
    """A matrix on a device; the first read brings all of it to the host, once."""

    def __init__(self, matrix: Any) -> None:
        self.matrix = matrix
        self._host: NDArray[np.float32] | None = None

    def host(self) -> NDArray[np.float32]:
        """float32 [rows, width] on the host."""
        if self._host is None:
            self._host = self.matrix.float().cpu().numpy()
        return self._host


class Rows:
    """Some rows of such a matrix, for the eyes of code that expects an array [rows, width]."""

    def __init__(self, whole: OnDevice, start: int, stop: int) -> None:
        self._whole, self._start, self._stop = whole, start, stop
        self.shape = (stop - start, whole.matrix.shape[1])
        self.dtype = np.dtype(np.float32)
        self.ndim = 2

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        return self._whole.host()[self._start : self._stop][index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        found = self._whole.host()[self._start : self._stop]
        return np.array(found, dtype=dtype, copy=copy)


class Drawer:
    """Draws the target's own token after every node of a pass: one batch of operations, one transfer."""

    def __init__(self, logits: Any, spans: Sequence[slice]) -> None:
        self._logits, self._spans = logits, spans

    def __call__(self, rows: Sequence[Row], drafts: Sequence[Draft]) -> list[Drawn] | None:
        """Per row what was drawn after the anchor and after each node; None when a sampler cannot say how."""
        parts = []
        for span, row, draft in zip(self._spans, rows, drafts, strict=True):
            if not isinstance(row.sampler, RowSampler):
                return None
            paths = [[], *(draft.path_tokens(node) for node in range(len(draft)))]
            questions = [row.sampler.question(path) for path in paths]
            parts.append(draw(self._logits[span], row.sampler.rule, questions))
        found = torch.cat(parts).cpu().tolist()
        return [
            Drawn([token for token, _ in found[span]], [bool(close) for _, close in found[span]])
            for span in self._spans
        ]
