"""A corpus on disk: the texts of a file or folder as tokens, and their suffix array; made once, memory-mapped.

Each corpus has a folder under SLIPSTREAM_HOME/corpus, named after its path and the vocabulary. A list of its files says
whether it is still true; files that did not change are not tokenised again. A new index replaces the old one at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from slipstream.core.errors import InputError, ModelError
from slipstream.drafters.suffix_array import SuffixArray, suffix_array
from slipstream.models.home import home, locked, make_folder, typed
from slipstream.models.progress import progress_bar

FORMAT = 1
MOST_BYTES = 256 << 20
"""Text beyond this much is refused: the index takes about four times its size in memory while it is made."""
LARGEST_FILE = 8 << 20
"""Larger single files in a folder are data rather than text, and are left out."""
PIECE = 1 << 16
"""Characters tokenised at once; pieces end at line ends."""
HIDDEN = "."


class Encoder(Protocol):
    """What a tokenizer must do."""

    def encode_parts(self, parts: Sequence[tuple[str, bool]]) -> list[int]:
        """Ids of a text given as (stretch, parse control tokens in it)."""

    def fingerprint(self) -> str:
        """Equal for equal vocabularies."""


def open_corpus(path: str, tokenizer: Encoder, vocab_size: int) -> SuffixArray:
    """The suffix array of the texts under a path, made now if it is not there yet. Raises InputError for a bad path.

    vocab_size: ids below it are tokens; this id stands between files.
    """
    root = typed(path)
    files = list_files(root)
    identity = f"{FORMAT} {root.resolve()} {tokenizer.fingerprint()} {vocab_size}"
    name = hashlib.sha256(os.fsencode(identity)).hexdigest()[:24]  # names of files need not be text
    folder = home() / "corpus" / name
    try:
        with locked(f"corpus-{name}"):
            if manifest_of(folder)["files"] != files:
                build(root, files, folder, (tokenizer, vocab_size))
            return load(folder)
    except ModelError as error:
        raise InputError(str(error)) from None


def list_files(root: Path) -> dict[str, list[int]]:
    """Files of text under a path, by relative name: their size and time of change. Raises InputError without any."""
    found: dict[str, list[int]] = {}
    try:
        if not root.exists():
            raise InputError(f"corpus {root} does not exist; give a file or folder of text")
        for path in [root] if root.is_file() else sorted(_walk(root)):
            state = path.stat()
            if state.st_size and (path == root or state.st_size <= LARGEST_FILE):
                found[path.name if path == root else str(path.relative_to(root))] = [state.st_size, state.st_mtime_ns]
    except OSError as error:
        raise InputError(f"corpus {root} cannot be read: {error}") from None
    total = sum(size for size, _ in found.values())
    if not found:
        raise InputError(f"corpus {root} holds no text; give a file or folder of text")
    if total > MOST_BYTES:
        raise InputError(f"corpus {root} holds {total >> 20} MB; at most {MOST_BYTES >> 20} MB can be indexed")
    return found


def _walk(root: Path) -> Iterator[Path]:
    """Regular files, hidden ones and those in hidden folders left out."""
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if not name.startswith(HIDDEN)]
        yield from (Path(folder) / name for name in files if not name.startswith(HIDDEN) and _regular(folder, name))


def _regular(folder: str, name: str) -> bool:
    return os.path.isfile(os.path.join(folder, name))


def manifest_of(folder: Path) -> dict[str, dict[str, list[int]]]:
    """What an index says it holds; nothing when it is not there or not whole."""
    try:
        found: dict[str, dict[str, list[int]]] = json.loads((folder / "manifest.json").read_text())
        size = sum(count for _, count in found["spans"].values())
        whole = all((folder / name).stat().st_size == 4 * size for name in ("tokens.bin", "suffixes.bin"))
        return found if whole and set(found["files"]) == set(found["spans"]) else {"files": {}, "spans": {}}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {"files": {}, "spans": {}}


def build(root: Path, files: dict[str, list[int]], folder: Path, vocabulary: tuple[Encoder, int]) -> None:
    """Make the index in a folder beside its place, and move it there."""
    tokenizer, separator = vocabulary
    known = manifest_of(folder)
    old = np.fromfile(folder / "tokens.bin", ">u4").astype(np.uint32) if known["files"] else np.zeros(0, np.uint32)
    total, done = sum(size for size, _ in files.values()), 0
    parts: list[NDArray[np.uint32]] = []
    spans: dict[str, list[int]] = {}
    start = 0
    with progress_bar(f"reading {root.name}", total) as show:
        for name, state in files.items():
            if known["files"].get(name) == state:
                first, count = known["spans"][name]
                part = old[first : first + count]
            else:
                part = tokens_of(root if root.is_file() else root / name, tokenizer, separator)
            parts.append(part)
            spans[name] = [start, len(part)]
            start += len(part)
            done += state[0]
            show(done)
    tokens = np.concatenate(parts)
    if not len(tokens):
        raise InputError(f"corpus {root} holds no text; give a file or folder of text")
    write(folder, {"files": files, "spans": spans}, tokens, suffix_array(tokens))


def write(
    folder: Path, manifest: dict[str, dict[str, list[int]]], tokens: NDArray[np.uint32], places: NDArray[np.int32]
) -> None:
    """Put a complete index in its place."""
    aside = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    make_folder(aside)
    try:
        tokens.astype(">u4").tofile(aside / "tokens.bin")
        places.astype("<i4").tofile(aside / "suffixes.bin")
        (aside / "manifest.json").write_text(json.dumps(manifest))
        shutil.rmtree(folder, ignore_errors=True)
        aside.replace(folder)
    except OSError as error:
        raise ModelError(
            f"{aside}: cannot be written ({error.strerror or error}); make room or set SLIPSTREAM_HOME"
        ) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def load(folder: Path) -> SuffixArray:
    """A written index, memory-mapped."""
    words = np.memmap(folder / "tokens.bin", ">u4", "r")
    return SuffixArray(words, np.memmap(folder / "suffixes.bin", "<i4", "r"))


def tokens_of(path: Path, tokenizer: Encoder, separator: int) -> NDArray[np.uint32]:
    """Tokens of one file and a separator; nothing for a file that is not UTF-8 text."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(f"corpus file {path} cannot be read: {error.strerror or error}") from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        return np.zeros(0, np.uint32)
    if "\0" in text:
        return np.zeros(0, np.uint32)
    ids: list[int] = []
    for piece in _pieces(text):
        ids += tokenizer.encode_parts([(piece, False)])
    return np.array([*ids, separator], np.uint32)


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = len(text) if len(text) - start <= PIECE else text.rfind("\n", start, start + PIECE) + 1
        end = end if end > start else start + PIECE
        yield text[start:end]
        start = end
