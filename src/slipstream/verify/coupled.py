"""Walk verification: the target's own token at each node, by the same rule as plain decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.core.errors import NonFiniteError
from slipstream.core.tree import ANCHOR, Draft
from slipstream.core.types import Drawn, Row, Verdict

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Coupled:
    """At each node draw the target's token with the position's noise; follow the child that carries it, else stop.

    Exact for any drafter, tree or pruning, and the emitted tokens are those of plain decoding.
    count_near_ties: count visited positions whose best two scores are close (targets that are not row-invariant).
    """

    name = "coupled"
    exact = True
    same_tokens = True

    def __init__(self, count_near_ties: bool = False) -> None:
        self._count_near_ties = count_near_ties

    def __call__(self, logits: NDArray[np.float32], draft: Draft, row: Row, drawn: Drawn | None = None) -> Verdict:
        """logits [1 + nodes, vocab]: row 0 for the anchor, row i + 1 for node i.

        drawn: the same decisions, made where the logits lie; these are then read only where a draw failed.
        """
        verdict = Verdict([], [])
        node: int | None = ANCHOR
        while node is not None:
            place, path = node + 1, verdict.tokens
            try:
                if drawn is not None and drawn.tokens[place] >= 0:
                    token, close = drawn.tokens[place], drawn.close[place]
                else:
                    token = row.sampler.draw(logits[place], path)
                    close = self._count_near_ties and row.sampler.near_tie(logits[place], path)
            except NonFiniteError as error:
                verdict.error = str(error)
                break
            verdict.near_ties += self._count_near_ties and close
            verdict.tokens.append(token)
            node = draft.child(node, token)
            if node is not None:
                verdict.path.append(node)
        return verdict
