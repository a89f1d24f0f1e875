"""Heads that come with the package, and which of them fits a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.core.errors import ModelError
from slipstream.models.files import read_json
from slipstream.models.heads import own
from slipstream.models.heads.config import HeadConfig
from slipstream.models.home import typed

if TYPE_CHECKING:
    from slipstream.models.files import ModelFile

FOLDER = Path(__file__).resolve().parents[2] / "data" / "heads"


def names() -> list[str]:
    """Names of the shipped heads."""
    return (
        sorted(place.name for place in FOLDER.iterdir() if (place / "config.json").exists()) if FOLDER.is_dir() else []
    )


def place_of(argument: str) -> Path:
    """The folder of a head: a path, or the name of a shipped one. Raises ModelError."""
    path = typed(argument)
    if not path.exists() and argument in names():
        return FOLDER / argument
    if not path.exists():
        known = f" (shipped heads: {', '.join(names())})" if names() else ""
        raise ModelError(f"{argument}: no such head; give the folder of one{known}")
    return path


def shipped_for(model: ModelFile) -> str | None:
    """The name of the shipped head made for this model, whatever its weight types; None when there is none."""
    config = model.config
    for name in names():
        table = read_json(FOLDER / name / "config.json")
        if not own.matches(table):
            continue
        head = HeadConfig.from_dict(table["head"], name)
        sizes = (head.target_hidden, head.vocab) == (config.hidden_size, config.vocab_size)
        if sizes and head.fingerprint == model.tokenizer().fingerprint():
            return name
    return None
