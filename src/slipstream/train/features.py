"""Hidden states of the target, kept on disk as halves: recorded while it writes answers, or computed afterwards.

A folder holds `features.f16` (rows of one token each) and `index.jsonl`, whose first line says of which weights and
layers they are; each further line says where a sequence of tokens begins. Data is on disk before its line is written,
so a run that is killed leaves nothing that is wrong.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from slipstream.core.errors import InputError, ModelError
from slipstream.core.types import Limit, Observation, Offers, Row
from slipstream.drafters.base import Drafter

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slipstream.targets.base import Target

DATA, INDEX = "features.f16", "index.jsonl"
LARGEST = float(np.finfo(np.float16).max)
REMEMBERED = 16
"""Answers that have ended and from whose cache rows later ones may be started; more than an engine keeps."""
SYNC_EVERY = 16
"""Sequences between two syncs to disk."""

Header = Mapping[str, Any]


def sequence_key(tokens: Sequence[int]) -> str:
    """What a sequence of tokens is known by."""
    return hashlib.sha256(np.asarray(tokens, np.int32).tobytes()).hexdigest()[:16]


class FeatureStore:
    """Features of whole sequences: float16 [tokens - 1, width] each, as the last token of an answer has none."""

    def __init__(self, folder: Path, header: Header, width: int) -> None:
        """Open or begin a folder. header: weights and layers. Raises InputError when the folder is of other ones."""
        self.folder, self.width = folder, width
        self._header = {"slipstream_features": 1, "width": width, **header}
        folder.mkdir(parents=True, exist_ok=True)
        self._places: dict[str, tuple[int, int]] = {}
        self._waiting: list[dict[str, Any]] = []
        self._read_index()
        self._data = (folder / DATA).open("ab")
        self._index = (folder / INDEX).open("a", encoding="utf-8")
        if self._index.tell() == 0:
            self._index.write(json.dumps(self._header) + "\n")
            self._sync()

    def _read_index(self) -> None:
        path = self.folder / INDEX
        whole = path.read_bytes() if path.exists() else b""
        keep = whole.rfind(b"\n") + 1
        if keep < len(whole):
            os.truncate(path, keep)
        lines = whole[:keep].decode().splitlines()
        if lines and json.loads(lines[0]) != self._header:
            raise InputError(f"{self.folder} holds features of other weights or layers; remove it, or name other data")
        for line in lines[1:]:
            entry = json.loads(line)
            self._places[entry["key"]] = (entry["start"], entry["length"])
        end = max((start + length for start, length in self._places.values()), default=0)
        data, bytes_each = self.folder / DATA, 2 * self.width
        size = data.stat().st_size if data.exists() else 0
        if size < end * bytes_each:
            raise ModelError(f"{data} is shorter than its index says; remove the folder and compute it again")
        if size > end * bytes_each:
            os.truncate(data, end * bytes_each)
        self._end = end

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def add(self, tokens: Sequence[int], features: NDArray[np.floating[Any]]) -> None:
        """Keep the features of a sequence, once."""
        key = sequence_key(tokens)
        if key in self._places:
            return
        if features.shape != (len(tokens) - 1, self.width):
            raise InputError(f"features are {list(features.shape)} for {len(tokens)} tokens of width {self.width}")
        self._keep(key, _halves(features))

    def _keep(self, key: str, features: NDArray[np.float16]) -> None:
        self._data.write(features.tobytes())
        entry = {"key": key, "start": self._end, "length": len(features)}
        self._places[key] = (self._end, len(features))
        self._end += len(features)
        self._waiting.append(entry)
        if len(self._waiting) >= SYNC_EVERY:
            self._sync()

    def _sync(self) -> None:
        self._data.flush()
        os.fsync(self._data.fileno())
        self._index.write("".join(json.dumps(entry) + "\n" for entry in self._waiting))
        self._index.flush()
        os.fsync(self._index.fileno())
        self._waiting = []

    def reader(self) -> Callable[[str], NDArray[np.float16]]:
        """A function from a key to its features, read from the mapped file when they are used."""
        self._sync()
        path = self.folder / DATA
        rows = np.memmap(path, np.float16, "r", shape=(self._end, self.width)) if self._end else None

        def read(key: str) -> NDArray[np.float16]:
            start, length = self._places[key]
            assert rows is not None
            return rows[start : start + length]

        return read

    def close(self) -> None:
        """Write what waits."""
        with self._data, self._index:
            self._sync()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(slots=True)
class _Recording:
    """Features of the first tokens of a row. tokens: the row's own list, which grows."""

    tokens: list[int]
    parts: list[NDArray[np.float16]]

    @property
    def length(self) -> int:
        return sum(map(len, self.parts))


