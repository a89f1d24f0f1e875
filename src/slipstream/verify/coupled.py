"""Walk verification: the target's own token at each node, by the same rule as plain decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.core.errors import NonFiniteError
from slipstream.core.tree import ANCHOR, Draft
from slipstream.core.types import Row, Verdict

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

    def __call__(self, logits: NDArray[np.float32], draft: Draft, row: Row) -> Verdict:
        """logits [1 + nodes, vocab]: row 0 for the anchor, row i + 1 for node i."""
        verdict = Verdict([], [])
        child_of = {
            (parent, token): node for node, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True))
        }
        node: int | None = ANCHOR
        while node is not None:
            here, path = logits[node + 1], verdict.tokens
            try:
                token = row.sampler.draw(here, path)
                if self._count_near_ties and row.sampler.near_tie(here, path):
                    verdict.near_ties += 1
            except NonFiniteError as error:
                verdict.error = str(error)
                return verdict
            verdict.tokens.append(token)
            node = child_of.get((node, token))
            if node is not None:
                verdict.path.append(node)
        return verdict
