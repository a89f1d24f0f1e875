"""Drafters by name: what `--draft` may say, and how its words become drafters. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.core.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    from slipstream.drafters.base import Drafter
    from slipstream.targets.base import Target

__all__ = ["AVAILABLE", "DraftSpec", "build", "drawing", "parse"]

AVAILABLE = ("none", "auto", "lookup", "suffix", "recycling", "model:NAME")
"""The words of a draft setting; all but the first may be combined by commas."""
RESERVED = ("lookahead", "corpus", "head")


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """One drafter asked for: its kind and, for a model, the model's name."""

    kind: str
    argument: str = ""


def parse(setting: str, draft_model: str | None = None) -> list[DraftSpec]:
    """The drafters that a setting such as "suffix,model:NAME" asks for; none of them is loaded yet.

    draft_model: the model that "auto" adds to suffix when one is given apart. Raises InputError for words that are
    unknown, doubled or without their name, UnsupportedError for reserved ones.
    """
    words = [word.strip() for word in setting.split(",")]
    specs: list[DraftSpec] = []
    for word in words:
        specs += _expand(word, draft_model)
    if "none" in words and len(words) > 1:
        raise InputError(f"draft is {setting!r}; none cannot be combined with other drafters")
    kinds = [spec.kind for spec in specs]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise InputError(f"draft is {setting!r}; it asks for {kind} twice")
    return specs


def _expand(word: str, draft_model: str | None) -> list[DraftSpec]:
    kind, colon, argument = word.partition(":")
    choose = f"choose from {', '.join(AVAILABLE)} (combine with commas)"
    if kind in RESERVED:
        raise UnsupportedError(f"drafter {word!r} is not available in this version; {choose}")
    if kind == "model":
        if not argument:
            raise InputError("draft 'model' needs the name of a model: model:NAME")
        return [DraftSpec("model", argument)]
    if colon or kind not in AVAILABLE:
        raise InputError(f"unknown drafter {word!r}; {choose}")
    if kind == "none":
        return []
    if kind == "auto":
        return [DraftSpec("suffix")] + ([DraftSpec("model", draft_model)] if draft_model else [])
    return [DraftSpec(kind)]


def drawing(specs: Sequence[DraftSpec], classical: bool) -> list[str]:
    """Names of the drafters whose tokens are random draws: models, when a classical rule verifies."""
    return [spec.kind for spec in specs if classical and spec.kind == "model"]


def build(
    specs: Sequence[DraftSpec], vocab_size: int, load_model: Callable[[str], Target], classical: bool = False
) -> list[Drafter]:
    """The drafters themselves. load_model: name to a target of the same vocabulary, which it must have checked.

    vocab_size: the target's. classical: models draw at random and report their distribution (for rejection, block).
    """
    made: list[Drafter] = []
    for spec in specs:
        if spec.kind == "lookup":
            from slipstream.drafters.lookup import Lookup

            made.append(Lookup())
        elif spec.kind == "suffix":
            from slipstream.drafters.suffix import Suffix

            made.append(Suffix())
        elif spec.kind == "recycling":
            from slipstream.drafters.recycling import Recycling

            made.append(Recycling(vocab_size))
        else:
            from slipstream.drafters.small_model import SmallModel

            made.append(SmallModel(load_model(spec.argument), vocab_size, classical))
    return made