class Recorder(Drafter):
    """A drafter that offers nothing and keeps the features of every answer; `drafters.base.ReadsFeatures`."""

    name = "recorder"

    def __init__(self, store: FeatureStore) -> None:
        self._store = store
        self._running: dict[int, _Recording] = {}
        self._ended: deque[_Recording] = deque(maxlen=REMEMBERED)
        self.failure: OSError | None = None
        """Why features could not be kept; an engine goes on without a drafter that raises, so it is said here."""

    def prefilled(self, row: Row, start: int, features: NDArray[np.float32]) -> None:
        """A part of the prompt; what lies before the first part is taken from the answer it was shared with."""
        recording = self._running.get(row.id)
        if recording is None:
            before = [] if start == 0 else self._beginning(row.tokens[:start])
            recording = self._running[row.id] = _Recording(row.tokens, before)
        if recording.length == start:
            recording.parts.append(_halves(features))

    def _beginning(self, tokens: list[int]) -> list[NDArray[np.float16]]:
        """Features of these tokens out of an answer that runs or has just ended; nothing when there is none."""
        size = len(tokens)
        for known in (*self._running.values(), *self._ended):
            if known.length >= size and known.tokens[:size] == tokens:
                return [np.concatenate(known.parts)[:size]]
        return []

    def begin(self, row: Row) -> None:
        """Nothing is to be done."""

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[Offers]:
        """Nothing."""
        return [Offers(self.name) for _ in rows]

    def observe(self, observations: Sequence[Observation]) -> None:
        """The anchor's features, and those of accepted nodes."""
        for seen in observations:
            if seen.features is not None and seen.row.id in self._running:
                kept = [0, *(node + 1 for node in seen.verdict.path)]
                self._running[seen.row.id].parts.append(_halves(np.asarray(seen.features)[kept]))

    def end(self, row: Row) -> None:
        """The answer is complete; where a part of its features was not seen, none are kept."""
        recording = self._running.pop(row.id, None)
        if recording is not None and recording.length == len(row.tokens) - 1:
            try:
                self._store.add(row.tokens, np.concatenate(recording.parts))
            except OSError as error:
                self.failure = error
            self._ended.append(recording)

    def forget(self) -> None:
        """Drop what ended."""
        self._ended.clear()

    def close(self) -> None:
        """The store is its opener's to close."""


def header_of(folder: Path) -> dict[str, Any]:
    """The first line of a folder's index; empty when there is none."""
    try:
        with (folder / INDEX).open(encoding="utf-8") as file:
            found = json.loads(file.readline())
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _halves(features: NDArray[np.floating[Any]]) -> NDArray[np.float16]:
    return np.clip(features, -LARGEST, LARGEST).astype(np.float16)


def compute_missing(
    store: FeatureStore,
    target: Target,
    sequences: Sequence[Sequence[int]],
    report: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Read the sequences that have no features yet through the target. Raises InputError without features at load."""
    missing = [tokens for tokens in sequences if sequence_key(tokens) not in store]
    slot = target.open()
    try:
        for done, tokens in enumerate(missing):
            report(done, len(missing))
            features = target.prefill(slot, list(tokens[:-1]))
            if features is None:
                raise InputError("the target was loaded without features; load it with the layers to read")
            store.add(tokens, np.asarray(features))
            target.truncate(slot, 0)
    finally:
        target.close(slot)
