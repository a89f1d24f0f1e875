"""Models from the Hugging Face hub, by `org/name` or, for one file of a GGUF repository, `org/name:file.gguf`."""

from __future__ import annotations

import os
import re
import shutil
import socket
import warnings
from pathlib import Path
from urllib.parse import urlsplit

from slipstream.core.errors import ModelError
from slipstream.models.home import locked, make_folder, models_folder, partial_folder

_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<file>[\w][\w./-]*\.gguf))?")
_FOLDER_FILES = [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "special_tokens_map.json", "*.safetensors", "model.safetensors.index.json", "LICENSE*",
]  # fmt: skip


def is_hub_id(text: str) -> bool:
    """True for `org/name` and `org/name:file.gguf`."""
    return _ID.fullmatch(text) is not None


def hub_folder(hub_id: str) -> Path:
    """Where that model lies when it is complete: one folder a repository and file."""
    return models_folder() / re.sub(r"[/:]", "--", hub_id)


def fetch_hub(hub_id: str) -> Path:
    """Fetch the files a model needs and return their folder. Raises ModelError, one line, also without a network."""
    match = _ID.fullmatch(hub_id)
    if match is None:
        raise ModelError(f"{hub_id!r} is no hub id; write org/name or org/name:file.gguf")
    place = hub_folder(hub_id)
    with locked(place.name):
        if place.is_dir():
            return place
        _check_network(hub_id)
        partial = make_folder(partial_folder() / place.name)
        _download(match["repo"], match["file"], partial)
        shutil.rmtree(partial / ".cache", ignore_errors=True)
        make_folder(place.parent)
        os.replace(partial, place)
    return place


def _check_network(hub_id: str) -> None:
    """The client itself retries for half a minute before it says that a name cannot be resolved."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    host = urlsplit(endpoint).hostname or endpoint
    try:
        socket.getaddrinfo(host, 443)
    except OSError as error:
        raise ModelError(
            f"{hub_id}: {host} cannot be reached ({error.strerror or error}); check the network, or give a local path"
        ) from None


def _download(repo: str, file: str | None, folder: Path) -> None:
    from huggingface_hub import HfApi, snapshot_download

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            names = HfApi().list_repo_files(repo)
            patterns = _choose(repo, file, names)
            snapshot_download(repo, local_dir=folder, allow_patterns=patterns)
    except ModelError:
        raise
    except Exception as error:  # the client raises many kinds, among them those of its HTTP library
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise ModelError(f"{repo}: cannot be fetched from the hub ({reason}); check the name and the network") from None


def _choose(repo: str, file: str | None, names: list[str]) -> list[str]:
    """The files to fetch: the named one, a folder with safetensors, or the only GGUF file."""
    ggufs = [name for name in names if name.endswith(".gguf")]
    if file is not None:
        if file not in names:
            raise ModelError(f"{repo} holds no {file}; it holds {', '.join(ggufs) or 'no GGUF file'}")
        return [file]
    if "config.json" in names and any(name.endswith(".safetensors") for name in names):
        return _FOLDER_FILES
    if len(ggufs) == 1:
        return ggufs
    if ggufs:
        raise ModelError(f"{repo} holds {len(ggufs)} GGUF files; name one: {repo}:{ggufs[0]} ({', '.join(ggufs[:12])})")
    raise ModelError(f"{repo} holds neither safetensors nor GGUF files, which are the formats that are read")
