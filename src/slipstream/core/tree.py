"""The draft tree: tokens and parents in topological order. A chain is a tree, an empty draft is plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import lt
from typing import TYPE_CHECKING

from slipstream.core.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ANCHOR = -1
"""Parent index of the nodes that follow the anchor directly."""


@dataclass(slots=True)
class Draft:
    """A tree of guessed tokens below the anchor of one row.

    tokens: token id of each node. parents: index of each node's parent, `ANCHOR` for children of the anchor, always
    smaller than the node's own index. Siblings carry distinct tokens and stand in the order they were drawn or ranked.
    q: for the classical verifiers, the distribution (float64 [vocab], sums to 1) from which the children of a node
    were drawn, by parent index; a parent without an entry has one-hot (deterministic) children.
    sources: the drafter each node came from, for statistics; empty or as long as tokens.
    expected: tokens of the draft that whoever chose it expects to stand. gain: the speed over plain decoding expected
    of the step, 1.0 when there is no estimate.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    q: dict[int, NDArray[np.float64]] | None = None
    sources: list[str] = field(default_factory=list)
    expected: float = field(default=0.0, compare=False)
    gain: float = field(default=1.0, compare=False)

    def __len__(self) -> int:
        return len(self.tokens)

    def children(self, parent: int) -> list[int]:
        """Indices of the nodes below `parent` (`ANCHOR` for the root), in order."""
        return [node for node, above in enumerate(self.parents) if above == parent]

    def child(self, parent: int, token: int) -> int | None:
        """The node below `parent` that carries `token`; None when there is none."""
        for node, above in enumerate(self.parents):
            if above == parent and self.tokens[node] == token:
                return node
        return None

    def path(self, node: int) -> list[int]:
        """Indices from the first level down to `node` itself; empty for the anchor."""
        nodes: list[int] = []
        while node != ANCHOR:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def path_tokens(self, node: int) -> list[int]:
        """Tokens on the way from the anchor (excluded) to `node` (included)."""
        return [self.tokens[index] for index in self.path(node)]

    def source(self, node: int) -> str:
        """The drafter a node came from; "draft" where that was not said."""
        return self.sources[node] if self.sources else "draft"

    def depths(self) -> list[int]:
        """Depth of each node, 1 for children of the anchor."""
        return depths_of(self.parents)

    def is_chain(self) -> bool:
        """True when every node follows the one before it (an empty draft is a chain)."""
        return all(parent == index - 1 for index, parent in enumerate(self.parents))

    def check(self, vocab_size: int) -> None:
        """Raise InputError unless the tree is well-formed for a vocabulary of this size."""
        tokens, parents = self.tokens, self.parents
        if len(parents) != len(tokens):
            raise InputError(f"draft has {len(tokens)} tokens but {len(parents)} parents")
        # Nearly all trees are well-formed, and each step checks some: a loop is only for saying what is wrong.
        distinct = len(set(zip(parents, tokens, strict=True))) == len(tokens)
        if not tokens or (
            distinct
            and min(tokens) >= 0
            and max(tokens) < vocab_size
            and min(parents) >= ANCHOR
            and all(map(lt, parents, range(len(parents))))
        ):
            return
        seen: set[tuple[int, int]] = set()
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if not 0 <= token < vocab_size:
                raise InputError(f"draft node {node} has token {token}, outside 0..{vocab_size - 1}")
            if not ANCHOR <= parent < node:
                raise InputError(f"draft node {node} has parent {parent}; parents come before their children")
            if (parent, token) in seen:
                raise InputError(f"draft node {node} repeats its sibling's token {token}")
            seen.add((parent, token))


def depths_of(parents: Sequence[int]) -> list[int]:
    """Depth of each node of a tree, 1 for children of the anchor."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == ANCHOR else depths[parent] + 1)
    return depths


def reach_of(parents: Sequence[int], chances: Sequence[float]) -> list[float]:
    """Probability that the whole path down to each node is accepted, from each node's chance given its parent."""
    reach: list[float] = []
    for parent, chance in zip(parents, chances, strict=True):
        reach.append(chance * (1.0 if parent == ANCHOR else reach[parent]))
    return reach


def chain(tokens: Sequence[int]) -> Draft:
    """A draft without branches."""
    return Draft(list(tokens), list(range(-1, len(tokens) - 1)))
