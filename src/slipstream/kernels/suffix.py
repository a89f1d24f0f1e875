"""The suffix automaton: compiled, or its twin in Python with the same results where there is no compiled core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

from slipstream.kernels import native
from slipstream.kernels import reference_suffix as reference
from slipstream.kernels.reference_suffix import Tree

__all__ = ["Automaton", "Tree", "make_automaton"]


class Automaton(Protocol):
    """A growing text; size: its tokens so far."""

    size: int

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""

    def tree(self, nodes: int, depth: int, width: int, least: float) -> Tree:
        """The most probable continuations of the longest suffix that occurs earlier too; none below `least`."""


def make_automaton() -> Automaton:
    """An automaton over an empty text."""
    return reference.SuffixAutomaton() if native.core is None else cast(Automaton, native.core.SuffixAutomaton())
