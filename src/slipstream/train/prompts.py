"""Varied prompts to train on, made from a small grammar of topics, tasks and materials that ships with the package."""

from __future__ import annotations

import random
import re
from functools import cache
from importlib.resources import files

from slipstream.core.errors import InputError

_SLOT = re.compile(r"\{(\w+)(?::(\w+))?\}")
_TRIES = 20
"""Attempts at a prompt that was not made before, for each one asked for."""

Grammar = dict[str, list[str]]


@cache
def grammar() -> tuple[Grammar, dict[str, float]]:
    """The lists by name, and the weights of those that prompts begin from. Raises InputError where it is wrong."""
    lists: Grammar = {}
    weights: dict[str, float] = {}
    current: list[str] = []
    for line in files("slipstream.train").joinpath("prompts.txt").read_text("utf-8").splitlines():
        if line.startswith("["):
            name, _, weight = line.strip("[]*").partition(" ")
            current = lists.setdefault(name, [])
            if weight:
                weights[name] = float(weight)
        elif line and not line.startswith("#"):
            current.append(line.replace("\\n", "\n"))
    missing = {slot for texts in lists.values() for text in texts for slot, _ in _SLOT.findall(text)} - set(lists)
    if missing:
        raise InputError(f"prompts.txt uses {', '.join(sorted(missing))} without a list of that name")
    return lists, weights


def make_prompts(count: int, seed: int = 0) -> list[str]:
    """Distinct prompts of all kinds, mixed by their weights. Raises InputError when the grammar has not that many."""
    lists, weights = grammar()
    chance = random.Random(seed)
    found: dict[str, None] = {}
    for _ in range(_TRIES * count):
        if len(found) >= count:
            break
        kind = chance.choices(list(weights), list(weights.values()))[0]
        found.setdefault(_expand(lists, kind, chance, {}, set()))
    if len(found) < count:
        raise InputError(f"the grammar made {len(found)} different prompts, not {count}; ask for fewer")
    return list(found)


def _expand(lists: Grammar, name: str, chance: random.Random, bound: dict[str, str], used: set[str]) -> str:
    """One alternative of a list, its slots filled; within a prompt none is used twice while there are others."""
    fresh = [text for text in lists[name] if text not in used] or lists[name]
    text = chance.choice(fresh)
    used.add(text)

    def fill(match: re.Match[str]) -> str:
        slot, label = match.groups()
        if label is None:
            return _expand(lists, slot, chance, bound, used)
        key = f"{slot}:{label}"
        if key not in bound:
            bound[key] = _expand(lists, slot, chance, bound, used)
        return bound[key]

    filled = _SLOT.sub(fill, text)
    return filled[:1].upper() + filled[1:] if name in _SENTENCES else filled


_SENTENCES = frozenset({"de", "fr", "es", "passage", "article"})
"""Lists whose members begin with a capital letter."""
