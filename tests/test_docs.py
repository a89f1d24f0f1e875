"""The documents against the code: tests, commands, options, settings and files that they name exist."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import typer.main

from slipstream.cli import bench, chat, convert, generate, info, serve, train  # noqa: F401  they add their commands
from slipstream.cli.app import app
from slipstream.core.errors import TORCH, WITH_TORCH, install_hint
from slipstream.core.stats import Speculation

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TESTS = {
    name
    for path in (ROOT / "tests").glob("test_*.py")
    for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
}
COMMANDS = typer.main.get_command(app).commands


def fault_rows() -> dict[int, set[str]]:
    """Tests named in each row of the table of fault kinds."""
    lines = (ROOT / "docs" / "testing.md").read_text().splitlines()
    found = [re.match(r"\| (\d+) \|", line) for line in lines]
    return {int(row[1]): set(re.findall(r"test_fault_\w+", row.string)) for row in found if row}


def test_every_test_that_is_named_exists():
    text = (ROOT / "docs" / "testing.md").read_text()
    files = {path.stem for path in (ROOT / "tests").glob("*.py")}
    assert set(re.findall(r"\btest_\w+", text)) - {"test_fault_NN"} - TESTS - files == set()


def test_every_planted_fault_is_listed():
    listed = (ROOT / "docs" / "testing.md").read_text().partition("## Planted faults")[2]
    assert sorted(name for name in TESTS if name.startswith("test_planted_") and f"`{name}`" not in listed) == []


def test_tests_of_fault_kinds_are_in_the_files_that_are_named():
    text = (ROOT / "docs" / "testing.md").read_text()
    named = re.findall(r"(test_\w+\.py): (`test_\w+`(?:, `test_\w+`)*)", text)
    assert len(named) > 26
    for file, names in named:
        source = (ROOT / "tests" / file).read_text()
        assert [name for name in re.findall(r"\w+", names) if f"def {name}(" not in source] == [], file


def test_every_fault_kind_lists_its_tests():
    rows = fault_rows()
    assert sorted(rows) == list(range(1, 27))
    for name in filter(lambda name: name.startswith("test_fault_"), TESTS):
        for kind in re.findall(r"_(\d\d)(?=_)", name):
            assert name in rows[int(kind)], f"docs/testing.md: put {name} into row {int(kind)}"


def test_statistics_are_those_that_are_reported():
    text = (ROOT / "docs" / "statistics.md").read_text()
    rows = "".join(line.split("|")[1] for line in text.partition("Tokens before")[0].splitlines() if line[:3] == "| `")
    assert set(re.findall(r"`(\w+)`", rows)) == set(Speculation().as_dict())


def test_every_setting_is_described():
    source = "".join(file.read_text() for file in (ROOT / "src").rglob("*.py"))
    text = "".join(path.read_text() for path in DOCUMENTS)
    assert set(re.findall(r"SLIPSTREAM_[A-Z]+", source)) <= set(re.findall(r"SLIPSTREAM_[A-Z]+", text))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_options_and_settings_exist(path):
    text = path.read_text().replace(TORCH, "")  # the option in it is pip's
    single = [one for command in COMMANDS.values() for one in getattr(command, "commands", {"": command}).values()]
    parameters = [parameter for command in single for parameter in command.params]
    known = {option for parameter in parameters for option in (*parameter.opts, *parameter.secondary_opts)}
    scripts = "".join(script.read_text() for script in (ROOT / "bench").glob("*.py") if script.name in text)
    known |= set(re.findall(r'add_argument\("(--[a-z-]+)"', scripts))
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)) <= known
    commands = re.findall(r"(?:^|`)slipstream ([a-z]+)", text, re.M)
    assert set(commands) <= set(COMMANDS)
    source = "".join(file.read_text() for file in (ROOT / "src").rglob("*.py"))
    source += (ROOT / "tests" / "test_identity.py").read_text()
    assert [name for name in re.findall(r"SLIPSTREAM_[A-Z]+", text) if name not in source] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(path):
    folders = [ROOT / name for name in ("src", "csrc", "tests", "bench", "docs")]
    places = [place for folder in folders for place in (folder, *folder.rglob("*"))]
    for name in re.findall(r"`([\w./*]+\.(?:py|h|cpp)|[\w./]+/)`", path.read_text()):
        assert any(fnmatch(f"/{place.relative_to(ROOT)}", f"*/{name.rstrip('/')}") for place in places), name


def test_the_core_is_described_file_by_file():
    text = (ROOT / "csrc" / "README.md").read_text()
    named = re.findall(r"`([\w./*]+)`", "".join(line for line in text.splitlines() if line.startswith("| `")))
    files = {path for path in (ROOT / "csrc").rglob("*.*") if path.suffix in (".h", ".cpp")}
    described = {path for name in named for path in (ROOT / "csrc").glob(name)}
    assert sorted(path.name for path in files - described) == []
    assert [name for name in named if not list((ROOT / "csrc").glob(name)) and "." in name] == []


def test_extras_that_are_named_exist_and_those_with_torch_say_which_build():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    files = [*DOCUMENTS, ROOT / "Makefile", *(ROOT / "src").rglob("*.py")]
    named = re.findall(
        r"(?:'\.|slipstream)\[(\w[\w,]*)\]|install_hint\(['\"](\w+)", "".join(map(Path.read_text, files))
    )
    assert {"serve", "train"} <= {extra for pair in named for extra in "".join(pair).split(",")} <= set(extras)
    torch = {name for name, needs in extras.items() if any(need.startswith("torch") for need in needs)}
    assert torch - {"reference"} == set(WITH_TORCH)
    assert TORCH.split()[0] in extras["reference"]
    command = f"{shlex.quote(sys.executable)} -m pip install"
    assert install_hint("serve") == f"{command} 'slipstream[serve]'"
    assert install_hint("train").startswith(f"{command} 'slipstream[train]' {TORCH}")


def test_measured_tables_are_those_of_the_results():
    path = ROOT / "bench" / "tables.py"
    tables = runpy.run_path(str(path))
    for page in tables["PAGES"]:
        text = page.read_text()
        assert "<!-- results: " in text
        assert tables["filled"](text) == text, "python bench/tables.py"
