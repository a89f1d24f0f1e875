"""Drafters by name: what `--draft` may say, and how its words become drafters. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slipstream.core.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from slipstream.drafters.base import Drafter
    from slipstream.models.tokenizer import Tokenizer
    from slipstream.targets.base import Target

__all__ = ["AVAILABLE", "DraftSpec", "Materials", "build", "drawing", "ordered", "parse"]

AVAILABLE = ("none", "auto", "lookup", "suffix", "recycling", "lookahead", "corpus:PATH", "model:NAME", "head:PATH")
"""The words of a draft setting; all but the first may be combined by commas."""
LAST = ("head", "model")
"""Drafters that take time: asked when it is known what the others offer, in this order."""
WITH_ARGUMENT = {
    "model": "the name of a model: model:NAME",
    "corpus": "a file or folder: corpus:PATH",
    "head": "the folder of a trained head: head:PATH",
}


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """One drafter asked for: its kind and, where it takes one, its argument: a model's name, a path."""

    kind: str
    argument: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.argument}" if self.argument else self.kind


def parse(setting: str, draft_model: str | None = None) -> list[DraftSpec]:
    """The drafters that a setting such as "suffix,model:NAME" asks for; none of them is loaded yet.

    "auto" is suffix and recycling, and draft_model when one is given. Raises InputError for words that are unknown,
    doubled or without their name.
    """
    if not isinstance(setting, str):
        raise InputError(f"draft is {setting!r}; it must be a text such as 'auto', 'none' or 'suffix,model:NAME'")
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
    return ordered(specs)


def ordered(specs: Sequence[DraftSpec]) -> list[DraftSpec]:
    """Those that take time behind the others."""
    return sorted(specs, key=lambda spec: LAST.index(spec.kind) if spec.kind in LAST else -1)


def _expand(word: str, draft_model: str | None) -> list[DraftSpec]:
    kind, colon, argument = word.partition(":")
    choose = f"choose from {', '.join(AVAILABLE)} (combine with commas)"
    if kind in WITH_ARGUMENT:
        if not argument:
            raise InputError(f"draft {kind!r} needs {WITH_ARGUMENT[kind]}")
        return [DraftSpec(kind, argument)]
    if colon or kind not in AVAILABLE:
        raise InputError(f"unknown drafter {word!r}; {choose}")
    if kind == "none":
        return []
    if kind == "auto":
        model = [DraftSpec("model", draft_model)] if draft_model else []
        return [DraftSpec("suffix"), DraftSpec("recycling"), *model]
    return [DraftSpec(kind)]


def drawing(specs: Sequence[DraftSpec], classical: bool) -> list[str]:
    """Names of the drafters whose tokens are random draws: models, when a classical rule verifies."""
    return [spec.kind for spec in specs if classical and spec.kind == "model"]


@dataclass(frozen=True, slots=True)
class Materials:
    """What drafters are made of.

    vocab_size: the target's. load_model: name to a loaded model. classical: models draw at random and report their
    distribution (for rejection, block). tokenizer: the target's, for drafters that read text. foreign: tokenizers of
    the draft models whose vocabulary differs, by name. recycling_table: file in which recycling keeps its table.
    load_head: path to a drafter over the head there.
    """

    vocab_size: int
    load_model: Callable[[str], Target]
    classical: bool = False
    tokenizer: Tokenizer | None = None
    foreign: Mapping[str, Tokenizer] = field(default_factory=dict)
    recycling_table: str | Path | None = None
    load_head: Callable[[str], Drafter] | None = None


def build(specs: Sequence[DraftSpec], given: Materials) -> list[Drafter]:
    """The drafters themselves, and before them the one that spells out what grammars force.

    Raises InputError when a file or folder they need is not what it should be.
    """
    from slipstream.drafters.forced import Forced

    made = [_MAKERS[spec.kind](spec.argument, given) for spec in specs]
    # Random draws are verified alone.
    return [Forced(), *made] if made and not drawing(specs, given.classical) else made


def _lookup(_: str, given: Materials) -> Drafter:
    from slipstream.drafters.lookup import Lookup

    return Lookup()


def _suffix(_: str, given: Materials) -> Drafter:
    from slipstream.drafters.suffix import Suffix

    return Suffix()


def _recycling(_: str, given: Materials) -> Drafter:
    from slipstream.drafters.recycling import Recycling

    if given.recycling_table is None or given.tokenizer is None:
        return Recycling(given.vocab_size)
    from pathlib import Path

    return Recycling(given.vocab_size, Path(given.recycling_table), given.tokenizer.fingerprint())


def _lookahead(_: str, given: Materials) -> Drafter:
    from slipstream.drafters.lookahead import Lookahead

    return Lookahead()


def _corpus(path: str, given: Materials) -> Drafter:
    from slipstream.drafters.corpus import Corpus
    from slipstream.drafters.corpus_store import open_corpus

    if given.tokenizer is None:
        raise InputError(f"draft 'corpus:{path}' needs the target's tokenizer")
    return Corpus(open_corpus(path, given.tokenizer, given.vocab_size), given.vocab_size)


def _model(name: str, given: Materials) -> Drafter:
    if name in given.foreign and given.tokenizer is not None:
        from slipstream.drafters.translated import Translated

        return Translated(given.load_model(name), given.vocab_size, given.tokenizer, given.foreign[name])
    from slipstream.drafters.small_model import SmallModel

    return SmallModel(given.load_model(name), given.vocab_size, given.classical)


def _head(path: str, given: Materials) -> Drafter:
    if given.load_head is None:
        raise InputError(f"draft 'head:{path}' needs a target that gives its hidden states")
    return given.load_head(path)


_MAKERS: dict[str, Callable[[str, Materials], Drafter]] = {
    "lookup": _lookup,
    "suffix": _suffix,
    "recycling": _recycling,
    "lookahead": _lookahead,
    "corpus": _corpus,
    "model": _model,
    "head": _head,
}
