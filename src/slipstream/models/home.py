"""Where fetched models live on this machine, and the lock that keeps two pulls apart."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.core.errors import ModelError


def home() -> Path:
    """SLIPSTREAM_HOME, or ~/.cache/slipstream."""
    chosen = os.environ.get("SLIPSTREAM_HOME")
    return typed(chosen) if chosen else Path.home() / ".cache" / "slipstream"


def typed(path: str | Path) -> Path:
    """A path as somebody typed it, ~ included; the home of a user who is not known here stays as it was typed."""
    return Path(os.path.expanduser(path))


def models_folder() -> Path:
    """Complete models, one folder each; nothing half-written ever lies here."""
    return home() / "models"


def partial_folder() -> Path:
    """Downloads that have begun."""
    return home() / "partial"


def make_folder(path: Path) -> Path:
    """The folder, made when absent. Raises ModelError naming SLIPSTREAM_HOME."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(
            f"{path}: cannot be made ({error.strerror or error}); set SLIPSTREAM_HOME to a folder you can write to"
        ) from None
    return path


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the lock of that name; waits while another process holds it, and frees it when the process dies."""
    path = make_folder(home() / "locks") / f"{name}.lock"
    with path.open("a+b") as file:
        _lock(file.fileno())
        try:
            yield
        finally:
            _unlock(file.fileno())


if os.name == "nt":  # pragma: no cover - not run on the machines the suite runs on
    import msvcrt
    import time

    def _lock(descriptor: int) -> None:
        while True:
            try:
                os.lseek(descriptor, 0, os.SEEK_SET)
                msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
                return
            except OSError:
                time.sleep(0.2)

    def _unlock(descriptor: int) -> None:
        os.lseek(descriptor, 0, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)  # type: ignore[attr-defined,unused-ignore]

else:
    import fcntl

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)

    def _unlock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
