"""From the folder of a head to a drafter: read, checked against the target, packed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.drafters.heads.eagle import Eagle
from slipstream.drafters.heads.medusa import Medusa
from slipstream.drafters.heads.parts import TargetParts, parts_of, parts_of_torch
from slipstream.models.heads.check import fitted
from slipstream.models.heads.formats import read_head
from slipstream.models.heads.shipped import place_of
from slipstream.targets.native.load import ARCHITECTURES

if TYPE_CHECKING:
    from slipstream.models.files import ModelFile
    from slipstream.models.heads.head import Head
    from slipstream.targets.base import Target


def open_head(argument: str, model: ModelFile) -> Head:
    """The head that `head:ARGUMENT` names, as it fits this model. Raises ModelError or UnsupportedError."""
    return fitted(
        read_head(place_of(argument)), model.config, model.tokenizer().fingerprint(), f"head {argument}", model.name
    )


def parts_for(target: Target, model: ModelFile) -> TargetParts:
    """What heads take from a loaded target: from its file where it is of the Llama family."""
    loaded: Any = getattr(target, "model", None)
    if loaded is not None and model.config.architecture not in ARCHITECTURES:
        return parts_of_torch(loaded)
    return parts_of(model)


def make_drafter(head: Head, parts: TargetParts, vocab_size: int, max_context: int) -> Eagle | Medusa:
    """A drafter over a head that fits its target."""
    if head.config.kind == "medusa":
        return Medusa(head, parts, vocab_size)
    return Eagle(head, parts, vocab_size, max_context)
