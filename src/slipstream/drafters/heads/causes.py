"""What the description of a head may have wrong about it, and which of it the head's own guesses speak for.

A wrong flag or a wrong list of layers leaves a head that loads and guesses badly. Whoever wrote it knew what it was
trained on, so other readings are compared on the very same guesses, and only what chance cannot have done is named.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import comb
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from slipstream.models.heads.config import HeadConfig

Ranks = NDArray[np.int32]
"""Of each guess: how many tokens the head thought likelier than the one that came. 0: it was right."""
RARE = 2**31 - 1
"""The rank of a token that the head cannot draft."""
BETTER = 1.5
"""A reading that makes so many times more guesses right is what is wrong; what a weak head gains by luck is less."""
CHANCE = 0.01
"""How probable it may be that a reading is named which is no better: of each by its guesses, of all tried by ranks."""
ALIKE = 0.05
"""Two readings that differ by no more than such a chance are alike: the simpler one is named."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How the settings that files are most often wrong about may be read.

    layers: whose inputs are the features. before: norm_before_residual. wrong: things the file would have wrong about
    them; remedy: what to write instead.
    """

    layers: tuple[int, ...]
    before: bool
    wrong: int = 0
    remedy: str = ""


def stated(config: HeadConfig) -> Reading:
    """The head as its file describes it."""
    return Reading(config.feature_layers, config.norm_before_residual)


def readings(config: HeadConfig, num_layers: int) -> Iterator[Reading]:
    """Other readings of an EAGLE-3 head, the likely ones first: one thing wrong, then two, then three.

    The other norm flag; layer ids one higher or lower (counted as outputs, or from the embedding), in the reverse order
    and, of three, in every other; the usual layers. Other kinds of heads have nothing to read otherwise.
    """
    if config.kind != "eagle3":
        return
    own, flag = config.feature_layers, config.norm_before_residual
    usual = (2, num_layers // 2, num_layers - 3)
    moved = [tuple(layer + step for layer in own) for step in (1, -1)]
    single = [*moved, *_orders(own), *([usual] if len(own) == len(usual) else [])]
    double = [order for shifted in moved for order in _orders(shifted)]
    wrong = {own: 0}
    for count, several in ((1, single), (2, double)):
        for layers in several:
            if min(layers) >= 0 and max(layers) <= num_layers:
                wrong.setdefault(layers, count)
    for count in (1, 2, 3):
        for turned in (True, False):
            for layers in (layers for layers, changed in wrong.items() if changed + turned == count):
                changes = [f"norm_before_residual {str(not flag).lower()}"] if turned else []
                changes += [f"layer ids {list(layers)}"] if layers != own else []
                yield Reading(layers, flag != turned, count, " and ".join(changes))


def _orders(layers: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The reverse, and of three layers every order; there are too many of more."""
    return [layers[::-1], *itertools.permutations(layers)] if len(layers) == 3 else [layers[::-1]]


def clearly_better(base: Ranks, tried: Sequence[tuple[Reading, Ranks]]) -> int | None:
    """Index of the reading that clearly helps, None when there is none.

    base: ranks as the file describes the head; tried: those of other readings. One that helps has many more guesses
    right, and ranks the tokens that came higher so often that chance cannot have done it in any of so many tries. The
    one with the most right guesses is best; a simpler one that is as good goes before it.
    """
    right = [int((ranks == 0).sum()) for _, ranks in tried]
    helping = [
        index
        for index, (_, ranks) in enumerate(tried)
        if right[index] >= BETTER * (base == 0).sum()
        and luck(ranks == 0, base == 0) < CHANCE
        and luck(ranks < base, ranks > base) * len(tried) < CHANCE
    ]
    if not helping:
        return None
    best = max(helping, key=lambda index: right[index])
    alike = [index for index in helping if luck(tried[best][1] == 0, tried[index][1] == 0) > ALIKE]
    return min(alike, key=lambda index: (tried[index][0].wrong, -right[index]))


def luck(ours: NDArray[np.bool_], theirs: NDArray[np.bool_]) -> float:
    """The chance to be ahead so often, or more often, if neither is better: the sign test.

    Of the guesses that count for one of two readings only, each is as likely the one's as the other's.
    """
    won, lost = int((ours & ~theirs).sum()), int((theirs & ~ours).sum())
    return float(sum(comb(won + lost, k) for k in range(won, won + lost + 1)) / 2 ** (won + lost))


def below(right: int, count: int, share: float) -> bool:
    """True when so few right guesses are too few, at a level of 5 %, for a head that has this share of them right."""
    return sum(comb(count, k) * share**k * (1 - share) ** (count - k) for k in range(right + 1)) < 0.05
