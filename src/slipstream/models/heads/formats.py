"""The formats of heads by name: which one a folder is in, reading it, writing it whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream.core.errors import InputError, ModelError
from slipstream.models.files import read_json
from slipstream.models.heads import eagle, medusa, own, speculators
from slipstream.models.heads.head import Head
from slipstream.models.heads.layout import KEY, PROVENANCE, Rows, Written, inner
from slipstream.models.heads.weights import FILES, PICKLED, Weights, read_safetensors, read_weights, write_safetensors
from slipstream.models.home import typed
from slipstream.models.safetensors_file import SINGLE, SafetensorsFile

FORMATS = ("slipstream", "speculators", "eagle3", "medusa")
"""The formats that are written. EAGLE-1/2 and SpecForge are read as well."""
EXTRA = "slipstream.extra"
"""Tensors that only slipstream reads, beside those of a foreign format; safetensors under a name others pass over."""


def read_head(path: str | Path) -> Head:
    """The head in a folder, checked against its own settings. Raises ModelError or UnsupportedError."""
    folder = typed(path)
    if folder.is_file():
        folder = folder.parent
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder; a head is a folder with config.json and its weights")
    table = read_json(folder / "config.json", remedy="a head is a folder with config.json and its weights")
    weights = read_weights(folder)
    extra = read_safetensors(folder / EXTRA) if (folder / EXTRA).exists() else Weights({}, {})
    head = _read(table, weights, extra, str(folder))
    head.check(str(folder))
    return head


def _read(table: Mapping[str, Any], weights: Weights, extra: Weights, source: str) -> Head:
    if own.matches(table):
        head = own.read(table, weights, source)
        return replace(head, format="slipstream", provenance=dict(inner(table, PROVENANCE, source)))
    if speculators.matches(table):
        head = replace(speculators.read(table, weights, extra, source), format="speculators")
    elif medusa.matches(table, weights.names()):
        head = replace(medusa.read(table, weights, source), format="medusa")
    elif eagle.matches(weights.names()):
        head = eagle.read(table, weights, extra, source)
        head = replace(head, format=head.config.kind)
    else:
        shown = ", ".join(weights.names()[:4])
        raise ModelError(f"{source}: is no EAGLE, EAGLE-3 or Medusa head (it holds tensors {shown}, ...)")
    return replace(head, provenance=dict(inner(inner(table, KEY, source), PROVENANCE, source)))


def is_head(path: str | Path) -> bool:
    """True for a folder that holds a head and no model, as far as settings and names of tensors tell; reads little."""
    folder = typed(path)
    if not (folder / "config.json").is_file():
        return False
    table = read_json(folder / "config.json")
    if own.matches(table) or speculators.matches(table):
        return True
    files = [folder / name for name in FILES if (folder / name).is_file()]
    names = [name for file in files for name in SafetensorsFile(file).tensors]
    if medusa.matches(table, names) or eagle.matches(names):
        return True
    # Of a pickled head nothing is seen without torch; unlike models, heads come without a tokenizer.
    pickled = not files and any((folder / name).is_file() for name in PICKLED)
    return pickled and not list(folder.glob("tokenizer*"))


def write_head(
    path: str | Path,
    head: Head,
    format_name: str = "slipstream",
    rows: Rows | None = None,
    provenance: Mapping[str, Any] | None = None,
    check: Callable[[Head], None] | None = None,
) -> list[str]:
    """Write a head as a new folder and return what its user should know; on any failure nothing is left behind.

    rows: the target's LM head, needed where a format must hold rows that this head takes from it. provenance: joins
    that of the head. check: looks at what is read back, and raises when it is not right. Raises InputError for an
    unknown format or a folder that is there, ModelError otherwise.
    """
    if format_name not in FORMATS:
        raise InputError(f"format is {format_name!r}; choose one of {', '.join(FORMATS)}")
    facts = {**head.provenance, **(provenance or {})}
    if format_name == "slipstream":
        written = own.write(head, facts)
    elif format_name == "medusa":
        written = medusa.write(head)
    else:
        written = (speculators if format_name == "speculators" else eagle).write(head, rows)
    if format_name != "slipstream" and facts:
        written.config[KEY][PROVENANCE] = facts
    with new_folder(typed(path)) as folder:
        _save(folder, written, medusa.FILE if format_name == "medusa" else SINGLE)
        if check is not None:
            check(read_head(folder))
    return written.notices


def _save(folder: Path, written: Written, name: str) -> None:
    (folder / "config.json").write_text(json.dumps(written.config, indent=2) + "\n", encoding="utf-8")
    write_safetensors(folder / name, written.values, written.numbers)
    if written.extra:
        write_safetensors(folder / EXTRA, written.extra, {})


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder that becomes `path` when all went well and is gone otherwise. Raises InputError, ModelError."""
    if path.exists():
        raise InputError(f"{path} is there already; name a new folder or remove it first")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise ModelError(f"{path}: cannot be written ({error.strerror or error})") from None
    try:
        yield made
        made.chmod(0o755)
        os.replace(made, path)
    except OSError as error:
        raise ModelError(f"{path}: cannot be written ({error.strerror or error})") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)
